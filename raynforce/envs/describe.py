"""From gymnasium spaces to `raynforce.spaces`, the plain data that the rest works with; and whether a value fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from raynforce.envs.masks import mask_leaf, require_leaves, require_mask
from raynforce.errors import UsageError, summary
from raynforce.spaces import MASK, ActionSpec, EnvSpec, ObsLeaf

Space = spaces.Space[Any]
Args = Mapping[str, Any] | None
_OBS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
_FLAGS = (bool, np.bool_, int, np.integer)
_NUMBERS = (float, np.floating, np.integer, np.bool_)
_LARGEST = 1 << 1023  # what a float can hold
_ACTION = "Discrete, MultiDiscrete, MultiBinary and Box of floats"


def describe(
    env: str,
    obs_space: Space,
    action_space: Space,
    env_args: Args = None,
    stacks: Mapping[str, int] | None = None,
    *,
    masked: bool = False,
) -> EnvSpec:
    """An environment's spaces as data; `stacks` says by path how many frames an observation has.

    The leaf `action_mask` is a mask of allowed actions; `masked` if there is one anyway, then it comes in `info`.
    Leaves that no network reads are left out, unless there are no others.
    """
    frames, action = stacks or {}, action_spec(env, action_space)
    found = dict(leaf_spaces(env, obs_space))
    without = unread(obs_space)
    leaves = []
    for path, space in ({path: space for path, space in found.items() if path not in without} or found).items():
        leaf = _obs_leaf(env, path, space, frames.get(path, 1))
        if path == MASK:
            require_mask(env, f"the leaf {MASK!r}", leaf.shape, space.dtype, action)
            leaf = mask_leaf(action)
        leaves.append(leaf)
    if masked and all(leaf.path != MASK for leaf in leaves):
        leaves.append(mask_leaf(action))
    if not any(math.prod(leaf.shape) for leaf in leaves):
        raise UsageError(f"env {env!r} has an empty observation space {short(obs_space)}; allowed: {_OBS}")
    require_leaves(env, leaves, action)
    return EnvSpec(env=env, obs=tuple(leaves), action=action, args=dict(env_args or {}))


def unread(obs_space: Space) -> list[str]:
    """The leaves of a `Dict` or `Tuple` that no network reads, such as a `Text`: nothing learns from them."""
    readable = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return [path for path, space in leaf_spaces("", obs_space) if not isinstance(space, readable)]


def unread_note(env: str, obs_space: Space) -> str:
    """A line on the leaves that are skipped; empty if there are none."""
    if not (skipped := unread(obs_space)):
        return ""
    names = ", ".join(path.removeprefix("obs/") for path in skipped)
    return f"{names} of env {env!r} {'is' if len(skipped) == 1 else 'are'} skipped: no network reads such a space"


def leaf_spaces(env: str, space: Space, path: str = "obs") -> Iterator[tuple[str, Space]]:
    """The path and space of each array of an observation, in the order of the space."""
    if isinstance(space, spaces.Dict):
        for key, below in space.spaces.items():
            if not isinstance(key, str) or not key or "/" in key:
                fix = "keys must be text without '/': rename it"
                raise UsageError(f"env {env!r} has the observation key {key!r}; {fix}")
            yield from leaf_spaces(env, below, f"{path}/{key}")
    elif isinstance(space, spaces.Tuple):
        for index, below in enumerate(space.spaces):
            yield from leaf_spaces(env, below, f"{path}/{index}")
    else:
        yield path, space


def _obs_leaf(env: str, path: str, space: Space, frames: int) -> ObsLeaf:
    if isinstance(space, spaces.Box):
        # Fragments and networks work in float32; integers (images above all) stay as small as they are.
        shape, kind = tuple(space.shape), np.dtype(space.dtype).kind
        if kind == "b":  # flags: 0 and 1 are not shades of an image
            return ObsLeaf(path, "multibinary", shape, "uint8")
        whole = len(shape) > 0 and shape[0] % frames == 0
        return ObsLeaf(path, "box", shape, "float32" if kind == "f" else str(space.dtype), stack=frames if whole else 1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return ObsLeaf(path, *_choices(space))
    if isinstance(space, spaces.MultiBinary):
        return ObsLeaf(path, "multibinary", tuple(space.shape), "int8")
    found = f"env {env!r} has the observation space {short(space)} at {path!r}"
    raise UsageError(f"{found}; allowed: {_OBS}; use a wrapper")


def action_spec(env: str, space: Space) -> ActionSpec:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return ActionSpec(*_choices(space))
    if isinstance(space, spaces.MultiBinary):
        count = int(np.prod(space.shape))
        return ActionSpec("multidiscrete", tuple(space.shape), "int64", sizes=(2,) * count, start=(0,) * count)
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        low, high = (tuple(float(x) for x in bound.reshape(-1)) for bound in (space.low, space.high))
        return ActionSpec("box", tuple(space.shape), "float32", low=low, high=high)
    raise UsageError(f"env {env!r} has the action space {short(space)}; allowed: {_ACTION}; use a wrapper")


def _choices(space: spaces.Discrete | spaces.MultiDiscrete) -> tuple[Any, tuple[int, ...], str, Any, Any]:
    """Kind, shape, dtype, sizes and start."""
    if isinstance(space, spaces.Discrete):
        return "discrete", (), "int64", (int(space.n),), (int(space.start),)
    sizes, start = (tuple(int(x) for x in array.reshape(-1)) for array in (space.nvec, space.start))
    return "multidiscrete", tuple(space.shape), "int64", sizes, start


def flatten_obs(obs: Any, leaves: Sequence[ObsLeaf]) -> dict[str, Any]:
    """The values of an observation (one, or a batch) by path, in the order of `leaves`."""
    if leaves[0].path == "obs":
        return {"obs": obs}
    values = {}
    for leaf in leaves:
        value = obs
        for key in leaf.path.split("/")[1:]:
            try:
                value = value[int(key) if isinstance(value, tuple | list) else key]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                has = f"keys {list(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
                raise UsageError(f"the observation lacks {leaf.path!r}: {key!r} was looked for in {has}") from error
        values[leaf.path] = value
    return values


def in_range(value: np.ndarray, leaf: ObsLeaf) -> bool:
    """Whether each element of a discrete or multidiscrete leaf is one of its declared values."""
    if leaf.kind == "discrete":
        return leaf.start[0] <= int(value) < leaf.start[0] + leaf.sizes[0]
    index = value.reshape(-1) - np.array(leaf.start)
    return bool(np.all((index >= 0) & (index < np.array(leaf.sizes))))


def short(value: Any) -> str:
    """A value's `repr` in one line of bearable length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def bits(value: Any) -> bytes:
    """Equal for what is equal to the bit, NaN included: of arrays, and of mappings and sequences of them."""
    if isinstance(value, Mapping):
        return b"{" + b",".join(repr(key).encode() + bits(value[key]) for key in value) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(bits, value)) + b"]"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return repr(value).encode()


def misfit(value: Any, leaf: ObsLeaf) -> str:
    """Why a value does not fit its leaf (what came and what was expected), or an empty string when it does."""
    try:
        array = np.asarray(value)
    except ValueError:
        return f"{leaf.path!r} is a ragged {type(value).__name__}; expected an array of shape {leaf.shape}"
    except Exception as error:  # a tensor that has a gradient, or is on a GPU
        return f"{leaf.path!r} is a {type(value).__name__} that is no array: {summary(error)}"
    if array.dtype.kind not in "biuf":
        return f"{leaf.path!r} is a {type(value).__name__}; expected {leaf.dtype} of shape {leaf.shape}"
    if array.shape != leaf.shape:
        return f"{leaf.path!r} has shape {array.shape}; expected {leaf.shape}"
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        return f"{leaf.path!r} has dtype {array.dtype}; expected {leaf.dtype}"
    if leaf.sizes and not in_range(array, leaf):
        last = [a + n - 1 for a, n in zip(leaf.start, leaf.sizes, strict=True)]
        return f"{leaf.path!r} is {short(array.tolist())}; expected integers from {list(leaf.start)} to {last}"
    return ""


def is_scalar(reward: Any) -> bool:
    """Whether a reward is one number (also NaN or infinite, which are found elsewhere)."""
    if isinstance(reward, _NUMBERS):
        return True
    if isinstance(reward, int):
        return -_LARGEST < reward < _LARGEST
    return isinstance(reward, np.ndarray) and reward.ndim == 0 and reward.dtype.kind in "biuf"


def is_flag(value: Any) -> bool:
    """Whether `terminated` or `truncated` can be read as a truth value without doubt."""
    return isinstance(value, _FLAGS) or (isinstance(value, np.ndarray) and value.shape == ())


def wrong_reset(result: Any) -> str:
    """What is wrong with the form of what `reset` returned, or nothing."""
    right = isinstance(result, tuple) and len(result) == 2
    return "" if right else f"reset returned {_form(result)}; expected (obs, info)"


def wrong_step(result: Any) -> str:
    """What is wrong with the form of what `step` returned but for its observation, or nothing."""
    if not isinstance(result, tuple) or len(result) != 5:
        return f"step returned {_form(result)}; expected (obs, reward, terminated, truncated, info)"
    _, reward, terminated, truncated, _ = result
    if not is_scalar(reward):
        return f"the reward is {short(reward)} ({type(reward).__name__}); expected one number"
    if not (is_flag(terminated) and is_flag(truncated)):
        return f"terminated and truncated are {short(terminated)} and {short(truncated)}; expected True or False"
    return ""


def _form(result: Any) -> str:
    if not isinstance(result, tuple):
        return f"a {type(result).__name__}"
    return f"{len(result)} values{' (the old gym interface)' if len(result) == 4 else ''}"
