// The page: applies the stream's messages to the model and draws the visible part, at most once per frame.
import { Cards } from "./cards.js";
import { Chart } from "./chart.js";
import { Details } from "./details.js";
import { byId, clock, h, number, plural, setText } from "./dom.js";
import { Model } from "./model.js";
import { Stream } from "./stream.js";
import { Summary } from "./summary.js";
import { Pending, Pods } from "./tables.js";

const model = new Model();
const views = ["cards", "pods", "pending"];
const state = { view: "cards", query: "" };

const summary = new Summary();
const chart = new Chart(byId("chart"));
const details = new Details(byId("details"), findPod, (place) => state.view === "cards" && cards.focus(place));
const openCard = (node, card) => details.open(node, card, model);
const cards = new Cards(byId("view-cards"), openCard);
const pods = new Pods(byId("view-pods"), draw, openCard);
const pending = new Pending(byId("view-pending"), draw);

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
  details.show(model);
  drawStatus();
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

function drawView() {
  const filters = {
    query: state.query, room: Number(byId("room").value) || 0, problems: byId("problems").checked, order: byId("order").value,
  };
  const nothing = emptiness();
  byId("empty").hidden = !nothing;
  if (nothing) byId("empty").replaceChildren(...nothing);
  for (const view of views) byId("view-" + view).hidden = Boolean(nothing) || view !== state.view;
  byId("card-filters").hidden = state.view !== "cards";
  if (nothing) {
    setText(byId("shown"), "");
    return;
  }
  if (state.view === "cards") cards.count(cards.show(model, filters), model.names.length);
  if (state.view === "pods") setText(byId("shown"), of(pods.show(model, filters), model.sums().pods, "pod", "pods"));
  if (state.view === "pending") setText(byId("shown"), of(pending.show(model, filters), model.pending.length, "pending pod", "pending pods"));
}

const of = (shown, all, one, many) => (shown === all ? plural(all, one, many) : number(shown) + " of " + plural(all, one, many));

/** emptiness returns the text for an empty list. */
function emptiness() {
  if (!model.known) return [h("p", { class: "dim" }, "Waiting for the extender …")];
  if (model.status.notReady) return [h("h2", {}, "Not ready yet"), h("p", {}, model.status.notReady)];
  if (state.view === "cards" && model.names.length === 0) {
    return [h("h2", {}, "No node shares GPU memory yet"),
      h("p", {}, "Label a GPU node with gpushare=true and let the device plugin run there: its cards show up here within seconds.")];
  }
  if (state.view === "pods" && model.sums().pods === 0) return [h("h2", {}, "No pod holds GPU memory")];
  if (state.view === "pending" && model.pending.length === 0) return [h("h2", {}, "No pending pods"), h("p", {}, "Every pod that requests GPU memory has a node.")];
  return undefined;
}

function drawStatus() {
  setText(byId("version"), model.status.version);
  const badge = byId("replica");
  badge.hidden = !model.status.standby;
  setText(badge, model.status.standby ? "standby" : "");
  badge.title = model.status.standby ? "Another replica answers kube-scheduler. Binds in flight are known to that one alone. (" + model.status.standby + ")" : "";
}

// --- The stream --------------------------------------------------------------------------------------------------

let countdown;
new Stream("events", {
  whole(message) {
    model.whole(message);
    soon();
  },
  delta(seq, message) {
    const start = performance.now();
    model.delta(seq, message);
    performance.clearMeasures("gpushare:apply");
    performance.measure("gpushare:apply", { start, end: performance.now() });
    soon();
  },
  state(name, { since: lost, next }) {
    clearInterval(countdown);
    byId("connection").className = name;
    document.documentElement.classList.toggle("stale", name !== "live" && model.known);
    const words = { live: "live", connecting: "connecting", paused: "paused while hidden", disconnected: "disconnected since " + clock(lost) };
    setText(byId("connection-state"), words[name]);
    const retry = byId("connection-retry");
    setText(retry, "");
    if (name !== "disconnected") return;
    const update = () => setText(retry, Date.now() < next ? "trying again in " + Math.ceil((next - Date.now()) / 1000) + " s" : "trying again");
    update();
    countdown = setInterval(update, 1000);
  },
});

// --- Tabs, search, filters ---------------------------------------------------------------------------------------

function choose(view, focus) {
  state.view = view;
  for (const name of views) {
    const tab = byId("tab-" + name);
    tab.setAttribute("aria-selected", name === view);
    tab.tabIndex = name === view ? 0 : -1;
    if (name === view && focus) tab.focus();
  }
  byId("panel").setAttribute("aria-labelledby", "tab-" + view);
  remember();
  draw();
}

function findPod(name) {
  state.query = byId("search").value = name;
  choose("pods");
}

/** remember stores the view in the page's address, so that it can be shared. */
function remember() {
  const search = new URLSearchParams();
  if (state.query) search.set("q", state.query);
  history.replaceState(null, "", "#" + state.view + (search.size ? "?" + search : ""));
}

function recall() {
  const [view, search] = location.hash.slice(1).split("?");
  state.query = byId("search").value = new URLSearchParams(search ?? "").get("q") ?? "";
  choose(views.includes(view) ? view : "cards");
}

views.forEach((view, i) => {
  const tab = byId("tab-" + view);
  tab.addEventListener("click", () => choose(view));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(views[(i + step + views.length) % views.length], true);
  });
});
byId("search").addEventListener("input", (event) => {
  state.query = event.target.value;
  remember();
  draw();
});
for (const id of ["room", "problems", "order"]) byId(id).addEventListener("input", draw);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
  event.preventDefault();
  byId("search").focus();
  byId("search").select();
});
addEventListener("hashchange", recall);
recall();
