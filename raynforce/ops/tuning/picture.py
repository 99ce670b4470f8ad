"""The search in one picture: how trials learned, and which settings the good ones have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from raynforce.errors import RaynforceError
from raynforce.ops.tuning.space import Domain
from raynforce.ops.tuning.study import Study
from raynforce.ops.tuning.view import value_text

NAME = "tune.png"
MOST = 200  # trials that are drawn, the best of them


def draw(study: Study) -> Path | None:
    """Write `tune.png`; None where there is no matplotlib, or nothing to draw."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    plan = study.plan
    trials = [trial for trial in study.ranked() if trial.merit(plan) is not None][:MOST]
    if not trials:
        return None
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1)
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    shade = {trial.id: colours(1 - place / max(1, len(trials) - 1)) for place, trial in enumerate(trials)}
    for trial in reversed(trials):
        if trial.curve:
            best = trial is trials[0]
            xs, ys = zip(*trial.curve, strict=True)
            label = f"best: trial {trial.id}" if best else None
            top.plot(
                xs, ys, color="crimson" if best else shade[trial.id], lw=2.2 if best else 1, marker=".", label=label
            )
    if plan.target is not None:
        top.axhline(plan.target, color="grey", ls="--", lw=1, label=f"target {plan.target:g}")
    top.set(xlabel="environment steps of each seed", ylabel="evaluated return, median of seeds")
    top.set_title(f"{plan.algorithm} on {plan.env}: {len(study.trials)} trials by {plan.scheduler}")
    top.legend(loc="best")
    _coordinates(bottom, study, trials, shade)
    path = study.path / NAME
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RaynforceError(f"cannot write {path}: {error.strerror}") from None
    return path


def _coordinates(axes: Any, study: Study, trials: Any, shade: Any) -> None:
    """Parallel coordinates: one vertical axis for each setting, the last for how good it was."""
    keys = list(study.plan.search)
    ranks = {trial.id: 1 - place / max(1, len(trials) - 1) for place, trial in enumerate(trials)}
    for trial in reversed(trials):
        best = trial is trials[0]
        places = [study.plan.search[key].position(trial.config[key]) for key in keys]
        colour, width = ("crimson", 2.2) if best else (shade[trial.id], 1)
        axes.plot(range(len(keys) + 1), [*places, ranks[trial.id]], color=colour, lw=width)
    for at, key in enumerate(keys):
        axes.axvline(at, color="black", lw=0.8)
        for place, text in _ticks(study.plan.search[key]):
            axes.text(at + 0.02, place, text, fontsize=8, va="center")
    axes.axvline(len(keys), color="black", lw=0.8)
    axes.set_xticks(range(len(keys) + 1), [*(key.rpartition(".")[2] for key in keys), "rank"])
    axes.set(yticks=[], ylim=(-0.05, 1.05))


def _ticks(domain: Domain) -> list[tuple[float, str]]:
    if domain.kind == "choice":
        return [(domain.position(value), value_text(value)) for value in domain.grid()]
    low, high = domain.low, domain.high
    middle = math.sqrt(low * high) if domain.logarithmic else (low + high) / 2
    return [(domain.position(value), f"{value:.2g}") for value in (low, middle, high)]
