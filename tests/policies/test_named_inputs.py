"""Inputs beside the observation: in both interpreters, in checkpoints, beside images, and not where samplers act."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from raynforce.algos.dqn import DQN
from raynforce.errors import UsageError
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.images import with_images
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.spec import Activation, Free, Input, Linear, NetworkSpec, Tower, action_input, inputs_of, mlp
from raynforce.policies.torch_net import IMAGES_AT_ONCE, SpecNet
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

CPU = torch.device("cpu")
VECTOR = (ObsLeaf("obs", "box", (3,), "float32"),)
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
CHOICES = ActionSpec("multidiscrete", (2,), "int64", sizes=(2, 3), start=(5, 7))
HIDDEN = mlp((4,), "tanh")


def critic(action: ActionSpec, *more: Input, source: tuple[str, ...] = ("input", "action")) -> NetworkSpec:
    towers = (Tower("policy", (*HIDDEN, Linear(2))), Tower("q", (*HIDDEN, Linear(1)), source))
    free = (Free("log_std", 2), Free("log_alpha", 1))
    return NetworkSpec(inputs_of(VECTOR), towers, free, named=(action_input(action), *more))


def start(spec: NetworkSpec) -> np.ndarray:
    return spec.initial(np.random.default_rng(0))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("action", "batch"),
    [(BOX, np.array([[0.5, -2.0], [30.0, 0.25]], np.float32)), (CHOICES, np.array([[0, 2], [1, 0]]))],
)
def test_torch_and_numpy_agree(action: ActionSpec, batch: np.ndarray, normalize: bool) -> None:
    """An action is taken as it was recorded, and never normalised."""
    spec = critic(action, Input("goal", "vector", ()), source=("goal", "input", "action"))
    spec = NetworkSpec(spec.inputs, spec.towers, spec.free, normalize, spec.named)
    affine = (np.full(3, 0.5, np.float32), np.full(3, 2.0, np.float32))
    net, acting, flat = SpecNet(spec, start(spec), CPU), NumpyNet(spec), start(spec)
    net.normalize_with(*affine)
    acting.load(flat, *affine)
    obs, goal = {"obs": np.ones((2, 3), np.float32)}, np.array([1.0, 2.0], np.float32)
    found, expected = acting(obs, action=batch, goal=goal), net.predict(obs, action=batch, goal=goal)
    assert list(found) == list(spec.outputs)
    for name in spec.outputs:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)
    seen = (obs["obs"] - affine[0]) * affine[1] if normalize else obs["obs"]
    code = batch if action.kind == "box" else np.eye(5, dtype=np.float32)[[[0, 4], [1, 2]]].sum(1)
    weights = {p.name: p.view(flat) for p in spec.params()}
    joined = np.concatenate([goal[:, None], seen, code], 1)
    by_hand = np.tanh(joined @ weights["q.0.weight"]) @ weights["q.2.weight"]
    np.testing.assert_allclose(found["q"], by_hand, atol=1e-6)


def test_numpy_wants_what_is_asked_for_and_no_more() -> None:
    spec = critic(BOX)
    obs = {"obs": np.ones((2, 3), np.float32)}
    policy, every = NumpyNet(spec, ("policy", "log_std")), NumpyNet(spec)
    policy.load(start(spec))
    every.load(start(spec))
    assert list(policy(obs)) == ["policy", "log_std"]
    with pytest.raises(UsageError, match=r"^output 'q' reads action, which this call was not given: add action=…$"):
        every(obs)
    with pytest.raises(UsageError, match=r"^'acton' is no input of this network \(did you mean 'action'\?\)"):
        policy(obs, acton=np.ones((2, 2), np.float32))
    with pytest.raises(UsageError, match=r"^action has the shape \[2\]; wanted is \[N, 2\]$"):
        every(obs, action=np.ones(2, np.float32))


def test_a_tower_needs_what_those_below_it_read() -> None:
    towers = (Tower("both", (Linear(2),), ("input", "action")), Tower("q", (Linear(1),), "both"))
    spec = NetworkSpec(inputs_of(VECTOR), (*towers, Tower("v", (Linear(1),))), named=(action_input(BOX),))
    assert spec.needs == {"both": {"action"}, "q": {"action"}, "v": set()}
    net = SpecNet(spec, start(spec), CPU)
    assert list(net({"obs": torch.ones(1, 3)})) == ["v"]
    assert list(net({"obs": torch.ones(1, 3)}, action=torch.ones(1, 2))) == ["q", "v"]


def test_what_is_saved_has_them_only_if_there_are_any() -> None:
    spec = critic(BOX)
    assert NetworkSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert "network.named.action" in spec.facts()
    plain = NetworkSpec(inputs_of(VECTOR), spec.towers[:1])
    assert "named" not in plain.to_json()
    assert not any("named" in fact for fact in plain.facts())
    assert NetworkSpec.from_json(json.loads(json.dumps(plain.to_json()))) == plain


def acting(spec: NetworkSpec, **more: Any) -> ActingSpec:
    return ActingSpec(EnvSpec("Own-v0", VECTOR, BOX), spec, {"policy": 2, "q": 1}, **more)


def test_samplers_act_without_them() -> None:
    spec = acting(critic(BOX), record=("logp",))
    actor = Actor(ActingSpec.from_json(json.loads(json.dumps(spec.to_json()))))
    actor.load(PolicyVersion(0, start(spec.network)))
    assert actor.greedy({"obs": np.ones((2, 3), np.float32)}).shape == (2, 2)


def test_a_policy_that_reads_the_action_is_refused() -> None:
    towers = (Tower("policy", (Linear(2),), ("input", "action")),)
    network = NetworkSpec(inputs_of(VECTOR), towers, (Free("log_std", 2),), named=(action_input(BOX),))
    with pytest.raises(
        UsageError, match=r"^samplers act by 'policy', which reads action: they have the observation alone"
    ):
        acting(network)


def test_convolutions_come_in_front_of_critics_too() -> None:
    leaves = [ObsLeaf("obs/camera", "box", (8, 8, 3), "uint8"), ObsLeaf("obs/speed", "box", (2,), "float32")]
    towers = [Tower("policy", (Linear(2),)), Tower("q", (Linear(1),), ("action", "input"))]
    inputs, seeing = with_images(leaves, towers, None, ["action"])
    assert [t.source for t in seeing] == ["obs/camera", ("conv/camera", "input"), ("action", "conv/camera", "input")]
    spec = NetworkSpec(inputs, seeing, named=(action_input(BOX),))
    net = SpecNet(spec, start(spec), CPU)
    count = IMAGES_AT_ONCE + 3  # more than `predict` evaluates together
    rng = np.random.default_rng(0)
    obs = {
        "obs/camera": rng.integers(256, size=(count, 8, 8, 3)).astype(np.uint8),
        "obs/speed": rng.standard_normal((count, 2), dtype=np.float32),
    }
    action = rng.standard_normal((count, 2), dtype=np.float32)
    numpy = NumpyNet(spec)
    numpy.load(start(spec))
    np.testing.assert_allclose(net.predict(obs, action=action)["q"], numpy(obs, action=action)["q"], atol=1e-5)


def test_towers_that_join_the_input_with_another_tower_read_what_they_did() -> None:
    leaves = [ObsLeaf("obs/camera", "box", (8, 8, 3), "uint8"), ObsLeaf("obs/speed", "box", (2,), "float32")]
    towers = [Tower("torso", (Linear(2),)), Tower("q", (Linear(1),), ("torso", "input"))]
    assert with_images(leaves, towers, None, [])[1][-1].source == ("torso", "input")


def test_images_that_are_floats_are_not_changed() -> None:
    """Bytes are scaled in place of their copy; what a model has dreamed has no copy, and may have gradients."""
    leaf = ObsLeaf("obs", "box", (8, 8, 3), "uint8")
    inputs, towers = with_images([leaf], [Tower("q", (Linear(1),))], None)
    spec = NetworkSpec(inputs, towers)
    net = SpecNet(spec, start(spec), CPU)
    dreamed = torch.full((1, 3, 8, 8), 100.0).permute(0, 2, 3, 1).requires_grad_()
    out = net({"obs": dreamed})["q"]
    assert (dreamed == 100).all()
    torch.testing.assert_close(out, net({"obs": dreamed.detach().to(torch.uint8)})["q"])
    (found,) = torch.autograd.grad(out.sum(), dreamed)
    assert found.any()


def test_an_algorithm_s_towers_may_read_the_action() -> None:
    env = EnvSpec("Own-v0", VECTOR, ActionSpec("discrete", (), "int64", sizes=(3,), start=(4,)))
    algo = DQN(resolve({"algo": "dqn", "env": "Own-v0"})[0], env)
    spec = algo.spec(Tower("q", (Linear(1),), ("input", "action")))
    assert spec.named == (Input("action", "onehot", (), (3,), (0,)),)  # recorded actions count from 0
    assert spec.parts["q.0.weight"] == slice(0, 6)
    assert algo.spec(Tower("action", (Linear(2),)), Tower("q", (Linear(1),), "action")).named == ()


DEEP = (*HIDDEN, Linear(2), Activation("relu"), Linear(1))
THROUGH: dict[str, tuple[Tower, ...]] = {
    "a critic": (Tower("q", DEEP, ("input", "action")),),
    "two, in another order": (Tower("q", DEEP, ("action", "input")), Tower("p", DEEP, ("input", "action"))),
    "one after another": (Tower("h", HIDDEN, ("input", "action")), Tower("q", DEEP, ("h", "action", "input"))),
    "an activation first": (Tower("q", (Activation("tanh"), Linear(1)), ("input", "action")),),
    "no layer": (Tower("q", (), ("input", "action")),),
    "by autograd": (Tower("q", (Linear(3), Activation("silu"), Linear(1)), ("input", "action")),),
}


@pytest.mark.parametrize("case", THROUGH)
def test_gradients_by_an_input_are_autograds(case: str) -> None:
    spec = NetworkSpec(inputs_of(VECTOR), THROUGH[case], named=(action_input(BOX),))
    net = SpecNet(spec, start(spec), CPU)
    obs, action = {"obs": torch.randn(5, 3)}, torch.randn(5, 2, requires_grad=True)
    made = net(obs, params=net.flat.clone(), action=action)
    slopes = {name: torch.randn(made[name].shape) for name in spec.outputs}
    (expected,) = torch.autograd.grad([made[name] for name in slopes], action, list(slopes.values()))
    found, back = net.through("action", obs, tuple(slopes), action=action.detach())
    for name in slopes:
        torch.testing.assert_close(found[name], made[name].detach())
    torch.testing.assert_close(back(slopes), expected, rtol=1e-4, atol=1e-6)


def test_only_some_outputs_are_made() -> None:
    spec = critic(BOX)
    net, obs = SpecNet(spec, start(spec), CPU), {"obs": torch.ones(2, 3)}
    assert list(net(obs, only=("policy",), action=torch.ones(2, 2))) == ["policy"]
    assert list(net.record(obs, only=("q", "log_alpha"), action=torch.ones(2, 2))) == ["q", "log_alpha"]
    found = net.backward({"q": torch.ones(2, 1)})
    assert found[net.parts["q.0.weight"]].any()
    assert not found[net.parts["policy.0.weight"]].any()
