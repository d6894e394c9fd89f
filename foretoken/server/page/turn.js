// One turn: what was asked, and its answer, or its plain and speculative answers side by side.

import { AnswerPane } from "./answer.js";
import { element } from "./dom.js";
import { events, request } from "./stream.js";

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
    return this.panes.at(-1).text;
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

  compare(together) {
    const [plain, speculative] = this.panes;
    const ratio = plain.pane.rate > 0 ? speculative.pane.rate / plain.pane.rate : 0;
    const same = plain.text === speculative.text ? "The two texts are the same." : "The two texts differ.";
    const speed = element("b", {}, `${ratio.toFixed(2)}x`);
    const shared = together ? " Both ran in one batch, so each slowed the other down." : "";
    this.verdict.replaceChildren("Speculative ran at ", speed, ` the speed of plain. ${same}${shared}`);
  }
}

// Waits for all, then raises the first error: an answer that fails leaves the other alone.
async function settled(promises) {
  const failed = (await Promise.allSettled(promises)).find(({ status }) => status === "rejected");
  if (failed) throw failed.reason;
}
