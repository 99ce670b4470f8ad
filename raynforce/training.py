"""A run from its config to its result: builds the roles, turns the topology's loop, reports, evaluates, saves."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.config import Config
from raynforce.envs.describe import short
from raynforce.errors import CheckpointError, summary
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.evaluator import Evaluator
from raynforce.roles.sampler import EnvArgs, Sampler
from raynforce.runs.checkpoint import load as load_checkpoint
from raynforce.runs.directory import RunDirectory
from raynforce.runs.metrics import JsonlSink, Metrics, Sink
from raynforce.runs.progress import Mode, Snapshot, make_progress
from raynforce.runs.tensorboard import TensorBoardSink
from raynforce.spaces import EnvSpec
from raynforce.topologies.stream import Round, sync
from raynforce.trees import Tree

RECENT = 100  # episodes that `return_mean` is the mean of


@dataclass
class Status:
    """Where a run stands: what callbacks see after every round of learning."""

    config: Config
    steps: int = 0
    episodes: int = 0
    updates: int = 0
    best_eval: float | None = None
    """Best mean return of an evaluation so far."""
    last_eval: float | None = None
    """Mean return of the newest evaluation."""
    solved_at: float | None = None
    """Seconds since the start when an evaluation first met the target."""
    solved_steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of everything that is measured, by name."""
    stop_reason: str | None = None

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this round, with a checkpoint."""
        self.stop_reason = reason


class Callback:
    """Looks on, and may end the run with `status.stop()`. Override what you need."""

    def on_round(self, status: Status) -> None:
        """After every round of learning."""

    def on_evaluation(self, status: Status, returns: np.ndarray) -> None:
        """After every evaluation, with the return of each episode."""

    def on_end(self, status: Status) -> None:
        """Once, when the run has ended and its last checkpoint is written."""


@dataclass(frozen=True)
class Result:
    """How a run ended; the keys of `--json`."""

    run: str
    algo: str
    env: str
    runtime: str
    topology: str
    seed: int
    steps: int
    episodes: int
    updates: int
    seconds: float
    startup_seconds: float | None
    steps_per_second: float | None
    return_mean: float | None
    eval_return: float | None
    solved_at: float | None
    solved_steps: int | None
    restarts: int
    dropped_steps: int
    weights_sha256: str
    stopped: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Training:
    """One run in this process."""

    def __init__(
        self,
        config: Config,
        env: EnvSpec,
        run: RunDirectory,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        sinks: Sequence[Sink] = (),
        stream: TextIO,
        progress: Mode = "auto",
        began: float | None = None,
        title: str = "",
    ) -> None:
        self._began = time.monotonic() if began is None else began
        self._config = config
        self._run = run
        self._callbacks = callbacks
        self._progress = make_progress(stream, mode=progress)
        self._progress.start(title or f"{config.algo} on {config.env}")
        self._status = Status(config)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._signal: int | None = None
        self._evaluated: PolicyVersion | None = None
        self._startup_seconds: float | None = None
        self._turning_since = self._began
        self._final_speed: float | None = None
        self._trained_here = 0
        self._unreported = 0  # environment steps since the last line of metrics
        try:
            self._build(env, resume, sinks)
        except BaseException:
            self._progress.stop()
            raise

    def _build(self, env: EnvSpec, resume: bool, sinks: Sequence[Sink]) -> None:
        config, sampling = self._config, self._config.sampling
        saved = self._run.load_last() if resume else None
        acting = algorithm_class(config.algo)(config, env).acting()
        if saved is not None:
            _check_same(saved.get("policy", {}).get("acting"), acting.to_json(), self._run.path)
            had = sum(name.startswith("sampler_") for name in saved)
            if had != sampling.samplers:
                now = sampling.samplers
                raise CheckpointError(f"{self._run.path} has sampling.samplers = {had}, which cannot become {now}")
        self._acting = acting

        def envs(count: int) -> EnvArgs:
            return EnvArgs(config.env, count, config.seed, config.env_args, sampling.exact_resume)

        self._samplers = [Sampler(acting, envs(sampling.envs), sampling.fragment, i) for i in range(sampling.samplers)]
        for note in dict.fromkeys(s.note for s in self._samplers if s.note):
            self._progress.message(f"note: {note}")
        if config.network.factory:
            self._progress.message(f"note: samplers import torch for your own network {config.network.factory}")
        eval_lanes = min(config.eval.envs, config.eval.episodes)
        self._evaluator = Evaluator(acting, envs(eval_lanes))

        from raynforce.roles.learner import Learner  # imports torch: last, so that mistakes above are cheap

        self._learner = Learner(config, env)
        self._version = self._best = self._learner.publish()
        if saved is not None:
            self._load(saved)
            self._run.write_config(config.to_yaml())
        else:
            self._run.create(config.to_yaml())  # not before everything is known to fit
            self._run.lock()
        resume_step = self._status.steps if resume else None
        self._metrics = Metrics(
            [
                JsonlSink(self._run.metrics, resume_step=resume_step),
                TensorBoardSink(self._run.tensorboard, resume_step=resume_step),
                *sinks,
            ]
        )

    # -- the loop -------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Train until the steps are done, the target is met, a callback or a signal says stop."""
        try:
            with self._signals():
                if self._status.steps < self._config.steps:
                    self._loop(sync(self._samplers, self._learner, self._version))
                self._finish()
            return self._result()
        finally:
            self._progress.stop()
            self._metrics.close()
            self._evaluator.close()
            self._run.unlock()
            for sampler in self._samplers:
                sampler.close()

    def _loop(self, rounds: Iterator[Round]) -> None:
        status, config = self._status, self._config
        self._run.event("started", steps=status.steps)
        self._turning_since = time.monotonic()
        while status.stop_reason is None:
            round_ = next(rounds)
            self._version = round_.learned.version
            if self._startup_seconds is None and round_.learned.updates:
                self._startup_seconds = time.monotonic() - self._began
            before = status.steps
            self._count(round_)
            for callback in self._callbacks:
                callback.on_round(status)
            self._report(round_)
            if status.steps >= config.steps:
                status.stop_reason = status.stop_reason or "steps done"
            if _crossed(before, status.steps, config.eval.every) and self._signal is None:
                evaluating = time.monotonic()
                self._evaluate()
                self._turning_since += time.monotonic() - evaluating  # evaluation is not training
            if self._signal is not None:
                status.stop_reason = signal.Signals(self._signal).name
            if _crossed(before, status.steps, config.checkpoint.every) and status.stop_reason is None:
                self._save()
        self._final_speed = self._speed

    def _count(self, round_: Round) -> None:
        status = self._status
        steps = sum(f.steps for f in round_.fragments)
        status.steps += steps
        self._trained_here += steps
        self._unreported += steps
        status.updates += round_.learned.updates
        for fragment in round_.fragments:
            returns = fragment["episode/return"]
            status.episodes += len(returns)
            self._recent.extend(returns.tolist())
            if len(returns):
                status.metrics["charts/episodic_length"] = float(fragment["episode/length"].mean())
        status.metrics |= round_.learned.metrics
        status.metrics |= {f"charts/{k}": v for k, v in round_.learned.version.schedules.items()}
        if self._recent:
            status.metrics["charts/episodic_return"] = sum(self._recent) / len(self._recent)

    def _report(self, round_: Round) -> None:
        status = self._status
        if self._unreported >= self._config.log_every:
            self._unreported = 0
            status.metrics |= {
                "charts/SPS": self._speed,
                "charts/episodes": float(status.episodes),
                "charts/updates": float(status.updates),
                "time/seconds": time.monotonic() - self._began,
                "time/sample": round_.sample_seconds,
                "time/learn": round_.learn_seconds,
            }
            self._metrics.write(status.steps, status.metrics)
        self._show()

    @property
    def _speed(self) -> float:
        """Environment steps per second of training in this process, start-up and evaluation left out."""
        return self._trained_here / (time.monotonic() - self._turning_since)

    def _show(self) -> None:
        status = self._status
        self._progress.update(
            Snapshot(
                steps=status.steps,
                total_steps=self._config.steps,
                seconds=time.monotonic() - self._began,
                steps_per_second=self._speed,
                episodes=status.episodes,
                updates=status.updates,
                return_mean=status.metrics.get("charts/episodic_return"),
                best_eval=status.best_eval,
                target=self._config.target,
                losses={k[7:]: v for k, v in status.metrics.items() if k.startswith("losses/")},
            )
        )

    # -- evaluation -----------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        status, target = self._status, self._config.target
        self._evaluated = self._version
        how = self._config.eval
        returns = self._evaluator.evaluate(self._version, how.episodes, how.max_length)
        score = status.last_eval = float(returns.mean())
        status.metrics["eval/return"] = score
        self._metrics.write(status.steps, {"eval/return": score, "eval/deviation": float(returns.std())})
        if status.best_eval is None or score >= status.best_eval:
            status.best_eval, self._best = score, self._version
            self._run.save_best(status.steps, self._policy(self._version), score)
        if target is not None and score >= target:
            status.stop_reason = status.stop_reason or "target met"
            if status.solved_at is None:
                status.solved_at, status.solved_steps = time.monotonic() - self._began, status.steps
        self._show()
        for callback in self._callbacks:
            callback.on_evaluation(status, returns)

    # -- the end --------------------------------------------------------------------------------------

    def _finish(self) -> None:
        status = self._status
        if self._signal is None and self._evaluated is not self._version:
            self._evaluate()
        self._save()
        self._run.event("stopped", reason=status.stop_reason, steps=status.steps)
        for callback in self._callbacks:
            callback.on_end(status)

    def _result(self) -> Result:
        status, config = self._status, self._config
        final = config.eval.final_episodes if self._signal is None and status.best_eval is not None else 0
        eval_return = None
        if final:
            eval_return = float(self._evaluator.evaluate(self._best, final, config.eval.max_length).mean())
        mean = sum(self._recent) / len(self._recent) if self._recent else None
        return Result(
            run=str(self._run.path),
            algo=config.algo,
            env=config.env,
            runtime=config.runtime,
            topology=config.topology,
            seed=config.seed,
            steps=status.steps,
            episodes=status.episodes,
            updates=status.updates,
            seconds=round(time.monotonic() - self._began, 3),
            startup_seconds=self._startup_seconds and round(self._startup_seconds, 3),
            steps_per_second=self._final_speed and round(self._final_speed, 1),
            return_mean=mean,
            eval_return=eval_return,
            solved_at=status.solved_at and round(status.solved_at, 3),
            solved_steps=status.solved_steps,
            restarts=0,
            dropped_steps=0,
            weights_sha256=hashlib.sha256(self._version.params.tobytes()).hexdigest(),
            stopped=status.stop_reason or "steps done",
        )

    # -- what is saved --------------------------------------------------------------------------------

    def _policy(self, version: PolicyVersion) -> Tree:
        return {"acting": self._acting.to_json(), "version": version.state()}

    def _save(self) -> None:
        status = self._status
        parts: dict[str, Tree] = {
            "policy": self._policy(self._version),
            "learner": self._learner.state(),
            "evaluator": self._evaluator.state(),
            "run": {
                "steps": status.steps,
                "episodes": status.episodes,
                "updates": status.updates,
                "best_eval": status.best_eval,
                "last_eval": status.last_eval,
                "solved_at": status.solved_at,
                "solved_steps": status.solved_steps,
                "unreported": self._unreported,
                "recent": np.asarray(self._recent, np.float64),
                "metrics": dict(status.metrics),
            },
        }
        parts |= {f"sampler_{s.index}": s.state() for s in self._samplers}
        self._run.save(status.steps, parts, self._config.checkpoint.keep)

    def _load(self, saved: Mapping[str, Tree]) -> None:
        try:
            for sampler in self._samplers:
                for note in sampler.load(saved[f"sampler_{sampler.index}"]):
                    self._progress.message(f"note: {note}")
            self._learner.load(saved["learner"])
            self._evaluator.load(saved["evaluator"])
            counts = saved["run"]
            self._recent.extend(counts["recent"].tolist())
            self._unreported = counts["unreported"]
            status = self._status
            for name in ("steps", "episodes", "updates", "best_eval", "last_eval", "solved_at", "solved_steps"):
                setattr(status, name, counts[name])
            status.metrics.update(counts["metrics"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{self._run.last} does not fit this config: {summary(error)}") from error
        self._version = self._best = self._learner.publish()
        if status.best_eval is not None:
            best = load_checkpoint(self._run.best, only=["policy"])["policy"]
            self._best = PolicyVersion.from_state(best["version"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after its round, with a checkpoint; the second ends it now."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def received(number: int, frame: Any) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt(number)
            self._signal = number
            self._progress.message("stopping after this round, with a checkpoint; press Ctrl-C again to end at once")

        before = {number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def signal(self) -> int | None:
        """The signal that ended the run, if one did."""
        return self._signal


def _crossed(before: int, after: int, every: int) -> bool:
    return every > 0 and before // every != after // every


def _check_same(found: Tree | None, expected: Tree, path: Path) -> None:
    """Refuse a checkpoint of another network, environment or algorithm."""
    for name in ("env", "network", "heads", "factory"):
        old, new = _plain(found.get(name) if isinstance(found, dict) else None), _plain(expected[name])
        if old != new:
            where, was, now = _difference(old, new, name)
            raise CheckpointError(
                f"the checkpoint in {path} was made with another {name}: {where} was {was}, is now {now}"
            )


def _difference(old: Any, new: Any, path: str) -> tuple[str, str, str]:
    """The first place where two trees of plain data differ, and what is there."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(k for k in [*new, *old] if old.get(k) != new.get(k))
        return _difference(old.get(key), new.get(key), f"{path}.{key}")
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        index = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
        return _difference(old[index], new[index], f"{path}[{index}]")
    return path, short(old), short(new)


def _plain(value: Any) -> Any:
    """Tuples as lists, as they come back from JSON."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
