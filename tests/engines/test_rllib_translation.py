"""From our settings to RLlib's: nothing is lost without a word, and what is printed runs without us."""

from __future__ import annotations

import ast
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce import given
from raynforce.cli import main
from raynforce.config import Config
from raynforce.engines.rllib.algorithms import OTHERS, OURS, described
from raynforce.engines.rllib.code import program
from raynforce.engines.rllib.engine import require_rllib
from raynforce.engines.rllib.files import pack, unpack
from raynforce.engines.rllib.runner import RunnerEnv, context
from raynforce.engines.rllib.translation import ROWS, Translation, rows_of, translate
from raynforce.envs.vector import probe
from raynforce.errors import CheckpointError, UsageError
from raynforce.experiment import resolve
from raynforce.settings import known_keys


def experiment(algo: str, env: str = "CartPole-v1", **settings: Any) -> Config:
    return resolve({"algo": algo, "env": env, "engine": "rllib", **settings})[0]


def translated(algo: str, env: str = "CartPole-v1", **given: Any) -> Translation:
    return translate(experiment(algo, env, **given), probe(env, {}))


@pytest.mark.parametrize("algo", [*OURS, "MARWIL"])
def test_every_setting_has_a_row(algo: str) -> None:
    for name in known_keys(Config, {"algorithm": described(algo).Settings}):
        assert rows_of(name, algo)[0] in ROWS, name


def test_ppo() -> None:
    calls = translated("ppo", sampling={"samplers": 3, "envs": 4, "fragment": 32}, algorithm={"epochs": 7}).calls
    runners, training = calls["env_runners"], calls["training"]
    assert (runners["num_env_runners"], runners["num_envs_per_env_runner"]) == (3, 4)
    assert runners["rollout_fragment_length"] == 32
    assert training["train_batch_size_per_learner"] == 3 * 4 * 32
    assert (training["num_epochs"], training["lr"], training["gamma"]) == (7, 2e-3, 0.98)  # the preset's
    assert training["vf_loss_coeff"] == 0.25  # RLlib does not halve the squared error
    assert calls["rl_module"]["model_config"]["fcnet_hiddens"] == [64, 64]
    assert not calls["rl_module"]["model_config"]["vf_share_layers"]


def test_the_learning_rate_as_a_schedule() -> None:
    found = translated("ppo", steps=10_000, algorithm={"learning_rate": 0.5, "anneal_learning_rate": True})
    assert found.calls["training"]["lr"] == [[0, 0.5], [10_000, 0.0]]


def test_dqn() -> None:
    given = {"batch_size": 32, "samples_per_insert": 8.0, "target_every": 100, "prioritized": True}
    training = translated("dqn", steps=50_000, algorithm=given, sampling={"samplers": 3}).calls["training"]
    assert training["target_network_update_freq"] == 400  # environment steps in which 100 updates are made
    assert training["training_intensity"] == 6.0  # RLlib counts four runners
    assert training["replay_buffer_config"]["type"] == "PrioritizedEpisodeReplayBuffer"
    assert training["epsilon"] == [[0, 1.0], [5_000, 0.05]]
    assert training["tau"] == 1.0
    soft = translated("dqn", algorithm={"target_update": "soft"}).calls["training"]
    assert (soft["tau"], soft["target_network_update_freq"]) == (0.005, 4)


def test_sac_and_normalised_observations() -> None:
    training = translated("sac", "Pendulum-v1", algorithm={"learning_rate": 1e-4}).calls["training"]
    assert (training["actor_lr"], training["critic_lr"], training["alpha_lr"], training["lr"]) == (*[1e-4] * 3, None)
    found = translated("ppo", "Pendulum-v1", preset="none")
    assert found.connectors == ["MeanStdFilter"]
    assert found.calls["rl_module"]["model_config"]["free_log_std"]


def test_images_and_several_leaves() -> None:
    found = translated("ppo", "raynforce.envs.tiny:Catch")
    model = found.model
    assert all(layer[3] == "valid" for layer in model["conv_filters"])
    assert model["head_fcnet_hiddens"] == [64, 64]
    assert model["vf_share_layers"]
    assert translated("ppo", "FrozenLake-v1", network={"normalize_obs": False}).connectors == ["FlattenObservations"]


def test_what_defaults_set_and_rllib_lacks_is_told() -> None:
    (note,) = translated("ppo", "Pendulum-v1", preset="none").notes
    assert note.startswith("without effect in RLlib: algorithm.adam_epsilon")
    assert "learner.scale_rewards" in note


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"algorithm": {"target_kl": 0.1}}, "algorithm.target_kl = 0.1 has no counterpart in RLlib"),
        ({"replay": {"compress": True}}, "replay.compress = True has no counterpart in RLlib"),
        ({"central": {"batch_min": 4}}, "central.batch_min = 4 has no counterpart in RLlib"),
        ({"faults": {"quorum": 0.9}}, "faults.quorum = 0.9 has no counterpart in RLlib"),
        ({"sampling": {"inference": "client"}}, "sampling.inference = 'client' has no counterpart in RLlib"),
        ({"sampling": {"parallel": "threads"}}, "sampling.parallel = 'threads' has no counterpart in RLlib"),
        ({"topology": "central"}, "topology = 'central' has no counterpart: PPO of RLlib is sync; leave it out"),
        ({"runtime": "process"}, "runtime = 'process': RLlib runs on Ray; use --runtime ray, or leave it out"),
        ({"rllib": {"trainin": {"lr": 1}}}, "rllib.trainin is no section of RLlib's config (did you mean 'training'?)"),
        ({"rllib": {"training": 3}}, "rllib.training = 3 is not a section"),
        ({"rllib": {"environment": {"env": "A"}}}, "name the environment as ENV"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused_by_name(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        translated("ppo", **given)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("algo", "line"),
    [
        ("a3c", "algo = 'a3c' was removed from RLlib: RLlib 2.60 has ppo, impala, appo, dqn, sac by our names"),
        ("marwill", "RLlib has no algorithm 'marwill' (did you mean 'MARWIL'?)"),
    ],
)
def test_an_algorithm_that_rllib_does_not_have(algo: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        experiment(algo)
    assert str(error.value).startswith(line)


def test_case_makes_no_difference() -> None:
    assert translated("PPO").algorithm.name == "PPO"
    given = {"offline_data": {"input_": "episodes"}}
    assert translated("marwil", rllib=given).algorithm is OTHERS["MARWIL"]


def test_arguments_are_passed_through_over_all_others() -> None:
    found = translated("ppo", rllib={"training": {"vf_clip_param": 10, "lr": 0.5}, "learners": {"num_learners": 2}})
    assert found.calls["training"]["vf_clip_param"] == 10
    assert found.calls["training"]["lr"] == 0.5
    assert found.calls["learners"]["num_learners"] == 2
    with pytest.raises(UsageError, match=r"rllib.training.lr is for --engine rllib, and the engine is 'native'"):
        resolve({"algo": "ppo", "env": "CartPole-v1", "rllib": {"training": {"lr": 1}}})


@pytest.mark.parametrize(("algo", "env"), [("ppo", "CartPole-v1"), ("dqn", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_the_printed_script_is_what_the_engine_builds(algo: str, env: str) -> None:
    """Its config, made by Python alone, equals the engine's in every argument that was translated."""
    config = experiment(algo, env)
    found = translate(config, probe(env, {}))
    text = program(found, config)
    assert "raynforce" not in text
    before, _, _ = text.partition('if __name__ == "__main__":')
    names: dict[str, Any] = {}
    exec(compile(ast.parse(before), "printed", "exec"), names)
    made = names["config"]
    made.validate()
    for section in ("training", "learners", "fault_tolerance", "reporting"):
        for name, value in found.calls[section].items():
            assert getattr(made, name.rstrip("_"), getattr(made, name, None)) == value, name
    assert made.env == env


def test_a_factory_in_the_printed_script() -> None:
    env = "gymnasium.envs.classic_control:CartPoleEnv"
    text = program(translated("ppo", env), experiment("ppo", env))
    assert "from gymnasium.envs.classic_control import CartPoleEnv\n" in text
    assert f"register_env({env!r}, lambda config: CartPoleEnv(**config))" in text
    ast.parse(text)


@pytest.mark.parametrize(
    ("env", "args"),
    [
        ("raynforce.envs.tiny:Catch", {}),
        ("raynforce.envs.frames:stacked", {"env": "raynforce.envs.tiny:Catch", "frames": 2}),
    ],
)
def test_images_are_read_by_the_printed_script_as_by_the_engine(env: str, args: dict[str, Any]) -> None:
    """From 0 to 1, with their channels last."""
    config = experiment("ppo", env, env_args=args)
    before, _, _ = program(translate(config, probe(env, args)), config).partition('if __name__ == "__main__":')
    names: dict[str, Any] = {}
    exec(compile(ast.parse(before), "printed", "exec"), names)
    assert names["config"].env == "images"
    theirs, ours = names["images"](args), RunnerEnv(context(config, given.pack((env,)), images=True))
    assert theirs.observation_space == ours.observation_space
    np.testing.assert_array_equal(theirs.reset(seed=3)[0], ours.reset(seed=3)[0])


def test_explain_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rllib"]) == 0
    assert "sampling.samplers               env_runners.num_env_runners" in capsys.readouterr().out
    assert main(["explain", "rllib", "--json"]) == 0
    assert {"setting": "seed", "rllib": "debugging.seed", "note": ""} in json.loads(capsys.readouterr().out)["settings"]
    assert main(["explain", "sampling.fragment"]) == 0
    assert capsys.readouterr().out == "sampling.fragment: Steps of each environment that make one fragment.\n"
    assert main(["explain", "sampling.fragmnt"]) == 2
    assert "did you mean 'sampling.fragment'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ({"ray": "2.61.0"}, "engine 'rllib' is made for Ray 2.60.x, and this is 2.61.0"),
        ({"gymnasium": "1.3.0"}, "RLlib 2.60 takes gymnasium 1.2.2 alone, and this is 1.3.0"),
        ({"dm-tree": None}, "engine 'rllib' needs dm-tree, which is not installed: pip install 'raynforce[rllib]'"),
    ],
)
def test_another_version_is_one_line(
    installed: dict[str, str | None], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in installed:
            return real(name)
        if installed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(installed[name])

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UsageError) as error:
        require_rllib()
    assert line in str(error.value)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
def test_a_file_that_leads_out_of_its_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    tree = {"names": ["a/b", name], "files": {"0": np.arange(3, dtype=np.uint8), "1": np.arange(3, dtype=np.uint8)}}
    with pytest.raises(CheckpointError, match="leads out of it"):
        unpack(tree, tmp_path / "in")
    assert not (tmp_path / "out").exists()
    unpack({"names": ["a/b"], "files": tree["files"]}, tmp_path / "again")
    assert pack(tmp_path / "again")["names"] == ["a/b"]


def test_an_argument_that_rllib_does_not_have_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "ppo", "CartPole-v1", "--engine", "rllib", "--print-config", "--set"]
    assert main([*words, "rllib.training.vf_clip_parm=10"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "PPOConfig.training has no such argument (did you mean 'vf_clip_param'?)" in err
