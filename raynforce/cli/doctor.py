"""`raynforce doctor`: which of the doctors a name is for, that of environments, algorithms, runs or machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from raynforce import settings
from raynforce.errors import UsageError

if TYPE_CHECKING:
    from raynforce.runs.directory import RunDirectory

SECONDS = Annotated[float, settings.Range(0.1, 1e6)]


def doctor(arguments: argparse.Namespace, *, me: str) -> int:
    """Check what was named; without a name, this machine."""
    run = None if arguments.env is None else _as_run(arguments.env)
    if run is not None:
        return _of_run(arguments, run, me)
    for option in ("replay", "debugger", "before", "seconds"):
        if getattr(arguments, option) not in (None, False):
            raise UsageError(f"--{option} is for a run: {me} doctor RUN --replay [N]")
    algorithm = arguments.env is not None and _is_algorithm(arguments.env)
    if arguments.on is not None and not algorithm:
        raise UsageError(f"a second argument is for an algorithm, and {arguments.env!r} is none: leave it out")
    if arguments.steps is not None and (arguments.env is None or algorithm):
        raise UsageError(f"--steps is for an environment: {me} doctor ENV --steps N")
    how: list[str] = []
    if arguments.env is None:
        from raynforce.cli.machine import check_machine

        report = check_machine()
    elif algorithm:
        from raynforce.checkup import check_algorithm

        report = check_algorithm(arguments.env, arguments.on, settings.parse_assignments(arguments.set))
    else:
        from raynforce.cli.advice import how_to_run
        from raynforce.cli.commands import env_args
        from raynforce.envs.addresses import reached
        from raynforce.envs.doctor import check_env

        given = env_args("doctor", arguments.set)
        steps = None if arguments.steps is None else settings.coerce(arguments.steps, settings.STEPS, "--steps")
        with reached(arguments.env):
            report = check_env(arguments.env, given, steps=steps)
            how = how_to_run(report, given, me=me)
    from raynforce.cli.findings import tell

    return tell(report, how, as_json=arguments.json)


def _of_run(arguments: argparse.Namespace, run: RunDirectory, me: str) -> int:
    if arguments.set or arguments.steps is not None:
        own = ", which has its own settings" if arguments.set else ""
        option = "set" if arguments.set else "steps"
        raise UsageError(f"--{option} is for an environment, and {run.shown} is a run{own}")
    if arguments.replay is None:
        for option in ("debugger", "before", "seconds"):
            if getattr(arguments, option) not in (None, False):
                raise UsageError(f"--{option} goes with --replay")
        from raynforce.cli.history import tell

        return tell(run, me=me, as_json=arguments.json)
    from raynforce.cli.replay import replay

    wanted = settings.coerce(arguments.replay, settings.COUNT, "--replay") if arguments.replay else None
    seconds = 30.0 if arguments.seconds is None else settings.coerce(arguments.seconds, SECONDS, "--seconds")
    debugger = arguments.debugger or (not arguments.json and sys.stdin is not None and sys.stdin.isatty())
    how: dict[str, Any] = {"debugger": debugger, "before": arguments.before, "as_json": arguments.json}
    return replay(run, wanted, seconds=seconds, **how)


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
