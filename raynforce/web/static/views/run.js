// One run: how it stands, where its time goes, settings, faults, checkpoints, episodes, log and notes.
import { board, go, link, place, remember } from "../main.js";
import { blob, get, post, Refused } from "../api.js";
import { Charts } from "../chart.js";
import { age, bytes, chip, clock, color, duration, figure, h, moment, put, refresh, short, shownAs, toast } from "../dom.js";
import { stacked, topology } from "../topology.js";
import { t, told } from "../words.js";

const TABS = ["overview", "settings", "faults", "checkpoints", "episodes", "log", "notes"];
const TITLES = { overview: "Overview", settings: "Settings", faults: "Faults", checkpoints: "Checkpoints", episodes: "Episodes", log: "Log", notes: "Notes" };
const DRAWN = ["charts/episodic_return", "eval/return", "charts/SPS"];

export function show(root, id) {
  const { query } = place();
  const state = { tab: TABS.includes(query.get("tab")) ? query.get("tab") : "overview", other: query.get("with") || "", only: query.get("only") === "1" };
  let run = null, closed = false, charts = null, drawn = "", timer = 0, last = 0;
  const films = new Map();
  const head = h("div"), tabs = h("div", { class: "tabs", role: "tablist", "aria-label": t("run") }), body = h("div", { class: "tab-body", role: "tabpanel", "aria-label": t("run"), tabindex: 0 });
  put(root, h("section", { class: "page run" }, head, tabs, body));
  const save = () => remember({ tab: state.tab === "overview" ? "" : state.tab, with: state.other, only: state.only ? 1 : "" });

  async function load() {
    try {
      run = await get(`/api/run/${id}`);
    } catch (error) {
      if (!(error instanceof Refused)) return;
      if (error.status === 404) gone();
      return;
    }
    if (closed) return;
    draw();
  }

  function gone() {
    charts?.close(); charts = null; drawn = "";
    put(root, h("div", { class: "empty" }, h("h1", null, t("This run is gone")), h("p", null, t("It was moved or deleted.")), h("a", { href: link("runs") }, t("All runs"))));
    closed = true;
  }

  function draw() {
    document.title = `${run.name} · Raynforce`;
    refresh(head, title());
    wireHead();
    refresh(tabs, TABS.map((tab) => h("button", { role: "tab", "data-tab": tab, "aria-selected": String(tab === state.tab), tabindex: tab === state.tab ? 0 : -1 }, t(TITLES[tab]), badge(tab))));
    tabs.querySelectorAll("button").forEach((button) => { button.onclick = () => open(button.dataset.tab); });
    tabs.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      open(TABS[(TABS.indexOf(state.tab) + step + TABS.length) % TABS.length]);
      tabs.querySelector("[aria-selected=true]").focus();
    };
    const how = { overview, settings, faults, checkpoints, episodes, log, notes }[state.tab];
    if (drawn !== state.tab) { charts?.close(); charts = null; body.replaceChildren(); delete body.dataset.was; }
    const first = drawn !== state.tab;
    drawn = state.tab;
    if (first) {
      const open = tabs.querySelector("[aria-selected=true]");
      tabs.scrollLeft = Math.max(0, open.offsetLeft - tabs.offsetLeft - 40);
    }
    how(first);
  }

  function open(tab) { state.tab = tab; save(); draw(); }
  function badge(tab) {
    const count = { faults: run.faults, checkpoints: run.checkpoints.length, episodes: run.episodes.length }[tab];
    return count ? h("span", { class: `badge ${tab === "faults" ? "warn" : ""}` }, count) : run.noted && tab === "notes" ? h("span", { class: "badge" }, "•") : null;
  }

  function title() {
    const cannot = run.can.stop;
    return h("div", { class: "run-head" },
      h("div", null, h("h1", null, run.name, " ", chip(run.status)),
        h("p", { class: "muted" }, `${run.algo} · ${run.env} · ${t("seed")} ${run.seed ?? 0} · ${run.config.engine === "rllib" ? "RLlib · " : ""}${run.runtime} · ${run.topology}`),
        h("p", { class: "path small muted" }, run.path, run.reason && run.status !== "running" ? ` — ${told(run.reason)}` : ""),
        run.elsewhere && run.status === "running" ? h("p", { class: "small muted" }, t("It runs elsewhere: figures come every second or so, curves with each checkpoint.")) : null),
      h("div", { class: "actions" },
        h("button", { "data-do": "curves" }, t("Draw its curves")),
        h("button", { "data-do": "checkpoint", disabled: Boolean(cannot), title: told(cannot) || null }, t("Checkpoint now")),
        h("button", { "data-do": "stop", class: "danger", disabled: Boolean(cannot), title: told(cannot) || null }, t("Stop"))));
  }

  function wireHead() {
    const on = (what, act) => { const button = head.querySelector(`[data-do=${what}]`); if (button) button.onclick = act; };
    on("curves", () => go("curves", "", { runs: [id, state.other].filter(Boolean).join(",") }));
    on("checkpoint", async () => { await post(`/api/run/${id}/ask`, { what: "checkpoint" }); toast(t("asked: a checkpoint after this round")); });
    on("stop", () => {
      const box = h("dialog", { "aria-label": t("Stop this run?") }, h("h2", null, t("Stop this run?")),
        h("p", null, t("It ends after this round, with a checkpoint; resume goes on from it.")),
        h("form", { method: "dialog", class: "actions" }, h("button", { value: "no" }, t("Cancel")), h("button", { value: "yes", class: "danger" }, t("Stop"))));
      document.body.append(box);
      box.addEventListener("close", async () => {
        box.remove();
        if (box.returnValue === "yes") { await post(`/api/run/${id}/ask`, { what: "stop" }); toast(t("asked: it stops after this round")); }
      });
      box.showModal();
    });
  }

  // -- overview ------------------------------------------------------------------------------------------------------

  const parts = {};
  function overview(first) {
    if (first) {
      Object.assign(parts, { tiles: h("div", { class: "tiles" }), bound: h("div"), flow: h("div", { class: "card flowcard", tabindex: 0, role: "region", "aria-label": t("Where experience flows") }), times: h("div", { class: "card" }), roles: h("div", { class: "card" }), curves: h("div", { class: "charts" }) });
      body.replaceChildren(parts.tiles, parts.bound, h("div", { class: "two" }, parts.flow, parts.times), parts.curves, parts.roles);
      charts = new Charts({
        sets: () => [{ label: run.name, color: color(0), ids: [id] }], by: () => "step", smooth: () => 0, logY: () => false, logX: () => false,
        onView: () => {}, ask: (words, signal) => get(`/api/series?${words}`, signal),
      });
      for (const key of DRAWN) charts.add(parts.curves, key, { height: 170 });
    }
    const m = run.metrics, left = run.status === "running" && run.speed && run.total_steps ? (run.total_steps - run.steps) / run.speed : null;
    const tile = (name, value, more) => h("div", { class: "tile" }, h("span", { class: "muted small" }, t(name)), h("b", null, value), h("span", { class: "small muted" }, more || " "));
    const done = run.total_steps ? `${Math.min(100, (run.steps / run.total_steps) * 100).toFixed(0)} % ${t("of %", short(run.total_steps))}` : "";
    refresh(parts.tiles,
      tile("steps", run.steps.toLocaleString("en"), done), tile("return", figure(run.return), run.target !== null ? `${t("target")} ${figure(run.target)}` : ""),
      tile("best evaluation", figure(run.best_eval), ""), tile("speed", run.speed ? `${short(run.speed)}/s` : "–", left !== null ? `${duration(left)} ${t("left")}` : ""),
      tile("lasted", duration(run.seconds), run.history.starts > 1 ? t("resumed %×", run.history.starts - 1) : age(run.active)),
      tile("lag", figure(m["lag/mean"], 3), ""), tile("faults", String(run.faults), m["health/lost_steps"] ? `${short(m["health/lost_steps"])} ${t("lost")}` : ""));
    refresh(parts.bound, run.bound ? h("p", { class: "bound" }, h("b", null, `${t("What bounds it")}: `), told(run.bound)) : []);
    refresh(parts.flow, h("h2", null, t("Where experience flows")), topology(run));
    const roles = run.live.roles || [], on = run.status === "running";
    refresh(parts.roles, roles.length ? [h("h2", null, t("Roles")), h("div", { class: "scroll" }, h("table", null,
      h("thead", null, h("tr", null, ["role", "state", "node", "process", "restarts"].map((name) => h("th", null, t(name))))),
      h("tbody", null, roles.map((role) => h("tr", null, h("td", null, role.role), h("td", null, h("span", { class: `state ${on ? role.state.replace(" ", "-") : "ended"}` }, t(on ? role.state : "ended"))),
        h("td", { class: "mono" }, (role.node || "–").slice(0, 24)), h("td", { class: "mono" }, role.pid ?? "–"), h("td", null, role.restarts || 0))))))] : []);
    parts.roles.classList.toggle("gone", !roles.length);
    charts.ask(true);
    times();
  }

  async function times() {
    const groups = {};
    for (const name of Object.keys(run.metrics)) {
      const found = /^time\/(sampler|learner|env)\/(\w+)$/.exec(name);
      if (found) (groups[found[1]] ||= []).push({ key: name, name: found[2] });
    }
    if (!Object.keys(groups).length) {  // RLlib tells seconds of each round
      const known = ["sample", "learn"].filter((name) => run.metrics[`time/${name}`] !== undefined);
      if (known.length) groups.run = known.map((name) => ({ key: `time/${name}`, name, seconds: true }));
    }
    const titles = { run: "Training", env: "Environments", sampler: run.topology === "central" ? "policy server" : "Samplers", learner: "Learner" };
    const keys = Object.values(groups).flat().map(({ key }) => key);
    if (!keys.length) { refresh(parts.times, h("h2", null, t("Where the time goes")), h("p", { class: "muted" }, t("Nothing was reported yet"))); return; }
    const words = new URLSearchParams({ set: id, points: 120 });
    for (const key of keys) words.append("key", key);
    const { curves } = await get(`/api/series?${words}`);
    if (closed || state.tab !== "overview") return;
    refresh(parts.times, h("h2", null, t("Where the time goes")), Object.entries(groups).map(([role, found]) => {
      const { chart, last } = stacked(t(titles[role]), found, curves);
      return h("div", { class: "stackbox" }, h("h3", null, t(titles[role])), chart,
        h("div", { class: "legend small" }, last.filter(({ share }) => share >= 0.005).map(({ name, share, color: shade }) => h("span", null, h("i", { class: "swatch", style: { background: shade } }), `${t(name)} ${(share * 100).toFixed(0)} %`))));
    }));
  }

  // -- settings ------------------------------------------------------------------------------------------------------

  let compared = null;
  async function settings() {
    if (!board.runs.some((each) => each.id === state.other)) state.other = "";
    if (state.other && (!compared || compared.id !== state.other)) {
      try { compared = await get(`/api/run/${state.other}`); } catch { compared = null; }
    }
    const other = state.other ? compared : null;
    const names = [...new Set([...Object.keys(run.config), ...Object.keys(other?.config || {})])].sort((a, b) => a.includes(".") - b.includes(".") || (a < b ? -1 : 1));
    const differs = (name) => other && JSON.stringify(run.config[name]) !== JSON.stringify(other.config[name]);
    const rows = names.filter((name) => !other || !state.only || differs(name));
    refresh(body, h("div", { class: "tools" },
      h("select", { "aria-label": t("Compare with") }, h("option", { value: "" }, `${t("Compare with")}: ${t("no other run")}`),
        board.runs.filter((each) => each.id !== id).map((each) => h("option", { value: each.id, ...(each.id === state.other ? { "data-here": "1" } : {}) }, each.name))),
      other ? h("button", { class: "toggle", "aria-pressed": String(state.only) }, t("only differences")) : null),
    rows.length ? h("table", { class: "settings" },
      h("thead", null, h("tr", null, h("th", null, t("setting")), h("th", null, other ? run.name : t("value")), other ? h("th", null, other.name) : null)),
      h("tbody", null, rows.map((name) => h("tr", { class: differs(name) ? "differs" : null }, h("td", { class: "mono" }, name), h("td", { class: "mono" }, shownAs(run.config[name])), other ? h("td", { class: "mono" }, shownAs(other.config[name])) : null))))
      : h("p", { class: "empty" }, t("The settings are the same")));
    const choice = body.querySelector("select");
    choice.value = state.other;
    choice.onchange = () => { state.other = choice.value; save(); settings(); };
    const only = body.querySelector("button.toggle");
    if (only) only.onclick = () => { state.only = !state.only; save(); settings(); };
  }

  // -- faults, checkpoints, episodes, log, notes ---------------------------------------------------------------------

  function faults() {
    const groups = run.history.groups || [];
    if (!groups.length) { refresh(body, h("div", { class: "empty" }, h("h2", null, t("No faults")), h("p", null, t("Everything has gone well so far.")))); return; }
    refresh(body, groups.map((group) => h("article", { class: `fault ${group.actions["given up"] || group.actions.stopped ? "grave" : ""}` },
      h("h3", null, `${group.count} × ${Object.keys(group.roles).slice(0, 6).join(", ")} · ${group.kind}`), h("p", { class: "mono" }, group.cause),
      h("p", { class: "small muted" }, `${t("first")} ${moment(group.first_time)}, ${t("step")} ${group.first_steps.toLocaleString("en")} · ${t("last")} ${moment(group.last_time)}, ${t("step")} ${group.last_steps.toLocaleString("en")} · ${Object.entries(group.actions).map(([name, n]) => `${name} ${n}×`).join(", ")}`),
      h("p", { class: "advice" }, h("b", null, `${t("what to do")}: `), told(group.advice)),
      group.trace ? h("details", null, h("summary", null, t("trace")), h("pre", null, group.trace)) : null,
      group.said ? h("details", null, h("summary", null, t("what it printed last")), h("pre", null, group.said)) : null,
      group.evidence.map((number) => h("details", { "data-evidence": number }, h("summary", null, `${t("evidence")} ${number}`), h("p", { class: "mono small" }, `raynforce doctor ${run.path} --replay ${number}`), h("pre", null))))));
    body.querySelectorAll("[data-evidence]").forEach((box) => {
      box.ontoggle = async () => { if (box.open) box.querySelector("pre").textContent = JSON.stringify(await get(`/api/run/${id}/evidence/${box.dataset.evidence}`), null, 1); };
    });
  }

  function checkpoints() {
    if (!run.checkpoints.length) { refresh(body, h("div", { class: "empty" }, h("h2", null, t("No checkpoints yet")), h("p", null, t("one is written at the start, then every checkpoint.every steps")))); return; }
    refresh(body, h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": t("Checkpoints") }, h("table", null,
      h("thead", null, h("tr", null, h("th", { class: "num" }, t("step")), h("th", null, ""), h("th", null, t("written")), h("th", { class: "num" }, t("size")), h("th", null, t("parts")))),
      h("tbody", null, run.checkpoints.map((kept) => h("tr", null, h("td", { class: "num" }, kept.step.toLocaleString("en")), h("td", null, kept.marks.map((mark) => h("span", { class: "badge" }, t(mark)))), h("td", null, age(kept.time)),
        h("td", { class: "num" }, bytes(kept.bytes + kept.segment_bytes)), h("td", { class: "small muted" }, kept.wrong.length ? h("span", { class: "warn" }, `${t("torn")}: ${kept.wrong[0]}`) : Object.keys(kept.parts).join(", "))))))));
  }

  function episodes(first) {
    if (!run.episodes.length) {
      refresh(body, h("div", { class: "empty" }, h("h2", null, t("No episodes were filmed")), h("p", null, t("This films three of its best policy:")), h("pre", null, `raynforce eval ${run.path} --video ${run.path}/episodes`)));
      return;
    }
    if (first || !body.querySelector(".films")) {
      const play = h("button", { onclick: playAll }, t("Play all"));
      body.replaceChildren(h("div", { class: "actions" }, play), h("div", { class: "films" }));
    }
    const box = body.querySelector(".films");
    for (const film of run.episodes) {
      if (films.has(film.name)) { if (!box.contains(films.get(film.name))) box.append(films.get(film.name)); continue; }
      const picture = /\.(png|gif|jpg)$/.test(film.name), view = picture ? h("img", { alt: film.name }) : h("video", { muted: true, loop: true, playsinline: true, tabindex: 0, "aria-label": film.name });
      if (!picture) {  // the bar over the picture comes when it is wanted
        for (const event of ["pointerenter", "focus", "click"]) view.addEventListener(event, () => { view.controls = true; });
        view.addEventListener("pointerleave", () => { view.controls = false; });
      }
      const card = h("figure", null, view, h("figcaption", { class: "small" }, film.step !== null ? `${t("step")} ${film.step.toLocaleString("en")}` : film.name, film.return !== null ? ` · ${t("return")} ${figure(film.return)}` : "", h("span", { class: "muted" }, ` · ${bytes(film.bytes)}`)));
      films.set(film.name, card);
      box.append(card);
      blob(`/api/run/${id}/episode/${encodeURIComponent(film.name)}`).then((data) => { view.src = URL.createObjectURL(data); });
    }
  }

  // All films from their beginning, side by side; again: stop them.
  function playAll(event) {
    const all = [...body.querySelectorAll("video")], going = all.some((film) => !film.paused);
    for (const film of all) {
      if (going) film.pause();
      else { film.currentTime = 0; film.play().catch(() => {}); }
    }
    event.target.textContent = t(going ? "Play all" : "Stop all");
  }

  async function log() {
    const { events } = await get(`/api/run/${id}/events`);
    if (closed || state.tab !== "log") return;
    if (!events.length) { refresh(body, h("p", { class: "empty" }, t("Nothing has happened yet"))); return; }
    const long = ["trace", "said", "where_the_time_went"], plainly = (value) => (typeof value === "number" ? figure(value, 5) : told(shownAs(value)));
    const words = (event) => Object.entries(event).filter(([name, value]) => !["time", "event", ...long].includes(name) && value !== null)
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${plainly(value)}`).join(" · ");
    refresh(body, h("ol", { class: "log" }, events.slice().reverse().map((event) => h("li", { class: event.event },
      h("time", { title: moment(event.time) }, clock(event.time)), h("b", null, t(event.event)), h("span", null, words(event)),
      long.filter((name) => event[name]).map((name) => h("pre", null, event[name]))))));
  }

  function notes(first) {
    if (!first) return;
    const text = h("textarea", { rows: 12, "aria-label": t("Notes"), placeholder: t("What you want to remember of this run") });
    text.value = run.notes;
    const told = h("span", { class: "muted small", role: "status" }, t("kept in notes.txt of the run"));
    const keep = async () => { await post(`/api/run/${id}/notes`, { text: text.value }); told.textContent = t("saved"); };
    body.replaceChildren(h("div", { class: "notes" }, text, h("div", { class: "actions" }, h("button", { class: "main", onclick: keep }, t("Save")), told)));
  }

  load();
  return {
    get charts() { return charts; },
    news(changed) {
      if (closed || (!changed.has(id) && board.runs.some((each) => each.id === id))) return;
      clearTimeout(timer);
      timer = setTimeout(() => { last = performance.now(); load(); }, Math.max(0, 450 - (performance.now() - last)));
    },
    close() {
      closed = true; clearTimeout(timer); charts?.close();
      for (const card of films.values()) if (card.firstChild.src) URL.revokeObjectURL(card.firstChild.src);
      document.title = "Raynforce";
    },
    key(event) {
      if (event.key !== "0" || !charts) return false;
      charts.look([null, null]);
      return true;
    },
  };
}
