// One chart: lines with bands, zoom and pan by hand, and a box that compares what is under the pointer.
import uPlot from "./vendor/uplot.js";
import { duration, figure, h, short } from "./dom.js";
import { dark } from "./main.js";
import { t } from "./words.js";

const faint = (color, part) => `${color}${Math.round(part * 255).toString(16).padStart(2, "0")}`;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';

export class Chart {
  // `how`: title, by ("step" or "time"), logY, logX, height, onView(from, to), sync
  constructor(parent, how) {
    this.how = how;
    this.sets = [];
    this.data = null;
    this.view = [null, null];
    this.head = h("div", { class: "chart-head" }, h("h3", null, how.title), h("span", { class: "muted small" }));
    this.place = h("div", { class: "plot" });
    this.box = h("figure", { class: "chart", "aria-label": how.title }, this.head, this.place);
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    parent.append(this.box);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.place);
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
    this.box.remove();
  }

  get width() { return Math.max(120, this.place.clientWidth); }
  get height() { return this.how.height || 200; }

  resize() {
    if (this.plot && this.plot.width !== this.width) this.plot.setSize({ width: this.width, height: this.height });
  }

  // `curve` is the server's answer; `sets` are [{label, color}].
  draw(curve, sets, view, whole) {
    const shape = JSON.stringify([sets, curve.low.map(Boolean), curve.raw.map(Boolean), this.how.logY, this.how.logX, this.how.by, dark()]);
    const data = [curve.x];
    const columns = [];
    sets.forEach((set, i) => {
      if (curve.low[i]) {
        data.push(curve.high[i], curve.low[i]);
        columns.push({ set, part: "high" }, { set, part: "low" });
      }
      if (curve.raw[i]) { data.push(curve.raw[i]); columns.push({ set, part: "raw" }); }
      data.push(curve.y[i]);
      columns.push({ set, part: "line" });
    });
    if (this.how.logY) for (let i = 1; i < data.length; i++) data[i] = data[i].map((v) => (v > 0 ? v : null));
    this.data = data;
    this.span = curve.span;
    const total = curve.points.reduce((a, b) => a + b, 0);
    this.head.lastChild.textContent = `${short(total)} ${t("points")}${whole ? "" : ` · ${t("still reading")}`}`;
    const empty = !curve.x.length || data.slice(1).every((each) => each.every((v) => v === null));
    this.box.classList.toggle("blank", empty);
    if (shape !== this.shape || !this.plot) {
      this.shape = shape;
      this.columns = columns;
      this.build();
    }
    const dense = curve.x.length > 1500;  // hairlines are much cheaper to draw
    this.columns.forEach(({ part }, i) => { if (part === "line") this.plot.series[i + 1].width = dense || this.many ? 1 : 1.6; });
    this.plot.setData(data, false);
    this.see(view);
  }

  see(view) {
    if (!this.plot) return;
    this.view = view;
    let [min, max] = [view[0] ?? this.span?.[0] ?? 0, view[1] ?? this.span?.[1] ?? 1];
    if (max <= min) [min, max] = [min - Math.abs(min) * 0.05 - 0.5, max + Math.abs(max) * 0.05 + 0.5];
    if (this.how.logX) min = Math.max(min, max / 1e6, 1e-3);
    this.plot.batch(() => this.plot.setScale("x", { min, max }));
  }

  build() {
    this.plot?.destroy();
    const night = dark(), grid = night ? "#2a3038" : "#e9ecf1", text = night ? "#9aa5b4" : "#5b6675";
    const many = this.many = this.columns.filter((c) => c.part === "line").length > 12;
    const series = [{}], bands = [];
    this.columns.forEach(({ set, part }, i) => {
      const shared = { label: set.label, spanGaps: true, points: { show: false } };
      if (part === "line") series.push({ ...shared, stroke: set.color, width: many ? 1 : 1.6, points: { show: (u, s) => this.sparse(s), size: 4 } });
      else if (part === "raw") series.push({ ...shared, stroke: faint(set.color, 0.28), width: 1 });
      else series.push({ ...shared, stroke: faint(set.color, 0.25), width: 0.5 });
      if (part === "high") bands.push({ series: [i + 1, i + 2], fill: faint(set.color, 0.16) });
    });
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: FONT };
    const by = this.how.by === "time" ? (v) => duration(v) : (v) => short(v);
    const options = {
      width: this.width, height: this.height, series, bands, padding: [8, 22, 0, 0],
      legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false, dist: 6 }, points: { size: 6 }, focus: { prox: 24 },
        sync: this.how.sync ? { key: this.how.sync, setSeries: false } : undefined,
        bind: { mousedown: (u, _, handler) => (e) => { if (!this.startPan(e)) handler(e); }, dblclick: () => () => this.how.onView(null, null) },
      },
      scales: {
        x: { time: false, auto: false, distr: this.how.logX ? 3 : 1 },
        y: { distr: this.how.logY ? 3 : 1, range: this.how.logY ? undefined : (u, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, true)) },
      },
      axes: [
        { ...axis, values: (u, splits) => splits.map((v) => (v === null ? "" : by(v))), size: 26, gap: 4, space: 70 },
        { ...axis, values: (u, splits) => splits.map((v) => (v === null ? "" : short(v))), size: 52, gap: 4 },
      ],
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 6) return;
          const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.how.onView(from, to);
        }],
        setCursor: [(u) => this.compare(u)],
      },
    };
    this.plot = new uPlot(options, this.data, this.place);
    const over = this.plot.over;
    over.append(this.tip);
    over.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    over.addEventListener("mouseleave", () => { this.tip.style.display = "none"; });
    over.addEventListener("mouseenter", () => { Chart.hot = this; });
  }

  sparse(index) {
    const column = this.plot?.data?.[index];
    if (!column) return false;
    let count = 0;
    for (const value of column) if (value !== null && ++count > 40) return false;
    return true;
  }

  range() {
    const { min, max } = this.plot.scales.x;
    return [min, max];
  }

  wheel(event) {
    if (!event.ctrlKey && Math.abs(event.deltaY) < Math.abs(event.deltaX)) return;
    event.preventDefault();
    const [min, max] = this.range(), at = this.plot.posToVal(event.offsetX, "x");
    const factor = Math.exp(Math.sign(event.deltaY) * 0.25);
    this.how.onView(...this.held(at - (at - min) * factor, at + (max - at) * factor), true);
  }

  held(from, to) {
    if (!this.span) return [from, to];
    const [low, high] = this.span;
    if (from <= low && to >= high) return [null, null];
    const width = to - from;
    if (from < low - width / 2) [from, to] = [low - width / 2, low + width / 2];
    if (to > high + width / 2) [from, to] = [high - width / 2, high + width / 2];
    return [from, to];
  }

  startPan(event) {
    if (!event.shiftKey && event.button !== 1) return false;
    event.preventDefault();
    const [min, max] = this.range(), per = (max - min) / this.plot.over.clientWidth, start = event.clientX;
    const move = (e) => this.how.onView(...this.held(min - (e.clientX - start) * per, max - (e.clientX - start) * per), true);
    const end = () => { removeEventListener("mousemove", move); removeEventListener("mouseup", end); };
    addEventListener("mousemove", move);
    addEventListener("mouseup", end);
    return true;
  }

  compare(u) {
    const { idx, left } = u.cursor;
    if (idx === null || idx === undefined || left < 0 || Chart.hot !== this) { this.tip.style.display = "none"; return; }
    const rows = [], x = u.data[0][idx];
    const nearest = (column) => {
      for (let step = 0; step < 60; step++) {
        if (column[idx - step] !== null && column[idx - step] !== undefined) return idx - step;
        if (column[idx + step] !== null && column[idx + step] !== undefined) return idx + step;
      }
      return -1;
    };
    this.columns.forEach(({ set, part }, i) => {
      if (part !== "line") return;
      const at = nearest(u.data[i + 1]);
      if (at < 0) return;
      const value = u.data[i + 1][at], before = this.columns[i - 1];
      const band = before && before.set === set && before.part === "low" ? [u.data[i][at], u.data[i - 1][at]] : null;
      rows.push({ set, value, band });
    });
    rows.sort((a, b) => b.value - a.value);
    const most = rows.slice(0, 12);
    this.tip.replaceChildren(
      h("div", { class: "tip-x" }, this.how.by === "time" ? duration(x) : `${t("step")} ${Math.round(x).toLocaleString("en")}`),
      ...most.map(({ set, value, band }) => h("div", { class: "tip-row" },
        h("i", { class: "swatch", style: { background: set.color } }), h("span", null, set.label),
        h("b", null, figure(value)), band ? h("span", { class: "muted" }, `${figure(band[0], 3)}…${figure(band[1], 3)}`) : null)),
      rows.length > most.length ? h("div", { class: "muted" }, `+ ${rows.length - most.length}`) : "");
    this.tip.style.display = rows.length ? "block" : "none";
    const right = left > u.over.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${left + 14}px`;
    this.tip.style.right = right ? `${u.over.clientWidth - left + 14}px` : "auto";
  }
}

// Charts that share their runs and what part of x is seen: one question to the server for all that are on screen.
export class Charts {
  // `how`: sets() → [{label, color, ids}], by(), smooth(), logY(), logX(), onView(view), ask(query, signal)
  constructor(how) {
    this.how = how;
    this.charts = new Map();
    this.view = [null, null];
    this.fetched = new Map();
    this.visible = new Set();
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const key = entry.target.dataset.key;
        if (entry.isIntersecting) this.visible.add(key); else this.visible.delete(key);
      }
      this.ask();
    }, { rootMargin: "150px" });
  }

  add(parent, key, more = {}) {
    const chart = new Chart(parent, {
      title: key, sync: "x", by: this.how.by(), logY: this.how.logY(), logX: this.how.logX(),
      onView: (from, to, live) => this.look([from, to], live), ...more,
    });
    chart.box.dataset.key = key;
    this.charts.set(key, chart);
    this.seen.observe(chart.box);
    return chart;
  }

  close() {
    this.closed = true;
    this.seen.disconnect();
    this.asking?.abort();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.later);
    for (const chart of this.charts.values()) chart.close();
  }

  // Move all charts at once with what is known; finer data follow.
  look(view, live = false) {
    this.view = view;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => { for (const key of this.visible) this.charts.get(key)?.see(view); });
    clearTimeout(this.later);
    this.later = setTimeout(() => { this.how.onView(view); this.ask(true); }, live ? 120 : 0);
  }

  stale() { this.fetched.clear(); this.ask(); }

  mark() {
    return JSON.stringify([this.how.sets().map((s) => s.ids), this.how.by(), this.how.smooth(), this.view]);
  }

  // Ask for the charts on screen that lack what is seen; with `all`, for each of them again.
  async ask(all = false) {
    if (this.closed) return;
    const mark = this.mark(), sets = this.how.sets();
    const keys = [...this.visible].filter((key) => this.charts.has(key) && (all || this.fetched.get(key) !== mark));
    if (!keys.length || !sets.length) return;
    if (this.asking && !all && this.askingMark === mark) { this.once = true; return; }
    this.asking?.abort();
    const control = (this.asking = new AbortController());
    this.askingMark = mark;
    const [from, to] = this.view, width = this.charts.get(keys[0]).width;
    const query = new URLSearchParams();
    for (const set of sets) query.append("set", set.ids.join(","));
    for (const key of keys) query.append("key", key);
    query.set("x", this.how.by());
    const zoomed = from !== null && to !== null;
    if (zoomed) {  // with a margin as wide as the view on each side, so that there is something to pan to
      query.set("from", from - (to - from));
      query.set("to", to + (to - from));
    }
    query.set("points", Math.round(Math.min(3900, (width / 2) * (zoomed ? 3 : 1))));
    if (this.how.smooth() > 0) query.set("smooth", this.how.smooth());
    try {
      const answer = await this.how.ask(query, control.signal);
      if (this.closed || control.signal.aborted) return;
      for (const key of keys) {
        this.charts.get(key)?.draw(answer.curves[key], sets.map(({ label, color }) => ({ label, color })), this.view, answer.whole);
        this.fetched.set(key, answer.whole ? mark : "");
      }
      this.how.answered?.(answer);
      this.asking = null;
      if (!answer.whole) setTimeout(() => this.ask(true), 150);
      else if (this.once) { this.once = false; this.ask(); }
    } catch (error) {
      if (this.asking === control) this.asking = null;
      if (error.name !== "AbortError" && !(error instanceof TypeError)) throw error;
    }
  }
}
