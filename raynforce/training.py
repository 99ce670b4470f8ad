"""A run from its config to its result: builds the roles, turns the topology's loop, reports, evaluates, saves."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.config import Config
from raynforce.errors import CheckpointError, RaynforceError, UsageError, summary
from raynforce.evaluating import FINAL, Evaluations, Pinned
from raynforce.experience.fragment import Fragment
from raynforce.experience.ledger import Ledger
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.sampler import EnvArgs
from raynforce.runs.checkpoint import load as load_checkpoint
from raynforce.runs.checkpoint import require_same
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import FaultHistory
from raynforce.runs.metrics import JsonlSink, Metrics, Sink
from raynforce.runs.progress import Mode, Snapshot, make_progress
from raynforce.runs.tensorboard import TensorBoardSink
from raynforce.runs.timing import TimeTree
from raynforce.runtimes.base import Handle, Pending, RoleError
from raynforce.runtimes.member import Job
from raynforce.runtimes.open import open_runtime
from raynforce.runtimes.placing import cores
from raynforce.runtimes.pool import Pool
from raynforce.signals import StopRequest
from raynforce.spaces import EnvSpec
from raynforce.status import Callback, Result, Status
from raynforce.supervision import Supervision
from raynforce.topologies.stream import PATIENCE, Round, Stream
from raynforce.trees import Tree

AWAY = 1_000_000  # apart from all attempts to begin anew in the run itself
RECENT = 100  # episodes that `return_mean` is the mean of
SAMPLER = "raynforce.roles.sampler:Sampler"
LEARNER = "raynforce.roles.learner:Learner"  # by name: importing it imports torch, which the driver does without
EVALUATOR = "raynforce.roles.evaluator:Evaluator"


class Training:
    """One run, seen from the process that was started for it: the driver."""

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
        self._status = Status(config)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lengths: deque[int] = deque(maxlen=RECENT)
        self._number = 0  # of the newest policy version
        self._evaluated = -1  # number of the policy version that was evaluated last
        self._ledger = Ledger()
        self._times = TimeTree()
        self._best: Pinned | None = None  # the policy version that evaluated best
        self._startup_seconds: float | None = None
        self._seconds_before = 0.0  # of training before this process
        self._turning_since = self._began
        self._final_speed: float | None = None
        self._trained_here = 0
        self._unreported = 0  # environment steps since the last line of metrics
        self._saved_at = self._began
        self._progress = make_progress(stream, mode=progress)
        self.stop_request = StopRequest(self._announce_stop)
        # Closes what was opened if the rest cannot be built.
        with self.stop_request.watching(at_once=True), contextlib.ExitStack() as opened:
            opened.callback(self._progress.stop)
            self._build(env, resume, sinks, opened, title or f"{config.algo} on {config.env}")
            self._opened = opened.pop_all()

    def _build(
        self, env: EnvSpec, resume: bool, sinks: Sequence[Sink], opened: contextlib.ExitStack, title: str
    ) -> None:
        config = self._config
        if resume:
            opened.enter_context(self._run.locked())
        saved = self._run.load_last() if resume else None
        algorithm = algorithm_class(config.algo)
        self._acting = algorithm(config, env).acting()
        if saved is not None:
            require_same(saved.get("policy", {}).get("acting"), self._acting.to_json(), self._run.path)
            self._check_sampling(saved["run"])
        self._max_lag = _lag_bound(config, algorithm.max_lag)
        self._tolerates_lag = algorithm.max_lag != 0
        self._progress.start(title)
        self._runtime = opened.enter_context(open_runtime(config, self._progress.message))
        self._supervision = Supervision(config, self._ledger, self._progress.message)
        self._pool = Pool(self._runtime, self._supervision)
        self._spawn(env)
        held = self._load(saved) if saved is not None else []
        self._version = self._pool.submit(self._learner, "publish")
        self._stream = Stream(
            self._pool,
            self._samplers,
            self._learner,
            self._version,
            self._number,
            ledger=self._ledger,
            held=held,
            batch=config.stream.batch,
            max_lag=self._max_lag,
            waiting=lambda who: self._show(f"waiting for {who}{self._runtime.excuse()}"),
        )
        if saved is not None:
            self._run.write_config(config.to_yaml())
        else:
            self._run.create(config.to_yaml())  # not before everything is known to fit
            opened.enter_context(self._run.locked())
        self._supervision.history = FaultHistory(self._run, self._progress.message)
        self._metrics = Metrics(sinks)
        opened.callback(self._metrics.close)
        resume_step = self._status.steps if resume else None
        self._metrics.add(JsonlSink(self._run.metrics, resume_step=resume_step))
        self._metrics.add(TensorBoardSink(self._run.tensorboard, resume_step=resume_step))
        if saved is None:
            self._save()  # from here on there is always something to resume from
        else:
            self._go_on_evaluating(saved)

    def _spawn(self, env: EnvSpec) -> None:
        """Start all roles at once, the slowest to start first, and wait until each could be built."""
        config, sampling, runtime, acting = self._config, self._config.sampling, self._runtime, self._acting

        place, envs = runtime.places, self._env_args(sampling.envs)

        def learner(_: int) -> Handle:
            return runtime.spawn(LEARNER, config, env, name="learner", place=place["learner"])

        def sampler(index: int) -> Handle:
            name, what = f"sampler {index}", (acting, envs, sampling.fragment, index)
            return runtime.spawn(SAMPLER, *what, name=name, place=place["sampler"])

        def evaluator(_: int) -> Handle:
            lanes = self._env_args(min(config.eval.envs, config.eval.episodes))
            return runtime.spawn(EVALUATOR, acting, lanes, name="evaluator", place=place["evaluator"])

        rules = self._supervision.rules
        self._evaluations = Evaluations(
            self._pool,
            evaluator,
            rules("evaluator"),
            config.eval,
            longest=config.faults.sample_seconds / 2,
            show=self._show,
            stopped=lambda: self.stop_request.number is not None,
            broken=lambda facts: self._supervision.broken("evaluator", [facts]),
        )
        (self._learner,) = self._pool.add("learner", learner, 1, rules("learner"))
        self._samplers = self._pool.add("sampler", sampler, sampling.samplers, rules("sampler"))
        notes = self._wait_for([self._pool.submit(sampler, "note") for sampler in self._samplers])
        for note in dict.fromkeys(filter(None, notes)):
            self._progress.message(f"note: {note}")
        if config.network.factory:
            self._progress.message(f"note: samplers import torch for your own network {config.network.factory}")
        version: PolicyVersion = self._wait_for([self._pool.submit(self._learner, "publish")])[0]
        self._number = version.number

    def _go_on_evaluating(self, saved: Mapping[str, Tree]) -> None:
        """What was being evaluated when the checkpoint was written is evaluated again."""
        for name in ("evaluating_0", "evaluating_1"):
            if name in saved:
                version = PolicyVersion.from_state(saved[name]["version"])
                pinned = Pinned(self._runtime.share(version), version.number, saved[name]["steps"])
                self._judge(self._evaluations.begin(pinned))

    def _env_args(self, count: int) -> EnvArgs:
        config = self._config
        return EnvArgs(config.env, count, config.seed, config.env_args, config.sampling.exact_resume)

    def _wait_for(self, jobs: Sequence[Job]) -> list[Any]:
        """The answers of roles that may still be starting; a wait that a user would notice is explained."""
        patience = PATIENCE
        while not self._pool.wait(jobs, patience):
            names = sorted({job.member.name for job in jobs if not job.settled})
            who = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
            self._progress.message(f"waiting for {who}{self._runtime.excuse()}")
            patience = min(60.0, 2 * patience)
        return [None if job.fault is not None else job.result() for job in jobs]

    def _check_sampling(self, counts: Tree) -> None:
        for name in ("samplers", "envs"):
            had, now = counts.get(name), getattr(self._config.sampling, name)
            if had != now:
                raise CheckpointError(f"{self._run.path} has sampling.{name} = {had}, which cannot become {now}")

    def _announce_stop(self) -> None:
        self._progress.message("stopping after this round, with a checkpoint; press Ctrl-C again to end at once")

    # -- the loop -------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Train until the steps are done, the target is met, a callback or a signal says stop."""
        rounds = {"sync": self._stream.sync, "overlap": self._stream.overlap, "async": self._stream.async_}
        with self.stop_request.watching(), self._opened:
            try:
                if self._status.steps < self._config.steps:
                    self._loop(rounds[self._config.topology]())
                self._finish()
                return self._result()
            except Exception as error:
                self._show()
                with contextlib.suppress(RaynforceError):  # the disk may be what failed
                    reason = str(error) if isinstance(error, RaynforceError) else summary(error)
                    self._run.event("failed", reason=reason, steps=self._status.steps)
                self._progress.message(f"failed; what was saved can be continued: raynforce resume {self._run.path}")
                raise

    def _loop(self, rounds: Iterator[Round]) -> None:
        status = self._status
        self._run.event("started", steps=status.steps)
        self._turning_since = time.monotonic()
        while status.stop_reason is None:
            try:
                round_ = next(rounds)
            except RaynforceError as error:
                if (error.role or "").startswith("sampler"):  # the learner is well: what was learned is not lost
                    with contextlib.suppress(RaynforceError):
                        self._stream.abandon()
                        self._save()
                raise
            try:
                self._after(round_)
            except Exception:  # of a callback, or of the environment in evaluation: what was learned is not lost
                with contextlib.suppress(RaynforceError):
                    self._save()
                raise
        self._final_speed = self._speed

    def _after(self, round_: Round) -> None:
        status, config = self._status, self._config
        before = status.steps
        if self._startup_seconds is None and round_.learned.updates:
            self._startup_seconds = time.monotonic() - self._began
        self._count(round_)
        for callback in self._callbacks:
            callback.on_round(status)
        self._report(round_)
        if status.steps >= config.steps:
            status.stop_reason = status.stop_reason or "steps done"
        self._judge(self._evaluations.finished())
        if _crossed(before, status.steps, config.eval.every) and self.stop_request.number is None:
            self._evaluate()
        status.stop_reason = self.stop_request.name or status.stop_reason
        due = _crossed(before, status.steps, config.checkpoint.every)
        due |= 0 < config.checkpoint.seconds < time.monotonic() - self._saved_at
        if due and status.stop_reason is None:
            self._save()

    def _count(self, round_: Round) -> None:
        status, learned = self._status, round_.learned
        self._version, self._number = round_.version, learned.number
        status.steps += learned.steps
        self._supervision.steps = status.steps
        for receipt, turn in round_.receipts:
            self._supervision.received(receipt, self._pool, self._samplers[receipt.sampler])
            self._times.add("sampler", {**receipt.seconds, **turn._asdict()})
        self._times.add("learner", {**learned.seconds, **round_.learner._asdict()})
        status.episodes += len(learned.returns)
        status.updates += learned.updates
        self._trained_here += learned.steps
        self._unreported += learned.steps
        self._recent.extend(learned.returns.tolist())
        self._lengths.extend(learned.lengths.tolist())
        status.metrics |= {name: float(value) for name, value in learned.metrics.items()}
        status.metrics |= {f"charts/{k}": v for k, v in learned.schedules.items()}
        if self._recent:
            status.metrics["charts/episodic_return"] = sum(self._recent) / len(self._recent)
            status.metrics["charts/episodic_length"] = sum(self._lengths) / len(self._lengths)

    def _report(self, round_: Round) -> None:
        status = self._status
        if self._unreported >= self._config.log_every:
            self._unreported = 0
            self._ledger.check(self._stream.held)
            status.metrics |= {
                "charts/SPS": self._speed,
                "charts/episodes": float(status.episodes),
                "charts/updates": float(status.updates),
                "time/seconds": self._seconds,
                "time/sample": round_.sample_seconds,
                "time/learn": round_.learn_seconds,
                **self._times.metrics(),
                **self._ledger.metrics(),
                **self._supervision.metrics(self._pool),
                **self._runtime.health(),
            }
            self._metrics.write(status.steps, dict(status.metrics))
        self._show()

    @property
    def _speed(self) -> float:
        """Environment steps per second of training in this process, start-up and evaluation left out."""
        turning = time.monotonic() - self._turning_since - self._evaluations.waited
        return self._final_speed or self._trained_here / max(turning, 1e-9)

    @property
    def _seconds(self) -> float:
        """How long the run has lasted, in this process and those it was resumed from."""
        return self._seconds_before + time.monotonic() - self._began

    def _show(self, note: str = "") -> None:
        status = self._status
        self._progress.update(
            Snapshot(
                steps=status.steps,
                total_steps=self._config.steps,
                seconds=self._seconds,
                steps_per_second=self._speed,
                episodes=status.episodes,
                updates=status.updates,
                return_mean=status.metrics.get("charts/episodic_return"),
                best_eval=status.best_eval,
                target=self._config.target,
                losses={k[7:]: v for k, v in status.metrics.items() if k.startswith("losses/")},
                note=note,
                faults=self._supervision.faults,
                last_fault=self._supervision.last,
            )
        )

    # -- evaluation -----------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The newest version is due to be evaluated."""
        status = self._status
        if not status.episodes and status.steps > self._config.eval.max_length:
            self._progress.message(
                f"note: no episode has ended in {status.steps:,} steps; evaluation cuts them at eval.max_length"
            )
        self._judge(self._evaluations.begin(self._pinned))

    @property
    def _pinned(self) -> Pinned:
        return Pinned(self._version, self._number, self._status.steps)

    def _judge(self, evaluated: tuple[Pinned, np.ndarray] | None) -> None:
        """Take the outcome of an evaluation, if there is one: is it the best, and is the target met?"""
        if evaluated is None:
            return
        pinned, returns = evaluated
        status, target = self._status, self._config.target
        self._evaluated = pinned.number
        score = status.last_eval = float(returns.mean())
        measured = {"eval/return": score, "eval/deviation": float(returns.std()), "time/seconds": self._seconds}
        self._metrics.write(pinned.steps, measured)
        if status.best_eval is None or score >= status.best_eval:
            status.best_eval, self._best = score, pinned
            self._run.save_best(pinned.steps, self._policy(pinned.version), score)
        if target is not None and score >= target:
            status.stop_reason = status.stop_reason or "target met"
            if status.solved_at is None:
                status.solved_at, status.solved_steps = time.monotonic() - self._began, pinned.steps
        self._show()
        for callback in self._callbacks:
            callback.on_evaluation(status, returns)

    # -- the end --------------------------------------------------------------------------------------

    def _finish(self) -> None:
        status = self._status
        status.stop_reason = status.stop_reason or "steps done"
        if self.stop_request.number is None:
            self._judge(self._evaluations.wait())
        if self.stop_request.number is None and status.stop_reason != "target met" and self._evaluated != self._number:
            returns = self._evaluations.play(self._pinned, self._config.eval.episodes, "evaluating")
            self._judge(None if returns is None else (self._pinned, returns))
        self._evaluations.stop()
        status.stop_reason = self.stop_request.name or status.stop_reason
        if self._trained_here:
            self._save()
        self._run.event("stopped", reason=status.stop_reason, steps=status.steps)
        for callback in self._callbacks:
            callback.on_end(status)

    def _result(self) -> Result:
        status, config = self._status, self._config
        eval_return = None
        if config.eval.final_episodes and self.stop_request.number is None:
            best, doing = self._best or self._pinned, "evaluating the best policy"
            returns = self._evaluations.play(best, config.eval.final_episodes, doing, FINAL)
            eval_return = None if returns is None else float(returns.mean())
        self._show()
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
            restarts=self._pool.restarts,
            env_restarts=self._supervision.env_restarts,
            redone_updates=self._supervision.redone_updates,
            dropped_steps=self._ledger.dropped,
            lost_steps=self._ledger.lost,
            weights_sha256=hashlib.sha256(self._version.result().params.tobytes()).hexdigest(),
            stopped=status.stop_reason or "steps done",
        )

    def where_the_time_went(self) -> str:
        """A few lines on what bound the run, and which setting to change."""
        return self._times.report(self._config, cores=cores(), tolerates_lag=self._tolerates_lag)

    # -- what is saved --------------------------------------------------------------------------------

    def _policy(self, version: Job | Pending) -> Tree:
        return {"acting": self._acting.to_json(), "version": version.result().state()}

    def _save(self) -> None:
        status = self._status
        fragments = self._stream.settle()  # from here to the next round every sampler stands at a fragment's border
        states = self._pool.states([self._learner, *self._samplers])
        parts: dict[str, Tree] = {
            "policy": self._policy(self._version),
            "learner": states[0],
            "run": {
                "steps": status.steps,
                "total_steps": self._config.steps,
                "samplers": self._config.sampling.samplers,
                "envs": self._config.sampling.envs,
                "episodes": status.episodes,
                "updates": status.updates,
                "best_eval": status.best_eval,
                "last_eval": status.last_eval,
                "solved_at": status.solved_at,
                "solved_steps": status.solved_steps,
                "evaluated": self._evaluated,
                "seconds": self._seconds,
                "unreported": self._unreported,
                "ledger": self._ledger.state(),
                "redone_updates": self._supervision.redone_updates,
                "restarts": self._pool.restarts,
                "env_restarts": self._supervision.env_restarts,
                "recent": np.asarray(self._recent, np.float64),
                "lengths": np.asarray(self._lengths, np.int64),
                "metrics": {name: float(value) for name, value in status.metrics.items()},
            },
        }
        parts |= {f"sampler_{index}": state for index, state in enumerate(states[1:]) if state is not None}
        for index, pinned in enumerate(self._evaluations.unfinished):
            version = pinned.version.result().state()
            parts[f"evaluating_{index}"] = {"version": version, "steps": pinned.steps}
        if fragments:  # sampled, and to be learned from first
            parts["stream"] = {str(index): fragment.state() for index, fragment in enumerate(fragments)}
        self._run.save(status.steps, parts, self._config.checkpoint.keep)
        self._saved_at = time.monotonic()

    def _load(self, saved: Mapping[str, Tree]) -> list[Fragment]:
        """Put every role back to where it was; returns fragments that were not learned from yet."""
        status = self._status
        try:
            share = self._runtime.share
            loading = [self._pool.submit(self._learner, "load", share(saved["learner"]))]
            for sampler in self._samplers:
                state = saved.get(f"sampler_{sampler.index}")
                if state is None:  # it was away when this was written
                    restarts, steps = saved["run"].get("restarts", 0), saved["run"]["steps"]
                    loading.append(self._pool.submit(sampler, "begin_anew", steps, AWAY + restarts))
                    continue
                self._supervision.begin_at(sampler.index, state)
                loading.append(self._pool.submit(sampler, "load", share(state)))
            _, *notes = self._wait_for(loading)
            held = [Fragment.from_state(tree) for tree in saved.get("stream", {}).values()]
            counts = saved["run"]
            books = counts.get("ledger") or _books(counts, held)
            self._ledger.load(books, [(f.sampler, f.sequence, f.steps) for f in held])
            self._supervision.load(counts)
            self._pool.restarts = counts.get("restarts", 0)
            self._recent.extend(counts["recent"].tolist())
            self._lengths.extend(counts["lengths"].tolist())
            self._unreported, self._evaluated = counts["unreported"], counts["evaluated"]
            self._seconds_before = counts["seconds"]
            for name in ("steps", "episodes", "updates", "best_eval", "last_eval", "solved_at", "solved_steps"):
                setattr(status, name, counts[name])
            status.metrics.update(counts["metrics"])
            total = counts["total_steps"]
        except (KeyError, ValueError, TypeError, RuntimeError, RoleError) as error:
            raise CheckpointError(f"{self._run.last} does not fit this config: {summary(error)}") from error
        for note in [note for several in notes for note in several or ()]:
            self._progress.message(f"note: {note}")
        if total != self._config.steps:
            part = status.steps / self._config.steps
            self._progress.message(
                f"note: steps were {total:,} and are {self._config.steps:,}: what follows the run's progress "
                f"(annealed learning rate, epsilon) goes on from {part:.0%}"
            )
        if status.solved_steps is not None and self._config.target is not None:
            self._progress.message(
                f"note: the target was met at {status.solved_steps:,} steps already; --target none goes on without it"
            )
        self._number = saved["policy"]["version"]["number"]
        if status.best_eval is not None:
            best = load_checkpoint(self._run.best, only=["policy"])["policy"]
            version = PolicyVersion.from_state(best["version"])
            self._best = Pinned(self._runtime.share(version), version.number, status.solved_steps or 0)
        return held


def _lag_bound(config: Config, tolerated: int | None) -> int:
    """How old fragments may be; refuses a topology whose fragments are older than the algorithm can learn from."""
    if config.topology != "sync" and tolerated == 0:
        raise UsageError(
            f"topology = {config.topology!r} learns from older policy versions, and {config.algo} from the newest "
            "alone (its max_lag is 0): use --topology sync"
        )
    return config.stream.max_lag if tolerated is None else min(tolerated, config.stream.max_lag)


def _books(counts: Tree, held: Sequence[Fragment]) -> Tree:
    """The ledger of a checkpoint from before there was one."""
    trained, dropped = counts["steps"], counts.get("dropped", 0)
    produced = trained + dropped + sum(f.steps for f in held)
    return {"produced": produced, "trained": trained, "dropped": dropped, "lost": 0}


def _crossed(before: int, after: int, every: int) -> bool:
    return every > 0 and before // every != after // every
