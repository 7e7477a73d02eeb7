// What is shown, as the page's address has it: a reload, a link and the back button show the same view.

export const views = ["cards", "pods", "pending", "namespaces", "groups", "shares"];

const defaults = { view: "cards", q: "", group: "", room: "", model: "", pool: "", problems: "", order: "name", sort: "", card: "", help: "" };

export class Address {
  /** moved() is called when the address has changed by another way than set. */
  constructor(moved) {
    this.state = {};
    this.read();
    addEventListener("popstate", () => {
      this.read();
      moved();
    });
  }

  read() {
    const [view, search] = location.hash.slice(1).split("?");
    const values = new URLSearchParams(search ?? "");
    for (const name in defaults) this.state[name] = values.get(name) ?? defaults[name];
    this.state.view = views.includes(view) ? view : defaults.view;
    this.typed = undefined;
  }

  /** set changes some fields, as one step of the browser's history. typed is a field into which a reader types: that is one step too. */
  set(changes, typed) {
    Object.assign(this.state, changes);
    const values = new URLSearchParams();
    for (const name in defaults) if (name !== "view" && this.state[name] !== defaults[name]) values.set(name, this.state[name]);
    const address = "#" + this.state.view + (values.size ? "?" + String(values).replaceAll("%2F", "/") : "");
    if (typed && typed === this.typed) history.replaceState(null, "", address);
    else if (address !== location.hash) history.pushState(null, "", address);
    this.typed = typed;
  }
}
