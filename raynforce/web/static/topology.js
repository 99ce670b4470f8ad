// Who talks to whom, drawn, with what goes along each edge.
import { figure, s, short } from "./dom.js";
import { t } from "./words.js";

const W = 860, H = 236, BOX = { w: 168, h: 84 };

export function topology(run) {
  const { config, metrics } = run, roles = run.live?.roles || [], on = run.status === "running";
  const m = (name) => metrics[name];
  const rllib = config.engine === "rllib", kind = config.topology;
  const count = config["sampling.samplers"] || 1, envs = config["sampling.envs"] || 1, shards = config["replay.shards"] || 0;
  const central = kind === "central", gradients = kind === "shared-agent";
  const hasReplay = m("replay/size") !== undefined && !gradients;
  const canvas = s("svg", { class: `topology ${on ? "on" : ""}`, viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${t("Where experience flows")}: ${kind}` });
  canvas.append(s("defs", null, s("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, s("path", { d: "M0,0 L8,4 L0,8 Z", class: "arrow" }))));

  const names = (test) => roles.filter((role) => test(role.kind));
  const left = central
    ? { title: "env hosts", sub: `${count} × ${envs} ${t("env")}`, states: names((k) => k === "host") }
    : { title: rllib ? "env runners" : gradients ? "gradient workers" : "samplers", sub: `${count} × ${envs} ${t("env")}`, states: names((k) => k === "sampler") };
  const middle = central
    ? { title: "policy server", sub: m("inference/batch") !== undefined ? `${t("batch")} ${figure(m("inference/batch"), 3)}` : "", states: names((k) => k === "policy") }
    : hasReplay ? { title: shards ? "replay shards" : "replay", sub: fill(m), states: names((k) => k === "shard") } : null;
  const learner = { title: "learner", sub: m("charts/updates") !== undefined ? `${short(m("charts/updates"))} ${t("updates")}` : "", states: names((k) => k === "learner") };
  const evaluator = { title: "evaluator", sub: run.best_eval !== null ? `${t("best")} ${figure(run.best_eval)}` : "", states: names((k) => k === "evaluator") };

  const y = 10, a = place(left, 12, y), c = place(learner, W - BOX.w - 12, y), b = middle ? place(middle, (W - BOX.w) / 2, y) : null;
  const e = place(evaluator, W - BOX.w - 12, y + BOX.h + 46);
  const speed = m("charts/SPS") !== undefined ? `${short(m("charts/SPS"))} ${t("steps/s")}` : "";
  const flight = m("health/in_flight_steps") !== undefined ? `${short(m("health/in_flight_steps"))} ${t("in flight")}` : "";
  const lag = m("lag/mean") !== undefined ? `${t("lag")} ${figure(m("lag/mean"), 2)}` : "";
  const ratio = m("replay/samples_per_insert") !== undefined ? figure(m("replay/samples_per_insert"), 3) : "";
  if (central) {
    edge(a, b, -12, t("observations"), "");
    edge(b, a, 16, "", t("actions"));
    edge(b, c, 0, speed, flight);
  } else if (b) {
    edge(a, b, 0, speed, flight);
    edge(b, c, 0, ratio || t("learn"), ratio && t("samples per insert"));
  } else edge(a, c, 0, gradients ? `${t("gradients")} · ${speed}` : speed, flight);
  back(c, central ? b : a, `${t("policy version")}${lag ? ` · ${lag}` : ""}`);
  canvas.append(
    s("path", { class: "edge thin", d: `M${c.x + BOX.w / 2},${c.y + BOX.h} L${e.x + BOX.w / 2},${e.y - 2}`, "marker-end": "url(#tip)" }),
    node(left, a), b ? node(middle, b) : "", node(learner, c), node(evaluator, e));
  return canvas;

  function place(_, x, top) { return { x, y: top }; }

  function node(what, at) {
    const group = s("g", { transform: `translate(${at.x},${at.y})`, class: "node" },
      s("rect", { width: BOX.w, height: BOX.h, rx: 10 }), s("text", { x: 14, y: 25, class: "node-title" }, t(what.title)),
      s("text", { x: 14, y: 43, class: "node-sub" }, what.sub));
    const seen = what.states.slice(0, 14);
    seen.forEach((role, i) => {
      const state = on ? role.state.replace(" ", "-") : "ended";
      group.append(s("rect", { x: 14 + i * 10.4, y: 58, width: 8, height: 12, rx: 2, class: `cell ${state}` }, s("title", null, `${role.role}: ${t(on ? role.state : "ended")}`)));
    });
    if (what.states.length > seen.length) group.append(s("text", { x: 14, y: 80, class: "node-sub" }, `+ ${what.states.length - seen.length}`));
    return group;
  }

  function edge(from, to, shift, above, below) {
    const forward = to.x > from.x, y0 = from.y + BOX.h / 2 + shift;
    const x0 = forward ? from.x + BOX.w : from.x, x1 = forward ? to.x - 2 : to.x + BOX.w + 2, mid = (x0 + x1) / 2;
    canvas.append(s("path", { class: "edge flow", d: `M${x0},${y0} L${x1},${y0}`, "marker-end": "url(#tip)" }));
    if (above) canvas.append(s("text", { x: mid, y: y0 - 8, class: "edge-label" }, above));
    if (below) canvas.append(s("text", { x: mid, y: y0 + 18, class: "edge-label soft" }, below));
  }

  function back(from, to, label) {
    const x0 = from.x, y0 = from.y + BOX.h - 14, x1 = to.x + BOX.w / 2, low = from.y + BOX.h + 42;
    canvas.append(
      s("path", { class: "edge thin", d: `M${x0},${y0} C${x0 - 44},${y0} ${x0 - 20},${low} ${x0 - 70},${low} L${x1 + 40},${low} C${x1 + 6},${low} ${x1},${low - 12} ${x1},${to.y + BOX.h + 2}`, "marker-end": "url(#tip)" }),
      s("text", { x: (x0 + x1) / 2, y: low + 19, class: "edge-label soft" }, label));
  }

  function fill(get) {
    const share = get("replay/fill");
    return `${short(get("replay/size"))}${share !== undefined ? ` · ${(share * 100).toFixed(0)} % ${t("filled")}` : ""}`;
  }
}

// Shares of each role's time over the run, stacked.
const SHADES = {
  env: "#2f6fed", busy: "#2f6fed", learn: "#17a673", policy: "#a05bd6", prepare: "#7bc8a4", gradients: "#e0468c", transport: "#d69a1a",
  wire: "#d69a1a", learner: "#17a673", other: "#5a9bb8", sample: "#2f6fed", restart: "#e4572e", waiting: "#9aa5b4",
};
export function stacked(title, parts, curves) {
  const w = 360, height = 92, steps = curves[parts[0].key]?.x || [];
  const once = steps.length === 1;  // a single report fills the width
  const x = once ? [0, 1] : steps;
  const columns = parts.map(({ key }) => {
    let last = 0;
    const values = curves[key].y[0].map((v) => (last = v ?? last));
    return once ? [...values, ...values] : values;
  });
  if (parts.some(({ seconds }) => seconds)) {  // shares of the sum
    const whole = x.map((_, i) => columns.reduce((sum, column) => sum + column[i], 0) || 1);
    columns.forEach((column) => column.forEach((v, i) => { column[i] = v / whole[i]; }));
  }
  const chart = s("svg", { class: "stack", viewBox: `0 0 ${w} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  const span = x.length > 1 ? x[x.length - 1] - x[0] : 1;
  const below = new Array(x.length).fill(0);
  parts.forEach(({ name }, k) => {
    const top = columns[k].map((v, i) => below[i] + v);
    const points = (values) => values.map((v, i) => `${(((x[i] - x[0]) / span) * w).toFixed(1)},${(height - Math.min(1, v) * height).toFixed(1)}`);
    if (x.length > 1) chart.append(s("polygon", { points: [...points(below), ...points(top).reverse()].join(" "), fill: SHADES[name] || "#7a8f1f" }, s("title", null, t(name))));
    top.forEach((v, i) => { below[i] = v; });
  });
  return { chart, last: parts.map(({ name }, k) => ({ name, share: columns[k][columns[k].length - 1] || 0, color: SHADES[name] || "#7a8f1f" })) };
}
