"""Recurrent layers: both interpreters beside torch.nn.LSTM and torch.nn.GRU on the same weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raynforce.errors import UsageError
from raynforce.policies.network import Sequences
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.spec import GRU, LSTM, Activation, Input, LayerNorm, Linear, NetworkSpec, Tower
from raynforce.policies.torch_net import SpecNet

KINDS: Any = pytest.mark.parametrize("layer", [LSTM(5), GRU(5)], ids=["lstm", "gru"])
CPU = torch.device("cpu")


def spec(*layers: Any, wide: int = 3) -> NetworkSpec:
    torso = Tower("core", layers)
    heads = [Tower(name, (Linear(size, 1.0),), source="core") for name, size in (("policy", 2), ("value", 1))]
    return NetworkSpec((Input("obs", "vector", (wide,)),), (torso, *heads))


def parameters(of: NetworkSpec, seed: int = 0) -> np.ndarray:
    flat = of.initial(np.random.default_rng(seed))
    return flat + np.random.default_rng(seed + 1).normal(0, 0.1, flat.shape).astype(np.float32)


def twin(net: SpecNet, layer: LSTM | GRU, wide: int) -> torch.nn.LSTM | torch.nn.GRU:
    """Torch's own module with the layer's weights; its gates are in another order."""
    module = (torch.nn.LSTM if isinstance(layer, LSTM) else torch.nn.GRU)(wide, layer.size)
    views = {p.name: p.view(net.flat) for p in net.spec.params()}
    order = torch.arange(layer.gates * layer.size)
    if isinstance(layer, LSTM):
        i, f, o, g = order.split(layer.size)
        order = torch.cat([i, f, g, o])
    with torch.no_grad():
        module.weight_ih_l0.copy_(views["core.0.x.weight"].T[order])
        module.weight_hh_l0.copy_(views["core.0.h.weight"].T[order])
        module.bias_ih_l0.copy_(views["core.0.bias"][order])
        module.bias_hh_l0.zero_()
        if isinstance(layer, GRU):
            module.bias_hh_l0[-layer.size :] = views["core.0.h.bias"]
    return module


def sequences(net: SpecNet, length: int, width: int, seed: int = 0, wide: int = 3) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(length * width, wide)).astype(np.float32)
    first = rng.random((length, width)) < 0.2
    state = {f"state0/{k}": rng.normal(size=(width, n)).astype(np.float32) for k, n in net.spec.states.items()}
    return {k: torch.from_numpy(v) for k, v in {"obs": obs, "first": first, **state}.items()}


@KINDS
def test_outputs_and_gradients_are_those_of_torch(layer: LSTM | GRU) -> None:
    net = SpecNet(of := spec(layer), parameters(spec(layer)), CPU)
    given = sequences(net, 7, 4)
    del given["first"]
    module = twin(net, layer, 3)
    state = given["state0/core.0"][None]
    start = tuple(s.contiguous() for s in state.chunk(2, -1)) if isinstance(layer, LSTM) else state
    expected, _ = module(given["obs"].view(7, 4, 3), start)
    views = {p.name: p.view(net.flat) for p in of.params()}
    policy = expected.reshape(28, 5) @ views["policy.0.weight"] + views["policy.0.bias"]
    out = net.record(given)
    torch.testing.assert_close(out["policy"], policy, atol=1e-6, rtol=1e-5)

    weights = torch.randn(28, 2)
    (policy * weights).sum().backward()
    found = net.backward({"policy": weights}).clone()
    grads = {p.name: p.view(found) for p in of.params()}
    order = torch.arange(layer.gates * layer.size)
    if isinstance(layer, LSTM):
        i, f, g, o = order.split(layer.size)
        order = torch.cat([i, f, o, g])
    assert module.weight_ih_l0.grad is not None
    assert module.weight_hh_l0.grad is not None
    torch.testing.assert_close(grads["core.0.x.weight"], module.weight_ih_l0.grad[order].T, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads["core.0.h.weight"], module.weight_hh_l0.grad[order].T, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads["core.0.bias"], module.bias_ih_l0.grad[order], atol=1e-5, rtol=1e-4)
    if isinstance(layer, GRU):
        torch.testing.assert_close(grads["core.0.h.bias"], module.bias_hh_l0.grad[-5:], atol=1e-5, rtol=1e-4)


@KINDS
@pytest.mark.parametrize("rows", [None, [0, 3, 4, 11, 20]], ids=["all", "some"])
def test_by_hand_is_autograd_across_resets(layer: LSTM | GRU, rows: list[int] | None) -> None:
    of = spec(Linear(4), Activation("tanh"), layer, Activation("tanh"))
    net = SpecNet(of, parameters(of), CPU)
    given = sequences(net, 6, 4)
    if rows is not None:
        given["rows"] = torch.tensor(rows)
    weights = torch.randn(len(rows or range(24)), 2), torch.randn(len(rows or range(24)), 1)

    out = net.record(given)
    by_hand = net.backward({"policy": weights[0], "value": weights[1]}).clone()
    mixed = net(given)
    assert torch.equal(mixed["policy"], out["policy"])
    of_loss = net.gradient((mixed["policy"] * weights[0]).sum() + (mixed["value"] * weights[1]).sum()).clone()
    flat = net.flat.clone().requires_grad_()
    plain = net(given, params=flat)
    ((plain["policy"] * weights[0]).sum() + (plain["value"] * weights[1]).sum()).backward()
    assert flat.grad is not None
    torch.testing.assert_close(by_hand, flat.grad, atol=2e-5, rtol=1e-4)
    assert torch.equal(by_hand, of_loss)


@KINDS
def test_numpy_steps_are_torch_sequences(layer: LSTM | GRU) -> None:
    of = spec(Linear(6), Activation("relu"), layer)
    flat = parameters(of)
    net, acting = SpecNet(of, flat, CPU), NumpyNet(of, ("policy",))
    acting.load(flat)
    given = sequences(net, 50, 4)
    out, after = net.unroll(given)
    state = {name: given[f"state0/{name}"].numpy() for name in of.states}
    for t in range(50):
        state = {name: np.where(given["first"].numpy()[t, :, None], 0, array) for name, array in state.items()}
        found, state = acting.step({"obs": given["obs"].numpy()[4 * t : 4 * t + 4]}, state)
        np.testing.assert_allclose(found["policy"], out["policy"][4 * t : 4 * t + 4], atol=1e-5)
        for name, array in state.items():
            np.testing.assert_allclose(array, after[name][t], atol=1e-5)


def test_layers_without_a_derivative_by_hand_go_through_autograd() -> None:
    of = spec(Linear(4), LayerNorm(), GRU(5))
    net = SpecNet(of, parameters(of), CPU)
    given = sequences(net, 5, 2)
    out = net(given)
    found = net.gradient(out["value"].square().sum())
    assert found.abs().min() >= 0
    assert all(p.view(found).abs().max() > 0 for p in of.params() if "policy" not in p.name)


def test_a_network_with_memory_and_without_a_state_says_so() -> None:
    of = spec(LSTM(5))
    net, acting = SpecNet(of, parameters(of), CPU), NumpyNet(of)
    acting.load(parameters(of))
    with pytest.raises(UsageError, match="has memory and was given no state"):
        net({"obs": torch.zeros(2, 3)})
    with pytest.raises(UsageError, match="has memory"):
        acting({"obs": np.zeros((2, 3), np.float32)})


def test_a_spec_with_memory_is_plain_data() -> None:
    of = spec(LSTM(5), GRU(3))
    assert NetworkSpec.from_json(of.to_json()) == of
    assert of.states == {"core.0": 10, "core.1": 3}
    assert of.facts()["core.0"] == "LSTM"
    assert "own_state" not in of.to_json()
    forget = {p.name: p.view(of.initial(np.random.default_rng(0))) for p in of.params()}["core.0.bias"]
    np.testing.assert_array_equal(forget, [0] * 5 + [1] * 5 + [0] * 10)
    assert Sequences.of({"state0/a": torch.zeros(3, 2)}, ["a"]).width == 3


@KINDS
@pytest.mark.parametrize("norm", [(), (LayerNorm(),)], ids=["by hand", "by autograd"])
def test_a_tower_that_learns_alone_reads_the_memory_and_does_not_change_it(layer: LSTM | GRU, norm: Any) -> None:
    shared = spec(layer, *norm)
    core, policy, value = shared.towers
    alone = replace(shared, towers=(core, policy, replace(value, learns_alone=True)))
    nets = [SpecNet(of, parameters(shared), CPU) for of in (shared, alone)]
    given = sequences(nets[0], 7, 4)
    seen = [net(given) for net in nets]
    for name in ("policy", "value"):
        torch.testing.assert_close(seen[0][name], seen[1][name])
    all_of, by_value = (
        net.gradient(out["policy"].square().sum() + out["value"].square().sum()).clone()
        for net, out in zip(nets, seen, strict=True)
    )
    by_policy = nets[0].gradient(nets[0](given)["policy"].square().sum()).clone()
    for p in shared.params():
        mine = p.view(by_value)
        torch.testing.assert_close(mine, p.view(all_of if p.name.startswith("value") else by_policy))
    assert not torch.allclose(all_of, by_value)
    assert NetworkSpec.from_json(json.loads(json.dumps(alone.to_json()))) == alone
