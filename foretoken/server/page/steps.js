// The strip below an answer: a column for each step of the target, a cell for each token that it emitted.

import { svg } from "./dom.js";

const LEAST_COLUMNS = 48;
const LEAST_CELLS = 6;

export class StepStrip {
  constructor() {
    this.picture = svg("svg", { class: "steps", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.heights = []; // tokens by step
    this.known = null; // number of the last step
    this.fit();
  }

  add(step, name) {
    if (step !== this.known) {
      this.heights.push(0);
      this.known = step;
    }
    const height = ++this.heights[this.heights.length - 1];
    const place = { x: this.heights.length - 0.9, y: 0.12 - height, width: 0.8, height: 0.82 };
    this.picture.append(svg("rect", { class: `cell ${name}`, ...place }));
  }

  fit() {
    const width = Math.max(LEAST_COLUMNS, this.heights.length);
    const height = Math.max(LEAST_CELLS, ...this.heights);
    this.picture.setAttribute("viewBox", `0 ${-height} ${width} ${height}`);
  }
}
