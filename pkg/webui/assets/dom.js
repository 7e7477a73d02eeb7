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

// Numbers are written as in the messages of the extender, in kubectl and in YAML: digits without separators.

export const number = String;

/** amount formats a node's memory in the unit of the node, like "8138 MiB" or "3 x 256MiB". */
export function amount(n, unit) {
  if (!unit) return number(n);
  return number(n) + (/^\d/.test(unit) ? " x " : " ") + unit;
}

/** part formats a part of a card: memory, and cores if there are some: "8 GiB, 50%". */
export const part = (memory, cores, unit) => amount(memory, unit) + (cores ? ", " + cores + "%" : "");

/** sum formats memory in MiB in the unit of the cluster, or in GiB if the largest amount beside it has more than six digits in that unit. */
export function sum(mib, unit, largest = mib) {
  if (unit && unit.name && largest / unit.mib < 1e6) return amount(Math.round(mib / unit.mib), unit.name);
  const gib = mib / 1024;
  return amount(gib >= 1000 ? Math.round(gib) : Math.round(10 * gib) / 10, "GiB");
}

/** share formats a part of a sum: "40 of 80 GiB". */
export const share = (part, all, unit) => sum(part, unit, all).split(" ")[0] + " of " + sum(all, unit);

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** age formats a duration as kubectl does: "90s", "26m", "4h10m", "3d". */
export function age(milliseconds) {
  const seconds = Math.max(0, Math.floor(milliseconds / 1000));
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  const and = (n, unit) => (n ? n + unit : "");
  if (seconds < 120) return seconds + "s";
  if (minutes < 10) return minutes + "m" + and(seconds % 60, "s");
  if (hours < 3) return minutes + "m";
  if (hours < 8) return hours + "h" + and(minutes % 60, "m");
  if (hours < 48) return hours + "h";
  return days + "d" + (days < 8 ? and(hours % 24, "h") : "");
}

export const plural = (n, one, many) => number(n) + " " + (n === 1 ? one : many);
