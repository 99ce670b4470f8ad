"""Any environment, slowed down: to try what is made for slow simulators, `--topology central`, without having one."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import gymnasium

from raynforce.envs.make import make
from raynforce.errors import UsageError

Env = gymnasium.Env[Any, Any]


def slowed(env: str = "CartPole-v1", milliseconds: float = 5.0, args: Mapping[str, Any] | None = None) -> Env:
    """The environment `env` (an id or `module:factory`, made with `args`), whose steps take so long on average."""
    if not 0 <= milliseconds < 1e6:
        raise UsageError(f"slowed: milliseconds = {milliseconds} is not allowed; it is a number from 0 to 1e6")
    return Slow(make(env, args), milliseconds)


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Each step waits first, from 0 to twice `milliseconds`; running episodes of the env inside can be saved."""

    def __init__(self, env: Env, milliseconds: float = 5.0) -> None:
        super().__init__(env)
        self.milliseconds = milliseconds

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(random.uniform(0.0, 2.0 * self.milliseconds) / 1000)  # no draw from the episode's own stream
        return self.env.step(action)
