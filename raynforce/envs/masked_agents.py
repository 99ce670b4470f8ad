"""PettingZoo environments whose action masks are in `info`, as ones whose agents see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from raynforce.envs.describe import action_spec
from raynforce.envs.masks import KEY, has_mask
from raynforce.envs.wrapped_agents import SEEN
from raynforce.errors import UsageError


def with_masks(name: str, env: Any) -> Any:
    """The environment, whose agents see their masks if its first reset has some in `info`."""
    choosing = [agent for agent in env.possible_agents if _may_have_one(env, agent)]
    if not choosing:
        return env
    try:
        found = env.reset(seed=0)
        infos = _infos(env) if found is None else found[1]  # AEC, or parallel
    except Exception:  # those who step it say it better
        return env
    told = [agent for agent in choosing if isinstance(infos, Mapping) and has_mask(infos.get(agent))]
    kinds = [(env.observation_space(agent), env.action_space(agent)) for agent in told]
    masked = [agent for agent in choosing if (env.observation_space(agent), env.action_space(agent)) in kinds]
    return MaskedAgents(name, env, masked) if masked else env


class MaskedAgents:
    """What these agents see has `action_mask` beside it: an entry of a `Dict`, or of one with `observation`."""

    def __init__(self, name: str, env: Any, masked: list[Any]) -> None:
        self._env = env
        self._choices = {agent: sum(action_spec(name, env.action_space(agent)).sizes) for agent in masked}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_env"], name)

    def observation_space(self, agent: Any) -> Any:
        space = self._env.observation_space(agent)
        if agent not in self._choices:
            return space
        beside = space.spaces if isinstance(space, spaces.Dict) else {SEEN: space}
        return spaces.Dict({**beside, KEY: spaces.MultiBinary(self._choices[agent])})

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        found = self._env.reset(seed=seed, options=options)
        if found is None:  # AEC: asked for by `last`
            return None
        seen, infos = found
        return {agent: self._joined(agent, obs, infos.get(agent)) for agent, obs in seen.items()}, infos

    def step(self, action: Any) -> Any:
        found = self._env.step(action)
        if not isinstance(found, tuple) or len(found) != 5:  # AEC, or refused by whoever asked
            return found
        seen, rewards, terminated, truncated, infos = found
        over = {agent for ends in (terminated, truncated) for agent, end in ends.items() if end}
        shown = {agent: self._joined(agent, obs, infos.get(agent), agent in over) for agent, obs in seen.items()}
        return shown, rewards, terminated, truncated, infos

    def last(self) -> tuple[Any, ...]:
        seen, reward, terminated, truncated, info = self._env.last()
        shown = self._joined(self._env.agent_selection, seen, info, terminated or truncated)
        return shown, reward, terminated, truncated, info

    def _joined(self, agent: Any, seen: Any, info: Any, over: bool = False) -> Any:
        if agent not in self._choices:
            return seen
        if not has_mask(info) and not over:
            raise UsageError(f"the info of {agent!r} has no {KEY!r}, and at the first reset those of its kind had one")
        mask = info[KEY] if has_mask(info) else [1] * self._choices[agent]
        return {**(seen if isinstance(seen, Mapping) else {SEEN: seen}), KEY: mask}


def _infos(env: Any) -> Any:
    """Those of an AEC environment; of the agent that is to move, if it does not tell all."""
    return env.infos if getattr(env, "infos", None) else {env.agent_selection: env.last()[4]}


def _may_have_one(env: Any, agent: Any) -> bool:
    """Whether it chooses between actions, and does not see a mask already."""
    seen = env.observation_space(agent)
    shown = isinstance(seen, spaces.Dict) and KEY in seen.spaces
    return not isinstance(env.action_space(agent), spaces.Box) and not shown
