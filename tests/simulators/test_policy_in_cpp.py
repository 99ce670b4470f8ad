"""A checkpoint's policy in C++ gives what numpy gives."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from raynforce.algos import algorithm_class
from raynforce.envs.describe import describe
from raynforce.envs.make import make_described
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.spec import Activation, Conv, LayerNorm, Linear, NetworkSpec, Tower
from raynforce.policy import load
from raynforce.runs import checkpoint
from raynforce.spaces import EnvSpec

COUNT = 200


@pytest.fixture(scope="session")
def act(compiled: Callable[[str], str]) -> str:
    return compiled("tests/simulators/act.cpp")


def written(folder: Path, env: str, algo: str, args: dict[str, Any], **network: Any) -> tuple[Path, Any, EnvSpec]:
    """A policy with random numbers for parameters and normaliser, and its environment's observation space."""
    config, _ = resolve({"env": env, "env_args": args, "algo": algo, "network": network})
    made, spec = make_described(env, args)
    acting = algorithm_class(algo)(config, spec).acting()
    return saved(folder, acting, {"epsilon": 0.1} if algo == "dqn" else {}), made.observation_space, spec


def saved(folder: Path, acting: ActingSpec, schedules: Mapping[str, float]) -> Path:
    rng = np.random.default_rng(1)
    params = rng.normal(0, 0.3, sum(p.size for p in acting.network.params())).astype(np.float32)
    width = acting.network.input_width
    shift, scale = rng.normal(0, 1, width).astype(np.float32), rng.uniform(0.1, 2, width).astype(np.float32)
    normaliser = (shift, scale) if acting.network.normalizes else ()
    version = PolicyVersion(7, params, *normaliser, schedules=schedules)
    path = folder / "policy"
    checkpoint.save(path, {"policy": {"acting": acting.to_json(), "version": version.state()}}, step=1)
    return path


def observations(space: Any, spec: EnvSpec, path: Path) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Random ones, and as arrays by leaf; their bytes are written to a file."""
    space.seed(3)
    seen = [space.sample() for _ in range(COUNT)]
    if spec.env == "CartPole-v1":  # its space reaches to the end of what float32 can hold
        seen = list(np.random.default_rng(3).normal(0, 2, (COUNT, 4)).astype(np.float32))
    columns: dict[str, list[np.ndarray]] = {leaf.path: [] for leaf in spec.obs}
    with path.open("wb") as file:
        for obs in seen:
            for leaf in spec.obs:
                value = obs
                for key in leaf.path.split("/")[1:]:
                    value = value[key]
                array = np.asarray(value).astype(leaf.dtype).reshape(leaf.shape)
                columns[leaf.path].append(array)
                file.write(array.tobytes())
    return seen, {path: np.stack(column) for path, column in columns.items()}


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "PPO": ("CartPole-v1", "ppo", {}, {"normalize_obs": True}),
    "DQN": ("CartPole-v1", "dqn", {}, {"activation": "relu", "hidden": [32]}),
    "SAC": ("Pendulum-v1", "sac", {}, {"hidden": [32, 16], "normalize_obs": True}),
    "TD3": ("Pendulum-v1", "td3", {}, {"hidden": [32]}),
    "continuous": ("Pendulum-v1", "ppo", {}, {"activation": "silu"}),
    "unbounded": ("policy_envs:Spaces", "ppo", {"kind": "vector"}, {"activation": "elu", "normalize_obs": True}),
    "colour": ("policy_envs:Spaces", "ppo", {"kind": "colour"}, {}),
    "planes": ("policy_envs:Spaces", "impala", {"kind": "planes"}, {"conv": [[8, 3, 2], [4, 2, 1]]}),
    "gray": ("policy_envs:Spaces", "dqn", {"kind": "gray"}, {}),
    "no convolutions": ("policy_envs:Spaces", "ppo", {"kind": "gray"}, {"conv": [], "normalize_obs": True}),
    "one choice": ("policy_envs:Spaces", "ppo", {"kind": "choice"}, {"normalize_obs": True}),
    "nested": ("policy_envs:Spaces", "dqn", {"kind": "nested"}, {}),
    "all": ("policy_envs:Spaces", "ppo", {"kind": "all"}, {"normalize_obs": True}),
    "Catch": ("raynforce.envs.tiny:Catch", "ppo", {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_actions_equal_numpys(name: str, act: str, tmp_path: Path) -> None:
    env, algo, args, network = CASES[name]
    require_equal(act, *written(tmp_path, env, algo, args, **network), tmp_path)


def wide(acting: ActingSpec, gaussian: Literal["wide", "squashed"]) -> ActingSpec:
    (size,) = acting.env.action.shape
    policy = Tower("policy", (Linear(9), LayerNorm(0.1), Activation("tanh"), Linear(2 * size)))
    network = NetworkSpec(acting.network.inputs, (policy,))
    return replace(acting, network=network, heads={"policy": 2 * size}, gaussian=gaussian, log_std_range=(-0.5, 0.3))


@pytest.mark.parametrize("gaussian", ["wide", "squashed"])
def test_gaussians_that_depend_on_the_observation(
    gaussian: Literal["wide", "squashed"], act: str, tmp_path: Path
) -> None:
    config, _ = resolve({"env": "Pendulum-v1", "algo": "ppo"})
    made, spec = make_described("Pendulum-v1", {})
    acting = wide(algorithm_class("ppo")(config, spec).acting(), gaussian)
    require_equal(act, saved(tmp_path, acting, {}), made.observation_space, spec, tmp_path)


def test_convolutions_that_pad(act: str, tmp_path: Path) -> None:
    config, _ = resolve({"env": "policy_envs:Spaces", "env_args": {"kind": "colour"}, "algo": "ppo"})
    made, spec = make_described("policy_envs:Spaces", {"kind": "colour"})
    acting = algorithm_class("ppo")(config, spec).acting()
    layers = Conv(4, 4, 3, padding="same"), Activation("relu"), Conv(3, 2, 1, padding="same"), Linear(3)
    acting = replace(acting, network=NetworkSpec(acting.network.inputs, (Tower("policy", layers),)))
    require_equal(act, saved(tmp_path, acting, {}), made.observation_space, spec, tmp_path)


def test_an_actor_of_rllibs(act: str, tmp_path: Path) -> None:
    import torch
    from gymnasium import spaces
    from ray.rllib.algorithms.sac import SACConfig

    from raynforce.engines.rllib.modules import convert

    seen, done = spaces.Box(-3, 3, (4,)), spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))
    config = SACConfig().rl_module(model_config={"fcnet_hiddens": [16, 8]})
    module: Any = config.get_rl_module_spec(spaces={"default_policy": (seen, done)}, inference_only=False).build()
    conversion = convert(module, describe("env", seen, done), normalize=False)
    version = PolicyVersion(1, conversion.params(module))
    policy = {"acting": conversion.acting.to_json(), "version": version.state()}
    checkpoint.save(tmp_path / "policy", {"policy": policy}, step=1)
    obs = np.random.default_rng(3).uniform(-3, 3, (COUNT, 4)).astype(np.float32)
    (tmp_path / "observations").write_bytes(obs.tobytes())
    words = [act, str(tmp_path / "policy"), str(tmp_path / "observations")]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    found = np.array([[float(x) for x in line.split()] for line in lines])
    with torch.no_grad():
        expected = module.forward_inference({"obs": torch.from_numpy(obs)})["action_dist_inputs"].numpy()
    np.testing.assert_allclose(found[:, :4], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[:, 4:6], np.tanh(expected[:, :2]) * [2, 5] + [0, 5], rtol=1e-5, atol=1e-5)


def require_equal(act: str, path: Path, space: Any, spec: EnvSpec, tmp_path: Path) -> None:
    seen, columns = observations(space, spec, tmp_path / "observations")
    done = subprocess.run([act, str(path), str(tmp_path / "observations")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.array([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    policy = load(path)
    actor = Actor(policy.spec, light=True)
    actor.load(policy.version)
    out = actor.outputs(columns)
    outputs = out[actor.distribution.outputs[0]]
    width = outputs.shape[1]
    np.testing.assert_allclose(found[:, :width], outputs, rtol=1e-5, atol=1e-5 * np.abs(outputs).max())
    _, greedy, drawn, logp = np.split(found, [width, -1 - math.prod(spec.action.shape), -1], axis=1)
    found = np.concatenate([found[:, :width], greedy], axis=1)
    if policy.spec.exploration == "policy":
        chosen = drawn.astype(np.float32 if spec.action.kind == "box" else np.int64).reshape(-1, *spec.action.shape)
        np.testing.assert_allclose(logp[:, 0], actor.distribution.logp(out, chosen), rtol=1e-3, atol=1e-3)
    assert len(np.unique(drawn)) > 1
    expected = np.stack([np.asarray(policy.act(obs), np.float64).reshape(-1) for obs in seen])
    if spec.action.kind == "box":
        np.testing.assert_allclose(found[:, width:], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    else:
        assert (found[:, width:] == expected).mean() > 0.99, "ties aside"
    assert len(np.unique(expected)) > 1


def test_what_it_cannot_read_is_one_line(act: str, tmp_path: Path) -> None:
    def says(path: Path) -> str:
        done = subprocess.run([act, str(path), "/dev/null"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "cannot read" in says(tmp_path / "nowhere")
    path, *_ = written(tmp_path, "CartPole-v1", "ppo", {})
    data = bytearray((path / "policy.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "policy.safetensors").write_bytes(data)
    assert "policy.safetensors is damaged" in says(path)
    own = tmp_path / "own"
    content = json.loads((path / "policy.json").read_text())
    content["acting"]["factory"] = "my_nets:make"
    checkpoint.save(own, {"policy": {"acting": content["acting"], "version": load_version()}}, step=1)
    assert "is a torch module of the user's (my_nets:make)" in says(own)


def load_version() -> dict[str, Any]:
    return PolicyVersion(1, np.zeros(3, np.float32)).state()
