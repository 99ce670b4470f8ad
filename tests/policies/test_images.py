"""Images and dictionaries: what is convolved by which layers, what it comes to, and that it can be learned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from running import solve

import raynforce
from raynforce.algos import algorithm_class
from raynforce.config import NetworkConfig
from raynforce.envs.describe import describe
from raynforce.envs.frames import FrameStack, stacks_of
from raynforce.envs.vector import EnvArgs
from raynforce.errors import CheckpointError, UsageError
from raynforce.experiment import resolve
from raynforce.policies.acting import TORCH_FROM, ActingSpec, Actor, PolicyVersion
from raynforce.policies.images import DEFAULTS, as_image
from raynforce.policies.normalizer import ObservationNormalizer
from raynforce.policies.numpy_net import COLUMNS_BYTES, NumpyNet, encode
from raynforce.policies.spec import Conv, Linear, NetworkSpec, Tower, inputs_of
from raynforce.policies.torch_net import IMAGES_AT_ONCE, SpecNet, TorchActor
from raynforce.roles.sampler import Sampler
from raynforce.runs.fitting import differences
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

CPU = torch.device("cpu")
CHOICES = ActionSpec("discrete", (), "int64", sizes=(3,), start=(0,))
CAMERA, MAP = ObsLeaf("obs/camera", "box", (9, 8, 3), "uint8"), ObsLeaf("obs/map", "box", (2, 7, 7), "uint8")
SPEED = ObsLeaf("obs/speed", "box", (2,), "float32")
SCENE = (CAMERA, SPEED, MAP)
FRAMES = (ObsLeaf("obs", "box", (4, 84, 84), "uint8"),)


def algorithm(leaves: tuple[ObsLeaf, ...], algo: str = "ppo", **network: Any) -> Any:
    config, _ = resolve({"env": "Test-v0", "algo": algo, "preset": "none", "network": network})
    return algorithm_class(algo)(config, EnvSpec("Test-v0", leaves, CHOICES))


def acting(leaves: tuple[ObsLeaf, ...], algo: str = "ppo", **network: Any) -> ActingSpec:
    spec: ActingSpec = algorithm(leaves, algo, **network).acting()
    return spec


def observe(leaves: tuple[ObsLeaf, ...], count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    pixels = {x.path: rng.integers(256, size=(count, *x.shape)).astype(x.dtype) for x in leaves if x.dtype == "uint8"}
    return pixels | {x.path: rng.standard_normal((count, *x.shape)).astype("f") for x in leaves if x.dtype != "uint8"}


# -- which layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "image", "conv"),
    [
        ((84, 84, 4), (4, 84, 84), DEFAULTS[0][1]),
        ((4, 84, 84), (4, 84, 84), DEFAULTS[0][1]),
        ((210, 160, 3), (3, 210, 160), DEFAULTS[0][1]),
        ((84, 84), (1, 84, 84), DEFAULTS[0][1]),
        ((4, 96, 96, 3), (12, 96, 96), DEFAULTS[0][1]),  # four frames in colour
        ((2, 3, 40, 50), (6, 40, 50), DEFAULTS[1][1]),
        ((64, 64, 3), (3, 64, 64), DEFAULTS[0][1]),
        ((63, 70, 3), (3, 63, 70), DEFAULTS[1][1]),
        ((32, 32, 3), (3, 32, 32), DEFAULTS[1][1]),
        ((20, 31, 3), (3, 20, 31), DEFAULTS[2][1]),
        ((16, 16, 3), (3, 16, 16), DEFAULTS[2][1]),
        ((15, 15), (1, 15, 15), DEFAULTS[3][1]),
        ((10, 10, 7), (7, 10, 10), DEFAULTS[3][1]),
        ((10, 10, 10), (10, 10, 10), DEFAULTS[3][1]),
        ((9, 8, 1), (1, 9, 8), DEFAULTS[4][1]),
        ((5, 5, 12), (12, 5, 5), DEFAULTS[4][1]),
        ((4, 4, 3), (3, 4, 4), ()),  # too small
        ((3, 2), (1, 3, 2), ()),
    ],
)
def test_layers_by_the_size_of_the_image(shape: tuple[int, ...], image: tuple[int, ...], conv: Any) -> None:
    leaf = ObsLeaf("obs", "box", shape, "uint8")
    found = as_image(leaf)
    assert found is not None
    assert found.image_shape == image
    spec = algorithm((leaf,)).network()
    layers = [x for t in spec.towers for x in t.layers if isinstance(x, Conv)]
    assert [(x.channels, x.kernel, x.stride) for x in layers] == list(conv)
    assert spec.towers[0].name == ("conv" if conv else "policy")


@pytest.mark.parametrize("side", range(5, 64))
def test_small_images_have_small_networks(side: int) -> None:
    spec = algorithm((ObsLeaf("obs", "box", (side, side, 3), "uint8"),)).network()
    assert sum(param.size for param in spec.params()) < 220_000
    assert spec.conv_products < 2_000_000


@pytest.mark.slow
def test_a_small_network_is_enough_for_small_images(tmp_path: Path) -> None:
    # A ball in 16x16 pixels, 3 frames: whatever is done on one of them gives 7.5, the best is 14.5.
    catch = {"env": "raynforce.envs.tiny:Catch", "frames": 3, "args": {"length": 15, "width": 16}}
    settings = {"env_args": catch, "eval.every": 4_000, "eval.final_episodes": 0}
    run = solve("raynforce.envs.frames:stacked", "ppo", tmp_path / "run", steps=40_000, target=13.0, settings=settings)
    assert raynforce.load(run.path, "last").version.params.size < 60_000


class Pictures(gymnasium.Env[Any, int]):
    """Shows one picture after the other."""

    def __init__(self, pictures: np.ndarray) -> None:
        self.observation_space = spaces.Box(0, 255, pictures.shape[1:], np.uint8)
        self.action_space = spaces.Discrete(2)
        self.pictures = pictures

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.coming = iter(self.pictures)
        return next(self.coming), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return next(self.coming), 0.0, False, False, {}


def last_seen(env: gymnasium.Env[Any, Any], count: int) -> tuple[ObsLeaf, np.ndarray]:
    """What an environment shows after `count` pictures, and the leaf that describes it."""
    obs, _ = env.reset()
    for _ in range(count - 1):
        obs = env.step(0)[0]
    return describe("Test-v0", env.observation_space, env.action_space, stacks=stacks_of(env)).obs[0], obs


@pytest.mark.parametrize("stacker", [FrameStack, FrameStackObservation])
@pytest.mark.parametrize(
    ("shape", "frames", "last"),
    [
        ((3, 3, 3), 4, False),
        ((3, 3, 3), 3, False),
        ((4, 5), 4, False),  # [4, 4, 5]: two equal sides that are not the picture's
        ((2, 3), 4, False),  # [4, 2, 3]: the smallest side is the picture's
        ((6, 6), 6, False),
        ((3, 4, 4), 4, False),
        ((5, 5, 3), 4, True),
        ((2, 5, 3), 2, True),
        ((4, 5, 3), 3, True),
        ((9, 8, 1), 2, True),
    ],
)
def test_a_stack_is_seen_frame_by_frame_whatever_its_sides(
    stacker: Any, shape: tuple[int, ...], frames: int, last: bool
) -> None:
    pictures = np.random.default_rng(0).integers(256, size=(frames, *shape), dtype=np.uint8)
    leaf, obs = last_seen(stacker(Pictures(pictures), frames), frames)
    image = as_image(leaf)
    assert image is not None
    assert leaf.stack == image.stack == frames
    planes = np.moveaxis(pictures, -1, 1) if last else pictures  # [frames, C, H, W], or without C
    expected = planes.reshape(-1, *planes.shape[-2:])
    np.testing.assert_array_equal(image.channels_first(obs[None])[0], expected)
    again = NetworkSpec.from_json(json.loads(json.dumps(NetworkSpec((image,), ()).to_json())))
    assert again.inputs == (image,)


@pytest.mark.parametrize("shape", [(8, 8), (8, 6), (12, 5)])
def test_a_stack_that_was_turned_around_is_channels_last(shape: tuple[int, ...]) -> None:
    pictures = np.random.default_rng(0).integers(256, size=(4, *shape), dtype=np.uint8)
    turned = spaces.Box(0, 255, (*shape, 4), np.uint8)
    env = TransformObservation(FrameStack(Pictures(pictures), 4), lambda obs: obs.transpose(1, 2, 0), turned)
    leaf, obs = last_seen(env, 4)
    image = as_image(leaf)
    assert image is not None
    assert leaf.stack == 1
    np.testing.assert_array_equal(image.channels_first(obs[None])[0], pictures)


def test_stacked_vectors_are_no_image() -> None:
    memory = np.zeros((4, 128), np.uint8)
    leaf, _ = last_seen(FrameStackObservation(Pictures(memory), 6), 1)
    assert (leaf.shape, leaf.stack, as_image(leaf)) == ((6, 128), 6, None)
    assert algorithm((leaf,)).network().images == ()


def test_no_default_leaves_fewer_pixels_than_one() -> None:
    for least, conv in DEFAULTS:
        shape: tuple[int, ...] = (1, least, least)
        for layer in conv:
            shape = Conv(*layer).output(shape)
        assert min(shape) >= 1


def test_only_bytes_and_flags_are_images_unless_asked() -> None:
    floats, vector = ObsLeaf("obs", "box", (10, 10, 4), "float32"), ObsLeaf("obs", "box", (128,), "uint8")
    flags = ObsLeaf("obs", "multibinary", (10, 10, 4), "int8")
    assert [as_image(x) is None for x in (floats, vector, flags)] == [True, True, False]
    assert algorithm((floats,)).network().images == ()
    (image,) = algorithm((floats,), conv=[[8, 3, 1]]).network().images
    assert (image.encoding, image.image_shape) == ("planes", (4, 10, 10))


@pytest.mark.parametrize("settings", [{}, {"conv": []}])
@pytest.mark.parametrize("shape", [(10, 10, 4), (10, 10)])
def test_a_box_of_flags_is_not_scaled_like_bytes(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    space = spaces.Box(0, 1, shape, np.bool_)
    leaves = describe("Test-v0", space, spaces.Discrete(2)).obs
    spec = algorithm(leaves, **settings).network()
    ones = {"obs": np.ones((1, *shape), np.uint8)}
    assert {array.min() for array in encode(spec, ones).values()} == {1.0}


def test_bytes_without_convolutions_are_scaled_whatever_their_shape() -> None:
    for shape in ((9, 8), (3, 9, 8), (2, 9, 8, 3)):
        spec = algorithm((ObsLeaf("obs", "box", shape, "uint8"),), conv=[]).network()
        white = {"obs": np.full((1, *shape), 255, np.uint8)}
        assert {array.max() for array in encode(spec, white).values()} == {1.0}


@pytest.mark.parametrize("algo", ["ppo", "dqn", "impala"])
def test_every_algorithm_sees_the_whole_scene(algo: str) -> None:
    spec = algorithm(SCENE, algo).network()
    assert [t.name for t in spec.towers[:2]] == ["conv/camera", "conv/map"]
    assert [t.source for t in spec.towers[:2]] == ["obs/camera", "obs/map"]
    first = [t for t in spec.towers[2:] if t.name != "q"]
    assert {t.source for t in first} == {("conv/camera", "conv/map", "input")}
    assert [i.path for i in spec.flat] == ["obs/speed"]
    shapes = {p.name: p.shape for p in spec.params()}
    # Kernels of 3 twice: 9x8 comes to 5x4, 7x7 to 3x3, with 32 channels each; and two numbers.
    assert shapes[f"{first[0].name}.0.weight"] == (32 * 5 * 4 + 32 * 3 * 3 + 2, 64)


def test_an_empty_list_takes_pixels_as_they_are() -> None:
    spec = algorithm(SCENE, conv=[]).network()
    assert spec.images == ()
    assert spec.input_width == 9 * 8 * 3 + 2 + 2 * 7 * 7


def test_convolutions_of_the_algorithm_itself_stay() -> None:
    algo, leaves = algorithm((CAMERA,)), (ObsLeaf("obs", "box", (9, 8, 3), "uint8"),)
    algo.env = EnvSpec("Test-v0", leaves, CHOICES)
    towers = (Tower("q", (Conv(4, 3), Linear(3))),)
    assert algo.spec(*towers).towers == towers
    algo = algorithm(leaves, conv=[[4, 3, 1]])
    with pytest.raises(UsageError, match=r"network.conv = \[\[4, 3, 1\]\].*of its own"):
        algo.spec(*towers)


# -- wrong use ------------------------------------------------------------------------------------------------


def test_a_kernel_larger_than_the_image() -> None:
    leaf = (ObsLeaf("obs", "box", (10, 12, 3), "uint8"),)
    with pytest.raises(UsageError, match=r"network.conv\[0\] = \[32, 11, 4\]: a kernel of 11 .* 10x12 pixels of obs;"):
        algorithm(leaf, conv=[[32, 11, 4]]).network()
    with pytest.raises(UsageError, match=r"network.conv\[1\] = .* 2x3 pixels of obs that are left of 10x12; use small"):
        algorithm(leaf, conv=[[32, 6, 3], [64, 4, 1]]).network()


def test_convolutions_without_an_image() -> None:
    with pytest.raises(UsageError, match=r"\[\[8, 3, 1\]\] needs an image .* obs/speed is float32 \[2\]: leave it out"):
        algorithm((SPEED,), conv=[[8, 3, 1]]).network()


@pytest.mark.parametrize("conv", ["[32,8,4]", "[[32,8]]", [[1, 2, 3, 4]]])
def test_convolutions_have_three_numbers(conv: Any) -> None:
    with pytest.raises(UsageError, match=r"network.conv = .*list of \[channels, kernel, stride\], such as"):
        resolve({"env": "x", "network": {"conv": json.loads(conv) if isinstance(conv, str) else conv}})


@pytest.mark.parametrize("conv", [[[0, 3, 1]], [[8, 3, 0]], [["a", 3, 1]]])
def test_convolutions_of_no_size(conv: Any) -> None:
    with pytest.raises(UsageError, match=r"network.conv = .* must be a whole number from 1"):
        resolve({"env": "x", "network": {"conv": conv}})


def test_convolutions_are_no_part_of_an_own_module() -> None:
    with pytest.raises(UsageError, match=r"no part of your own network.factory = 'mine:make': leave one out"):
        NetworkConfig(conv=((8, 3, 1),), factory="mine:make")


def test_a_tower_cannot_read_an_input_of_nothing() -> None:
    image = inputs_of((ObsLeaf("obs", "box", (8, 8, 3), "uint8"),))
    towers = (Tower("eye", (Conv(4, 3),), "obs"), Tower("q", (Linear(2),), ("eye", "input")))
    with pytest.raises(UsageError, match="all of the observation is read as images"):
        NetworkSpec(image, towers).params()


def test_convolutions_survive_yaml() -> None:
    config, _ = resolve({"env": "x", "network": {"conv": [[32, 8, 4], [64, 4, 2]]}})
    assert config.network.conv == ((32, 8, 4), (64, 4, 2))
    assert resolve(yaml.safe_load(config.to_yaml()))[0] == config


# -- what it comes to -----------------------------------------------------------------------------------------


def test_convolution_by_hand() -> None:
    spec = NetworkSpec(inputs_of((ObsLeaf("obs", "box", (2, 3), "uint8"),)), (Tower("out", (Conv(1, 2),)),))
    flat = np.array([1, 10, 100, 1000, 0.5], np.float32)  # the kernel's two rows, then the bias
    obs = {"obs": np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)}
    net = NumpyNet(spec)
    net.load(flat)
    expected = np.array([[[[5421 / 255 + 0.5, 6532 / 255 + 0.5]]]])
    np.testing.assert_allclose(net(obs)["out"], expected, rtol=1e-6)
    np.testing.assert_allclose(SpecNet(spec, flat, CPU).predict(obs)["out"], expected, rtol=1e-6)


def test_stacked_frames_are_channels() -> None:
    """Frames in colour, `[frames, H, W, C]`, are the image in which their channels follow one another."""
    conv = [[5, 3, 2]]
    stacked, plain = ((ObsLeaf("obs", "box", shape, "uint8"),) for shape in ((2, 9, 9, 3), (6, 9, 9)))
    nets = [NumpyNet(algorithm(x, conv=conv).network()) for x in (stacked, plain)]
    flat = nets[0].spec.initial(np.random.default_rng(0))
    obs = observe(stacked, 3)["obs"]
    for net in nets:
        net.load(flat)
    found = [nets[0]({"obs": obs}), nets[1]({"obs": obs.transpose(0, 1, 4, 2, 3).reshape(3, 6, 9, 9)})]
    np.testing.assert_array_equal(found[0]["policy"], found[1]["policy"])


@pytest.mark.parametrize("leaves", [FRAMES, SCENE], ids=["84x84", "scene"])
def test_numpy_and_torch_act_alike_in_pieces_too(leaves: tuple[ObsLeaf, ...]) -> None:
    """Batches that both interpreters evaluate piece by piece, the last piece shorter than the others."""
    spec = algorithm(leaves, normalize_obs=True).network()
    count = IMAGES_AT_ONCE + 3 if leaves is SCENE else 5
    if leaves is FRAMES:
        assert 4 * 400 * 256 < COLUMNS_BYTES < count * 4 * 400 * 256
    obs, flat = observe(leaves, count), spec.initial(np.random.default_rng(1))
    normal = (np.full(2, 0.5, "f"), np.full(2, 2, "f")) if leaves is SCENE else ()
    acting, learning = NumpyNet(spec), SpecNet(spec, flat, CPU)
    acting.load(flat, *normal)
    if normal:
        learning.normalize_with(*normal)
    found, expected = acting(obs), learning.predict(obs)
    for name in spec.outputs:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_statistics_are_of_vectors_alone() -> None:
    normalizer = ObservationNormalizer(algorithm(SCENE, normalize_obs=True).network())
    obs = observe(SCENE, 50)
    normalizer.update(obs)
    shift, scale = normalizer.affine()
    np.testing.assert_allclose(shift, obs["obs/speed"].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scale, 1 / obs["obs/speed"].std(0), rtol=1e-5)
    assert not algorithm(FRAMES, normalize_obs=True).network().normalizes


# -- acting ---------------------------------------------------------------------------------------------------


def test_products_are_counted() -> None:
    products = 20 * 20 * 32 * 4 * 64 + 9 * 9 * 64 * 32 * 16 + 7 * 7 * 64 * 64 * 9
    spec = acting(FRAMES)
    assert spec.network.conv_products == products > TORCH_FROM
    assert spec.acts_with == "torch"
    assert acting(SCENE).acts_with == acting((SPEED,)).acts_with == "numpy"
    assert acting((SPEED,), factory="mine:make").acts_with == "torch"


def test_what_acts_and_what_is_said() -> None:
    spec = acting(FRAMES)
    fast, light = Actor(spec), Actor(spec, light=True)
    assert "7.7 million products" in fast.note
    assert light.note == Actor(acting(SCENE)).note == ""
    obs, version = observe(FRAMES, 3), PolicyVersion(0, spec.network.initial(np.random.default_rng(0)))
    for actor in (fast, light):
        actor.load(version)
    np.testing.assert_allclose(fast.outputs(obs)["policy"], light.outputs(obs)["policy"], atol=1e-5)
    np.testing.assert_array_equal(fast.greedy(obs), light.greedy(obs))


def test_torch_acts_the_same_beside_a_learner_of_many_threads() -> None:
    spec, obs = acting(FRAMES), observe(FRAMES, 3)
    net = TorchActor(spec)
    net.load(spec.network.initial(np.random.default_rng(0)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = net(obs)["policy"]
        torch.set_num_threads(2)
        np.testing.assert_array_equal(net(obs)["policy"], alone)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_loaded_policies_see_images_without_torch(tmp_path: Path) -> None:
    spec = acting(FRAMES)
    np.save(tmp_path / "params.npy", spec.network.initial(np.random.default_rng(0)))
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    code = """
import json, sys
import numpy as np
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policy import Policy
spec = ActingSpec.from_json(json.load(open("spec.json")))
policy = Policy(spec, PolicyVersion(0, np.load("params.npy")))
frames = np.zeros((4, 84, 84), np.uint8)
assert policy.act(frames).shape == () and policy.act(frames[None]).shape == (1,)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={"PYTHONPATH": ":".join(sys.path)})


# -- what does not fit ----------------------------------------------------------------------------------------


def differing(old: ActingSpec, new: ActingSpec) -> dict[str, tuple[str, str]]:
    facts = (json.loads(json.dumps(spec.facts())) for spec in (old, new))
    return {row.what: (row.found, row.expected) for row in differences(*facts)}


def test_convolutions_that_differ_are_named() -> None:
    old = acting((MAP, SPEED), conv=[[4, 3, 2]], hidden=[8])
    assert differing(old, ActingSpec.from_json(json.loads(json.dumps(old.to_json())))) == {}
    assert differing(old, acting((MAP, SPEED), conv=[[6, 3, 2]], hidden=[8])) == {
        "conv/map.0.weight": ("[4, 2, 3, 3]", "[6, 2, 3, 3]"),
        "conv/map.0.bias": ("[4]", "[6]"),
        "policy.0.weight": ("[38, 8]", "[56, 8]"),
        "value.0.weight": ("[38, 8]", "[56, 8]"),
    }
    moved = differing(old, acting((MAP, SPEED), conv=[[4, 4, 2]], hidden=[8]))
    assert moved["conv/map.0.weight"] == ("[4, 2, 3, 3]", "[4, 2, 4, 4]")
    assert differing(old, acting((MAP, SPEED), conv=[], hidden=[8]))["policy.source"][1] == "–"


# -- learning -------------------------------------------------------------------------------------------------


class Spot(gymnasium.Env[Any, int]):
    """Say in which quarter of the picture the bright spot is; a second picture and two numbers mean nothing."""

    def __init__(self, size: int = 6) -> None:
        picture, noise = spaces.Box(0, 255, (size, size, 1), np.uint8), spaces.Box(0, 255, (2, 5, 5), np.uint8)
        self.observation_space = spaces.Dict(picture=picture, noise=noise, more=spaces.Box(-1, 1, (2,)))
        self.action_space = spaces.Discrete(4)
        self.size = size

    def draw(self) -> dict[str, np.ndarray]:
        self.row, self.column = self.np_random.integers(self.size, size=2)
        picture = np.zeros((self.size, self.size, 1), np.uint8)
        picture[self.row, self.column] = 255
        noise = self.np_random.integers(256, size=(2, 5, 5)).astype(np.uint8)
        return {"picture": picture, "noise": noise, "more": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        return self.draw(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        half = self.size // 2
        right = action == 2 * (self.row >= half) + (self.column >= half)
        return self.draw(), float(right), True, False, {}


SPOT = f"{__name__}:Spot"


@pytest.mark.parametrize(
    ("algo", "steps", "more"),
    [
        ("ppo", 8_000, {"algorithm.learning_rate": 2e-3, "algorithm.minibatch_size": 64, "sampling.fragment": 32}),
        ("dqn", 8_000, {"algorithm.n_step": 1, "algorithm.gamma": 0.0, "algorithm.samples_per_insert": 8.0}),
    ],
)
def test_a_spot_is_found(algo: str, steps: int, more: dict[str, Any], tmp_path: Path) -> None:
    more = {"network.hidden": [32], "network.conv": [[8, 3, 1]], "eval.every": 1_000, "eval.final_episodes": 0, **more}
    known: dict[str, Any] = {"progress": "quiet", "runtime": "inline"}
    first = tmp_path / "run"
    run = raynforce.train(SPOT, algo, steps=steps, target=0.95, out=first, settings=more, **known)
    assert run.result.solved_steps is not None, run.result
    policy, env = raynforce.load(first), Spot()
    obs, right = env.reset(seed=5)[0], 0.0
    for _ in range(100):
        obs, reward, *_ = env.step(policy.act(obs))
        right += reward
    assert right >= 80
    more["network.conv"], known["start_from"] = [[6, 3, 1]], first
    with pytest.raises(CheckpointError, match=r"conv/picture.0.weight +\[8, 1, 3, 3\] +\[6, 1, 3, 3\]"):
        raynforce.train(SPOT, algo, steps=64, out=tmp_path / "next", settings=more, **known)


def test_samplers_record_scenes() -> None:
    spec = describe(SPOT, Spot().observation_space, Spot().action_space)
    config, _ = resolve({"env": SPOT, "algo": "ppo"})
    made = algorithm_class("ppo")(config, spec).acting()
    sampler = Sampler(made, EnvArgs(SPOT, 3, 0), 4)
    fragment = sampler.sample(PolicyVersion(0, made.network.initial(np.random.default_rng(0))))
    assert fragment["obs/picture"].shape == (5, 3, 6, 6, 1)
    assert fragment["obs/picture"].dtype == np.uint8
    assert sampler.note() == ""
    sampler.close()
