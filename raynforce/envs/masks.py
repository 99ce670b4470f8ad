"""Masks of allowed actions: the leaf `action_mask` of an observation, or `info["action_mask"]`; read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from raynforce.errors import UsageError
from raynforce.spaces import MASK, ActionSpec, Agents, EnvSpec, ObsLeaf, action_slices, leaf_name

KEY = "action_mask"  # in `info`, and in a `Dict` of observations


def mask_leaf(action: ActionSpec) -> ObsLeaf:
    return ObsLeaf(MASK, "multibinary", (sum(action.sizes),), "int8")


def require_mask(env: str, where: str, shape: Sequence[int], dtype: Any, action: ActionSpec) -> None:
    """Refuse a declared mask that does not fit the action space."""
    name, choices = f"env {env!r} has an action mask in {where}", sum(action.sizes)
    if action.kind == "box":
        raise UsageError(f"{name}, and its actions are continuous: masks are for discrete ones; drop or rename it")
    if tuple(shape) != (choices,):
        each = f" ({' + '.join(map(str, action.sizes))})" if len(action.sizes) > 1 else ""
        raise UsageError(f"{name} of shape {tuple(shape)}: expected ({choices},), a flag for each choice{each}")
    if np.dtype(dtype).kind not in "biu":
        raise UsageError(f"{name} of dtype {np.dtype(dtype)}: expected bool or integers, as MultiBinary({choices})")


def require_leaves(env: str, obs: Sequence[ObsLeaf], action: ActionSpec) -> None:
    """Refuse what a simulator declares, if it has a mask that does not fit or nothing else."""
    for leaf in obs:
        if leaf.path == MASK:
            require_mask(env, f"the leaf {MASK!r}", leaf.shape, leaf.dtype, action)
            if leaf.kind != "multibinary" or leaf.dtype not in ("uint8", "int8"):
                found = f"{leaf.kind!r} and {leaf.dtype}"
                raise UsageError(f"env {env!r} has {MASK!r} of {found}: expected 'multibinary' and uint8 or int8")
    if all(leaf.path == MASK for leaf in obs):
        raise UsageError(f"env {env!r} has no observation beside its action mask: a policy needs something to go by")


def require_declared(env: str, obs: Sequence[ObsLeaf], action: ActionSpec, agents: Agents | None) -> None:
    """The same of a simulator with several agents: of what each kind of them sees and does."""
    if agents is None:
        require_leaves(env, obs, action)
        return
    for kind in agents.kinds:
        require_leaves(f"{env} ({agents.names[kind.agents[0]]})", kind.obs, kind.action)


def has_mask(info: Any) -> bool:
    return isinstance(info, Mapping) and info.get(KEY) is not None


def found(obs: Any, info: Any) -> Any:
    """The mask that comes with an observation, None if there is none."""
    if has_mask(obs):
        return obs[KEY]
    return info[KEY] if has_mask(info) else None


def misfit(value: Any, choices: int) -> str:
    """Why a value is no mask of so many choices, or nothing."""
    try:
        mask = np.asarray(value)
    except Exception:  # it may be anything
        return f"is a {type(value).__name__}; expected an array of {choices} flags"
    if mask.shape != (choices,):
        return f"has shape {mask.shape}; expected ({choices},), a flag for each choice"
    if mask.dtype.kind not in "biu":
        return f"has dtype {mask.dtype}; expected bool or integers"
    return not_flags(mask)


def not_flags(mask: np.ndarray) -> str:
    if mask.dtype.kind != "b" and ((mask < 0) | (mask > 1)).any():
        return f"is {mask.tolist()}; expected 0 (forbidden) or 1 (allowed) for each choice"
    return ""


def random_action(space: spaces.Space[Any], mask: Any = None) -> Any:
    """An action of the space, one of those that a mask allows."""
    if mask is None or isinstance(space, spaces.Box):
        return space.sample()
    flags = np.asarray(mask).astype(np.int8)
    if isinstance(space, spaces.Discrete):
        return space.sample(mask=flags)
    shape = space.shape or ()
    sizes = space.nvec.reshape(-1) if isinstance(space, spaces.MultiDiscrete) else np.full(int(np.prod(shape)), 2)
    start = space.start.reshape(-1) if isinstance(space, spaces.MultiDiscrete) else 0
    parts = np.split(flags, np.cumsum(sizes)[:-1])
    chosen = [space.np_random.choice(np.flatnonzero(part)) for part in parts]
    return (np.array(chosen) + start).reshape(shape).astype(space.dtype)


def random_actions(
    action: ActionSpec, count: int, rng: np.random.Generator, masks: np.ndarray | None = None
) -> np.ndarray:
    """Actions `[count, ...]`, of those that `masks` `[count, n]` allow."""
    if action.kind == "box":
        low, high = (np.array(b).reshape(action.shape) for b in (action.low, action.high))
        low, high = np.where(np.isfinite(low), low, -1), np.where(np.isfinite(high), high, 1)
        return rng.uniform(low, high, (count, *action.shape))
    start = np.array(action.start or (0,) * len(action.sizes)).reshape(action.shape)
    if masks is not None:
        parts = np.split(np.where(masks, rng.random(masks.shape), -1.0), np.cumsum(action.sizes)[:-1], axis=1)
        return start + np.stack([part.argmax(axis=1) for part in parts], axis=1).reshape(count, *action.shape)
    return start + rng.integers(0, np.array(action.sizes).reshape(action.shape), (count, *action.shape))


def random_of(spec: EnvSpec, obs: Mapping[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Actions for all that see `obs`, `[N, ...]` by path, of those that their masks allow; also of several agents."""
    count = len(next(iter(obs.values())))
    if spec.agents is None:
        return random_actions(spec.action, count, rng, obs.get(MASK)).astype(spec.action.dtype)
    actions = np.zeros((count, *spec.action.shape), spec.action.dtype)
    slices = action_slices(spec.agents)
    for k, kind in enumerate(spec.agents.kinds):
        masks = next((obs[f"obs/{leaf_name(k, i)}"] for i, leaf in enumerate(kind.obs) if leaf.path == MASK), None)
        for row, agent in enumerate(kind.agents):
            chosen = random_actions(kind.action, count, rng, None if masks is None else masks[:, row] != 0)
            actions[:, slices[agent]] = chosen.reshape(count, -1)
    return actions
