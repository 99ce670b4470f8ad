"""The runs of one trial, one for each seed, in one process: they take turns, from evaluation to evaluation.

Each run is a thread that waits in a callback while it is not its turn, so a trial keeps one core busy and all of its
seeds are equally far. A run that is there already goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raynforce import api
from raynforce.config import Config
from raynforce.driver.status import Callback, Result, Status
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.tuning.study import SeedState, write
from raynforce.runs.directory import RunDirectory
from raynforce.runs.mirrored import begun_run

TURN = 5.0  # seconds after which a run hands over without an evaluation: somebody may want to stop it
TAKEN = 20.0  # seconds that the lock of a run may be held by a process that is about to end
RESULT = "result.json"
LEFT_OUT = shutil.ignore_patterns("run.lock", RESULT, "*.tmp")


class _Run(Callback):
    """One run in a thread of its own; of the two, the thread and its owner, one alone is awake."""

    def __init__(self, folder: Path, state: SeedState, config: Config) -> None:
        self.state, self.path = state, folder / state.run
        self._config = config
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._status: Status | None = None
        self._asked: str | None = None  # `save`, or why to stop
        self._since = 0.0
        self._new = False  # an evaluation that was not handed over
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if (found := _read_result(self.path)) is not None:
            self._take(found)

    # -- from outside -----------------------------------------------------------------------------------

    @property
    def evaluations(self) -> int:
        """How many there were; a round more or less makes no difference."""
        return self.state.evaluated // max(1, self._config.eval.every or 1)

    def go(self) -> None:
        """Let it train until its next evaluation, for `TURN` seconds, or to its end."""
        if not self.state.ended:
            self._wake(None)

    def save(self) -> None:
        if self._waits:
            self._wake("save")

    def stop(self, reason: str) -> None:
        """End it with a checkpoint."""
        if self._waits:
            self._wake(reason)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def _waits(self) -> bool:
        return self._thread is not None and self._error is None and not self.state.ended

    def _wake(self, asked: str | None) -> None:
        self._asked, self._since = asked, time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._train, name=f"raynforce-{self.state.run}", daemon=True)
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    # -- in the thread ----------------------------------------------------------------------------------

    def _train(self) -> None:
        try:
            run = self._resumed() if (self.path / "config.yaml").is_file() else self._begun()
            stopped = self._asked not in (None, "save")
            if not stopped:
                write(self.path / RESULT, json.dumps(run.result.to_json()))
            self._take(run.result, ended=not stopped)
        except BaseException as error:
            self._error = error
        finally:
            self._back.release()

    def _begun(self) -> api.Run:
        return api.start(self._config, {}, self.path, callbacks=[self], progress="quiet")

    def _resumed(self) -> api.Run:
        changes = {key: value for key, value in _dotted(self._config).items() if key.startswith("algorithm.")}
        begun = begun_run(self.path)  # waits for a holder that has gone with its machine
        if begun is not None and (over := api.ended_run(begun)) is not None:
            return over
        until = time.monotonic() + TAKEN
        while True:
            try:
                return api.resume(self.path, settings=changes, callbacks=[self], progress="quiet")
            except UsageError as error:  # whoever had it was killed, and may not have noticed yet
                if "in use" not in str(error) or self._status is not None or time.monotonic() > until:
                    raise
            time.sleep(0.2)

    def on_evaluation(self, status: Status, returns: np.ndarray) -> None:
        self._new = True
        self.state.last, self.state.evaluated = status.last_eval, status.steps
        self.state.solved_steps, self.state.solved_at = status.solved_steps, status.solved_at

    def on_round(self, status: Status) -> None:
        self._status, self.state.steps = status, status.steps
        if not self._new and time.monotonic() - self._since < TURN:
            return
        if status.stop_reason is not None:
            return
        self._new = False
        while True:
            waiting = time.monotonic()
            self.state.seconds = status.metrics.get("time/seconds", self.state.seconds)
            self._back.release()
            self._turn.acquire()
            status.idle(time.monotonic() - waiting)
            if self._asked is None:
                return
            if self._asked != "save":
                status.stop(self._asked, evaluate=False)
                return
            status.save()

    def _take(self, result: Result, *, ended: bool = True) -> None:
        state = self.state
        state.steps, state.ended = result.steps, ended
        state.seconds = max(state.seconds, result.seconds)
        if ended:
            state.final, state.solved_steps, state.solved_at = result.eval_return, result.solved_steps, result.solved_at
            state.evaluated = max(state.evaluated, result.steps)


class TrialRuns:
    """All seeds of one trial."""

    def __init__(self, folder: Path, states: Sequence[SeedState], configs: Mapping[int, Config]) -> None:
        self.folder = folder
        self._runs = [_Run(folder, state, configs[state.seed]) for state in states]

    @property
    def states(self) -> list[SeedState]:
        return [run.state for run in self._runs]

    @property
    def ended(self) -> bool:
        return all(state.ended for state in self.states)

    def advance(self) -> None:
        """Let those that are least far train until their next evaluation."""
        behind = min((run.evaluations for run in self._runs if not run.state.ended), default=0)
        for run in self._runs:
            if not run.state.ended and run.evaluations <= behind:
                run.go()

    @property
    def evaluated(self) -> int:
        """Steps at which all seeds that still train were evaluated."""
        training = [state.evaluated for state in self.states if not state.ended]
        return min(training) if training else max(state.evaluated for state in self.states)

    def stop(self, reason: str) -> None:
        for run in self._runs:
            with contextlib.suppress(RaynforceError):  # what it was stopped for matters, not how well that went
                run.stop(reason)

    def copy_to(self, folder: Path) -> None:
        """Everything that the runs are, at this moment: what another trial can go on from."""
        for run in self._runs:
            run.save()
            if not run.path.is_dir():  # it has not begun
                continue
            shutil.copytree(run.path, folder / f"seed{run.state.seed}", symlinks=True, ignore=LEFT_OUT)


def taken_over(source: Path, folder: Path, states: Sequence[SeedState], facts: Mapping[str, Any]) -> list[SeedState]:
    """Runs that go on where those of another trial were: new directories beside the old, whose history says so."""
    found = []
    for state in states:
        stem, _, number = state.run.partition(".")
        name = f"{stem}.{int(number or 1) + 1}"
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source / f"seed{state.seed}", target, symlinks=True)
        RunDirectory(target).event("exploited", **facts)
        if (left := RunDirectory(folder / state.run)).events.exists():
            left.event("stopped", reason=f"tune: goes on from trial {facts['of']}, in {name}", steps=state.steps)
        found.append(SeedState(state.seed, name))
    return found


def _read_result(run: Path) -> Result | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Result(**json.loads((run / RESULT).read_text()))
    return None


def _dotted(config: Config) -> dict[str, Any]:
    from raynforce.settings import dotted

    return dotted(config.to_dict())
