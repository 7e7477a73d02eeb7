// Functions that build the page's elements. Data of the cluster is inserted as text, never as HTML.

/** h creates an element; attributes that are undefined or false are omitted. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const name in attributes) {
    const value = attributes[name];
    if (value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== ""));
  return element;
}

/** svg creates an SVG element. */
export function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** setText sets the text only if it differs, because most texts don't change. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const number = (n) => whole.format(n);

/** amount formats a node's memory in the unit of the node. */
export function amount(n, unit) {
  if (!unit) return whole.format(n);
  return /^\d/.test(unit) ? whole.format(n) + " × " + unit : whole.format(n) + " " + unit;
}

/** sum formats memory in MiB in the unit of the cluster. */
export function sum(mib, unit) {
  if (unit && unit.name) return amount(mib / unit.mib, unit.name);
  return tenths.format(mib / 1024) + " GiB";
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** age formats the rounded time since a moment. */
export function age(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 120) return seconds + " s";
  if (seconds < 7200) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h";
  return Math.floor(seconds / 86400) + " d";
}

export const plural = (n, one, many) => number(n) + " " + (n === 1 ? one : many);
