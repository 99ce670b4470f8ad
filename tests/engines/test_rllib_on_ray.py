"""Runs with `--engine rllib`: RLlib trains, everything around it is as ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from running import events, metrics, solve

import raynforce
from raynforce.cli import main
from raynforce.data.files import read
from raynforce.envs.vector import probe
from raynforce.errors import UsageError
from raynforce.policies.numpy_net import NumpyNet
from raynforce.runs import checkpoint

pytestmark = pytest.mark.usefixtures("shared_ray")

QUICK = {
    "preset": "none",
    "sampling.envs": 4,
    "sampling.fragment": 32,
    "algorithm.epochs": 2,
    "network.hidden": [16],
    "network.normalize_obs": False,
    "eval.episodes": 2,
    "eval.final_episodes": 2,
    "eval.every": 0,
    "log_every": 100,
}
FAULTY = {**QUICK, "network.normalize_obs": True, "algorithm.anneal_learning_rate": True, "env_args": {"p": 0.005}}


def train(env: str, algo: str, out: Path, steps: int, settings: Any = QUICK, **more: Any) -> raynforce.Run:
    how = {"engine": "rllib", "progress": "quiet", "settings": settings, **more}
    return raynforce.train(env, algo, steps=steps, seed=3, out=out, **how)


def test_ppo_solves_cartpole_and_leaves_a_run_on_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = solve("CartPole-v1", "ppo", tmp_path / "run", steps=100_000, target=450.0, engine="rllib", seed=1)
    result = run.result
    assert (result.runtime, result.topology, result.stopped) == ("ray", "sync", "target met")
    assert result.eval_return is not None
    assert result.eval_return >= 400
    last = metrics(run.path)[-1]
    numbers = {name for line in metrics(run.path) for name in line}
    assert {"charts/episodic_return", "charts/SPS", "losses/policy_loss", "losses/entropy", "eval/return"} <= numbers
    assert {"rllib/env_runners/episode_return_mean", "rllib/timers/training_step", "charts/learning_rate"} <= numbers
    assert last["step"] <= result.steps
    assert result.updates > 100
    assert run.where_the_time_went.startswith("where the time went: start-up")
    assert events(run.path, "stopped")[0]["reason"] == "target met"
    assert list((run.path / "tensorboard").iterdir())
    for command in (["show", str(run.path)], ["runs", str(tmp_path)], ["doctor", str(run.path)]):
        assert main(command) == 0
    told = capsys.readouterr().out
    assert "rllib on ray, sync" in told
    assert "resume goes on at step" in told
    # Whoever acts needs neither RLlib nor torch.
    script = f"""
import sys
for name in ("ray", "torch"):
    sys.modules[name] = None
import raynforce
policy = raynforce.load({str(run.path)!r})
print(int(policy.act([0.0, 0.0, 0.05, 0.0])))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() in ("0", "1")


def test_a_run_with_faults_is_resumed_and_its_weights_go_both_ways_on_ray(tmp_path: Path) -> None:
    env = "fault_envs:Raising"
    first = train(env, "ppo", tmp_path / "run", 2048, FAULTY, callbacks=[_stop_at(512)])
    assert 512 <= first.result.steps < 700
    assert set(checkpoint.load(first.path / "last")) >= {"policy", "rllib", "run"}
    before = raynforce.load(first.path, "last")

    second = raynforce.resume(first.path, progress="quiet")
    told = [line for line in events(second.path, "fault") if line["role"] == "env runner 1"]
    assert told  # ten in the mean
    assert "the simulator lost its connection" in told[0]["cause"]
    assert second.result.env_restarts >= len(told)
    assert second.result.steps >= 2048
    assert second.result.updates > first.result.updates
    rate = "charts/learning_rate"
    rates = {line["step"]: line[rate] for line in metrics(second.path) if rate in line}
    steps = sorted(rates)
    assert all(rates[a] > rates[b] for a, b in pairwise(steps))  # it falls on, over the resume
    halfway = next(step for step in steps if step > first.result.steps)
    assert rates[halfway] == pytest.approx(3e-4 * (1 - halfway / 2048), abs=3e-5)
    sampled = [line.get("rllib/env_runners/num_env_steps_sampled_lifetime") for line in metrics(second.path)]
    assert [n for n in sampled if n is not None][-1] == second.result.steps
    after = second.policy("last")
    assert after.version.number > before.version.number
    assert before.version.scale is not None
    assert after.version.scale is not None
    # With a normaliser that had begun anew, few observations would have moved it far.
    assert np.abs(np.log(after.version.scale / before.version.scale)).max() < 1.0

    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    how = {"start_from": second.path / "last", "progress": "quiet", "settings": FAULTY, "runtime": "inline"}
    ours = raynforce.train(env, "ppo", steps=128, out=tmp_path / "ours", **how)
    np.testing.assert_allclose(_values(_first_policy(ours.path), obs), _values(after, obs), atol=1e-4)
    again = train(env, "ppo", tmp_path / "again", 128, FAULTY, start_from=tmp_path / "ours" / "last")
    np.testing.assert_allclose(_values(_first_policy(again.path), obs), _values(ours.policy("last"), obs), atol=1e-4)


def _stop_at(steps: int) -> Any:
    def stop(status: raynforce.Status) -> None:
        if status.steps >= steps:
            status.stop()

    return stop


def _values(policy: raynforce.Policy, obs: np.ndarray) -> np.ndarray:
    """What it thinks of observations."""
    net = NumpyNet(policy.spec.network, ["value"])
    net.load(policy.version.params, policy.version.shift, policy.version.scale)
    return net({"obs": obs})["value"]


def _first_policy(run: Path) -> raynforce.Policy:
    """The one of the checkpoint that a run begins with."""
    first = min((run / "checkpoints").glob("step_*"))
    assert int(first.name.split("_")[1].split(".")[0]) == 0
    return raynforce.load(first)


@pytest.mark.slow
def test_an_environment_that_always_breaks_ends_the_run_with_its_cause_on_ray(tmp_path: Path) -> None:
    settings = {**QUICK, "env_args": {"p": 1.0}}
    with pytest.raises(raynforce.RaynforceError, match=r"4 times in a row within 10 steps .*lost its connection"):
        train("fault_envs:Raising", "ppo", tmp_path / "run", 1500, settings)
    assert events(tmp_path / "run", "failed")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"rllib.training.vf_clip_parm": 1},
            "rllib.training.vf_clip_parm: PPOConfig.training has no such argument (did you mean 'vf_clip_param'?)",
        ),
        ({"rllib.training.lr": "high"}, "RLlib refuses this config: "),
        ({"rllib.rl_module.model_config.fcnet_hidden": [1]}, "fcnet_hidden is unknown to RLlib"),
        ({"rllib.rl_module.model_config.use_lstm": True}, "policies here have none yet: set use_lstm to false"),
        ({"algo": "MARWIL"}, "MARWIL learns from recorded data: give --data PATH"),
        (
            {"algo": "dqn", "env": "Pendulum-v1"},
            "dqn of RLlib needs discrete actions, and those of Pendulum-v1 are continuous: use ppo",
        ),
    ],
)
def test_what_rllib_cannot_take_is_one_line_and_leaves_no_run(
    tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    """Before a Ray is started."""
    given = {**({} if "algo" in settings else QUICK), **settings}
    env, algo = given.pop("env", "CartPole-v1"), given.pop("algo", "ppo")
    with pytest.raises(UsageError) as error:
        train(env, algo, tmp_path / "run", 100, given)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_module_that_is_kept_as_torch_acts_on_ray(tmp_path: Path) -> None:
    run = train(
        "CartPole-v1", "ppo", tmp_path / "run", 256, {**QUICK, "rllib.rl_module.model_config.fcnet_activation": "GELU"}
    )
    policy = run.policy("last")
    assert policy.act([0.0, 0.0, 0.1, 0.0]) in (0, 1)
    assert policy.spec.acts_with == "torch"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # SAC of RLlib makes some twenty updates a second
@pytest.mark.parametrize(
    ("algo", "env", "target", "steps"),
    [
        ("dqn", "CartPole-v1", 450.0, 150_000),
        ("impala", "CartPole-v1", 450.0, 400_000),
        ("sac", "Pendulum-v1", -250.0, 20_000),
    ],
)
def test_it_learns_on_ray(tmp_path: Path, algo: str, env: str, target: float, steps: int) -> None:
    solve(env, algo, tmp_path / "run", steps=steps, target=target, engine="rllib", seed=1)


@pytest.mark.slow
def test_a_resumed_replay_buffer_is_filled_before_learning_goes_on_on_ray(tmp_path: Path) -> None:
    settings = {**QUICK, "algorithm.learning_starts": 1500, "algorithm.samples_per_insert": 2.0}
    settings = {name: value for name, value in settings.items() if name != "algorithm.epochs"}
    first = train("CartPole-v1", "dqn", tmp_path / "run", 3000, settings)
    assert first.result.updates > 0
    second = raynforce.resume(first.path, steps=first.result.steps + 400, progress="quiet")
    assert second.result.updates == first.result.updates
    third = raynforce.resume(first.path, steps=second.result.steps + 2000, progress="quiet")
    assert third.result.updates > second.result.updates


@pytest.mark.slow
def test_a_killed_env_runner_is_replaced_and_told_on_ray(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(status: raynforce.Status) -> None:
        if status.steps >= 1000 and not killed:
            for process in psutil.process_iter(["cmdline"]):
                if any("SingleAgentEnvRunner" in word for word in process.info["cmdline"] or ()):
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)

    run = train("CartPole-v1", "ppo", tmp_path / "run", 4000, callbacks=[kill])
    assert killed
    assert [line["role"] for line in events(run.path, "fault")] == ["env runner 1"]
    assert run.result.steps >= 4000


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    """In a process of its own, with its own Ray."""
    words = ["train", "ppo", "CartPole-v1", "--engine", "rllib", "--steps", "1M", "--out", "run", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "raynforce", *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    threading.Timer(120, process.kill).start()
    while not list((tmp_path / "run" / "checkpoints").glob("step_*")) or len(metrics(tmp_path / "run")) < 2:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    result = json.loads(out.strip().splitlines()[-1])
    assert result["stopped"] == "SIGINT"
    assert result["steps"] > 0


@pytest.mark.slow
def test_recorded_episodes_are_learned_from_on_ray(tmp_path: Path) -> None:
    record = {"offline_data": {"output": str(tmp_path / "recorded"), "output_write_episodes": True}}
    record["env_runners"] = {"batch_mode": "complete_episodes"}
    common = {"engine": "rllib", "eval.episodes": 1, "eval.max_length": 20}
    raynforce.train("CartPole-v1", steps=3000, out=tmp_path / "recording", settings={**common, "rllib": record})
    (data,) = (tmp_path / "recorded").iterdir()
    given = {"offline_data": {"input_": [str(data)], "input_read_episodes": True}}
    given["training"] = {"train_batch_size_per_learner": 256}
    run = raynforce.train("CartPole-v1", "BC", steps=5000, out=tmp_path / "run", settings={**common, "rllib": given})
    assert run.result.steps >= 5000  # transitions that it has learned from
    assert raynforce.load(run.path).act(np.zeros(4)) in (0, 1)
    more = raynforce.resume(run.path, steps=9000)
    assert more.result.steps >= 9000


@pytest.mark.slow
def test_rllib_reads_what_we_record_on_ray(tmp_path: Path) -> None:
    data = tmp_path / "ours.parquet"
    raynforce.record("CartPole-v1", policy="random", episodes=60, out=data, seed=0)
    settings = {"eval.episodes": 1, "eval.max_length": 20, "rllib.training.train_batch_size_per_learner": 256}
    given: Any = {"engine": "rllib", "data": data, "settings": settings, "progress": "quiet"}
    run = raynforce.train("CartPole-v1", "BC", steps=5000, out=tmp_path / "run", **given)
    assert run.result.steps >= 5000  # transitions that it has learned from
    assert raynforce.load(run.path).act(np.zeros(4)) in (0, 1)


@pytest.mark.slow
def test_we_read_what_rllib_records_on_ray(tmp_path: Path) -> None:
    record = {"offline_data": {"output": str(tmp_path / "theirs"), "output_write_episodes": False}}
    record["offline_data"]["output_compress_columns"] = []
    record["env_runners"] = {"batch_mode": "complete_episodes"}
    common = {"eval.episodes": 1, "eval.max_length": 20}
    given: Any = {"engine": "rllib", "settings": {**common, "rllib": record}, "progress": "quiet"}
    raynforce.train("CartPole-v1", steps=3000, out=tmp_path / "recording", **given)
    found = read(str(tmp_path / "theirs"), probe("CartPole-v1"))
    assert found.steps >= 1000
    assert found.terminated.sum() >= 0.8 * found.count  # whole episodes, of few steps each
    given = {"data": tmp_path / "theirs", "settings": common, "progress": "quiet", "runtime": "inline"}
    run = raynforce.train("CartPole-v1", "bc", steps=4096, out=tmp_path / "run", **given)
    assert run.result.steps == 4096
