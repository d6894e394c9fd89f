// The strip below an answer: a column for each step of the target, a cell for each token that it emitted, and above
// them an empty cell for each draft token that was rejected.

import { svg } from "./dom.js";

const MIN_COLUMNS = 48;
const MIN_CELLS = 6;

export class StepStrip {
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
