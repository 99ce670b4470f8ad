"""`raynforce report`: one page on a run, or several, to send to a colleague."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from raynforce import settings
from raynforce.charts import svg
from raynforce.charts.page import page
from raynforce.charts.panels import Line, Panel, learning
from raynforce.charts.plotting import write
from raynforce.charts.reading import DEVIATION, EVALUATION, RETURN, RunData, Say, grouped, runs_of, silent
from raynforce.errors import RaynforceError
from raynforce.runs.advising import bound
from raynforce.runs.catalog import KeptCheckpoint, checkpoints_of, number
from raynforce.runs.faults import History, each_event, summarise
from raynforce.runs.progress import clock_time
from raynforce.runs.progress import number as figure

OUT = "report.html"
MOST_RUNS = 20  # that have a section of their own
MOST_FAULTS, MOST_CHECKPOINTS = 30, 20  # that are listed
ACTIVITIES = ["env", "learn", "policy", "prepare", "transport", "other", "gradients", "waiting"]
PHASES = ("sample", "learn")
STATES = {"finished": "good", "failed": "bad", "killed": "bad", "broken": "bad"}


def report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out: str | Path | None = None, *, say: Say = silent
) -> Path:
    """Write one page on a run, on all seeds of a folder, or on several runs; returns where it is.

    It is one file without anything from elsewhere. `out` is `report.html` in the run's own folder if it is not given;
    `say` is told what is done.
    """
    given = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    found = runs_of(given, say)
    say(f"writing of {len(found)} runs")
    path = Path(out).expanduser() if out is not None else _place(given, found)
    body = list(_several(found)) if len(found) > 1 else []
    for run in found[:MOST_RUNS]:
        body += _folded(run) if len(found) > 1 else _run(run)
    if len(found) > MOST_RUNS:
        body.append(f'<p class="soft">{len(found) - MOST_RUNS:,} more runs are in the table alone.</p>')
    title = f"{found[0].algo} on {found[0].env}" if len(found) == 1 else f"{len(found)} runs"
    write(path, page(title, "\n".join(body)))
    return path


def _place(given: Sequence[str | os.PathLike[str]], found: Sequence[RunData]) -> Path:
    here = Path(str(given[0])).expanduser()
    if len(given) == 1 and here.is_dir():
        return here / OUT
    return found[0].path / OUT if len(found) == 1 else Path(OUT)


# -- several runs -----------------------------------------------------------------------------------------------------


def _several(runs: Sequence[RunData]) -> Iterator[str]:
    groups = grouped(runs)
    yield f"<h1>{len(runs)} runs</h1>"
    yield f'<p class="soft">{escape(_made())}</p>'
    for env in dict.fromkeys(group.env for group in groups):
        mine = [group for group in groups if group.env == env]
        yield f"<h2>{escape(env)}</h2><div class=grid>"
        for metric in (RETURN, EVALUATION):
            panel = learning(mine, metric, "steps", mine[0].runs[0].target)
            if panel.lines:
                yield _figure(panel, panel.y)
        yield "</div>"
    head = "".join(f"<th>{name}</th>" for name in ("run", "algorithm", "status"))
    head += "".join(f"<th class=n>{name}</th>" for name in ("seed", "steps", "return", "best", "time", "faults"))
    rows = []
    for run in runs:
        glance = run.glance
        cells = [run.name, run.algo, glance.state]
        figures = [str(run.config.get("seed", "–")), f"{glance.steps:,}", figure(glance.return_mean)]
        figures += [
            figure(glance.best_eval),
            clock_time(number(glance.metrics.get("time"))),
            f"{_history(run).faults:,}",
        ]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr>{row}{''.join(f'<td class=n>{escape(cell)}</td>' for cell in figures)}</tr>")
    yield f"<h2>Runs</h2><div class=wide><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _folded(run: RunData) -> Iterator[str]:
    yield f"<details><summary>{escape(run.shown)}</summary>"
    yield from _run(run)
    yield "</details>"


# -- one run ----------------------------------------------------------------------------------------------------------


def _run(run: RunData) -> Iterator[str]:
    yield f"<h1>{escape(run.algo)} on {escape(run.env)}</h1>"
    yield f'<p class="soft"><code>{escape(run.shown)}</code> · {escape(_made())}</p>'
    yield _tiles(run)
    if run.left_out:
        yield f'<p class="soft">{run.left_out:,} torn lines of metrics were left out.</p>'
    yield "<section><h2>Learning</h2>"
    yield from _curves(run)
    yield "</section><section><h2>Where the time went</h2>"
    yield from _times(run)
    yield "</section><section><h2>Faults</h2>"
    yield from _faults(run)
    yield "</section><section><h2>Checkpoints</h2>"
    kept = _checkpoints(run)
    yield from _kept(kept)
    yield "</section><section><h2>Config</h2>"
    yield from _config(run)
    yield "</section><section><h2>Written by</h2>"
    yield from _versions(kept)
    yield "</section>"


def _made() -> str:
    return f"report of {time.strftime('%Y-%m-%d %H:%M')}"


def _tiles(run: RunData) -> str:
    glance, result, target = run.glance, run.result, run.target
    solved = result.get("solved_steps")
    score = number(result.get("eval_return"))
    tiles = [
        (glance.state, f"{escape(glance.reason) or 'status'}", STATES.get(glance.state, "")),
        (f"{glance.steps:,}", f"steps of {glance.total:,}" if glance.total else "steps", ""),
        (figure(glance.return_mean), "return, last 100 episodes", ""),
        (figure(glance.best_eval), "best evaluation" + (f", target {target:g}" if target is not None else ""), ""),
    ]
    if score is not None:
        tiles.append((figure(score), "best policy, evaluated anew", ""))
    if target is not None:
        met = f"{solved:,}" if isinstance(solved, int) else "not met"
        tiles.append((met, "steps to the target", "good" if isinstance(solved, int) else ""))
    tiles += [
        (clock_time(number(glance.metrics.get("time"))), "time", ""),
        (figure(number(glance.metrics.get("charts/SPS"))), "steps per second", ""),
        (f"{_history(run).faults:,}", "faults", ""),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div><b class="{look}">{escape(value)}</b><span>{what}</span></div>' for value, what, look in tiles)
        + "</div>"
    )


def _curves(run: RunData) -> Iterator[str]:
    series = run.series
    if not series:
        yield '<p class="soft">Nothing was reported yet.</p>'
        return
    main = Panel("return", "environment steps", "return", level=run.target)
    main.level_label = "" if run.target is None else f"target {run.target:g}"
    if RETURN in series:
        main.lines.append(Line("training, last 100 episodes", 0, series[RETURN].steps, series[RETURN].values))
    if EVALUATION in series:
        scored = series[EVALUATION]
        line = Line("evaluation", 1, scored.steps, scored.values, dots=len(scored.steps) < 60)
        if DEVIATION in series and len(series[DEVIATION].values) == len(scored.values):
            line.low, line.high = (scored.values + sign * series[DEVIATION].values for sign in (-1, 1))
        main.lines.append(line)
    if main.lines:
        yield _figure(main, "Return; the band is one standard deviation over the episodes of an evaluation", 320, 1040)
    names = [name for name in series if name.startswith("losses/")]
    names += [name for name in ("charts/SPS", "lag/mean", "replay/size", "inference/batch") if _moves(run, name)]
    names += [
        name for name in ("charts/learning_rate", "charts/epsilon", "charts/episodic_length") if _moves(run, name)
    ]
    yield '<div class="grid">'
    for name in names[:16]:
        lines = [Line(name, 0, series[name].steps, series[name].values)]
        yield _figure(Panel(name, "environment steps", name, lines), name, 190)
    yield "</div>"


def _moves(run: RunData, name: str) -> bool:
    return name in run.series and len(np.unique(run.series[name].values)) > 1


def _figure(panel: Panel, name: str, height: int = svg.HEIGHT, width: int = svg.WIDTH) -> str:
    return f"<figure><h3>{escape(name)}</h3>{svg.draw(panel, height, width)}{svg.legend(panel)}</figure>"


def _times(run: RunData) -> Iterator[str]:
    told = str(run.result.get("where_the_time_went", "")).strip()
    rows: dict[str, dict[str, float]] = {}
    for name, series in run.series.items():
        words = name.split("/")
        if words[0] == "time" and len(words) == 3 and np.isfinite(series.values).any():
            rows.setdefault(words[1], {})[words[2]] = float(np.nanmean(series.values))
    if not rows:  # RLlib's runs: seconds of each round
        spent = {name: float(np.nansum(run.series[f"time/{name}"].values)) for name in PHASES if _known(run, name)}
        rows = (
            {"run": {name: value / sum(spent.values()) for name, value in spent.items()}} if any(spent.values()) else {}
        )
    order = [*ACTIVITIES, *sorted({part for parts in rows.values() for part in parts} - set(ACTIVITIES))]
    if rows:
        ordered = {role: {part: parts[part] for part in order if part in parts} for role, parts in rows.items()}
        yield f"<figure>{svg.shares(ordered, order)}</figure>"
        yield '<p class="soft">Shares of each role\'s time, over the whole run.</p>'
    if told:
        if sentence := bound(told):
            yield f"<p><strong>{escape(sentence)}</strong></p>"
        yield f"<details><summary>As the run told it</summary><pre>{escape(told)}</pre></details>"
    if not rows and not told:
        yield '<p class="soft">It is not known: the run has not reported it.</p>'


def _known(run: RunData, phase: str) -> bool:
    return f"time/{phase}" in run.series


def _history(run: RunData) -> History:
    with contextlib.suppress(RaynforceError):
        return summarise(each_event(run.path / "events.jsonl"))
    return History()


def _faults(run: RunData) -> Iterator[str]:
    history = _history(run)
    if history.storage:
        what = f"Checkpoints could not be written {len(history.storage):,} times: {history.storage[-1]}"
        yield f'<p class="bad">{escape(what)}</p>'
    if not history.groups:
        yield '<p class="good">None.</p>'
        return
    yield "<div class=wide><table><tr><th class=n>count</th><th>who</th><th>what</th><th>cause</th><th>done</th></tr>"
    for group in history.groups[:MOST_FAULTS]:
        done = ", ".join(f"{what} {count:,}×" for what, count in group.actions.items())
        cells = [group.role, group.kind, group.cause, done]
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        yield f"<tr><td class=n>{group.count:,}</td>{text}</tr>"
    yield "</table></div>"
    if history.recoveries:
        took = [seconds for each in history.recoveries.values() for seconds in each]
        yield f'<p class="soft">{len(took):,} recoveries, the longest in {max(took):.1f} s.</p>'


def _checkpoints(run: RunData) -> list[KeptCheckpoint]:
    with contextlib.suppress(OSError, RaynforceError):
        return checkpoints_of(run.path)
    return []


def _kept(kept: Sequence[KeptCheckpoint]) -> Iterator[str]:
    if not kept:
        yield '<p class="soft">None.</p>'
        return
    yield "<div class=wide><table><tr><th class=n>step</th><th>when</th><th></th>"
    yield "<th class=n>size</th><th>state</th></tr>"
    for each in kept[:MOST_CHECKPOINTS]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time)) if 0 < each.time < 4e9 else "–"
        size = f"{(sum(each.files.values()) + sum(each.segments.values())) / 1e6:,.2f} MB"
        state = f'<span class="bad">{escape("; ".join(each.wrong))}</span>' if each.wrong else "whole"
        marks = escape(", ".join(each.marks))
        yield f"<tr><td class=n>{each.step:,}</td><td>{when}</td><td>{marks}</td>"
        yield f"<td class=n>{size}</td><td>{state}</td></tr>"
    yield "</table></div>"


def _config(run: RunData) -> Iterator[str]:
    given = settings.dotted(run.config)
    if not given:
        yield '<p class="bad">config.yaml cannot be read.</p>'
        return
    usual = _usual(run)
    changed = {name: value for name, value in given.items() if name not in usual or usual[name] != value}
    yield _settings({name: value for name, value in changed.items() if value is not None})
    yield '<p class="soft">Settings that are not the defaults.</p>'
    yield f"<details><summary>All {len(given)} settings</summary>{_settings(given)}</details>"


def _usual(run: RunData) -> dict[str, Any]:
    """The defaults, as far as they are known without an algorithm of the user's own."""
    from raynforce.algos import BUILT_IN, algorithm_class
    from raynforce.config import Config

    config, algo = Config(env=""), run.config.get("algo")
    if algo in BUILT_IN and run.config.get("engine", "native") == "native":
        config = replace(config, algorithm=algorithm_class(str(algo)).Settings())
    return settings.dotted(config.to_dict())


def _settings(given: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(str(value))}</code></td></tr>"
        for name, value in given.items()
    )
    return f"<div class=wide><table class=narrow>{''.join(rows)}</table></div>"


def _versions(kept: Sequence[KeptCheckpoint]) -> Iterator[str]:
    versions = next((each.versions for each in kept if each.versions), {})
    yield _settings(versions) if versions else '<p class="soft">It is not known.</p>'
