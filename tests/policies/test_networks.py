"""Network specs: torch and numpy read them alike, and the gradient written by hand is autograd's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from raynforce.errors import UsageError
from raynforce.policies.images import as_image
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.numpy_net import encode as numpy_encode
from raynforce.policies.spec import (
    SQRT2,
    Activation,
    Conv,
    Free,
    Input,
    Layer,
    LayerNorm,
    Linear,
    NetworkSpec,
    Tower,
    inputs_of,
    mlp,
)
from raynforce.policies.torch_net import SpecNet, build, encode
from raynforce.spaces import ObsLeaf

CPU = torch.device("cpu")
ACTIVATIONS = ("tanh", "relu", "elu", "silu")
Obs = dict[str, np.ndarray]

FLAT_LEAVES = (
    ObsLeaf("x", "box", (), "float32"),
    ObsLeaf("x", "box", (5,), "float32"),
    ObsLeaf("x", "box", (2, 3), "float32"),
    ObsLeaf("x", "box", (4,), "int16"),
    ObsLeaf("x", "box", (3, 2), "uint8"),
    ObsLeaf("x", "multibinary", (4,), "int8"),
    ObsLeaf("x", "discrete", (), "int64", sizes=(4,), start=(0,)),
    ObsLeaf("x", "discrete", (), "int64", sizes=(3,), start=(-2,)),
    ObsLeaf("x", "multidiscrete", (3,), "int64", sizes=(2, 5, 3), start=(0, 1, -4)),
    ObsLeaf("x", "multidiscrete", (2, 2), "int64", sizes=(2, 3, 4, 2), start=(7, 0, 0, 1)),
)
IMAGE_LEAVES = (
    ObsLeaf("obs", "box", (6, 7, 3), "uint8"),  # height, width, channels
    ObsLeaf("obs", "box", (8, 6, 1), "uint8"),
    ObsLeaf("obs", "box", (4, 7, 6), "uint8"),  # channels, height, width
    ObsLeaf("obs", "box", (2, 6, 8), "uint8"),
    ObsLeaf("obs", "box", (7, 7), "uint8"),  # one channel that is not written down
)
PLANES_LEAVES = (
    ObsLeaf("obs", "box", (6, 6, 7), "float32"),
    ObsLeaf("obs", "multibinary", (5, 6, 6), "int8"),
    ObsLeaf("obs", "box", (2, 6, 6, 3), "uint8"),  # two frames in colour
    ObsLeaf("obs", "box", (2, 3, 6, 7), "uint8"),
)
VECTOR = inputs_of([ObsLeaf("obs", "box", (3,), "float32")])
IMAGE = inputs_of([ObsLeaf("obs", "box", (8, 8, 3), "uint8")])


def observe(leaf: ObsLeaf, rng: np.random.Generator, count: int) -> np.ndarray:
    """A batch `[N, ...]` of observations of order 1 after encoding."""
    shape = (count, *leaf.shape)
    if leaf.sizes:
        sizes, start = (np.array(x).reshape(leaf.shape) for x in (leaf.sizes, leaf.start))
        return np.asarray(rng.integers(sizes, size=shape) + start)
    if leaf.dtype == "float32":
        return rng.standard_normal(shape, dtype=np.float32)
    return rng.integers(256 if leaf.dtype == "uint8" else 2, size=shape).astype(leaf.dtype)


def tensors(obs: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v) for k, v in obs.items()}


def parameters(spec: NetworkSpec, rng: np.random.Generator) -> np.ndarray:
    """Initial parameters with a little noise, so that biases, scales and shifts count too."""
    flat = spec.initial(rng)
    flat += np.float32(0.1) * rng.standard_normal(len(flat), dtype=np.float32)
    return flat


def activations() -> st.SearchStrategy[Layer]:
    return st.sampled_from(ACTIVATIONS).map(lambda name: Activation(name))  # type: ignore[arg-type]


def linears() -> st.SearchStrategy[Layer]:
    return st.integers(1, 9).map(Linear)


def one(layer: Layer) -> list[Layer]:
    return [layer]


def normed() -> st.SearchStrategy[list[Layer]]:
    """A layer norm as it is used: over many features. Over two or three that happen to be equal it divides by its
    epsilon and magnifies the last bit of any arithmetic by hundreds."""
    sizes, eps = st.integers(8, 32), st.sampled_from([1e-5, 1e-3])
    return st.builds(lambda size, eps: [Linear(size), LayerNorm(eps)], sizes, eps)


@st.composite
def conv_layers(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Layer]:
    """One or two convolutions that fit `[C, H, W]`, with something after each."""
    layers: list[Layer] = []
    side = min(shape[1:])
    for _ in range(draw(st.integers(1, 2))):
        kernel, stride = draw(st.integers(1, min(3, side))), draw(st.integers(1, 2))
        layer = Conv(draw(st.integers(1, 4)), kernel, stride, padding=draw(st.sampled_from(["valid", "same"])))
        side = layer.output((1, side, side))[1]
        layers.append(layer)
        layers.append(draw(st.one_of(activations(), st.just(LayerNorm()))))
    return layers


@st.composite
def scenes(draw: st.DrawFn, *, learnable: bool = False) -> tuple[NetworkSpec, list[ObsLeaf]]:
    """A dictionary of one to three images, each convolved by itself, and other leaves, joined for one or two towers."""
    seen = draw(st.lists(st.sampled_from(IMAGE_LEAVES + PLANES_LEAVES), min_size=1, max_size=3))
    other = draw(st.lists(st.sampled_from(FLAT_LEAVES), max_size=2))
    leaves = [ObsLeaf(f"obs/{i}", k.kind, k.shape, k.dtype, k.sizes, k.start) for i, k in enumerate([*seen, *other])]
    images = [as_image(leaf, any_box=True) for leaf in leaves[: len(seen)]]
    assert all(images)
    eyes = [Tower(f"eye{i}", tuple(draw(conv_layers(x.image_shape))), x.path) for i, x in enumerate(images) if x]
    source = (*(eye.name for eye in eyes), *(["input"] if other else []))
    whole = source if len(source) > 1 else source[0]
    names = ["policy", "value"][: draw(st.integers(1, 2))]
    towers = [Tower(name, (*mlp((draw(st.integers(8, 12)),), "tanh"), Linear(3)), whole) for name in names]
    if draw(st.booleans()) and not learnable:
        towers.append(Tower("also", (Activation("relu"),), eyes[0].name))  # must not write into what the others read
    normalize = draw(st.booleans())
    inputs = (*(i for i in images if i), *inputs_of(leaves[len(seen) :]))
    return NetworkSpec(inputs, (*eyes, *towers), normalize=normalize), leaves


@st.composite
def specs(draw: st.DrawFn, *, images: bool = False, learnable: bool = False) -> tuple[NetworkSpec, list[ObsLeaf]]:
    """A spec with one to three towers, each reading the input or an earlier tower."""
    if images:
        leaves = [draw(st.sampled_from(IMAGE_LEAVES))]
    else:
        kinds = draw(st.lists(st.sampled_from(FLAT_LEAVES), min_size=1, max_size=3))
        paths = ["obs"] if len(kinds) == 1 else [f"obs/{i}" for i in range(len(kinds))]
        leaves = [ObsLeaf(p, k.kind, k.shape, k.dtype, k.sizes, k.start) for p, k in zip(paths, kinds, strict=True)]
    inputs = inputs_of(leaves)
    image = inputs[0].image_shape if images else ()
    towers: list[Tower] = []
    for index in range(draw(st.integers(1, 3))):
        source = draw(st.sampled_from(["input", *(t.name for t in towers)]))
        convolve = bool(image) and source == "input" and (index == 0 or draw(st.booleans()))
        layers = draw(conv_layers(image)) if convolve else []
        for part in draw(st.lists(st.one_of(linears().map(one), activations().map(one), normed()), max_size=3)):
            layers += part
        if learnable or draw(st.booleans()):
            layers.append(Linear(draw(st.integers(1, 5)), gain=1.0))
        towers.append(Tower(f"t{index}", tuple(layers), source))
    free = (Free("log_std", draw(st.integers(1, 4)), -0.5),) if draw(st.booleans()) else ()
    return NetworkSpec(inputs, tuple(towers), free, normalize=draw(st.booleans()) and not images), leaves


def affine(spec: NetworkSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shift = rng.standard_normal(spec.input_width, dtype=np.float32)
    return shift, (rng.random(spec.input_width, dtype=np.float32) + 0.5) * np.where(rng.random() < 0.3, 20, 1).astype(
        "f"
    )


def assert_interpreters_agree(spec: NetworkSpec, leaves: list[ObsLeaf], seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    flat = parameters(spec, rng)
    obs = {leaf.path: observe(leaf, rng, count) for leaf in leaves}
    before = {k: v.copy() for k, v in obs.items()}
    normal = affine(spec, rng) if spec.normalizes else ()
    net, acting = SpecNet(spec, flat, CPU), NumpyNet(spec)
    if normal:
        net.normalize_with(*normal)
    acting.load(flat, *normal)
    expected, found = net.predict(obs), acting(obs)
    assert tuple(expected) == tuple(found) == spec.outputs
    for name in spec.outputs:
        assert found[name].dtype == expected[name].dtype == np.float32
        assert found[name].shape == expected[name].shape
        bound = 1e-5 * max(1.0, float(np.abs(expected[name]).max(initial=0.0)))
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=bound)
        alone = NumpyNet(spec, (name,))  # skips every tower that this output does not read
        alone.load(flat, *normal)
        np.testing.assert_array_equal(alone(obs)[name], found[name])
    for path in obs:
        np.testing.assert_array_equal(obs[path], before[path])


@settings(deadline=None, max_examples=150, derandomize=True)
@given(specs(), st.integers(0, 2**32), st.sampled_from([1, 4]))
def test_torch_and_numpy_agree(drawn: tuple[NetworkSpec, list[ObsLeaf]], seed: int, count: int) -> None:
    assert_interpreters_agree(*drawn, seed, count)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(specs(images=True), st.integers(0, 2**32), st.sampled_from([1, 3]))
def test_torch_and_numpy_agree_on_images(drawn: tuple[NetworkSpec, list[ObsLeaf]], seed: int, count: int) -> None:
    assert_interpreters_agree(*drawn, seed, count)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(scenes(), st.integers(0, 2**32), st.sampled_from([1, 3]))
def test_torch_and_numpy_agree_on_several_images(
    drawn: tuple[NetworkSpec, list[ObsLeaf]], seed: int, count: int
) -> None:
    assert_interpreters_agree(*drawn, seed, count)


def test_forward_by_hand() -> None:
    spec = NetworkSpec(
        inputs_of([ObsLeaf("obs", "box", (2,), "float32")]),
        (Tower("torso", (Linear(2), Activation("relu"))), Tower("out", (Linear(1),), source="torso")),
    )
    #        torso.weight [in, out]  bias    out.weight  bias
    flat = np.array([1, 2, 3, 4, 0, -100, 10, 1, 0.5], np.float32)
    obs = {"obs": np.array([[1, 1], [-1, 0]], np.float32)}  # torso: relu [4, -94], relu [-1, -102]
    net = NumpyNet(spec)
    net.load(flat)
    assert net(obs)["out"].tolist() == SpecNet(spec, flat, CPU).predict(obs)["out"].tolist() == [[40.5], [0.5]]


def test_some_of_the_outputs() -> None:
    """Towers that they do not need are not evaluated."""
    trunk, heads = Tower("trunk", mlp([4], "relu")), [Tower(n, (Linear(2),), "trunk") for n in ("policy", "q")]
    spec = NetworkSpec(VECTOR, (trunk, Tower("value", (*mlp([4], "tanh"), Linear(1))), *heads), (Free("log_std", 2),))
    net, obs = SpecNet(spec, spec.initial(np.random.default_rng(0)), CPU), {"obs": np.ones((5, 3), np.float32)}
    whole = net.predict(obs)
    assert set(whole) == {"value", "policy", "q", "log_std"}

    def fails(_: Tensor) -> Tensor:
        raise AssertionError

    net._own.layers["value"][0] = net._own.layers["q"][0] = fails
    for only in (["policy"], ["log_std", "policy"]):
        found = net.predict(obs, only)
        assert list(found) == only
        for name in only:
            np.testing.assert_array_equal(found[name], whole[name])


def test_batches_of_any_length_follow_each_other() -> None:
    spec = NetworkSpec(VECTOR, (Tower("out", (*mlp([4], "tanh"), Linear(2))),))
    acting, rng = NumpyNet(spec), np.random.default_rng(0)
    for _ in range(2):
        flat = rng.standard_normal(spec.params()[-1].offset + 2).astype(np.float32)
        acting.load(flat)
        learning = SpecNet(spec, flat, CPU)
        for count in (3, 3, 1, 8, 3, 0):
            obs = {"obs": rng.standard_normal((count, 3)).astype(np.float32)}
            np.testing.assert_allclose(acting(obs)["out"], learning.predict(obs)["out"], atol=1e-6)


@pytest.mark.parametrize("activations", [("relu", "tanh"), ("tanh", "relu"), ("tanh", "tanh")])
def test_activations_in_a_row_and_of_the_input(activations: tuple[str, str]) -> None:
    """What one of them gave is not overwritten by the next, which the backward pass would read."""
    chain = [Activation(name) for name in activations]  # type: ignore[arg-type]
    spec = NetworkSpec(VECTOR, (Tower("out", (chain[0], Linear(4), *chain, Linear(1))),))
    net, x = SpecNet(spec, spec.initial(np.random.default_rng(1)), CPU), torch.randn(6, 3)
    before = x.clone()
    found = net.gradient(net({"obs": x})["out"].square().sum()).clone()
    flat = net.flat.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net({"obs": x}, params=flat)["out"].square().sum(), flat)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_onehot_by_hand() -> None:
    leaf = ObsLeaf("obs", "multidiscrete", (2,), "int64", sizes=(2, 3), start=(5, -1))
    spec = NetworkSpec(inputs_of([leaf]), (Tower("out", ()),))
    obs = {"obs": np.array([[5, -1], [6, 1]])}
    expected = [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1]]
    assert numpy_encode(spec, obs)["input"].tolist() == encode(spec, tensors(obs))["input"].tolist() == expected


def test_normaliser_clips_at_ten_deviations() -> None:
    spec = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (2,), "float32")]), (Tower("out", ()),), normalize=True)
    obs = {"obs": np.array([[3.0, -1e6]], np.float32)}
    shift, scale = np.array([1, 0], np.float32), np.array([0.5, 1], np.float32)
    net, acting = SpecNet(spec, spec.initial(np.random.default_rng(0)), CPU), NumpyNet(spec)
    net.normalize_with(shift, scale)
    acting.load(np.zeros(0, np.float32), shift, scale)
    assert net.predict(obs)["out"].tolist() == acting(obs)["out"].tolist() == [[1.0, -10.0]]


def test_both_image_layouts_are_the_same_image() -> None:
    rng = np.random.default_rng(0)
    towers = (Tower("out", (Conv(4, 3, 2), Activation("relu"), Linear(2))),)
    last = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (9, 7, 3), "uint8")]), towers)
    first = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (3, 9, 7), "uint8")]), towers)
    assert last.inputs[0].image_shape == first.inputs[0].image_shape == (3, 9, 7)
    image = rng.integers(256, size=(2, 9, 7, 3)).astype(np.uint8)
    flat = first.initial(rng)
    results = []
    for spec, given_image in ((last, image), (first, image.transpose(0, 3, 1, 2))):
        net = NumpyNet(spec)
        net.load(flat)
        results.append(net({"obs": given_image})["out"])
    np.testing.assert_array_equal(results[0], results[1])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.one_of(specs(), specs(images=True), scenes()))
def test_json_round_trip(drawn: tuple[NetworkSpec, list[ObsLeaf]]) -> None:
    spec, _ = drawn
    assert NetworkSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.one_of(specs(), specs(images=True), scenes()))
def test_params_cover_the_flat_vector(drawn: tuple[NetworkSpec, list[ObsLeaf]]) -> None:
    spec, _ = drawn
    params = spec.params()
    flat = spec.initial(np.random.default_rng(0))
    assert len({p.name for p in params}) == len(params)
    offset = 0
    for p in params:
        assert p.offset == offset
        offset += math.prod(p.shape)
    assert flat.shape == (offset,)
    count = np.zeros(offset, np.int64)
    for p in params:
        assert p.view(count).shape == p.shape
        p.view(count)[...] += 1  # a view, so this writes into `count`
    assert (count == 1).all()


@pytest.mark.parametrize(("wide", "size"), [(7, 3), (3, 7), (5, 5)])
def test_initial_weights_are_orthogonal(wide: int, size: int) -> None:
    leaf = ObsLeaf("obs", "box", (wide,), "float32")
    layers = (Linear(size, gain=0.7), LayerNorm())
    spec = NetworkSpec(inputs_of([leaf]), (Tower("t", layers),), (Free("log_std", 2, -1.5),))
    flat = spec.initial(np.random.default_rng(3))
    by_name = {p.name: p.view(flat) for p in spec.params()}
    weight = by_name["t.0.weight"]
    assert weight.shape == (wide, size)
    gram = weight.T @ weight if wide >= size else weight @ weight.T
    np.testing.assert_allclose(gram, 0.49 * np.eye(min(wide, size)), atol=1e-6)
    assert (by_name["t.0.bias"] == 0).all()
    assert (by_name["t.1.scale"] == 1).all()
    assert (by_name["t.1.shift"] == 0).all()
    assert by_name["log_std"].tolist() == [-1.5, -1.5]


def test_uniform_weights_and_biases_are_those_of_torch() -> None:
    layers = (Linear(400, uniform=True), Linear(3, uniform=True))
    spec = NetworkSpec((Input("obs", "vector", (25,)),), (Tower("y", layers),))
    flat = spec.initial(np.random.default_rng(0))
    found = {p.name.removeprefix("y."): p.view(flat) for p in spec.params()}
    theirs = {"0": torch.nn.Linear(25, 400), "1": torch.nn.Linear(400, 3)}
    for name, layer in theirs.items():
        weight, bias = found[f"{name}.weight"], found[f"{name}.bias"]
        bound = layer.in_features**-0.5 * (1 + 1e-6)  # in float32
        for ours, other in ((weight.T, layer.weight), (bias, layer.bias)):
            assert ours.shape == tuple(other.shape)
            assert abs(ours).max() <= bound
            assert float(other.detach().abs().max()) <= bound
        assert weight.std() == pytest.approx(float(layer.weight.detach().std()), rel=0.1)
        assert abs(bias).min() > 0
    assert NetworkSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_initial_convolutions_are_orthogonal() -> None:
    spec = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (6, 6, 3), "uint8")]), (Tower("t", (Conv(5, 2),)),))
    weight = spec.params()[0].view(spec.initial(np.random.default_rng(0)))
    assert weight.shape == (5, 3, 2, 2)
    rows = weight.reshape(5, -1)
    np.testing.assert_allclose(rows @ rows.T, SQRT2**2 * np.eye(5), atol=1e-6)


def test_initial_is_seeded() -> None:
    spec = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (4,), "float32")]), (Tower("t", (Linear(8),)),))
    first, again, other = (spec.initial(np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    built = [build(spec, None, {"t": 8}, (), seed, CPU).flat for seed in (1, 1, 2)]
    assert torch.equal(built[0], built[1])
    assert not torch.equal(built[0], built[2])


# -- gradients ------------------------------------------------------------------------------------------------

FORWARD = {"tanh": torch.tanh, "relu": torch.relu, "elu": F.elu, "silu": F.silu}


def by_formula(spec: NetworkSpec, flat: Tensor, encoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network written out plainly, for autograd to differentiate."""
    params = {p.name: flat[p.offset : p.offset + p.size].reshape(p.shape) for p in spec.params()}
    values = dict(encoded)
    for tower in spec.towers:
        read = [values[source] for source in spec.reads[tower.name]]
        h = read[0] if len(read) == 1 else torch.cat([x.flatten(1) for x in read], 1)
        for index, layer in enumerate(tower.layers):
            name = f"{tower.name}.{index}"
            if isinstance(layer, Linear):
                h = h.reshape(len(h), -1) @ params[f"{name}.weight"] + params[f"{name}.bias"]
            elif isinstance(layer, Conv):
                (top, bottom), (left, right) = layer.pads(h.shape[1:])
                h = F.pad(h, (left, right, top, bottom))
                h = F.conv2d(h, params[f"{name}.weight"], params[f"{name}.bias"], layer.stride)
            elif isinstance(layer, LayerNorm):
                over = list(range(1, h.ndim))
                deviation = (h.var(over, unbiased=False, keepdim=True) + layer.eps).sqrt()
                h = (h - h.mean(over, keepdim=True)) / deviation * params[f"{name}.scale"] + params[f"{name}.shift"]
            else:
                h = FORWARD[layer.name](h)
        values[tower.name] = h
    return {name: params.get(name, values.get(name)) for name in spec.outputs}  # type: ignore[misc]


def objective(passes: list[dict[str, Tensor]], used: list[str], weights: Mapping[str, Tensor]) -> Tensor:
    """A loss in which every element of every output used has its own slope, and passes multiply each other."""
    total = torch.ones(())
    for out in passes:
        total = total * (2.0 + torch.stack([torch.tanh(out[n] * weights[n]).mean() for n in used]).sum())
    return total


def assert_gradient_is_autograd(
    spec: NetworkSpec, leaves: list[ObsLeaf], seed: int, used: list[str], evaluations: int, tolerance: float
) -> None:
    rng = np.random.default_rng(seed)
    flat = parameters(spec, rng)
    net = SpecNet(spec, flat, CPU)
    shift, scale = affine(spec, rng)
    if spec.normalize:
        net.normalize_with(shift, scale)
    batches = [tensors({x.path: observe(x, rng, 5) for x in leaves}) for _ in range(evaluations)]
    with torch.no_grad():
        sizes = {n: v.shape[-1] if v.ndim < 3 else v.shape[1:] for n, v in net(batches[0]).items()}
    weights = {n: torch.from_numpy(rng.standard_normal(s, dtype=np.float32)) for n, s in sizes.items()}

    leaf = torch.from_numpy(flat.copy()).requires_grad_()
    encoded = [encode(spec, obs) for obs in batches]
    if spec.normalizes:
        for x in encoded:
            x["input"] = ((x["input"] - torch.from_numpy(shift)) * torch.from_numpy(scale)).clamp(-10, 10)
    (expected,) = torch.autograd.grad(objective([by_formula(spec, leaf, x) for x in encoded], used, weights), leaf)

    for _ in range(2):  # the second time, nothing is left of the first
        found = net.gradient(objective([net(obs) for obs in batches], used, weights))
        assert found.shape == expected.shape
        bound = tolerance * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=bound)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(st.data(), st.integers(0, 2**32), st.sampled_from([1, 1, 2, 3]))
def test_gradient_by_hand_is_autograd(data: st.DataObject, seed: int, evaluations: int) -> None:
    """Linear, tanh and relu alone: the backward pass that is written out."""
    assert_written_out(data, specs(learnable=True), seed, evaluations)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.data(), st.integers(0, 2**32), st.sampled_from([1, 2]))
def test_gradient_by_hand_of_images_is_autograd(data: st.DataObject, seed: int, evaluations: int) -> None:
    """The same with convolutions and joined towers."""
    images = st.one_of(specs(images=True, learnable=True), scenes(learnable=True))
    assert_written_out(data, images, seed, evaluations)


def assert_written_out(data: st.DataObject, drawn: st.SearchStrategy[Any], seed: int, evaluations: int) -> None:
    spec, leaves = data.draw(drawn)
    names = {"elu": "tanh", "silu": "relu"}
    towers = []
    for tower in spec.towers:
        layers = [x for x in tower.layers if not isinstance(x, LayerNorm)]
        plain = [Activation(names.get(x.name, x.name)) if isinstance(x, Activation) else x for x in layers]  # type: ignore[arg-type]
        towers.append(Tower(tower.name, tuple(plain), tower.source))
    spec = NetworkSpec(spec.inputs, tuple(towers), spec.free, spec.normalize)
    assert SpecNet(spec, spec.initial(np.random.default_rng(0)), CPU)._by_hand
    used = data.draw(st.lists(st.sampled_from(spec.outputs), min_size=1, unique=True))
    assert_gradient_is_autograd(spec, leaves, seed, used, evaluations, tolerance=1e-5)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data(), st.integers(0, 2**32), st.sampled_from([1, 2]))
def test_gradient_of_any_spec_is_autograd(data: st.DataObject, seed: int, evaluations: int) -> None:
    spec, leaves = data.draw(
        st.one_of(specs(learnable=True), specs(images=True, learnable=True), scenes(learnable=True))
    )
    used = data.draw(st.lists(st.sampled_from(spec.outputs), min_size=1, unique=True))
    # with layer norms, see above
    assert_gradient_is_autograd(spec, leaves, seed, used, evaluations, tolerance=1e-3)


def test_a_tower_may_join_raw_inputs() -> None:
    leaves = [ObsLeaf("obs/speed", "box", (2,), "float32"), ObsLeaf("obs/map", "box", (1, 4, 4), "uint8")]
    spec = NetworkSpec(inputs_of(leaves), (Tower("q", (Linear(3),), source=("input", "obs/map")),))
    assert_gradient_is_autograd(spec, leaves, 0, ["q"], 1, tolerance=1e-5)


def test_gradient_reaches_a_torso_only_through_the_outputs_used() -> None:
    spec = NetworkSpec(
        inputs_of([ObsLeaf("obs", "box", (3,), "float32")]),
        (
            Tower("torso", mlp((4,), "tanh")),
            Tower("policy", (Linear(2),), source="torso"),
            Tower("value", (Linear(1),)),
        ),
        (Free("log_std", 2),),
    )
    rng = np.random.default_rng(0)
    net = SpecNet(spec, parameters(spec, rng), CPU)
    obs = {"obs": torch.from_numpy(rng.standard_normal((6, 3), dtype=np.float32))}
    parts = {p.name: p for p in spec.params()}

    def touched(loss: Tensor) -> set[str]:
        gradient = net.gradient(loss)
        return {name for name, p in parts.items() if p.view(gradient).any()}

    value = {"value.0.weight", "value.0.bias"}
    assert touched(net(obs)["value"].square().mean()) == value
    assert touched(net(obs)["log_std"].sum()) == {"log_std"}
    assert touched(net(obs)["policy"].square().mean()) == set(parts) - value - {"log_std"}


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.one_of(specs(learnable=True), specs(images=True, learnable=True)), st.integers(0, 2**32))
def test_other_parameters(drawn: tuple[NetworkSpec, list[ObsLeaf]], seed: int) -> None:
    spec, leaves = drawn
    rng = np.random.default_rng(seed)
    own, other = parameters(spec, rng), parameters(spec, rng)
    obs = tensors({x.path: observe(x, rng, 3) for x in leaves})
    net = SpecNet(spec, own, CPU)
    with torch.no_grad():
        found = net(obs, params=torch.from_numpy(other))
        expected = SpecNet(spec, other, CPU)(obs)
    assert all(torch.equal(found[t.name], expected[t.name]) for t in spec.towers if t.name in spec.outputs)
    np.testing.assert_array_equal(net.flat.numpy(), own)
    constant = net(obs, params=torch.from_numpy(other))
    for t in spec.outputs:  # where gradients are recorded images lie otherwise in memory, and round otherwise
        torch.testing.assert_close(constant[t], expected[t], rtol=1e-5, atol=1e-6)
        assert not constant[t].requires_grad


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_other_parameters_hold_the_free_vectors_too(activation: str) -> None:
    spec = NetworkSpec(VECTOR, (Tower("policy", (*mlp((4,), activation), Linear(2))),), (Free("log_std", 2),))
    own = spec.initial(np.random.default_rng(0))
    net = SpecNet(spec, own, CPU)
    with torch.no_grad():
        found = net({"obs": torch.zeros(1, 3)}, params=torch.full((len(own),), 0.5))
    assert found["log_std"].tolist() == [0.5, 0.5]


# -- specs that cannot be -------------------------------------------------------------------------------------


def test_unknown_source() -> None:
    with pytest.raises(UsageError, match=r"tower 'a' reads 'torso', which is not one of \['input'\]"):
        NetworkSpec(VECTOR, (Tower("a", (Linear(2),), source="torso"), Tower("torso", (Linear(2),))))


def test_kernel_too_big() -> None:
    with pytest.raises(UsageError, match=r"kernel=9.*\(3, 8, 8\).*smaller kernel"):
        NetworkSpec(IMAGE, (Tower("a", (Conv(4, 9),)),)).params()


@pytest.mark.parametrize("inputs", [VECTOR, (*IMAGE, *VECTOR)])
def test_convolution_of_what_is_not_one_image(inputs: tuple[Input, ...]) -> None:
    with pytest.raises(UsageError, match="one image"):
        NetworkSpec(inputs, (Tower("a", (Conv(4, 2),)),)).params()


def test_convolution_after_a_linear_layer() -> None:
    with pytest.raises(UsageError):
        NetworkSpec(IMAGE, (Tower("a", (Linear(4), Conv(4, 2))),)).params()


@pytest.mark.parametrize(
    ("towers", "free"),
    [
        ((Tower("a", (Linear(2),)), Tower("a", (Linear(2),))), ()),
        ((Tower("input", (Linear(2),)),), ()),
        ((Tower("a", (Linear(2),)),), (Free("a", 2),)),
    ],
)
def test_names_twice(towers: tuple[Tower, ...], free: tuple[Free, ...]) -> None:
    with pytest.raises(UsageError):
        NetworkSpec(VECTOR, towers, free)


def test_normalising_a_convolved_image_changes_nothing() -> None:
    spec = NetworkSpec(IMAGE, (Tower("a", (Conv(4, 2), Linear(2))),), normalize=True)
    rng = np.random.default_rng(0)
    flat = parameters(spec, rng)
    obs = {"obs": rng.integers(256, size=(2, 8, 8, 3)).astype(np.uint8)}
    plain, normalized = NumpyNet(spec), NumpyNet(spec)
    plain.load(flat)
    normalized.load(flat, np.zeros(spec.input_width, np.float32), np.ones(spec.input_width, np.float32))
    np.testing.assert_array_equal(normalized(obs)["a"], plain(obs)["a"])


def test_inputs_of_chooses_encodings() -> None:
    leaves = [*FLAT_LEAVES[:5], FLAT_LEAVES[5], FLAT_LEAVES[7], FLAT_LEAVES[8]]
    encodings = ["vector"] * 4 + ["image", "vector", "onehot", "onehot"]
    widths = [1, 5, 6, 4, 6, 4, 3, 10]
    found: Any = inputs_of(leaves)
    assert [i.encoding for i in found] == encodings
    assert [i.width for i in found] == widths
