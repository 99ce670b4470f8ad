"""Priorities that samplers record, against a plain loop over the steps that truly happened and weights set by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

from raynforce.algos.dqn import DQN
from raynforce.envs import faults
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.policies import acting as acting_module
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.spec import Linear, NetworkSpec, Tower, inputs_of
from raynforce.roles.sampler import Sampler

GAMMA = 0.9
Name = tuple[float, ...]


class Taken(NamedTuple):
    """A step that went well."""

    reward: float
    next_obs: Name
    terminated: bool


class Rough(gymnasium.Env[np.ndarray, int]):
    """Terminates, truncates, breaks or goes on as its seed says, and writes down in `log` what each step truly gave."""

    log: ClassVar[dict[Name, Taken]] = {}
    breaks: ClassVar[bool] = False
    observation_space = gymnasium.spaces.Box(-10.0, 1e3, (2,))
    action_space = gymnasium.spaces.Discrete(3)

    def obs(self) -> np.ndarray:
        return np.array([self.start, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.start, self.t = float(self.np_random.uniform(-1, 1)), 0
        return self.obs(), {}

    def step(self, action: int) -> Any:
        before, kind = name(self.obs()), self.np_random.random()
        self.t += 1
        if kind < 0.15 and self.breaks:
            raise RuntimeError("bad luck")
        reward, terminated, truncated = float(np.float32(self.np_random.normal())), kind > 0.85, kind > 0.7
        self.log[before] = Taken(reward, name(self.obs()), terminated)
        return self.obs(), reward, terminated, truncated, {}


def name(obs: np.ndarray) -> Name:
    return tuple(obs.tolist())


@pytest.fixture(autouse=True)
def rough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faults, "BREAKS_IN_A_ROW", 10_000)
    Rough.log.clear()
    yield
    Rough.log.clear()


# -- networks whose answers are known --------------------------------------------------------------------------

WEIGHTS = {
    "q": (np.array([[0.5, -1.0, 2.0], [0.25, 0.125, -0.5]], np.float32), np.array([1.0, 0.0, -1.0], np.float32)),
    "value": (np.array([[2.0], [0.5]], np.float32), np.array([3.0], np.float32)),
    "advantage": (np.array([[1.0, -1.0, 0.5], [0.5, 0.0, 0.25]], np.float32), np.array([0.0, 1.0, 5.0], np.float32)),
}


def known_q(obs: Name, dueling: bool) -> list[float]:
    """Action values, in plain numbers."""

    def linear(head: str) -> list[float]:
        weight, bias = WEIGHTS[head]
        return [
            sum(x * float(w[i]) for x, w in zip(obs, weight, strict=True)) + float(bias[i]) for i in range(len(bias))
        ]

    if not dueling:
        return linear("q")
    (value,), advantage = linear("value"), linear("advantage")
    return [value + a - sum(advantage) / 3 for a in advantage]


class Known(torch.nn.Module):
    """A user's own module with one linear layer for each head."""

    def __init__(self, heads: dict[str, int]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterDict(
            {f"{head}_{i}": torch.zeros(x.shape) for head in heads for i, x in enumerate(WEIGHTS[head])}
        )
        self.heads = heads

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {head: obs @ self.parts[f"{head}_0"] + self.parts[f"{head}_1"] for head in self.heads}


def make(leaves: Any, heads: dict[str, int]) -> torch.nn.Module:
    return Known(heads)


def known(dueling: bool, own_module: bool = False) -> tuple[ActingSpec, PolicyVersion]:
    env = probe(f"{__name__}:Rough")
    heads = {"value": 1, "advantage": 3} if dueling else {"q": 3}
    towers = () if own_module else tuple(Tower(head, (Linear(size),)) for head, size in heads.items())
    spec = ActingSpec(
        env,
        NetworkSpec(inputs_of(env.obs), towers, (), False),
        heads,
        f"{__name__}:make" if own_module else None,
        exploration="epsilon",
        values="advantage" if dueling else "q",
        record=("priority",),
        state_value="value" if dueling else None,
        gamma=GAMMA,
    )
    # A ParameterDict is in order of its keys.
    order = sorted(heads) if own_module else list(heads)
    params = np.concatenate([x.reshape(-1) for head in order for x in WEIGHTS[head]])
    return spec, PolicyVersion(0, params, schedules={"epsilon": 0.3})


def gathered(spec: ActingSpec, version: PolicyVersion, lanes: int, length: int, breaks: bool) -> list[Fragment]:
    Rough.breaks = False
    sampler = Sampler(spec, EnvArgs(f"{__name__}:Rough", lanes, 0), length)
    sampler._envs._shared.proven = True  # type: ignore[attr-defined]
    Rough.breaks = breaks
    return [sampler.sample(version) for _ in range(1 + 60 // length)]


# -- what is recorded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(("lanes", "length"), [(1, 1), (3, 5), (2, 16)])
@pytest.mark.parametrize("dueling", [False, True], ids=["q", "dueling"])
@pytest.mark.parametrize("acts_with", ["numpy", "torch", "module"])
def test_the_error_of_every_step_that_happened(
    acts_with: str, dueling: bool, lanes: int, length: int, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if acts_with == "torch":
        monkeypatch.setattr(acting_module, "TORCH_FROM", 0)
    spec, version = known(dueling, own_module=acts_with == "module")
    assert spec.acts_with == ("numpy" if acts_with == "numpy" else "torch")
    kinds = set()
    for fragment in gathered(spec, version, lanes, length, breaks):
        priority, terminated, truncated = (fragment[k] for k in ("priority", "terminated", "truncated"))
        assert priority.shape == (length, lanes)
        assert priority.dtype == np.float32
        assert priority.flags.c_contiguous
        for t in range(length):
            for lane in range(lanes):
                if not fragment["valid"][t, lane]:
                    assert priority[t, lane] == 0
                    kinds.add("invalid")
                    continue
                obs = name(fragment["obs"][t, lane])
                step = Rough.log[obs]
                future = 0.0 if step.terminated else max(known_q(step.next_obs, dueling))
                q = known_q(obs, dueling)[int(fragment["action"][t, lane])]
                assert priority[t, lane] == pytest.approx(abs(step.reward + GAMMA * future - q), abs=1e-5)
                kinds.add(("terminated", bool(terminated[t, lane]), "truncated", bool(truncated[t, lane])))
    ends = [(False, False), (True, True), (False, True)]  # the env says both where it terminates
    expected = {("terminated", a, "truncated", b) for a, b in ends} | ({"invalid"} if breaks else set())
    assert kinds == expected


@pytest.mark.parametrize("dueling", [False, True], ids=["q", "dueling"])
def test_environments_that_reset_a_step_later(dueling: bool) -> None:
    spec, version = cartpole(dueling=dueling, prioritized=True)
    sampler = Sampler(spec, EnvArgs("CartPole-v1", 4, 0, {"max_episode_steps": 12}), 16)
    idle = truncations = 0
    for _ in range(4):
        f = sampler.sample(version)
        assert not len(f["final/index"])
        q = by_network(spec.network, version, f["obs"].reshape(-1, 4), dueling).reshape(17, 4, 2)
        for t, lane in np.ndindex(16, 4):
            future = 0.0 if f["terminated"][t, lane] else q[t + 1, lane].max()
            error = abs(f["reward"][t, lane] + 0.99 * future - q[t, lane, f["action"][t, lane]])
            assert f["priority"][t, lane] == pytest.approx(error * f["valid"][t, lane], abs=1e-5)
            idle += not f["valid"][t, lane]
            truncations += f["truncated"][t, lane]
    assert idle > 3
    assert truncations > 3


def by_network(network: NetworkSpec, version: PolicyVersion, obs: np.ndarray, dueling: bool) -> np.ndarray:
    net = NumpyNet(network)
    net.load(version.params)
    out = net({"obs": obs})
    return out["value"] + out["advantage"] - out["advantage"].mean(1, keepdims=True) if dueling else out["q"]


@pytest.mark.parametrize("dueling", [False, True], ids=["q", "dueling"])
@pytest.mark.parametrize("own_module", [False, True], ids=["spec", "module"])
def test_nothing_else_changes(dueling: bool, own_module: bool) -> None:
    spec, version = known(dueling, own_module)
    with_it = gathered(spec, version, 3, 5, True)
    without = gathered(replace(spec, record=(), gamma=1.0, state_value=None), version, 3, 5, True)
    for one, other in zip(with_it, without, strict=True):
        assert [k for k in one.columns if k != "priority"] == list(other.columns)
        assert all(one[k].tobytes() == other[k].tobytes() for k in other.columns)


def test_a_sampler_rebuilt_from_its_state_records_the_same() -> None:
    spec, version = cartpole(prioritized=True)
    args = EnvArgs("CartPole-v1", 3, 0)
    sampler, other = Sampler(spec, args, 7), Sampler(spec, args, 7)
    sampler.sample(version)
    other.load(sampler.state())
    assert np.array_equal(sampler.sample(version)["priority"], other.sample(version)["priority"])


# -- who records -----------------------------------------------------------------------------------------------


def cartpole(scale_rewards: bool = False, **hp: Any) -> tuple[ActingSpec, PolicyVersion]:
    layers = {"env": "CartPole-v1", "algo": "dqn", "preset": "none", "learner": {"scale_rewards": scale_rewards}}
    config = resolve(layers, {"algorithm": hp})[0]
    spec = DQN(config, probe("CartPole-v1")).acting()
    return spec, PolicyVersion(0, spec.network.initial(np.random.default_rng(0)), schedules={"epsilon": 0.5})


def test_dqn_records_priorities_where_it_uses_them_and_rewards_have_their_own_units() -> None:
    assert cartpole()[0].record == ()
    assert cartpole(prioritized=True, scale_rewards=True)[0].record == ()
    spec, _ = cartpole(prioritized=True, gamma=0.7)
    assert (spec.record, spec.gamma, spec.state_value) == (("priority",), 0.7, None)
    spec, _ = cartpole(prioritized=True, dueling=True)
    assert (spec.values, spec.state_value) == ("advantage", "value")


def test_moves_in_turns_have_the_error_of_what_they_led_to() -> None:
    """What a move earns is known when the others have moved: after a fragment's end perhaps."""
    env = "raynforce.envs.tiny_agents:Nim"
    found = probe(env)
    spec = ActingSpec(
        found,
        NetworkSpec(inputs_of(found.obs), (Tower("q", (Linear(3),)),), (), False),
        {"q": 3},
        exploration="epsilon",
        values="q",
        record=("priority",),
        gamma=GAMMA,
    )
    params = np.random.default_rng(0).normal(size=11 * 3 + 3).astype(np.float32)
    version = PolicyVersion(0, params, schedules={"epsilon": 0.5})
    sampler = Sampler(spec, EnvArgs(env, 3, 0), 5)
    outcomes = set()
    for _ in range(30):
        f = sampler.sample(version)
        q = by_network(spec.network, version, f["obs"].reshape(-1), False).reshape(*f["obs"].shape, 3)
        assert f["priority"].shape == f["valid"].shape
        for t, lane in np.ndindex(*f["valid"].shape):
            future = 0.0 if f["terminated"][t, lane] else q[t + 1, lane].max()
            error = abs(f["reward"][t, lane] + GAMMA * future - q[t, lane, f["action"][t, lane]])
            assert f["priority"][t, lane] == pytest.approx(error * f["valid"][t, lane], abs=1e-5)
            outcomes.add(float(f["reward"][t, lane]))
    assert outcomes == {-1.0, 0.0, 1.0}
