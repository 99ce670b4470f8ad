"""Why the same seed and actions give another episode: state kept across episodes, or chance that no seed reaches.

An episode is played again in two new environments. If they agree, kept state is the cause, named by the attributes that
differ from the old environment. If not, it is chance: a global random stream, if they agree once that is seeded.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np

from raynforce.envs.describe import bits
from raynforce.envs.frames import layers
from raynforce.envs.make import Env, close_env
from raynforce.envs.snapshots import keepers

SHOWN = 3  # names, at most
_DEEP, _MANY = 3, 200  # levels and elements that are looked at: enough for running statistics, bounded for the rest
_STREAM = "random stream "
_LARGE = 1 << 20  # bytes of an array from which on its beginning stands for it
_OURS = {"env", "spec", "metadata", "observation_space", "action_space", "render_mode", "_np_random", "_np_random_seed"}
_OURS |= {"_cached_spec", "_saved_kwargs", "_metadata", "_observation_space", "_action_space", "_reward_range"}


class State(NamedTuple):
    data: Mapping[str, str]  # digests of all plain data, by name
    wrappers: frozenset[str]
    keepers: tuple[tuple[str, str], ...]  # wrappers that are known to keep something: what that is, and what to do


class Cause(NamedTuple):
    kind: Literal["past", "chance"]
    what: str
    fix: str


def find_cause(make: Callable[[], Env] | None, seed: int, actions: Sequence[Any], used: State) -> Cause | None:
    """Play an episode in new environments, if possible; `used` is the state of one with a past after the same reset."""
    if used.keepers:
        return Cause("past", *used.keepers[0])
    if make is None:
        return None
    play = partial(_play, make, seed, actions)
    try:
        (first, state, unseeded), (second, again, _) = play(), play()
        if first == second:
            return _past(used, dict(state.items() & again.items()))
        return _chance(play, state, again, unseeded)
    except (Exception, SystemExit):
        return None


def state_of(env: Env) -> State:
    """Plain data of an environment's layers, their classes and these classes' modules."""
    found: dict[str, str] = {}
    for name, value, deep in _held(env):
        with contextlib.suppress(Exception):  # it may be anything
            found.update(list(_digests(name, value, deep)))
    wrapped = frozenset(type(layer).__name__ for layer in layers(env) if isinstance(layer, gymnasium.Wrapper))
    return State(found, wrapped, keepers(env))


def _held(env: Env) -> Iterator[tuple[str, Any, int]]:
    """Name, value, and how deep to look, of all that the state of an environment may be in."""
    for layer in layers(env):
        for key, value in list(vars(layer).items()):
            if key not in _OURS:
                yield f"{type(layer).__name__}.{key.removeprefix('_')}", value, _DEEP
        for cls in type(layer).__mro__:
            if cls.__module__.partition(".")[0] in ("gymnasium", "builtins", "typing"):
                continue
            for key, value in list(vars(cls).items()):
                if key not in _OURS and not key.startswith("__"):
                    yield f"{cls.__name__}.{key} (of the class)", value, _DEEP
            for key, value in list(vars(sys.modules.get(cls.__module__, object)).items()):
                if isinstance(value, int | float | list | dict | np.random.Generator) and not key.startswith("__"):
                    yield f"{cls.__module__}.{key} (a global)", value, 1


Played = tuple[list[bytes], Mapping[str, str], bool]


def _play(make: Callable[[], Env], seed: int, actions: Sequence[Any]) -> Played:
    """What an episode shows in a new environment, its data after the reset, and whether that left its seed alone."""
    env = make()
    try:
        seen = [bits(env.reset(seed=seed)[0])]
        state, unseeded = state_of(env).data, getattr(env.unwrapped, "_np_random_seed", seed) != seed
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(action)
            seen.append(bits([obs, float(reward), bool(terminated), bool(truncated)]))
            if terminated or truncated:
                break
        return seen, state, unseeded
    finally:
        close_env(env)


def _past(used: State, fresh: Mapping[str, str]) -> Cause:
    """The cause is the attributes in which the used environment differs from new ones, or that these lack."""
    names = [name for name, digest in used.data.items() if name in fresh and digest != fresh[name]]
    names = names or [name for name in used.data if name not in fresh]
    if streams := _short([name for name in names if used.data[name].startswith(_STREAM)]):
        return Cause("past", f"{_listed(streams)} is a random stream that reset(seed) does not start again", _DRAW)
    names = _short(names)
    if any(name.partition(".")[0] in used.wrappers for name in names):
        return Cause("past", f"a wrapper keeps {_listed(names)}", _SAVE_WRAPPER)
    return Cause("past", f"reset leaves {_listed(names) or 'something'} as it is", _SET_BACK)


_SET_BACK = "set it in reset() from the seed and options alone, or save it: give the class save_state and load_state"
_NORMALIZE = "--set network.normalize_obs=true normalises observations, and is saved with the policy"
_SAVE_WRAPPER = f"give the wrapper save_state and load_state, or leave it out: {_NORMALIZE}"
_DRAW = "call super().reset(seed=seed) in reset() and draw all random numbers from self.np_random"


def _chance(play: Callable[[], Played], one: Mapping[str, str], other: Mapping[str, str], unseeded: bool) -> Cause:
    for stream, module in (("numpy's global np.random", np.random), ("Python's global random", random)):
        if _agree_if_seeded(module, play):
            return Cause("chance", f"it draws from {stream}, which reset(seed) does not seed", _DRAW)
    if shared := _short([name for name in one if name.endswith(")") and one[name] != other.get(name)]):
        return Cause("past", f"reset leaves {_listed(shared)} as it is, for all copies of it", _SET_BACK)
    if unseeded:
        return Cause("chance", "its reset does not pass the seed on to super().reset(seed=seed)", _DRAW)
    what = "it depends on what no seed reaches: a random stream of its own, the clock, a thread, another program"
    return Cause("chance", what, _DRAW)


def _agree_if_seeded(module: Any, play: Callable[[], Played]) -> bool:
    """Whether two new environments show the same once this global stream, numpy's or Python's, is seeded."""
    numpy = module is np.random
    before, shown = module.get_state() if numpy else module.getstate(), []
    try:
        for _ in range(2):
            module.seed(0)
            shown.append(play()[0])
        return shown[0] == shown[1]
    finally:
        (module.set_state if numpy else module.setstate)(before)


_NO_DATA = (types.ModuleType, gymnasium.Env, gymnasium.Space)


def _digests(name: str, value: Any, deep: int) -> Iterator[tuple[str, str]]:
    """Names and digests of the plain data in a value."""
    if isinstance(value, np.random.Generator):
        yield name, f"{_STREAM}{value.bit_generator.state}"
    elif isinstance(value, np.random.RandomState | random.Random):
        state: Any = value.get_state() if isinstance(value, np.random.RandomState) else value.getstate()
        yield name, _STREAM + hashlib.sha256(repr(state).encode()).hexdigest()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.ndarray):
        if not (isinstance(value, np.ndarray) and value.dtype.hasobject):
            if isinstance(value, np.ndarray) and value.nbytes > _LARGE:
                value = value.reshape(-1)[:_LARGE]
            yield name, hashlib.sha256(bits(value)).hexdigest()
    elif deep and isinstance(value, Mapping):
        pairs = [(repr(k), *_digests(name, below, deep - 1)) for k, below in list(value.items())[:_MANY]]
        yield name, f"{len(value)} {pairs}"
    elif deep and isinstance(value, list | tuple | set | frozenset | collections.deque):
        several = [digest for below in list(value)[:_MANY] for _, digest in _digests(name, below, deep - 1)]
        yield name, f"{len(value)} {several}"
    elif deep and hasattr(value, "__dict__") and not (callable(value) or isinstance(value, _NO_DATA)):
        for key, below in list(vars(value).items())[:_MANY]:
            yield from _digests(f"{name}.{key}", below, deep - 1)


def _short(names: list[str]) -> list[str]:
    """Without repetition, and `a.b` for all of `a.b.c`."""
    cut = []
    for name in names:
        head, bracket, tail = name.partition(" (")
        cut.append(".".join(head.split(".")[:2]) + bracket + tail if "(a global)" not in name else name)
    return list(dict.fromkeys(cut))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
