"""What lanes of agents remember: that of their own moves in their own episode, wherever fragments are cut.

Observations name episode, agent and move, so that what has to be remembered at each follows from it alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from raynforce.algos import algorithm_class
from raynforce.algos.base import _predicted, observations, rows, shuffled
from raynforce.algos.contract import declared
from raynforce.engines.native.teams import plans
from raynforce.envs import faults
from raynforce.envs.agents import lane_spec
from raynforce.envs.tiny_agents import _InTurns, _Parallel
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.team import TeamVersion
from raynforce.policies.torch_net import SpecNet
from raynforce.roles.sampler import Sampler
from raynforce.roles.team_sampler import TeamSampler
from raynforce.settings import nested

HERE = f"{__name__}:"
SPACE = spaces.Box(-1.0, 1e3, (3,))
AGENTS = [f"agent_{i}" for i in range(3)]
P_LEAVE, P_BREAK = 0.2, 0.04
COUNT = 600  # sequences drawn


class Turning(_InTurns):
    """One moves at a time, leaves now and then, and may break the environment."""

    def __init__(self) -> None:
        self.possible_agents = AGENTS

    def observation_space(self, agent: str) -> Any:
        return SPACE

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.name, self.moves = self.rng.random(), dict.fromkeys(AGENTS, 0)

    def observe(self, agent: str) -> np.ndarray:
        return np.array([self.name, AGENTS.index(agent), self.moves[agent]], np.float32)

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        place = self.agents.index(agent)
        if self.terminations[agent]:
            self.agents.remove(agent)
        else:
            if self.rng.random() < P_BREAK:
                raise RuntimeError("bad luck")
            self.moves[agent] += 1
            self.terminations[agent] = self.rng.random() < P_LEAVE
            place += 1
        self.agent_selection = self.agents[place % len(self.agents)] if self.agents else agent


class AtOnce(_Parallel):
    """All move at once; they leave now and then, the last one comes later, and they may break the environment."""

    def __init__(self) -> None:
        super().__init__(agents=3, n=3)

    def observation_space(self, agent: str) -> Any:
        return SPACE

    def show(self) -> dict[str, Any]:
        if not self.steps:
            self.name, self.came = self.rng.random(), {"agent_2": 2}
        moves = {agent: self.steps - self.came.get(agent, 0) for agent in self.agents}
        return {agent: np.array([self.name, AGENTS.index(agent), moves[agent]], np.float32) for agent in self.agents}

    def score(self, said: dict[str, Any]) -> dict[str, float]:
        return dict.fromkeys(self.agents, 0.0)

    def leaves(self, agent: str) -> bool:
        return bool(self.rng.random() < P_LEAVE)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        shown, told = super().reset(seed, options)
        self.agents = AGENTS[:2]
        return {agent: shown[agent] for agent in self.agents}, told

    def step(self, said: dict[str, Any]) -> Any:
        if self.rng.random() < P_BREAK:
            raise RuntimeError("bad luck")
        _, *others = super().step(said)
        self.agents += ["agent_2"] if self.steps == 2 and self.agents else []
        self.shown = self.show()
        return self.shown, *others


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BREAKS_IN_A_ROW", 10_000)


class Truth:
    """What is remembered before a move, and the outputs there, by all that the agent saw in its episode."""

    def __init__(self, acting: ActingSpec, version: PolicyVersion) -> None:
        self._actor = Actor(acting, places=np.zeros(1))
        self._actor.load(version)
        self._empty = acting.network.initial_state(1)
        self._known: dict[tuple[float, ...], Any] = {}

    def before(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        name, agent, move = obs.tolist()
        if move == 0:
            return self._empty
        key = (name, agent, move)
        if key not in self._known:
            last = np.array([name, agent, move - 1], np.float32)
            self._known[key] = self._actor.step({"obs": last[None]}, self.before(last))[1]
        return self._known[key]

    def holds(self, state: dict[str, np.ndarray], obs: np.ndarray) -> None:
        for name, known in self.before(obs).items():
            np.testing.assert_allclose(state[name], known[0], atol=1e-5)


def setting(algo: str, env: str, **more: Any) -> tuple[Any, ActingSpec, PolicyVersion]:
    given = {"network.memory": "gru", "network.memory_size": 5, "network.hidden": [6], "network.normalize_obs": False}
    given |= {"sampling.envs": 2, "sampling.fragment": 8, "algorithm.sequence": 4}
    config, _ = resolve({"env": HERE + env, "algo": algo, "topology": "sync"}, nested(given | more))
    acting = declared(config, lane_spec(probe(HERE + env)), algorithm_class(algo))
    flat = acting.network.initial(np.random.default_rng(0)) * 2
    return config, acting, PolicyVersion(0, flat, schedules={"epsilon": 0.5})


def gathered(env: str, acting: ActingSpec, version: PolicyVersion, count: int, seed: int = 1) -> list[Fragment]:
    """Fragments of a sampler that is saved and loaded again on the way."""
    envs = EnvArgs(HERE + env, 2, seed)
    found, tree = [], None
    for k in range(count):
        if k % 4 == 0:
            sampler = Sampler(acting, envs, 8)
            if tree is not None:
                sampler.load(tree)
        found.append(sampler.sample(version))
        if k % 4 == 3:
            tree = sampler.state()
            sampler.close()
    return found


@pytest.mark.parametrize("env", ["Turning", "AtOnce"])
def test_sequences_begin_with_what_was_remembered(env: str) -> None:
    _, acting, version = setting("ppo", env)
    net = SpecNet(acting.network, version.params, torch.device("cpu"))
    truth, compared = Truth(acting, version), 0
    for fragment in gathered(env, acting, version, 40):
        (name,) = acting.network.states
        assert fragment["sequence"].tolist() == list(range(0, fragment.length, 4))
        for p, t in enumerate(fragment["sequence"].tolist()):
            for b in np.flatnonzero(fragment["valid"][t]).tolist():
                truth.holds({name: fragment[f"state0/{name}"][p, b]}, fragment["obs"][t, b])
                compared += bool(fragment["obs"][t, b, 2])
        _predicted(net, fragment, 1.0, only=("value",))
        if not len(fragment["final/index"]):  # else the last call was of these
            after = net.after[name].numpy()  # [T+1, B, size]
            for t, b in zip(*np.nonzero(fragment["valid"]), strict=True):
                truth.holds({name: after[t, b]}, fragment["obs"][t, b] + np.array([0, 0, 1], np.float32))
    assert compared > 30


@pytest.mark.parametrize(("env", "burn_in"), [("Turning", 0), ("AtOnce", 0), ("AtOnce", 3)])
def test_replay_learns_from_rows_whose_memory_is_right(env: str, burn_in: int) -> None:
    _, acting, version = setting("dqn", env, **{"algorithm.burn_in": burn_in, "algorithm.batch_size": 64})
    states, spec = acting.network.states, acting.env
    how: dict[str, Any] = {"capacity": 1200, "lanes": 6, "n_step": 2, "sequence": 4, "burn_in": burn_in}
    replay = Replay(spec.obs, spec.action, **how, states=states)
    fragments = gathered(env, acting, version, 16)
    for fragment in fragments:
        replay.insert(fragment)
    drawn = replay.sample(COUNT, np.random.default_rng(0))
    truth, learned = Truth(acting, version), set()
    actor = Actor(acting, places=np.zeros(COUNT))
    actor.load(version)
    state = {name: drawn[f"state0/{name}"].copy() for name in states}
    for row in range(drawn["first"].shape[1]):
        for name in state:
            state[name][drawn["first"][:, row]] = 0.0
        if 0 <= row - burn_in < 4:
            for n in np.flatnonzero(drawn["valid"][:, row - burn_in]).tolist():
                obs = drawn["obs"][n, row]
                truth.holds({name: each[n] for name, each in state.items()}, obs)
                learned.add(tuple(obs.tolist()))
        _, state = actor.step({"obs": drawn["obs"][:, row]}, state)
    assert drawn["valid"].any(axis=1).mean() > (0.9 if not burn_in else 0.3)  # few are drawn for nothing
    known = {tuple(obs.tolist()) for f in fragments[2:-4] for obs in f["obs"][:-1][f["valid"]]}
    assert len(known - learned) < 0.05 * len(known)


@pytest.mark.parametrize("env", ["Turning", "AtOnce"])
def test_players_that_do_not_learn_remember_too(env: str) -> None:
    hero = {"agents": ["agent_[01]"], "opponents": 2}
    forgetful = {"agents": ["agent_2"], "network": {"memory": "none"}}
    config, _, _ = setting("ppo", env, policies={"hero": hero, "other": forgetful})
    spec, _ = plans(config, probe(HERE + env), algorithm_class("ppo"))
    parts = {name: part.acting for name, part in spec.parts.items()}
    assert (parts["hero"].sequence, parts["other"].sequence) == (4, 0)
    versions = {
        name: PolicyVersion(0, acting.network.initial(np.random.default_rng(0)) * 2) for name, acting in parts.items()
    }
    version = TeamVersion.of(0, versions, versions, {"hero": versions["hero"]})
    truth = Truth(parts["hero"], versions["hero"])
    envs, tree, compared = EnvArgs(HERE + env, 4, 1), None, 0
    for _ in range(30):
        sampler = TeamSampler(spec, envs, 3)
        if tree is not None:
            sampler.load(tree)
        fragment = sampler.sample(version)
        assert "sequence" not in fragment.parts["other"].columns
        (player,) = sampler._actors
        seats = player._view.seats
        for b in np.flatnonzero(sampler._world.acting[seats.env, seats.agent]).tolist():
            obs = player._obs["obs"][b]
            truth.holds({name: state[b] for name, state in player._recurrent.items()}, obs)
            compared += bool(obs[2])
        tree = sampler.state()
        sampler.close()
    assert compared > 10


@pytest.mark.parametrize("scaled", [True, False], ids=["through the memory", "stopped before it"])
def test_a_central_critic_reads_the_global_state_beside_what_is_remembered(scaled: bool) -> None:
    _, acting, version = setting("ppo", "AtOnce", **{"algorithm.central_critic": True, "learner.scale_rewards": scaled})
    sampler = Sampler(acting, EnvArgs(HERE + "AtOnce", 2, 1, states=True), 8)
    fragment = sampler.sample(version)
    sampler.close()
    net = SpecNet(acting.network, version.params, torch.device("cpu"))
    batch = {k: torch.from_numpy(v) for k, v in rows(fragment, {}).items()}
    for minibatch in shuffled(batch, 16, np.random.default_rng(0)):
        found = []
        for by_hand in (True, False):
            net._by_hand = by_hand
            out = net.record(observations(minibatch), global_state=minibatch["global_state"])
            wanted = {name: torch.linspace(-1, 1, out[name].numel()).view_as(out[name]) for name in ("policy", "value")}
            found.append(net.backward(wanted).clone())
        torch.testing.assert_close(*found)
    values, _ = _predicted(net, fragment, 1.0)
    assert len(values["value"]) == (fragment.length + 1) * fragment.lanes
