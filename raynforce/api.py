"""The Python API: `train`, `resume`, `evaluate`; `load` is in `policy`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.auto import paced_by_envs
from raynforce.config import Config, EvalConfig
from raynforce.data.files import absolute
from raynforce.driver.driver import Driver
from raynforce.driver.status import Callback, Result, Status
from raynforce.engines import engine_class
from raynforce.envs.addresses import reached
from raynforce.envs.launching import is_simulator, short_name
from raynforce.envs.vector import EnvArgs, Parallel, probe
from raynforce.errors import UsageError
from raynforce.experiment import resolve, settings_of
from raynforce.given import Lender, lending
from raynforce.imports import bare, importing, is_given, load_object
from raynforce.infos import Values
from raynforce.policy import Policy, load, read_policies
from raynforce.prometheus import exporting
from raynforce.runs import fitting
from raynforce.runs.catalog import glance, last_lines
from raynforce.runs.directory import RunDirectory, find_policy
from raynforce.runs.metrics import Sink
from raynforce.runs.mirrored import begun_run, local_path, new_run, open_run
from raynforce.runs.progress import Mode, Progress, make_progress
from raynforce.runs.store import is_url
from raynforce.settings import COUNT, SEED, coerce, nested, read_yaml
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

OnRound = Callable[[Status], None]
EPISODES, WATCHED = 100, 3  # that are evaluated, and if somebody looks at them
TELL_AFTER = 2.0  # seconds until progress is told for the first time, where nothing else tells it


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    path: Path
    """Its directory; of a run at a URL, the working copy on this machine."""
    config: Config
    result: Result
    where_the_time_went: str = ""
    """Each role's time in percent, what bound the run, and which setting to change, in a few lines."""

    def __repr__(self) -> str:
        return f"<Run {self.result.run}: {self.result.steps:,} steps, {self.result.stopped}>"

    def __str__(self) -> str:
        return str(self.path)

    __fspath__ = __str__  # it can be given wherever its directory can

    def policy(self, which: str = "best") -> Policy:
        """Its `best` (or `last`) policy, ready to act."""
        return load(self.path, which)


def train(
    env: str | Callable[..., Any],
    algo: str | type[Any] = "ppo",
    *,
    steps: int | None = None,
    target: float | None = None,
    seed: int | None = None,
    runtime: str | None = None,
    topology: str | None = None,
    engine: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    start_from: str | os.PathLike[str] | None = None,
    data: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | OnRound] = (),
    sinks: Sequence[Sink] = (),
    progress: Mode = "auto",
) -> Run:
    """Train an agent and return where the run is and how it ended.

    `env` is a gymnasium id or `module:factory`, `algo` is `ppo`, `dqn`, `sac`, `td3`, `impala`, `a3c`, `bc` or your own
    `module:Class`. `settings` are dotted (`{"algorithm.learning_rate": 1e-3}`) and win over `config`, a YAML file or
    nested mapping, which wins over the preset. `runtime` (`inline`, `process`, `ray`) says where the roles live,
    `topology` (`sync`, `overlap`, `async`, `central`, `replay`, `shared-agent`) who waits for whom; `auto` chooses.
    `start_from` is a run or a checkpoint whose weights the new run begins with: network and observation normaliser;
    optimiser, counters and replay are fresh. `data` are recorded episodes for `bc`, as `record` writes them. With
    `resume`, a run of this config that is at `out` already goes on. A callback is a `Callback`, or a function that is
    called with the `Status` after every round. In Python, `env` may also be the factory itself (a class, a function, a
    lambda), `algo` the class, and `network.factory` the function; what a script or a notebook defines is sent to the
    run's processes. Ctrl-C raises `Interrupted`, whose `run` can be resumed.
    """
    with lending() as lender:
        given = {"runtime": runtime, "topology": topology, "engine": engine, "start_from": start_from, "data": data}
        found, preset = resolved(env, algo, config, settings, lender, steps=steps, target=target, seed=seed, **given)
        return start(found, preset, out, go_on=resume, callbacks=callbacks, sinks=sinks, progress=progress)


def resolved(
    env: Any, algo: Any, config: Any, settings: Mapping[str, Any] | None, lender: Lender, **given: Any
) -> tuple[Config, dict[str, Any]]:
    """What the arguments of `train` stand for, and the preset that was applied, dotted."""
    _not_while_imported()
    file = config if isinstance(config, Mapping) else read_yaml(str(config)) if config is not None else {}
    given |= {"env": lender.name_of(env), "algo": lender.name_of(algo)}
    plain = {name: str(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
    return resolve(file, _nested(settings, lender), {k: v for k, v in plain.items() if v is not None})


def start(
    config: Config, preset: Mapping[str, Any], out: str | Path | None = None, *, go_on: bool = False, **how: Any
) -> Run:
    """Train a resolved config, or `go_on` with the run of that config at `out`; `how` is that of `_drive`."""
    if go_on:
        if out is None:
            raise UsageError("resume goes on with the run at out, and none is given: name it")
        if (found := begun_run(out)) is not None:
            require_same_config(found, with_absolute_paths(config))
            if (over := ended_run(found)) is None:
                return resume(found, **how)
            if (opened := how.get("opened")) is not None:
                opened(found.shown)
            return over
    directory = new_run(fresh_name(config) if out is None else out, numbered=out is None)
    return _drive(with_absolute_paths(config), directory, directory.notes, preset_line(preset), **how)


def ended_run(run: RunDirectory) -> Run | None:
    """A run that has come to its own end, by steps or target, with what it told then; None if it has not."""
    if glance(run.path).state != "finished":
        return None
    events = last_lines(run.events, b'{"time":')
    told = next((event for event in events if event.get("event") in ("result", "started")), {})
    if told.get("stopped") not in ("steps done", "target met"):  # a callback's wish, or it was killed before it told
        return None
    with run.locked():  # of a run at a URL: a kill may have come before its last push
        run.finish()
    names = {field.name for field in fields(Result)}
    result = Result(**{name: value for name, value in told.items() if name in names})
    config, _ = resolve({"preset": "none"}, settings_of(run.config)[0])
    return Run(run.path, config, result, str(told.get("where_the_time_went", "")))


def require_same_config(run: RunDirectory, config: Config) -> None:
    """Refuse a config that is not the run's; what it leaves to `auto` may be anything."""
    had, _ = resolve({"preset": "none"}, settings_of(run.config)[0])
    free = ["sampling.samplers", "sampling.envs"] if config.topology == "auto" else []  # which `auto` may divide
    rows = fitting.differences(had.to_dict(), config.to_dict())
    differ = [row for row in rows if row.expected != "auto" and row.what not in ("preset", *free)]
    if differ:
        what = ", ".join(f"{row.what} is {row.found} and not {row.expected}" for row in differ[:3])
        ways = f"give the run another name, or change it with: raynforce resume {shlex.quote(run.shown)} ..."
        raise UsageError(f"{run.shown} is the run of another config ({what}): {ways}")


def with_absolute_paths(config: Config) -> Config:
    """What it begins with and learns from, by names that hold in any directory."""
    if config.data is not None:
        config = replace(config, data=absolute(config.data))
    if config.start_from is None or is_url(config.start_from):
        return config
    return replace(config, start_from=os.path.abspath(os.path.expanduser(config.start_from)))


def preset_line(preset: Mapping[str, Any]) -> str:
    """What was applied of it; nothing if there is none."""
    tuned = ", ".join(f"{k}={json.dumps(v, separators=(',', ':'))}" for k, v in preset.items())
    return tuned and f"preset: {tuned}"


def resume(
    run: str | os.PathLike[str] | RunDirectory,
    *,
    env: str | Callable[..., Any] | None = None,
    algo: str | type[Any] | None = None,
    steps: int | None = None,
    target: float | None = None,
    runtime: str | None = None,
    topology: str | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | OnRound] = (),
    sinks: Sequence[Sink] = (),
    progress: Mode | Progress = "auto",
    stream: Any = None,
    began: float | None = None,
    opened: Callable[[str], None] | None = None,
) -> Run:
    """Continue a run from its last checkpoint as if it had never stopped.

    `settings` (dotted) may change how far and how it goes on: `steps`, `target` (None removes it), learning rate and
    other numbers of the algorithm, evaluation, checkpoints, where it runs (`runtime`, `topology`), and the number of
    samplers and their environments; what is then not equal any more to a run that was never stopped is said. What the
    saved state was made with is refused: environment, algorithm, seed and network.

    `env` and `algo` are for a run whose own were defined in a script or a notebook: the same again.
    """
    _not_while_imported()
    directory = open_run(run, all=True)
    had, notes = settings_of(directory.config)
    changes = dict(settings or {})
    given = {"env": env, "algo": algo, "steps": steps, "target": target, "runtime": runtime, "topology": topology}
    changes |= {k: v for k, v in given.items() if v is not None}
    with lending() as lender:
        changes = _nested(_not_by_name(had, changes, lender), lender)
        topology = str(changes.get("topology", "sync"))  # with a new one, how environments are stepped is chosen again
        again = {"sampling": {"parallel": "auto"}} if topology == "auto" or paced_by_envs(topology) else {}
        had.setdefault("engine", Config.engine)
        for name in ("algo", "engine", "env", "seed", "start_from"):
            if changes.get(name, had.get(name)) != had.get(name):
                was = f"{name} of {directory.shown} is {had.get(name)!r}"
                raise UsageError(f"{was} and cannot become {changes[name]!r}")
        before, _ = resolve({"preset": "none"}, had)
        config, _ = resolve({"preset": "none"}, had, again, changes)
        how: dict[str, Any] = {"callbacks": callbacks, "sinks": sinks, "progress": progress, "stream": stream}
        how |= {"began": began, "opened": opened, "before": before, "title": f"resuming {directory.shown}"}
        return _drive(config, directory, [*directory.notes, *notes], **how)


def _drive(
    config: Config,
    directory: RunDirectory,
    notes: Sequence[str],
    preset: str = "",
    *,
    callbacks: Sequence[Callback | OnRound] = (),
    sinks: Sequence[Sink] = (),
    progress: Mode | Progress = "auto",
    stream: Any = None,
    opened: Callable[[str], None] | None = None,
    **how: Any,
) -> Run:
    """Train a config in a directory; `opened` is told where that is, once there is something. `how` is the driver's."""
    stream = stream or sys.stdout

    def say(line: str) -> None:
        """Before the view of the run begins, on a terminal that may be gone or know few characters."""
        if line and progress != "quiet":
            make_progress(stream, mode="plain" if isinstance(progress, str) else progress).message(line)

    for note in notes:
        say(f"note: {note}")
    with reached(config.env, config.sampling.samplers * config.sampling.envs, say):
        return _driven(config, directory, preset, callbacks, sinks, progress, stream, opened, say, **how)


def _driven(
    config: Config,
    directory: RunDirectory,
    preset: str,
    callbacks: Sequence[Callback | OnRound],
    sinks: Sequence[Sink],
    progress: Mode | Progress,
    stream: Any,
    opened: Callable[[str], None] | None,
    say: Callable[[str], None],
    **how: Any,
) -> Run:
    config, env, chosen = engine_class(config.engine).settle(config)
    say(preset)
    say(chosen)
    for sink in sinks:
        if not (hasattr(sink, "write") and hasattr(sink, "close")):
            raise UsageError(f"sink {sink!r} has no write(step, metrics) and close()")
    how |= {"callbacks": [*map(_callback, callbacks)], "stream": stream, "progress": progress}
    with exporting(config.metrics_port) as exporters:
        driver = Driver(config, env, directory, sinks=[*sinks, *exporters], **how)
        if opened is not None:
            opened(directory.shown)
        result, signal_number = driver.train(), driver.stop_request.number
    run = Run(directory.path, config, result, driver.where_the_time_went())
    if signal_number is not None:
        raise Interrupted(run, signal_number)
    return run


def _not_by_name(had: Mapping[str, Any], changes: dict[str, Any], lender: Lender) -> dict[str, Any]:
    """Let the names of what a script gave to the old run stand for what is given now; the other changes."""
    factory = (had.get("network") or {}).get("factory")
    for setting, name in {"env": had.get("env"), "algo": had.get("algo"), "network.factory": factory}.items():
        if isinstance(name, str) and is_given(name):
            thing = changes.pop(setting, name)
            lender.know(name, load_object(thing, setting) if isinstance(thing, str) else thing)
    return changes


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after a clean checkpoint; `run` is what there is of it."""

    def __init__(self, run: Run, number: int) -> None:
        go_on = f"raynforce resume {run.result.run}"
        if is_given(run.config.env):  # which the command line does not know
            go_on = f"raynforce.resume({run.result.run!r}, env=...)"
        super().__init__(f"ended by {signal.Signals(number).name}; to go on: {go_on}")
        self.run = run
        self.number = number


class Evaluated(tuple[np.ndarray, Path]):
    """What an evaluation gave: `returns, checkpoint = raynforce.evaluate(…)`, and more by name."""

    returns: np.ndarray
    """Of each episode, `[E]`."""
    checkpoint: Path
    """Whose policy was evaluated."""
    info: Values
    """Numbers in `info` at the ends of the episodes: `[E]` by name, NaN where there was none."""
    videos: Sequence[Path]
    """Films of the episodes, if they were asked for."""

    def __new__(cls, returns: np.ndarray, checkpoint: Path, info: Values, videos: Sequence[Path]) -> Evaluated:
        made = super().__new__(cls, (returns, checkpoint))
        made.returns, made.checkpoint, made.info, made.videos = returns, checkpoint, info, videos
        return made


def evaluate(
    path: str | os.PathLike[str],
    *,
    env: str | Callable[..., Any] | None = None,
    env_args: Mapping[str, Any] | None = None,
    episodes: int | None = None,
    which: str = "best",
    seed: int | None = None,
    parallel: Parallel = "no",
    video: str | Path | None = None,
    render: bool = False,
    say: Callable[[str], None] | None = None,
) -> Evaluated:
    """Play greedy episodes with a run's policy on fresh seeds: 100, or 3 if they are to be looked at.

    `env` is another one with equal spaces, or the same again for a run whose own was defined in a script or a notebook.
    It is made with the run's own arguments, over which `env_args` are laid.
    `parallel` steps environments side by side, in `threads` those that wait for something, in `processes` those that
    compute. `video` is a folder that gets a film of each episode (`pip install "raynforce[video]"`), `render` shows
    them in a window; one environment plays them then. `say` is told how far it is, once that takes longer than two
    seconds.

    Returns the return of each episode, and the path of the checkpoint used; more of it by name.
    """
    from raynforce.envs.agents import ID
    from raynforce.envs.watching import Watched
    from raynforce.roles.agents_evaluator import AgentsEvaluator
    from raynforce.roles.evaluator import EVALUATION_STREAM, Evaluator

    watched, shown = None, video is not None or render
    ways = {"video": video is not None, "render": render, "parallel": parallel != "no"}
    first, *more = [name for name, wanted in ways.items() if wanted] or [""]
    if shown and more:
        raise UsageError(f"{first} and {more[0]} do not go together: one environment is shown in one way; drop one")
    episodes = (WATCHED if shown else EPISODES) if episodes is None else coerce(episodes, COUNT, "episodes")
    fresh = time.time_ns() % 2**63 if seed is None else coerce(seed, SEED, "seed")
    found = find_policy(local_path(path), which)
    spec, version = read_policies(found)
    with lending() as lender, contextlib.ExitStack() as opened:
        opened.enter_context(reached(env if isinstance(env, str) else spec.env.env, say=say))
        args = {**spec.env.args, **(env_args or {})}
        name = lent(spec.env, env, args, lender)
        if shown and spec.env.agents is not None:
            raise UsageError(f"{first} shows environments of one agent, and {bare(name)!r} has several: leave it out")
        if shown:
            how: dict[str, Any] = {"seed": fresh, "sampler": EVALUATION_STREAM, "masked": spec.env.masked}
            watched = Watched(name, args, films=video, **how)
        count, masked = min(episodes, EvalConfig.envs), spec.env.masked
        envs = EnvArgs(name, count, fresh, args, parallel=parallel, masked=masked)
        if spec.env.agents is None:
            evaluator = Evaluator(spec, envs, vector=watched)
        else:
            evaluator = AgentsEvaluator(spec, replace(envs, ids=any(leaf.path == ID for leaf in spec.env.obs)))
        opened.callback(evaluator.close)
        evaluator.begin(version, episodes)
        seconds = TELL_AFTER
        while not (so_far := evaluator.advance(seconds)).over:
            if say is not None:
                say(f"evaluating: {len(so_far.returns)} of {episodes} episodes")
            seconds = min(60.0, 2 * seconds)
        if so_far.failure is not None:
            raise so_far.failure
        films = [] if watched is None or watched.films is None else watched.films.paths
        return Evaluated(so_far.returns, found, so_far.info, films)


def lent(spec: EnvSpec, env: str | Callable[..., Any] | None, args: dict[str, Any], lender: Lender) -> str:
    """The name of the environment to evaluate on, which is made with `args`; `spec` is that of the run."""
    if env is None and is_given(spec.env):
        lender.know(spec.env, load_object(spec.env))
    if env is None and args == spec.args:
        return spec.env
    name: str = spec.env if env is None else lender.name_of(env)
    found = probe(name, args)
    pairs = (("observations", found.obs, spec.obs), ("actions", (found.action,), (spec.action,)))
    differ = [f"its {what} are {_in_words(its)}, not {_in_words(own)}" for what, its, own in pairs if its != own]
    if differ:
        both = f"env {bare(name)!r} has other spaces than {bare(spec.env)!r}, which the policy was trained on"
        raise UsageError(f"{both}: {' and '.join(differ)}; evaluate on one whose spaces are equal")
    return name


def _in_words(leaves: Sequence[ObsLeaf | ActionSpec]) -> str:
    """`box (4,) float32`, `discrete 2`; several of them in brackets."""
    words = []
    for leaf in leaves:
        shape = " x ".join(map(str, leaf.sizes)) or f"{leaf.shape} {leaf.dtype}"
        ends = {*leaf.low} | {*leaf.high} if isinstance(leaf, ActionSpec) else set()
        limits = f" from {min(ends):g} to {max(ends):g}" if ends else ""
        words.append(f"{leaf.kind} {shape}{limits}")
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


@dataclass(frozen=True)
class Imported:
    """A run that was made of another library's checkpoint."""

    path: Path
    config: Config
    steps: int
    """Environment steps that it was trained for there."""
    episodes: int
    resumable: bool
    """Whether `resume` goes on with it; `train(start_from=…)` does in any case."""
    notes: Sequence[str]
    """What is not as it was, in a line each."""

    def policy(self) -> Policy:
        """Its policy, ready to act."""
        return load(self.path)


def import_rllib(
    path: str | Path, *, trust: bool = False, env: str | None = None, out: str | Path | None = None
) -> Imported:
    """Take over a checkpoint that RLlib 2.60 wrote without us, as a new run.

    `path` is the directory that `Algorithm.save_to_path` wrote, a `checkpoint_0000NN` of Tune, or that of an RLModule.
    It holds pickles, which can run any code: `trust` says that it is your own. They are read in a process of their
    own. `env` names the environment, where the checkpoint has one that only its script knows.
    """
    from raynforce.driver.adopting import adopt
    from raynforce.engines.rllib import importing

    directory = None if out is None else new_run(out)
    source = Path(path).expanduser()
    found = importing.read(source, trust=trust, env=env)
    if directory is None:
        directory = new_run(fresh_name(found.config), numbered=True)
    mean = found.episode_return
    adopt(
        directory,
        found.config,
        found.acting,
        found.version,
        steps=found.steps,
        episodes=found.episodes,
        metrics={} if mean is None else {"charts/episodic_return": mean},
        parts=found.parts,
        counts=found.counts,
        source=str(source.resolve()),
    )
    cannot = [f"resume cannot go on with it, because {found.unfit}; train --from can"] if found.unfit else []
    notes = (*found.notes, *cannot)
    return Imported(Path(directory.shown), found.config, found.steps, found.episodes, not found.unfit, notes)


def _not_while_imported() -> None:
    """A script that names its own functions is imported by name to find them, and must not start a run each time."""
    if importing:
        fix = "put what others need into a module of its own, or the start of the run under if __name__ == '__main__':"
        raise UsageError(f"module {importing[-1]!r} starts a run when it is imported: {fix}")


def _nested(dotted: Mapping[str, Any] | None, lender: Lender) -> dict[str, Any]:
    return nested({k: lender.name_of(v) if callable(v) else v for k, v in (dotted or {}).items()})


def _callback(given: Callback | OnRound) -> Callback:
    if isinstance(given, Callback):
        return given
    if not callable(given):
        raise UsageError(f"callback {given!r} is neither a raynforce.Callback nor a function")
    made = Callback()
    made.on_round = given  # type: ignore[method-assign, assignment]
    return made


def fresh_name(config: Config, seeds: str = "") -> Path:
    """A run directory under `runs/`; of several that begin in one second, all but one get a number behind it."""
    algo, env = (as_file_name(name) for name in (config.algo, config.env))
    return Path("runs") / f"{algo}-{env}-seed{seeds or config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def as_file_name(name: str) -> str:
    """Of `module:name`, and of `__main__:make.<locals>.Maze`, the last part says enough; of a simulator its name."""
    if is_simulator(name):
        return re.sub(r"[^\w.-]+", "", short_name(name)).partition(".")[0]
    last = bare(name).rpartition(":")[2].replace("/", "-")
    return re.sub(r"[^\w.-]+", "", last.rpartition(".")[2]) if is_given(name) else last
