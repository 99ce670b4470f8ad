"""What `auto` goes by, measured on this machine and remembered, so that it decides the same way each time.

A step that costs about as much as a threshold would be above it today and below it tomorrow, and `doctor` and `train`
would disagree. So a measurement is compared with what was found before, and that stays unless the two differ by
`FAR`: less is what other programs on the machine make of it. An environment whose code, arguments or machine are
others is another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from raynforce.envs.cost import TRIAL_SECONDS, Cost, try_out
from raynforce.envs.frames import layers
from raynforce.envs.launching import is_simulator
from raynforce.envs.make import Env, locate, make_described, make_probed
from raynforce.envs.vector import as_lane
from raynforce.policies.acting import ActingSpec
from raynforce.policies.cost import PolicyCost, policy_cost
from raynforce.runs.disk import cache_folder
from raynforce.runs.provenance import provenance
from raynforce.spaces import EnvSpec

FAR = 2.0  # times as long
MOST = 256  # measurements that are kept: those used last

T = TypeVar("T", Cost, PolicyCost)


def cost_of_env(env: str, env_args: Mapping[str, Any] | None = None) -> tuple[EnvSpec, Cost]:
    """What an environment takes and gives, and what a step of it costs: what was found before, if that still holds."""
    if is_simulator(env):
        from raynforce.envs.simulator_vector import cost_of_simulator  # which brings the protocol along

        return cost_of_simulator(env, env_args)
    made, spec = make_probed(env, env_args)
    about = {"env": env, "args": dict(env_args or {}), "source": _source(env, made)}
    now = try_out(made)

    def again() -> Cost:
        with contextlib.suppress(Exception):  # some can be made only once
            return try_out(make_described(env, env_args)[0])
        return now

    spec = as_lane(spec)
    return spec, now if now.seconds is None else _settled("step", about, now, again, _cost)


def cost_of_acting(spec: ActingSpec, envs: int) -> PolicyCost | None:
    """What it costs to choose actions for so many environments: what was found before, if that still holds."""
    now = policy_cost(spec, envs)
    nobody = replace(spec.env, env="", args={})  # it costs the same whatever the environment is called
    about = {"acting": repr(replace(spec, env=nobody)), "envs": envs}
    return now and _settled("policy", about, now, lambda: policy_cost(spec, envs) or now, _policy_cost)


def _settled(kind: str, about: Mapping[str, Any], now: T, again: Callable[[], T], read: Callable[[Any], T]) -> T:
    """What stands from now on, and is remembered if there is a place for it."""
    versions = {name: value for name, value in provenance().items() if name != "host"}
    key = {"kind": kind, **about, "with": versions}
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=repr).encode()).hexdigest()[:32]
    try:
        path = cache_folder() / "measured" / f"{name}.json"
        before = _read(path, read)
        if before is None:
            return _kept(path, key, now, read, first=True)
        if _seconds(now) >= FAR * _seconds(before):  # nothing makes it faster than it is, but much makes it slower
            now = min(now, again(), key=_seconds)
        if not _alike(now, before):
            return _kept(path, key, now, read, first=False)
        with contextlib.suppress(OSError):
            os.utime(path)
        return before
    except (OSError, RuntimeError):  # no home, or a read-only or full one: nothing is remembered
        return now


def _seconds(cost: Cost | PolicyCost) -> float:
    """What two measurements are compared by; none waits longer for a step than `TRIAL_SECONDS`."""
    if isinstance(cost, PolicyCost):
        return cost.all
    return TRIAL_SECONDS if cost.seconds is None else min(TRIAL_SECONDS, cost.seconds)


def _alike(a: T, b: T) -> bool:
    shorter, longer = sorted((_seconds(a), _seconds(b)))
    computing = [0.0 if isinstance(cost, PolicyCost) else cost.computing or 0.0 for cost in (a, b)]
    return longer < FAR * shorter and abs(computing[0] - computing[1]) < 0.5


def _read(path: Path, read: Callable[[Any], T]) -> T | None:
    try:
        return read(json.loads(path.read_bytes())["found"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _cost(found: Any) -> Cost:
    """Undo `asdict`; a `ValueError` or `TypeError` if it is none."""
    seconds, mean, low, high = map(float, (found["seconds"], found["mean"], *found["spread"]))
    if not min(seconds, mean, low, high) > 0.0:
        raise ValueError("no time at all")
    computing = None if found["computing"] is None else float(found["computing"])
    return Cost(seconds=seconds, mean=mean, spread=(low, high), computing=computing, steps=int(found["steps"]))


def _policy_cost(found: Any) -> PolicyCost:
    cost = PolicyCost(float(found["one"]), float(found["all"]), int(found["envs"]))
    if not min(cost.one, cost.all, cost.envs) > 0:
        raise ValueError("no time at all")
    return cost


def _kept(path: Path, key: Mapping[str, Any], now: T, read: Callable[[Any], T], *, first: bool) -> T:
    """Remember it. Of several that are the first at once, one is, and the others go by what it has found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_native_id()}")
    try:
        new.write_text(json.dumps({"found": asdict(now), "of": key}, indent=1, default=repr))
        if first:
            with contextlib.suppress(OSError):  # also of file systems that have no links
                os.link(new, path)
                return now
            if (other := _read(path, read)) is not None:
                return other
        os.replace(new, path)
        return now
    finally:
        new.unlink(missing_ok=True)
        _forget(path.parent)


def _forget(folder: Path) -> None:
    ages: dict[str, float] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                ages[entry.path] = entry.stat().st_mtime
    for path in sorted(ages, key=lambda path: ages[path], reverse=True)[MOST:]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _source(env: str, made: Env) -> str:
    """A hash of the files with the classes of an environment, of those that they extend, and with its factory."""
    found = locate(env)
    modules = {cls.__module__ for layer in layers(made) for cls in type(layer).__mro__}
    modules |= set() if isinstance(found, str) else {getattr(found, "__module__", "")}
    digest = hashlib.sha256()
    paths = [getattr(sys.modules.get(name), "__file__", None) or "" for name in modules]
    for path in sorted(path for path in paths if path.endswith(".py")):
        with contextlib.suppress(OSError):
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:32]
