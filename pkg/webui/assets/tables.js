// The tables of allocations, of pending pods, of request problems, and of groups.
import { kindOf } from "./causes.js";
import { age, amount, h, number, part, setText, sum } from "./dom.js";
import { matches, rows, terms } from "./model.js";
import { tone } from "./cards.js";
import { VirtualRows } from "./virtual.js";

/**
 * Head is a table with sortable columns. Its order is a column's key, with "-" before it if it is descending. Rows are sorted by a column's value(item).
 */
class Head {
  /** changed(order) is called when another order is chosen. */
  constructor(root, label, columns, order, changed) {
    Object.assign(this, { columns, usual: order });
    this.heads = columns.map((column) => {
      const button = h("button", { type: "button", "data-column": column.key }, column.title);
      button.addEventListener("click", () => {
        this.sort(this.key === column.key ? (this.down ? "" : "-") + column.key : (column.down ? "-" : "") + column.key);
        changed(this.order === this.usual ? "" : this.order);
      });
      return h("th", { scope: "col", class: column.class }, button);
    });
    this.body = h("tbody", {});
    this.table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    root.append(this.table);
    this.sort("");
  }

  /** sort sets the order; the usual one if it is empty or unknown. */
  sort(order) {
    const known = this.columns.some((c) => c.key === order.replace("-", ""));
    this.order = known ? order : this.usual;
    this.down = this.order.startsWith("-");
    this.key = this.order.replace("-", "");
    this.column = this.columns.find((c) => c.key === this.key);
    this.heads.forEach((head, i) => {
      if (this.columns[i] === this.column) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  /** sorted sorts a list, then by name. Text is compared by code point: fast, and equal in all locales. */
  sorted(list) {
    const keyed = list.map((item) => [this.column.value(item), item]);
    const way = this.down ? -1 : 1;
    keyed.sort(([a, x], [b, y]) => {
      if (a !== b) return a < b ? -way : way;
      if (x.namespace !== y.namespace) return x.namespace < y.namespace ? -1 : 1;
      return x.name < y.name ? -1 : x.name > y.name ? 1 : 0;
    });
    return keyed.map(([, item]) => item);
  }
}

const most = 500; // Rows of a List have any height, so longer lists need a search.

/**
 * List is a table whose rows have any height. A column's cell(item) is what a cell has, if that isn't the value. Unchanged rows stay in place, so that a
 * text selection in them is kept.
 */
export class List extends Head {
  constructor(root, label, columns, order, changed) {
    super(root, label, columns, order, changed);
    this.drawn = new Map(); // The row's element by the item in JSON.
    this.more = h("td", { colspan: columns.length, class: "dim" });
    this.foot = h("tfoot", { hidden: true }, h("tr", {}, this.more));
    this.body.after(this.foot);
  }

  row(item) {
    return h("tr", {}, ...this.columns.map((c) => h("td", { class: c.class, "data-title": c.title }, ...[(c.cell ?? c.value)(item)].flat())));
  }

  /** show draws the items, with their ages at the time. */
  show(items, time) {
    const drawn = new Map();
    for (const item of this.sorted(items).slice(0, most)) {
      const key = JSON.stringify(item);
      const row = this.drawn.get(key) ?? this.row(item);
      const cell = row.querySelector(".age");
      if (cell) setText(cell, item.since ? age(time - item.since) : "–");
      drawn.set(key, row);
    }
    for (const [key, row] of this.drawn) if (!drawn.has(key)) row.remove();
    this.drawn = drawn;
    let next = this.body.firstChild;
    for (const row of drawn.values()) {
      if (row === next) next = next.nextSibling;
      else this.body.insertBefore(row, next);
    }
    this.table.hidden = items.length === 0;
    this.foot.hidden = items.length <= most;
    setText(this.more, "and " + number(items.length - most) + " more: search for them");
    return items.length;
  }
}

/** chip is a button that opens the explanation of a cause or a phase. */
const chip = (name, words) => h("button", { type: "button", class: "chip " + kindOf(name), "data-help": name, title: "What does this mean?" }, words);

const searched = (item, ...more) => (item.namespace + "/" + item.name + "\n" + more.join("\n")).toLowerCase();

/** filter returns a test for the query and the group of the state: does it match an item with this text? */
function filter(model, { q, group }) {
  const wanted = terms(q);
  const members = group ? model.members(group) : undefined;
  return (item, text) => (!members || members.has(item.namespace + "/" + item.name)) && (!wanted.length || matches(text, wanted));
}

const podColumns = [
  { key: "namespace", title: "Namespace", value: (r) => r.namespace },
  { key: "name", title: "Pod", value: (r) => r.name },
  { key: "owner", title: "Owner", value: (r) => r.owner ?? "" },
  { key: "memory", title: "Memory", class: "right", down: true, value: (r) => r.mib },
  { key: "node", title: "Node", value: undefined },
  { key: "card", title: "Card", class: "right", value: (r) => r.card },
  { key: "since", title: "Placed", class: "right", down: true, value: (r) => -(r.since ?? 0) },
  { key: "state", title: "State", value: (r) => r.state },
];

export class Pods extends Head {
  constructor(root, changed) {
    super(root, "Pods with GPU memory", podColumns, "node", changed);
    this.rows = new VirtualRows({
      scroller: root, body: this.body, height: 28, render: (row) => this.row(row), drawn: () => this.ages(), spacer: () => h("tr", { "aria-hidden": "true" }, h("td", { colspan: podColumns.length })),
    });
  }

  row(row) {
    const where = row.card < 0 ? "not known" : "GPU" + row.card;
    return h("tr", {},
      h("td", {}, row.namespace),
      h("td", { title: row.name }, h("i", { class: tone(row) }), row.name),
      h("td", { class: "dim", title: row.owner }, row.owner ?? "–"),
      h("td", { class: "right" }, part(row.memory, row.cores, row.unit)),
      h("td", {}, row.node),
      h("td", { class: "right" }, row.card < 0 ? where
        : h("button", { type: "button", class: "link", "data-card": row.node + "/" + row.card, "aria-label": where + " of " + row.node }, where),
        row.cards ? h("small", { class: "dim" }, " of " + row.cards) : ""),
      h("td", { class: "right age" }),
      h("td", { class: row.state ? "warn" : "dim", title: row.title || undefined }, row.state || "bound"));
  }

  show(model, state) {
    const passes = filter(model, state);
    let list = [];
    const names = this.order === "-node" ? model.names.toReversed() : model.names;
    for (const name of names) {
      for (const row of rows(model.nodes.get(name))) if (passes(row, row.haystack)) list.push(row);
    }
    if (this.column.value) list = this.sorted(list); // Nodes are already sorted, and their pods by card.
    this.table.setAttribute("aria-rowcount", list.length + 1);
    this.time = model.time;
    this.rows.show(list);
    return list.length;
  }

  /** ages writes how long ago the drawn pods were placed. */
  ages() {
    for (const [row, element] of this.rows.drawn) setText(element.querySelector(".age"), row.since ? age(this.time - row.since) : "–");
  }
}

const pendingColumns = [
  { key: "namespace", title: "Namespace", value: (p) => p.namespace },
  { key: "name", title: "Pod", value: (p) => p.name },
  { key: "owner", title: "Owner", class: "dim", value: (p) => p.owner ?? "", cell: (p) => p.owner ?? "–" },
  { key: "request", title: "Requests", class: "right", down: true, value: (p) => p.request, cell: (p) => p.asks },
  { key: "age", title: "Age", class: "right age", down: true, value: (p) => -p.created, cell: () => "" },
  { key: "ahead", title: "Ahead", class: "right ahead", value: (p) => p.ahead ?? Infinity, cell: (p) => p.ahead ?? h("span", { class: "none" }, "–") },
  { key: "cause", title: "Cause", value: (p) => p.words, cell: (p) => chip(p.reason, p.words) },
  {
    key: "message", title: "Messages of gpushare and kube-scheduler", class: "wide",
    value: (p) => p.message, cell: (p) => [p.message, h("small", {}, p.schedulerMessage)],
  },
];

const problemColumns = [
  { key: "namespace", title: "Namespace", value: (p) => p.namespace },
  { key: "name", title: "Pod", value: (p) => p.name },
  { key: "problem", title: "What is wrong with the request", class: "wide", value: (p) => p.problem },
];

export class Pending extends List {
  constructor(root, changed) {
    super(root, "Pending pods", pendingColumns, "-age", changed);
    this.section = h("section", {}, h("h2", {}, "Request problems: pods that get no GPU memory"));
    root.append(this.section);
    this.problems = new List(this.section, "Request problems: pods that get no GPU memory", problemColumns, "namespace", changed);
  }

  /** sort sets the order of the table that has the column, and the usual order of the other one. */
  sort(order) {
    super.sort(order);
    this.problems?.sort(order);
  }

  /** show returns how many pods are shown: pending ones, and those of the second table. */
  show(model, state) {
    const passes = filter(model, state);
    const found = model.pending.filter((pod) => passes(pod, searched(pod, pod.owner ?? "", pod.words, pod.reason, pod.message, pod.schedulerMessage)));
    const wrong = model.problems.filter((pod) => passes(pod, searched(pod, pod.problem)));
    const unit = model.sums().unit;
    for (const pod of found) {
      const n = pod.cards ?? 1;
      pod.asks = (n > 1 ? n + " cards: " : "") + part(pod.request / n, pod.cores && Math.ceil(pod.cores / n), unit?.name);
      pod.since = pod.created;
    }
    this.section.hidden = this.problems.show(wrong) === 0;
    return [super.show(found, model.time), wrong.length];
  }
}

/** amountColumn is a column of amounts, of which item.shown has the texts. */
export const amountColumn = (key, title) => ({ key, title, class: "right", down: true, value: (item) => item[key], cell: (item) => item.shown[key] });

/** showAmounts sets what amountColumn reads. */
export function showAmounts(item, keys, format) {
  item.shown = Object.fromEntries(keys.map((key) => [key, format(item[key])]));
}

const namespaceColumns = [
  {
    key: "namespace", title: "Namespace", value: (n) => n.namespace,
    cell: (n) => h("button", { type: "button", class: "link", "data-search": n.namespace + "/" }, n.namespace),
  },
  { key: "pods", title: "Pods", class: "right", down: true, value: (n) => n.pods },
  amountColumn("allocated", "Allocated"),
  { key: "pending", title: "Pending pods", class: "right", down: true, value: (n) => n.pending },
  amountColumn("waiting", "Pending"),
  amountColumn("requested", "Requested"),
];

/** Namespaces has the sums of each namespace: what its pods have, what pending ones ask for, and both together. */
export class Namespaces extends List {
  constructor(root, changed) {
    super(root, "Namespaces", namespaceColumns, "-allocated", changed);
  }

  show(model, { q }) {
    const passes = filter(model, { q });
    const found = model.namespaces().filter((n) => passes(n, n.namespace.toLowerCase()));
    for (const n of found) showAmounts(n, ["allocated", "waiting", "requested"], (mib) => sum(mib, model.sums().unit));
    return super.show(found, model.time);
  }
}

const groupColumns = [
  { key: "namespace", title: "Namespace", value: (g) => g.namespace },
  { key: "name", title: "Group", value: (g) => g.name, cell: (g) => g.name || "no name" },
  { key: "phase", title: "Phase", value: (g) => g.phase, cell: (g) => chip(g.phase, g.phase) },
  { key: "size", title: "Needs", class: "right", down: true, value: (g) => g.size, cell: (g) => g.size || "unknown" },
  { key: "counted", title: "Has", class: "right", down: true, value: (g) => g.counted },
  { key: "bound", title: "Bound", class: "right", down: true, value: (g) => g.bound.length, cell: (g) => members(g, "bound", "pods") },
  { key: "pending", title: "Pending", class: "right", down: true, value: (g) => g.pending.length, cell: (g) => members(g, "pending", "pending") },
  { key: "memory", title: "Memory", class: "right", down: true, value: (g) => g.memory, cell: (g) => g.holds },
  { key: "since", title: "Since", class: "right age", down: true, value: (g) => -g.since, cell: () => "" },
  { key: "reason", title: "Reason", class: "wide", value: (g) => g.reason },
];

export class Groups extends List {
  constructor(root, changed) {
    super(root, "Groups of pods", groupColumns, "namespace", changed);
  }

  show(model, { q }) {
    const passes = filter(model, { q });
    const unit = model.sums().unit;
    const found = model.runs.filter((g) => passes(g, searched(g, g.phase, g.reason)));
    for (const g of found) g.holds = g.memory ? amount(g.memory, unit?.name) : "–";
    return super.show(found, model.time);
  }
}

/** members is a link to the bound or pending members of a group in the table of pods. */
function members(g, which, view) {
  const n = number(g[which].length);
  if (n === "0") return n;
  return h("button", { type: "button", class: "link", "data-group": g.namespace + "/" + g.name, "data-view": view, "aria-label": n + " " + which + " pods of group " + g.name }, n);
}
