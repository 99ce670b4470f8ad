"""Checkpoints that RLlib wrote without us, as runs of ours."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule

import raynforce
from raynforce.cli import main
from raynforce.engines.rllib import foreign
from raynforce.engines.rllib.modules import CannotConvert
from raynforce.errors import CheckpointError, UsageError
from raynforce.policies.acting import Actor
from raynforce.policy import read_policy
from raynforce.runs.catalog import glance

PLAIN = """
import sys, ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter

ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[2], object_store_memory=100_000_000)
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    .env_runners(env_to_module_connector=lambda *a, **k: [MeanStdFilter()])
    .training(lr=[[0, 1e-3], [100_000, 0.0]], gamma=0.98)
    .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=2)
    .rl_module(model_config={"fcnet_hiddens": [32, 16]})
    .debugging(seed=3)
)
algo = config.build_algo()
algo.train()
algo.save_to_path(sys.argv[1])
algo.stop()
ray.shutdown()
"""
MODULE = "learner_group/learner/rl_module/default_policy"
FEW = {"eval.episodes": 2, "eval.final_episodes": 2, "eval.every": 0}


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """What `Algorithm.save_to_path` wrote after one iteration of PPO."""
    folder = Path(tempfile.mkdtemp(prefix="rnt-", dir="/tmp"))
    script = folder / "plain.py"
    script.write_text(PLAIN)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"HOME": str(folder), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(folder / "saved"), str(folder / "ray")]
    try:
        done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-3000:]
        yield folder / "saved"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def imported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> raynforce.Imported:
    return raynforce.import_rllib(saved, trust=True, out=tmp_path_factory.mktemp("imported") / "run")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def module_at(folder: Path, config: Any, seen: Any, done: Any, **model: Any) -> Path:
    """A bare module, as `RLModule.save_to_path` writes it."""
    made = config().environment(observation_space=seen, action_space=done).rl_module(model_config=model)
    module = made.get_rl_module_spec(spaces={"default_policy": (seen, done)}, inference_only=False).build()
    module.save_to_path(folder)
    return folder


def test_outputs_are_those_of_rllibs_module(saved: Path, imported: raynforce.Imported) -> None:
    module = RLModule.from_checkpoint(saved / MODULE)
    spec, version = read_policy(imported.path / "last")
    assert version.shift is not None
    assert version.scale is not None
    assert np.ptp(version.scale) > 0.1  # the filter has seen something
    actor = Actor(spec)
    actor.load(version)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    filtered = np.clip((obs - version.shift) * version.scale, -10, 10)
    with torch.no_grad():
        expected = module.forward_inference({Columns.OBS: torch.from_numpy(filtered)})[Columns.ACTION_DIST_INPUTS]
    np.testing.assert_allclose(actor.outputs({"obs": obs})["policy"], expected.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(raynforce.load(imported.path).act(obs), expected.numpy().argmax(1))


def test_the_run_is_a_run(imported: raynforce.Imported) -> None:
    config = imported.config
    assert (config.algo, config.env, config.engine, config.seed) == ("ppo", "CartPole-v1", "rllib", 3)
    assert (config.network.hidden, config.network.normalize_obs) == ((32, 16), True)
    hp: Any = config.algorithm
    assert (hp.gamma, hp.epochs, hp.minibatch_size) == (0.98, 2, 100)
    assert config.sampling.envs * config.sampling.fragment == 200
    assert config.rllib["training"]["vf_clip_param"] == 10.0  # RLlib's default, which is not ours
    assert config.rllib["training"]["lr"] == [[0, 1e-3], [100_000, 0.0]]
    assert 200 <= imported.steps <= 210
    assert imported.episodes > 0
    assert (imported.resumable, list(imported.notes)) == (True, [])
    found = glance(imported.path)
    assert (found.state, found.steps) == ("finished", imported.steps)
    returns, _ = raynforce.evaluate(imported.path, episodes=3, seed=1)
    assert len(returns) == 3


@pytest.mark.parametrize("command", ["show", "doctor", "runs"])
def test_commands_take_it(command: str, imported: raynforce.Imported, capsys: pytest.CaptureFixture[str]) -> None:
    path = imported.path.parent if command == "runs" else imported.path
    assert main([command, str(path)]) == 0
    assert "run" in capsys.readouterr().out


def test_native_training_begins_from_it(imported: raynforce.Imported, tmp_path: Path) -> None:
    network = {"network.hidden": [32, 16], "network.normalize_obs": True}
    how: dict[str, Any] = {"steps": 64, "runtime": "inline", "progress": "quiet", "out": tmp_path / "run"}
    settings = {**FEW, **network, "sampling.fragment": 4, "algorithm.minibatch_size": 32}
    run = raynforce.train("CartPole-v1", start_from=str(imported.path), settings=settings, **how)
    assert run.result.steps >= 64


@pytest.mark.usefixtures("shared_ray")
def test_resume_goes_on_with_rllib_on_ray(imported: raynforce.Imported, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(imported.path, tmp_path / "run", symlinks=True))
    before = read_policy(copied / "last")[1]
    steps = imported.steps + 100
    run = raynforce.resume(copied, steps=steps, settings=FEW, progress="quiet")
    assert imported.steps < steps <= run.result.steps <= imported.steps + 210
    after = read_policy(copied / "last")[1]
    assert after.number == before.number + 1
    change = np.abs(after.params - before.params)
    assert 0 < change.max() < 0.05  # a few steps of Adam from there, and not another network

    folder = raynforce.export_rllib(copied, tmp_path / "exported")
    again = RLModule.from_checkpoint(folder / MODULE)
    assert sum(p.numel() for p in again.parameters()) == after.params.size
    with pytest.raises(UsageError, match="is there already"):
        raynforce.export_rllib(copied, folder)


def test_files_of_rllib_come_out_as_they_went_in(saved: Path, imported: raynforce.Imported, tmp_path: Path) -> None:
    folder = raynforce.export_rllib(imported.path, tmp_path / "out")
    files = {path.relative_to(saved): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    assert files == {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Spy:
    """A pickle that writes down who reads it."""

    def __init__(self, to: Path) -> None:
        self.to = to

    def __reduce__(self) -> Any:
        told = f"import os, json; open({str(self.to)!r}, 'w').write(json.dumps([os.getpid(), dict(os.environ)]))"
        return exec, (told,)


def test_pickles_are_read_only_if_trusted_by_another_process_without_secrets(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "seen.json"
    (copy / "class_and_ctor_args.pkl").write_bytes(pickle.dumps(Spy(seen)))
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    assert main(["import", "rllib", str(copy), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "--trust" in said
    assert "pickles" in said
    assert not seen.exists()
    assert main(["import", "rllib", str(copy), "--out", str(tmp_path / "run"), "--trust"]) != 0
    pid, environ = json.loads(seen.read_text())
    assert pid != os.getpid()
    assert "s3cret" not in environ.values()
    assert not (tmp_path / "run").exists()


def test_a_reader_that_hangs_is_ended(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raynforce.engines.rllib import importing

    monkeypatch.setattr(importing, "SECONDS", 0.2)
    with pytest.raises(raynforce.RaynforceError, match=r"within 0 s"):
        raynforce.import_rllib(copy, trust=True, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_no_checkpoint_of_this_rllib(copy: Path, tmp_path: Path) -> None:
    def refused(path: Path, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            raynforce.import_rllib(path, trust=True)

    refused(tmp_path / "none", "is not there")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "no rllib_checkpoint.json")
    refused(tmp_path, "it has copy, name that")
    head = copy / "rllib_checkpoint.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "ray_version": "2.9.3"}))
    refused(copy, r"made by Ray 2\.9\.3")
    head.write_text("{")
    refused(copy, "cannot be read")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        raynforce.import_rllib(copy, trust=True, out=taken)
    with pytest.raises(CheckpointError):
        raynforce.export_rllib(empty, tmp_path / "out")


def test_what_does_not_fit(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'Acrobot-v1' does not fit: its actions are discrete 3, the module's"):
        foreign.read(copy, "Acrobot-v1", tmp_path)
    with pytest.raises(UsageError, match="Nowhere"):
        foreign.read(copy, "Nowhere-v1", tmp_path)
    shutil.copytree(copy / MODULE, (copy / MODULE).with_name("other"))
    with pytest.raises(UsageError, match=r"has 2 modules \(default_policy, other\)"):
        foreign.read(copy, "", tmp_path)


def test_connectors_that_policies_do_not_have(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "PLAIN", foreign.PLAIN - {"MeanStdFilter"})
    with pytest.raises(CannotConvert, match="the connector MeanStdFilter"):
        foreign.read(copy, "", tmp_path)


def test_environments_that_only_their_script_knows(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        pass

    changed: Any = "mine"
    init = foreign.Checkpoint.__init__

    def other(self: foreign.Checkpoint, folder: Path) -> None:
        init(self, folder)
        self.config.env = changed

    monkeypatch.setattr(foreign.Checkpoint, "__init__", other)
    with pytest.raises(UsageError, match=r"environment is 'mine', which only its script knows: name it: --env ENV"):
        foreign.read(copy, "", tmp_path)
    changed = Own
    with pytest.raises(UsageError, match=r"environment is the class .*Own"):
        foreign.read(copy, "", tmp_path)
    found = foreign.read(copy, "CartPole-v1", tmp_path)
    assert (found["config"]["env"], found["unfit"]) == ("CartPole-v1", "")


def test_a_module_alone_needs_its_environment(tmp_path: Path) -> None:
    seen, done = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    alone = module_at(tmp_path / "module", DQNConfig, seen, done, fcnet_hiddens=[8])
    with pytest.raises(UsageError, match="--env ENV"):
        foreign.read(alone, "", tmp_path)
    found = foreign.read(alone, "CartPole-v1", tmp_path)
    assert found["config"]["algo"] == "dqn"
    assert found["acting"]["exploration"] == "epsilon"
    assert "optimiser" in found["unfit"]
    with pytest.raises(UsageError, match="its observation has 6 numbers, and the module reads 4"):
        foreign.read(module_at(tmp_path / "three", PPOConfig, seen, spaces.Discrete(3)), "Acrobot-v1", tmp_path)
    soft = module_at(tmp_path / "soft", SACConfig, spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,)))
    assert foreign.read(soft, "Pendulum-v1", tmp_path)["acting"]["gaussian"] == "squashed"
    recurrent = module_at(tmp_path / "recurrent", PPOConfig, seen, done, use_lstm=True, max_seq_len=4)
    with pytest.raises(CannotConvert, match="keeps a state between steps"):
        foreign.read(recurrent, "CartPole-v1", tmp_path)
