// One turn: what was asked, and its answer, or its plain and speculative answers side by side. An answer shows coloured
// text as it streams, its speed, its steps, and what one token is.

import { element, percent, svg } from "./dom.js";
import { events, request } from "./stream.js";
import { Speller, classOf, describe, reasonWords } from "./tokens.js";

// The strip below the text: a column for each step of the target, a cell for each token that it emitted, and above them
// an empty cell for each draft token that was rejected.
const MIN_COLUMNS = 48;
const MIN_CELLS = 6;

class StepStrip {
  constructor() {
    this.picture = svg("svg", { class: "steps", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.heights = []; // cells by step
    this.fit();
  }

  // A step with the classes of its cells, from below.
  add(names) {
    const x = this.heights.length + 0.1;
    names.forEach((name, place) => {
      this.picture.append(svg("rect", { class: `cell ${name}`, x, y: -place - 0.9, width: 0.8, height: 0.82 }));
    });
    this.heights.push(names.length);
  }

  fit() {
    const width = Math.max(MIN_COLUMNS, this.heights.length);
    const height = Math.max(MIN_CELLS, ...this.heights);
    this.picture.setAttribute("viewBox", `0 ${-height} ${width} ${height}`);
  }
}

class AnswerPane {
  constructor(title, groups) {
    this.groups = groups;
    this.speller = new Speller();
    this.strip = new StepStrip();
    this.spans = new Map(); // token -> its last span
    this.tokens = []; // those that have a span, in order
    this.counts = { tokens: 0, accepted: 0, steps: 0, drafted: 0, why: new Map() };
    this.firstAt = this.lastAt = null;
    this.current = -1;
    this.rate = 0;
    this.build(title);
  }

  build(title) {
    this.speed = element("span", { class: "speed" }, "waiting");
    this.text = element("div", {
      class: "answer", tabindex: "0", role: "group", "aria-live": "polite", "aria-busy": "true",
      "aria-label": `${title} answer. Left and right arrow keys go from token to token.`,
    });
    this.detail = element("p", { class: "detail", role: "status" });
    const head = element("div", { class: "row" }, element("h2", {}, title), this.speed);
    this.root = element("article", { class: "pane", "aria-label": `${title} decoding` }, head, this.text, this.strip.picture, this.detail);
    this.text.addEventListener("pointerover", (event) => this.point(event.target));
    this.text.addEventListener("click", (event) => this.point(event.target));
    this.text.addEventListener("pointerleave", () => this.show(-1));
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.text.addEventListener("blur", () => this.show(-1));
  }

  // Takes in the text that a chunk adds and the steps that wrote it.
  add(text, steps) {
    const atEnd = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 40;
    const tokens = steps.flatMap((step) => this.count(step));
    for (const [token, part] of this.speller.take(text, tokens)) this.write(token, part);
    if (tokens.length) this.time(tokens.length);
    this.strip.fit();
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  // Counts a step; its tokens, which know it.
  count(step) {
    const tokens = step.emitted.map((token) => ({ ...token, step: step.step, of: step }));
    const drafted = (step.drafts || []).reduce((sum, draft) => sum + draft.ids.length, 0);
    const accepted = tokens.filter((token) => token.kind === "accepted").length;
    const { counts } = this;
    counts.steps += 1;
    counts.tokens += tokens.length;
    counts.accepted += accepted;
    counts.drafted += drafted;
    if (step.why && step.why !== "off_request") {
      const words = reasonWords(step.why);
      counts.why.set(words, (counts.why.get(words) || 0) + 1);
    }
    this.strip.add([...tokens.map((token) => classOf(token, this.groups)), ...Array(Math.max(0, drafted - accepted)).fill("rejected")]);
    return tokens;
  }

  write(token, part) {
    if (!token) {
      this.text.append(part); // a server that reports no tokens
      return;
    }
    const known = this.spans.get(token);
    if (known) {
      known.firstChild.data += part;
      return;
    }
    const span = element("span", { class: `tok ${classOf(token, this.groups)}` }, part);
    this.spans.set(token, span);
    this.tokens.push(token);
    this.text.append(span);
  }

  // Tokens per second after the first ones, which waited for the prompt.
  time(count) {
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.late = -count;
    }
    this.late += count;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    this.rate = seconds > 0 ? this.late / seconds : 0;
    this.speed.textContent = this.rate ? `${this.rate.toFixed(1)} tokens/s` : "…";
  }

  // The answer is over; `speed` is the server's measure of it, 0 without one.
  end(reason, speed) {
    this.text.setAttribute("aria-busy", "false");
    const { tokens, accepted, steps, drafted, why } = this.counts;
    if (speed) this.rate = speed;
    this.speed.textContent = this.rate ? `${this.rate.toFixed(1)} tokens/s` : "ended";
    const parts = [`${tokens} tokens in ${steps} steps`];
    if (drafted) parts.push(`${accepted} of ${drafted} draft tokens accepted (${percent(accepted / drafted)})`);
    const reasons = [...why].sort((a, b) => b[1] - a[1]).slice(0, 3);
    if (reasons.length) parts.push(`why not more: ${reasons.map(([words, times]) => `${words} (${times})`).join(", ")}`);
    if (reason) parts.push(`ended: ${reason}`);
    this.summary = parts.join(" · ");
    if (this.current < 0) this.detail.textContent = this.summary;
  }

  point(target) {
    const span = target.closest ? target.closest(".tok") : null;
    if (span) this.show(this.tokens.findIndex((token) => this.spans.get(token) === span));
  }

  key(event) {
    const last = this.tokens.length - 1;
    const places = { ArrowRight: Math.min(last, this.current + 1), ArrowLeft: Math.max(0, this.current - 1), Home: 0, End: last };
    if (event.key in places && last >= 0 && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.show(places[event.key]);
      this.spans.get(this.tokens[this.current]).scrollIntoView({ block: "nearest" });
    }
  }

  show(place) {
    if (this.current >= 0) this.spans.get(this.tokens[this.current]).classList.remove("current");
    this.current = place;
    if (place < 0) {
      this.detail.textContent = this.summary || "";
      return;
    }
    const token = this.tokens[place];
    this.spans.get(token).classList.add("current");
    this.detail.textContent = describe(token, this.groups);
  }
}

const TITLES = { plain: "Plain", speculative: "Speculative" };

// The steps that a chunk reports, each with what was drafted and what was emitted.
function stepsOf(chunk) {
  return (chunk.foretoken && chunk.foretoken.trace) || [];
}

function textOf(choice) {
  return choice.delta ? choice.delta.content || "" : choice.text || "";
}

// The server's own measure of an answer's speed, in the shape of vLLM or of llama.cpp; 0 in other chunks.
function speedOf(chunk) {
  const metrics = chunk.metrics || ((chunk.choices || [])[0] || {}).metrics;
  return (metrics && metrics.tokens_per_second) || (chunk.timings && chunk.timings.predicted_per_second) || 0;
}

export class Turn {
  constructor(asked, modes, groups) {
    this.panes = modes.map((mode) => ({ mode, pane: new AnswerPane(TITLES[mode], groups), text: "" }));
    this.verdict = element("p", { class: "verdict", role: "status" });
    const panes = element("div", { class: "panes" }, ...this.panes.map(({ pane }) => pane.root));
    const question = element("div", { class: "asked", tabindex: "0", role: "group", "aria-label": "Prompt of this turn" }, asked);
    this.root = element("section", { class: "turn", "aria-label": "Turn" }, question, panes, this.verdict);
  }

  get answer() {
    return (this.panes.findLast(({ text }) => text) || { text: "" }).text;
  }

  // Runs all answers; `bodyOf` gives the request of a mode.
  async run(bodyOf, path, { key, signal, together }) {
    const runs = this.panes.map((one) => () => this.one(one, bodyOf(one.mode), path, key, signal));
    if (together) await settled(runs.map((run) => run()));
    else for (const run of runs) await run();
    if (this.panes.length > 1) this.compare(together);
  }

  async one(one, body, path, key, signal) {
    let reason = "";
    let speed = 0;
    one.pane.speed.textContent = "…";
    try {
      const response = await request(path, { key, body, signal });
      for await (const chunk of events(response)) {
        let steps = stepsOf(chunk);
        for (const choice of chunk.choices || []) {
          const text = textOf(choice);
          one.text += text;
          if (text || steps.length) one.pane.add(text, steps);
          steps = [];
          reason = choice.finish_reason || reason;
        }
        speed = speedOf(chunk) || speed;
      }
      one.pane.end(reason, speed);
    } catch (error) {
      one.pane.end(error.name === "AbortError" ? "stopped" : "error", speed);
      throw error;
    }
  }

  // The speed of a single token would be that of its prompt, which the second answer finds in the cache.
  compare(together) {
    const [plain, speculative] = this.panes;
    const same = plain.text === speculative.text ? "The two texts are the same." : "The two texts differ.";
    if (this.panes.some(({ pane }) => pane.counts.tokens === 1 || !pane.rate)) {
      this.verdict.replaceChildren("The answers are too short to compare their speeds. ", same);
      return;
    }
    const speed = element("b", {}, `${(speculative.pane.rate / plain.pane.rate).toFixed(2)}x`);
    const shared = together ? " Both ran in one batch, so each slowed the other down." : "";
    this.verdict.replaceChildren("Speculative ran at ", speed, ` the speed of plain. ${same}${shared}`);
  }
}

// Waits for all, then raises the first error: an answer that fails leaves the other alone.
async function settled(promises) {
  const failed = (await Promise.allSettled(promises)).find(({ status }) => status === "rejected");
  if (failed) throw failed.reason;
}
