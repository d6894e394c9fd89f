// The live board: reads /v1/stats once a second while the page is visible, and shows what happened between two readings.

import { count, element, percent, svg } from "./dom.js";

const PHASES = ["schedule_s", "draft_s", "target_s", "rule_s", "commit_s", "observe_s", "emit_s"];

function delta(before, now, name) {
  return Math.max(0, (now[name] || 0) - (before[name] || 0));
}

function deltas(before = {}, now = {}) {
  return Object.fromEntries(Object.keys(now).map((name) => [name, delta(before, now, name)]));
}

// Figures of the time between two readings of /v1/stats.
function figuresOf(before, now) {
  const [a, b] = [before.engine, now.engine];
  const seconds = now.time_s - before.time_s;
  const emitted = delta(a, b, "num_emitted");
  const steps = delta(a, b, "num_steps");
  const rounds = Math.max(0, emitted - delta(a, b, "num_accepted")); // a round emits one token that was not drafted
  const drafted = deltas(a.drafted_by, b.drafted_by);
  const accepted = deltas(a.accepted_by, b.accepted_by);
  return {
    tokensPerSecond: seconds > 0 ? emitted / seconds : 0,
    emitted,
    batch: steps ? rounds / steps : 0,
    perStep: rounds ? emitted / rounds : 0,
    drafters: Object.entries(drafted)
      .filter(([, count]) => count > 0)
      .map(([name, count]) => ({ name, drafted: count, accepted: accepted[name] || 0 })),
    phases: PHASES.map((name) => ({ name: name.slice(0, -2), seconds: delta(a, b, name) })),
    draftingShare: rounds ? Math.min(1, delta(a, b, "num_drafts") / rounds) : 0,
    draftLength: delta(a, b, "num_drafts") ? delta(a, b, "num_drafted") / delta(a, b, "num_drafts") : 0,
    wastedShare: share(delta(a, b, "wasted_s"), delta(a, b, "draft_s") + delta(a, b, "verify_s")),
    failures: Object.entries(deltas(a.draft_failures, b.draft_failures)).filter(([, count]) => count > 0),
    speedup: b.estimated_speedup,
    positions: positionsOf(a.accepted_per_position, b.accepted_per_position),
  };
}

function share(part, whole) {
  return whole > 0 ? part / whole : 0;
}

function positionsOf(before = [], now = []) {
  return now
    .map(([drafted, accepted], place) => {
      const [d, k] = before[place] || [0, 0];
      return { place: place + 1, drafted: drafted - d, accepted: accepted - k };
    })
    .filter(({ drafted }) => drafted > 0);
}

// What the controller chose in that time, and the figures that it goes by, in words.
function choiceOf(figures) {
  if (!figures.emitted) return ["Nothing was decoded.", ""];
  const failed = figures.failures.map(([name, count]) => `${name} failed ${count} times. `).join("");
  const pay = figures.speedup ? `Measured so far: ${figures.speedup.toFixed(2)}x the speed of plain decoding.` : "The gain of drafts is not measured yet.";
  if (!figures.drafters.length)
    return ["Plain decoding: no round had a draft.", `${failed}The requests asked for none, or no draft was expected to pay. ${pay}`];
  const names = figures.drafters.map(({ name, drafted }) => `${name} (${drafted} tokens)`).join(", ");
  const [drafted, accepted] = figures.drafters.reduce(([d, k], one) => [d + one.drafted, k + one.accepted], [0, 0]);
  return [
    `${Math.round(100 * figures.draftingShare)} % of rounds with a draft of ${figures.draftLength.toFixed(1)} tokens: ${names}.`,
    `${failed}${Math.round((100 * accepted) / drafted)} % of drafted tokens were accepted, ${figures.perStep.toFixed(2)} tokens came from a round of a request, ${Math.round(100 * figures.wastedShare)} % of the time went into rejected ones. ${pay}`,
  ];
}

// Acceptance by day as the page shows it: series that fell first, then those with most requests.
function seriesOf({ series }) {
  const weight = (one) => (one.has_fallen ? Infinity : one.days.reduce((sum, day) => sum + day.requests, 0));
  return [...series]
    .sort((a, b) => (weight(a) === weight(b) ? 0 : weight(b) - weight(a)))
    .slice(0, 4)
    .map((one) => ({
      name: one.slice ? `${one.drafter}, ${one.slice}` : one.drafter,
      rates: one.days.map((day) => day.rate ?? 0),
      hasFallen: one.has_fallen,
      words: one.has_fallen ? `fell on ${one.fell_on}; ${one.cause}.` : dailyWords(one),
    }));
}

function dailyWords({ before, after, place }) {
  if (before === null || after === null) return "no verdict yet, it needs more than a week.";
  return `no drop; token ${place} ${Math.round(100 * after)} % in the last week, ${Math.round(100 * before)} % before.`;
}

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
