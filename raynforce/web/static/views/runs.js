// The table of runs: filter, group, sort, choose some to compare.
import { board, go, link, place, remember } from "../main.js";
import { age, chip, figure, h, put, refresh, short, spark } from "../dom.js";
import { t } from "../words.js";

export const selected = new Set();
const GROUPS = {
  "": "nothing", folder: "folder", "algo+env": "algorithm and environment", algo: "algorithm", env: "environment", status: "status",
};
const COLUMNS = [
  ["name", "run", ""], ["status", "status", ""], ["algo", "algorithm", "wide"], ["env", "environment", "wide"], ["steps", "steps", "num"],
  ["return", "return", "num"], ["best_eval", "best", "num"], ["spark", "course", "wide"], ["speed", "speed", "num wide"],
  ["faults", "faults", "num wide"], ["active", "age", "num"],
];

export function matching(runs, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => {
    const all = `${run.name} ${run.algo} ${run.env} ${run.status} ${run.topology} ${run.runtime}`.toLowerCase();
    return words.every((word) => all.includes(word));
  });
}

export function groupOf(run, by) {
  if (by === "folder") return run.group || "–";
  if (by === "algo+env") return `${run.algo} · ${run.env}`;
  return by ? String(run[by] ?? "–") : "";
}

export function show(root) {
  const { query } = place();
  const state = { q: query.get("q") || "", by: query.get("by") || "", sort: query.get("sort") || "-active" };
  let focused = -1;
  const body = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("Runs") });
  const count = h("span", { class: "muted", role: "status" });
  const actions = h("span", { class: "actions" }), trouble = h("div", { role: "status" });
  const filter = h("input", {
    type: "search", value: state.q, placeholder: t("Filter"), "aria-label": t("Filter runs by name, algorithm, environment, status"),
    oninput: () => { state.q = filter.value; draw(); },
  });
  const group = h("select", { "aria-label": t("Group by"), onchange: () => { state.by = group.value; draw(); } },
    Object.entries(GROUPS).map(([key, text]) => h("option", { value: key, selected: key === state.by }, `${t("Group by")}: ${t(text)}`)));
  put(root, h("section", { class: "page" }, h("div", { class: "tools" }, h("h1", null, t("Runs")), filter, group, count, actions), trouble, body));

  function rows() {
    const down = state.sort.startsWith("-"), key = state.sort.replace("-", "");
    const value = (run) => (key === "spark" ? run.return : run[key]);
    return matching(board.runs, state.q).sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === y) return a.name < b.name ? -1 : 1;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return (x < y ? -1 : 1) * (down ? -1 : 1);
    });
  }

  function sortBy(key) {
    const down = key !== "name" && key !== "status" && key !== "algo" && key !== "env";
    state.sort = state.sort === (down ? `-${key}` : key) ? (down ? key : `-${key}`) : down ? `-${key}` : key;
    draw();
  }

  function choose(run, on) {
    if (on) selected.add(run.id); else selected.delete(run.id);
    draw();
  }

  function line(run) {
    const broken = run.status === "broken";
    const done = run.total_steps ? Math.min(1, run.steps / run.total_steps) : 0;
    const box = h("input", { type: "checkbox", checked: selected.has(run.id), "aria-label": `${t("select")} ${run.name}`, onchange: (e) => choose(run, e.target.checked) });
    return h("tr", { "data-id": run.id, class: selected.has(run.id) ? "chosen" : null },
      h("td", { class: "pick" }, box),
      h("td", { class: "name" }, h("a", { href: link("run", run.id), title: run.path, class: "pickname" }, h("span", { class: "pickdir" }, h("bdi", null, run.name.slice(0, run.name.lastIndexOf("/") + 1))), h("span", { class: "pickbase" }, run.name.slice(run.name.lastIndexOf("/") + 1)))),
      h("td", null, chip(run.status)),
      broken
        ? h("td", { colspan: 9, class: "muted" }, run.reason)
        : [
          h("td", { class: "wide" }, run.algo), h("td", { class: "wide env", title: run.env }, run.env),
          h("td", { class: "num" }, short(run.steps), run.total_steps ? h("span", { class: "muted wide" }, ` / ${short(run.total_steps)}`) : null,
            run.status === "running" ? h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${(done * 100).toFixed(1)}%` } })) : null),
          h("td", { class: "num" }, figure(run.return)), h("td", { class: "num" }, figure(run.best_eval)),
          h("td", { class: "wide" }, spark(run.spark)), h("td", { class: "num wide" }, run.speed ? `${short(run.speed)}/s` : "–"),
          h("td", { class: `num wide ${run.faults ? "warn" : "muted"}` }, run.faults || "0"), h("td", { class: "num muted" }, age(run.active)),
        ]);
  }

  function draw() {
    remember({ q: state.q, by: state.by, sort: state.sort === "-active" ? "" : state.sort });
    const found = rows();
    count.textContent = t("% runs", found.length);
    refresh(actions, selected.size ? [
      h("button", { class: "main", onclick: compare }, t("Compare %", selected.size)),
      h("button", { onclick: () => { selected.clear(); draw(); } }, t("Clear")),
    ] : []);
    refresh(trouble, board.troubles.length && board.runs.length ? h("p", { class: "warn" }, board.troubles.join(" · ")) : []);
    if (!board.runs.length) { put(body, nothing()); return; }
    if (!found.length) { put(body, h("p", { class: "empty" }, t("No run matches"))); return; }
    const all = found.every((run) => selected.has(run.id));
    const head = h("tr", null,
      h("th", { class: "pick" }, h("input", { type: "checkbox", checked: all, "aria-label": t("select all"), onchange: (e) => { for (const run of found) e.target.checked ? selected.add(run.id) : selected.delete(run.id); draw(); } })),
      COLUMNS.map(([key, text, kind]) => {
        const here = state.sort.replace("-", "") === key;
        return h("th", { class: kind || null, "aria-sort": here ? (state.sort.startsWith("-") ? "descending" : "ascending") : null },
          h("button", { class: "sort", onclick: () => sortBy(key) }, t(text), here ? (state.sort.startsWith("-") ? " ↓" : " ↑") : ""));
      }));
    const lines = [];
    if (state.by) {
      const groups = new Map();
      for (const run of found) groups.set(groupOf(run, state.by), [...(groups.get(groupOf(run, state.by)) || []), run]);
      for (const [name, runs] of [...groups].sort((a, b) => (a[0] < b[0] ? -1 : 1))) {
        const whole = runs.every((run) => selected.has(run.id));
        lines.push(h("tr", { class: "group" },
          h("td", { class: "pick" }, h("input", { type: "checkbox", checked: whole, "aria-label": `${t("select")} ${name}`, onchange: (e) => { for (const run of runs) e.target.checked ? selected.add(run.id) : selected.delete(run.id); draw(); } })),
          h("td", { colspan: 11 }, h("b", null, name), h("span", { class: "muted" }, ` ${t("% runs", runs.length)}`))), runs.map(line));
      }
    } else lines.push(found.map(line));
    const at = body.scrollTop, focus = document.activeElement?.closest?.("tr")?.dataset.id, what = document.activeElement?.tagName;
    refresh(body, h("table", { class: "runs" }, h("thead", null, head), h("tbody", null, lines)));
    wire();
    body.scrollTop = at;
    if (focus) body.querySelector(`tr[data-id="${focus}"] ${what === "INPUT" ? "input" : "a"}`)?.focus();
  }

  function wire() {
    body.querySelectorAll("tr[data-id]").forEach((row) => {
      row.onclick = (event) => { if (!event.target.closest("a, input, button")) location.hash = link("run", row.dataset.id); };
    });
  }

  const compare = () => go("curves", "", { runs: [...selected].join(",") });

  draw();
  const clock = setInterval(draw, 5000);
  return {
    news: draw,
    close: () => clearInterval(clock),
    key(event) {
      const lines = [...body.querySelectorAll("tr[data-id]")];
      if (event.key === "j" || event.key === "k") {
        focused = Math.max(0, Math.min(lines.length - 1, focused + (event.key === "j" ? 1 : -1)));
        lines[focused]?.querySelector("a")?.focus();
      } else if (event.key === "x" && lines[focused]) lines[focused].querySelector("input").click();
      else if (event.key === "v" && selected.size) compare();
      else return false;
      return true;
    },
  };
}

function nothing() {
  if (!board.ready) return h("p", { class: "empty" }, t("Looking for runs …"));
  return h("div", { class: "empty" },
    h("h2", null, t("No runs yet")),
    board.missing.map((name) => h("p", null, t("% does not exist yet", name))),
    board.troubles.map((text) => h("p", { class: "warn" }, text)),
    h("p", null, t("Start one, it appears here within a second:")),
    h("pre", null, "raynforce train ppo CartPole-v1 --target 475"),
    h("p", { class: "muted" }, board.sources.join(", ")));
}
