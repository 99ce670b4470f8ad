"""A checkpoint's policy in C++ gives what numpy gives."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.algos import algorithm_class
from raynforce.envs.make import make_described
from raynforce.experiment import resolve
from raynforce.policies.acting import Actor, PolicyVersion
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
    acting, rng = algorithm_class(algo)(config, spec).acting(), np.random.default_rng(1)
    params = rng.normal(0, 0.3, sum(p.size for p in acting.network.params())).astype(np.float32)
    width = acting.network.input_width
    shift, scale = rng.normal(0, 1, width).astype(np.float32), rng.uniform(0.1, 2, width).astype(np.float32)
    normaliser = (shift, scale) if acting.network.normalizes else ()
    version = PolicyVersion(7, params, *normaliser, schedules={"epsilon": 0.1} if algo == "dqn" else {})
    path = folder / "policy"
    checkpoint.save(path, {"policy": {"acting": acting.to_json(), "version": version.state()}}, step=1)
    return path, made.observation_space, spec


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
    path, space, spec = written(tmp_path, env, algo, args, **network)
    seen, columns = observations(space, spec, tmp_path / "observations")
    done = subprocess.run([act, str(path), str(tmp_path / "observations")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.array([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    policy = load(path)
    actor = Actor(policy.spec, light=True)
    actor.load(policy.version)
    outputs = actor.outputs(columns)[actor.distribution.outputs[0]]
    width = outputs.shape[1]
    np.testing.assert_allclose(found[:, :width], outputs, rtol=1e-5, atol=1e-5 * np.abs(outputs).max())
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
