"""`raynforce plot`: learning curves with bands over seeds, scores, time to target, as a picture or a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from raynforce.charts import figure, svg
from raynforce.charts.page import page
from raynforce.charts.panels import Panel, learning, scores, to_target
from raynforce.charts.reading import EVALUATION, RETURN, Group, RunData, Say, grouped, runs_of, silent
from raynforce.errors import UsageError, nearest

PICTURES, PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")


def plot(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | Path,
    *,
    metric: str | None = None,
    over: Literal["steps", "time"] = "steps",
    target: float | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """Draw runs into a file (png, svg, pdf, or a page as html); returns the figures that are in it.

    Runs whose settings differ in the seed alone are one curve: the interquartile mean, with a 95 % bootstrap interval.
    `metric` is the mean return of the last 100 episodes, or any other name in `metrics.jsonl`; `over` is what it
    is drawn over; `target` asks for the time to it (that of the runs, if they have one); `say` is told what is done.
    """
    path = Path(out).expanduser()
    if path.suffix.lower() not in PICTURES + PAGES:
        raise UsageError(f"cannot draw into {str(out)!r}: its name is to end in {', '.join((*PICTURES, '.html'))}")
    if path.suffix.lower() in PICTURES:
        figure.require()
    if over not in ("steps", "time"):
        raise UsageError(f"over = {over!r} is not one of: steps, time")
    found = runs_of([runs] if isinstance(runs, str | os.PathLike) else runs, say)
    metric = _metric(found, metric)
    say(f"drawing {len(found)} runs")
    rows, facts = _rows(grouped(found), metric, over, target)
    if path.suffix.lower() in PAGES:
        write(path, page(f"{len(found)} runs", _page(rows, facts, found)))
    else:
        _to(path, lambda temporary: figure.save(rows, temporary))
    return {"file": str(path), "runs": [run.shown for run in found], "metric": metric, "over": over, "envs": facts}


def _metric(runs: Sequence[RunData], metric: str | None) -> str:
    known = sorted({name for run in runs for name in run.series})
    if metric is None:
        return RETURN if RETURN in known or EVALUATION not in known else EVALUATION
    if metric not in known:
        some = ", ".join(known[:8]) or "none, they have not reported yet"
        raise UsageError(f"no run has the metric {metric!r}{nearest(metric, known)}: known are {some}, ...")
    return metric


def _rows(
    groups: Sequence[Group], metric: str, over: str, target: float | None
) -> tuple[list[list[Panel]], dict[str, Any]]:
    """A row of panels for each environment."""
    rows, facts = [], {}
    for env in dict.fromkeys(group.env for group in groups):
        mine = [group for group in groups if group.env == env]
        goals = {run.target for group in mine for run in group.runs} - {None}
        goal = target if target is not None else goals.pop() if len(goals) == 1 else None
        level = goal if metric in (RETURN, EVALUATION) else None
        score, compared = scores(mine)
        panels = [learning(mine, metric, over, level), score]
        if metric == RETURN and any(EVALUATION in run.series for group in mine for run in group.runs):
            evaluated = learning(mine, EVALUATION, over, level)
            evaluated.title = "evaluation"
            panels.insert(1, evaluated)
        if goal is not None:
            timed, took = to_target(mine, goal, over)
            panels.append(timed)
            compared |= {"target": goal, "time_to_target": took}
        rows.append(panels)
        facts[env] = compared
    return rows, facts


def _page(rows: Sequence[Sequence[Panel]], facts: dict[str, Any], runs: Sequence[RunData]) -> str:
    out = [f"<h1>{len(runs)} run{'s' * (len(runs) != 1)}</h1>"]
    told = "Curves are interquartile means over seeds; bands and bars are 95 % bootstrap intervals; dots are runs."
    out.append(f'<p class="soft">{told}</p>')
    for row, (env, compared) in zip(rows, facts.items(), strict=True):
        out.append(f"<h2>{escape(env)}</h2><div class=grid>")
        for panel in row:
            name = escape(panel.y or panel.title)
            out.append(f"<figure><h3>{name}</h3>{svg.draw(panel)}{svg.legend(panel)}</figure>")
        out.append("</div>")
        if better := compared["probability_of_improvement"]:
            lines = (
                f"<tr><td>{escape(pair)}</td><td class=n>{found['estimate']:.0%}</td>"
                f"<td class=n>{found['low']:.0%} to {found['high']:.0%}</td></tr>"
                for pair, found in better.items()
            )
            head = "<tr><th>better run</th><th class=n>probability</th><th class=n>95 %</th></tr>"
            out.append(f"<div class=wide><table>{head}{''.join(lines)}</table></div>")
    listed = "".join(f"<li><code>{escape(run.shown)}</code> {escape(run.glance.state)}</li>" for run in runs)
    out.append(f"<h2>Runs</h2><ul>{listed}</ul>")
    return "\n".join(out)


def write(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all."""
    _to(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _to(path: Path, make: Any) -> None:
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        make(temporary)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True) if path.parent.is_dir() else None
