"""The games of hunt.cpp and nim.cpp with PettingZoo's methods; as a program, a simulator of one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from raynforce.envs.tiny_agents import Nim as TinyNim

PLACES = 9
ByAgent = dict[str, Any]


class Hunt:
    metadata: ClassVar[ByAgent] = {}
    render_mode = None

    def __init__(self, start: int = -1) -> None:
        self.possible_agents = ["hunter_0", "hunter_1", "prey"]
        self.start = start

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (2,)) if agent == "prey" else spaces.Discrete(PLACES)

    def action_space(self, agent: str) -> Any:
        return spaces.Box(-1.0, 1.0, (1,)) if agent == "prey" else spaces.Discrete(3)

    def seen(self) -> ByAgent:
        ahead = [(self.at[2] - self.at[i]) % PLACES for i in range(2)]
        return {"hunter_0": ahead[0], "hunter_1": ahead[1], "prey": np.array(ahead, np.float32) / np.float32(8)}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[ByAgent, ByAgent]:
        self.at, self.steps = [0, 6, self.start if self.start >= 0 else 1 + (seed or 0) % 5], 0
        self.agents = ["hunter_0", "prey"]
        return self.seen(), {}

    def step(self, moves: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        hunters = [(i, name) for i, name in enumerate(("hunter_0", "hunter_1")) if name in moves]
        for i, name in hunters:
            self.at[i] += moves[name] - 1
        pull = moves["prey"][0]
        self.at[2] += 1 if pull > np.float32(0.3) else -1 if pull < np.float32(-0.3) else 0
        self.at = [place % PLACES for place in self.at]
        reward = dict.fromkeys(moves, 0.0) | {"prey": np.float32(0.1)}
        self.steps += 1
        over, cut = dict.fromkeys(moves, False), dict.fromkeys(moves, False)
        for i, name in hunters:
            if self.at[i] == self.at[2]:
                reward[name], reward["prey"] = 1.0, np.float32(0.1) + np.float32(-1.1)
                over, self.agents = dict.fromkeys(moves, True), []
                return self.seen(), reward, over, cut, {}
        if self.steps == 2:
            self.agents = ["hunter_0", "hunter_1", "prey"]
        if self.steps == 8:
            over["hunter_0"], self.agents = True, ["hunter_1", "prey"]
        if self.steps == 12:
            cut, self.agents = dict.fromkeys(moves, True), []
        return self.seen(), reward, over, cut, {}

    def save_state(self) -> dict[str, Any]:
        return {"at": list(self.at), "steps": self.steps, "agents": list(self.agents)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.at, self.steps, self.agents = state["at"], state["steps"], state["agents"]

    def render(self) -> None: ...

    def close(self) -> None: ...


class Nim(TinyNim):
    """With masks, a heap of a fixed size, and a global state."""

    state_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, heap: int = 10) -> None:
        super().__init__(10, masked=True)
        self.fixed = heap

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.left = self.fixed

    def state(self) -> np.ndarray:
        return np.array([self.left], np.float32)


class Twice(Hunt):
    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["prey", "prey"]


class Empty(Hunt):
    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = []


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "sdk" / "python"))
    import raynforce_sim as sim

    class Nobody(sim._Joined):  # type: ignore[misc]
        """In the third step nobody is to act, and the episode has not ended."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(Hunt(**settings))

        def step(self, action: Any) -> Any:
            found, reward, over, cut = super().step(action)
            if self.env.steps == 3:
                found["flags"][0] = 0
            return found, reward, over, cut

    sim.serve({"Nobody": Nobody, **globals()}[sys.argv.pop(1)])
