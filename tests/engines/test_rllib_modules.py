"""RLlib's modules as policies of ours: the same outputs, in both directions, by numpy, torch and C++."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.iql import IQLConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic, TorchSquashedGaussian
from ray.rllib.core.rl_module.apis import TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils import numpy
from ray.rllib.utils.spaces.space_utils import unsquash_action

from raynforce.algos import algorithm_class
from raynforce.engines.rllib.filters import SMALL_NUMBER, normalizer_from, normalizer_to
from raynforce.engines.rllib.kept import keep, space_from, space_to
from raynforce.engines.rllib.modules import (
    SQUASHED_RANGE,
    CannotConvert,
    Conversion,
    convert,
    convert_or_keep,
)
from raynforce.envs.describe import describe, flatten_obs
from raynforce.errors import UsageError
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion, action_map
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.torch_net import build as build_net
from raynforce.policy import Policy, load
from raynforce.runs import checkpoint

VECTOR, CHOICE = spaces.Box(-2, 2, (5,)), spaces.Discrete(3)
CHOICES, TORQUES = spaces.MultiDiscrete([2, 4]), spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))
IMAGE = spaces.Box(0, 1, (20, 18, 3))
VALID = {"conv_filters": [[6, 4, 2, "valid"], [8, 3, 1, "valid"]]}
SMALL, SHARED = {"fcnet_hiddens": [16, 12]}, {"vf_share_layers": True}
COUNT = 40

CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "PPO, shared": (PPOConfig, VECTOR, CHOICE, {**SMALL, **SHARED}),
    "PPO, not shared": (PPOConfig, VECTOR, CHOICE, {**SMALL, "vf_share_layers": False}),
    "heads with layers": (PPOConfig, VECTOR, CHOICE, {**SMALL, **SHARED, "head_fcnet_hiddens": [9, 7]}),
    "elu": (PPOConfig, VECTOR, CHOICE, {**SMALL, "fcnet_activation": "elu", "head_fcnet_hiddens": [6]}),
    "silu": (PPOConfig, VECTOR, CHOICE, {**SMALL, "fcnet_activation": "silu"}),
    "linear": (PPOConfig, VECTOR, CHOICE, {**SMALL, "fcnet_activation": "linear"}),
    "initialised": (PPOConfig, VECTOR, CHOICE, {**SMALL, "fcnet_bias_initializer": "zeros_"}),
    "layer norm": (PPOConfig, VECTOR, CHOICE, {**SMALL, "fcnet_use_layernorm": True}),
    "choices": (PPOConfig, VECTOR, CHOICES, SMALL),
    "free log_std": (PPOConfig, VECTOR, TORQUES, {**SMALL, "free_log_std": True, "vf_share_layers": False}),
    "narrow log_std": (PPOConfig, VECTOR, TORQUES, {**SMALL, "free_log_std": True, "log_std_clip_param": 0.3}),
    "wide": (PPOConfig, VECTOR, TORQUES, SMALL),
    "wide, clipped": (PPOConfig, VECTOR, TORQUES, {**SMALL, "log_std_clip_param": 0.1}),
    "valid CNN": (PPOConfig, IMAGE, CHOICE, {**VALID, **SHARED, "head_fcnet_hiddens": [10]}),
    "CNN, not shared": (PPOConfig, IMAGE, CHOICE, {**VALID, "vf_share_layers": False}),
    "same CNN": (PPOConfig, IMAGE, CHOICE, {"conv_filters": [[6, 4, 2], [8, 3, 3]], "head_fcnet_hiddens": [10]}),
    "default CNN": (PPOConfig, spaces.Box(-1, 1, (42, 42, 4)), CHOICE, {"head_fcnet_hiddens": [16]}),
    "APPO": (APPOConfig, VECTOR, CHOICE, SMALL),
    "IMPALA": (IMPALAConfig, VECTOR, TORQUES, SMALL),
    "MARWIL": (MARWILConfig, VECTOR, CHOICE, SMALL),
    "BC": (BCConfig, VECTOR, TORQUES, {**SMALL, "free_log_std": True}),
    "BC, CNN": (BCConfig, IMAGE, CHOICE, VALID),
    "DQN": (DQNConfig, VECTOR, CHOICE, {**SMALL, "head_fcnet_hiddens": [8]}),
    "DQN, not dueling": (DQNConfig, VECTOR, CHOICE, {**SMALL, "head_fcnet_hiddens": [8]}),
    "DQN, CNN": (DQNConfig, IMAGE, CHOICE, {**VALID, "head_fcnet_hiddens": [8]}),
    "SAC": (SACConfig, VECTOR, TORQUES, SMALL),
    "SAC, discrete": (SACConfig, VECTOR, CHOICE, SMALL),
    "CQL": (CQLConfig, VECTOR, TORQUES, SMALL),
    "IQL": (IQLConfig, VECTOR, TORQUES, SMALL),
    "TQC": (TQCConfig, VECTOR, TORQUES, SMALL),
}


def built(config: Any, seen: Any, done: Any, model: dict[str, Any], **training: Any) -> TorchRLModule:
    """A learner's module with random parameters, its target networks included."""
    made = config().training(**training) if training else config()
    made = made.environment(observation_space=seen, action_space=done).rl_module(model_config=dict(model))
    module = made.get_rl_module_spec(spaces={"default_policy": (seen, done)}, inference_only=False).build()
    if isinstance(module, TargetNetworkAPI):
        module.make_target_networks()
    return scrambled(module, 1)


def scrambled(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


def case(name: str) -> tuple[TorchRLModule, Any, Any]:
    config, seen, done, model = CASES[name]
    training = {"dueling": False} if "not dueling" in name else {}
    return built(config, seen, done, model, **training), seen, done


def observed(space: Any) -> np.ndarray:
    count = COUNT if len(space.shape) == 1 else 4
    return np.random.default_rng(3).uniform(space.low, space.high, (count, *space.shape)).astype(np.float32)


def theirs(module: Any, obs: Any, dueling: bool = False) -> dict[str, np.ndarray]:
    """RLlib's outputs under our names."""
    batch = {Columns.OBS: torch.from_numpy(obs)}
    found = {}
    with torch.no_grad():
        out = module.forward_inference(batch)
        if Columns.ACTION_DIST_INPUTS in out:
            found["policy"] = out[Columns.ACTION_DIST_INPUTS]
        else:
            found["q"] = module.compute_q_values(batch)["qf_preds"]
        if isinstance(module, ValueFunctionAPI) and not hasattr(module, "pi_encoder"):  # critics are not converted
            found["value"] = module.compute_values(batch).unsqueeze(1)
    return {name: value.numpy() for name, value in found.items()}


def ours(acting: ActingSpec, params: np.ndarray, obs: dict[str, np.ndarray], by: str) -> dict[str, np.ndarray]:
    """The same of our network; a free log_std beside its means, as RLlib has it, and action values of both streams."""
    if by == "numpy":
        net = NumpyNet(acting.network)
        net.load(params)
        found = net(obs)
    else:
        other = build_net(
            acting.network, acting.factory, acting.heads, acting.env.obs, 0, torch.device("cpu"), acting.factory_args
        )
        with torch.no_grad():
            other.flat.copy_(torch.from_numpy(params))
        found = other.predict(obs)
    if "log_std" in found:
        found["policy"] = np.concatenate([found["policy"], np.tile(found.pop("log_std"), (len(found["policy"]), 1))], 1)
    if acting.state_value:
        return {"q": acting.action_values(found).T}
    if acting.gaussian == "wide":
        half = found["policy"].shape[1] // 2
        found["policy"][:, half:] = found["policy"][:, half:].clip(*acting.log_std_range)
    return found


def require_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert np.ptp(value) > 0.01, name
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5 * max(1, np.abs(value).max()))


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_equal_in_both_directions(name: str) -> None:
    module, seen, done = case(name)
    conversion = convert(module, describe("env", seen, done), normalize=False)
    obs = observed(seen)
    acting, params = conversion.acting, conversion.params(module)
    assert params.dtype == np.float32
    assert params.shape == (sum(p.size for p in acting.network.params()),)
    assert ActingSpec.from_json(acting.to_json()) == acting
    expected = theirs(module, obs)
    for by in ("numpy", "torch"):
        require_equal(ours(acting, params, {"obs": obs}, by), expected)

    other = scrambled(case(name)[0], 2)
    assert not np.allclose(conversion.params(other), params)
    conversion.load(other, params)
    np.testing.assert_array_equal(conversion.params(other), params)
    require_equal(theirs(other, obs), expected)
    if isinstance(other, TargetNetworkAPI):
        for online, target in other.get_target_network_pairs():
            for a, b in zip(online.parameters(), target.parameters(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["PPO, shared", "choices", "free log_std", "wide", "DQN", "SAC, discrete"])
def test_greedy_actions_are_those_of_rllib(name: str) -> None:
    module, seen, done = case(name)
    conversion = convert(module, describe("env", seen, done), normalize=False)
    obs = observed(seen)
    policy = Policy(conversion.acting, PolicyVersion(1, conversion.params(module), schedules={"epsilon": 0.0}))
    out = theirs(module, obs)
    if "q" in out:
        expected = out["q"].argmax(1)
    else:
        logits = torch.from_numpy(out["policy"])
        best = module.get_inference_action_dist_cls().from_logits(logits).to_deterministic().sample().numpy()
        expected = np.stack([unsquash_action(one, done) for one in best])  # normalize_actions=True, RLlib's default
    np.testing.assert_allclose(policy.act(obs), expected, rtol=1e-5, atol=1e-5)


def test_networks_of_equal_settings_are_equal_so_that_runs_go_on_across_engines() -> None:
    def native(algo: str, env: Any, network: dict[str, Any], algorithm: dict[str, Any]) -> ActingSpec:
        config, _ = resolve({"env": "CartPole-v1", "algo": algo, "network": network, "algorithm": algorithm})
        return algorithm_class(algo)(config, env).acting()

    hidden = {"hidden": [16, 12], "activation": "tanh"}
    apart = {**SMALL, "vf_share_layers": False}
    relu = {**SMALL, "fcnet_activation": "relu"}
    conv = {"hidden": [8], "activation": "relu", "conv": [[6, 4, 2], [8, 3, 1]]}
    for algo, config, seen, done, model, network, settings in (
        ("ppo", PPOConfig, VECTOR, CHOICE, apart, hidden, {}),
        ("ppo", PPOConfig, VECTOR, TORQUES, {**apart, "free_log_std": True}, hidden, {}),
        ("impala", IMPALAConfig, VECTOR, CHOICE, apart, hidden, {}),
        ("dqn", DQNConfig, VECTOR, CHOICE, relu, {"hidden": [16, 12]}, {"dueling": True}),
        ("dqn", DQNConfig, VECTOR, CHOICE, relu, {"hidden": [16, 12]}, {"dueling": False}),
        ("ppo", PPOConfig, IMAGE, CHOICE, {**VALID, **SHARED, "head_fcnet_hiddens": [8]}, conv, {}),
        ("dqn", DQNConfig, IMAGE, CHOICE, {**VALID, "head_fcnet_hiddens": [8]}, conv, {"dueling": False}),
    ):
        env = describe("CartPole-v1", seen, done)
        module = built(config, seen, done, model, **settings)
        found = convert(module, env, normalize=False).acting
        assert found.facts() == native(algo, env, network, settings).facts(), (algo, settings)


@pytest.mark.parametrize("shape", [(20, 18, 3), (4, 20, 18), (20, 18)], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["converted", "kept"])
def test_images_of_bytes_that_were_scaled_and_transposed_for_rllib(shape: tuple[int, ...], kept: bool) -> None:
    env = describe("env", spaces.Box(0, 255, shape, np.uint8), CHOICE)
    pixels = np.random.default_rng(2).integers(0, 256, (COUNT, *shape), np.uint8)
    seen = pixels[..., None] if len(shape) == 2 else pixels.transpose(0, 2, 3, 1) if shape[0] == 4 else pixels
    module = built(PPOConfig, spaces.Box(0, 1, seen.shape[1:]), CHOICE, {**VALID, "head_fcnet_hiddens": [6]})
    conversion = (keep if kept else convert)(module, env, normalize=False)
    found = ours(conversion.acting, conversion.params(module), {"obs": pixels}, "torch" if kept else "numpy")
    require_equal(found, theirs(module, seen.astype(np.float32) / 255))


def test_numbers_that_are_rllibs() -> None:
    assert (numpy.MIN_LOG_NN_OUTPUT, numpy.MAX_LOG_NN_OUTPUT) == SQUASHED_RANGE
    assert numpy.SMALL_NUMBER == SMALL_NUMBER


def test_a_squashed_gaussian_samples_and_weighs_like_rllibs() -> None:
    module, seen, done = case("SAC")
    conversion = convert(module, describe("env", seen, done), normalize=False)
    actor = Actor(conversion.acting)
    actor.load(PolicyVersion(1, conversion.params(module)))
    out = actor.outputs({"obs": observed(seen)})
    (noise,) = actor.distribution.noise(np.random.default_rng(0), 1, COUNT)
    action = actor.sample(out, noise)
    reference = TorchSquashedGaussian.from_logits(torch.from_numpy(out["policy"]))
    inside = np.abs(action).max(1) < 0.999
    assert inside.sum() > 10
    expected = reference.logp(torch.from_numpy(action)).numpy()
    np.testing.assert_allclose(actor.distribution.logp(out, action)[inside], expected[inside], rtol=1e-3, atol=1e-3)
    # RLlib's own greedy action is the mean without its tanh, clipped: ours is the paper's.
    mean = out["policy"][:, :2]
    np.testing.assert_allclose(actor.distribution.mode(out), np.tanh(mean), rtol=1e-5, atol=1e-6)
    assert (actor.to_env(action) >= done.low).all()
    assert (actor.to_env(action) <= done.high).all()


# -- observations -----------------------------------------------------------------------------------------

MIXED = spaces.Dict(
    [
        ("z", spaces.Box(-1, 1, (2, 2))),
        ("a", spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(3), spaces.Box(0, 255, (2, 3), np.uint8)])),
        ("m", spaces.Dict({"one": spaces.MultiDiscrete([2, 3]), "two": spaces.Box(-1, 1, ())})),
    ]
)


def through(connector: Any, obs: list[Any], space: Any) -> np.ndarray:
    """What the module sees of observations, by RLlib's connector."""
    found = []
    for one in obs:
        episode = SingleAgentEpisode(observations=[one], observation_space=space, action_space=CHOICE)
        connector(rl_module=None, batch={}, episodes=[episode], explore=False, shared_data={})
        found.append(episode.get_observations(-1))
    return np.stack(found)


def stacked(obs: list[Any], env: Any) -> dict[str, np.ndarray]:
    flat = [flatten_obs(one, env.obs) for one in obs]
    return {leaf.path: np.stack([np.asarray(f[leaf.path]).astype(leaf.dtype) for f in flat]) for leaf in env.obs}


@pytest.mark.parametrize("space", [MIXED, spaces.Discrete(6)], ids=["mixed", "discrete"])
@pytest.mark.parametrize("kept", [False, True], ids=["converted", "kept"])
def test_leaves_are_in_the_order_of_rllibs_connector(space: Any, kept: bool) -> None:
    space.seed(4)
    obs = [space.sample() for _ in range(COUNT)]
    connector = FlattenObservations(space, CHOICE)
    seen = through(connector, obs, space)
    flat = connector.observation_space
    assert seen.shape[1:] == flat.shape
    module, env = built(PPOConfig, flat, CHOICE, SMALL), describe("env", space, CHOICE)
    conversion = (keep if kept else convert)(module, env, normalize=False)
    found = ours(conversion.acting, conversion.params(module), stacked(obs, env), "torch" if kept else "numpy")
    require_equal(found, theirs(module, seen.astype(np.float32)))


def filtering(space: Any, **settings: Any) -> MeanStdFilter:
    made = MeanStdFilter(**settings)  # 2.60's raises if it is given the spaces here
    made.input_observation_space, made.input_action_space = space, CHOICE
    return made


@pytest.mark.parametrize("kept", [False, True], ids=["converted", "kept"])
def test_a_filter_becomes_a_normaliser_and_back(kept: bool) -> None:
    rng = np.random.default_rng(5)
    space = spaces.Box(-np.inf, np.inf, (5,))
    obs = (rng.normal(0, 1, (200, 5)) * [1, 20, 0.1, 3, 1] + [0, 5, -2, 0, 100]).astype(np.float32)
    obs[:, 3] = 7  # never changes
    connector = filtering(space)
    through(connector, list(obs), space)
    state = connector.get_state()
    shift, scale, count = normalizer_from(state)
    assert count == 200

    connector._update_stats = False
    new = obs[:COUNT] + rng.normal(0, 0.1, (COUNT, 5)).astype(np.float32) * np.float32([1, 1, 1, 0, 1])
    new[0, 1] = 1e6  # clipped
    module, env = built(PPOConfig, space, CHOICE, SMALL), describe("env", space, CHOICE)
    conversion = (keep if kept else convert)(module, env, normalize=True)
    actor = Actor(conversion.acting)
    actor.load(PolicyVersion(1, conversion.params(module), shift, scale))
    expected = theirs(module, through(connector, list(new), space))["policy"]
    np.testing.assert_allclose(actor.outputs({"obs": new})["policy"], expected, rtol=1e-5, atol=3e-5)

    again = filtering(space, update_stats=False)
    again.set_state(normalizer_to(shift, scale, count, (5,)))
    np.testing.assert_allclose(
        through(again, list(new), space), through(connector, list(new), space), rtol=1e-4, atol=3e-5
    )
    same = normalizer_from(again.get_state())
    np.testing.assert_allclose(same[0], shift)
    np.testing.assert_allclose(same[1][[0, 1, 2, 4]], scale[[0, 1, 2, 4]], rtol=1e-5)
    assert same[2] == 200


def test_a_filter_that_we_do_not_have_is_refused() -> None:
    space = spaces.Box(-1, 1, (2,))
    narrow = filtering(space, clip_by_value=5.0)
    with pytest.raises(CannotConvert, match=r"clip_by_value = 5.0: networks here clip to 10.0"):
        normalizer_from(narrow.get_state())


# -- what we have no layer for ----------------------------------------------------------------------------


class Own(TorchRLModule, ValueFunctionAPI):
    """A module of a user's: layers and a buffer that our spec does not have."""

    def setup(self) -> None:
        width = self.model_config["width"]
        self.body = torch.nn.Sequential(torch.nn.Linear(self.observation_space.shape[0], width), torch.nn.GELU())
        self.register_buffer("offset", torch.full((width,), 0.5))
        outputs = self.action_space.n if hasattr(self.action_space, "n") else 2 * self.action_space.shape[0]
        self.head, self.critic = torch.nn.Linear(width, int(outputs)), torch.nn.Linear(width, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.head(self.body(batch[Columns.OBS]) + self.offset)}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return self.critic(self.body(batch[Columns.OBS]) + self.offset).squeeze(-1)


def own(done: Any = CHOICE, **config: Any) -> Any:
    spec = RLModuleSpec(Own, observation_space=VECTOR, action_space=done, model_config={"width": 11, **config})
    return scrambled(spec.build(), 1)


KEPT: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "gelu": (lambda: built(PPOConfig, VECTOR, CHOICE, {**SMALL, "fcnet_activation": "GELU"}), VECTOR, CHOICE,
             "encoder.actor_encoder.net.mlp.1 is GELU"),
    "atoms": (lambda: built(DQNConfig, VECTOR, CHOICE, SMALL, num_atoms=5), VECTOR, CHOICE, "num_atoms = 5"),
    "oblong": (lambda: built(PPOConfig, IMAGE, CHOICE, {"conv_filters": [[4, [4, 2], 2]]}), IMAGE, CHOICE,
               "encoder.actor_encoder.net.0.cnn.1 is Conv2d"),
    "own": (own, VECTOR, CHOICE, "Own is a module of your own"),
    "own, continuous": (lambda: own(TORQUES), VECTOR, TORQUES, "Own is a module of your own"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_other_modules_are_kept_as_torch_and_say_why(name: str) -> None:
    make, seen, done, why = KEPT[name]
    module, env, obs = make(), describe("env", seen, done), observed(seen)
    with pytest.raises(CannotConvert, match=why.replace(".", r"\.")):
        convert(module, env, normalize=False)
    conversion = convert_or_keep(module, env, normalize=False)
    assert why in conversion.kept
    acting = ActingSpec.from_json(conversion.acting.to_json())
    params = conversion.params(module)
    expected = theirs(module, obs)
    require_equal(ours(acting, params, {"obs": obs}, "torch"), expected)
    assert Policy(acting, PolicyVersion(1, params)).act(obs).shape[0] == len(obs)

    other = scrambled(make(), 2)
    conversion.load(other, params)
    require_equal(theirs(other, obs), expected)


class OwnNested(TorchRLModule):
    """A module that reads the parts of an observation by their keys, without FlattenObservations."""

    def setup(self) -> None:
        self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(7, 3)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        place, flags = batch[Columns.OBS]["a"][:2]
        joined = [batch[Columns.OBS]["z"].flatten(1), self.embed(place) * flags.float().mean(1, keepdim=True)]
        return {Columns.ACTION_DIST_INPUTS: self.head(torch.cat(joined, 1))}


def test_a_kept_module_gets_a_nested_observation_as_it_is() -> None:
    module = RLModuleSpec(OwnNested, observation_space=MIXED, action_space=CHOICE, model_config={}).build()
    env = describe("env", MIXED, CHOICE)
    MIXED.seed(6)
    obs = [MIXED.sample() for _ in range(COUNT)]
    conversion = convert_or_keep(scrambled(module, 1), env, normalize=False)
    assert conversion.acting.heads == {"policy": 3}
    found = ours(conversion.acting, conversion.params(module), stacked(obs, env), "torch")
    parts = {
        "z": np.stack([one["z"] for one in obs]),
        "a": tuple(np.stack([one["a"][i] for one in obs]) for i in (0, 1)),
    }
    given = {"z": torch.from_numpy(parts["z"]), "a": tuple(map(torch.from_numpy, parts["a"]))}
    with torch.no_grad():
        expected = module.forward_inference({Columns.OBS: given})[Columns.ACTION_DIST_INPUTS]
    require_equal(found, {"policy": expected.numpy()})


def test_what_is_expressed_says_nothing() -> None:
    module, seen, done = case("PPO, shared")
    assert convert_or_keep(module, describe("env", seen, done), normalize=False).kept == ""


def refused(module: Any, seen: Any, done: Any, **more: Any) -> str:
    with pytest.raises(CannotConvert) as told:
        convert_or_keep(module, describe("env", seen, done), normalize=more.get("normalize", False))
    assert "\n" not in str(told.value)
    return str(told.value)


def test_what_cannot_act_here_at_all_is_one_line() -> None:
    lstm = built(PPOConfig, VECTOR, CHOICE, {**SMALL, "use_lstm": True})
    assert "keeps a state between steps (an LSTM or such)" in refused(lstm, VECTOR, CHOICE)

    class Hidden(Own):
        pass

    hidden = RLModuleSpec(Hidden, observation_space=VECTOR, action_space=CHOICE, model_config={"width": 3}).build()
    assert "cannot be imported: put it in a module" in refused(hidden, VECTOR, CHOICE)
    assert "model_config has 'make' = " in refused(own(make=math.sin), VECTOR, CHOICE)
    begins = spaces.Discrete(5, start=2)
    flat = built(PPOConfig, spaces.Box(0, 1, (5,)), CHOICE, SMALL)
    front = spaces.Box(-1, 1, (4, 20, 18))
    cnn = built(PPOConfig, front, CHOICE, {"conv_filters": [[4, 3, 2]], "head_fcnet_hiddens": [5]})
    with pytest.raises(
        CannotConvert, match=r"4 x 20 x 18 \(channels, height, width\), and RLlib's module reads \[4, 20"
    ):
        convert(cnn, describe("env", front, CHOICE), normalize=False)
    assert "begins at [2]: RLlib's one-hot codes begin at 0" in refused(flat, begins, CHOICE)


def written(folder: Path, conversion: Conversion, module: Any) -> Path:
    version = PolicyVersion(3, conversion.params(module))
    policy = {"acting": conversion.acting.to_json(), "version": version.state()}
    checkpoint.save(folder / "policy", {"policy": policy}, step=1)
    return folder / "policy"


@pytest.mark.parametrize("name", ["wide", "SAC", "same CNN"])
def test_a_converted_policy_is_loaded_without_rllib_and_torch(name: str, tmp_path: Path) -> None:
    module, seen, done = case(name)
    conversion, obs = convert(module, describe("env", seen, done), normalize=False), observed(seen)
    path = written(tmp_path, conversion, module)
    np.save(tmp_path / "obs.npy", obs)
    code = (
        "import sys, numpy, raynforce; folder = sys.argv[1]\n"
        "found = raynforce.load(folder + '/policy').act(numpy.load(folder + '/obs.npy'))\n"
        "assert 'ray' not in sys.modules and 'torch' not in sys.modules\n"
        "print(found.tolist())"
    )
    done_ = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(done_.stdout), load(path).act(obs), rtol=1e-5, atol=1e-5)


def test_a_kept_policy_is_loaded_with_rllib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, obs = own(), observed(VECTOR)
    path = written(tmp_path, convert_or_keep(module, describe("env", VECTOR, CHOICE), normalize=False), module)
    found = load(path).act(obs)
    assert found.tolist() == theirs(module, obs)["policy"].argmax(1).tolist()
    monkeypatch.setitem(sys.modules, "ray.rllib", None)
    with pytest.raises(UsageError, match=r"Own is a module of RLlib's: pip install 'raynforce\[rllib\]'"):
        load(path)


def test_modules_of_env_runners_are_refused() -> None:
    config, seen, done, model = CASES["PPO, shared"]
    made = config().environment(observation_space=seen, action_space=done).rl_module(model_config=dict(model))
    runners = made.get_rl_module_spec(spaces={"default_policy": (seen, done)}, inference_only=True).build()
    with pytest.raises(CannotConvert, match="for inference and has no critics: give the learner's"):
        convert(runners, describe("env", seen, done), normalize=False)
    conversion = convert(case("PPO, shared")[0], describe("env", seen, done), normalize=False)
    other = built(config, seen, done, {"fcnet_hiddens": [3, 3], **SHARED})
    with pytest.raises(CannotConvert, match=r"has encoder.encoder.net.mlp.0.weight of \[3, 5\]; wanted are 80 numbers"):
        conversion.load(other, conversion.params(case("PPO, shared")[0]))


def test_layers_without_a_bias() -> None:
    module, seen, done = case("PPO, shared")
    with_bias = convert(module, describe("env", seen, done), normalize=False)
    module.pi.net.mlp[0] = torch.nn.Linear(12, 3, bias=False)
    conversion = convert(module, describe("env", seen, done), normalize=False)
    assert conversion.acting == with_bias.acting
    params, obs = conversion.params(module), observed(seen)
    require_equal(ours(conversion.acting, params, {"obs": obs}, "numpy"), theirs(module, obs))
    conversion.load(module, params)
    with pytest.raises(CannotConvert, match=r"policy.0.bias is not 0, and RLlib's module has no bias there"):
        conversion.load(module, np.full_like(params, 9.0))
    np.testing.assert_array_equal(conversion.params(module), params)


def test_distributions_of_a_users_catalog_are_looked_at() -> None:
    module, seen, done = case("wide")
    module.get_inference_action_dist_cls = lambda: TorchDeterministic
    assert "acts by TorchDeterministic, which policies here do not have for box" in refused(module, seen, done)


def test_parameters_of_another_size_change_nothing() -> None:
    module, seen, done = case("PPO, shared")
    conversion: Conversion = convert(module, describe("env", seen, done), normalize=False)
    before = conversion.params(module)
    with pytest.raises(CannotConvert, match="do not fit"):
        conversion.load(module, before[:-1])
    np.testing.assert_array_equal(conversion.params(module), before)


@pytest.mark.parametrize("space", [VECTOR, TORQUES, CHOICE, CHOICES, MIXED, spaces.Discrete(3, start=-1)], ids=str)
def test_spaces_go_through_json(space: gymnasium.Space[Any]) -> None:
    assert space_from(json.loads(json.dumps(space_to(space)))) == space


def test_half_bounded_boxes_are_the_ones_where_actions_differ() -> None:
    whole, half = spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(0, np.inf, (1,))
    action = np.float32([[-3.0]])
    for box, equal in ((TORQUES, True), (whole, True), (half, False)):
        found = action_map(describe("env", VECTOR, box).action)(np.resize(action, (1, *box.shape)))
        assert np.array_equal(found, unsquash_action(np.resize(action, (1, *box.shape)), box)) == equal
