// What stays on the page: the bar, the way to each view, keys, theme and language, and news from the server.
import { connection, follow, getIfNew, onChange, token } from "./api.js";
import { h, put, toast } from "./dom.js";
import { language, speak, t } from "./words.js";
import * as curves from "./views/curves.js";
import * as run from "./views/run.js";
import * as runs from "./views/runs.js";
import * as tuning from "./views/tuning.js";

const VIEWS = { runs, curves, run, tuning };
export const board = { runs: [], tunings: [], sources: [], missing: [], troubles: [], ready: false };
let view = null, shown = "";

// -- where we are: #/view/id?name=value ------------------------------------------------------------------------------

export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  return { name: VIEWS[name] ? name : "runs", id: id || "", query: new URLSearchParams(query || "") };
}

export function link(name, id = "", query = {}) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value !== "" && value !== null && value !== undefined) words.set(key, value);
  const text = words.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  return `#/${name}${id ? `/${id}` : ""}${text ? `?${text}` : ""}`;
}

export const go = (...where) => { location.hash = link(...where); };
// Remember what is seen in the address, without a step in the browser's history.
export function remember(query) {
  const { name, id } = place();
  history.replaceState(null, "", link(name, id, query));
}

function route() {
  token();
  const { name, id } = place(), key = `${name}/${id}`;
  if (view?.close) view.close();
  shown = key;
  view = VIEWS[name].show(document.getElementById("content"), id);
  bar();
}

// -- the bar ---------------------------------------------------------------------------------------------------------

const THEME = "raynforce.theme";
function theme() {
  try { return localStorage.getItem(THEME) || ""; } catch { return ""; }
}
export function dark() {
  return document.documentElement.dataset.theme === "dark";
}
function paint(next) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = next || system;
}
function turn() {
  const next = dark() ? "light" : "dark";
  try { localStorage.setItem(THEME, next); } catch { /* private */ }
  paint(next);
  route();
}
function translate() {
  speak(language() === "zh" ? "en" : "zh");
  route();
}

function bar() {
  const { name } = place(), state = connection();
  const tab = (to, text) =>
    h("a", { href: link(to), "aria-current": name === to || (to === "runs" && name === "run") ? "page" : null }, t(text));
  const words = { live: "live", lost: "connection lost, trying again", connecting: "connecting", refused: "This page needs its token" };
  put(
    document.getElementById("bar"),
    h("a", { class: "brand", href: link("runs") }, h("img", { src: "icon.svg", alt: "", width: 22, height: 22 }), "Raynforce"),
    h("nav", { "aria-label": "Raynforce" }, tab("runs", "Runs"), tab("curves", "Curves"), tab("tuning", "Tuning")),
    h("span", { class: `link ${state}`, role: "status" }, h("i", { class: "dot", "aria-hidden": "true" }), h("span", null, t(words[state]))),
    h("button", { class: "quiet", onclick: translate, "aria-label": `${language() === "zh" ? "EN" : "中文"} (${t("Language")})`, title: t("Language") }, language() === "zh" ? "EN" : "中文"),
    h("button", { class: "quiet", onclick: turn, "aria-label": t("Theme"), title: t("Theme") }, dark() ? "☀" : "☾"),
    h("button", { class: "quiet keys", onclick: help, "aria-label": t("Keyboard"), title: t("Keyboard") }, "?"),
  );
  document.getElementById("skip").textContent = t("Skip to content");
  document.documentElement.lang = language();
}

function help() {
  const rows = [
    ["r", "go to runs"], ["c", "go to curves"], ["t", "go to tuning"], ["/", "filter"], ["j k", "next and previous row"],
    ["x", "select"], ["Enter", "open"], ["v", "compare what is selected"], ["0", "reset zoom"], ["d", "light or dark"], ["?", "this list"],
  ];
  const box = h("dialog", { "aria-label": t("Keyboard") },
    h("h2", null, t("Keyboard")),
    h("dl", { class: "shortcuts" }, rows.map(([key, what]) => [h("dt", null, h("kbd", null, key)), h("dd", null, t(what))])),
    h("form", { method: "dialog" }, h("button", null, t("Close"))));
  document.body.append(box);
  box.addEventListener("close", () => box.remove());
  box.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input:not([type=checkbox]):not([type=range]), textarea, select");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const keys = { r: () => go("runs"), c: () => go("curves"), t: () => go("tuning"), d: turn, "?": help };
  if (keys[event.key]) keys[event.key]();
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (!view?.key?.(event)) return;
  event.preventDefault();
});

// -- news ------------------------------------------------------------------------------------------------------------

async function load() {
  try {
    Object.assign(board, await getIfNew("/api/runs"));
  } catch { return; }
}

let busy = false, again = null;
async function news(told) {
  if (told.state && !told.changed) {
    bar();
    if (told.state === "refused") refuse();
    else if (told.state === "live" && document.querySelector(".refused")) route();
    return;
  }
  if (busy) { again = { ...told, changed: [...(again?.changed || []), ...told.changed] }; return; }
  busy = true;
  await load();
  busy = false;
  view?.news?.(new Set(told.changed));
  if (again) { const next = again; again = null; news(next); }
}

function refuse() {
  view?.close?.();
  view = null;
  put(document.getElementById("content"), h("div", { class: "empty refused" },
    h("h1", null, t("This page needs its token")),
    h("p", null, t("Open the link that raynforce watch has printed; it ends in #token=…"))));
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("content").focus();
});
paint(theme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!theme()) { paint(""); route(); } });
window.addEventListener("hashchange", route);
window.addEventListener("unhandledrejection", (event) => {
  if (event.reason?.name !== "AbortError" && event.reason?.status !== 401) toast(event.reason?.message || String(event.reason));
  event.preventDefault();
});
token();
onChange(news);
bar();
await load();
if (!location.hash.startsWith("#/") && board.runs.length === 1) history.replaceState(null, "", link("run", board.runs[0].id));
else if (location.hash === "#/" && board.runs.length === 1) history.replaceState(null, "", link("run", board.runs[0].id));
if (!document.querySelector(".refused")) route();
follow();
