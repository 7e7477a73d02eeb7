// The cluster's sums at the top of the page.
import { byId, h, number, plural, setText, share, sum } from "./dom.js";
import { reported } from "./model.js";

const parts = ["allocated", "pieces", "whole", "out"];

export class Summary {
  constructor() {
    this.bar = byId("memory-bar");
    this.parts = Object.fromEntries(parts.map((name) => [name, h("span", { class: name })]));
    this.bar.append(...parts.map((name) => this.parts[name]));
  }

  show(model) {
    const s = model.sums();
    const percent = s.total ? Math.floor((100 * s.allocated) / s.total) : 0;
    setText(byId("memory-percent"), s.total ? percent + "%" : "–");
    setText(byId("memory-amount"), s.total ? share(s.allocated, s.total, s.unit) : "");
    for (const name of parts) this.parts[name].style.width = s.total ? (100 * s[name]) / Math.max(s.total, s.allocated + s.pieces + s.whole + s.out) + "%" : "0";
    this.bar.setAttribute("aria-label", s.total
      ? sum(s.allocated, s.unit) + " allocated, " + sum(s.pieces, s.unit) + " free on cards in use, " + sum(s.whole, s.unit) + " free in whole cards, " + sum(s.out, s.unit) + " out of use"
      : "no cards");
    setText(byId("largest"), !model.known ? "–" : s.where ? sum(s.largest, s.where.node.unit ? { name: s.where.node.unit, mib: s.where.node.unitMiB } : null) : "none");
    setText(byId("largest-where"), !model.known ? "" : s.where ? "on " + s.where.node.name + ", GPU " + s.where.card.id : s.cards ? "no card has anything free" : "");
    setText(byId("stranded"), s.stranded ? sum(s.stranded, s.unit) + " free (" + Math.round((100 * s.stranded) / s.total) + "% of all), of no use: nodes lack CPU or node memory" : "");
    setText(byId("cards-count"), model.known ? number(s.cards) : "–");
    setText(byId("cards-note"), !model.known ? "" : plural(s.nodes, "node", "nodes") + " · " + plural(s.pods, "pod", "pods") + (s.simulated ? " · " + number(s.simulated) + " simulated" : ""));
    const wrong = [];
    if (s.ill) wrong.push(number(s.ill) + " unhealthy");
    if (s.over) wrong.push(number(s.over) + " overfull");
    if (s.wrong) wrong.push(plural(s.wrong, "node has a problem", "nodes have problems"));
    if (s.units.size > 1) wrong.push("nodes have different units");
    wrong.push(...reported(s.reports));
    setText(byId("cards-problems"), wrong.join(" · "));
    setText(byId("count-pods"), model.known ? number(s.pods) : "");
    setText(byId("count-pending"), !model.known ? "" : number(model.pending.length) + (model.problems.length ? " ⚠" : ""));
    byId("count-pending").classList.toggle("some", model.pending.length + model.problems.length > 0);
    setText(byId("count-shares"), model.tenants ? number(model.tenants.length) : "");
    setText(byId("count-groups"), model.status.noGroups || !model.known ? "" : number(model.runs.length));
  }
}
