"""Frame stacking: the newest frames of an episode as one observation, so that a policy sees what moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from raynforce.envs.describe import leaf_spaces, short
from raynforce.errors import UsageError
from raynforce.spaces import CHANNELS, channels_last

Env = gymnasium.Env[Any, Any]
MOST = 255  # frames in a stack


def stacked(env: str, frames: int = 4, args: Mapping[str, Any] | None = None, render_mode: str | None = None) -> Env:
    """The environment `env` (an id or `module:factory`, made with `args`) with its newest `frames` images stacked."""
    from raynforce.envs.make import closed_on_error, make  # which asks this module what is stacked

    made = make(env, {**(args or {}), **({"render_mode": render_mode} if render_mode else {})})
    with closed_on_error(made):
        return FrameStack(made, frames)


class FrameStack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Every image of an observation becomes its newest `frames`, `[frames * channels, height, width]`, the newest last.

    An image is a uint8 `Box` of `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1, 3 or 4 channels, alone or in a `Dict`; all
    else stays as it is. Without images, every `Box` of one dimension becomes its newest `frames`, `[frames * n]`. An
    episode begins with repeats of its first frame. Running episodes can be saved through it.
    """

    def __init__(self, env: Env, frames: int = 4) -> None:
        super().__init__(env)
        if type(frames) is not int or not 1 <= frames <= MOST:
            raise UsageError(f"frame stack: frames = {frames} is not allowed; it is a whole number from 1 to {MOST}")
        self.frames = frames
        self.stacks: dict[str, np.ndarray] = {}  # what is shown now, by path; not written to again
        boxes = _boxes(env.observation_space)
        self.paths = [path for path, box in boxes.items() if box.dtype == np.uint8 and _is_image(box.shape)]
        self.paths = self.paths or [path for path, box in boxes.items() if len(box.shape) == 1]
        if not self.paths:
            found = f"frame stack: the observation has no image and no vector but is {short(env.observation_space)}"
            raise UsageError(f"{found}; an image is a uint8 Box of HxW, HxWxC or CxHxW with 1, 3 or 4 channels")
        self.observation_space = self._stacked("obs", env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self.stacks = {}
        return self._push("obs", obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._push("obs", obs), reward, terminated, truncated, info

    def _stacked(self, path: str, space: spaces.Space[Any]) -> spaces.Space[Any]:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: self._stacked(f"{path}/{key}", below) for key, below in space.spaces.items()})
        if path not in self.paths or not isinstance(space, spaces.Box):
            return space
        low, high = (np.concatenate([_frame(bound)] * self.frames) for bound in (space.low, space.high))
        kind: Any = space.dtype
        return spaces.Box(low, high, low.shape, kind)

    def _push(self, path: str, obs: Any) -> Any:
        if path in self.paths:
            frame = _frame(np.asarray(obs))  # [C, H, W] or [n]
            before = self.stacks.get(path)
            parts = [frame] * self.frames if before is None else [before[len(frame) :], frame]
            self.stacks[path] = np.concatenate(parts)
            return self.stacks[path]
        if isinstance(obs, Mapping):
            return {key: self._push(f"{path}/{key}", below) for key, below in obs.items()}
        return obs


def stacks_of(env: Env) -> dict[str, int]:
    """Frames of each leaf that `FrameStack` or `FrameStackObservation` stacks, if no wrapper changed its shape."""
    seen = _boxes(env.observation_space)
    for layer in layers(env):
        given = _boxes(layer.observation_space)
        if isinstance(layer, FrameStack):
            frames, paths = layer.frames, layer.paths
        elif isinstance(layer, FrameStackObservation):
            frames, paths = int(layer.stack_size), list(given)
        else:
            continue
        same = [path for path in paths if path in seen and given[path].shape == seen[path].shape]
        return {path: frames for path in same if 1 < frames <= MOST}
    return {}


def layers(env: Env) -> Iterator[Any]:
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def _boxes(space: spaces.Space[Any]) -> dict[str, spaces.Box]:
    return {path: leaf for path, leaf in leaf_spaces("", space) if isinstance(leaf, spaces.Box)}


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2 if channels_last(shape) else 0] in CHANNELS)


def _frame(image: np.ndarray) -> np.ndarray:
    """An image as `[C, H, W]`, a vector as it is."""
    if image.ndim == 1:
        return image
    if image.ndim == 2:
        return image[None]
    return image.transpose(2, 0, 1) if channels_last(image.shape) else image
