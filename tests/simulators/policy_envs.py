"""Environments with all kinds of spaces that a policy in C++ has to read."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Spaces(gymnasium.Env[Any, Any]):
    def __init__(self, kind: str) -> None:
        seen: dict[str, spaces.Space[Any]] = {
            "vector": spaces.Box(-9, 9, (5,)),
            "colour": spaces.Box(0, 255, (20, 16, 3), np.uint8),
            "planes": spaces.Box(0, 255, (3, 12, 12), np.uint8),
            "gray": spaces.Box(0, 255, (11, 13), np.uint8),
            "choice": spaces.Discrete(4, start=-2),
            "choices": spaces.MultiDiscrete([3, 5]),
            "flags": spaces.MultiBinary(6),
            "bytes": spaces.Box(0, 255, (7,), np.uint8),
            "whole": spaces.Box(-100, 100, (2, 3), np.int16),
        }
        found = {"all": spaces.Dict(seen), "nested": spaces.Dict({"a": spaces.Dict({"b": seen["vector"]})})}
        done: dict[str, spaces.Space[Any]] = {
            "all": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1000.0], np.float32)),
            "planes": spaces.MultiDiscrete([3, 4], start=[1, -1]),
            "vector": spaces.Box(-np.inf, np.inf, (3,)),
            "nested": spaces.Discrete(5, start=10),
        }
        self.observation_space = found.get(kind) or seen[kind]
        self.action_space = done.get(kind) or spaces.Discrete(3)
