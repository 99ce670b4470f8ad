"""Panels as pictures: PNG, SVG, PDF, by matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.charts.panels import Panel, thinned
from raynforce.charts.svg import MOST_POINTS, short
from raynforce.errors import UsageError

COLOURS = ("#2563c9", "#c2540a", "#1a7f4b", "#8b3fb8", "#b01e4f", "#0e7c86", "#7a6a00", "#5b6575")  # as on the page
LONG = 26  # characters of a label in a line


def require() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            'pictures need matplotlib, which is not installed: pip install "raynforce[plot]", or -o FILE.html'
        )


def save(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Draw rows of panels into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(len(row) for row in rows)
    widths = [1.5, *[1.0] * (columns - 1)]
    figure = Figure(figsize=(2.0 + 3.4 * sum(widths), 3.9 * len(rows)), layout="constrained", dpi=140)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(rows), columns, width_ratios=widths)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            place = grid[i, j] if j + 1 < len(row) or j + 1 == columns else grid[i, j:]
            axes = figure.add_subplot(place)
            (_bars if panel.bars else _lines)(axes, panel)
            axes.set_title(panel.title, fontsize=11, loc="left", fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=9)
            axes.set_xlabel(panel.x, fontsize=9)
            axes.xaxis.set_major_formatter(lambda value, _: short(value))
            axes.locator_params(axis="x", nbins=6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _lines(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        if line.low is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        x, y = thinned(line.x, line.y, MOST_POINTS)
        marker = "." if line.dots or len(x) == 1 else None
        axes.plot(x, y, color=colour, linewidth=1.6, label=line.label, marker=marker, alpha=0.4 if line.faint else 1)
    if panel.level is not None:
        axes.axhline(panel.level, color="#5b6575", linestyle="--", linewidth=1, label=panel.level_label)
    axes.grid(axis="y", color="#dde1e7", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(panel.y, fontsize=9)
    if not panel.lines:
        axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color="#5b6575")
    elif max(len(line.label) for line in panel.lines) <= LONG:  # else the colours beside the scores tell
        axes.legend(fontsize=8.5, frameon=False)


def _bars(axes: Any, panel: Panel) -> None:
    for index, bar in enumerate(panel.bars):
        colour = COLOURS[bar.colour % len(COLOURS)]
        axes.plot(
            bar.dots, np.full(len(bar.dots), index), "o", color=colour, alpha=0.35, markersize=5, markeredgewidth=0
        )
        if bar.interval is None:
            axes.text(0.02, index, "never", transform=axes.get_yaxis_transform(), va="center", color="#5b6575")
        else:
            axes.plot([bar.interval.low, bar.interval.high], [index, index], color=colour, alpha=0.4, linewidth=9)
            axes.plot([bar.interval.estimate], [index], "|", color=colour, markersize=18, markeredgewidth=3)
        axes.text(
            1.0, index, f" {bar.note}", transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color="#5b6575"
        )
    axes.set_yticks(range(len(panel.bars)), [textwrap.fill(bar.label, LONG) for bar in panel.bars])
    for tick, bar in zip(axes.get_yticklabels(), panel.bars, strict=True):
        tick.set_color(COLOURS[bar.colour % len(COLOURS)])
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.grid(axis="x", color="#dde1e7", linewidth=0.8)
    axes.set_axisbelow(True)
