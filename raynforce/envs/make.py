"""Making one environment from what the user typed: a gymnasium id or `module:factory`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium

from raynforce.envs import wrappers
from raynforce.envs.describe import describe
from raynforce.envs.frames import stacks_of
from raynforce.envs.joined import STATE, EnvOfAgents, JoinedEnv, is_of_agents
from raynforce.envs.launching import command, is_simulator
from raynforce.envs.masked_agents import with_masks
from raynforce.envs.masks import has_mask
from raynforce.envs.patience import left, patience
from raynforce.envs.wrapped_agents import WrappedAgents
from raynforce.errors import EnvError, UsageError, nearest, summary
from raynforce.imports import is_given, load_module, load_object
from raynforce.spaces import Agents, EnvSpec

# A word in the message of a failed import, and what to install.
_EXTRAS = {
    "box2d": 'pip install "raynforce[box2d]"',
    "mujoco_py": 'pip install "gymnasium[mujoco-py]"',
    "mujoco": 'pip install "gymnasium[mujoco]"',
    "ale": 'pip install "raynforce[atari]"',
    "jax": 'pip install "gymnasium[jax]"',
    "pygame": 'pip install "gymnasium[classic-control]"',
}

Env = gymnasium.Env[Any, Any]
LOOK = 10.0  # seconds for the reset that shows whether there are masks: one that hangs is found by those who step it


def make(env: str, env_args: Mapping[str, Any] | None = None) -> Env:
    """Make `env`, a gymnasium id or `module:factory`, with `env_args`: keyword arguments, and `wrappers` around it."""
    args = dict(env_args or {})
    state = bool(args.pop(STATE, False))
    found = locate(env)
    around = {} if _takes(found, wrappers.KEY) else {k: args.pop(k) for k in (wrappers.KEY,) if k in args}
    if is_simulator(env):
        wrappers.require_none(env, around)
    made = _from_id(env, found, args) if isinstance(found, str) else _from_factory(env, found, args)
    with closed_on_error(made):
        if not isinstance(made, gymnasium.Env):
            seen = with_masks(env, made)
            return JoinedEnv(env, WrappedAgents(env, seen, around) if around else seen, args, state=state)
        return wrappers.wrap(env, made, around) if around else made


def _takes(found: str | Callable[..., Any], name: str) -> bool:
    """Whether a factory has a parameter of this name."""
    try:
        return not isinstance(found, str) and name in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


def make_described(env: str, env_args: Mapping[str, Any] | None = None, *, masked: bool = False) -> tuple[Env, EnvSpec]:
    """Make it and describe it; `masked` if it is known to say which actions are allowed."""
    made = make(env, env_args)
    with closed_on_error(made):
        stacks = stacks_of(made)
        agents = agents_of(made)
        masked = masked and agents is None  # masks of several agents are part of what they see
        spec = describe(env, made.observation_space, made.action_space, env_args, stacks, masked=masked)
        return made, spec if agents is None else replace(spec, agents=agents)


def agents_of(made: Env) -> Agents | None:
    """Who takes part in it, if several agents do."""
    return made.agents if isinstance(made, EnvOfAgents) else None


def make_probed(env: str, env_args: Mapping[str, Any] | None = None) -> tuple[Env, EnvSpec]:
    """Make it and describe it, with what its first reset tells: whether there are action masks in `info`."""
    made, spec = make_described(env, env_args)
    with closed_on_error(made):
        if not spec.masked and not is_simulator(env) and spec.action.kind != "box" and _tells_masks(made):
            spec = describe(env, made.observation_space, made.action_space, env_args, stacks_of(made), masked=True)
        return made, spec


def _tells_masks(made: Env) -> bool:
    try:
        with patience(min(LOOK, left() / 2), "its first reset"):
            return has_mask(made.reset(seed=0)[1])
    except (Exception, SystemExit):  # those who step it say it better
        return False


@contextlib.contextmanager
def closed_on_error(made: Any) -> Iterator[None]:
    """Close what was made if something is raised in here."""
    try:
        yield
    except BaseException:
        close_env(made)
        raise


def close_env(env: Any) -> None:
    """Close an environment; what that raises is ignored."""
    with contextlib.suppress(Exception, SystemExit):
        env.close()


def locate(env: str) -> str | Callable[..., Any]:
    """Find what `env` names, without calling it: the registered gymnasium id, the user's factory, or a simulator."""
    if is_simulator(env):
        from raynforce.envs.simulator_envs import SimulatorEnv  # it builds upon single environments, as this module

        command(env)
        return partial(SimulatorEnv, env)
    module, colon, name = env.partition(":")
    if not colon:
        return _registered(env)
    if module and name and not is_given(env):
        load_module(module)
        if name in gymnasium.registry:  # a package that registers its environments when imported
            return name
    factory = load_object(env)
    if not callable(factory):
        raise UsageError(f"env {env!r} is a {type(factory).__name__}; it must be a class or function returning an Env")
    return factory


def _registered(env: str) -> str:
    """The id that `env` stands for; a name without a version means the latest one."""
    if env.startswith("ALE/"):
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers the Atari games
    if env in gymnasium.registry:
        return env
    if latest := _latest(env):
        return latest
    base, version, _ = env.rpartition("-v")
    if version and (latest := _latest(base)):
        raise UsageError(f"env {env!r} is not registered: there is no such version (did you mean {latest!r}?)")
    if env.startswith("ALE/"):
        raise UsageError(f"env {env!r} is not registered: Atari games need {_EXTRAS['ale']}")
    if _is_module(env):
        raise UsageError(f"env {env!r} is a module: say what makes the environment, as in {env}:env")
    hint = nearest(env, gymnasium.registry) or "; see gymnasium.pprint_registry(), or give module:factory"
    raise UsageError(f"env {env!r} is not registered with gymnasium{hint}")


def _is_module(name: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return "." in name and importlib.util.find_spec(name) is not None
    return False


def _latest(name: str) -> str | None:
    versions = [(s.version or 0, i) for i, s in gymnasium.registry.items() if i.rpartition("-v")[0] == name]
    return max(versions)[1] if versions else None


def _from_id(env: str, name: str, args: dict[str, Any]) -> Env:
    try:
        return gymnasium.make(name, disable_env_checker=True, **args)
    except (ModuleNotFoundError, gymnasium.error.DependencyNotInstalled) as error:
        word = next((word for word in _EXTRAS if word in str(error).lower()), None)
        if word is None:
            raise UsageError(f"env {env!r} needs a package that is not installed: {summary(error)}") from error
        raise UsageError(f"env {env!r} needs {word}, which is not installed: {_EXTRAS[word]}") from error
    except TypeError as error:
        # gymnasium wraps the constructor's own complaint, which says it best.
        inner = error.__context__ if isinstance(error.__context__, TypeError) else error
        what = f"does not take env_args {args}" if "argument" in str(inner) else "could not be made"
        raise UsageError(f"env {env!r} {what}: {summary(inner)}") from error
    except Exception as error:
        raise UsageError(f"env {env!r} could not be made: {summary(error)}") from error


def _from_factory(env: str, factory: Callable[..., Any], args: dict[str, Any]) -> Any:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        pass  # some built-in callables have none: calling them tells
    else:
        try:
            signature.bind(**args)
        except TypeError as error:
            takes = ", ".join(signature.parameters) or "nothing"
            raise UsageError(f"env {env!r} does not take env_args {args}: {error}; it takes {takes}") from error
    try:
        made = factory(**args)
    except UsageError:  # one of ours, which says it all
        raise
    except EnvError as error:
        if is_simulator(env):
            raise UsageError(str(error)) from error
        raise UsageError(f"env {env!r} could not be made: the factory raised {summary(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"env {env!r} could not be made: the factory raised {summary(error)}") from error
    if not isinstance(made, gymnasium.Env) and not is_of_agents(made):
        kind = f"{type(made).__module__}.{type(made).__qualname__}"
        raise UsageError(f"env {env!r} returned a {kind}; the factory must return a gymnasium.Env, or PettingZoo's")
    return made
