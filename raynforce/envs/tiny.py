"""Tiny environments whose best return is known, for learning tests and examples: `raynforce.envs.tiny:Identity`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Info = dict[str, Any]


class _Match(gymnasium.Env[Any, Any]):
    """Each step shows something new and pays `score(action)` for matching it; ends after `length` steps."""

    truncates = False  # whether these end it by truncation

    def __init__(self, length: int = 1) -> None:
        self.length = length

    def draw(self) -> Any:
        raise NotImplementedError

    def score(self, action: Any) -> float:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self.steps, self.shown = 0, self.draw()
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        reward = self.score(action)
        self.steps, self.shown = self.steps + 1, self.draw()
        over = self.steps >= self.length
        return self.shown, reward, over and not self.truncates, over and self.truncates, {}


class Identity(_Match):
    """Say the number that is shown: 1 for each right answer, so the best return is `length`."""

    def __init__(self, n: int = 4, length: int = 1) -> None:
        super().__init__(length)
        self.observation_space = self.action_space = spaces.Discrete(n)
        self.n = n

    def draw(self) -> int:
        return int(self.np_random.integers(self.n))

    def score(self, action: int) -> float:
        return float(action == self.shown)


class IdentityBox(_Match):
    """Say the vector that is shown: minus the squared distance for each step, so the best return is 0."""

    def __init__(self, size: int = 1, length: int = 1) -> None:
        super().__init__(length)
        self.observation_space = self.action_space = spaces.Box(-1.0, 1.0, (size,))

    def draw(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, self.observation_space.shape).astype(np.float32)

    def score(self, action: Any) -> float:
        return -float(np.sum((action - self.shown) ** 2))


class Largest(IdentityBox):
    """Say which of the numbers that are shown is the largest: 1 if right; the best return is `length`."""

    def __init__(self, n: int = 4, length: int = 1) -> None:
        super().__init__(n, length)
        self.action_space = spaces.Discrete(n)

    def score(self, action: Any) -> float:
        return float(action == np.argmax(self.shown))


class MultiIdentity(_Match):
    """Say all the numbers that are shown: the fraction that is right for each step; the best return is `length`."""

    def __init__(self, sizes: tuple[int, ...] = (2, 3), length: int = 1) -> None:
        super().__init__(length)
        self.observation_space = self.action_space = spaces.MultiDiscrete(list(sizes))
        self.sizes = sizes

    def draw(self) -> np.ndarray:
        return self.np_random.integers(self.sizes)

    def score(self, action: np.ndarray) -> float:
        return float(np.mean(action == self.shown))


class DictIdentity(_Match):
    """`Identity` whose number comes in a `Dict` beside noise that means nothing; the best return is `length`."""

    def __init__(self, n: int = 4, length: int = 1) -> None:
        super().__init__(length)
        self.observation_space = spaces.Dict(noise=spaces.Box(-1.0, 1.0, (3,)), target=spaces.Discrete(n))
        self.action_space = spaces.Discrete(n)
        self.n = n

    def draw(self) -> Info:
        noise = self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)
        return {"noise": noise, "target": int(self.np_random.integers(self.n))}

    def score(self, action: int) -> float:
        return float(action == self.shown["target"])


class Corridor(gymnasium.Env[int, int]):
    """Walk right (1) `n` steps: -0.01 each, 1 at the goal, at best `1 - 0.01 * (n - 1)`; truncated after `10 * n`."""

    def __init__(self, n: int = 8) -> None:
        self.observation_space, self.action_space = spaces.Discrete(n + 1), spaces.Discrete(2)
        self.n = n

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        super().reset(seed=seed)
        self.place = self.steps = 0
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, Info]:
        self.steps += 1
        self.place = max(0, self.place + (1 if action == 1 else -1))
        there = self.place == self.n
        return self.place, 1.0 if there else -0.01, there, not there and self.steps >= 10 * self.n, {}


class Endless(_Match):
    """1 for each step whatever is done, cut off after `length` steps but never over: its value is `1 / (1 - gamma)`."""

    truncates = True

    def __init__(self, length: int = 10) -> None:
        super().__init__(length)
        self.observation_space, self.action_space = spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2)

    def draw(self) -> np.ndarray:
        return np.ones(1, np.float32)

    def score(self, action: int) -> float:
        return 1.0


class Catch(gymnasium.Env[np.ndarray, int]):
    """A ball falls diagonally through an image, a row a step; hold the net left (0) or right (1) of it: 1 for a catch.

    One image does not show which way the ball goes, so on one the mean return is `length / 2`, as at random; on two it
    is `length - 0.5`, because the first net is a guess. An image is uint8 `[length + 1, width, 1]`, the ball 255.
    """

    def __init__(self, length: int = 8, width: int = 8) -> None:
        if length < 1 or width < 3:
            raise ValueError(f"length {length} and width {width} are not allowed: at least 1 and 3 are")
        self.observation_space = spaces.Box(0, 255, (length + 1, width, 1), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.length, self.width = length, width

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self.steps = 0
        self.column, way = (int(x) for x in self.np_random.integers((self.width, 2)))
        self.drift = 1 if way else -1
        return self._image(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Info]:
        self.steps += 1
        self.column = (self.column + self.drift) % self.width
        caught = (1 if action == 1 else -1) == self.drift
        return self._image(), float(caught), self.steps >= self.length, False, {}

    def _image(self) -> np.ndarray:
        image = np.zeros((self.length + 1, self.width, 1), np.uint8)
        image[self.steps, self.column] = 255
        return image


class MaskedGrid(gymnasium.Env[Any, Any]):
    """Walk from a random place to the far corner of a grid, which walls cross: at best -0.01 a step and 1 at the goal.

    Moves (right, down, left, up, and `idle` more that lead nowhere) into a wall or out of the grid are forbidden by
    `action_mask`, in `info` or, if `masks` is `"obs"`, in the observation; the env raises on one. With `"none"` they
    are allowed and change nothing. Truncated after `10 * n` steps.
    """

    MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))

    def __init__(self, n: int = 5, idle: int = 4, masks: str = "info") -> None:
        if masks not in ("info", "obs", "none"):
            raise ValueError(f"masks {masks!r} is not allowed: 'info', 'obs' and 'none' are")
        if n < 3 or n % 2 == 0:
            raise ValueError(f"n {n} is not allowed: odd numbers from 3 on are")
        self.n, self.masks = n, masks
        self.choices = len(self.MOVES) + idle
        self.action_space = spaces.Discrete(self.choices)
        place: spaces.Space[Any] = spaces.Box(0.0, 1.0, (2,))
        flags = spaces.MultiBinary(self.choices)
        self.observation_space = spaces.Dict(place=place, action_mask=flags) if masks == "obs" else place
        self.free = np.ones((n, n), bool)
        for column in range(1, n, 2):  # a wall in every second column, with a gap at one end
            self.free[:, column] = False
            self.free[-1 if column % 4 == 1 else 0, column] = True

    def mask(self) -> np.ndarray:
        flags = np.zeros(self.choices, np.int8)
        for action, (down, right) in enumerate(self.MOVES):
            row, column = self.place[0] + down, self.place[1] + right
            flags[action] = 0 <= row < self.n and 0 <= column < self.n and self.free[row, column]
        return flags

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        free = np.argwhere(self.free)[:-1]  # without the goal
        self.place, self.steps = free[int(self.np_random.integers(len(free)))], 0
        return self._seen()

    def step(self, action: int) -> tuple[Any, float, bool, bool, Info]:
        if self.mask()[action]:
            self.place = self.place + self.MOVES[action]
        elif self.masks != "none":
            raise ValueError(f"action {action} is forbidden at {self.place.tolist()}")
        self.steps += 1
        there = bool((self.place == self.n - 1).all())
        seen, info = self._seen()
        return seen, 1.0 if there else -0.01, there, not there and self.steps >= 10 * self.n, info

    def _seen(self) -> tuple[Any, Info]:
        place = (self.place / (self.n - 1)).astype(np.float32)
        if self.masks == "obs":
            return {"place": place, "action_mask": self.mask()}, {}
        return place, {"action_mask": self.mask()} if self.masks == "info" else {}


class Recall(gymnasium.Env[int, int]):
    """A number is shown in the first step alone; say it in the last one, after `length` steps: 1 if right.

    Without memory the mean return is `1 / n` at best. It shows `cue + 1` at first and 0 after that.
    """

    def __init__(self, n: int = 2, length: int = 4) -> None:
        if n < 2 or length < 2:
            raise ValueError(f"n {n} and length {length} are not allowed: at least 2 are")
        self.observation_space, self.action_space = spaces.Discrete(n + 1), spaces.Discrete(n)
        self.n, self.length = n, length

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        super().reset(seed=seed)
        self.steps, self.cue = 0, int(self.np_random.integers(self.n))
        return self.cue + 1, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, Info]:
        self.steps += 1
        over = self.steps >= self.length
        return 0, float(over and action == self.cue), over, False, {}


def blind_cartpole(env: str = "CartPole-v1") -> gymnasium.Env[Any, Any]:
    """CartPole without velocities: two observations in a row tell them, one does not."""
    made = gymnasium.make(env)
    low, high = (bound[[0, 2]] for bound in (made.observation_space.low, made.observation_space.high))  # type: ignore[attr-defined]
    space = spaces.Box(low, high, dtype=np.float32)
    return gymnasium.wrappers.TransformObservation(made, lambda obs: obs[[0, 2]], space)
