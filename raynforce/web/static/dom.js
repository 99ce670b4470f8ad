// Elements and figures. Text becomes text nodes: nothing on this page is ever parsed as HTML.
import { language, t } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name === "value") element.value = value;
    else if (name === "checked" || name === "selected" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function put(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return parent;
}

// Replaces the content unless it would be the same: keeps focus, selection and scroll where nothing changed.
export function refresh(parent, ...children) {
  const next = h("div", null, ...children);
  if (parent.dataset.was === next.textContent && parent.childNodes.length) {
    const old = [...parent.childNodes], fresh = [...next.childNodes];
    if (old.length === fresh.length && old.every((node, i) => node.isEqualNode(fresh[i]))) return parent;
  }
  parent.dataset.was = next.textContent;
  parent.replaceChildren(...next.childNodes);
  return parent;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function figure(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value) || size >= 10 ** digits) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function short(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= limit) return `${Number((value / limit).toPrecision(3))}${unit}`;
  return figure(value, 3);
}

export function bytes(value) {
  if (!known(value)) return "–";
  for (const [limit, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= limit) return `${Number((value / limit).toPrecision(3))} ${unit}`;
  return `${value} B`;
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  const total = Math.max(0, Math.round(seconds));
  if (total < 60) return seconds < 10 ? `${seconds.toFixed(1)} s` : `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60 ? `${total % 60} s` : ""}`.trim();
  const hours = Math.floor(total / 3600), minutes = Math.round((total % 3600) / 60);
  return hours < 48 ? `${hours} h ${minutes} min` : `${Math.round(hours / 24)} d`;
}

export function age(time) {
  if (!known(time) || time <= 0) return "–";
  const seconds = Date.now() / 1000 - time;
  if (seconds < 5) return t("now");
  const words = new Intl.RelativeTimeFormat(language(), { numeric: "always", style: "narrow" });
  for (const [limit, unit] of [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]])
    if (seconds >= limit) return words.format(-Math.floor(seconds / limit), unit);
  return t("now");
}

export const clock = (time) => (known(time) ? new Date(time * 1000).toLocaleTimeString(language()) : "–");
export const moment = (time) => (known(time) ? new Date(time * 1000).toLocaleString(language()) : "–");

export const shownAs = (value) =>
  value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);

const toasted = () => document.getElementById("toast");
let hide = 0;
export function toast(text) {
  const box = toasted();
  box.textContent = text;
  box.classList.add("seen");
  clearTimeout(hide);
  hide = setTimeout(() => box.classList.remove("seen"), 3500);
}

export function chip(status) {
  return h("span", { class: `chip ${status}` }, h("i", { class: "dot", "aria-hidden": "true" }), t(status));
}

export function spark(values, width = 96, height = 22) {
  const box = s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  if (values.length < 2) return box;
  const low = Math.min(...values), high = Math.max(...values), range = high - low || 1;
  const points = values.map((value, i) => {
    const x = 1 + (i / (values.length - 1)) * (width - 2), y = height - 2 - ((value - low) / range) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  box.append(s("polyline", { points: points.join(" ") }));
  return box;
}

export const COLORS = [
  "#2f6fed", "#e4572e", "#17a673", "#a05bd6", "#d69a1a", "#16a3b8", "#e0468c", "#7a8f1f", "#8c6d57", "#5a6b85",
];
export const color = (index) => COLORS[index % COLORS.length];
