"""Wrappers of single environments around each agent of a PettingZoo environment: what it sees, and what it earns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from raynforce.envs import wrappers
from raynforce.envs.frames import FrameStack, layers
from raynforce.envs.masks import KEY as MASK
from raynforce.errors import UsageError

TAKEN = (gymnasium.ObservationWrapper, gymnasium.RewardWrapper, FrameStack, FrameStackObservation)
SEEN = "observation"  # beside a mask, if there is nothing else


class WrappedAgents:
    """A parallel or AEC environment whose agents each have the wrappers that `args` list, with their own state.

    Actions and ends of episodes are the environment's own, and masks are not seen by wrappers.
    """

    def __init__(self, name: str, env: Any, args: Mapping[str, Any]) -> None:
        self._env = env
        self._seats = {agent: _Seat(name, env, agent, args) for agent in env.possible_agents}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_env"], name)

    def observation_space(self, agent: Any) -> Any:
        return self._seats[agent].space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        for place, seat in enumerate(self._seats.values()):
            seat.is_there = False
            if seed is not None:
                seat.np_random = np.random.default_rng([seed, place])  # which wrappers draw from
        found = self._env.reset(seed=seed, options=options)
        if found is None:  # AEC: asked for by `last`
            return None
        seen, info = found
        return {agent: self._seats[agent].receive(obs, 0.0)[0] for agent, obs in seen.items()}, info

    def step(self, action: Any) -> Any:
        found = self._env.step(action)
        if not isinstance(found, tuple) or len(found) != 5:  # AEC, or refused by whoever asked
            return found
        seen, rewards, *others = found
        given = {agent: self._seats[agent].receive(obs, rewards.get(agent, 0.0)) for agent, obs in seen.items()}
        earned = {agent: self._seats[agent].earn(reward) for agent, reward in rewards.items() if agent not in seen}
        earned |= {agent: reward for agent, (_, reward) in given.items()}
        terminated, truncated, _ = others
        for agent, seat in self._seats.items():  # one that is over begins anew if it comes back
            over = agent not in self._env.agents or terminated.get(agent) or truncated.get(agent)
            seat.is_there = seat.is_there and not over
        return {agent: obs for agent, (obs, _) in given.items()}, earned, *others

    def last(self) -> tuple[Any, ...]:
        """Of the agent that is to move; to be asked for once."""
        seen, reward, terminated, truncated, info = self._env.last()
        seat = self._seats[self._env.agent_selection]
        given = seat.receive(seen, reward)
        seat.is_there = not (terminated or truncated)  # it begins anew if it comes back
        return *given, terminated, truncated, info


class _Seat(gymnasium.Env[Any, Any]):
    """An agent's place, as an environment that repeats what the agent was given: wrappers are put around it."""

    def __init__(self, name: str, env: Any, agent: Any, args: Mapping[str, Any]) -> None:
        whole = env.observation_space(agent)
        self._keys = [key for key in whole if key != MASK] if isinstance(whole, spaces.Dict) else []  # beside a mask
        self._masked = isinstance(whole, spaces.Dict) and MASK in whole.spaces
        self.observation_space, self.action_space = self._unmasked(whole), env.action_space(agent)
        self._around = wrappers.wrap(name, self, args)
        around = list(layers(self._around))[-2::-1]  # the innermost first
        for layer in around:
            if not isinstance(layer, TAKEN):
                what = f"{wrappers.SETTING}: {type(layer).__name__} is for environments of one agent"
                able = "FrameStack, ObservationWrapper and RewardWrapper are for each of several"
                raise UsageError(f"{what}, and env {name!r} has several: {able}")
        self._rewards = [layer for layer in around if isinstance(layer, gymnasium.RewardWrapper)]
        shown: Any = self._masked_again(self._around.observation_space, whole)
        self.space = spaces.Dict(shown) if self._masked else shown
        self.is_there = False  # in this episode, up to now
        self._given: tuple[Any, float] = None, 0.0

    def _unmasked(self, seen: Any) -> Any:
        if not self._masked:
            return seen
        if self._keys == [SEEN]:
            return seen[SEEN]
        rest = {key: seen[key] for key in self._keys}
        return spaces.Dict(rest) if isinstance(seen, spaces.Dict) else rest

    def _masked_again(self, shown: Any, seen: Any) -> Any:
        if not self._masked:
            return shown
        flat = isinstance(shown, Mapping) and self._keys != [SEEN]
        return {**(shown if flat else {SEEN: shown}), MASK: seen[MASK]}

    def receive(self, seen: Any, reward: float) -> tuple[Any, float]:
        """What its wrappers make of what the agent sees and earns; the first in an episode is a reset."""
        self._given = self._unmasked(seen), reward
        if self.is_there:
            shown, earned, *_ = self._around.step(None)
        else:
            (shown, _), earned = self._around.reset(), self.earn(reward)
        self.is_there = True
        return self._masked_again(shown, seen), float(earned)

    def earn(self, reward: float) -> float:
        for layer in self._rewards:
            reward = float(layer.reward(reward))
        return reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._given[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *self._given, False, False, {}
