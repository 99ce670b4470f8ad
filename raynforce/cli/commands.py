"""What each sub-command does with its parsed arguments."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from raynforce import settings
from raynforce.cli.parser import SETTINGS, WHERE
from raynforce.errors import UsageError, nearest
from raynforce.runs.progress import Output, number
from raynforce.runs.terminal import columns, command, folded

if TYPE_CHECKING:  # they import numpy: not for `--version`
    from raynforce.config import Config
    from raynforce.runs.directory import RunDirectory
    from raynforce.sinks import Service

SECONDS = Annotated[float, settings.Range(0.1, 1e6)]
AMOUNT = Annotated[float, settings.Range(0, 1e6)]
PORT = Annotated[int, settings.Range(0, 65535)]


def run(arguments: argparse.Namespace) -> int:
    if arguments.version:
        from raynforce import __version__

        print(__version__)
        return 0
    if arguments.command is None:
        raise UsageError("no command given; raynforce --help shows what there is")
    commands = {
        "train": train,
        "resume": resume,
        "eval": evaluate,
        "record": record,
        "runs": runs,
        "show": show,
        "watch": watch,
        "plot": plot,
        "report": report,
        "export-metrics": export_metrics,
        "doctor": doctor,
        "explain": explain,
        "sim": sim,
        "tune": tune,
        "import": import_,
        "submit": submit,
        "jobs": jobs,
        "cluster": cluster,
        "export": export,
        "pipeline": pipeline,
        "promote": promote,
        "rollback": rollback,
        "registry": registry,
        "serve": serve,
    }
    return commands[arguments.command](arguments)


def experiment(arguments: argparse.Namespace) -> tuple[Config, dict[str, Any]]:
    """The config that the arguments of `train` stand for, and the preset that was applied, dotted."""
    from raynforce.algos import BUILT_IN
    from raynforce.experiment import resolve

    _no_empty(arguments, "out", "config", "seeds")
    _sims(arguments)
    named = {"algo": arguments.algo, "env": arguments.env, "preset": "none" if arguments.no_preset else None}
    given = settings.nested({k: v for k, v in named.items() if v is not None} | _given(arguments))
    assigned = settings.parse_assignments(arguments.set)
    file = settings.read_yaml(arguments.config) if arguments.config else {}
    if arguments.algo and not arguments.env and "env" not in file | assigned:
        raise UsageError("train needs ALGO and ENV, such as: raynforce train ppo CartPole-v1")
    if arguments.env in BUILT_IN and arguments.algo not in BUILT_IN:
        raise UsageError(f"ALGO comes before ENV: raynforce train {arguments.env} {arguments.algo}")
    config, preset = resolve(file, assigned, given)
    if _asks_for_ray(arguments, config.runtime):
        config = replace(config, runtime="ray")
    if arguments.resume and arguments.out is None:
        raise UsageError("--resume goes on with the run at --out, and none is given: add --out DIR")
    return config, preset


def train(arguments: argparse.Namespace) -> int:
    config, preset = experiment(arguments)
    if arguments.print_config:
        print(_printed(config), end="")
        return 0
    if arguments.seeds is not None:
        from raynforce.cli import seeds

        return seeds.train(arguments, config, preset, _me())
    from raynforce.api import start
    from raynforce.sinks import services

    at: dict[str, Any] = {"out": arguments.out, "go_on": arguments.resume}
    return _train(arguments, lambda **how: start(config, preset, **at, **how), services(arguments.log))


def _printed(config: Config) -> str:
    """An experiment as what trains it would have it: settings, or a script for RLlib."""
    if config.engine != "rllib":
        return config.to_yaml(explain=True)
    from raynforce.engines.rllib.code import program
    from raynforce.engines.rllib.translation import translate
    from raynforce.envs.vector import probe

    found = translate(config, probe(config.env, config.env_args))
    if config.rllib:  # which RLlib alone can judge; the rest is ours, and printed without it
        from raynforce.engines import engine_class

        engine: Any = engine_class(config.engine)
        engine.require_taken(found, config)
    return program(found, config)


def resume(arguments: argparse.Namespace) -> int:
    from raynforce import api
    from raynforce.runs.directory import seeds_in
    from raynforce.runs.mirrored import open_run
    from raynforce.sinks import services

    changes = settings.dotted(settings.parse_assignments(arguments.set)) | _given(arguments)
    several = seeds_in(arguments.run)
    run = open_run(several[0] if several else arguments.run, all=True)
    before = settings.read_yaml(str(run.config))
    if _asks_for_ray(arguments, str(changes.get("runtime", before.get("runtime", "auto")))):
        changes["runtime"] = "ray"
    if several:
        from raynforce.cli import seeds

        return seeds.resume(arguments, changes, _me())
    return _train(arguments, lambda **how: api.resume(run, settings=changes, **how), services(arguments.log, run.path))


def _sims(arguments: argparse.Namespace) -> None:
    """`--sims WHERE` is an ENV; `--sims-key FILE` is what RAYNFORCE_KEY is."""
    from raynforce.envs.addresses import addresses, is_remote

    if arguments.sims_key:
        os.environ["RAYNFORCE_KEY"] = arguments.sims_key
    if arguments.sims is None:
        return
    if arguments.env:
        raise UsageError(f"--sims says where the simulators are, and ENV is {arguments.env!r}: drop one")
    if not is_remote(arguments.sims):
        raise UsageError(f"--sims {arguments.sims!r} is not one of: listen:ADDRESS, connect:ADDRESS,ADDRESS")
    addresses(arguments.sims)
    arguments.env = arguments.sims


def _asks_for_ray(arguments: argparse.Namespace, runtime: str) -> bool:
    """Whether there is an option that only Ray knows; refused if the run is to be elsewhere."""
    given = [o for o, setting in WHERE.items() if setting.startswith("ray.") and getattr(arguments, o) is not None]
    if given and runtime not in ("auto", "ray"):
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} is for Ray, and the runtime is {runtime}: add --runtime ray, or drop --{option}")
    return bool(given)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings, dotted, that options stand for."""
    _no_empty(arguments, *(name for name in SETTINGS if name not in ("steps", "seed")))  # whose own errors say more
    return {setting: v for option, setting in SETTINGS.items() if (v := getattr(arguments, option, None)) is not None}


def _no_empty(arguments: argparse.Namespace, *options: str) -> None:
    for option in options:
        if getattr(arguments, option, None) == "":  # an unset variable of the shell, most often
            raise UsageError(f"--{option.replace('_', '-')} is empty: give it a value, or leave it out")


def _train(arguments: argparse.Namespace, start: Any, sinks: Sequence[Service]) -> int:
    from raynforce.api import Interrupted
    from raynforce.cli.watch import page

    told: list[Any] = [*sinks]
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # the driver of a job
        from raynforce.ops.agent_metrics import AgentSink
        from raynforce.ops.draining import watch

        watch()
        told.append(AgentSink())
    stream = sys.stderr if arguments.json else sys.stdout
    code = 0
    how: dict[str, Any] = {"stream": stream, "progress": view(arguments), "began": _process_start(), "sinks": told}
    tell = Output(stream).write if stream is not None else len
    opened: list[str] = []
    how["opened"] = opened.append
    if arguments.record is not None:
        how["callbacks"] = [_filming(arguments)]
    if how["progress"] == "quiet":  # the path as it is, for a script to read
        how["opened"] = lambda path: tell(f"{path}\n")
    try:
        with page(arguments, how, tell):
            run = start(**how)
    except Interrupted as interrupted:
        run, code = interrupted.run, 128 + interrupted.number
    except Exception:
        for path in opened:
            tell(f"run: {path}\n")
        raise
    result = run.result
    if how["progress"] != "quiet":
        print(*_summary(run.config, result, run.where_the_time_went, columns(stream)), sep="\n", file=stream)
        for sink in sinks:
            if sink.url:
                print(f"  {sink.name}: {sink.url}", file=stream)
    if arguments.json:
        print(json.dumps(result.to_json()))
    return code


def _filming(arguments: argparse.Namespace) -> Any:
    from importlib.util import find_spec

    from raynforce.driver.filming import Filming

    if find_spec("av") is None:
        raise UsageError('--record needs PyAV, which is not installed: pip install "raynforce[video]"')
    return Filming(settings.coerce(arguments.record, settings.COUNT, "--record"))


def watch(arguments: argparse.Namespace) -> int:
    from raynforce.cli.watch import watch

    _no_empty(arguments, "port")
    port = None if arguments.port is None else settings.coerce(arguments.port, PORT, "--port")
    return watch(arguments.sources, port=port, browser=not arguments.no_browser, as_json=arguments.json)


def view(arguments: argparse.Namespace) -> str:
    """How progress is shown."""
    given: str | None = arguments.progress
    return "quiet" if arguments.quiet else given or os.environ.get("RAYNFORCE_PROGRESS") or "auto"


def _summary(config: Config, result: Any, time_block: str, most: int) -> Iterator[str]:
    """The block at the end of a run, in lines of so many columns."""
    from importlib.util import find_spec

    from raynforce.topologies.declaration import stepping

    target, parallel = config.target, stepping(config)
    faulty, missed = result.restarts or result.env_restarts, False
    yield ""
    if result.solved_steps is not None and target is not None:
        yield f"solved: an evaluation met the target of {target:g} after {result.solved_steps:,} steps"
    elif target is not None and result.stopped == "steps done":
        yield f"not solved: no evaluation reached the target of {target:g}"
    else:
        words = {"steps done": "finished: all steps are done", "SIGINT": "stopped by Ctrl-C"}
        yield from folded(words.get(result.stopped, f"stopped: {result.stopped}"), most, further="  ")
    speed = f", {result.steps_per_second:,.0f} steps/s" if result.steps_per_second else ""
    yield f"trained: {result.steps:,} steps and {result.updates:,} updates; here {result.seconds:.1f} s{speed}"
    yield from _nothing_learned(config, result, most)
    if result.eval_return is not None:
        yield f"best policy: {number(result.eval_return)} mean return on fresh greedy episodes"
        missed = target is not None and result.solved_steps is not None and result.eval_return < target
        if missed:
            yield "  that is below the target: few episodes met it by chance, more training may help"
    if not result.episodes and result.steps:
        yield "no episode has ended: returns are not known, and nothing says whether it has learned"
    if skipped := result.skipped_evaluations:
        told = f"evaluations: {skipped:,} of {result.evaluations + skipped:,} that were due have no outcome: "
        failed = not result.evaluations and result.env_restarts
        late = "evaluating took longer than training on, or failed (--set eval.every=N spreads them)"
        told += f"environments failed in each, `{_me()} doctor` tells how" if failed else late
        yield from folded(told, most, further="  ")
    if result.recycled:
        cut = f", {result.recycle_cuts:,} episodes cut" if result.recycle_cuts else ""
        yield f"recycled: {result.recycled:,} simulator process{'es' * (result.recycled != 1)}{cut}"
    if faulty:
        yield _faults(result)
    if time_block:
        yield from ("", time_block)
    run = shlex.quote(result.run)
    yield from ("", f"run: {result.run}", "", "what to type next:")
    typed = []
    if result.stopped.startswith("SIG"):
        typed.append(f"{_me()} resume {run}")
    elif result.solved_steps is None:
        typed.append(f"{_me()} resume {run} --steps {2 * result.steps}")
    elif missed:
        typed.append(f"{_me()} resume {run} --target none --steps {2 * result.steps}")
    typed += [f"{_me()} doctor {run}"] if faulty else []
    typed.append(f"{_me()} eval {run}" + f" --parallel {parallel}" * (parallel != "no"))
    typed += ["pip install tensorboard"] if find_spec("tensorboard") is None else []
    typed.append(f"tensorboard --logdir {run}")
    for line in typed:
        yield from command(line, most, "  ")


def _nothing_learned(config: Config, result: Any, most: int) -> list[str]:
    """Why a run that learns from replay has made no update, if it has made none."""
    starts = getattr(config.algorithm, "learning_starts", None) if config.engine == "native" else None
    if starts is None or result.updates or not result.steps:
        return []
    so_few = f"nothing was learned: so few steps lead to no update (algorithm.learning_starts = {starts:,})"
    return folded(f"{so_few}: raise --steps, or lower it", most, further="  ")


def _faults(result: Any) -> str:
    counts = {"role": result.restarts, "environment": result.env_restarts}
    which = " and ".join(f"{n:,} restart{'s' * (n != 1)} of {what}s" for what, n in counts.items() if n)
    return f"faults: {which}" + (f", {result.lost_steps:,} steps lost" if result.lost_steps else ", no step lost")


def evaluate(arguments: argparse.Namespace) -> int:
    from raynforce import api, infos

    _no_empty(arguments, "video", "env")
    _sims(arguments)
    if arguments.video:  # pygame, which most environments draw with, complains of a display and speakers otherwise
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    episodes = None if arguments.episodes is None else settings.coerce(arguments.episodes, settings.COUNT, "--episodes")
    seed = None if arguments.seed is None else settings.coerce(arguments.seed, settings.SEED, "--seed")
    how: dict[str, Any] = {name: getattr(arguments, name) for name in ("env", "parallel", "video", "render")}
    how |= {"env_args": _env_args("eval", arguments.set), "which": arguments.checkpoint}
    say = functools.partial(print, file=sys.stderr, flush=True)
    found = api.evaluate(arguments.run, episodes=episodes, seed=seed, say=say, **how)
    returns, path = found
    told = infos.means(found.info)
    facts = {
        "run": arguments.run,
        "checkpoint": str(path),
        **({"env": arguments.env} if arguments.env else {}),
        "episodes": len(returns),
    }
    figures = {"mean": returns.mean(), "deviation": returns.std(), "min": returns.min(), "max": returns.max()}
    facts |= {name: float(figure) for name, figure in figures.items()}
    if arguments.json:
        more = {"info": told, "videos": [str(film) for film in found.videos]}
        print(json.dumps(facts | {name: value for name, value in more.items() if value}))
    else:
        mean, deviation, low, high = map(number, figures.values())
        spread = f"deviation {deviation}, from {low} to {high}"
        where = f" on {arguments.env}" if arguments.env else ""
        line = f"{path}: mean return {mean} over {len(returns)} greedy episodes{where} ({spread})"
        print(*folded(line, columns(sys.stdout), further="  "), sep="\n")
        if told:
            values = ", ".join(f"{name} {number(mean)}" for name, mean in told.items())
            print(*folded(f"info: {values}", columns(sys.stdout), further="  "), sep="\n")
        for film, value in zip(found.videos, returns.tolist(), strict=False):
            print(f"film: {film} (return {number(value)})")
    return 0


def record(arguments: argparse.Namespace) -> int:
    from raynforce.cli.record import tell

    _no_empty(arguments, "out", "policy", "episodes", "steps", "seed")
    kinds = {"episodes": settings.COUNT, "steps": settings.STEPS, "seed": settings.SEED}
    given = {name: getattr(arguments, name) for name in kinds}
    how = {name: settings.coerce(v, kinds[name], f"--{name}") for name, v in given.items() if v is not None}
    how |= {name: getattr(arguments, name) for name in ("out", "sampled", "policy", "format", "parallel")}
    how |= {"env_args": _env_args("record", arguments.set), "which": arguments.checkpoint}
    return tell(arguments.source, **how, me=_me(), as_json=arguments.json)


def runs(arguments: argparse.Namespace) -> int:
    from raynforce.cli.runs import tell

    return tell(arguments.folder, me=_me(), as_json=arguments.json)


def show(arguments: argparse.Namespace) -> int:
    from raynforce.cli.show import tell
    from raynforce.runs.catalog import is_registry

    if is_registry(Path(arguments.run)):
        from raynforce.cli.pipeline import tell_registry

        return tell_registry(arguments.run, as_json=arguments.json)
    return tell(arguments.run, me=_me(), verify=arguments.verify, as_json=arguments.json)


def plot(arguments: argparse.Namespace) -> int:
    from raynforce.cli.charts import plot

    _no_empty(arguments, "out", "metric", "target")
    target = None if arguments.target is None else settings.coerce(arguments.target, float, "--target")
    return plot(arguments, target)


def report(arguments: argparse.Namespace) -> int:
    from raynforce.cli.charts import report

    _no_empty(arguments, "out")
    return report(arguments)


def export_metrics(arguments: argparse.Namespace) -> int:
    from raynforce.cli.charts import export_metrics

    _no_empty(arguments, "out")
    return export_metrics(arguments)


def sim(arguments: argparse.Namespace) -> int:
    from raynforce.cli.sim import check, keys, new

    if arguments.action not in ("new", "check", "keys"):
        hint = nearest(arguments.action, ("new", "check", "keys"))
        known = "raynforce sim new DIR, sim check COMMAND, or sim keys DIR"
        raise UsageError(f"unknown action {arguments.action!r}{hint}: {known}")
    if arguments.action == "new":
        return new(arguments.target, me=_me())
    if arguments.action == "keys":
        return keys(arguments.target, me=_me())
    return check(arguments.target, as_json=arguments.json)


def tune(arguments: argparse.Namespace) -> int:
    from raynforce.cli.tune import tell

    return tell(arguments, tune_settings(arguments), _me())


def tune_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments of `tune` say of all runs, dotted."""
    from raynforce.algos import BUILT_IN

    _no_empty(arguments, "out", "config", "seeds", "resume", "scheduler", "objective", "address")
    if arguments.env in BUILT_IN and arguments.algo not in BUILT_IN:
        raise UsageError(f"ALGO comes before ENV: raynforce tune {arguments.env} {arguments.algo}")
    where = ("ray.address", "runtime")
    given = {name: value for name, value in _given(arguments).items() if name not in where}
    given = settings.dotted(settings.parse_assignments(arguments.set)) | given
    if arguments.no_preset:
        given["preset"] = "none"
    return given


def import_(arguments: argparse.Namespace) -> int:
    from raynforce.cli.importing import tell

    if arguments.what != "rllib":
        hint = nearest(arguments.what, ("rllib",))
        raise UsageError(f"unknown source {arguments.what!r}{hint}: raynforce import rllib DIR --trust")
    how = {"env": arguments.env, "out": arguments.out, "trust": arguments.trust}
    return tell(arguments.folder, **how, me=_me(), as_json=arguments.json)


def explain(arguments: argparse.Namespace) -> int:
    from raynforce.cli.explain import tell

    return tell(arguments.topic, width=columns(sys.stdout), as_json=arguments.json)


def submit(arguments: argparse.Namespace) -> int:
    from raynforce.cli.jobs import submit

    _no_empty(arguments, "runs", "id", "address", "python", "working_dir")
    how: dict[str, Any] = {name: getattr(arguments, name) for name in ("runs", "id", "env", "python", "working_dir")}
    amounts = {"cpus": AMOUNT, "gpus": AMOUNT, "grace": settings.COUNT}
    given = {name: getattr(arguments, name) for name in amounts}
    how |= {name: settings.coerce(v, amounts[name], f"--{name}") for name, v in given.items() if v is not None}
    as_json = arguments.json or "--json" in arguments.words
    return submit(arguments.words, address=arguments.address, me=_me(), as_json=as_json, detach=arguments.detach, **how)


def jobs(arguments: argparse.Namespace) -> int:
    from raynforce.cli.jobs import ACTIONS, act

    if arguments.action not in ACTIONS:
        known = ", ".join(ACTIONS)
        hint = nearest(arguments.action, ACTIONS)
        raise UsageError(f"unknown action {arguments.action!r}{hint}: raynforce jobs does one of {known}")
    if (arguments.id is None) != (arguments.action == "list"):
        needs = f"{arguments.action} needs the id of a job" if arguments.id is None else "list takes no id"
        raise UsageError(f"jobs {needs}: raynforce jobs lists them")
    _no_empty(arguments, "address", "id")
    timeout = None if arguments.timeout is None else settings.coerce(arguments.timeout, SECONDS, "--timeout")
    how: dict[str, Any] = {"follow": arguments.follow, "timeout": timeout, "as_json": arguments.json}
    return act(arguments.action, arguments.id, address=arguments.address, me=_me(), **how)


def cluster(arguments: argparse.Namespace) -> int:
    from raynforce.cli.cluster import run

    return run(arguments, me=_me())


def export(arguments: argparse.Namespace) -> int:
    from raynforce.cli.export import tell

    _no_empty(arguments, "to")
    return tell(arguments.run, arguments.to, arguments.folder, which=arguments.checkpoint, as_json=arguments.json)


def pipeline(arguments: argparse.Namespace) -> int:
    from raynforce.cli.pipeline import run

    _no_empty(arguments, "from", "dir")
    how: dict[str, Any] = {"start_at": arguments.__dict__["from"], "dry_run": arguments.dry_run, "dir": arguments.dir}
    return run(arguments.file, **how, quiet=arguments.quiet, as_json=arguments.json, me=_me())


def promote(arguments: argparse.Namespace) -> int:
    from raynforce.cli.pipeline import promote

    _no_empty(arguments, "to", "name")
    kinds = {"episodes": Annotated[int, settings.Range(2, 1_000_000)], "seed": settings.SEED}
    kinds["level"] = Annotated[float, settings.Range(1e-6, 0.5)]
    given = {name: getattr(arguments, name) for name in kinds}
    how = {name: settings.coerce(v, kinds[name], f"--{name}") for name, v in given.items() if v is not None}
    how |= {"name": arguments.name, "which": arguments.checkpoint, "force": arguments.force}
    return promote(arguments.run, arguments.to, as_json=arguments.json, **how)


def rollback(arguments: argparse.Namespace) -> int:
    from raynforce.cli.pipeline import rollback

    _no_empty(arguments, "to")
    return rollback(arguments.registry, arguments.to, as_json=arguments.json)


def registry(arguments: argparse.Namespace) -> int:
    from raynforce.cli.pipeline import tell_registry

    return tell_registry(arguments.registry, as_json=arguments.json)


def serve(arguments: argparse.Namespace) -> int:
    from raynforce.cli.serve import run

    _no_empty(arguments, "run", "host", "token", "address")
    return run(arguments)


def doctor(arguments: argparse.Namespace) -> int:
    run = None if arguments.env is None else _as_run(arguments.env)
    if run is not None:
        return _doctor_of_run(arguments, run)
    for option in ("replay", "debugger", "before", "seconds"):
        if getattr(arguments, option) not in (None, False):
            raise UsageError(f"--{option} is for a run: {_me()} doctor RUN --replay [N]")
    algorithm = arguments.env is not None and _is_algorithm(arguments.env)
    if arguments.on is not None and not algorithm:
        raise UsageError(f"a second argument is for an algorithm, and {arguments.env!r} is none: leave it out")
    if arguments.steps is not None and (arguments.env is None or algorithm):
        raise UsageError(f"--steps is for an environment: {_me()} doctor ENV --steps N")
    how: list[str] = []
    if arguments.env is None:
        from raynforce.cli.machine import check_machine

        report = check_machine()
    elif algorithm:
        from raynforce.checkup import check_algorithm

        report = check_algorithm(arguments.env, arguments.on, settings.parse_assignments(arguments.set))
    else:
        from raynforce.cli.advice import how_to_run
        from raynforce.envs.addresses import reached
        from raynforce.envs.doctor import check_env

        env_args = _env_args("doctor", arguments.set)
        steps = None if arguments.steps is None else settings.coerce(arguments.steps, settings.STEPS, "--steps")
        with reached(arguments.env):
            report = check_env(arguments.env, env_args, steps=steps)
            how = how_to_run(report, env_args, me=_me())
    from raynforce.cli.findings import tell

    return tell(report, how, as_json=arguments.json)


def _env_args(command: str, assigned: Sequence[str]) -> dict[str, Any]:
    """The environment's arguments, which are all that `--set` gives these commands."""
    extra = settings.parse_assignments(assigned)
    wrong = sorted(set(extra) - {"env_args"})
    if wrong:
        also = "; another environment is --env ENV" if command == "eval" and wrong[0] == "env" else ""
        raise UsageError(f"{command} takes --set env_args.KEY=VALUE only, not {wrong[0]!r}{also}")
    found: dict[str, Any] = settings.coerce(extra.get("env_args", {}), dict[str, Any], "env_args")
    return found


def _is_algorithm(text: str) -> bool:
    """Whether it is the name of an algorithm; else it is an environment's."""
    from raynforce.algos import BUILT_IN
    from raynforce.algos.base import Algorithm
    from raynforce.imports import load_object

    if text in BUILT_IN:
        return True
    try:
        found = load_object(text) if ":" in text else None
    except UsageError:
        return False  # `my_arms:Arm-v3` is an id; and of a name that leads nowhere the other doctor tells
    return isinstance(found, type) and issubclass(found, Algorithm)


def _as_run(text: str) -> RunDirectory | None:
    """The run that a path stands for; None if it is the name of an environment."""
    from raynforce.envs.launching import is_simulator
    from raynforce.runs.directory import RunDirectory
    from raynforce.runs.mirrored import open_run
    from raynforce.runs.store import is_url

    if is_url(text):
        return open_run(text)
    path = Path(text)
    if path.is_dir() and (path / "config.yaml").is_file():
        return RunDirectory(path)
    program = Path(text.split()[0]) if text.split() else path
    if is_simulator(text) and program.is_file():
        return None
    typed_as_path = text.startswith(("/", "./", "../", "~")) or text in (".", "..")
    if ":" in text or not (typed_as_path or path.exists() or ("/" in text and path.parent.is_dir())):
        return None  # `ALE/Pong-v5` has a slash too
    if not typed_as_path:
        import gymnasium

        if text in gymnasium.registry:
            return None
    return RunDirectory.open(path)  # which says what is wrong with it


def _doctor_of_run(arguments: argparse.Namespace, run: RunDirectory) -> int:
    if arguments.set or arguments.steps is not None:
        own = ", which has its own settings" if arguments.set else ""
        option = "set" if arguments.set else "steps"
        raise UsageError(f"--{option} is for an environment, and {run.shown} is a run{own}")
    if arguments.replay is None:
        for option in ("debugger", "before", "seconds"):
            if getattr(arguments, option) not in (None, False):
                raise UsageError(f"--{option} goes with --replay")
        from raynforce.cli.history import tell

        return tell(run, me=_me(), as_json=arguments.json)
    from raynforce.cli.replay import replay

    wanted = settings.coerce(arguments.replay, settings.COUNT, "--replay") if arguments.replay else None
    seconds = 30.0 if arguments.seconds is None else settings.coerce(arguments.seconds, SECONDS, "--seconds")
    debugger = arguments.debugger or (not arguments.json and sys.stdin is not None and sys.stdin.isatty())
    how: dict[str, Any] = {"debugger": debugger, "before": arguments.before, "as_json": arguments.json}
    return replay(run, wanted, seconds=seconds, **how)


def _me() -> str:
    """How this command was called, so that what we print can be typed."""
    name = os.path.relpath(sys.argv[0]) if os.path.isabs(sys.argv[0]) else sys.argv[0]
    if os.path.basename(name) == "__main__.py":
        return "python -m raynforce"
    from shutil import which

    found = which("raynforce")
    return "raynforce" if found and os.path.realpath(found) == os.path.realpath(sys.argv[0]) else name


def _process_start() -> float:
    """When this process began, on the monotonic clock: start-up time includes the imports before us."""
    now = time.monotonic()
    try:
        with open("/proc/self/stat") as file:
            ticks = float(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return now - age if 0 <= age < 3600 else now
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return now
