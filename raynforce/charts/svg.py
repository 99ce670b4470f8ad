"""Panels as SVG that takes its colours from the page around it: light, dark, and on paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import numpy as np

from raynforce.charts.panels import Bar, Line, Panel, thinned

COLOURS = 8  # that the page has; then they come again
MOST_POINTS = 600  # of a line
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
ROW = 30  # height of a bar


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from one to the other."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low] if math.isfinite(low) else []
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next((factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most), 10)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """`0.002`, `1.5`, `20k`, `3M`."""
    size = abs(value)
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}" if size >= 1e-4 or not size else f"{value:.0e}"


class Scale:
    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        if not high > low:
            low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
        self.low, self.high, self.begin, self.end = low, high, begin, end

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def draw(panel: Panel, height: int = HEIGHT, width: int = WIDTH) -> str:
    """A panel as an `<svg>` that stands for itself."""
    return _bars(panel) if panel.bars else _lines(panel, height, width)


def legend(panel: Panel) -> str:
    named = [line for line in panel.lines if line.label and not line.faint]
    if len(named) < 2:
        return ""
    keys = (f'<span><i class="c{line.colour % COLOURS}"></i>{escape(line.label)}</span>' for line in named)
    return f'<div class="legend">{"".join(keys)}</div>'


def _range(values: list[np.ndarray]) -> tuple[float, float]:
    finite = [found for each in values if len(found := each[np.isfinite(each)])]
    if not finite:
        return 0.0, 1.0
    return float(min(each.min() for each in finite)), float(max(each.max() for each in finite))


def _lines(panel: Panel, height: int, width: int) -> str:
    lines = panel.lines
    x0, x1 = _range([line.x for line in lines])
    bands = [band for line in lines for band in (line.low, line.high) if band is not None]
    level = [] if panel.level is None else [np.array([panel.level])]
    y0, y1 = _range([*(line.y for line in lines), *bands, *level])
    margin = (y1 - y0) * 0.04
    x = Scale(x0, x1, LEFT, width - RIGHT)
    y = Scale(y0 - margin, y1 + margin, height - BOTTOM, TOP)
    label = escape(f"{panel.y or panel.title} over {panel.x}")
    where = f'data-x="{x.low!r} {x.high!r} {x.begin} {x.end}" data-y="{y.low!r} {y.high!r} {y.begin} {y.end}"'
    out = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" {where}>']
    for tick in ticks(y.low, y.high, 5):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in ticks(x.low, x.high):
        out.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>'
        )
    out.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>')
    out.append(
        f'<text class="axis-name" x="{width - RIGHT}" y="{height - 4}" text-anchor="end">{escape(panel.x)}</text>'
    )
    if panel.level is not None:
        at = y(panel.level)
        out.append(f'<line class="level" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        side = -5 if at > TOP + 16 else 14
        out.append(f'<text class="tick" x="{LEFT + 6}" y="{at + side:.1f}">{escape(panel.level_label)}</text>')
    for line in lines:
        out += _band(line, x, y)
    for line in lines:
        out += _line(line, x, y)
    if not any(np.isfinite(line.y).any() for line in lines):
        out.append(f'<text class="tick" x="{width / 2}" y="{height / 2}" text-anchor="middle">nothing yet</text>')
    return "".join([*out, "</svg>"])


def _band(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    if line.low is None or line.high is None:
        return
    good = np.isfinite(line.low) & np.isfinite(line.high)
    xs, low, high = line.x[good], line.low[good], line.high[good]
    there = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, high, strict=True)]
    back = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs[::-1], low[::-1], strict=True)]
    if there:
        yield f'<polygon class="band c{line.colour % COLOURS}" points="{" ".join(there + back)}"/>'


def _line(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    xs, ys = thinned(line.x, line.y, MOST_POINTS)
    pieces: list[list[str]] = [[]]
    for a, b in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(a) and math.isfinite(b):
            pieces[-1].append(f"{x(a):.1f},{y(b):.1f}")
        elif pieces[-1]:
            pieces.append([])  # NaN is a gap
    colour = f"c{line.colour % COLOURS}"
    for piece in filter(None, pieces):
        if len(piece) > 1:
            look, name = f"line {colour}{' faint' * line.faint}", escape(line.label)
            yield f'<polyline class="{look}" data-name="{name}" points="{" ".join(piece)}"/>'
        if line.dots or len(piece) == 1:
            for point in piece:
                a, _, b = point.partition(",")
                yield f'<circle class="{colour}" cx="{a}" cy="{b}" r="2.5"/>'


def _bars(panel: Panel) -> str:
    intervals = [bar.interval for bar in panel.bars if bar.interval is not None]
    values = [np.array([interval.low, interval.high, interval.estimate], float) for interval in intervals]
    values += [np.asarray(bar.dots, float) for bar in panel.bars]
    low, high = _range(values)
    left, height = 150, TOP + ROW * len(panel.bars) + BOTTOM
    margin = (high - low) * 0.08
    x = Scale(low - margin, high + margin, left, WIDTH - RIGHT - 56)
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(panel.title)}">']
    for tick in ticks(x.low, x.high):
        out.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        out.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>'
        )
    for index, bar in enumerate(panel.bars):
        out += _bar(bar, TOP + ROW * index + ROW / 2, x, left)
    out.append(
        f'<text class="axis-name" x="{WIDTH - RIGHT}" y="{height - 4}" text-anchor="end">{escape(panel.x)}</text>'
    )
    return "".join([*out, "</svg>"])


def _bar(bar: Bar, at: float, x: Scale, left: float) -> Iterator[str]:
    colour, name = f"c{bar.colour % COLOURS}", bar.label if len(bar.label) < 24 else f"{bar.label[:22]}…"
    full = f"<title>{escape(bar.label)}</title>"
    yield f'<text class="name" x="{left - 10}" y="{at + 4}" text-anchor="end">{escape(name)}{full}</text>'
    yield f'<text class="tick" x="{WIDTH - RIGHT}" y="{at + 4}" text-anchor="end">{escape(bar.note)}</text>'
    for dot in bar.dots:
        yield f'<circle class="{colour} faint" cx="{x(dot):.1f}" cy="{at}" r="3"/>'
    if bar.interval is None:
        yield f'<text class="tick" x="{left + 4}" y="{at + 4}">never</text>'
        return
    low, high, middle = x(bar.interval.low), x(bar.interval.high), x(bar.interval.estimate)
    yield f'<line class="interval {colour}" x1="{low:.1f}" x2="{max(high, low + 1):.1f}" y1="{at}" y2="{at}"/>'
    yield f'<line class="middle {colour}" x1="{middle:.1f}" x2="{middle:.1f}" y1="{at - 9}" y2="{at + 9}"/>'


def shares(rows: dict[str, dict[str, float]], order: list[str]) -> str:
    """Bars of parts that add up to one each, such as where roles spend their time."""
    height, left, width = ROW * len(rows) + 4, 90, 1000
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="shares of time">']
    for index, (name, parts) in enumerate(rows.items()):
        at, y = float(left), ROW * index + 4
        out.append(f'<text class="name" x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for part, share in parts.items():
            part_width = (width - RIGHT - left) * max(0.0, share)
            if part_width < 0.5:
                continue
            colour, what = order.index(part) % COLOURS, f"{part} {share:.0%}"
            out.append(f'<g><rect class="c{colour}" x="{at:.1f}" y="{y}" width="{part_width:.1f}" height="{ROW - 8}"/>')
            if part_width > 7.5 * len(what):
                middle = f'x="{at + part_width / 2:.1f}" y="{y + 15}" text-anchor="middle"'
                out.append(f'<text class="on" {middle}>{escape(what)}</text>')
            out.append(f"<title>{escape(name)}: {escape(what)}</title></g>")
            at += part_width
    used = [part for part in order if any(parts.get(part, 0.0) > 0.0005 for parts in rows.values())]
    keys = (f'<span><i class="c{order.index(part) % COLOURS}"></i>{escape(part)}</span>' for part in used)
    return "".join([*out, "</svg>", '<div class="legend">', *keys, "</div>"])
