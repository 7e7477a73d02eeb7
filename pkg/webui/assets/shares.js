// The tenants that share the cluster: what they had in the last hour, and a table.
import { Areas } from "./chart.js";
import { amount, h, number, setText, svg } from "./dom.js";
import { matches, terms } from "./model.js";
import { List, amountColumn, showAmounts } from "./tables.js";

const most = 7; // Tenants with an area of their own; style.css has a colour for each.

/** nameOf returns the name of a tenant. Namespaces without the label that names the tenant are one too. */
const nameOf = (tenant) => tenant || "<none>";

const columns = [
  { key: "name", title: "Tenant", value: (t) => t.name, cell: (t) => [h("i", { class: t.tone }), nameOf(t.name)] },
  { key: "weight", title: "Weight", class: "right", down: true, value: (t) => t.weight },
  amountColumn("guaranteed", "Guaranteed"),
  amountColumn("share", "Share"),
  amountColumn("allocated", "Allocated"),
  amountColumn("waiting", "Waiting"),
  { key: "pods", title: "Pods waiting", class: "right", down: true, value: (t) => t.waitingPods },
  { key: "reason", title: "Its next pod", class: "wide", value: (t) => t.reason },
];

export class Shares extends List {
  constructor(root, changed) {
    const reading = h("span", { class: "reading" });
    const chart = svg("svg", { class: "areas", tabindex: 0, role: "img", preserveAspectRatio: "none" });
    const legend = h("p", { class: "key" });
    root.append(h("section", { class: "history" }, h("h2", {}, "Allocated memory, last hour ", reading), chart, legend));
    super(root, "Tenants", columns, "name", changed);
    this.legend = legend;
    this.history = new Areas(chart, reading, (s) => this.words(s));
  }

  show(model, { q }) {
    this.unit = model.sums().unit;
    this.showHistory(model);
    const wanted = terms(q);
    const found = model.tenants.filter((t) => matches((nameOf(t.name) + "\n" + t.reason).toLowerCase(), wanted));
    for (const t of found) {
      t.tone = this.tones.get(t.name) ?? "out";
      showAmounts(t, ["guaranteed", "share", "allocated", "waiting"], (n) => amount(n, this.unit?.name));
    }
    return super.show(found, model.time);
  }

  /** showHistory draws the areas of the tenants that had or deserved most, by name, and one of all others. */
  showHistory(model) {
    const last = model.samples.at(-1);
    if (this.last === last && this.length === model.samples.length) return;
    this.last = last;
    this.length = model.samples.length;
    const samples = model.samples.filter((s) => s.shares).map((s) => ({ ...s, tenants: new Map(s.shares.tenants.map((t) => [t.name, t])) }));
    const size = new Map();
    for (const { tenants } of samples) {
      for (const [name, { allocated, share }] of tenants) size.set(name, (size.get(name) ?? 0) + Math.max(allocated, share));
    }
    const names = [...size.keys()].sort((a, b) => size.get(b) - size.get(a)).slice(0, most).sort();
    this.tones = new Map(names.map((name, i) => [name, "t" + i]));
    const of = (name, what) => ({ tenants }) => tenants.get(name)?.[what] ?? 0;
    const rest = ({ shares, tenants }) => [...tenants].reduce((all, [name, { allocated }]) => (this.tones.has(name) ? all : all + allocated), shares.others);
    const layers = names.map((name) => ({ class: this.tones.get(name), value: of(name, "allocated") }));
    const others = samples.some((s) => rest(s) > 0);
    if (others) layers.push({ class: "out", value: rest });
    const lines = names.map((_, i) => (s) => names.slice(0, i + 1).reduce((all, name) => all + of(name, "share")(s), 0));
    const highest = (s) => Math.max(this.unit ? s.total / this.unit.mib : 0, layers.reduce((all, layer) => all + layer.value(s), 0), lines.at(-1)?.(s) ?? 0);
    this.history.draw(samples, model.sampleEvery, layers, lines, highest);
    this.rest = rest;
    this.legend.replaceChildren(...names.map((name) => h("span", { class: this.tones.get(name) }, nameOf(name))),
      others ? h("span", { class: "out" }, "others") : "", h("span", { class: "dashed" }, "where the areas end if each tenant has its share"));
    if (samples.length) {
      this.history.root.setAttribute("aria-label", "Allocated memory of each tenant over the last hour. Now " + this.words(samples.at(-1)) + ". Arrow keys read earlier values");
    }
  }

  /** words returns what the tenants had. */
  words(sample) {
    const texts = [...this.tones.keys()].filter((name) => sample.tenants.has(name)).map((name) => {
      const { allocated, share } = sample.tenants.get(name);
      return nameOf(name) + " " + amount(allocated, this.unit?.name) + " of its share of " + number(share);
    });
    const rest = this.rest(sample);
    if (rest) texts.push("others " + amount(rest, this.unit?.name));
    return texts.join(", ") || "nothing";
  }
}
