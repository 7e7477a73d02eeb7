// The tables of allocations and of pending pods.
import { age, amount, h, number, setText } from "./dom.js";
import { matches, rows, terms } from "./model.js";
import { tone } from "./cards.js";
import { VirtualRows } from "./virtual.js";

/** table creates a table with sortable columns. It calls sorted() when another column is chosen. */
function table(root, label, columns, sort, sorted) {
  const heads = columns.map((column) => {
    const button = h("button", { type: "button", "data-column": column.key }, column.title);
    button.addEventListener("click", () => {
      sort.down = sort.key === column.key ? !sort.down : Boolean(column.down);
      sort.key = column.key;
      mark();
      sorted();
    });
    return h("th", { scope: "col", class: column.class }, button);
  });
  function mark() {
    heads.forEach((head, i) => {
      if (columns[i].key === sort.key) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }
  mark();
  const body = h("tbody", {});
  root.append(h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...heads)), body));
  return body;
}

/** sortBy sorts a list by a column, then by name. Text is compared by code point: fast, and equal in all locales. */
function sortBy(list, value, down) {
  const keyed = list.map((item) => [value(item), item]);
  const way = down ? -1 : 1;
  keyed.sort(([a, x], [b, y]) => {
    if (a !== b) return a < b ? -way : way;
    if (x.namespace !== y.namespace) return x.namespace < y.namespace ? -1 : 1;
    return x.name < y.name ? -1 : x.name > y.name ? 1 : 0;
  });
  return keyed.map(([, item]) => item);
}

const podColumns = [
  { key: "namespace", title: "Namespace", value: (r) => r.namespace },
  { key: "name", title: "Pod", value: (r) => r.name },
  { key: "memory", title: "Memory", class: "right", down: true, value: (r) => r.mib },
  { key: "node", title: "Node", value: undefined },
  { key: "card", title: "Card", class: "right", value: (r) => r.card },
  { key: "state", title: "State", value: (r) => r.state },
];

export class Pods {
  /** open(node, card) is called when a card is selected. */
  constructor(root, changed, open) {
    this.sort = { key: "node", down: false };
    const body = table(root, "Pods with GPU memory", podColumns, this.sort, changed);
    this.root = root;
    this.rows = new VirtualRows({
      scroller: root, body, height: 28, render: (row) => this.row(row), spacer: () => h("tr", { "aria-hidden": "true" }, h("td", { colspan: podColumns.length })),
    });
    body.addEventListener("click", (event) => {
      const link = event.target.closest("button");
      if (link) open(link.dataset.node, Number(link.dataset.card));
    });
  }

  row(row) {
    const where = row.card < 0 ? "not known" : "GPU" + row.card;
    return h("tr", {},
      h("td", {}, row.namespace),
      h("td", { title: row.name }, h("i", { class: tone(row) }), row.name),
      h("td", { class: "right" }, amount(row.memory, row.unit)),
      h("td", {}, row.node),
      h("td", { class: "right" }, row.card < 0 ? where
        : h("button", { type: "button", class: "link", "data-node": row.node, "data-card": row.card, "aria-label": where + " of " + row.node }, where)),
      h("td", { class: row.state ? "warn" : "dim" }, row.state || "bound"));
  }

  show(model, { query }) {
    const wanted = terms(query);
    const { key, down } = this.sort;
    let list = [];
    const names = key === "node" && down ? model.names.toReversed() : model.names;
    for (const name of names) {
      for (const row of rows(model.nodes.get(name))) {
        if (!wanted.length || matches(row.haystack, wanted)) list.push(row);
      }
    }
    // Nodes are already sorted, and their pods by card.
    const column = podColumns.find((c) => c.key === key);
    if (column.value) list = sortBy(list, column.value, down);
    this.root.querySelector("table").setAttribute("aria-rowcount", list.length + 1);
    this.rows.show(list);
    return list.length;
  }
}

const pendingColumns = [
  { key: "namespace", title: "Namespace", value: (p) => p.namespace },
  { key: "name", title: "Pod", value: (p) => p.name },
  { key: "request", title: "Requests", class: "right", down: true, value: (p) => p.request },
  { key: "created", title: "Age", class: "right", down: true, value: (p) => -p.created },
  { key: "reason", title: "Reason", value: (p) => p.reason },
  { key: "message", title: "Messages of gpushare and kube-scheduler", class: "wide", value: (p) => p.message },
];
const mostPending = 500; // Rows with long reasons have any height, so longer lists need a search.

export class Pending {
  constructor(root, changed) {
    this.sort = { key: "created", down: true };
    this.body = table(root, "Pending pods", pendingColumns, this.sort, changed);
    this.drawn = new Map(); // The row's element by its content.
    this.more = h("td", { colspan: pendingColumns.length, class: "dim" });
    this.foot = h("tfoot", { hidden: true }, h("tr", {}, this.more));
    this.body.after(this.foot);
  }

  row(pod, asks) {
    return h("tr", {},
      h("td", {}, pod.namespace),
      h("td", {}, pod.name),
      h("td", { class: "right" }, asks),
      h("td", { class: "right" }),
      h("td", {}, pod.reason),
      h("td", { class: "wide" }, pod.message, h("small", {}, pod.schedulerMessage)));
  }

  show(model, { query }) {
    const wanted = terms(query);
    const column = pendingColumns.find((c) => c.key === this.sort.key);
    const found = model.pending.filter((pod) => !wanted.length || matches((pod.namespace + "/" + pod.name + "\n" + pod.reason + "\n" + pod.message + "\n" + pod.schedulerMessage).toLowerCase(), wanted));
    const list = sortBy(found, column.value, this.sort.down);
    const unit = model.sums().unit;
    const drawn = new Map();
    for (const pod of list.slice(0, mostPending)) {
      const asks = unit ? amount(pod.request, unit.name) : number(pod.request);
      const key = [pod.namespace, pod.name, asks, pod.reason, pod.message, pod.schedulerMessage].join("\n");
      const row = this.drawn.get(key) ?? this.row(pod, asks);
      setText(row.children[3], pod.created ? age(model.time - pod.created) : "–");
      drawn.set(key, row);
    }
    for (const [key, row] of this.drawn) if (!drawn.has(key)) row.remove();
    this.drawn = drawn;
    // Unchanged rows stay in place, so that a text selection in them is kept.
    let next = this.body.firstChild;
    for (const row of drawn.values()) {
      if (row === next) next = next.nextSibling;
      else this.body.insertBefore(row, next);
    }
    this.foot.hidden = list.length <= mostPending;
    setText(this.more, "and " + number(list.length - mostPending) + " more: search for them");
    return found.length;
  }
}
