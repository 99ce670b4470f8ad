"""What each sub-command does with its parsed arguments."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from raynforce import settings
from raynforce.cli.options import SETTINGS, WHERE
from raynforce.errors import UsageError, nearest
from raynforce.runs.progress import Output, number
from raynforce.runs.terminal import columns, folded

if TYPE_CHECKING:  # they import numpy: not for `--version`
    from raynforce.config import Config
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
        filming = _filming(arguments)
        how["callbacks"] = [filming]
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
    if arguments.record is not None and filming.failed:
        tell(f"no more films (--record): {filming.failed}\n")
    if how["progress"] != "quiet":
        from raynforce.cli.summary import summary

        print(*summary(run.config, result, run.where_the_time_went, columns(stream), _me()), sep="\n", file=stream)
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
    how |= {"env_args": env_args("eval", arguments.set), "which": arguments.checkpoint}
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
    how |= {"env_args": env_args("record", arguments.set), "which": arguments.checkpoint}
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
    from raynforce.cli.doctor import doctor

    return doctor(arguments, me=_me())


def env_args(command: str, assigned: Sequence[str]) -> dict[str, Any]:
    """The environment's arguments, which are all that `--set` gives these commands."""
    extra = settings.parse_assignments(assigned)
    wrong = sorted(set(extra) - {"env_args"})
    if wrong:
        also = "; another environment is --env ENV" if command == "eval" and wrong[0] == "env" else ""
        raise UsageError(f"{command} takes --set env_args.KEY=VALUE only, not {wrong[0]!r}{also}")
    found: dict[str, Any] = settings.coerce(extra.get("env_args", {}), dict[str, Any], "env_args")
    return found


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
