"""What the terminal shows while trials run: a table, plain lines, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from raynforce.ops.tuning.study import Plan, Study, Trial
from raynforce.runs.progress import Clock, Mode, Output, ReportPace, clock_time, number
from raynforce.runs.table_view import LiveTable, fitting

if TYPE_CHECKING:
    from rich.console import Group


class TuneView:
    """All trials of one search. This one shows nothing."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._before: float | None = None  # what was done when this process began

    def message(self, text: str) -> None:
        """Show a line that stays."""

    def draw(self, study: Study) -> None:
        """Show where all of them stand, if that is due."""

    def stop(self) -> None:
        """Give the terminal back."""

    def ended(self, trial: Trial, plan: Plan) -> None:
        self.message(f"trial {trial.id} {outcome(trial, plan)}: {shown(trial.config)}")

    def line(self, study: Study) -> str:
        """Where all of them stand, in one line."""
        trials = study.trials
        counts = {status: sum(trial.status == status for trial in trials) for status in ("done", "stopped", "failed")}
        over = sum(counts.values())
        parts = [f"{count} {status}" for status, count in counts.items() if count]
        running = sum(trial.status == "running" for trial in trials)
        line = f"trials {over}/{study.plan.trials} ({', '.join([*parts, f'{running} running'])})"
        best = study.best()
        if best is not None:
            line += f"   best {figure(best, study.plan)} (trial {best.id})"
        return f"{line}   eta {clock_time(self.left(study)):>5}"

    def left(self, study: Study) -> float | None:
        """Seconds that the rest takes, by what was done so far in this process; None if too little is."""
        done = _share(study)
        if self._before is None:
            self._before = done
        new, seconds = done - self._before, self._clock() - self._began
        return seconds * (1 - done) / new if new > 0.02 else None


def _share(study: Study) -> float:
    """How much of the search is done, counted in trials; one that runs is held against the mean of those before."""
    plan = study.plan
    ended = [trial.steps for trial in study.trials if trial.over and trial.steps]
    usual = sum(ended) / len(ended) if ended else plan.steps * len(plan.seeds)
    if plan.scheduler == "pbt":
        usual = plan.steps * len(plan.seeds)
    parts = [1.0 if trial.over else min(0.9, trial.steps / max(1.0, usual)) for trial in study.trials]
    return min(1.0, sum(parts) / max(1, plan.trials))


def figure(trial: Trial, plan: Plan) -> str:
    """The objective with its unit; where the target was not met, the return."""
    value = trial.objective(plan)
    if plan.objective == "return" or value is None:
        seen = trial.curve[-1][1] if plan.objective != "return" and trial.curve else value
        return "–" if seen is None else number(seen) if plan.objective == "return" else f"return {number(seen)}"
    return f"{value:,.0f} steps" if plan.objective == "steps" else f"{value:.1f} s"


def outcome(trial: Trial, plan: Plan) -> str:
    if trial.status == "failed":
        return f"failed ({trial.cause})"
    how = {"stopped": f"stopped at {_each(trial):,} steps", "done": "done"}.get(trial.status, trial.status)
    return f"{how}, {figure(trial, plan)}"


def _each(trial: Trial) -> int:
    return max((seed.steps for seed in trial.seeds), default=0)


def shown(config: Mapping[str, Any]) -> str:
    """Settings in a line, by the last part of their names."""
    return ", ".join(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in config.items())


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


class PlainTune(TuneView):
    """One line for all of them, every `every` seconds at most."""

    def __init__(self, stream: TextIO, *, every: float = 2.0, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._out = Output(stream)
        self._pace = ReportPace(every, clock, thinning=True)
        self._pace.is_due()
        self._last = ""

    def message(self, text: str) -> None:
        self._out.lines(text)

    def draw(self, study: Study) -> None:
        if self._pace.is_due():
            line = self.line(study)
            if line.partition("eta")[0] != self._last.partition("eta")[0]:
                self.message(line)
            self._last = line


LEAST = 16  # columns of settings that are worth showing


class LiveTune(TuneView):
    """A table that is redrawn in place; lines scroll by above it."""

    def __init__(self, stream: TextIO, *, every: float = 0.5, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._table = LiveTable(stream, every=every, clock=clock)

    def message(self, text: str) -> None:
        self._table.message(text)

    def draw(self, study: Study) -> None:
        self._table.draw(lambda seconds, height, width: self._view(study, height, width))

    def stop(self) -> None:
        self._table.stop()

    def _view(self, study: Study, height: int, width: int) -> Group:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        plan = study.plan
        line = f" {self.line(study)}"
        lines = [line] if len(line) <= width else [f" {part.strip()}" for part in line.split("   ")]
        order = [trial for trial in study.trials if trial.status == "running"]
        order += [trial for trial in study.ranked() if trial.over]
        rows = []
        for trial in order[: max(3, height - 5 - len(lines))]:
            steps = f"{_each(trial):,} {min(1.0, _each(trial) / plan.steps):>4.0%}"
            rows.append([str(trial.id), trial.status, steps, figure(trial, plan), shown(trial.config)])
        table = Table(box=box.SIMPLE_HEAD)
        heads = ["trial", "", "steps", "return" if plan.objective == "return" else "to target", "settings"]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        room = width - sum(widths[:-1]) - 3 * len(heads) - 1  # rich would take it from all columns
        for name in heads if room >= LEAST else heads[:-1]:
            table.add_column(name, justify="left" if name in ("", "settings") else "right", no_wrap=True)
        for *figures, settings in rows:
            cut = settings if len(settings) <= room else f"{settings[: room - 1]}…"
            cells = [*figures, cut] if room >= LEAST else figures
            table.add_row(*cells, style="" if figures[1] == "running" else "dim")
        return Group(table, *(Text(part, no_wrap=True, overflow="ellipsis") for part in lines))


def make_view(progress: Mode = "auto", stream: TextIO | None = None) -> TuneView:
    return fitting(progress, stream, TuneView, PlainTune, LiveTune)
