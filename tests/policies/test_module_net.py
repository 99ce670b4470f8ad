"""A user's own torch module: its parameters live in the flat vector, and everything else stays the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raynforce.errors import UsageError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.spec import Free, NetworkSpec, inputs_of
from raynforce.policies.torch_net import ModuleNet, TorchActor, build
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

CPU = torch.device("cpu")
HEADS = {"policy": 2, "value": 1}
BOX = (ObsLeaf("obs", "box", (3,), "float32"),)
PLAIN = NetworkSpec(inputs_of(BOX), ())
GAUSSIAN = NetworkSpec(inputs_of(BOX), (), (Free("log_std", 2, -0.5),))
DICT = (
    ObsLeaf("obs/place", "discrete", (), "int64", sizes=(4,), start=(0,)),
    ObsLeaf("obs/speed", "box", (2, 3), "float32"),
)


# -- what users might write -----------------------------------------------------------------------------------


class Own(nn.Module):
    """Layers that no spec has, a parameter that no head uses, and one used twice."""

    def __init__(self, width: int, heads: Mapping[str, int]) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.LayerNorm(5))
        self.heads = nn.ModuleDict({name: nn.Linear(5, size) for name, size in heads.items()})
        self.unused = nn.Parameter(torch.ones(3))
        self.torso.again = self.torso[0]

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        h = self.torso[2](self.torso[1](self.torso[0](obs)))
        return {name: head(h) for name, head in self.heads.items()}


class OfDict(nn.Module):
    def __init__(self, heads: Mapping[str, int]) -> None:
        super().__init__()
        self.places = nn.Embedding(4, 5)
        self.own = Own(11, heads)

    def forward(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        assert obs["obs/place"].dtype == torch.int64
        out: dict[str, Tensor] = self.own(torch.cat([self.places(obs["obs/place"]), obs["obs/speed"].flatten(1)], 1))
        return out


class Says(nn.Module):
    """Answers with whatever it was given, whether that fits or not."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.answer = answer

    def forward(self, obs: Tensor) -> Any:
        return self.answer(len(obs))


def make(leaves: Sequence[ObsLeaf], heads: Mapping[str, int]) -> nn.Module:
    return Own(leaves[0].shape[0], heads)


def make_dict(leaves: Sequence[ObsLeaf], heads: Mapping[str, int]) -> nn.Module:
    assert [leaf.path for leaf in leaves] == ["obs/place", "obs/speed"]
    return OfDict(heads)


def broken(leaves: Sequence[ObsLeaf], heads: Mapping[str, int]) -> nn.Module:
    raise KeyError("width")


def not_a_module(leaves: Sequence[ObsLeaf], heads: Mapping[str, int]) -> Any:
    return make


def batch_norm(leaves: Sequence[ObsLeaf], heads: Mapping[str, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4)))


def no_parameters(leaves: Sequence[ObsLeaf], heads: Mapping[str, int]) -> nn.Module:
    return nn.Flatten()


# -- tests ----------------------------------------------------------------------------------------------------


def built(spec: NetworkSpec, factory: Any = make, leaves: Any = BOX, seed: int = 0) -> ModuleNet:
    net = build(spec, f"{__name__}:{factory.__name__}", HEADS, leaves, seed, CPU)
    assert isinstance(net, ModuleNet)
    return net


def rows(count: int = 6, seed: int = 0) -> dict[str, Tensor]:
    return {"obs": torch.from_numpy(np.random.default_rng(seed).standard_normal((count, 3), dtype=np.float32))}


def objective(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    z = first["policy"] * torch.exp(-first["log_std"])
    return z.square().mean() + (first["value"] * second["value"]).mean() + second["log_std"].sum()


def same_module(net: ModuleNet, factory: Any = make, leaves: Any = BOX) -> nn.Module:
    """A fresh module of the user's with the network's parameters, untouched by Raynforce."""
    module: nn.Module = factory(leaves, HEADS)
    torch.nn.utils.vector_to_parameters(net.flat[: sum(p.numel() for p in module.parameters())], module.parameters())
    return module


def test_outputs_are_the_module_s_and_the_free_vectors() -> None:
    net = built(GAUSSIAN)
    out = net(rows())
    expected = same_module(net)(rows()["obs"])
    assert list(out) == ["policy", "value", "log_std"]
    torch.testing.assert_close(out["policy"], expected["policy"])
    torch.testing.assert_close(out["value"], expected["value"])
    assert out["log_std"].tolist() == [-0.5, -0.5]


def test_gradient_is_autograd() -> None:
    net = built(GAUSSIAN)
    module = same_module(net)
    log_std = torch.full((2,), -0.5, requires_grad=True)
    obs = [rows(seed=i) for i in range(2)]
    outs = [{**module(o["obs"]), "log_std": log_std} for o in obs]
    expected = torch.autograd.grad(objective(*outs), [*module.parameters(), log_std], allow_unused=True)
    sizes = [p.numel() for p in module.parameters()] + [2]
    flat = torch.cat([torch.zeros(n) if g is None else g.reshape(-1) for g, n in zip(expected, sizes, strict=True)])
    assert len(flat) == len(net.flat)
    for _ in range(2):  # the second time, nothing is left of the first
        found = net.gradient(objective(net(obs[0]), net(obs[1])))
        torch.testing.assert_close(found, flat, rtol=1e-5, atol=1e-6)


def test_a_step_on_the_flat_vector_is_a_step_of_the_module() -> None:
    net = built(GAUSSIAN)
    gradient = net.gradient(objective(net(rows()), net(rows(seed=1))))
    with torch.no_grad():
        net.flat -= 0.1 * gradient
    expected = same_module(net)(rows()["obs"])
    torch.testing.assert_close(net(rows())["policy"], expected["policy"])
    torch.testing.assert_close(net(rows())["log_std"], net.flat[-2:])


@pytest.mark.parametrize("normalize", [False, True])
def test_other_parameters(normalize: bool) -> None:
    net, other = built(PLAIN), built(PLAIN, seed=1)
    if normalize:
        for one in (net, other):
            one.normalize_with(np.array([1, 2, 3], np.float32), np.array([2, 1, 0.5], np.float32))
    own = net.flat.clone()
    with torch.no_grad():
        found, expected = net(rows(), params=other.flat.clone()), other(rows())
    assert not torch.equal(net.flat, other.flat)
    torch.testing.assert_close(dict(found), dict(expected))
    assert torch.equal(net.flat, own)


def test_other_parameters_hold_the_free_vectors_too() -> None:
    net = built(GAUSSIAN)
    with torch.no_grad():
        found = net(rows(), params=torch.full_like(net.flat, 0.25))
    assert found["log_std"].tolist() == [0.25, 0.25]


def test_normaliser_is_the_first_layer() -> None:
    net = built(replace(PLAIN, normalize=True))
    shift, scale = np.array([1, 2, 3], np.float32), np.array([2, 1, 100], np.float32)
    net.normalize_with(shift, scale)
    x = ((rows()["obs"] - torch.from_numpy(shift)) * torch.from_numpy(scale)).clamp(-10, 10)
    torch.testing.assert_close(net(rows())["policy"], same_module(net)(x)["policy"])


def dict_rows(count: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    speed = rng.standard_normal((count, 2, 3), dtype=np.float32)
    return {"obs/place": rng.integers(4, size=count), "obs/speed": speed}


def test_several_leaves_come_as_a_dict() -> None:
    net = built(NetworkSpec(inputs_of(DICT), ()), make_dict, DICT)
    obs = dict_rows()
    module = same_module(net, make_dict, DICT)
    expected = module({k: torch.from_numpy(v) for k, v in obs.items()})
    np.testing.assert_allclose(net.predict(obs)["policy"], expected["policy"].detach(), atol=1e-6)


def test_several_leaves_are_normalised_each_by_its_part() -> None:
    net = built(NetworkSpec(inputs_of(DICT), (), normalize=True), make_dict, DICT)
    obs = dict_rows()
    shift = np.array([0, 0, 0, 0, 1, 2, 3, 4, 5, 6], np.float32)  # one-hot codes are left alone
    net.normalize_with(shift, np.array([1, 1, 1, 1, 2, 2, 2, 2, 2, 2], np.float32))
    by_hand = {**obs, "obs/speed": np.clip((obs["obs/speed"] - shift[4:].reshape(2, 3)) * 2, -10, 10)}
    expected = same_module(net, make_dict, DICT)({k: torch.from_numpy(v) for k, v in by_hand.items()})
    np.testing.assert_allclose(net.predict(obs)["policy"], expected["policy"].detach(), atol=1e-5)


def test_building_is_seeded_and_leaves_torch_s_stream_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (built(PLAIN, seed=seed).flat for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_module_actor_is_the_module() -> None:
    spec = replace(PLAIN, normalize=True)
    net = built(spec, seed=3)
    action = ActionSpec("box", (2,), "float32", low=(-np.inf, -np.inf), high=(np.inf, np.inf))
    actor = TorchActor(ActingSpec(EnvSpec("Own-v0", BOX, action), spec, HEADS, factory=f"{__name__}:make"))
    shift, scale = np.array([1, 2, 3], np.float32), np.array([2, 1, 0.5], np.float32)
    flat = net.flat.numpy().copy()
    actor.load(flat)
    obs = {k: v.numpy() for k, v in rows().items()}
    expected = same_module(net)(rows()["obs"])
    np.testing.assert_allclose(actor(obs)["policy"], expected["policy"].detach(), atol=1e-6)
    net.normalize_with(shift, scale)
    actor.load(flat, shift, scale)
    np.testing.assert_array_equal(actor(obs)["policy"], net.predict(obs)["policy"])
    flat[:] = 0  # the actor keeps a copy
    np.testing.assert_array_equal(actor(obs)["policy"], net.predict(obs)["policy"])


def test_actor_acts_with_the_module() -> None:
    net = built(GAUSSIAN)
    action = ActionSpec("box", (2,), "float32", low=(-np.inf, -np.inf), high=(np.inf, np.inf))
    spec = ActingSpec(EnvSpec("Own-v0", BOX, action), GAUSSIAN, HEADS, factory=f"{__name__}:make")
    actor = Actor(ActingSpec.from_json(spec.to_json()))
    actor.load(PolicyVersion(1, net.flat.detach().numpy().copy()))
    obs = {k: v.numpy() for k, v in rows().items()}
    np.testing.assert_array_equal(actor.greedy(obs), net.predict(obs)["policy"])


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda n: torch.zeros(n, 2), "Tensor"),
        (lambda n: (torch.zeros(n, 2), torch.zeros(n, 1)), "tuple"),
        (lambda n: {"policy": torch.zeros(n, 2)}, "'value'"),
        (lambda n: {"policy": torch.zeros(n, 3), "value": torch.zeros(n, 1)}, r"'policy' \[N, 2\]; got.*\(6, 3\)"),
        (lambda n: {"policy": torch.zeros(n, 2), "value": torch.zeros(n)}, r"'value' \[N, 1\]; got.*\(6,\)"),
        pytest.param(lambda n: {"policy": None, "value": torch.zeros(n, 1)}, "'policy'"),
    ],
)
def test_wrong_answers(answer: Any, found: str) -> None:
    net = ModuleNet(PLAIN, Says(answer), HEADS, CPU)
    with pytest.raises(UsageError, match=f"network.factory.*{found}"):
        net(rows())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("broken", "raised KeyError: 'width'"),
        ("not_a_module", "returned function, not a torch.nn.Module"),
        ("batch_norm", "batch normalisation: use layer normalisation"),
        ("no_parameters", "without parameters"),
        ("mak", "did you mean 'make'"),
    ],
)
def test_wrong_factories(factory: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        build(PLAIN, f"{__name__}:{factory}", HEADS, BOX, 0, CPU)
    assert "\n" not in str(error.value)
