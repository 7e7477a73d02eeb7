// The data from the extender: nodes, pending pods, samples. It doesn't use the DOM.

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.known = false;
    this.nodes = new Map();
    this.names = [];
    this.pending = [];
    this.problems = []; // Pods that share nothing by mistake.
    this.reports = new Map(); // Problems of bound pods, by node.
    this.stranded = new Map(); // Free memory that is of no use, by node.
    this.runs = []; // Of all groups.
    this.tenants = null; // Null if fair sharing is off.
    this.words = {}; // The causes in words.
    this.samples = [];
    this.sampleEvery = 10;
    this.status = { version: "", since: 0 };
    this.time = 0;
    this.summed = undefined;
  }

  /** take applies a message: everything, or what has changed. */
  take(message) {
    if (message.complete) {
      this.clear();
      this.known = true;
      this.words = message.words;
      this.sampleEvery = message.sampleEverySeconds;
    }
    this.time = message.time;
    this.status = message.status;
    this.summed = undefined;
    this.samples = [...this.samples, ...message.samples].slice(-360);
    if (message.reports) this.setReports(message.reports);
    if (message.stranded) this.setStranded(message.stranded);
    let named = false;
    const left = message.names && new Set(message.names);
    for (const name of left ? this.names : []) {
      if (left.has(name)) continue;
      this.nodes.delete(name);
      named = true;
    }
    for (const node of message.nodes) {
      named ||= !this.nodes.has(node.name);
      this.setNode(node);
    }
    if (named) this.names = [...this.nodes.keys()].sort();
    if (message.pending) this.setPending(message.pending);
    if (message.problems) this.problems = message.problems;
    if (message.tenants) this.tenants = message.tenants;
    if (message.groups) this.runs = message.groups.map((run) => ({ bound: [], pending: [], reason: "", ...run }));
  }

  setPending(pods) {
    for (const pod of pods) pod.words = this.words[pod.reason] ?? pod.reason;
    this.pending = pods;
  }

  setNode(node) {
    node.stranded = this.stranded.get(node.name);
    this.nodes.set(node.name, prepare(node, this.reports.get(node.name) ?? []));
  }

  /** setReports replaces the reports, and the nodes that they concern. */
  setReports(reports) {
    const before = this.reports;
    this.reports = byNode(reports);
    this.renew([...before.keys(), ...this.reports.keys()]);
  }

  /** setStranded replaces the memory that is of no use, and the nodes that have it. */
  setStranded(stranded) {
    const before = this.stranded;
    this.stranded = new Map(stranded.map((s) => [s.node, s]));
    this.renew([...before.keys(), ...this.stranded.keys()].filter((name) => before.get(name)?.text !== this.stranded.get(name)?.text));
  }

  /** renew replaces nodes: what is drawn of a node is kept as long as it is the same object. */
  renew(names) {
    for (const name of new Set(names)) {
      const node = this.nodes.get(name);
      const pods = (list) => list?.map((pod) => ({ ...pod }));
      if (node) this.setNode({ ...node, cards: node.cards.map((card) => ({ ...card, pods: pods(card.pods) })), cardless: pods(node.cardless) });
    }
  }

  /** models returns the models of all cards, sorted. */
  models() {
    return [...new Set([...this.nodes.values()].flatMap((node) => node.models))].sort();
  }

  /** pools returns the pools of all nodes, sorted. */
  pools() {
    return [...new Set([...this.nodes.values()].map((node) => node.pool).filter(Boolean))].sort();
  }

  /** namespaces returns the namespaces that have or ask for GPU memory, with what their pods have and wait for in MiB. */
  namespaces() {
    const found = new Map();
    const of = (name) => {
      if (!found.has(name)) found.set(name, { namespace: name, name: "", pods: 0, allocated: 0, pending: 0, waiting: 0 });
      return found.get(name);
    };
    for (const node of this.nodes.values()) {
      for (const pod of [...node.cards.flatMap((card) => card.pods), ...(node.cardless ?? [])]) {
        of(pod.namespace).pods += 1 / (pod.cards ?? 1);
        of(pod.namespace).allocated += pod.memory * node.unitMiB;
      }
    }
    const unit = this.sums().unit?.mib ?? 1024; // A pending pod has no node, and so no unit of its own.
    for (const pod of this.pending) {
      of(pod.namespace).pending++;
      of(pod.namespace).waiting += pod.request * unit;
    }
    return [...found.values()].map((n) => ({ ...n, pods: Math.round(n.pods), requested: n.allocated + n.waiting }));
  }

  /** members returns the members of a group as namespace/name. */
  members(group) {
    const runs = this.runs.filter((run) => run.namespace + "/" + run.name === group);
    return new Set(runs.flatMap((run) => [...run.bound, ...run.pending].map((name) => run.namespace + "/" + name)));
  }

  /** sums returns the cluster's sums in MiB. */
  sums() {
    if (this.summed) return this.summed;
    const s = { total: 0, allocated: 0, whole: 0, pieces: 0, out: 0, nodes: 0, cards: 0, simulated: 0, ill: 0, over: 0, wrong: 0, reports: [], stranded: 0, pods: 0, largest: 0, where: undefined, unit: undefined, units: new Set() };
    for (const node of this.nodes.values()) {
      if (node.problems) s.wrong++;
      if (node.cards.some((card) => !card.vanished)) {
        s.nodes++;
        s.units.add(node.unitMiB);
        if (s.unit === undefined) s.unit = { name: node.unit, mib: node.unitMiB };
        else if (s.unit && s.unit.name !== node.unit) s.unit = null; // Mixed.
      }
      s.pods += node.podCount;
      s.reports.push(...node.reports);
      s.stranded += node.stranded?.MiB ?? 0;
      for (const card of node.cards) {
        if (card.vanished) continue;
        s.cards++;
        if (node.simulated) s.simulated++;
        if (card.unhealthy) s.ill++;
        if (over(card)) s.over++;
        const total = card.total * node.unitMiB;
        const used = Math.min(card.used, card.total) * node.unitMiB;
        s.total += total;
        s.allocated += card.used * node.unitMiB;
        if (card.unhealthy || node.closed) {
          s.out += total - used;
          continue;
        }
        if (card.used === 0) s.whole += total;
        else s.pieces += total - used;
        if (total - used > s.largest) {
          s.largest = total - used;
          s.where = { node, card };
        }
      }
    }
    this.summed = s;
    return s;
  }
}

/** over is true for a card of which more memory or cores are allocated than it has. */
export const over = (card) => card.used > card.total || card.usedCores > 100;

function byNode(reports) {
  const found = new Map();
  for (const report of reports) found.set(report.node, [...(found.get(report.node) ?? []), report]);
  return found;
}

const tones = 8; // style.css has a colour for each.

/** paint gives each pod of a card one of a few colours: always the same one, but not that of the pod beside it. */
function paint(pods) {
  let before;
  for (const pod of pods) {
    let hash = 2166136261;
    for (const char of pod.namespace + "/" + pod.name) hash = Math.imul(hash ^ char.codePointAt(0), 16777619);
    pod.tone = (hash >>> 0) % tones;
    if (pod.tone === before) pod.tone = (pod.tone + 1) % tones;
    before = pod.tone;
  }
}

/** prepare adds the reports about its pods, and derived data that is used often, to a node. */
function prepare(node, reports) {
  const of = new Map(reports.map((report) => [report.namespace + "/" + report.name, report]));
  const mark = (pods) => pods.map((pod) => (pod.report = of.get(pod.namespace + "/" + pod.name))).filter(Boolean);
  mark(node.cardless ?? []);
  paint(node.cardless ?? []);
  node.models = [...new Set(node.cards.map((card) => card.model).filter(Boolean))];
  node.reports = reports;
  node.rows = node.haystack = undefined;
  node.total = 0;
  node.used = 0;
  node.largest = 0;
  node.podCount = (node.cardless ?? []).length;
  node.problem = Boolean(node.problems || reports.length);
  for (const card of node.cards) {
    node.total += card.total;
    node.used += card.used;
    for (const pod of card.pods) node.podCount += 1 / (pod.cards ?? 1); // A pod counts once, not on each of its cards.
    card.reports = mark(card.pods);
    paint(card.pods);
    if (!card.unhealthy && !card.vanished && !node.closed) node.largest = Math.max(node.largest, card.total - card.used);
  }
  node.podCount = Math.round(node.podCount);
  return node;
}

/** remark returns the problems of a bound pod, in short or in full; "" if it has none. */
export function remark({ report }, full) {
  if (!report) return "";
  const remarks = [];
  if (report.usedMiB) {
    remarks.push("uses " + report.usedMiB + " MiB, requests " + report.requestedMiB + " MiB" + (report.allowedMiB ? ", limit " + report.allowedMiB + " MiB" : "") +
      (full && report.since ? ", since " + new Date(report.since).toISOString().replace(/\.\d+/, "") : ""));
  }
  if (report.borrowedMiB) remarks.push("borrows " + report.borrowedMiB + " MiB of a card that is low on free memory");
  if (report.limit) remarks.push("limit not in force" + (full ? ": " + report.limit : ""));
  if (report.withoutExtender) remarks.push("bound without the extender" + (full ? ": is its scheduler configured to call it?" : ""));
  return remarks.join("; ");
}

/** reported counts reports in words. */
export function reported(reports) {
  const count = (field, one, many) => {
    const n = reports.filter((report) => report[field]).length;
    return n ? [n + " " + (n === 1 ? one : many)] : [];
  };
  return [
    ...count("since", "pod above its request", "pods above their request"),
    ...count("borrowedMiB", "pod that borrows memory of a card that is low on it", "pods that borrow memory of cards that are low on it"),
    ...count("limit", "pod without its limit", "pods without their limit"),
    ...count("withoutExtender", "pod bound without the extender: is its scheduler configured?", "pods bound without the extender: is their scheduler configured?"),
  ];
}

/** haystack returns the searched text of a node. */
export function haystack(node) {
  if (node.haystack === undefined) {
    const words = [node.name, node.pool ?? "", node.simulated ? "simulated" : "", node.stranded?.text ?? "", ...(node.problems ?? [])];
    for (const card of node.cards) {
      words.push(card.model ?? "", card.uuid ?? "", card.unhealthy ?? "");
      for (const pod of card.pods) words.push(pod.namespace + "/" + pod.name);
    }
    for (const pod of node.cardless ?? []) words.push(pod.namespace + "/" + pod.name);
    node.haystack = words.join("\n").toLowerCase();
  }
  return node.haystack;
}

/** rows returns a node's pods for the table. */
export function rows(node) {
  if (node.rows === undefined) {
    node.rows = [];
    const add = (card, pod) =>
      node.rows.push({
        namespace: pod.namespace, name: pod.name, tone: pod.tone, owner: pod.owner, since: pod.since, memory: pod.memory, cores: pod.cores, cards: pod.cards, node: node.name, card,
        state: [pod.state, remark(pod)].filter(Boolean).join(", "), title: remark(pod, true),
        unit: node.unit, mib: pod.memory * node.unitMiB,
        haystack: (pod.namespace + "/" + pod.name + "\n" + (pod.owner ?? "") + "\n" + node.name + "\n" + (pod.state ?? "") + "\n" + remark(pod, true)).toLowerCase(),
      });
    for (const card of node.cards) for (const pod of card.pods) add(card.id, pod);
    for (const pod of node.cardless ?? []) add(-1, pod);
  }
  return node.rows;
}

/** terms splits a search; all terms must match. */
export const terms = (query) => query.toLowerCase().split(/\s+/).filter(Boolean);

export const matches = (text, wanted) => wanted.every((term) => text.includes(term));
