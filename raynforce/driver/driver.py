"""A run from its config to its result: lets an engine train, and reports, evaluates and saves what it does."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from raynforce import infos
from raynforce.config import Config
from raynforce.driver.evaluating import FINAL, Evaluations, Pinned, Played, Schedule
from raynforce.driver.live import Live
from raynforce.driver.machines import Machines
from raynforce.driver.recording import Best, Recorder
from raynforce.driver.resuming import require_fit, settings_note, steps_note, weights_to_begin_with
from raynforce.driver.signals import StopRequest
from raynforce.driver.status import Callback, Result, Tally
from raynforce.driver.supervision import Supervision
from raynforce.engines import engine_class
from raynforce.engines.base import Round
from raynforce.errors import CheckpointError, RaynforceError, UsageError, reason
from raynforce.imports import bare
from raynforce.policies.acting import PolicyVersion
from raynforce.policy import Policy, policy_of
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import FaultHistory
from raynforce.runs.metrics import Sink
from raynforce.runs.progress import Mode, Progress, ProgressState, make_progress
from raynforce.runtimes.base import Handle, Pending, RoleError
from raynforce.runtimes.member import Job
from raynforce.spaces import EnvSpec
from raynforce.topologies.declaration import env_args, evaluator_rules
from raynforce.trees import Tree

EVALUATOR = "raynforce.roles.evaluator:Evaluator"
AGENTS_EVALUATOR = "raynforce.roles.agents_evaluator:AgentsEvaluator"


class Driver:
    """One run, seen from the process that was started for it."""

    def __init__(
        self,
        config: Config,
        env: EnvSpec,
        run: RunDirectory,
        *,
        before: Config | None = None,
        callbacks: Sequence[Callback] = (),
        sinks: Sequence[Sink] = (),
        stream: TextIO,
        progress: Mode | Progress = "auto",
        began: float | None = None,
        title: str = "",
    ) -> None:
        """`before` is the config of a run that is resumed."""
        self._began = time.monotonic() if began is None else began
        self._config, self._run, self._callbacks = config, run, callbacks
        self._tally = Tally(config, self._began)
        self._status = self._tally.status
        self._status.path, self._status.make_policy = run.path, self._newest_policy
        self._status.save_now, self._status.count_idle = self._save_at_once, self._was_idle
        self._shown: Policy | None = None  # to callbacks
        self._schedule = Schedule(config.eval, config.steps, config.target is not None)
        self._best: Pinned | None = None  # the policy version that evaluated best
        self._owed: list[Pinned] = []  # versions whose evaluation a signal has prevented: a resume makes up for it
        self._startup_seconds: float | None = None
        self._turning_since = self._began
        self._trained_seconds: float | None = None  # in this process, once the loop has ended
        self._resumes = 0  # how often the run was resumed
        self._told: set[str] = set()  # notes
        self._went = ""  # where the time went, once that is known
        self._times: dict[str, dict[str, float]] = {}  # shares of each role's time, and
        self._saved = ""  # the newest checkpoint, both as of the last report
        self._progress = make_progress(stream, mode=progress)
        self.stop_request = StopRequest(self._announce_stop)
        # Closes what was opened if the rest cannot be built.
        with self.stop_request.watching(at_once=True), contextlib.ExitStack() as opened:
            opened.callback(self._progress.stop)
            self._build(env, before, sinks, opened, title or f"{bare(config.algo)} on {bare(config.env)}")
            self._opened = opened.pop_all()

    # -- the beginning --------------------------------------------------------------------------------

    def _build(
        self, env: EnvSpec, before: Config | None, sinks: Sequence[Sink], opened: contextlib.ExitStack, title: str
    ) -> None:
        config, run, resume = self._config, self._run, before is not None
        if resume:
            lock = opened.enter_context(run.locked())
        loaded = run.load_newest() if resume else None
        saved = None if loaded is None else loaded.parts
        engine = self._engine = engine_class(config.engine)(config, env)
        self._acting = engine.acting
        if before is not None and loaded is not None:
            require_fit(loaded.parts["policy"].get("acting"), self._acting, config, run)
            engine.require_resumable(before, run.shown)
            steps, done = config.steps, loaded.manifest["step"]
            if steps != before.steps and steps < done:
                where = f"{run.shown} has {done:,} already"
                raise UsageError(f"steps = {steps:,}, but {where}: give more, or leave it out")
        weights = weights_to_begin_with(config, self._acting) if loaded is None else None
        self._progress.start(title)
        if before is not None:
            unsaved = ["no checkpoint was written yet: beginning from the start"]
            self._note(*settings_note(before, config), *(unsaved if loaded is None else loaded.notes))
        supervision = self._supervision = Supervision(self._progress.fault, self._progress.message)
        engine = opened.enter_context(engine)
        engine.open(supervision, self._progress.message)
        self._runtime = engine.pool.runtime
        portable = config.network.factory is None and not self._acting.network.conv_products
        self._machines = Machines(run, self._runtime, self._progress.message, portable=portable)
        self._evaluations = Evaluations(
            engine.pool,
            self._make_evaluator,
            evaluator_rules(config),
            config.eval,
            self._schedule,
            longest=config.faults.sample_seconds / 2,
            show=self._show,
            stopped=lambda: self.stop_request.number is not None,
            broken=lambda facts: supervision.env_faults("evaluator", [facts]),
            gave_up=supervision.evaluation_given_up,
        )
        if weights is not None:
            self._progress.message(weights.note)
            whole = not weights.places
            engine.begin_from(weights.version if whole else weights.over(engine.newest()[0].result()), weights.step)
        if saved is not None:
            self._load(saved)
        self._version, self._number = engine.newest()
        self._machines.look()
        if loaded is not None:
            self._machines.compare(loaded.manifest)
        self._rounds = engine.rounds(lambda who: self._show(f"waiting for {who}{self._runtime.pending_reason()}"))
        if resume:
            run.write_config(config.to_yaml())
        else:
            run.create(config.to_yaml())  # not before everything is known to fit
            lock = opened.enter_context(run.locked())
        resume_step = self._status.steps if resume else None
        positions: Tree = {} if saved is None else saved["run"]["sinks"]
        self._record = Recorder(run, lock, config, sinks, self._progress.fault, opened, resume_step, positions)
        supervision.history = FaultHistory(run, self._progress.fault)
        opened.callback(supervision.history.close)
        self._live = Live(run)
        opened.callback(self._live.close)
        if saved is None:
            self._record.save_now(self._save, self._show)  # from here on there is always something to resume from
        else:
            self._go_on_evaluating(saved)

    def _make_evaluator(self, _: int) -> Handle:
        config, faults = self._config, self._config.faults
        envs = env_args(config, min(config.eval.envs, config.eval.episodes), masked=self._acting.env.masked)
        args = self._acting, envs, faults.restarts, faults.sample_seconds
        role = EVALUATOR if self._acting.env.agents is None else AGENTS_EVALUATOR
        return self._runtime.spawn(role, *args, name="evaluator", place=self._runtime.places.get("evaluator"))

    def _go_on_evaluating(self, saved: Mapping[str, Tree]) -> None:
        """What was being evaluated when the checkpoint was written is evaluated again."""
        for name in sorted(name for name in saved if name.startswith("evaluating_")):
            version = PolicyVersion.from_state(saved[name]["version"])
            pinned = Pinned(self._runtime.share(version), version.number, saved[name]["steps"])
            self._judge(self._evaluations.begin(pinned))

    def _note(self, *notes: str) -> None:
        for note in notes:
            self._progress.message(f"note: {note}")

    def _announce_stop(self) -> None:
        self._progress.message("stopping after this round, with a checkpoint; press Ctrl-C again to end at once")

    # -- the loop -------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Train until the steps are done, the target is met, a callback or a signal says stop."""
        with self.stop_request.watching(), self._opened:
            try:
                if self._status.steps < self._config.steps:
                    self._loop()
                self._finish()
                result = self._result()
                self._went = self.where_the_time_went()
                self._record.end(result.to_json(), self._went)
                return result
            except Exception as error:
                self._show()
                with contextlib.suppress(RaynforceError):  # the disk may be what failed
                    self._run.event("failed", reason=reason(error), steps=self._status.steps)
                if self._record.saved_step:  # else there is nothing to go on with
                    what = f"raynforce resume {self._run.shown}"
                    self._progress.message(f"failed; what was saved can be continued: {what}")
                raise

    def _loop(self) -> None:
        status = self._status
        self._run.event("started", steps=status.steps, **self._run.made_on)
        self._turning_since = time.monotonic()
        while status.stop_reason is None:
            try:
                round_ = next(self._rounds)
            except RaynforceError as error:
                if self._engine.keeps_learning_after(error):
                    with contextlib.suppress(RaynforceError):
                        if (unfinished := self._engine.last_round()) is not None:
                            self._count(unfinished)
                        self._record.save_now(self._save, self._show)
                raise
            try:
                self._after(round_)
            except Exception:  # of a callback, or of the environment in evaluation: what was learned is not lost
                with contextlib.suppress(RaynforceError):
                    self._record.save_now(self._save, self._show)
                raise
        self._trained_seconds = time.monotonic() - self._turning_since - self._evaluations.waited

    def _after(self, round_: Round) -> None:
        status, config = self._status, self._config
        before = status.steps
        if self._startup_seconds is None and round_.learned.updates:
            self._startup_seconds = time.monotonic() - self._began
        self._count(round_)
        self._report(round_)
        if status.steps >= config.steps:
            status.stop_reason = status.stop_reason or "steps done"
        self._judge(self._evaluations.finished())
        if self._schedule.is_due(before, status.steps, status.metrics.get("charts/episodic_length", 0.0)):
            self._evaluate()
        for callback in self._callbacks:  # if one raises, what is then saved lacks nothing of this round
            callback.on_round(status)
        self._tell_live()
        asked = self._live.asked()
        if "stop" in asked:
            self.stop_request.ask()
        status.stop_reason = self.stop_request.name or status.stop_reason
        if status.stop_reason in ("steps done", "target met") and self._tally.has_unreported:
            self._write_metrics(round_)  # what is stopped goes on: it writes the lines that it would have written
        self._record.look()
        due = self._record.is_due(before, status.steps, asked="checkpoint" in asked)
        if due and status.stop_reason is None:
            self._save()

    def _count(self, round_: Round) -> None:
        learned = round_.learned
        self._version, self._number = round_.version, learned.number
        self._tally.add(learned)
        self._note(*(new for new in dict.fromkeys(learned.notes) if new not in self._told))  # workers may say the same
        self._told.update(learned.notes)
        self._supervision.steps = self._status.steps

    def _report(self, round_: Round) -> None:
        if self._tally.report_is_due():
            self._write_metrics(round_)
        self._show()

    def _write_metrics(self, round_: Round) -> None:
        status = self._status
        self._machines.look()
        status.metrics |= {
            "charts/SPS": self._speed,
            "charts/episodes": float(status.episodes),
            "charts/updates": float(status.updates),
            "time/seconds": self._tally.seconds,
            **round_.seconds,
            "time/evaluate": self._evaluations.waited,
            "eval/skipped": float(self._evaluations.skipped),
            **self._engine.metrics(),
            **self._supervision.metrics(self._engine.pool),
            **self._record.metrics(),
            **self._runtime.health(),
        }
        self._look_back()
        self._record.episodes(status.steps, *self._tally.episodes())
        self._record.write(status.steps, dict(status.metrics))

    def _tell_live(self, *, now: bool = False) -> None:
        """Roles and what bounds the run, for those who look on."""
        if now or self._live.is_due:
            told, status = self.where_the_time_went(), self._status
            # At a URL, metrics.jsonl comes with checkpoints alone.
            more = {"metrics": dict(status.metrics)} if self._live.is_remote else {}
            self._live.tell(self._engine.pool.members, steps=status.steps, time_went=told, **more)

    def _look_back(self) -> None:
        """What the view shows of the last report."""
        metrics = self._status.metrics
        self._times = {}
        for name, share in metrics.items():
            words = name.split("/")
            if len(words) == 3 and words[0] == "time":
                self._times.setdefault(words[1], {})[words[2]] = share
        if (step := metrics.get("disk/checkpoint_step")) is not None:
            took = f"{metrics['disk/checkpoint_seconds']:.2f} s, {metrics['disk/checkpoint_bytes'] / 1e6:,.1f} MB"
            failing = metrics["disk/failures_in_a_row"]
            self._saved = f"step {step:,.0f} in {took}" + (f"; {failing:.0f} have failed since" if failing else "")

    @property
    def _speed(self) -> float:
        """Environment steps per second of training in this process, start-up and evaluation left out."""
        seconds = self._trained_seconds or time.monotonic() - self._turning_since - self._evaluations.waited
        return self._tally.trained_here / max(seconds, 1e-9)

    def _show(self, note: str = "", left: float | None = 0.0) -> None:
        """Show where the run stands; `left` are the seconds that an evaluation will still take, if that is known."""
        status, history = self._status, self._supervision.history
        same = {name: getattr(status, name) for name in ("steps", "episodes", "updates", "best_eval")}
        self._progress.update(
            ProgressState(
                **same,
                total_steps=self._config.steps,
                seconds=self._tally.seconds,
                steps_per_second=self._speed,
                return_mean=status.metrics.get("charts/episodic_return"),
                target=self._config.target,
                losses={k[7:]: v for k, v in status.metrics.items() if k.startswith("losses/")},
                note=note,
                evaluating_left=left,
                ending=status.stop_reason is not None,
                faults=0 if history is None else history.faults,
                last_fault="" if history is None else history.last,
                roles=self._times,
                checkpoint=self._saved,
            )
        )

    # -- evaluation -----------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        status = self._status
        if not status.episodes and status.steps > self._config.eval.max_length:
            self._note(f"no episode has ended in {status.steps:,} steps; evaluation cuts them at eval.max_length")
        pinned = self._pinned
        if self._config.target is not None:  # else training would go on long after it is met
            self._judge(self._evaluations.wait())
        if self.stop_request.number is None and status.stop_reason != "target met":
            self._judge(self._evaluations.begin(pinned))
        if self.stop_request.number is not None:
            self._owed.append(pinned)

    @property
    def _unevaluated(self) -> list[Pinned]:
        """Versions that are due, being played, or cut short, each once."""
        found = {pinned.number: pinned for pinned in (*self._evaluations.unfinished, *self._owed)}
        return [pinned for number, pinned in found.items() if number > self._tally.evaluated]

    @property
    def _pinned(self) -> Pinned:
        return Pinned(self._version, self._number, self._status.steps)

    def _judge(self, evaluated: Played | None) -> None:
        """Take the outcome of an evaluation, if there is one: is it the best, and is the target met?"""
        if evaluated is None:
            return
        pinned, returns = evaluated
        status, target = self._status, self._config.target
        self._tally.evaluated = pinned.number
        score = status.last_eval = float(returns.mean())
        measured = {"eval/return": score, "eval/deviation": float(returns.std()), "time/seconds": self._tally.seconds}
        of_agents = self._acting.env.agents is not None  # who tell what each earned
        where = "eval/" if of_agents else "eval/info/"
        measured |= {where + name: mean for name, mean in infos.means(self._evaluations.info).items()}
        self._record.write(pinned.steps, measured)
        if status.best_eval is None or score >= status.best_eval:
            status.best_eval, self._best = score, pinned
            self._record.best = Best(pinned.steps, score, lambda: self._policy(pinned.version))
            self._record.save_best()
        if target is not None and score >= target:
            status.stop_reason = status.stop_reason or "target met"
            if status.solved_at is None:
                status.solved_at, status.solved_steps = self._tally.seconds, pinned.steps
        self._show()
        for callback in self._callbacks:
            callback.on_evaluation(status, returns)

    # -- the end --------------------------------------------------------------------------------------

    @property
    def _may_play(self) -> bool:
        """Whether there is time to evaluate: whoever sent a signal waits for the end."""
        return self.stop_request.number is None and self._status.play_last

    def _finish(self) -> None:
        status = self._status
        status.stop_reason = status.stop_reason or "steps done"
        unevaluated = self._unevaluated
        if self._may_play:
            self._evaluations.drop_due()
            self._judge(self._evaluations.wait())
        due = status.stop_reason != "target met" and self._tally.evaluated != self._number
        if self._may_play and due:
            self._judge(self._evaluations.play(self._pinned, self._config.eval.episodes, "evaluating"))
        self._evaluations.stop()
        if not self._may_play:
            self._owed = unevaluated
        status.stop_reason = self.stop_request.name or status.stop_reason
        if self._tally.trained_here or self._record.best_is_unsaved:
            self._record.save_last(self._save, self._show)
        self._tell_live(now=True)
        self._run.event("stopped", reason=status.stop_reason, steps=status.steps)
        for callback in self._callbacks:
            callback.on_end(status)
        self._record.finish()

    def _result(self) -> Result:
        status, config = self._status, self._config
        eval_return = None
        episodes = self._schedule.final_episodes(status.steps)
        alone = self._evaluations.count == 1 and not self._resumes and self._best is not None
        if alone and 0 < episodes <= config.eval.episodes:  # it was not chosen for its outcome
            eval_return = status.last_eval
        elif episodes and self._may_play:
            best = self._best or self._pinned
            played = self._evaluations.play(best, episodes, "evaluating the best policy", FINAL)
            eval_return = None if played is None else float(played.returns.mean())
        self._show()
        totals = self._engine.totals()
        same = {name: getattr(config, name) for name in ("algo", "env", "runtime", "topology", "seed")}
        same |= {name: getattr(status, name) for name in ("steps", "episodes", "updates", "solved_steps")}
        return Result(
            run=self._run.shown,
            **same,
            seconds=round(time.monotonic() - self._began, 3),
            startup_seconds=self._startup_seconds and round(self._startup_seconds, 3),
            steps_per_second=None if self._trained_seconds is None else round(self._speed, 1),
            return_mean=self._tally.counts.return_mean,
            eval_return=eval_return,
            solved_at=status.solved_at and round(status.solved_at, 3),
            restarts=self._engine.pool.restarts,
            env_restarts=self._supervision.env_restarts,
            recycled=self._supervision.recycled,
            recycle_cuts=self._supervision.recycle_cuts,
            abandoned_episodes=self._tally.abandoned_episodes,
            redone_updates=self._supervision.redone_updates,
            dropped_steps=totals.dropped_steps,
            lost_steps=totals.lost_steps,
            weights_sha256=hashlib.sha256(self._version.result().params.tobytes()).hexdigest(),
            stopped=status.stop_reason or "steps done",
            evaluations=self._evaluations.count,
            skipped_evaluations=self._evaluations.skipped,
            eval_seconds=round(self._evaluations.waited, 3),
        )

    def where_the_time_went(self) -> str:
        """A few lines on what bound the run, and which setting to change."""
        if self._went:  # it has ended
            return self._went
        evaluation, now = self._evaluations.waited, time.monotonic()
        startup = self._turning_since - self._began
        training = self._trained_seconds or 0.0
        going_on = self._trained_seconds is None
        if going_on and self._tally.trained_here:
            training = now - self._turning_since - evaluation
        rest = now - self._began - startup - training - evaluation
        seconds = {"start-up": startup, "training": training, "evaluation": evaluation, "saving": rest}
        return self._engine.where_the_time_went(seconds, 0 if going_on else self._tally.trained_here)

    def _newest_policy(self) -> Policy:
        version = self._version.result()
        if self._shown is None or self._shown.version.number != version.number:
            self._shown = policy_of(self._acting, version)
        return self._shown

    # -- what is saved --------------------------------------------------------------------------------

    def _policy(self, version: Job | Pending) -> Tree:
        return {"acting": self._acting.to_json(), "version": version.result().state()}

    def _save(self) -> None:
        """Hand everything that the run depends on to the saver: training waits for a copy of it, not for the disk."""
        began = time.monotonic()
        parts = self._engine.state(self._run.known)
        parts |= {"policy": self._policy(self._version), "run": self._counts()}
        for index, pinned in enumerate(self._unevaluated):
            parts[f"evaluating_{index}"] = {"version": pinned.version.result().state(), "steps": pinned.steps}
        self._record.save(self._status.steps, parts)
        self._status.metrics["disk/checkpoint_pause"] = time.monotonic() - began

    def _save_at_once(self) -> None:
        self._record.save_now(self._save, self._show)

    def _was_idle(self, seconds: float) -> None:
        self._began += seconds
        self._tally.began += seconds
        self._turning_since += seconds

    def _counts(self) -> Tree:
        return {
            **self._tally.state(),
            **self._engine.counts(),
            "total_steps": self._config.steps,
            "resumes": self._resumes,
            "redone_updates": self._supervision.redone_updates,
            "restarts": self._engine.pool.restarts,
            "env_restarts": self._supervision.env_restarts,
            "recycled": self._supervision.recycled,
            "recycle_cuts": self._supervision.recycle_cuts,
            "reasons": dict(self._supervision.reasons),
            "schedule": self._schedule.state(),
            "sinks": self._record.position(),
        }

    def _load(self, saved: Mapping[str, Tree]) -> None:
        status = self._status
        try:
            counts = saved["run"]
            told = self._engine.load(saved)
            self._supervision.load(counts)
            self._schedule.load(counts["schedule"])
            self._engine.pool.restarts += counts["restarts"]
            self._tally.load(counts)
            self._supervision.steps = status.steps
            self._tally.abandoned_episodes += self._engine.totals().abandoned_episodes
            self._resumes = counts["resumes"] + 1
            told += steps_note(counts["total_steps"], self._config.steps, status.steps)
        except (KeyError, ValueError, TypeError, RuntimeError, RoleError) as error:
            raise CheckpointError(f"{self._run.last} does not fit this config: {reason(error)}") from error
        if status.solved_steps is not None and self._config.target is not None:
            told.append(
                f"the target was met at {status.solved_steps:,} steps already; --target none goes on without it"
            )
        self._note(*told)
        self._best = self._load_best()

    def _load_best(self) -> Pinned | None:
        """The policy that evaluated best: what the disk has is the truth, which may be newer than the checkpoint."""
        status = self._status
        try:
            score, tree = self._run.load_best()
            version = PolicyVersion.from_state(tree["version"])
        except CheckpointError as error:
            if status.best_eval is not None:
                self._note(f"{error}; the next evaluation decides which policy is the best")
                status.best_eval = None
            return None
        status.best_eval = score
        return Pinned(self._runtime.share(version), version.number, status.solved_steps or 0)
