// The page: applies the messages to the model and draws the visible part, at most once per frame.
import { Address, views } from "./address.js";
import { Cards } from "./cards.js";
import { FreeMemory } from "./chart.js";
import { Details } from "./details.js";
import { byId, clock, h, number, plural, setText } from "./dom.js";
import { Model } from "./model.js";
import { Shares } from "./shares.js";
import { Summary } from "./summary.js";
import { Groups, Namespaces, Pending, Pods } from "./tables.js";
import { Updates } from "./updates.js";

const model = new Model();
const address = new Address(moved);
const { state } = address;

const summary = new Summary();
const chart = new FreeMemory(byId("chart"));
const details = new Details(byId("details"), (pod) => go({ view: "pods", q: pod }), closeDetails);
const cards = new Cards(byId("view-cards"), (card) => openDetails({ card, help: "" }));
const sorted = (sort) => go({ sort });
const tables = {
  pods: new Pods(byId("view-pods"), sorted), pending: new Pending(byId("view-pending"), sorted), groups: new Groups(byId("view-groups"), sorted),
  shares: new Shares(byId("view-shares"), sorted), namespaces: new Namespaces(byId("view-namespaces"), sorted),
};

// --- Drawing -----------------------------------------------------------------------------------------------------

let asked = false;
let since; // When the oldest change arrived that isn't drawn yet.

function soon() {
  since ??= performance.now();
  if (asked) return;
  asked = true;
  requestAnimationFrame(draw);
}

function draw() {
  asked = false;
  const start = performance.now();
  summary.show(model);
  chart.show(model);
  details.show(model, state);
  drawStatus();
  drawControls();
  drawView();
  if (since !== undefined && model.known) {
    performance.clearMeasures("gpushare:draw");
    performance.measure("gpushare:draw", { start, end: performance.now() });
    if (!drawn) performance.mark("gpushare:first-data");
    drawn = true;
  }
  since = undefined;
}
let drawn = false;

function drawControls() {
  for (const name of views) {
    const tab = byId("tab-" + name);
    tab.setAttribute("aria-selected", name === state.view);
    if (name === "shares") tab.hidden = !model.tenants && state.view !== name;
    tab.tabIndex = name === state.view ? 0 : -1;
  }
  byId("panel").setAttribute("aria-labelledby", "tab-" + state.view);
  if (state.view === "cards") {
    drawChoices("model", model.models());
    const pools = model.pools();
    drawChoices("pool", pools);
    byId("pools").hidden = pools.length === 0;
  }
  for (const [id, value] of [["search", state.q], ["room", state.room], ["model", state.model], ["pool", state.pool], ["order", state.order]]) if (byId(id).value !== value) byId(id).value = value;
  byId("problems").checked = Boolean(state.problems);
  byId("card-filters").hidden = state.view !== "cards";
  byId("group").hidden = !state.group || !["pods", "pending"].includes(state.view);
  setText(byId("group"), "group " + state.group + " ×");
  byId("group").setAttribute("aria-label", "Only pods of group " + state.group + ". Show all");
}

/** drawChoices lists the models or the pools by which one can filter. */
function drawChoices(id, known) {
  if (state[id] && !known.includes(state[id])) known.push(state[id]);
  if (choices[id] === known.join("\n")) return;
  choices[id] = known.join("\n");
  byId(id).replaceChildren(h("option", { value: "" }, "all"), ...known.map((name) => h("option", { value: name }, name)));
}

const choices = {}; // The drawn ones.

function drawView() {
  let nothing = missing();
  let text = "";
  for (const view of views) byId("view-" + view).hidden = Boolean(nothing) || view !== state.view;
  if (!nothing) {
    let found;
    [found, text] = list();
    if (found === 0) nothing = notFound();
    byId("view-" + state.view).hidden = Boolean(nothing);
  }
  setText(byId("shown"), text);
  const empty = byId("empty");
  empty.hidden = !nothing;
  // Replaced only if it differs, so that the button in it keeps the focus.
  const words = nothing?.map((element) => element.textContent).join("\n");
  if (nothing && words !== empty.words) empty.replaceChildren(...nothing);
  empty.words = words;
}

const of = (shown, all, one, many) => (shown === all ? plural(all, one, many) : number(shown) + " of " + plural(all, one, many));

/** list draws the current list, and returns how many rows it has, and that in words. */
function list() {
  if (state.view === "cards") {
    const n = cards.show(model, state);
    return [n, of(n, model.names.length, "node", "nodes")];
  }
  const table = tables[state.view];
  table.sort(state.sort);
  if (state.view === "pending") {
    const [pods, wrong] = table.show(model, state);
    return [pods + wrong, of(pods, model.pending.length, "pending pod", "pending pods")];
  }
  const n = table.show(model, state);
  if (state.view === "namespaces") return [n, of(n, model.namespaces().length, "namespace", "namespaces")];
  if (state.view === "shares") return [n, of(n, model.tenants.length, "tenant", "tenants")];
  return [n, state.view === "pods" ? of(n, model.sums().pods, "pod", "pods") : of(n, model.runs.length, "group", "groups")];
}

/** missing returns the text if there is nothing to list, whatever the filters are. */
function missing() {
  const text = (title, ...paragraphs) => [h("h2", {}, title), ...paragraphs.map((p) => h("p", {}, p))];
  if (!model.known) return [h("p", { class: "dim" }, "Waiting for the extender …")];
  if (model.status.notReady) return text("Not ready yet", model.status.notReady);
  switch (state.view) {
    case "cards":
      if (model.names.length) return undefined;
      return text("No node shares GPU memory yet", "Label a GPU node with gpushare=true and let the device plugin run there: its cards show up here within seconds.");
    case "pods":
      return model.sums().pods ? undefined : text("No pod holds GPU memory");
    case "namespaces":
      return model.sums().pods + model.pending.length ? undefined : text("No pod holds GPU memory, or asks for some");
    case "pending":
      return model.pending.length + model.problems.length ? undefined : text("No pending pods", "Every pod that requests GPU memory has a node.");
  }
  if (state.view === "shares") {
    if (!model.tenants) return text("Tenants don't share the cluster", "With the extender's flag --fair-share, each tenant gets its share of the GPU memory.");
    return model.tenants.length ? undefined : text("No tenants", "No pod of a tenant has or asks for GPU memory.");
  }
  if (model.status.noGroups) return text("No groups to show", model.status.noGroups + ".", "kubectl inspect gpushare --groups shows what the API server knows of them.");
  return model.runs.length ? undefined : text("No groups", "Pods with the annotation scheduling.k8s.io/group-name are bound all together or not at all, and are listed here.");
}

/** notFound returns the text if nothing matches the filters, with a button that clears them. */
function notFound() {
  const what = { cards: "node", pods: "pod", pending: "pending pod", groups: "group", shares: "tenant", namespaces: "namespace" }[state.view];
  const filters = [];
  if (state.q) filters.push("the search “" + state.q + "”");
  if (state.group && ["pods", "pending"].includes(state.view)) filters.push("the group " + state.group);
  if (state.view === "cards" && state.room) filters.push("room for " + state.room + " on one card");
  if (state.view === "cards" && state.model) filters.push("the model " + state.model);
  if (state.view === "cards" && state.problems) filters.push("problems only");
  const clear = h("button", { type: "button" }, "Show all");
  clear.addEventListener("click", () => {
    go({ q: "", group: "", room: "", model: "", problems: "" });
    byId("search").focus();
  });
  return [h("h2", {}, "No " + what + " found"), h("p", {}, "Nothing matches " + filters.join(" and ") + "."), clear];
}

function drawStatus() {
  setText(byId("version"), model.status.version);
  const badge = byId("replica");
  badge.hidden = !model.status.standby;
  setText(badge, model.status.standby ? "standby" : "");
  badge.title = model.status.standby ? "Another replica answers kube-scheduler. Binds in flight and groups are known to that one alone. (" + model.status.standby + ")" : "";
}

// --- Updates -----------------------------------------------------------------------------------------------------

let countdown;
new Updates("data.json", {
  data(message) {
    const start = performance.now();
    model.take(message);
    performance.clearMeasures("gpushare:apply");
    performance.measure("gpushare:apply", { start, end: performance.now() });
    soon();
  },
  connection(name, { since: lost, next }) {
    clearInterval(countdown);
    byId("connection").className = name;
    document.documentElement.classList.toggle("stale", name !== "live" && model.known);
    const words = { live: "live", connecting: "connecting", paused: "paused while hidden", disconnected: "disconnected since " + clock(lost) };
    setText(byId("connection-state"), words[name]);
    const retry = byId("connection-retry");
    setText(retry, "");
    if (name !== "disconnected") return;
    const update = () => setText(retry, Date.now() < next ? "trying again in " + Math.ceil((next - Date.now()) / 1000) + "s" : "trying again");
    update();
    countdown = setInterval(update, 1000);
  },
});

// --- Tabs, search, filters ---------------------------------------------------------------------------------------

/** go changes what is shown. typed is the field into which the reader types. */
function go(changes, typed) {
  // An order belongs to the list in which it was chosen.
  if (changes.view && changes.view !== state.view) changes = { sort: "", ...changes };
  address.set(changes, typed);
  draw();
}

/** moved draws what the address asks for after the reader went back or forward. */
function moved() {
  const inside = byId("details").contains(document.activeElement);
  draw();
  if (inside && byId("details").hidden) byId("panel").focus();
}

let opener; // What had the focus when the box at the side was opened.

function openDetails(what) {
  opener = document.activeElement;
  go(what);
  details.focus();
}

function closeDetails() {
  const card = state.card;
  go({ card: "", help: "" });
  if (card && state.view === "cards") cards.focus(card);
  else if (opener?.isConnected) opener.focus();
  else byId("panel").focus();
}

views.forEach((view) => {
  const tab = byId("tab-" + view);
  tab.addEventListener("click", () => go({ view }));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    let next = view;
    do next = views[(views.indexOf(next) + step + views.length) % views.length]; while (byId("tab-" + next).hidden);
    go({ view: next });
    byId("tab-" + next).focus();
  });
});
for (const [id, field] of [["search", "q"], ["room", "room"], ["model", "model"], ["pool", "pool"], ["order", "order"]]) {
  byId(id).addEventListener("input", (event) => go({ [field]: event.target.value }, ["order", "model", "pool"].includes(id) ? undefined : id));
}
byId("problems").addEventListener("input", (event) => go({ problems: event.target.checked ? "only" : "" }));
byId("group").addEventListener("click", () => {
  go({ group: "" });
  byId("search").focus();
});
byId("panel").addEventListener("click", (event) => {
  const link = event.target.closest("button[data-help], button[data-group], .link[data-card], .link[data-search]");
  if (!link) return;
  const { help, group, view, card, search } = link.dataset;
  if (search) go({ view: "pods", q: search, group: "" });
  else if (group) go({ view, group, q: "" });
  else openDetails(help ? { help, card: "" } : { card, help: "" });
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // The address has the view, so it can't have the place to skip to.
  byId("panel").focus();
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
  event.preventDefault();
  byId("search").focus();
  byId("search").select();
});
draw();
