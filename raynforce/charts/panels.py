"""What is drawn, before it is: curves with bands over seeds, scores with intervals, time to target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raynforce.charts.reading import EVALUATION, RETURN, Group, RunData
from raynforce.statistics import Interval, bootstrap, iqm, probability_of_improvement

POINTS = 300  # of a curve
CURVE_REPEATS = 500  # of the bootstrap at each of them


@dataclass
class Line:
    label: str
    colour: int
    x: np.ndarray  # [N]
    y: np.ndarray  # [N]
    low: np.ndarray | None = None  # of its band
    high: np.ndarray | None = None
    faint: bool = False
    dots: bool = False


@dataclass
class Bar:
    """A figure with its interval; None if there is none."""

    label: str
    colour: int
    interval: Interval | None
    note: str = ""
    dots: Sequence[float] = ()


@dataclass
class Panel:
    title: str
    x: str = ""
    y: str = ""
    lines: list[Line] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    level: float | None = None  # a horizontal line, or of bars a vertical one
    level_label: str = ""


def curve(group: Group, metric: str, over: str, colour: int) -> list[Line]:
    """The interquartile mean over seeds with its interval, as far as half of them go; of a single run, what it has.

    A seed that met its target and stopped counts with what it had reached.
    """
    several = [(run, run.series[metric]) for run in group.runs if metric in run.series]
    drawn = [(run, s.over(over), s.values) for run, s in several if np.isfinite(s.values).any()]
    if not drawn:
        return []
    if len(drawn) == 1:
        x, y = drawn[0][1], drawn[0][2]
        order = np.argsort(x, kind="stable")
        return [Line(group.label, colour, x[order], y[order], dots=len(x) < 40)]
    ends = sorted(float(np.nanmax(x)) for _, x, _ in drawn)
    stopped = [run.result.get("stopped") == "target met" for run, _, _ in drawn]
    end = ends[-1] if all(stopped) else ends[(len(ends) - 1) // 2]
    grid = np.linspace(min(float(np.nanmin(x)) for _, x, _ in drawn), end, POINTS)
    rows = []
    for (_, x, y), held in zip(drawn, stopped, strict=True):
        good = np.isfinite(x) & np.isfinite(y)
        order = np.argsort(x[good], kind="stable")
        xs, ys = x[good][order], y[good][order]
        rows.append(np.interp(grid, xs, ys, left=math.nan, right=None if held else math.nan))
    values = np.asarray(rows)  # [runs, points]
    return [_band(group.label, colour, grid, values)]


def _band(label: str, colour: int, grid: np.ndarray, values: np.ndarray) -> Line:
    middle, low, high = (np.full(len(grid), math.nan) for _ in range(3))
    there = np.isfinite(values)
    for pattern in np.unique(there, axis=1).T:  # the seeds that go so far are drawn from
        columns = (there == pattern[:, None]).all(0)
        if pattern.sum() * 2 >= len(values):
            found = bootstrap(values[pattern][:, columns], repeats=CURVE_REPEATS)
            middle[columns], low[columns], high[columns] = found
    return Line(label, colour, grid, middle, low, high)


def score_source(runs: Sequence[RunData]) -> tuple[str, list[float | None]]:
    """The score of each run, the same for all: of its best policy, its last evaluation, or its last 100 episodes."""
    best = [_finite(run.result.get("eval_return")) for run in runs]
    if all(score is not None for score in best):
        return "best policy, evaluated anew", best
    for metric, what in ((EVALUATION, "last evaluation"), (RETURN, "last 100 episodes")):
        last = [_last(run, metric) for run in runs]
        if any(score is not None for score in last):
            return what, last
    return "return", [None] * len(runs)


def _last(run: RunData, metric: str) -> float | None:
    values = run.series[metric].values if metric in run.series else np.zeros(0)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def scores(groups: Sequence[Group]) -> tuple[Panel, dict[str, Any]]:
    """The final score of each group, and how likely each is better than each other."""
    what, found = score_source([run for group in groups for run in group.runs])
    panel, facts, values, at = Panel(f"score: {what}", x="return"), {}, {}, 0
    for colour, group in enumerate(groups):
        mine = [score for score in found[at : at + len(group.runs)] if score is not None]
        at += len(group.runs)
        interval = bootstrap(mine) if mine else None
        panel.bars.append(Bar(group.label, colour, interval, f"n={len(mine)}", mine))
        values[group.label] = mine
        low_high = {} if interval is None else {"low": float(interval.low), "high": float(interval.high)}
        facts[group.label] = {"runs": len(mine), "iqm": float(iqm(mine)) if mine else None, **low_high}
    better = {
        f"{one} > {other}": probability_of_improvement(values[one], values[other])._asdict()
        for one in values
        for other in values
        if one != other and min(len(values[one]), len(values[other])) > 1  # of single runs it says nothing
    }
    return panel, {"score": what, "groups": facts, "probability_of_improvement": better}


def to_target(groups: Sequence[Group], target: float, over: str) -> tuple[Panel, dict[str, Any]]:
    """How long each group took to its target: the median over seeds, one that never did counts as infinitely late."""
    panel = Panel(f"time to {target:g}", x="environment steps" if over == "steps" else "seconds")
    facts = {}
    for colour, group in enumerate(groups):
        met = [run.time_to(target) for run in group.runs]
        took = sorted(math.inf if each is None else each[0 if over == "steps" else 1] for each in met)
        reached = [value for value in took if math.isfinite(value)]
        median = float(np.median(took)) if math.isfinite(took[len(took) // 2]) else None
        interval = None if median is None else Interval(median, took[0], reached[-1])
        panel.bars.append(Bar(group.label, colour, interval, f"{len(reached)} of {len(took)}", reached))
        facts[group.label] = {"met": len(reached), "runs": len(took), "median": median}
        facts[group.label] |= {"low": reached[0], "high": reached[-1]} if reached else {}
    return panel, facts


def learning(groups: Sequence[Group], metric: str, over: str, target: float | None) -> Panel:
    axis = "environment steps" if over == "steps" else "seconds"
    name = {RETURN: "return", EVALUATION: "evaluation return"}.get(metric, metric)
    panel = Panel(groups[0].env if groups else "", axis, name, level=target)
    panel.level_label = "" if target is None else f"target {target:g}"
    for colour, group in enumerate(groups):
        panel.lines += curve(group, metric, over, colour)
    return panel


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points, the lowest and highest of each piece among them, so that no peak is lost."""
    if len(x) <= most:
        return x, y
    keep = {0, len(x) - 1}
    for piece in np.array_split(np.arange(len(x)), max(1, most // 2 - 1)):
        finite = piece[np.isfinite(y[piece])]
        if len(finite):
            keep |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        else:
            keep.add(int(piece[0]))
    order = np.array(sorted(keep))
    return x[order], y[order]
