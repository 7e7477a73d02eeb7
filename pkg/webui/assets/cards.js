// The list of nodes: a row per node, a bar per card, a segment per pod.
import { amount, byId, h, number, part, plural } from "./dom.js";
import { haystack, matches, over, remark, reported, terms } from "./model.js";
import { VirtualRows } from "./virtual.js";

// style.css has the same heights and width.
const narrow = matchMedia("(max-width: 1000px)");
const rowHeight = () => (narrow.matches ? 74 : 50);

/** tone returns the class of a pod's colour. */
export const tone = (pod) => "t" + pod.tone;

/** bar draws a card's pods side by side, and at the bottom a line for the cores that they ask for. For an overcommitted card all segments are smaller, and the excess is marked. */
export function bar(card) {
  const scale = Math.max(card.total, card.used, 1);
  const element = h("span", { class: "bar" });
  card.pods.forEach((pod, i) => {
    const segment = h("span", { class: "segment " + tone(pod) + (pod.state ? " " + pod.state : ""), "data-pod": i });
    segment.style.width = (100 * pod.memory) / scale + "%";
    element.append(segment);
  });
  if (card.usedCores) {
    const line = h("span", { class: "cores" });
    line.style.width = Math.min(card.usedCores, 100) + "%";
    element.append(line);
  }
  if (card.used > card.total && card.total > 0) {
    const limit = h("span", { class: "limit" });
    limit.style.left = (100 * card.total) / scale + "%";
    element.append(limit);
  }
  return element;
}

/** problem returns a card's problem, or "". */
export function problem(node, card) {
  if (card.vanished) return "the node doesn't report this card any more";
  if (card.unhealthy) return "unhealthy: " + card.unhealthy;
  if (over(card)) return "more is allocated than the card has";
  if (card.reports.length) return reported(card.reports).join(", ");
  if (node.closed) return node.problems[0] + ": no new pod is placed here";
  return "";
}

/** kind returns the CSS class of a card with a problem, or "". */
export function kind(node, card) {
  if (card.vanished || card.unhealthy) return "ill";
  if (over(card)) return "over";
  return node.closed ? "off" : "";
}

/** cores describes a card's cores, or returns "" if its node doesn't count them. */
export const cores = (node, card) => (node.countsCores || card.usedCores ? (card.usedCores ?? 0) + "% of its cores allocated" : "");

/**
 * notes returns what is special about a pod on a card, in brackets: its state, the number of its cards if it has several, and what is
 * reported of it, in short or in full.
 */
export function notes(pod, full) {
  const all = [pod.state, pod.cards ? "one of " + pod.cards + " cards" : "", pod.limitMiB ? "limit " + pod.limitMiB + " MiB" : "", remark(pod, full)].filter(Boolean);
  return all.length ? " (" + all.join(", ") + ")" : "";
}

export class Cards {
  /** open(place) is called with "node/card" when a card is selected. */
  constructor(root, open) {
    this.root = root;
    this.open = open;
    this.active = { node: "", card: 0 };
    root.setAttribute("role", "grid");
    root.setAttribute("aria-label", "Nodes and their cards. Arrow keys move, Enter shows details");
    this.rows = new VirtualRows({
      scroller: root, body: root, height: rowHeight(), render: (node) => this.row(node),
      spacer: () => h("div", { role: "presentation" }),
    });
    narrow.addEventListener("change", () => {
      this.rows.height = rowHeight();
      this.rows.draw();
    });
    this.tip = byId("tip");
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("click", (event) => this.click(event));
    root.addEventListener("mouseover", (event) => this.hover(event));
    root.addEventListener("mouseleave", () => this.hideTip());
    root.addEventListener("scroll", () => this.hideTip(), { passive: true });
    root.addEventListener("focusin", (event) => {
      const button = event.target.closest(".card");
      if (!button) return;
      this.active = this.place(button);
      this.mark();
      if (button.matches(":focus-visible")) this.showTip(button);
    });
    root.addEventListener("focusout", () => this.hideTip());
    addEventListener("keydown", (event) => event.key === "Escape" && this.hideTip());
  }

  /** show lists the nodes of the model that match the filters. */
  show(model, { q, room, problems, order, model: only, pool }) {
    const wanted = terms(q);
    let nodes = [];
    for (const name of model.names) {
      const node = model.nodes.get(name);
      if (problems && !node.problem) continue;
      if (only && !node.models.includes(only)) continue;
      if (pool && node.pool !== pool) continue;
      if (room && node.largest < Number(room)) continue;
      if (wanted.length && !matches(haystack(node), wanted)) continue;
      nodes.push(node);
    }
    if (order === "free") nodes = nodes.sort((a, b) => b.largest * b.unitMiB - a.largest * a.unitMiB);
    if (order === "full") nodes = nodes.sort((a, b) => b.used / (b.total || 1) - a.used / (a.total || 1));
    this.model = model;
    const focused = this.root.contains(document.activeElement);
    const tipped = this.tipped;
    this.root.setAttribute("aria-rowcount", nodes.length);
    this.rows.show(nodes);
    this.mark();
    // A redrawn row has lost focus and hover.
    if (focused && !this.root.contains(document.activeElement)) this.button(this.active)?.focus({ preventScroll: true });
    if (tipped) {
      const button = this.button(tipped);
      if (button) this.showTip(button, tipped.pod);
      else this.hideTip();
    }
    return nodes.length;
  }

  row(node) {
    const unit = node.unit;
    const name = h("span", { class: "node", role: "rowheader", title: node.name }, h("b", {}, node.name));
    const problems = node.problems ?? [];
    const about = node.cards.length ? [number(node.used) + "/" + amount(node.total, unit)] : [];
    if (problems.length) about.push(problems[0] + (problems.length > 1 ? " (and " + (problems.length - 1) + " more)" : ""));
    if (node.stranded) about.push(node.stranded.text);
    if (node.simulated) about.push("simulated cards");
    if (node.models.length) about.push(node.models.join(", ").replaceAll("NVIDIA ", ""));
    if (node.pool) about.push(node.pool);
    if (node.isolation) about.push("limits: " + node.isolation);
    name.append(h("small", { class: problems.length ? "warn" : "", title: problems.length ? problems.join("\n") : about.join(" · ") }, about.join(" · ")));
    const cards = node.cards.map((card) => {
      const wrong = problem(node, card);
      const how = kind(node, card);
      return h("span", { role: "gridcell" },
        h("button", {
          type: "button", class: ("card " + how).trim(), tabindex: "-1", "data-card": card.id, "aria-describedby": "tip",
          "aria-label": node.name + " GPU " + card.id + ": " + number(card.used) + " of " + amount(card.total, unit) + " allocated, " + (card.usedCores ? cores(node, card) + ", " : "") +
            plural(card.pods.length, "pod", "pods") + (wrong ? ", " + wrong : ""),
        }, bar(card), h("span", { class: "caption" },
          h("span", {}, "GPU" + card.id), h("span", {}, (how || card.reports.length ? "⚠ " : "") + number(card.used) + "/" + number(card.total)))));
    });
    const line = h("div", { class: "line", role: "row", "data-node": node.name }, name, ...cards);
    line.style.setProperty("--cards", Math.max(cards.length, 4));
    return line;
  }

  place(button) {
    return { node: button.closest(".line").dataset.node, card: Number(button.dataset.card) };
  }

  button({ node, card }) {
    for (const line of this.root.querySelectorAll(".line")) {
      if (line.dataset.node === node) return line.querySelector('[data-card="' + card + '"]');
    }
    return null;
  }

  /** mark makes one card reachable with the Tab key: the active one if it is drawn, else the first drawn one. */
  mark() {
    const before = this.root.querySelector('.card[tabindex="0"]');
    const now = this.button(this.active) ?? this.root.querySelector(".card");
    if (before === now) return;
    before?.setAttribute("tabindex", "-1");
    now?.setAttribute("tabindex", "0");
  }

  click(event) {
    const button = event.target.closest(".card");
    if (!button) return;
    this.hideTip();
    const { node, card } = this.place(button);
    this.open(node + "/" + card);
  }

  key(event) {
    const button = event.target.closest(".card");
    if (!button || event.ctrlKey || event.metaKey || event.altKey) return;
    const { node: name, card } = this.place(button);
    const nodes = this.rows.items;
    let row = nodes.findIndex((node) => node.name === name);
    let column = nodes[row].cards.findIndex((c) => c.id === card);
    const page = Math.max(1, Math.floor(this.root.clientHeight / this.rows.height) - 1);
    switch (event.key) {
      case "ArrowRight": column++; break;
      case "ArrowLeft": column--; break;
      case "ArrowDown": row++; break;
      case "ArrowUp": row--; break;
      case "PageDown": row += page; break;
      case "PageUp": row -= page; break;
      case "Home": column = 0; if (event.shiftKey) row = 0; break;
      case "End": column = Infinity; if (event.shiftKey) row = nodes.length; break;
      default: return;
    }
    event.preventDefault();
    row = Math.min(Math.max(row, 0), nodes.length - 1);
    const way = row < nodes.findIndex((node) => node.name === name) ? -1 : 1;
    while (nodes[row]?.cards.length === 0) row += way;
    const cards = nodes[row]?.cards;
    if (!cards) return;
    column = Math.min(Math.max(column, 0), cards.length - 1);
    this.rows.reveal(row);
    this.button({ node: nodes[row].name, card: cards[column].id })?.focus({ preventScroll: true });
  }

  hover(event) {
    const button = event.target.closest(".card");
    if (!button) return this.hideTip();
    const segment = event.target.closest(".segment");
    this.showTip(button, segment ? Number(segment.dataset.pod) : undefined);
  }

  /** showTip lists the card's pods and highlights the one under the pointer. */
  showTip(button, pod) {
    const place = this.place(button);
    const node = this.model.nodes.get(place.node);
    const card = node?.cards.find((c) => c.id === place.card);
    if (!card) return this.hideTip();
    this.tipped = { ...place, pod };
    const wrong = problem(node, card);
    const most = 14;
    // The pod under the pointer is listed even if the list is cut.
    const from = pod !== undefined && pod >= most ? pod - most + 1 : 0;
    this.tip.replaceChildren(
      h("p", {}, h("b", {}, node.name + " · GPU " + card.id), card.model ? " " + card.model : "", node.simulated ? " (simulated)" : ""),
      h("p", {}, number(card.used) + " of " + amount(card.total, node.unit) + " allocated, " + amount(Math.max(0, card.total - card.used), node.unit) + " free"),
      card.usedCores ? h("p", {}, cores(node, card)) : "",
      wrong ? h("p", { class: "warn" }, "⚠ " + wrong) : "",
      h("ul", {}, ...card.pods.slice(from, from + most).map((p, i) => h("li", { class: from + i === pod ? "pointed" : "" },
        h("i", { class: tone(p) }), h("span", {}, p.namespace + "/" + p.name + notes(p)), h("span", {}, part(p.memory, p.cores, node.unit))))),
      card.pods.length > most ? h("p", {}, "and " + number(card.pods.length - most) + " more") : "",
      card.pods.length === 0 ? h("p", { class: "dim" }, "no pods") : "",
    );
    this.tip.hidden = false;
    const at = button.getBoundingClientRect();
    const size = this.tip.getBoundingClientRect();
    const below = at.bottom + 6 + size.height < innerHeight;
    this.tip.style.left = Math.max(6, Math.min(at.left, innerWidth - size.width - 6)) + "px";
    this.tip.style.top = (below ? at.bottom + 6 : Math.max(6, at.top - size.height - 6)) + "px";
  }

  hideTip() {
    this.tipped = undefined;
    this.tip.hidden = true;
  }

  /** focus moves the keyboard focus to a card, named "node/card". */
  focus(name) {
    const at = name.lastIndexOf("/");
    const place = { node: name.slice(0, at), card: name.slice(at + 1) };
    const index = this.rows.items.findIndex((node) => node.name === place.node);
    if (index < 0) return;
    this.rows.reveal(index);
    this.button(place)?.focus({ preventScroll: true });
  }
}
