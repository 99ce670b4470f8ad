"""Tiny environments of several agents whose best play is known: `raynforce.envs.tiny_agents:Together`.

They have PettingZoo's methods, parallel ones but for `Nim` and `EchoInTurns`, and need nothing of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

Info = dict[str, Any]
ByAgent = dict[str, Any]


class _Parallel:
    """Each step shows every agent a number; `score` says what they earn for what they say."""

    length = 4
    metadata: ClassVar[Info] = {"name": "tiny"}
    render_mode = None

    def __init__(self, agents: int = 2, n: int = 4) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.agents: list[str] = []
        self.n = n

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(self.n)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(self.n)

    def show(self) -> ByAgent:
        return {agent: int(self.rng.integers(self.n)) for agent in self.agents}

    def score(self, said: ByAgent) -> dict[str, float]:
        return {agent: float(said[agent] == self.shown[agent]) for agent in self.agents}

    def leaves(self, agent: str) -> bool:
        return self.steps >= self.length

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[ByAgent, ByAgent]:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.steps, self.agents = 0, list(self.possible_agents)
        self.shown = self.show()
        return self.shown, {agent: {} for agent in self.agents}

    def step(self, said: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        reward, here = self.score(said), list(self.agents)
        self.steps += 1
        over = {agent: self.leaves(agent) for agent in here}
        self.shown = self.show()
        self.agents = [agent for agent in here if not over[agent]]
        none = dict.fromkeys(here, False)
        return self.shown, reward, over, none, {agent: {} for agent in here}

    def render(self) -> None: ...

    def close(self) -> None: ...


class Together(_Parallel):
    """All see one number, and earn 1 each if all say it: the best return of each is 4."""

    def show(self) -> ByAgent:
        return dict.fromkeys(self.agents, int(self.rng.integers(self.n)))

    def score(self, said: ByAgent) -> dict[str, float]:
        right = all(said[agent] == self.shown[agent] for agent in self.agents)
        return dict.fromkeys(self.agents, float(right))


class Leaving(_Parallel):
    """Say your own number for 1; agent i leaves after i + 1 steps, its best return. The `late` ones come at step 1."""

    def __init__(self, agents: int = 3, n: int = 4, late: int = 0) -> None:
        super().__init__(agents, n)
        self.late = late

    def leaves(self, agent: str) -> bool:
        return self.steps >= self.possible_agents.index(agent) + 1

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[ByAgent, ByAgent]:
        super().reset(seed, options)
        self.agents = self.possible_agents[: len(self.possible_agents) - self.late]
        return {agent: self.shown[agent] for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, said: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        seen, *others = super().step(said)
        if self.late and self.steps == 1:
            came = self.possible_agents[len(self.possible_agents) - self.late :]
            self.agents += came
            self.shown |= {agent: int(self.rng.integers(self.n)) for agent in came}
            seen = self.shown
        return seen, *others  # type: ignore[return-value]


class Bidding(_Parallel):
    """The highest bid wins 1 of the others, equal ones nothing: the best bid is the highest, and then nobody wins."""

    def score(self, said: ByAgent) -> dict[str, float]:
        bids = list(said.values())
        found = {}
        for agent in self.agents:
            others = max(bid for other, bid in said.items() if other != agent) if len(bids) > 1 else 0
            found[agent] = float(np.sign(said[agent] - others))
        return found


class Aim(_Parallel):
    """Each sees a number between -1 and 1 and names one: it loses their distance. The best return of each is 0."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1.0, 1.0, (1,))

    def action_space(self, agent: str) -> Any:
        return spaces.Box(-1.0, 1.0, (1,))

    def show(self) -> ByAgent:
        return {agent: self.rng.uniform(-1.0, 1.0, 1).astype(np.float32) for agent in self.agents}

    def score(self, said: ByAgent) -> dict[str, float]:
        return {agent: -float(abs(said[agent][0] - self.shown[agent][0])) for agent in self.agents}


class Hunt(_Parallel):
    """A prey says where it hides, of four places, and a hunter, who sees a clue of two numbers, where it looks.

    They have different spaces. The clue says where the prey was told to hide: a prey that does as told is found by a
    hunter that has learned to read; both earn 1 then. The best return of each is 4.
    """

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["hunter_0", "prey_0", "prey_1"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0.0, 1.0, (2,)) if agent.startswith("hunter") else spaces.Discrete(4)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4) if agent.startswith("hunter") else spaces.MultiDiscrete([2, 2])

    def show(self) -> ByAgent:
        self.told = int(self.rng.integers(4))
        clue = np.array([self.told // 2, self.told % 2], np.float32)
        return {agent: clue if agent.startswith("hunter") else self.told for agent in self.agents}

    def score(self, said: ByAgent) -> dict[str, float]:
        prey = {agent: float(2 * said[agent][0] + said[agent][1] == self.told) for agent in self.agents[1:]}
        return {"hunter_0": float(said["hunter_0"] == self.told), **prey}


class Echo(_Parallel):
    """Say the number that you saw a step before: 1 for each but in the first step, so 3 is the best return.

    Numbers are drawn anew each step: without memory the mean return is `3 / n` at best.
    """

    def __init__(self, agents: int = 2, n: int = 2) -> None:
        super().__init__(agents, n)

    def show(self) -> ByAgent:
        self.before = self.shown if self.steps else {}
        return super().show()

    def score(self, said: ByAgent) -> dict[str, float]:
        return {agent: float(said[agent] == self.before.get(agent)) for agent in self.agents}


class _InTurns:
    """An AEC environment: one moves at a time."""

    metadata: ClassVar[Info] = {"name": "tiny"}
    render_mode = None
    possible_agents: list[str]

    def observe(self, agent: str) -> Any:
        raise NotImplementedError

    def reset(self, seed: int | None = None, options: Info | None = None) -> None:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.terminations = dict.fromkeys(self.agents, False)
        self._earned = dict.fromkeys(self.agents, 0.0)

    def agent_iter(self, max_iter: int = 1 << 30) -> Any:
        while self.agents:
            yield self.agent_selection

    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, Info]:
        agent = self.agent_selection
        return self.observe(agent), self._earned[agent], self.terminations[agent], False, {}

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self.agents.remove(agent)
            self.agent_selection = self.agents[0] if self.agents else agent
            return
        assert action is not None
        self._earned[agent] = 0.0
        self.move(agent, action)
        after = self.possible_agents.index(agent) + 1
        self.agent_selection = self.possible_agents[after % len(self.possible_agents)]

    def move(self, agent: str, action: int) -> None:
        raise NotImplementedError

    def render(self) -> None: ...

    def close(self) -> None: ...


class EchoInTurns(_InTurns):
    """`Echo` where one moves at a time: say the number that you saw at your last move; the best return is 3."""

    def __init__(self, agents: int = 2, n: int = 2) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.n = n

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(self.n)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(self.n)

    def reset(self, seed: int | None = None, options: Info | None = None) -> None:
        super().reset(seed, options)
        self.shown = self.rng.integers(self.n, size=(len(self.agents), 5)).tolist()  # the last ones are for nothing
        self.moves = dict.fromkeys(self.agents, 0)

    def observe(self, agent: str) -> Any:
        return self.shown[self.possible_agents.index(agent)][self.moves[agent]]

    def move(self, agent: str, action: int) -> None:
        moves, shown = self.moves[agent], self.shown[self.possible_agents.index(agent)]
        self._earned[agent] = float(moves > 0 and action == shown[moves - 1])
        self.moves[agent] = moves + 1
        if all(moves == 4 for moves in self.moves.values()):
            self.terminations = dict.fromkeys(self.possible_agents, True)


class Nim(_InTurns):
    """Take 1, 2 or 3 of a heap, in turns: who takes the last one wins 1 of the other, who takes too many loses.

    Best play leaves a multiple of 4. An AEC environment: one moves at a time.
    """

    def __init__(self, heap: int = 10, masked: bool = False) -> None:
        self.possible_agents = ["first", "second"]
        self.heap, self.masked = heap, masked

    def observation_space(self, agent: str) -> Any:
        heap: Any = spaces.Discrete(self.heap + 1)
        if not self.masked:
            return heap
        return spaces.Dict({"observation": heap, "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Info | None = None) -> None:
        super().reset(seed, options)
        self.left = int(self.rng.integers(1, self.heap + 1))

    def observe(self, agent: str) -> Any:
        if not self.masked:
            return self.left
        return {"observation": self.left, "action_mask": np.array([self.left >= take for take in (1, 2, 3)], np.int8)}

    def move(self, agent: str, action: int) -> None:
        other = self.possible_agents[1 - self.possible_agents.index(agent)]
        left = self.left - (action + 1)
        self.left = max(0, left)
        if left <= 0:
            won = 1.0 if left == 0 else -1.0
            self._earned[agent] += won
            self._earned[other] -= won
            self.terminations = dict.fromkeys(self.possible_agents, True)
