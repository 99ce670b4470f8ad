// Curves of several runs: over steps or time, smoothed, seeds together, zoomed; all of it in the address.
import { board, place, remember } from "../main.js";
import { get } from "../api.js";
import { Charts } from "../chart.js";
import { color, figure, h, put, refresh, toast } from "../dom.js";
import { t } from "../words.js";
import { matching, selected } from "./runs.js";

const SECTIONS = [
  ["Return", (k) => k === "charts/episodic_return" || k === "eval/return"], ["Losses", (k) => k.startsWith("losses/")],
  ["Speed", (k) => k === "charts/SPS" || k === "time/sample" || k === "time/learn"], ["Lag", (k) => k === "lag/mean" || k === "lag/max"],
  ["Replay", (k) => k.startsWith("replay/")], ["Charts", (k) => k.startsWith("charts/")], ["Time", (k) => k.startsWith("time/")],
  ["Health", (k) => k.startsWith("health/")], ["Disk", (k) => k.startsWith("disk/")], ["Other", () => true],
];
const CLOSED = new Set(["Charts", "Time", "Health", "Disk", "Other"]);
const HIDDEN = new Set(["time/seconds", "eval/skipped"]);
const FIRST = ["charts/episodic_return", "eval/return", "charts/SPS"];

export function show(root) {
  const { query } = place();
  const state = {
    runs: (query.get("runs") || "").split(",").filter(Boolean), by: query.get("x") === "time" ? "time" : "step", q: "",
    smooth: Number(query.get("smooth")) || 0, logY: query.get("logy") === "1", logX: query.get("logx") === "1",
    together: query.get("seeds") === "1", open: new Set((query.get("open") || "").split(",").filter(Boolean)),
  };
  if (!query.has("runs")) state.runs = selected.size ? [...selected] : board.runs.slice(0, 5).map((run) => run.id);
  let names = FIRST, sections = new Map();
  const given = (name) => (query.get(name) === null || query.get(name) === "" ? null : Number(query.get(name)));
  const start = [given("from"), given("to")];

  const grid = h("div", { class: "grid-area" });
  const list = h("div", { class: "picklist" });
  const filter = h("input", { type: "search", placeholder: t("Filter"), "aria-label": t("Filter runs by name, algorithm, environment, status"), oninput: () => { state.q = filter.value; side(); } });
  const toggle = (text, key, changed) => {
    const button = h("button", { class: "toggle", "aria-pressed": String(state[key]), onclick: () => { state[key] = !state[key]; button.setAttribute("aria-pressed", String(state[key])); changed(); } }, t(text));
    return button;
  };
  const by = h("select", { "aria-label": t("over"), onchange: () => { state.by = by.value; charts.view = [null, null]; rebuild(); } },
    [["step", "steps"], ["time", "time"]].map(([key, text]) => h("option", { value: key, selected: key === state.by }, `${t("over")} ${t(text)}`)));
  const smooth = h("input", { type: "range", min: 0, max: 1, step: 0.02, value: state.smooth, "aria-label": t("Smoothing"), oninput: () => { state.smooth = Number(smooth.value); save(); charts.ask(true); } });
  const tools = h("div", { class: "tools" }, h("h1", null, t("Curves")), by,
    h("label", { class: "slide" }, t("Smoothing"), smooth),
    toggle("log y", "logY", rebuild), toggle("log x", "logX", rebuild), toggle("Seeds together", "together", () => { side(); save(); charts.stale(); }),
    h("button", { onclick: reset }, t("Reset zoom")), h("button", { onclick: copy }, t("Copy link")));
  put(root, h("section", { class: "page split" },
    h("aside", { "aria-label": t("Runs") }, filter, list),
    h("div", { class: "mainside" }, tools, h("p", { class: "hint muted small" }, t("drag to zoom, Shift-drag to pan, wheel to zoom, double-click to reset")), grid)));

  function sets() {
    const runs = state.runs.map((id) => board.runs.find((run) => run.id === id)).filter(Boolean);
    if (!state.together) return runs.map((run) => ({ label: run.name, color: color(state.runs.indexOf(run.id)), ids: [run.id] }));
    const groups = new Map();
    for (const run of runs) {
      const name = run.group || `${run.algo} · ${run.env}`;
      groups.set(name, [...(groups.get(name) || []), run.id]);
    }
    return [...groups].map(([label, ids], i) => ({ label: ids.length > 1 ? `${label} (${ids.length})` : label, color: color(i), ids }));
  }

  const charts = new Charts({
    sets, by: () => state.by, smooth: () => state.smooth, logY: () => state.logY, logX: () => state.logX,
    onView: save, ask: (words, signal) => get(`/api/series?${words}`, signal),
    answered: (answer) => { if (answer.names.join() !== names.join()) { names = answer.names; layout(); } },
  });
  charts.view = start;

  function save() {
    const [from, to] = charts.view;
    remember({
      runs: state.runs.join(","), x: state.by === "time" ? "time" : "", smooth: state.smooth || "", logy: state.logY ? 1 : "", logx: state.logX ? 1 : "",
      seeds: state.together ? 1 : "", from: from === null ? "" : Number(from.toPrecision(8)), to: to === null ? "" : Number(to.toPrecision(8)), open: [...state.open].join(","),
    });
  }

  function reset() { charts.look([null, null]); }

  async function copy() {
    save();
    try { await navigator.clipboard.writeText(location.href); toast(t("Link copied")); } catch { toast(location.href); }
  }

  function choose(id, on) {
    state.runs = on ? [...state.runs, id] : state.runs.filter((each) => each !== id);
    side(); save(); layout(); charts.stale();
  }

  function side() {
    const groups = state.together ? sets() : [];
    const shade = (run) => {
      if (!state.runs.includes(run.id)) return "transparent";
      return state.together ? groups.find((set) => set.ids.includes(run.id))?.color : color(state.runs.indexOf(run.id));
    };
    const at = list.scrollTop, focus = document.activeElement?.dataset?.run;
    refresh(list, matching(board.runs, state.q).map((run) =>
      h("label", { class: "pickrun", title: run.path },
        h("input", { type: "checkbox", "data-run": run.id, checked: state.runs.includes(run.id), onchange: (e) => choose(run.id, e.target.checked) }),
        h("i", { class: "swatch", style: { background: shade(run) } }),
        h("span", { class: "pickname" }, h("span", { class: "pickdir" }, h("bdi", null, run.name.slice(0, run.name.lastIndexOf("/") + 1))), h("span", { class: "pickbase" }, run.name.slice(run.name.lastIndexOf("/") + 1))), h("span", { class: "num small muted" }, figure(run.return, 3)))));
    list.scrollTop = at;
    if (focus) list.querySelector(`[data-run="${focus}"]`)?.focus();
  }

  function layout() {
    if (!sets().length) {
      for (const chart of charts.charts.values()) chart.close();
      charts.charts.clear(); charts.visible.clear(); charts.fetched.clear(); sections.clear();
      put(grid, h("div", { class: "empty" }, h("h2", null, t("Choose runs to draw")), h("p", null, t("Pick them on the left, or in the table of runs."))));
      return;
    }
    if (grid.querySelector(".empty")) grid.replaceChildren();
    const left = new Set(names.filter((name) => !HIDDEN.has(name) && !/^lag\/(is|from)_/.test(name)));
    for (const [title, test] of SECTIONS) {
      const keys = [...left].filter(test);
      keys.forEach((key) => left.delete(key));
      if (!keys.length) continue;
      if (!sections.has(title)) {
        const body = h("div", { class: "charts" });
        const box = h("details", { class: "section", open: !CLOSED.has(title) || state.open.has(title) }, h("summary", null, h("h2", null, t(title)), h("span", { class: "muted small" })), body);
        box.addEventListener("toggle", () => { if (CLOSED.has(title)) { if (box.open) state.open.add(title); else state.open.delete(title); save(); } });
        const next = SECTIONS.slice(SECTIONS.findIndex(([name]) => name === title) + 1).map(([name]) => sections.get(name)?.box).find(Boolean);
        grid.insertBefore(box, next || null);
        sections.set(title, { box, body });
      }
      const { box, body } = sections.get(title);
      box.querySelector("summary span").textContent = keys.length > 1 ? String(keys.length) : "";
      for (const key of keys) if (!charts.charts.has(key)) charts.add(body, key, title === "Return" ? { height: 260 } : {});
    }
  }

  function rebuild() {
    save();
    for (const chart of charts.charts.values()) chart.close();
    charts.charts.clear(); charts.visible.clear(); charts.fetched.clear(); sections = new Map();
    grid.replaceChildren();
    layout();
  }

  side();
  layout();
  save();
  let last = 0, timer = 0;
  const live = () => { last = performance.now(); charts.ask(true); };
  return {
    charts,
    news(changed) {
      side();
      if (!state.runs.some((id) => changed.has(id))) return;
      if (!charts.charts.size) layout();
      clearTimeout(timer);
      timer = setTimeout(live, Math.max(0, 450 - (performance.now() - last)));
    },
    close() { clearTimeout(timer); charts.close(); },
    key(event) {
      if (event.key === "0") reset(); else return false;
      return true;
    },
  };
}

