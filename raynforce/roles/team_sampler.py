"""The sampler of several policies: one world, a `Sampler` for each that learns, an actor for each that does not."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import numpy as np

from raynforce.envs.agents import AgentVector, Seats, World
from raynforce.envs.vector import EnvArgs, Step
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Fragment
from raynforce.experience.team_fragment import TeamFragment
from raynforce.policies.acting import Actor, Memory, PolicyVersion, forget, remembered
from raynforce.policies.distributions import StateDependent
from raynforce.policies.team import Part, TeamSpec, TeamVersion
from raynforce.roles.sampler import Sampler
from raynforce.trees import Tree, load_rng, rng_state

ACTORS = 1 << 16  # where the random streams of those that do not learn begin


def seated(spec: TeamSpec, envs: int, first: int = 0) -> tuple[list[tuple[str, Seats]], list[tuple[str, Seats]]]:
    """Who sits where in so many environments: policies that learn or are evaluated, and then those that only act.

    Of a policy with opponents, one agent in each environment is its own, each in turn, counted from environment
    `first`; the others' seats come last, under its name again.
    """
    own: list[tuple[str, Seats]] = []
    others: list[tuple[str, Seats]] = []
    for name, part in spec.parts.items():
        seats = Seats.all_of(envs, part.agents)
        if part.opponents:
            turn = (np.arange(envs) + first) % len(part.agents)
            mine = seats.agent == np.asarray(part.agents)[turn][seats.env]
            others.append((name, Seats(seats.env[~mine], seats.agent[~mine])))
            seats = Seats(seats.env[mine], seats.agent[mine])
        (own if part.learns else others).append((name, seats))
    return own, others


class TeamSampler:
    """Steps environments of several agents, each played by its policy, and gathers a fragment of each that learns."""

    def __init__(self, spec: TeamSpec, envs: EnvArgs, length: int, index: int = 0, samplers: int = 1) -> None:
        self.index, self._length, self._sequence = index, length, 0
        own, others = seated(spec, envs.num_envs, index * envs.num_envs)
        made = envs.environments(index)
        self._world = World(made, [seats for _, seats in (*own, *others)], ids=envs.ids, states=envs.states)
        views = self._world.views
        self._samplers: dict[str, Sampler] = {}
        for number, (name, _) in enumerate(own):
            acting = spec.parts[name].acting
            self._samplers[name] = Sampler(
                acting, envs, length, index, samplers, vector=views[number], stream=(number,)
            )
        self._actors = [
            _Player(name, spec.parts[name], view, [envs.seed, index, 1, ACTORS + k])
            for k, ((name, _), view) in enumerate(zip(others, views[len(own) :], strict=True))
        ]

    def note(self) -> str:
        return "; ".join(dict.fromkeys(filter(None, (sampler.note() for sampler in self._samplers.values()))))

    def sample(self, version: TeamVersion) -> TeamFragment:
        return self.produce(version)[0]

    def produce(self, version: TeamVersion) -> tuple[TeamFragment, Receipt]:
        """Gather one fragment with these policy versions, and tell how that went."""
        began, in_env = time.perf_counter(), 0.0
        going = [sampler.steps(version.policies[name]) for name, sampler in self._samplers.items()]
        for actor in self._actors:
            actor.begin(version, self._length)
        ready = [next(each) for each in going]
        found: list[tuple[Fragment, Receipt]] = []
        for t in range(self._length):
            actions = [*ready, *(actor.act(t) for actor in self._actors)]
            asked = time.perf_counter()
            steps = self._world.step(actions)
            in_env += time.perf_counter() - asked
            both = zip(going, steps, strict=False)
            if t + 1 < self._length:
                ready = [each.send(step) for each, step in both]
            else:
                found = [_end(each, step) for each, step in both]
            for actor, step in zip(self._actors, steps[len(going) :], strict=True):
                actor.see(step)
        parts = dict(zip(self._samplers, (fragment for fragment, _ in found), strict=True))
        fragment = TeamFragment.of(parts, version.number, self.index, self._sequence)
        self._sequence += 1
        receipts = [receipt for _, receipt in found]
        policy = sum(receipt.seconds["policy"] for receipt in receipts)
        seconds = {"env": in_env, "policy": policy, "other": max(0.0, time.perf_counter() - began - in_env - policy)}
        faults = [fault for receipt in receipts for fault in receipt.faults]
        memory = max(receipt.memory for receipt in receipts)
        return fragment, Receipt(fragment.record, seconds, faults, fragment.nbytes, memory)

    def state(self) -> Tree:
        samplers = {name: sampler.state() for name, sampler in self._samplers.items()}
        actors = {str(i): actor.state() for i, actor in enumerate(self._actors)}
        return {"sequence": self._sequence, "samplers": samplers, "actors": actors}

    def load(self, tree: Tree) -> list[str]:
        self._sequence = tree["sequence"]
        notes = [note for name, sampler in self._samplers.items() for note in sampler.load(tree["samplers"][name])]
        for i, actor in enumerate(self._actors):
            actor.load(tree["actors"][str(i)])
        return notes

    def start_fresh(self, sequence: int, attempt: int) -> None:
        self._sequence = sequence
        for sampler in self._samplers.values():
            sampler.start_fresh(sequence, attempt)
        for actor in self._actors:
            actor.start_fresh(attempt)

    def close(self) -> None:
        self._world.inner.close()


class _Player:
    """A policy that acts and does not learn: a frozen one, or an older version of one that learns."""

    def __init__(self, name: str, part: Part, view: AgentVector, seed: list[int]) -> None:
        self._name, self._view, self._seed, self._older = name, view, seed, part.learns
        self._actor = Actor(part.acting, places=np.full(view.num_envs, 0.5))
        self._rng = np.random.default_rng(seed)
        self._obs = view.current()
        self._recurrent = part.acting.network.initial_state(view.num_envs)  # empty without memory
        self._after: Memory = {}
        self._noise: Any = None

    def begin(self, version: TeamVersion, length: int) -> None:
        mine: PolicyVersion = (version.opponents if self._older else version.policies)[self._name]
        self._actor.load(mine)
        self._noise = self._actor.distribution.noise(self._rng, length, self._view.num_envs)

    def act(self, t: int) -> np.ndarray:
        actor, obs = self._actor, self._obs
        if self._recurrent:
            out, self._after = actor.step(obs, self._recurrent)
        else:
            out = actor.outputs(obs)
        return actor.to_env(actor.sample(actor.masked(out, obs), self._noise[t]))

    def see(self, step: Step) -> None:
        """What its actions led to."""
        self._obs = step.obs
        if self._recurrent:
            self._recurrent = remembered(self._recurrent, self._after, step.valid, step.over)

    def state(self) -> Tree:
        tree: Tree = {"rng": rng_state(self._rng)}
        if self._recurrent:
            tree["memory"] = {name: state.copy() for name, state in self._recurrent.items()}
        noise = self._actor.distribution
        return tree | {"noise": noise.state()} if isinstance(noise, StateDependent) else tree

    def load(self, tree: Tree) -> None:
        load_rng(self._rng, tree.get("rng", tree))  # the stream alone, in older checkpoints
        if isinstance(self._actor.distribution, StateDependent) and "noise" in tree:
            self._actor.distribution.load(tree["noise"])
        self._view.load({})  # the first one's has loaded the world
        for name, state in self._recurrent.items():
            state[...] = tree["memory"][name]
        forget(self._recurrent, self._view.restarted)
        self._obs = self._view.current()

    def start_fresh(self, attempt: int) -> None:
        self._rng = np.random.default_rng([*self._seed, attempt])
        if isinstance(self._actor.distribution, StateDependent):
            self._actor.distribution.forget()
        forget(self._recurrent, slice(None))
        self._obs = self._view.current()


def _end(going: Generator[np.ndarray, Step, tuple[Fragment, Receipt]], step: Step) -> tuple[Fragment, Receipt]:
    try:
        going.send(step)
    except StopIteration as end:
        found: tuple[Fragment, Receipt] = end.value
        return found
    raise AssertionError("a fragment has more steps than its length")
