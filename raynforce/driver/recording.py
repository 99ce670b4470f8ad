"""Everything that a run writes: metrics and events as they come, checkpoints beside training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.config import Config
from raynforce.driver.saving import LAST_SECONDS, Saver
from raynforce.errors import RaynforceError
from raynforce.runs.directory import RunDirectory
from raynforce.runs.journal import Journal
from raynforce.runs.lock import Lock
from raynforce.runs.metrics import JsonlSink, Metrics, Sink
from raynforce.runs.mirrored import NotMirrored
from raynforce.runs.tensorboard import TensorBoardSink
from raynforce.trees import Tree

FLUSH_SECONDS = 30.0  # that a checkpoint waits for the metrics before it to be on disk


class Best(NamedTuple):
    steps: int
    score: float
    policy: Callable[[], Tree]


class Recorder:
    """The files of a run, open for writing. Training never waits for the disk, but at the start and at the end."""

    def __init__(
        self,
        run: RunDirectory,
        lock: Lock,
        config: Config,
        sinks: Sequence[Sink],
        say: Callable[[str], None],
        opened: contextlib.ExitStack,
        resume_step: int | None,
        positions: Tree,
    ) -> None:
        """`positions` is what `position` was at the checkpoint that the run is resumed from at `resume_step`."""
        self.best: Best | None = None  # the policy that evaluated best in this process
        self._best_on_disk: Best | None = None  # set by the saver's thread alone
        self._run, self._lock, self._how = run, lock, config.checkpoint
        self._due, self._saved_at = False, time.monotonic()
        self._resume_step = resume_step or 0
        self._journal = run.journal = Journal(say)
        opened.callback(self._journal.close)
        opened.callback(setattr, run, "journal", None)
        self._saver = Saver(say, run.event, run.patience)
        opened.callback(self._saver.close)
        self._metrics = Metrics(sinks)
        opened.callback(self._metrics.close)
        at = positions.get
        self._jsonl = JsonlSink(run.metrics, self._journal, resume_step=resume_step, resume=at("metrics"))
        self._tensorboard = TensorBoardSink(
            run.tensorboard, self._journal, resume_step=resume_step, resume=at("tensorboard")
        )
        self._metrics.add(self._jsonl)
        self._metrics.add(self._tensorboard)
        self._metrics.begin(run.path, config.to_dict())
        run.heard = self._metrics.event
        opened.callback(setattr, run, "heard", None)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(step, metrics)

    def episodes(self, step: int, returns: np.ndarray, lengths: np.ndarray) -> None:
        if len(returns):
            self._metrics.episodes(step, returns, lengths)

    def end(self, result: Mapping[str, Any], where_the_time_went: str) -> None:
        """Write down how the run ended."""
        self._run.event("result", **result, where_the_time_went=where_the_time_went)
        self._metrics.end({"result": result, "where_the_time_went": where_the_time_went})
        self.finish()

    def position(self) -> Tree:
        return {"metrics": self._jsonl.position(), "tensorboard": self._tensorboard.position()}

    def metrics(self) -> dict[str, float]:
        return self._saver.metrics()

    @property
    def saved_step(self) -> int:
        """Where a resume would go on, by the newest checkpoint; 0 if nothing that was trained is saved."""
        return self._resume_step if self._saver.last is None else self._saver.last.step

    def look(self) -> None:
        """Tell what was written or failed in the meantime; let the best policy be written, if it is not."""
        self._saver.look()
        self._journal.report()
        if not self._saver.failing:
            self.save_best()

    def is_due(self, before: int, after: int, *, asked: bool = False) -> bool:
        """Whether a checkpoint can and should be taken now, after a round that led from one step count to another."""
        every, seconds = self._how.every, self._how.seconds
        self._due |= asked
        self._due |= every > 0 and before // every != after // every  # also if it has to wait its turn
        self._due |= 0 < seconds < time.monotonic() - self._saved_at
        due = self._saver.retry_is_due if self._saver.failing else self._due
        return due and not self._saver.busy

    def save(self, step: int, parts: dict[str, Tree]) -> None:
        self._lock.check()
        self.save_best()
        self._due, self._saved_at = False, time.monotonic()

        def write() -> int:
            if not self._journal.flush(FLUSH_SECONDS):  # the metrics must be as long as `position` says
                raise RaynforceError(f"no checkpoint can be written: {self._journal.trouble}")
            return self._run.save(step, parts, self._how.keep, self._how.keep_nth).bytes_written

        self._saver.write(f"the checkpoint of step {step:,}", step, write)

    @property
    def best_is_unsaved(self) -> bool:
        return self.best is not self._best_on_disk

    def save_best(self) -> None:
        """Let the best policy be written, if it has not been; it is tried again with the next checkpoint."""
        best = self.best
        if best is None or not self.best_is_unsaved or self._saver.busy:
            return
        policy = best.policy()

        def write() -> int:
            written = self._run.save_best(best.steps, policy, best.score).bytes_written
            self._best_on_disk = best
            return written

        self._saver.write("the best policy", best.steps, write, whole=False)

    def save_now(self, begin: Callable[[], None], show: Callable[[str], None]) -> None:
        """Wait until the checkpoint that `begin` hands over is on the disk; one attempt."""
        if self._saver.wait(show, LAST_SECONDS):
            begin()
            self._saver.wait(show, LAST_SECONDS)
            self._saver.require()

    def save_last(self, begin: Callable[[], None], show: Callable[[str], None]) -> None:
        """The same for the last checkpoint of a run, which is tried for a while."""
        try:
            self._saver.insist(begin, show)
            if self.best_is_unsaved:  # it failed a moment before the disk worked again
                self._saver.insist(begin, show)
        except NotMirrored:
            raise
        except RaynforceError as error:
            if self._best_on_disk is None:
                raise
            kept = f"the best policy, of step {self._best_on_disk.steps:,}, is kept (raynforce eval, train --from)"
            raise RaynforceError(f"{error}, but {kept}") from error

    def finish(self) -> None:
        self._journal.flush(FLUSH_SECONDS)
        self._run.finish()
