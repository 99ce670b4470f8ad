"""Trials on Ray Tune: which one is next, which one stops, and what is written down of each."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raynforce.driver.signals import StopRequest
from raynforce.errors import RaynforceError
from raynforce.ops.tuning.halving import REDUCTION, Rungs
from raynforce.ops.tuning.searching import TPE
from raynforce.ops.tuning.space import Domain
from raynforce.ops.tuning.study import SeedState, Study, Trial
from raynforce.ops.tuning.trainable import ID, Trials, Work, evaluated_every, name_of, number_of
from raynforce.ops.tuning.view import TuneView
from raynforce.runs.disk import is_full
from raynforce.runtimes.ray.private import ready_trials, uncounted_callbacks
from raynforce.runtimes.ray.state import environment

SAVE_EVERY = 0.5  # seconds between two writings of trials.json, if no trial has begun or ended
DEATHS = 2  # of a trial's process, until the trial is given up
ANSWER = 60.0  # seconds that a node has to say whether it sees the directory
PERTURBATIONS = 10  # in a run of PBT
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # runs have their own
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # before the first evaluation there is no score
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # its own state is not used
    "TUNE_WARN_THRESHOLD_S": "1000000000",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "600",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
}


def run(
    study: Study, work: Work, view: TuneView, stop: StopRequest, storage: Path, at_once: int, *, ready: bool = False
) -> None:
    """Have all trials that are not over run to their end; returns early if a signal asks to stop. Tune's own files are
    in `storage` meanwhile. There is room for so many trials `at_once`, and processes are `ready` for them, or not."""
    left = [trial for trial in study.trials if not trial.over]
    missing = study.plan.trials - len(study.trials)  # that are not proposed yet
    if not left and not missing:
        return
    book = Book(study, view)
    trainable = tune.with_resources(
        tune.with_parameters(Trials, work=work), {"cpu": study.plan.cpus, "gpu": study.plan.gpus}
    )
    quiet = {**QUIET, "TUNE_MAX_PENDING_TRIALS_PG": str(max(1, at_once))}
    with ExitStack() as stack:
        for each in (_emptied(storage), environment(quiet), _quiet_logs(), uncounted_callbacks()):
            stack.enter_context(each)
        if ready:
            stack.enter_context(ready_trials())
        how: dict[str, Any]
        if study.plan.scheduler == "pbt":
            how = {"scheduler": _pbt(study), "num_samples": 1}
            space: dict[str, Any] = {ID: tune.grid_search([trial.id for trial in left])}
            for key in study.plan.search:
                space[key] = tune.sample_from(_Looked({trial.id: trial.config[key] for trial in left}))
        else:
            space = {}
            how = {"scheduler": Halving(book), "search_alg": Proposals(book), "num_samples": len(left) + missing}
        tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(metric="score", mode="max", reuse_actors=True, trial_name_creator=_name, **how),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(storage),
                verbose=0,
                callbacks=[book],
                stop=Asked(stop, book),
                failure_config=tune.FailureConfig(max_failures=DEATHS),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4, checkpoint_at_end=False),
            ),
        ).fit()
    book.end()
    if book.full:
        raise RaynforceError(f"{book.full}; make room, and go on with: raynforce tune --resume {study.path}")


def nodes_without(file: Path) -> list[str]:
    """Addresses of the nodes that do not see a file of this one; one that does not answer is not asked again."""

    def sees(path: str) -> bool:  # inside, so that it is sent as it is
        import os

        return os.path.isfile(path)

    asked: list[tuple[str, Any]] = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(sees).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
            asked.append((node["NodeManagerAddress"], task.remote(str(file))))
    found, _ = ray.wait([answer for _, answer in asked], num_returns=len(asked), timeout=ANSWER)
    return [address for address, answer in asked if answer in found and not _answer(answer)]


def _answer(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except ray.exceptions.RayError:  # the node has gone
        return True


def _name(trial: Any) -> str:
    return name_of(trial.config[ID])


class _Looked:
    """The value that a trial begins with."""

    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = values

    def __call__(self, spec: Any) -> Any:
        return self._values[spec.config[ID]]


class Asked(Stopper):
    """Ends the search once a signal has come, or the disk is full."""

    def __init__(self, stop: StopRequest, book: Book) -> None:
        self._stop, self._book = stop, book

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stop.number is not None or bool(self._book.full)


class Book(tune.Callback):
    """Writes down what becomes of the trials, and shows it."""

    def __init__(self, study: Study, view: TuneView) -> None:
        self.study, self._view = study, view
        self.halved: set[int] = set()
        self.rungs = Rungs(study.plan.steps, evaluated_every(study.plan))
        self._saved = -math.inf
        self.full = ""  # what could not be written, once the disk is full
        for trial in study.trials:
            for steps, merit in trial.merits:
                self.rungs.report(trial.id, steps, merit)
            if trial.status == "done" and (final := trial.merit(study.plan)) is not None:
                self.rungs.report(trial.id, study.plan.steps, final, ended=True)

    def ours(self, trial: Any) -> Trial:
        return self.study.trial(number_of(str(trial)))

    def is_beaten(self, trial: Trial) -> bool:
        """Whether another has met the target sooner than this one still can."""
        plan = self.study.plan
        others = [
            found for each in self.study.trials if each.status == "done" and (found := each.merit(plan)) is not None
        ]
        highest = trial.highest_merit(plan)
        return highest is not None and bool(others) and highest < max(others)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._view.draw(self.study)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.ours(trial).status = "running"
        self._save(now=True)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.take(trial, result)

    def take(self, tuned: Any, result: Mapping[str, Any]) -> None:
        """Note what a trial has reported; more than once does no harm."""
        trial, plan = self.ours(tuned), self.study.plan
        if states := json.loads(result.get("states", "[]")):
            trial.seeds = [SeedState(**state) for state in states]
        trial.cause = result.get("cause", "")
        self.full = self.full or result.get("full", "")
        if (facts := result.get("exploited")) is not None and facts not in trial.history:
            trial.history.append(dict(facts))
            trial.config |= facts["settings"]
            trial.curve = [point for point in trial.curve if point[0] < facts["steps"]]
            trial.merits = [point for point in trial.merits if point[0] < facts["steps"]]
            self._view.message(f"trial {trial.id} goes on from trial {facts['of']} at step {facts['steps']:,}")
        steps, value, merit = result.get("evaluated"), result.get("return"), trial.merit(plan)
        if steps and value is not None and (not trial.curve or trial.curve[-1][0] < steps):
            trial.curve.append((steps, value))
            if merit is not None:
                trial.merits.append((steps, merit))
        self._save(now=plan.scheduler == "pbt" or bool(result.get("done")))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        ours = self.ours(trial)
        if ours.cause:
            ours.status = "failed"
        elif ours.seeds and all(seed.ended for seed in ours.seeds):
            ours.status = "done"
        elif ours.id in self.halved:
            ours.status = "stopped"
        else:  # a signal
            ours.status = "pending"
            return
        self._view.ended(ours, self.study.plan)
        self._save(now=True)

    def stopped(self, trial: Trial, why: str) -> None:
        """The search stops a trial; its runs look here for the reason."""
        trial.why = why
        self.halved.add(trial.id)
        self._save(now=True)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        ours = self.ours(trial)
        lines = (trial.error_file and Path(trial.error_file).read_text().strip().splitlines()) or ["its process died"]
        ours.status, ours.cause = "failed", lines[-1][-500:]
        self._view.ended(ours, self.study.plan)
        self._save(now=True)

    def end(self) -> None:
        for trial in self.study.trials:
            if trial.status == "running":
                trial.status = "pending"
        self._save(now=True)

    def _save(self, *, now: bool) -> None:
        if now or time.monotonic() - self._saved > SAVE_EVERY:
            try:
                self.study.save()
            except RaynforceError as error:
                if not is_full(str(error)):
                    raise
                self.full = self.full or str(error)
            self._saved = time.monotonic()


class Halving(FIFOScheduler):
    """Stops trials by our rungs, where the search is to stop any."""

    def __init__(self, book: Book) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = book
        self._stops = book.study.plan.scheduler in ("asha", "optuna")

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        self._book.take(trial, result)
        ours = self._book.ours(trial)
        if not self._stops or not ours.merits or ours.cause:
            return TrialScheduler.CONTINUE
        steps, merit = ours.merits[-1]
        halved = self._book.rungs.report(ours.id, steps, merit, ended=bool(result.get("done")))
        if not halved and not self._book.is_beaten(ours):
            return TrialScheduler.CONTINUE
        why = f"not among the best 1/{REDUCTION} at {steps:,} steps"
        self._book.stopped(ours, why if halved else "another has met the target sooner than it still could")
        return TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._book.take(trial, result)
        ours = self._book.ours(trial)
        merit = ours.merit(self._book.study.plan)
        if merit is not None and not ours.cause and all(seed.ended for seed in ours.seeds):
            self._book.rungs.report(ours.id, self._book.study.plan.steps, merit, ended=True)


class Proposals(Searcher):
    """Hands out the trials that are not over, then those that Optuna proposes."""

    def __init__(self, book: Book) -> None:
        super().__init__(metric="score", mode="max")
        self._book, study = book, book.study
        self._left = [trial for trial in study.trials if not trial.over]
        self._asked: dict[str, Trial] = {}
        self._tpe = TPE(study.plan, study.trials) if study.plan.scheduler == "optuna" else None

    def suggest(self, trial_id: str) -> Any:
        study = self._book.study
        if self._left:
            trial = self._left.pop(0)
        elif self._tpe is not None and len(study.trials) < study.plan.trials:
            trial = Trial(len(study.trials), self._tpe.propose())
            study.trials.append(trial)
            study.save()
        else:
            return Searcher.FINISHED
        self._asked[trial_id] = trial
        return {ID: trial.id, **trial.config}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        trial = self._asked.get(trial_id)
        if self._tpe is not None and trial is not None and not error and trial.merits:
            status = "stopped" if trial.id in self._book.halved else "done"
            self._tpe.learn(replace(trial, status=status))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: our own files have it."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, for the same reason."""


def _pbt(study: Study) -> Any:
    search = study.plan.search

    def within(config: dict[str, Any]) -> dict[str, Any]:
        """What was multiplied by 0.8 or 1.2 stays in its range."""
        for key, domain in search.items():
            if domain.kind != "choice":
                config[key] = domain.clip(config[key])
        return config

    return PopulationBasedTraining(
        time_attr="evaluated",
        perturbation_interval=max(1, study.plan.steps // PERTURBATIONS),
        hyperparam_mutations={key: _mutations(domain) for key, domain in search.items()},
        custom_explore_fn=within,
        log_config=False,
        require_attrs=False,
    )


def _mutations(domain: Domain) -> Any:
    if domain.kind == "choice":
        return domain.grid()
    if domain.kind == "log":
        return tune.loguniform(domain.low, domain.high)
    if domain.kind == "uniform":
        return tune.uniform(domain.low, domain.high)
    high = int(domain.high) + 1  # which Tune leaves out
    return (tune.lograndint if domain.logarithmic else tune.randint)(int(domain.low), high)


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Where Tune writes what nobody reads afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("ray", "ray.tune", "ray.train", "ray.air", "ray.data")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        os.environ.pop("TUNE_ORIG_WORKING_DIR", None)
