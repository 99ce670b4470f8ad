"""`raynforce doctor RUN --replay`: a fault of a run once more, in this process, under a debugger if wanted."""

from __future__ import annotations

import bdb
import contextlib
import faulthandler
import json
import math
import multiprocessing
import pdb
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Any

import numpy as np
from gymnasium import spaces

from raynforce.algos import algorithm_class
from raynforce.algos.contract import declared
from raynforce.config import Config
from raynforce.envs.describe import describe, flatten_obs, misfit, wrong_reset, wrong_step
from raynforce.envs.faults import MOST_BYTES
from raynforce.envs.make import Env, close_env, make
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import CheckpointError, RaynforceError, UsageError, how_it_ended, reason, summary
from raynforce.experiment import resolve, settings_of
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.sampler import Sampler
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import FOLDER, evidence_of
from raynforce.runtimes.role_host import hung
from raynforce.spaces import ObsLeaf

TELL_AFTER = 2.0  # seconds before progress is shown


@dataclass(frozen=True)
class How:
    seconds: float  # without any progress, until its stack is shown and the process ends
    debugger: bool
    before: bool
    stacks: IO[str] | None  # where they are shown, those of a crash in native code too


@dataclass(frozen=True)
class ReplayOutcome:
    broke: bool
    verdict: str  # one sentence or two
    step: int | None = None
    trace: str = ""
    hung: bool = False


def replay(
    run: RunDirectory, number: int | None, *, seconds: float, debugger: bool, before: bool, as_json: bool = False
) -> int:
    """Replay evidence `number` of a run, or its last; returns 1 if it broke again, 0 if it ran."""
    number, evidence = _choose(run, number)
    how = How(seconds, debugger, before, sys.__stderr__)
    role, cause = str(evidence.get("role", "a role")), str(evidence.get("cause", ""))
    what = cause if cause.startswith(role) else f"{role}: {cause}"
    print(f"recorded fault {number} of {run.path}: {what}", flush=True)
    apart = as_json and not (debugger or before)
    outcome = (_again_apart if apart else _again)(run, number, evidence, how)
    if outcome.trace and not as_json:
        print(outcome.trace, end="")
    print(outcome.verdict)
    if as_json:
        print(json.dumps({"evidence": number, "kind": evidence.get("kind"), **asdict(outcome)}))
    return 1 if outcome.broke else 0


def _choose(run: RunDirectory, number: int | None) -> tuple[int, dict[str, Any]]:
    found = dict(evidence_of(run))
    if not found:
        raise UsageError(f"{run.path} has no recorded fault to replay: there is nothing in {FOLDER}/")
    number = max(found) if number is None else number
    if number not in found:
        raise UsageError(f"{run.path} has no recorded fault {number}: there is {', '.join(map(str, found))}")
    return number, found[number]


def _again(run: RunDirectory, number: int, evidence: Mapping[str, Any], how: How) -> ReplayOutcome:
    if how.stacks is not None and not faulthandler.is_enabled():
        faulthandler.enable(how.stacks)  # a crash in native code ends this process too, but says where
    try:
        fragment = evidence.get("kind") == "fragment"
        return _fragment(run, number, evidence, how) if fragment else _episode(run, evidence, how)
    except bdb.BdbQuit:
        return ReplayOutcome(False, "left by the debugger")


def _again_apart(run: RunDirectory, number: int, evidence: Mapping[str, Any], how: How) -> ReplayOutcome:
    """The same in a process of its own: a hang or a crash in native code ends that one, and can be told here."""
    fork = multiprocessing.get_context("fork")  # which finds no module a second time
    ours, theirs = fork.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as stacks, ours:
        child = fork.Process(target=_tell, args=(theirs, run, number, evidence, replace(how, stacks=stacks)))
        child.start()
        theirs.close()
        answer: ReplayOutcome | RaynforceError | None = None
        try:
            wait([ours, child.sentinel])
            with contextlib.suppress(EOFError):
                answer = ours.recv() if ours.poll() else None
            child.join(TELL_AFTER)
        finally:
            child.kill()  # if it hangs, a Ctrl-C does not reach it
            child.join()
        stacks.seek(0)
        trace = stacks.read()
    if isinstance(answer, RaynforceError):
        raise answer
    if answer is not None:
        return answer
    what = hung(trace.splitlines())
    verdict = f"broke: {what or f'its process {how_it_ended(child.exitcode or 0)}'}"
    return ReplayOutcome(True, verdict, trace=trace, hung=what is not None)


def _tell(parent: Connection, *what: Any) -> None:
    try:
        parent.send(_again(*what))
    except Exception as error:
        parent.send(error if isinstance(error, RaynforceError) else RaynforceError(summary(error)))


# -- an episode -------------------------------------------------------------------------------------------------------


def _episode(run: RunDirectory, evidence: Mapping[str, Any], how: How) -> ReplayOutcome:
    """Reset with the seed and take the actions, as the environment did when it broke."""
    try:
        name, args, seed = str(evidence["env"]), dict(evidence.get("args") or {}), int(evidence["seed"])
        actions = np.asarray(evidence["actions"], evidence.get("dtype"))  # [step, ...]
        step = int(evidence.get("step", len(actions)))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this recorded fault of {run.path} is torn: {summary(error)}") from None
    if evidence.get("too_long"):
        kept = f"more than {MOST_BYTES / 1e6:.0f} MB of actions are not kept; it began with reset(seed={seed})"
        raise UsageError(f"this episode is too long to be replayed: it broke at step {step:,}, and {kept}")
    env = make(name, args)
    try:
        return _Episode(env, name, seed, actions, how).play()
    finally:
        close_env(env)


class _Episode:
    """One environment on its way to where it broke."""

    def __init__(self, env: Env, name: str, seed: int, actions: np.ndarray, how: How) -> None:
        self.env, self.seed, self.actions, self.how = env, seed, actions, how
        self.leaves = describe(name, env.observation_space, env.action_space).obs
        self.step = 0

    def play(self) -> ReplayOutcome:
        last = len(self.actions)
        with _Watch(self.how, lambda: f"step {self.step:,} of {last:,}") as watch:
            try:
                result = _call(self.env, self.seed, 0, None, self._stop(watch, last))
                wrong = wrong_reset(result) or self._misfit(result[0])
                for index in range(last):
                    if wrong:
                        break
                    self.step = index + 1
                    watch.alive()
                    wrong, over = self._take(self._action(index), self._stop(watch, last))
                    if over and not wrong and self.step < last:
                        return ReplayOutcome(
                            False, f"did not break: here the episode ended at step {self.step}. {UNLIKE}"
                        )
            except bdb.BdbQuit:
                raise
            except (Exception, SystemExit) as error:
                error_seen = error
            else:
                if wrong:
                    return ReplayOutcome(True, f"{self._where(last)}: {wrong}", self.step)
                return ReplayOutcome(False, f"did not break in {last:,} steps. {UNLIKE}")
        return self._raised(error_seen, last)

    def _stop(self, watch: _Watch, last: int) -> bool:
        """Whether to stop in the debugger here."""
        stop = self.how.before and self.step == last
        if stop:
            watch.stop()
        return stop

    def _take(self, action: Any, stop: bool) -> tuple[str, bool]:
        """Take a step; returns what is wrong with what came, and whether the episode is over."""
        result = _call(self.env, self.seed, self.step, action, stop)
        if wrong := wrong_step(result):
            return wrong, False
        obs, reward, terminated, truncated, _ = result
        if not np.isfinite(reward):
            return f"the reward is {reward}; expected a finite number", False
        return self._misfit(obs), bool(terminated) or bool(truncated)

    def _misfit(self, obs: Any) -> str:
        """What does not fit about an observation: its shape, its type, or NaN and infinity in it."""
        try:
            values = flatten_obs(obs, self.leaves)
        except UsageError as error:
            return str(error)
        for leaf in self.leaves:
            if wrong := misfit(values[leaf.path], leaf) or _not_finite(values[leaf.path], leaf):
                return f"the observation {wrong}"
        return ""

    def _action(self, index: int) -> Any:
        """As the environment got it: an int, or an array of its space's dtype."""
        if isinstance(self.env.action_space, spaces.Discrete):
            return int(self.actions[index])
        return self.actions[index].astype(self.env.action_space.dtype)

    def _where(self, last: int) -> str:
        at = f"at step {self.step:,}" if self.step else "in reset"
        return f"broke again {at}" if self.step == last else f"broke {at}, in the run at step {last:,}"

    def _raised(self, error: BaseException, last: int) -> ReplayOutcome:
        inside = error.__traceback__
        while inside is not None and inside.tb_frame.f_globals.get("__name__") == __name__:
            inside = inside.tb_next  # our own frames are of no interest
        trace = "".join(traceback.format_exception(type(error), error, inside))
        verdict = f"{self._where(last)}: {summary(error)}"
        end = _up_to_env(inside, self.env) or error.__traceback__
        return ReplayOutcome(True, verdict, self.step, _debugged(self.how, trace, verdict, end))


def _debugged(how: How, trace: str, verdict: str, end: TracebackType | None) -> str:
    """Open the debugger where it broke, if that is wanted; returns the trace that is still to be shown."""
    if not how.debugger or how.before:
        return trace
    print(f"{trace}{verdict}; q leaves the debugger", flush=True)
    pdb.post_mortem(end)
    return ""


UNLIKE = "Either it is not determined by its seed (all random numbers must come from self.np_random), or it broke over "
UNLIKE += "something outside of it: a file, a server, the time, memory"


def _call(env: Env, seed: int, step: int, action: Any, stop: bool) -> Any:
    """What a debugger that stops before it shows: the environment, its seed, the step and the action."""
    if stop:
        pdb.Pdb().set_trace()
    return env.step(action) if step else env.reset(seed=seed)


def _not_finite(value: Any, leaf: ObsLeaf) -> str:
    array = np.asarray(value)
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return ""
    place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    index = f"[{', '.join(map(str, place))}]" if place else ""
    return f"{leaf.path!r} has {array[place]} at {index or 'its one value'}; expected finite numbers"


def _up_to_env(inside: TracebackType | None, env: Env) -> TracebackType | None:
    """The traceback, without the frames of libraries that the environment has called in the end."""
    mine = {kind.__module__ for kind in type(env.unwrapped).__mro__} - {"gymnasium.core", "builtins", "typing"}
    frames, trace = list[TracebackType](), inside
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while frames and frames[-1].tb_frame.f_globals.get("__name__") not in mine:
        frames.pop()
    shorter: TracebackType | None = None
    for frame in reversed(frames):
        shorter = TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter or inside


# -- a fragment -------------------------------------------------------------------------------------------------------


def _fragment(run: RunDirectory, number: int, evidence: Mapping[str, Any], how: How) -> ReplayOutcome:
    """Let the sampler, put to where it stood, sample the fragment again that it did not come back from."""
    began, broke = time.monotonic(), None
    with _Watch(how, lambda: "sampling") as watch, contextlib.ExitStack() as opened:
        try:
            sampler, versions = _sampler(run, number, int(evidence.get("index", 0)), opened)
            watch.alive()
            if how.before:
                watch.stop()
                pdb.Pdb().set_trace()
            fragments = []
            for version in versions:
                fragments.append(sampler.sample(version))
                watch.alive()
        except (bdb.BdbQuit, UsageError, CheckpointError):
            raise
        except (Exception, SystemExit) as error:
            broke = error
    if broke is None:
        steps, seconds = sum(fragment.steps for fragment in fragments), time.monotonic() - began
        return ReplayOutcome(False, f"did not break: {steps:,} steps in {seconds:.1f} s. {OUTSIDE}")
    cause = broke.__cause__ if isinstance(broke, RaynforceError) and broke.__cause__ is not None else broke
    trace = "".join(traceback.format_exception(cause))
    verdict = f"broke again: {reason(broke)}"
    return ReplayOutcome(True, verdict, None, _debugged(how, trace, verdict, cause.__traceback__))


OUTSIDE = "Either what ended it came from outside (memory, another process), or the environment is not determined by "
OUTSIDE += "its seed"


def _sampler(
    run: RunDirectory, number: int, index: int, opened: contextlib.ExitStack
) -> tuple[Sampler, list[PolicyVersion]]:
    """The sampler of the run's config in the state of the evidence, and the policy versions it was given since."""
    config: Config = resolve({"preset": "none"}, settings_of(run.config)[0])[0]
    parts = checkpoint.load(run.path / FOLDER / f"{number:04d}")
    acting = declared(config, probe(config.env, config.env_args), algorithm_class(config.algo))
    how = config.sampling.envs, config.seed, config.env_args, config.sampling.exact_resume
    envs = EnvArgs(config.env, *how, masked=acting.env.masked)
    sampler = Sampler(acting, envs, config.sampling.fragment, index)
    opened.callback(_close, sampler)
    try:
        for note in sampler.load(parts["sampler"]) if "sampler" in parts else ():
            print(f"note: {note}")
        versions = parts["versions"]
        return sampler, [PolicyVersion.from_state(versions[str(index)]) for index in range(len(versions))]
    except (KeyError, ValueError, TypeError) as error:
        what = f"recorded fault {number} does not fit the config of {run.path}"
        raise CheckpointError(f"{what}: {summary(error)}") from error


def _close(sampler: Sampler) -> None:
    with contextlib.suppress(Exception, SystemExit):
        sampler.close()


# -- hangs and progress -----------------------------------------------------------------------------------------------


class _Watch:
    """Shows progress if something takes long; ends the process with its stack if it does not move for `seconds`."""

    def __init__(self, how: How, doing: Callable[[], str]) -> None:
        self._seconds, self._stacks, self._doing = how.seconds, how.stacks, doing
        self._began = time.monotonic()
        self._armed = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        self.alive()
        return self

    def alive(self) -> None:
        """It moves: give it all of its seconds again. Call it as often as you like."""
        now = time.monotonic()
        if now - self._armed > min(1.0, self._seconds / 2) and self._stacks is not None and not self._over.is_set():
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stacks)

    def stop(self) -> None:
        """From here on, as in a debugger, there is no hurry."""
        faulthandler.cancel_dump_traceback_later()
        self._over.set()
        self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            traceback.print_exc()  # where it was

    def _show(self) -> None:
        pause, hint = TELL_AFTER, f"; after {self._seconds:g} s without progress its stack is shown"
        while not self._over.wait(pause):
            print(f"{self._doing()}, {time.monotonic() - self._began:.0f} s{hint}", file=sys.stderr, flush=True)
            pause, hint = min(60.0, 1.5 * pause), ""
