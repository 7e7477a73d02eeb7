// The details of one card.
import { amount, h } from "./dom.js";
import { bar, kind, problem, tone } from "./cards.js";

export class Details {
  /** search(text) searches the table of pods. closed(place) is called with the card when the details are closed. */
  constructor(root, search, closed) {
    Object.assign(this, { root, search, closed });
    addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  open(node, card, model) {
    this.place = { node, card };
    this.drawn = undefined;
    this.show(model);
    this.root.querySelector("button").focus();
  }

  close() {
    if (!this.place) return;
    const place = this.place;
    this.place = undefined;
    this.root.hidden = true;
    this.closed(place);
  }

  show(model) {
    if (!this.place) return;
    const node = model.nodes.get(this.place.node);
    const card = node?.cards.find((c) => c.id === this.place.card);
    if (this.drawn === (card ?? null) && card) return;
    this.drawn = card ?? null;
    const focused = this.root.contains(document.activeElement);
    const close = h("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
    close.addEventListener("click", () => this.close());
    const title = h("h2", { id: "details-title" }, this.place.node + " · GPU " + this.place.card);
    this.root.hidden = false;
    if (!card) {
      this.root.replaceChildren(close, title, h("p", { class: "warn" }, "This card is gone."));
      if (focused) close.focus();
      return;
    }
    const wrong = problem(node, card);
    const facts = [["Model", card.model], ["UUID", card.uuid], ["Unit", node.unit || "not reported by the node"],
      ["Allocated", amount(card.used, "") + " of " + amount(card.total, node.unit)], ["Free", wrong && !card.vanished && card.unhealthy ? "nothing, while it is unhealthy" : amount(Math.max(0, card.total - card.used), node.unit)]];
    const pods = card.pods.map((pod) => {
      const find = h("button", { type: "button", class: "link", "aria-label": "Find " + pod.namespace + "/" + pod.name + " in the table" }, pod.namespace + "/" + pod.name);
      find.addEventListener("click", () => this.search(pod.namespace + "/" + pod.name));
      return h("li", {}, h("i", { class: tone(pod) }), h("span", {}, find, pod.state ? h("small", { class: "warn" }, " " + pod.state) : ""), h("span", {}, amount(pod.memory, node.unit)));
    });
    this.root.replaceChildren(close, title,
      wrong ? h("p", { class: "warn" }, "⚠ " + wrong) : "",
      h("div", { class: kind(node, card) }, bar(card)),
      h("dl", {}, ...facts.filter(([, value]) => value).flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])),
      h("h3", {}, card.pods.length ? "Pods" : "No pods"), h("ul", {}, ...pods));
    if (focused) close.focus();
  }
}
