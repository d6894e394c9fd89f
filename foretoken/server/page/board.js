// The live board: reads /v1/stats once a second while the page is visible, and shows what happened in between.

import { count, element, percent, svg } from "./dom.js";
import { choiceOf, figuresOf, seriesOf } from "./figures.js";

const EVERY_MS = 1000;
const WINDOW = 10; // readings that acceptance, phases and choices are taken over
const HISTORY = 60; // readings of the curve
const DAYS_EVERY = 600; // readings between two of acceptance by day, which the server renews as often

export class Board {
  constructor(root, state, read, readDays) {
    this.root = root;
    this.state = state;
    this.read = read; // reads /v1/stats
    this.readDays = readDays; // reads /v1/acceptance
    this.days = [];
    this.untilDays = 0;
    this.readings = [];
    this.speeds = [];
    this.groups = {};
  }

  async run() {
    for (;;) {
      if (!document.hidden) await this.once();
      await new Promise((wake) => setTimeout(wake, EVERY_MS));
    }
  }

  async once() {
    try {
      const now = await this.read();
      this.say(now.state);
      if (!now.engine) return;
      if (this.readings.length && now.engine.num_steps < this.readings.at(-1).engine.num_steps) this.readings = []; // restarted
      this.readings = [...this.readings, now].slice(-WINDOW - 1);
      this.groups = now.groups;
      if (this.untilDays-- <= 0) {
        this.untilDays = DAYS_EVERY;
        this.days = seriesOf(await this.readDays());
      }
      if (this.readings.length > 1) this.show(now);
    } catch (error) {
      this.say(error.status === 401 ? "needs the key" : "no connection");
    }
  }

  say(words) {
    if (this.state.textContent !== words) this.state.textContent = words;
  }

  show(now) {
    const last = figuresOf(this.readings.at(-2), now);
    const window_ = figuresOf(this.readings[0], now);
    this.speeds = [...this.speeds, last.tokensPerSecond].slice(-HISTORY);
    const [chosen, why] = choiceOf(window_);
    this.root.replaceChildren(
      element("div", { class: "big", id: "speed" }, `${last.tokensPerSecond.toFixed(1)} tokens/s`),
      curve(this.speeds),
      tiles([
        ["running", count(now.engine.num_running)],
        ["waiting", count(now.engine.num_waiting)],
        ["batch", window_.batch.toFixed(1)],
        ["finished", count(now.engine.num_finished)],
        ["cancelled", count(now.engine.num_aborted)],
        ["failed", count(now.engine.num_failed)],
      ]),
      group("Controller", [element("p", { class: "why", id: "chosen" }, chosen), element("p", { class: "why hint" }, why)]),
      group("Accepted, by drafter", this.drafters(window_)),
      group("Time, by phase", phases(window_)),
      group("Accepted, by position in the draft", positions(window_)),
      group("Cache", caches(now.engine)),
      ...(this.days.length ? [group("Accepted, by day", this.days.flatMap(daily))] : []),
    );
  }

  drafters({ drafters }) {
    return drafters.map(({ name, drafted, accepted }) =>
      bar(name, accepted / drafted, `${count(accepted)} / ${count(drafted)}`, this.groups[name]),
    );
  }
}

function group(title, lines) {
  const shown = lines.length ? lines : [element("p", { class: "hint" }, "nothing in the last 10 s")];
  return element("section", {}, element("h3", {}, title), ...shown);
}

function bar(name, share, words, kind = "") {
  const fill = element("span", { class: `fill ${kind}` });
  fill.style.width = `${Math.min(100, 100 * share)}%`;
  const track = element("span", { class: "track", "aria-hidden": "true" }, fill);
  return element("div", { class: "bar" }, element("span", {}, name), track, element("span", {}, words));
}

function caches(engine) {
  const shown = [["target", engine.kv_cache_usage], ["draft", engine.draft_kv_cache_usage]];
  return shown.filter(([, share]) => typeof share === "number").map(([name, share]) => bar(name, share, percent(share)));
}

function positions({ positions: found }) {
  return found.slice(0, 8).map(({ place, drafted, accepted }) => bar(`token ${place}`, accepted / drafted, percent(accepted / drafted)));
}

function daily({ name, rates, words, hasFallen }) {
  const points = rates.map((rate, place) => `${place} ${(40 - 40 * rate).toFixed(1)}`);
  const label = `${name}: accepted of drafted tokens by day, from 0 to 100 %`;
  const box = { class: "spark", viewBox: `0 0 ${Math.max(1, rates.length - 1)} 40`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  const line = element("p", { class: hasFallen ? "why" : "why hint" }, `${name}: ${words}`);
  return rates.length > 1 ? [line, svg("svg", box, svg("path", { d: `M${points.join(" L")}` }))] : [line];
}

function phases({ phases: found }) {
  const whole = found.reduce((sum, { seconds }) => sum + seconds, 0);
  return whole > 0 ? found.map(({ name, seconds }) => bar(name, seconds / whole, percent(seconds / whole))) : [];
}

function tiles(pairs) {
  const made = pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element("dl", { class: "tiles" }, ...made);
}

function curve(speeds) {
  const most = Math.max(1, ...speeds);
  const pitch = (HISTORY - 1) / Math.max(1, speeds.length - 1);
  const points = speeds.map((speed, place) => `${(place * pitch).toFixed(1)} ${(38 - (36 * speed) / most).toFixed(1)}`);
  const label = `Tokens per second over the last minute, at most ${most.toFixed(0)}`;
  const box = { class: "spark", viewBox: `0 0 ${HISTORY - 1} 40`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", box, svg("path", { d: `M${points.join(" L")}` }));
}
