// Free memory over the last hour: on partly used cards and on unused cards.
import { byId, clock, plural, setText, sum, svg } from "./dom.js";

const hour = 3600;

export class Chart {
  constructor(root) {
    this.root = root;
    this.whole = svg("path", { class: "whole" });
    this.pieces = svg("path", { class: "pieces" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: 100 });
    root.setAttribute("viewBox", "0 0 " + hour + " 100");
    root.append(this.pieces, this.whole, this.cursor);
    this.at = undefined; // The index of the selected sample.
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      this.read(this.nearest(this.from + ((event.clientX - box.left) / box.width) * hour));
    });
    root.addEventListener("pointerleave", () => this.read(undefined));
    root.addEventListener("blur", () => this.read(undefined));
    root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !this.samples?.length) return;
      event.preventDefault();
      const last = this.samples.length - 1;
      this.read(Math.min(last, Math.max(0, (this.at ?? last) + step)));
    });
  }

  show(model) {
    this.samples = model.samples;
    this.unit = model.sums().unit;
    if (this.drawn === model.samples.at(-1) && this.length === model.samples.length) return;
    this.drawn = model.samples.at(-1);
    this.length = model.samples.length;
    if (!this.drawn) {
      this.whole.setAttribute("d", "");
      this.pieces.setAttribute("d", "");
      return;
    }
    const now = this.drawn[0];
    this.from = now - hour;
    const top = Math.max(1, ...model.samples.map((s) => s[1]));
    const y = (value) => (100 - (96 * value) / top).toFixed(2);
    // Nothing is drawn for times without the extender: one area per run of samples.
    const runs = [];
    let before = -Infinity;
    for (const s of model.samples) {
      if (s[0] - before > 6 * model.sampleEvery) runs.push([]);
      runs.at(-1).push(s);
      before = s[0];
    }
    const area = (upper, lower) => runs.map((run) => {
      const x = (s) => s[0] - this.from;
      const from = run.length === 1 ? [[...run[0]]] : [];
      if (from.length) from[0][0] -= model.sampleEvery;
      const all = [...from, ...run];
      return "M" + all.map((s) => x(s) + "," + y(upper(s))).join("L") + "L" + all.toReversed().map((s) => x(s) + "," + y(lower(s))).join("L") + "Z";
    }).join("");
    this.pieces.setAttribute("d", area((s) => s[3] + s[4], (s) => s[3]));
    this.whole.setAttribute("d", area((s) => s[3], () => 0));
    this.root.setAttribute("aria-label", "Free memory over the last hour. Now " + this.words(this.drawn) + ". Arrow keys read earlier values");
    setText(byId("chart-since"), "kept since " + clock(model.status.since) + ", lost when the extender restarts");
    this.read(this.at);
  }

  words(s) {
    return sum(s[3] + s[4], this.unit) + " free, " + sum(s[4], this.unit) + " of it in pieces, " + plural(s[5], "pod", "pods") + " pending";
  }

  nearest(time) {
    let best;
    this.samples?.forEach((s, i) => {
      if (best === undefined || Math.abs(s[0] - time) < Math.abs(this.samples[best][0] - time)) best = i;
    });
    return best;
  }

  read(index) {
    this.at = index;
    const s = index === undefined ? undefined : this.samples?.[index];
    this.cursor.classList.toggle("on", Boolean(s));
    if (s) {
      this.cursor.setAttribute("x1", s[0] - this.from);
      this.cursor.setAttribute("x2", s[0] - this.from);
    }
    setText(byId("chart-reading"), s ? clock(s[0] * 1000) + ": " + this.words(s) : "");
  }
}
