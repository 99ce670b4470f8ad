"""The evaluator of several agents: greedy episodes of one policy for all of them, or of each one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from raynforce.envs import masks
from raynforce.envs.agents import World
from raynforce.envs.vector import EnvArgs, VectorEnv, require_finite
from raynforce.policies.acting import ActingSpec, Actor, Memory, PolicyVersion, remembered
from raynforce.policies.team import Part, TeamSpec, TeamVersion
from raynforce.roles.evaluator import EVALUATION_STREAM, Evaluator
from raynforce.roles.team_sampler import seated
from raynforce.spaces import MASK, ActionSpec

AGENTS, TEAM = "agents/", "team_return"  # what is told of each agent, and of all together
_ONE = "all"


class AgentsEvaluator(Evaluator):
    """Plays whole episodes of all agents. The return of one is the mean of those agents' that learn; what it tells also
    has each agent's own, under `agents/NAME`, and `team_return`, the sum of all.

    Of a policy with opponents, one agent in each environment is its own, and the others choose at random.
    """

    def __init__(self, acting: ActingSpec, envs: EnvArgs, *more: Any, **how: Any) -> None:
        super().__init__(acting, envs, *more, **how)
        agents = acting.env.agents
        assert agents is not None
        self._agents = agents
        everyone = Part(acting, tuple(range(len(agents.names))))
        self._spec = acting if isinstance(acting, TeamSpec) else TeamSpec.of({_ONE: everyone})
        self._actors = {name: Actor(part.acting) for name, part in self._spec.parts.items()}
        self._world: World | None = None

    def begin(self, version: PolicyVersion, episodes: int, max_length: int = 100_000, purpose: int = 0) -> None:
        versions: Mapping[str, PolicyVersion] = (
            version.policies if isinstance(version, TeamVersion) else {_ONE: version}
        )
        for name, actor in self._actors.items():
            actor.load(versions[name])
        first = replace(versions[next(iter(self._actors))], number=version.number)
        super().begin(first, episodes, max_length, purpose)
        envs = self._vector()
        own, others = seated(self._spec, envs.num_envs)
        if self._world is None or self._world.inner is not envs:
            how = {"ids": self._args.ids}
            self._world = World(envs, [seats for _, seats in (*own, *others)], **how)
        self._world.begin(self._obs)
        self._who = [name for name, _ in (*own, *others)]
        self._counts = np.zeros((envs.num_envs, len(self._agents.names)), np.bool_)  # whose returns are the outcome
        for _, seats in own:
            self._counts[seats.env, seats.agent] = True
        self._random = [i >= len(own) and self._spec.parts[name].learns for i, (name, _) in enumerate((*own, *others))]
        self._rng = np.random.default_rng([self._args.seed, EVALUATION_STREAM, version.number, purpose])
        self._memories = [
            self._actors[name].spec.network.initial_state(len(view.seats.env))  # empty without memory
            for name, view in zip(self._who, self._world.views, strict=True)
        ]
        self._earned = np.zeros(self._counts.shape)
        self._took_part = self._world.acting.copy()

    def _step(self, envs: VectorEnv, until: float) -> None:
        world = self._world
        assert world is not None
        acted = [self._act(i, name) for i, name in enumerate(self._who)]
        steps = world.step([actions for actions, _ in acted])
        if any(self._memories):
            self._memories = [
                remembered(before, after, step.valid, step.over)
                for before, (_, after), step in zip(self._memories, acted, steps, strict=True)
            ]
        alive = self._quota > 0
        ended, cut = np.zeros(envs.num_envs, np.bool_), np.zeros(envs.num_envs, np.bool_)
        for view, step in zip(world.views, steps, strict=True):
            seats = view.seats
            seen = {"reward": step.reward, **step.obs}
            require_finite(self._args.env, seen, ("in evaluation, lane",), self._args.args)
            self._earned[seats.env, seats.agent] += step.reward * alive[seats.env]
            cut[seats.env[step.cut]] = True
            ended[seats.env[step.final_lanes]] = True
            self._took_part[seats.env, seats.agent] |= step.terminated | step.truncated  # also without a move
        self._length += alive
        self._steps += int(np.count_nonzero(alive))
        self._broke(np.flatnonzero(cut))
        self._earned[cut] = 0.0
        told: dict[int, dict[str, float]] = {}
        for env in np.flatnonzero((ended | (self._length >= self._max_length)) & alive).tolist():
            earned, names = self._earned[env], self._agents.names
            here = np.flatnonzero(self._took_part[env])
            told[env] = {AGENTS + names[i]: float(earned[i]) for i in here} | {TEAM: float(earned.sum())}
            mine = self._counts[env] & self._took_part[env]
            self._running[env] = earned[mine].mean() if mine.any() else 0.0
        self._ended(ended, told)
        fresh = ended | cut
        self._earned[fresh] = 0.0
        self._took_part = np.where(fresh[:, None], world.acting, self._took_part | world.acting)
        if ended.any():
            self._stop_finished(envs)

    def _act(self, number: int, name: str) -> tuple[np.ndarray, Memory]:
        """Actions of one player's lanes, and what they remember then."""
        world, actor = self._world, self._actors[name]
        assert world is not None
        seen = world.seen_now(number)
        if self._random[number]:
            action = world.views[number].spec.action
            chosen = random_actions(action, len(world.views[number].seats.env), self._rng, seen.get(MASK))
            return actor.to_env(chosen), {}
        memory = self._memories[number]
        return actor.greedy_step(seen, memory) if memory else (actor.greedy(seen), {})

    def _vector(self) -> VectorEnv:
        if self._envs is None:
            how: dict[str, Any] = {"record": False, "hang_seconds": self._hang_seconds, "at_most": True}
            self._envs = self._args.environments(EVALUATION_STREAM, **how)
        return self._envs


def random_actions(action: ActionSpec, lanes: int, rng: np.random.Generator, mask: np.ndarray | None) -> np.ndarray:
    """Recorded actions `[B, ...]`, each allowed choice as likely as the others."""
    if action.kind == "box":
        return rng.uniform(-1.0, 1.0, (lanes, *action.shape)).astype(np.float32)
    if mask is not None:
        return masks.random_actions(replace(action, start=()), lanes, rng, mask != 0)
    sizes = np.asarray(action.sizes).reshape(action.shape)
    return (rng.random((lanes, *action.shape)) * sizes).astype(np.int64)
