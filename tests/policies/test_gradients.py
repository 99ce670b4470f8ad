"""Gradients of compositions of calls are those of plain torch modules, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raynforce.errors import AlgorithmError, UsageError
from raynforce.policies.network import Network
from raynforce.policies.spec import (
    Activation,
    Conv,
    Free,
    Input,
    Layer,
    LayerNorm,
    Linear,
    NetworkSpec,
    Tower,
    action_input,
    inputs_of,
    mlp,
)
from raynforce.policies.torch_net import ModuleNet, SpecNet
from raynforce.spaces import ActionSpec, ObsLeaf

CPU = torch.device("cpu")
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
ROWS, WIDTH, ACTIONS = 4, 3, 2
VECTOR = inputs_of([ObsLeaf("obs", "box", (WIDTH,), "float32")])
IMAGE = inputs_of([ObsLeaf("obs", "box", (5, 6, 2), "uint8")])
ACTION = action_input(ActionSpec("box", (ACTIONS,), "float32"))
Made = Mapping[str, Tensor]
Call = Callable[..., Made]
Loss = Callable[[Any, Any, list[Any]], Tensor]


# -- the same network in plain torch ----------------------------------------------------------------------------------


class Plain(nn.Module):
    """What a spec describes, in modules of torch's own."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        widths: dict[str, tuple[int, ...]] = {"input": (WIDTH,), "action": (ACTIONS,), "obs": (2, 5, 6)}
        self.towers = nn.ModuleDict()
        for tower in spec.towers:
            read = [widths[name] for name in spec.reads[tower.name]]
            shape = read[0] if len(read) == 1 else (sum(int(np.prod(s)) for s in read),)
            layers = nn.ModuleList()
            for layer in tower.layers:
                layers.append(self.layer(layer, shape))
                if isinstance(layer, Linear):
                    shape = (layer.size,)
                elif isinstance(layer, Conv):
                    shape = layer.output(shape)
            self.towers[tower.name] = layers
            widths[tower.name] = shape
        self.free = nn.ParameterDict({f.name: nn.Parameter(torch.full((f.size,), f.init)) for f in spec.free})

    @staticmethod
    def layer(layer: Layer, shape: tuple[int, ...]) -> nn.Module:
        if isinstance(layer, Linear):
            return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), layer.size))
        if isinstance(layer, Conv):
            (top, bottom), (left, right) = layer.pads(shape)
            zeros = nn.ZeroPad2d((left, right, top, bottom))
            return nn.Sequential(zeros, nn.Conv2d(shape[0], layer.channels, layer.kernel, layer.stride))
        return nn.LayerNorm(shape) if isinstance(layer, LayerNorm) else ACTIVATIONS[layer.name]()

    def ordered(self) -> list[tuple[nn.Parameter, bool]]:
        """Parameters in the order of the flat vector, and whether they are stored transposed."""
        found = []
        for layers in self.towers.values():
            for layer in layers:  # type: ignore[union-attr]
                last = layer[-1] if isinstance(layer, nn.Sequential) else layer
                found += [(p, isinstance(last, nn.Linear) and p.ndim == 2) for p in last.parameters()]
        return found + [(p, False) for p in self.free.values()]

    def load(self, flat: Tensor) -> Plain:
        offset = 0
        for p, transposed in self.ordered():
            values = flat[offset : offset + p.numel()]
            p.data = (values.view(p.shape[::-1]).T if transposed else values.view(p.shape)).clone()
            offset += p.numel()
        assert offset == len(flat)
        return self

    def gradient(self, loss: Tensor) -> Tensor:
        ordered = self.ordered()
        found = torch.autograd.grad(loss, [p for p, _ in ordered], allow_unused=True)
        full = [torch.zeros_like(p) if g is None else g for g, (p, _) in zip(found, ordered, strict=True)]
        return torch.cat([(g.T if turned else g).reshape(-1) for g, (_, turned) in zip(full, ordered, strict=True)])

    def forward(self, obs: Made, action: Tensor | None = None) -> dict[str, Tensor]:
        values = {"input": obs["obs"].flatten(1)} if self.spec.flat else {}
        if self.spec.images:
            values["obs"] = obs["obs"].permute(0, 3, 1, 2) / 255
        if action is not None:
            values["action"] = action
        for name, layers in self.towers.items():
            read = self.spec.reads[name]
            if not values.keys() >= set(read):
                continue
            h = values[read[0]] if len(read) == 1 else torch.cat([values[source].flatten(1) for source in read], 1)
            for layer in layers:  # type: ignore[union-attr]
                h = layer(h)
            values[name] = h
        return {n: values[n] for n in self.spec.outputs if n in values} | dict(self.free.items())


def same(spec: NetworkSpec, net: Network, loss: Loss, others: list[Tensor], obs: Any) -> Tensor:
    """Assert that both give the same gradient; returns it."""
    plain = Plain(spec).load(net.flat.detach())
    found = net.gradient(loss(net, obs, others)).clone()
    frozen = [Plain(spec).load(flat).requires_grad_(False) for flat in others]

    def call(obs: Made, params: Tensor | None = None, **named: Tensor) -> Made:
        module = plain if params is None else frozen[int(params)]
        made: Made = module(obs, **named)
        return made

    numbers = [torch.tensor(i) for i in range(len(others))]
    expected = plain.gradient(loss(call, obs, numbers))
    bound = 1e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=bound)
    return found


# -- random compositions ----------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn, size: int, normed: bool) -> tuple[Layer, ...]:
    found: list[Layer] = []
    for _ in range(draw(st.integers(0, 2))):
        found += [Linear(draw(st.integers(4, 8))), *([LayerNorm()] if normed else [])]
        found.append(Activation(draw(st.sampled_from(list(ACTIVATIONS)))))  # type: ignore[arg-type]
    return (*found, Linear(size, gain=1.0))


@st.composite
def actor_critics(draw: st.DrawFn) -> NetworkSpec:
    """An actor and one or two critics that read its action, with a torso or convolutions under some of them."""
    seen, normed = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    kind = st.sampled_from(list(ACTIVATIONS))
    towers = []
    if seen:
        first = Conv(2, 2, draw(st.integers(1, 2)), padding=draw(st.sampled_from(["valid", "same"])))
        second = (
            [Conv(2, 3, 2, padding="same")] if draw(st.booleans()) else []
        )  # its gradient by its input is asked for
        towers.append(Tower("eye", (first, *second, Activation(draw(kind))), "obs"))  # type: ignore[arg-type]
    elif draw(st.booleans()):
        towers.append(Tower("torso", mlp((draw(st.integers(2, 5)),), draw(kind))))
    below = towers[0].name if towers else "input"
    towers.append(Tower("policy", draw(layers(ACTIONS, normed)), below))
    for name in ["q1", "q2"][: draw(st.integers(1, 2))]:
        source = (below, "action") if draw(st.booleans()) else ("action", below)
        towers.append(Tower(name, draw(layers(1, normed)), source))
    if draw(st.booleans()):
        towers.append(Tower("model", draw(layers(WIDTH, normed)), below))
    return NetworkSpec(IMAGE if seen else VECTOR, tuple(towers), (Free("log_alpha", 1, -0.5),), named=(ACTION,))


def observed(spec: NetworkSpec, rng: np.random.Generator) -> dict[str, Tensor]:
    if spec.images:
        return {"obs": torch.from_numpy(rng.integers(256, size=(ROWS, 5, 6, 2)).astype(np.uint8))}
    return {"obs": torch.from_numpy(rng.standard_normal((ROWS, WIDTH), dtype=np.float32))}


def started(spec: NetworkSpec, seed: int, threads: int = 1) -> tuple[SpecNet, list[Tensor], Any]:
    """A network, two other vectors of parameters, and an observation."""
    rng = np.random.default_rng(seed)
    flats = [spec.initial(rng) for _ in range(3)]
    flats = [flat + np.float32(0.1) * rng.standard_normal(len(flat), dtype=np.float32) for flat in flats]
    return SpecNet(spec, flats[0], CPU, threads), [torch.from_numpy(f) for f in flats[1:]], observed(spec, rng)


def values(out: Made) -> Tensor:
    return torch.cat([out[name] for name in ("q1", "q2") if name in out], 1)


def actor(net: Call, obs: Any, others: list[Any]) -> Tensor:
    """An output feeds a second call with the same parameters."""
    return -values(net(obs, action=torch.tanh(net(obs)["policy"]))).amin(1).mean()


def through_frozen(net: Call, obs: Any, others: list[Any]) -> Tensor:
    """It feeds calls with other parameters, each other than the next."""
    out = net(obs)
    action = torch.tanh(out["policy"])
    one, two = (values(net(obs, params=params, action=action)).mean() for params in others)
    return one.square() - two + (action * out["log_alpha"].exp()).square().mean()


def critic(net: Call, obs: Any, others: list[Any]) -> Tensor:
    """A target that is a constant, and a value of an action from elsewhere."""
    with torch.no_grad():
        goal = values(net(obs, params=others[0], action=net(obs)["policy"])).amin(1, keepdim=True)
    given = torch.linspace(-1, 1, ROWS * ACTIONS).reshape(ROWS, ACTIONS)
    return (values(net(obs, action=given)) - goal).square().mean()


def temperature(net: Call, obs: Any, others: list[Any]) -> Tensor:
    return (net(obs)["log_alpha"] * net(obs)["policy"].detach().sum()).sum()


def chained(net: Call, obs: Any, others: list[Any]) -> Tensor:
    """Three calls in a row, and outputs that are used twice, or never."""
    first = net(obs)["policy"]
    second = net(obs, action=first)
    third = net(obs, action=first * values(second).mean(1, keepdim=True))
    return (values(third).sum(1) * values(second).sum(1)).mean() + first.square().mean()


def dreamed(net: Call, obs: Any, others: list[Any]) -> Tensor:
    """The observation itself is what the network has put out."""
    out = net(obs)
    if "model" not in out or obs["obs"].ndim > 2:
        return out["policy"].square().mean()
    later = {"obs": obs["obs"] + out["model"]}
    return net(later)["policy"].square().mean() + values(net(later, params=others[0], action=out["policy"])).mean()


def penalised(net: Call, obs: Any, others: list[Any]) -> Tensor:
    """The slope of a value by the action is itself part of the loss."""
    action = torch.linspace(-1, 1, ROWS * ACTIONS).reshape(ROWS, ACTIONS).requires_grad_()
    (slope,) = torch.autograd.grad(values(net(obs, action=action)).sum(), action, create_graph=True)
    return (slope * (1 + net(obs)["policy"])).square().mean()


LOSSES = [actor, through_frozen, critic, temperature, chained, dreamed, penalised]


@settings(deadline=None, max_examples=40, derandomize=True)
@given(actor_critics(), st.lists(st.sampled_from(LOSSES), min_size=1, max_size=4), st.integers(0, 2**32))
def test_any_composition_is_plain_torch(spec: NetworkSpec, terms: list[Loss], seed: int) -> None:
    net, others, obs = started(spec, seed, threads=1 + seed % 2)

    def loss(net: Call, obs: Any, others: list[Any]) -> Tensor:
        return torch.stack([term(net, obs, others) * (i + 1) for i, term in enumerate(terms)]).sum()

    same(spec, net, loss, others, obs)
    same(spec, net, loss, others, obs)  # the second time, nothing is left of the first


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("loss", LOSSES)
def test_each_composition_reaches_what_it_should(activation: str, loss: Loss) -> None:
    hidden = mlp((5,), activation)
    spec = NetworkSpec(
        VECTOR,
        (
            Tower("policy", (*hidden, Linear(ACTIONS))),
            Tower("q1", (*hidden, Linear(1)), ("input", "action")),
            Tower("model", (*hidden, Linear(WIDTH))),
        ),
        (Free("log_alpha", 1, -0.5),),
        named=(ACTION,),
    )
    net, others, obs = started(spec, 7)
    found = same(spec, net, loss, others, obs)
    reached = {name.partition(".")[0] for name, part in net.parts.items() if found[part].any()}
    expected = {
        actor: {"policy", "q1"},
        through_frozen: {"policy", "log_alpha"},
        critic: {"q1"},
        temperature: {"log_alpha"},
        chained: {"policy", "q1"},
        dreamed: {"policy", "model"},
        penalised: {"policy", "q1"},
    }
    assert reached == expected[loss]


def test_both_paths_give_the_same_bits() -> None:
    """An input that asks for gradients sends a call through autograd; the parameters' are those written out."""
    spec = NetworkSpec(
        VECTOR, (Tower("torso", mlp((6,), "tanh")), Tower("a", (*mlp((4,), "relu"), Linear(2)), "torso"))
    )
    net, _, obs = started(spec, 3)
    written = net.gradient(net(obs)["a"].square().mean()).clone()
    assert not net._by_autograd
    asked = {"obs": obs["obs"].clone().requires_grad_()}
    out = net(asked)["a"]
    assert net._by_autograd
    assert torch.equal(net.gradient(out.square().mean()), written)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_derivatives_that_are_given_are_those_of_the_call(activation: str) -> None:
    towers = (Tower("a", (Linear(2),)), Tower("q", (*mlp((4,), activation), Linear(1)), ("action", "input")))
    net, _, obs = started(NetworkSpec(VECTOR, towers, named=(ACTION,)), 1)
    action = torch.linspace(-1, 1, ROWS * ACTIONS).reshape(ROWS, ACTIONS)
    expected = net.gradient(net(obs, action=action)["q"].square().sum()).clone()
    out = net.record(obs, action=action)
    assert not out["q"].requires_grad
    assert torch.equal(net.backward({"q": 2 * out["q"]}), expected)


def test_the_network_s_own_vector_is_a_frozen_copy_of_it() -> None:
    spec = NetworkSpec(VECTOR, (Tower("a", (Linear(ACTIONS),)), Tower("q", (Linear(1),), "action")), named=(ACTION,))
    net, _, obs = started(spec, 0)
    action = net(obs)["a"]
    found = net.gradient(net(obs, params=net.flat, action=action)["q"].sum())
    q, bias = net.parts["q.0.weight"], net.parts["a.0.bias"]
    assert not found[q].any()
    torch.testing.assert_close(found[bias], ROWS * net.flat[q])


def test_parameters_that_ask_for_gradients_get_them() -> None:
    spec = NetworkSpec(VECTOR, (Tower("a", (*mlp((4,), "tanh"), Linear(2))),))
    net, others, obs = started(spec, 0)
    other = others[0].clone().requires_grad_()
    with torch.no_grad():
        net(obs, params=other)  # leaves no constants behind
    (found,) = torch.autograd.grad(net(obs, params=other)["a"].square().sum(), other)
    own = SpecNet(spec, others[0].numpy(), CPU)
    torch.testing.assert_close(found, own.gradient(own(obs)["a"].square().sum()))


# -- a module of the user's own ---------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(WIDTH, ACTIONS)
        self.critic = nn.Sequential(nn.Linear(WIDTH + ACTIONS, 4), nn.Tanh(), nn.Linear(4, 1))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, obs: Tensor, action: Tensor | None = None) -> dict[str, Tensor]:
        out = {"policy": self.actor(obs)}
        if action is not None:
            out["q1"] = self.critic(torch.cat([obs, action], 1))
        return out


@pytest.mark.parametrize("loss", [actor, through_frozen, critic, temperature, chained, penalised])
def test_a_module_of_one_s_own(loss: Loss) -> None:
    """Against itself, called directly: its gradients are autograd's in every composition."""
    spec = NetworkSpec(VECTOR, (), (Free("log_alpha", 1, -0.5),))
    torch.manual_seed(0)
    modules = [Own() for _ in range(3)]
    nets = [ModuleNet(spec, module, {"policy": ACTIONS, "q1": 1}, CPU) for module in modules]
    net, others = nets[0], [other.flat.detach().clone() for other in nets[1:]]
    obs = {"obs": torch.randn(ROWS, WIDTH)}
    found = net.gradient(loss(net, obs, others)).clone()
    log_alpha = torch.full((1,), -0.5, requires_grad=True)

    def call(obs: Made, params: Tensor | None = None, **named: Tensor) -> Made:
        module = modules[0] if params is None else modules[1 + int(params)].requires_grad_(False)
        return {**module(obs["obs"], **named), "log_alpha": log_alpha}

    learned = {**dict(modules[0].named_parameters()), "log_alpha": log_alpha}
    learned.pop("fixed")
    total = loss(call, obs, [torch.tensor(i) for i in range(2)])
    for (name, _), g in zip(
        learned.items(), torch.autograd.grad(total, list(learned.values()), allow_unused=True), strict=True
    ):
        expected = torch.zeros(net.parts[name].stop - net.parts[name].start) if g is None else g.reshape(-1)
        torch.testing.assert_close(found[net.parts[name]], expected)
    assert not found[net.parts["fixed"]].any()


def test_own_modules_are_left_alone() -> None:
    """A loss through a module that the algorithm keeps says nothing to that module's own optimiser."""
    net = ModuleNet(NetworkSpec(VECTOR, ()), Own(), {"policy": ACTIONS, "q1": 1}, CPU)
    judge = nn.Linear(ACTIONS, 1)
    net.gradient(judge(net({"obs": torch.ones(1, WIDTH)})["policy"]).sum())
    assert judge.weight.grad is None


# -- what is refused --------------------------------------------------------------------------------------------------

Q = NetworkSpec(
    VECTOR, (Tower("a", (Linear(ACTIONS),)), Tower("q", (Linear(1),), ("input", "action"))), named=(ACTION,)
)


def q_net() -> tuple[SpecNet, Any]:
    net, _, obs = started(Q, 0)
    return net, obs


def test_an_input_that_is_not_given() -> None:
    net, obs = q_net()
    out = net(obs)
    assert list(out) == ["a"]
    with pytest.raises(UsageError, match=r"^output 'q' reads action, which this call was not given: add action=…$"):
        out["q"]
    with pytest.raises(KeyError, match="value"):
        out["value"]
    own = ModuleNet(NetworkSpec(VECTOR, ()), Own(), {"policy": ACTIONS, "q1": 1}, CPU)
    with pytest.raises(UsageError, match=r"^output 'q1' was not returned by network.factory's module: .* action=…$"):
        own(obs)["q1"]


def test_an_input_that_is_not_known() -> None:
    net, obs = q_net()
    wanted = r"^'acton' is no input of .* \(did you mean 'action'\?\): beside the observation it takes action$"
    with pytest.raises(UsageError, match=wanted):
        net(obs, acton=torch.zeros(ROWS, ACTIONS))
    own = ModuleNet(NetworkSpec(VECTOR, ()), Own(), {"policy": ACTIONS, "q1": 1}, CPU)
    with pytest.raises(UsageError, match=wanted):
        own(obs, acton=torch.zeros(ROWS, ACTIONS))
    plain = SpecNet(NetworkSpec(VECTOR, (Tower("a", (Linear(1),)),)), np.zeros(4, np.float32), CPU)
    with pytest.raises(UsageError, match=r"'action' is no input of this network: beside the observation it takes none"):
        plain(obs, action=torch.zeros(ROWS, ACTIONS))


def test_an_input_of_another_shape() -> None:
    net, obs = q_net()
    with pytest.raises(UsageError, match=r"^action has the shape \[4, 5\]; wanted is \[N, 2\]$"):
        net(obs, action=torch.zeros(ROWS, 5))


@pytest.mark.parametrize("name", ["obs", "params", "input", "a"])
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(UsageError, match=repr(name)):
        NetworkSpec(VECTOR, (Tower("a", (Linear(1),)),), named=(Input(name, "vector", (1,)),))


def test_parameters_of_another_size() -> None:
    net, obs = q_net()
    wanted = r"^params has the shape \[3\]; wanted is a vector like net.flat, \[14\]$"
    with pytest.raises(UsageError, match=wanted):
        net(obs, params=torch.zeros(3))
    own = ModuleNet(NetworkSpec(VECTOR, ()), Own(), {"policy": ACTIONS, "q1": 1}, CPU)
    with pytest.raises(UsageError, match=r"^params has the shape \[3\]"):
        own(obs, params=torch.zeros(3))


@pytest.mark.parametrize("activation", ["tanh", "silu", "own"])
def test_a_loss_that_does_not_depend_on_the_network(activation: str) -> None:
    spec = NetworkSpec(VECTOR, (Tower("policy", (*mlp((4,), activation), Linear(2))),) if activation != "own" else ())
    obs = {"obs": torch.ones(ROWS, WIDTH)}
    flat = spec.initial(np.random.default_rng(0))
    net: Network = SpecNet(spec, flat, CPU) if spec.towers else ModuleNet(spec, Own(), {"policy": 2, "q1": 1}, CPU)
    weight = torch.ones((), requires_grad=True)
    constants = [
        lambda: net(obs)["policy"].detach(),
        lambda: net(obs, params=net.flat.detach().clone())["policy"],
        lambda: torch.ones(()),
    ]
    for constant in constants:
        with pytest.raises(AlgorithmError, match=r"^the loss does not depend on the network's parameters: make .*"):
            net.gradient(weight * constant().sum())
    assert net.gradient(weight * net(obs)["policy"].sum()).any()


def test_what_is_changed_in_place_after_a_call() -> None:
    net, obs = q_net()
    total = net(obs)["a"].square().sum()
    obs["obs"].add_(1)
    with pytest.raises(AlgorithmError, match="changed in place after it was called: copy them"):
        net.gradient(total)
    net.record(obs)
    with torch.no_grad():
        net.flat.mul_(2)
    with pytest.raises(AlgorithmError, match="changed in place"):
        net.backward({"a": torch.ones(ROWS, ACTIONS)})


def test_what_is_put_into_the_outputs_changes_no_gradient() -> None:
    net, obs = q_net()
    expected = net.gradient(net(obs)["a"].tanh().sum()).clone()
    out = net(obs)
    out["a"] = out["a"].tanh()
    assert torch.equal(net.gradient(out["a"].sum()), expected)


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_derivatives_of_what_is_no_output(activation: str) -> None:
    spec = NetworkSpec(VECTOR, (Tower("torso", mlp((4,), activation)), Tower("a", (Linear(2),), "torso")))
    net, _, obs = started(spec, 0)
    net.record(obs)
    with pytest.raises(AlgorithmError, match=r"^Loss.gradients has 'torso', which net.record\(obs\) did not return$"):
        net.backward({"torso": torch.ones(ROWS, 4)})
    with pytest.raises(AlgorithmError, match=r"^Loss.gradients has no derivatives"):
        net.backward({})


def test_calls_that_no_loss_is_made_of_are_forgotten() -> None:
    net, obs = q_net()
    for _ in range(3):
        net(obs)
        net.record(obs)
        net.backward({"a": torch.ones(ROWS, ACTIONS)})
    assert not net._tape


def test_what_was_not_given_has_no_gradient() -> None:
    """The vector is used again: nothing of a call with `action` may be left in that of one without."""
    net, obs = q_net()
    net.gradient(net(obs, action=torch.ones(ROWS, ACTIONS))["q"].sum())
    found = net.gradient(net(obs)["a"].sum())
    assert not found[net.parts["q.0.weight"]].any()
