// The charts of the last hour: areas on each other.
import { age, byId, clock, plural, setText, sum, svg } from "./dom.js";

const hour = 3600; // Seconds.

/** Areas draws samples, each with its time in Unix seconds. */
export class Areas {
  /** words(sample) describes a sample; it is shown in the element reading for the one at which a reader points. */
  constructor(root, reading, words) {
    Object.assign(this, { root, reading, words, areas: [] });
    this.line = svg("path", { class: "line-of-shares" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: 100 });
    root.setAttribute("viewBox", "0 0 " + hour + " 100");
    root.append(this.line, this.cursor);
    this.at = undefined; // The index of the selected sample.
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      this.read(this.nearest(this.from + ((event.clientX - box.left) / box.width) * this.span));
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

  /**
   * draw draws the samples, which were taken that often. layers are the areas from the bottom on: a class, and value(sample). lines are
   * functions of a sample for lines of their own. Nothing is above top(sample).
   */
  draw(samples, every, layers, lines, top) {
    this.samples = samples;
    while (this.areas.length > layers.length) this.areas.pop().remove();
    while (this.areas.length < layers.length) {
      this.areas.push(svg("path", {}));
      this.root.insertBefore(this.areas.at(-1), this.line);
    }
    const now = samples.at(-1)?.time ?? 0;
    // As long as there is no hour of samples, the chart shows what there is, and a single one as wide as two.
    this.span = Math.min(hour, Math.max(every, now - (samples[0]?.time ?? now)));
    this.from = now - this.span;
    const highest = this.highest = Math.max(1, ...samples.map(top));
    const y = (value) => (100 - (96 * value) / highest).toFixed(2);
    const x = (s) => this.x(s);
    // Nothing is drawn for times without the extender: one area per run of samples.
    const runs = [];
    let before = -Infinity;
    for (const s of samples) {
      if (s.time - before > 6 * every) runs.push([]);
      runs.at(-1).push(s);
      before = s.time;
    }
    for (const run of runs) {
      if (run.length > 1) continue;
      run.unshift({ ...run[0], time: run[0].time - every });
    }
    const path = (run, value) => run.map((s) => x(s) + "," + y(value(s))).join("L");
    const sum = (n) => (s) => layers.slice(0, n).reduce((all, layer) => all + layer.value(s), 0);
    layers.forEach((layer, i) => {
      this.areas[i].setAttribute("class", layer.class);
      this.areas[i].setAttribute("d", runs.map((run) => "M" + path(run, sum(i + 1)) + "L" + path(run.toReversed(), sum(i)) + "Z").join(""));
    });
    this.line.setAttribute("d", lines.flatMap((line) => runs.map((run) => "M" + path(run, line))).join(""));
    this.read(this.at);
  }

  /** x returns where a sample is in the picture, which is an hour wide. */
  x(s) {
    return ((s.time - this.from) * hour) / this.span;
  }

  nearest(time) {
    let best;
    this.samples?.forEach((s, i) => {
      if (best === undefined || Math.abs(s.time - time) < Math.abs(this.samples[best].time - time)) best = i;
    });
    return best;
  }

  read(index) {
    this.at = index;
    const s = index === undefined ? undefined : this.samples?.[index];
    this.cursor.classList.toggle("on", Boolean(s));
    if (s) {
      this.cursor.setAttribute("x1", this.x(s));
      this.cursor.setAttribute("x2", this.x(s));
    }
    setText(this.reading, s ? clock(s.time * 1000) + ": " + this.words(s) : "");
  }
}

/** FreeMemory is the chart of the free memory: on partly used cards and on unused cards. */
export class FreeMemory extends Areas {
  constructor(root) {
    super(root, byId("chart-reading"), (s) => sum(s.whole + s.pieces, this.unit) + " free, " + sum(s.pieces, this.unit) + " of it in pieces, " + plural(s.pending, "pod", "pods") + " pending");
  }

  show(model) {
    this.unit = model.sums().unit;
    const last = model.samples.at(-1);
    if (this.drawn === last && this.length === model.samples.length) return;
    this.drawn = last;
    this.length = model.samples.length;
    this.draw(model.samples, model.sampleEvery, [{ class: "whole", value: (s) => s.whole }, { class: "pieces", value: (s) => s.pieces }], [], (s) => s.total);
    if (!last) return;
    this.root.setAttribute("aria-label", "Free memory over the last hour. Now " + this.words(last) + ". Arrow keys read earlier values");
    setText(byId("chart-since"), "last " + age((this.span + model.sampleEvery) * 1000) + (this.highest > 1 ? ", up to " + sum(this.highest, this.unit) : ""));
    byId("chart-since").title = "kept since " + clock(model.status.since) + ", lost when the extender restarts";
  }
}
