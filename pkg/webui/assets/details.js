// The box at the side: the details of a card, or the explanation of a cause.
import { help } from "./causes.js";
import { amount, h, number, part } from "./dom.js";
import { bar, cores, kind, notes, problem, tone } from "./cards.js";

export class Details {
  /** search(text) searches the table of pods. close() is called when the reader closes the box. */
  constructor(root, search, close) {
    Object.assign(this, { root, search, close });
    addEventListener("keydown", (event) => event.key === "Escape" && !root.hidden && close());
  }

  focus() {
    this.root.querySelector("button")?.focus();
  }

  /** show draws what the address asks for: a card as "node/id", or the help for a cause or phase. */
  show(model, state) {
    const shown = state.card ? this.card(model, state.card) : state.help && model.known ? [state.help, () => this.help(model, state.help)] : undefined;
    this.root.hidden = !shown;
    const [what, content] = shown ?? [];
    if (what === this.drawn) return;
    this.drawn = what;
    if (!shown) return this.root.replaceChildren();
    const focused = this.root.contains(document.activeElement);
    const close = h("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
    close.addEventListener("click", () => this.close());
    const [title, ...rest] = content();
    this.root.replaceChildren(close, h("h2", { id: "details-title" }, title), ...rest);
    if (focused) close.focus();
  }

  /** card returns the card, or its place if it is gone, and a function that returns the box's content. */
  card(model, place) {
    const at = place.lastIndexOf("/");
    const node = model.nodes.get(place.slice(0, at));
    const card = node?.cards.find((c) => c.id === Number(place.slice(at + 1)));
    const title = place.slice(0, at) + " · GPU " + place.slice(at + 1);
    if (card) return [card, () => [title, ...this.facts(node, card)]];
    if (!model.known) return undefined;
    return [place, () => [title, h("p", { class: "warn" }, "This card is gone.")]];
  }

  facts(node, card) {
    const wrong = problem(node, card);
    const facts = [["Model", card.model], ["Simulated", node.simulated ? "yes, for a trial: no container can compute on it" : ""], ["UUID", card.uuid], ["RDMA adapters", (card.rdmaPorts ?? "").replaceAll(",", ", ")], ["Unit", node.unit || "not reported by the node"],
      ["Allocated", number(card.used) + " of " + amount(card.total, node.unit)],
      ["Free", wrong && !card.vanished && card.unhealthy ? "nothing, while it is unhealthy" : amount(Math.max(0, card.total - card.used), node.unit)],
      ["On the node", node.stranded?.text],
      ["Cores", card.usedCores ? cores(node, card) + ", " + (node.coresEnforced ? "enforced by " + node.isolation : "not enforced") : cores(node, card)]];
    const pods = card.pods.map((pod) => {
      const find = h("button", { type: "button", class: "link", "aria-label": "Find " + pod.namespace + "/" + pod.name + " in the table" }, pod.namespace + "/" + pod.name);
      find.addEventListener("click", () => this.search(pod.namespace + "/" + pod.name));
      return h("li", {}, h("i", { class: tone(pod) }), h("span", {}, find, notes(pod) ? h("small", { class: pod.state || pod.report ? "warn" : "dim" }, notes(pod, true)) : ""), h("span", {}, part(pod.memory, pod.cores, node.unit)));
    });
    return [
      wrong ? h("p", { class: "warn" }, "⚠ " + wrong) : "",
      h("div", { class: kind(node, card) }, bar(card)),
      h("dl", {}, ...facts.filter(([, value]) => value).flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])),
      h("h3", {}, card.pods.length ? "Pods" : "No pods"), h("ul", {}, ...pods)];
  }

  help(model, name) {
    const { meaning, advice } = help(name);
    return [Object.hasOwn(model.words, name) ? model.words[name] : name, h("p", {}, meaning), h("h3", {}, "What to do"), h("p", {}, advice),
      h("p", { class: "dim" }, "kubectl inspect gpushare and the metrics call it ", h("code", {}, name), ".")];
  }
}
