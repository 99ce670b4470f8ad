// A search: trials, parallel coordinates, and which settings matter.
import { board, link } from "../main.js";
import { get } from "../api.js";
import { chip, duration, figure, h, put, refresh, s, short, shownAs } from "../dom.js";
import { t } from "../words.js";

export function show(root, id) {
  if (!id && board.tunings.length === 1) id = board.tunings[0].id;
  if (!id) {
    const list = h("div");
    const fill = () => refresh(list, board.tunings.length
      ? h("ul", { class: "plain" }, board.tunings.map((each) => h("li", null, h("a", { href: link("tuning", each.id) }, each.name), h("span", { class: "muted small" }, ` ${each.path}`))))
      : h("div", { class: "empty" }, h("h2", null, t("No searches here")), h("p", null, t("raynforce tune writes one; it appears here while it runs.")), h("pre", null, "raynforce tune ppo CartPole-v1 --trials 20")));
    put(root, h("section", { class: "page" }, h("div", { class: "tools" }, h("h1", null, t("Tuning"))), list));
    fill();
    return { news: fill };
  }
  let closed = false, hot = null, timer = 0;
  const head = h("div"), left = h("div", { class: "card" }), right = h("div", { class: "card" }), table = h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": t("trials") });
  put(root, h("section", { class: "page" }, head, h("div", { class: "two wide-left" }, left, right), table));

  async function load() {
    let found;
    try { found = await get(`/api/tuning/${id}`); } catch { return; }
    if (closed) return;
    const { tune, trials } = found, down = tune.mode === "min";
    const known = trials.filter((trial) => typeof trial.objective === "number");
    const worth = (trial) => (typeof trial.objective === "number" ? [1, down ? -trial.objective : trial.objective] : [0, trial.merit]);
    const ranked = trials.filter((trial) => typeof trial.objective === "number" || typeof trial.merit === "number")
      .sort((a, b) => { const [p, q] = [worth(a), worth(b)]; return q[0] - p[0] || q[1] - p[1]; });
    const best = known.reduce((a, b) => (a === null || (down ? b.objective < a.objective : b.objective > a.objective) ? b : a), null);
    refresh(head, h("div", { class: "run-head" }, h("div", null, h("h1", null, found.name),
      h("p", { class: "muted" }, `${tune.algorithm ?? "?"} · ${tune.env ?? "?"} · ${t("objective")} ${tune.objective ?? "?"} (${tune.mode ?? "max"}) · ${t("scheduler")} ${shownAs(tune.scheduler)}`),
      h("p", { class: "small muted path" }, found.path)),
    h("div", { class: "tiles" },
      h("div", { class: "tile" }, h("span", { class: "muted small" }, t("trials")), h("b", null, `${trials.filter((x) => ["done", "stopped", "failed"].includes(x.status)).length}`), h("span", { class: "small muted" }, t("of %", tune.trials ?? trials.length))),
      h("div", { class: "tile" }, h("span", { class: "muted small" }, t("best so far")), h("b", null, best ? figure(best.objective) : "–"), h("span", { class: "small muted" }, best ? `${t("trial")} ${best.id}` : " ")))));
    const keys = [...new Set([...Object.keys(tune.search || {}), ...trials.flatMap((trial) => Object.keys(trial.config))])];
    refresh(left, h("h2", null, t("Parallel coordinates")), parallel(keys, ranked, tune, best));
    const shares = Object.entries(found.importance).sort((a, b) => b[1] - a[1]), most = Math.max(...shares.map(([, share]) => share), 1e-9);
    refresh(right, h("h2", null, t("Importance")), shares.length ? [h("p", { class: "small muted" }, t("share of each setting in the outcome")), h("div", { class: "importance" }, shares.map(([name, share]) => [
      h("span", { class: "mono small" }, name), h("span", { class: "meter" }, h("i", { style: { width: `${((share / most) * 100).toFixed(1)}%` } })), h("span", { class: "num small" }, `${(share * 100).toFixed(0)} %`)]))] : h("p", { class: "muted" }, t("Nothing was reported yet")));
    const order = (trial) => (ranked.includes(trial) ? ranked.indexOf(trial) : Infinity);
    refresh(table, h("h2", null, t("trials")), h("table", null,
      h("thead", null, h("tr", null, h("th", null, t("trial")), h("th", null, t("status")), h("th", { class: "num" }, t("objective")), h("th", { class: "num" }, t("steps")), h("th", { class: "num" }, t("time")), keys.map((key) => h("th", { class: "num mono" }, key.replace(/^algorithm\./, ""))), h("th", null, t("cause")))),
      h("tbody", null, trials.slice().sort((a, b) => order(a) - order(b)).map((trial) => h("tr", { "data-trial": trial.id, class: trial === best ? "chosen" : null },
        h("td", null, trial.runs.length ? h("a", { href: link("curves", "", { runs: trial.runs.join(","), seeds: trial.runs.length > 1 ? 1 : "" }) }, trial.id) : trial.id), h("td", null, chip(trial.status)), h("td", { class: "num" }, figure(trial.objective)),
        h("td", { class: "num" }, short(trial.steps)), h("td", { class: "num" }, trial.seconds ? duration(trial.seconds) : "–"), keys.map((key) => h("td", { class: "num mono" }, typeof trial.config[key] === "number" ? figure(trial.config[key]) : shownAs(trial.config[key]))), h("td", { class: "small muted" }, trial.cause || ""))))));
    table.querySelectorAll("tr[data-trial]").forEach((row) => {
      row.onmouseenter = () => light(row.dataset.trial);
      row.onmouseleave = () => light(null);
    });
    light(hot);
  }

  function light(trial) {
    hot = trial;
    left.querySelectorAll("polyline").forEach((line) => line.classList.toggle("hot", line.dataset.trial === trial));
    left.querySelector("svg")?.classList.toggle("some", trial !== null);
  }

  function parallel(keys, trials, tune, best) {
    if (!trials.length || !keys.length) return h("p", { class: "muted" }, t("Nothing was reported yet"));
    const axes = [...keys, "rank"], w = Math.max(520, axes.length * 104, left.clientWidth - 36), height = 270, top = 36, low = height - 22;
    const value = (trial, key) => (key === "rank" ? -trials.indexOf(trial) - 1 : trial.config[key]);
    const scale = (key) => {
      const values = trials.map((trial) => value(trial, key)).filter((v) => v !== null && v !== undefined);
      if (values.some((v) => typeof v !== "number")) {
        const names = [...new Set(values.map(String))].sort();
        return { at: (v) => (names.length > 1 ? names.indexOf(String(v)) / (names.length - 1) : 0.5), ends: [names[0], names[names.length - 1]] };
      }
      const min = Math.min(...values), max = Math.max(...values), log = key !== "rank" && (/log/.test(tune.search?.[key]?.kind || "") || (min > 0 && max / min > 30));
      if (key === "rank") return { at: (v) => (max > min ? (v - min) / (max - min) : 0.5), ends: [-min, -max] };
      const f = log ? Math.log : (v) => v;
      return { at: (v) => (max > min ? (f(v) - f(min)) / (f(max) - f(min)) : 0.5), ends: [figure(min, 3), figure(max, 3)] };
    };
    const scales = axes.map(scale), x = (i) => 60 + (i / (axes.length - 1)) * (w - 120), y = (share) => low - share * (low - top);
    const last = scales[axes.length - 1];
    const box = s("svg", { class: "parallel", viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": t("Parallel coordinates"), style: { "min-width": `${Math.round(w * 0.85)}px` } });
    for (const trial of trials) {
      const good = last.at(value(trial, "rank"));
      const points = axes.map((key, i) => { const v = value(trial, key); return v === null || v === undefined ? null : `${x(i).toFixed(1)},${y(scales[i].at(v)).toFixed(1)}`; }).filter(Boolean);
      box.append(s("polyline", { points: points.join(" "), "data-trial": trial.id, class: trial === best ? "best" : null, style: { stroke: `hsl(${(220 - good * 180).toFixed(0)} 75% 52%)`, opacity: (0.25 + 0.6 * good).toFixed(2) } }, s("title", null, `${trial.id}: ${figure(trial.objective)}`)));
    }
    axes.forEach((key, i) => box.append(s("line", { x1: x(i), x2: x(i), y1: top, y2: low, class: "axis" }),
      s("text", { x: x(i), y: 12, class: "axis-name" }, key === "rank" ? t("rank") : key.replace(/^\w+\./, "")), s("text", { x: x(i), y: low + 14, class: "axis-end" }, String(scales[i].ends[0])), s("text", { x: x(i), y: 27, class: "axis-end" }, String(scales[i].ends[1]))));
    return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("Parallel coordinates") }, box);
  }

  load();
  const clock = setInterval(load, 2000);
  return { news() { clearTimeout(timer); timer = setTimeout(load, 200); }, close() { closed = true; clearInterval(clock); clearTimeout(timer); } };
}
