// Small helpers to build the page's elements. Everything that comes from the cluster goes in as text, never as HTML.

/** h makes an element; attributes that are undefined or false are left out. */
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

/** svg makes an SVG element. */
export function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** setText leaves alone what needn't change: most of what is shown stays as it is. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const number = (n) => whole.format(n);

/** amount writes a node's own memory in the unit that it reports. */
export function amount(n, unit) {
  if (!unit) return whole.format(n);
  return /^\d/.test(unit) ? whole.format(n) + " × " + unit : whole.format(n) + " " + unit;
}

/** sum writes memory given in MiB in the unit of the whole cluster. */
export function sum(mib, unit) {
  if (unit && unit.name) return amount(mib / unit.mib, unit.name);
  return tenths.format(mib / 1024) + " GiB";
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** age writes how long ago something was, roughly. */
export function age(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 120) return seconds + " s";
  if (seconds < 7200) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h";
  return Math.floor(seconds / 86400) + " d";
}

export const plural = (n, one, many) => number(n) + " " + (n === 1 ? one : many);
