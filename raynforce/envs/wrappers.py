"""Wrappers by name: `env_args.wrappers` lists what a single environment is wrapped in, the first one innermost."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces

from raynforce.envs.describe import leaf_spaces
from raynforce.envs.frames import FrameStack
from raynforce.errors import UsageError, nearest, summary
from raynforce.imports import load_object

Env = gymnasium.Env[Any, Any]
KEY = "wrappers"
SETTING = f"env_args.{KEY}"
FORM = 'a list of names, such as ["ClipReward", {"FrameStack": {"frames": 4}}, "my_module:Wrapper"]'
TRAINING_ONLY = "training_only"  # an attribute of a wrapper's class that says so
# What a run does itself, or what its promises do not survive.
REFUSED = {
    "Autoreset": "lanes reset themselves when an episode ends: leave it out",
    "NormalizeObservation": "use --set network.normalize_obs=true, which is saved with the policy",
    "NormalizeReward": "use --set learner.scale_rewards=true, which all samplers share and a resume keeps",
    "RecordVideo": "use raynforce eval RUN --video DIR",
}


class SkipObservation(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Leave entries of a `Dict` observation out; `inner/key` is one of a `Dict` in it."""

    def __init__(self, env: Env, keys: Sequence[str]) -> None:
        super().__init__(env)
        self._keys = [keys] if isinstance(keys, str) else list(keys)
        found = [path.removeprefix("obs/") for path, _ in leaf_spaces("", env.observation_space)]
        for key in self._keys:
            if not any(path == key or path.startswith(f"{key}/") for path in found):
                has = ", ".join(found)
                raise UsageError(
                    f"SkipObservation: the observation has no {key!r}{nearest(str(key), found)}: it has {has}"
                )
        self.observation_space = self._without(env.observation_space)

    def observation(self, observation: Any) -> Any:
        return self._without(observation)

    def _without(self, tree: Any, path: str = "") -> Any:
        below = tree.spaces if isinstance(tree, spaces.Dict) else tree
        if not isinstance(below, Mapping):
            return tree
        kept = {k: self._without(v, f"{path}{k}/") for k, v in below.items() if f"{path}{k}" not in self._keys}
        return spaces.Dict(kept) if isinstance(tree, spaces.Dict) else kept


OWN: dict[str, type[Any]] = {"FrameStack": FrameStack, "SkipObservation": SkipObservation}


class Wanted(NamedTuple):
    name: str
    args: Mapping[str, Any]


def wanted(args: Mapping[str, Any]) -> list[Wanted]:
    """What `env_args.wrappers` lists, each a name, or a mapping of one name to its keyword arguments."""
    given = args.get(KEY) or []
    if isinstance(given, str | Mapping):
        given = [given]
    if not isinstance(given, Sequence):
        raise UsageError(f"{SETTING} = {given!r} must be {FORM}")
    return [_one(each) for each in given]


def _one(each: Any) -> Wanted:
    if isinstance(each, str):
        return Wanted(each, {})
    if isinstance(each, Mapping) and len(each) == 1:
        ((name, args),) = each.items()
        if isinstance(name, str) and (args is None or isinstance(args, Mapping)):
            return Wanted(name, dict(args or {}))
    raise UsageError(f"{SETTING} has {each!r}, which is neither a name nor one name with its arguments; it is {FORM}")


def named() -> dict[str, type[Any]]:
    """The wrappers that need no module: gymnasium's for single environments, and ours."""
    found = {name: kind for name, kind in vars(gymnasium.wrappers).items() if name not in REFUSED}
    wraps = {
        name: kind for name, kind in found.items() if inspect.isclass(kind) and issubclass(kind, gymnasium.Wrapper)
    }
    return wraps | OWN


def _kind(name: str) -> type[Any]:
    if name in REFUSED:
        raise UsageError(f"{SETTING}: {name} is not taken: {REFUSED[name]}")
    if ":" in name:
        kind = load_object(name, SETTING)
        if not callable(kind):
            raise UsageError(
                f"{SETTING}: {name!r} is a {type(kind).__name__}; it must be a subclass of gymnasium.Wrapper"
            )
        found: type[Any] = kind
        return found
    known = named()
    if name not in known:
        hint = nearest(name, known) or "; it is one of gymnasium.wrappers, FrameStack, SkipObservation, or module:Class"
        raise UsageError(f"{SETTING}: there is no wrapper {name!r}{hint}")
    return known[name]


def wrap(env: str, made: Env, args: Mapping[str, Any]) -> Env:
    """`made` in the wrappers that `args` list."""
    for name, given in wanted(args):
        kind = _kind(name)
        try:
            inspect.signature(kind).bind(made, **given)
        except TypeError as error:
            taken = [*inspect.signature(kind).parameters]
            if not taken:
                problem = f"{name} takes no environment"
                raise UsageError(f"{SETTING}: {problem}; it must be a subclass of gymnasium.Wrapper") from None
            takes = ", ".join(taken[1:]) or "nothing"
            raise UsageError(f"{SETTING}: {name} does not take {dict(given)}: {error}; it takes {takes}") from None
        except ValueError:
            pass  # some callables have no signature: calling them tells
        try:
            made = kind(made, **given)
        except UsageError as error:
            raise UsageError(f"{SETTING}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UsageError(f"{SETTING}: {name} cannot wrap env {env!r}: it raised {summary(error)}") from error
        if not isinstance(made, gymnasium.Env):
            raise UsageError(f"{SETTING}: {name} returned a {type(made).__name__}; it must return a gymnasium.Env")
    return made


def require_none(env: str, args: Mapping[str, Any]) -> None:
    """Refuse wrappers of a simulator, which steps many environments at once."""
    if args.get(KEY):
        what = f"{SETTING} = {args[KEY]!r} is not for simulators, such as {env!r}"
        raise UsageError(f"{what}: leave it out, and do there what they would")


def for_evaluation(args: Mapping[str, Any]) -> dict[str, Any]:
    """`args` without wrappers that are for training alone, so that returns are the environment's own.

    Those are gymnasium's `RewardWrapper`, what derives from it, and classes with `training_only = True`.
    """
    if not args.get(KEY):
        return dict(args)
    kept = [{name: dict(given)} for name, given in wanted(args) if not _is_for_training(_kind(name))]
    return {k: v for k, v in args.items() if k != KEY} | ({KEY: kept} if kept else {})


def _is_for_training(kind: Any) -> bool:
    own = getattr(kind, TRAINING_ONLY, None)
    return bool(own) if own is not None else inspect.isclass(kind) and issubclass(kind, gymnasium.RewardWrapper)
