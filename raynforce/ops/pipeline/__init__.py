"""From training to what is served: steps that are done once each, whatever ends them in between."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.pipeline import steps as work_of
from raynforce.ops.pipeline.plan import Plan, Step, read
from raynforce.ops.pipeline.state import State
from raynforce.ops.pipeline.steps import Work
from raynforce.runs.store import is_url

__all__ = ["Pipelined", "StepReport", "pipeline", "read"]

Status = Literal["done", "ran", "would run", "skipped", "last"]


@dataclass(frozen=True)
class StepReport:
    """What became of a step, or would become of it."""

    step: str
    kind: str
    status: Status
    """`done` before, `ran` now, `skipped` as nothing was promoted; `would run` in a dry run; a server comes `last`."""
    why: str
    needs: tuple[str, ...] = ()
    outputs: Mapping[str, Any] | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        facts = {"step": self.step, "kind": self.kind, "status": self.status, "why": self.why, "needs": [*self.needs]}
        plain = {k: v for k, v in (self.outputs or {}).items() if k not in ("id", "returns", "config")}
        return {**facts, "seconds": round(self.seconds, 3), **({"outputs": plain} if self.outputs else {})}


@dataclass(frozen=True)
class Pipelined:
    """A pipeline that has come to its end, or the plan of one."""

    name: str
    dir: str
    steps: Sequence[StepReport]
    serve: Sequence[str] = ()
    """The words of the command that serves what was promoted, if the last step is that."""
    token: str | None = field(default=None, repr=False)
    """For `RAYNFORCE_SERVE_TOKEN` of that command, if the file has one."""

    @property
    def promoted(self) -> bool | None:
        """Whether a policy was; None if no step promotes."""
        found = [x.outputs["promoted"] for x in self.steps if x.kind == "promote" and x.outputs is not None]
        return any(found) if found else None

    def to_json(self) -> dict[str, Any]:
        facts = {"pipeline": self.name, "dir": self.dir, "promoted": self.promoted, "serve": [*self.serve] or None}
        return {**facts, "steps": [step.to_json() for step in self.steps]}


def pipeline(
    file: str | Path | Mapping[str, Any],
    *,
    start_at: str | None = None,
    dry_run: bool = False,
    dir: str | Path | None = None,
    progress: Any = "auto",
    stream: Any = None,
    say: Callable[[str], None] | None = None,
) -> Pipelined:
    """Run the steps of a pipeline that are not done yet: train or tune, evaluate, promote if better, export.

    `file` is a YAML file or a mapping (docs/pipeline.md). A step is done once for equal settings and inputs: after a
    kill the same call goes on where it was. `start_at` names a step that runs again with all that depend on it.
    `dry_run` changes nothing and tells what would run. `dir` is where state and runs are kept, a URL too. A step that
    serves is left to the caller: its command is in `serve`.
    """
    plan = read(file, None if dir is None else str(dir))
    stream = stream or sys.stdout
    tell = say or (lambda line: None if progress == "quiet" else print(line, file=stream, flush=True))
    _require(plan)
    again = plan.after(start_at) if start_at is not None else set()
    state = State(plan.where)
    with nullcontext() if dry_run else state.locked():
        if again and not dry_run:
            state.again(again)
        found = _go(plan, state, again if dry_run else set(), dry_run, tell, stream, progress)
    serve = next((words for _, words in work_of.server(plan)), [])
    return Pipelined(plan.name, plan.where, found, serve, plan.token)


def _require(plan: Plan) -> None:
    """What can be known to fail later is refused now."""
    for step in plan.steps:
        if step.kind == "tune" and is_url(plan.where):
            raise UsageError(
                f"step {step.name}: a search is kept in a folder that all nodes see, and dir is {plan.where}"
            )
        if step.kind == "export" and (out := step.settings.get("out")) and "://" not in str(out):
            try:
                work_of.require_replaceable(Path(str(out)).expanduser())
            except UsageError as error:
                raise UsageError(f"step {step.name}: {error}") from None
        if step.kind == "promote":
            from raynforce.ops.registry import Registry

            Registry(str(step.settings["to"]))


def _go(
    plan: Plan, state: State, again: set[str], dry: bool, say: Callable[[str], None], stream: Any, progress: Any
) -> list[StepReport]:
    reports: list[StepReport] = []
    outputs: dict[str, dict[str, Any]] = {}
    for number, step in enumerate(plan.steps, 1):
        report = _one(plan, state, step, outputs, again, dry, _Told(say, number, len(plan.steps)), stream, progress)
        if report.outputs is not None:
            outputs[step.name] = dict(report.outputs)
        reports.append(report)
    return reports


@dataclass(frozen=True)
class _Told:
    """Says which step of how many a line is about."""

    say: Callable[[str], None]
    number: int
    of: int

    def line(self, step: Step, text: str) -> None:
        self.say(f"[{self.number}/{self.of}] {step.name}: {text}")


def _one(
    plan: Plan,
    state: State,
    step: Step,
    outputs: Mapping[str, dict[str, Any]],
    again: set[str],
    dry: bool,
    told: _Told,
    stream: Any,
    progress: Any,
) -> StepReport:
    """Do a step, unless it is done or there is nothing to do."""

    def report(status: Status, why: str, **more: Any) -> StepReport:
        if step.kind != "serve" or dry:
            told.line(step, why if status == "ran" else f"{status} ({why})" if status != "done" else f"done: {why}")
        return StepReport(step.name, step.kind, status, why, step.needs, **more)

    if step.kind == "serve":
        return report("last", "serves what is current in the registry, until it is stopped")
    lacking = [need for need in step.needs if need not in outputs]
    skipped = [need for need in step.needs if outputs.get(need, {}).get("promoted") is False]
    if skipped:
        return report("skipped", f"{skipped[0]} has promoted nothing")
    if lacking:  # in a dry run
        return report("would run", f"after {', '.join(lacking)}")
    inputs = {need: outputs[need] for need in step.needs}
    hash = state.hash(step, {need: inputs[need]["id"] for need in step.needs})
    marker = state.done(step, hash)
    if marker is not None and step.name not in again:
        return report("done", work_of.in_words(step, marker["outputs"]), outputs=marker["outputs"])
    why = "it was asked to" if step.name in again else _reason(state, step, hash)
    if dry:
        return report("would run", why)
    told.line(step, f"runs ({why})")
    began = time.monotonic()
    say = lambda line: told.line(step, line)  # noqa: E731
    try:
        made = work_of.run_step(Work(plan, step, hash, state.path(step, hash), inputs, say, stream, progress))
    except RaynforceError as error:
        raise type(error)(f"step {step.name}: {error}") from error
    seconds = time.monotonic() - began
    state.finish(step, hash, {"settings": step.settings, "outputs": made, "seconds": seconds, "time": time.time()})
    return report("ran", f"{work_of.in_words(step, made)} ({seconds:.1f} s)", outputs=made, seconds=seconds)


def _reason(state: State, step: Step, hash: str) -> str:
    """Why a step is not done."""
    if state.begun(step, hash):
        return "begun, goes on"
    before = state.earlier(step, hash)
    if before is None:
        return "not done yet"
    had, now = before.get("settings", {}), dict(step.settings)
    changed = [key for key in sorted({*had, *now}) if had.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        return f"again: {key} was {_shown(had.get(key))} and is {_shown(now.get(key))}"
    return "again: it was asked to" if state.attempts.get(step.name) else "again: what it needs has changed"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
