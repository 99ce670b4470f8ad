"""Same seed, same run; and a run stopped at a checkpoint and resumed is the run that was never stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from running import events, metrics, without

import raynforce
from raynforce.runs import checkpoint

SMALL: dict[str, Any] = {
    "eval.episodes": 2,
    "eval.final_episodes": 0,
    "checkpoint.every": 0,
    "eval.every": 700,
    "log_every": 100,
}
SMALL |= {"runtime": "inline", "topology": "sync"}  # where it runs is not chosen by this machine's speed today
PPO = SMALL | {"sampling.envs": 4, "sampling.fragment": 32, "algorithm.minibatch_size": 64, "algorithm.epochs": 2}
DQN = SMALL | {
    "sampling.envs": 4,
    "sampling.fragment": 8,
    "algorithm.learning_starts": 100,
    "algorithm.buffer_size": 1200,  # smaller than the run: the ring has gone round when it is saved
    "algorithm.target_every": 10,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo-native-env": ("CartPole-v1", "ppo", PPO | {"algorithm.anneal_learning_rate": True}),
    "ppo-normalised-continuous": (
        "Pendulum-v1",
        "ppo",
        PPO | {"network.normalize_obs": True, "learner.scale_rewards": True, "sampling.samplers": 2},
    ),
    "dqn-uniform": ("CartPole-v1", "dqn", DQN),
    "dqn-everything": (
        "Acrobot-v1",
        "dqn",
        DQN | {"algorithm.prioritized": True, "algorithm.dueling": True, "algorithm.n_step": 3, "sampling.samplers": 2},
    ),
    "dqn-dict-observations": ("raynforce.envs.tiny:DictIdentity", "dqn", DQN),
    "own-network-with-dropout": (
        "CartPole-v1",
        "ppo",
        PPO | {"network.factory": f"{__name__}:make_dropout", "network.normalize_obs": True},
    ),
    "own-algorithm": ("CartPole-v1", "examples.own_algorithm:Reinforce", SMALL),
}


def make_dropout(leaves: Any, heads: Mapping[str, int]) -> torch.nn.Module:
    """A network that draws from torch's random stream while it learns."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torso = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3))
            self.heads = torch.nn.ModuleDict({k: torch.nn.Linear(16, n) for k, n in heads.items()})

        def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.torso(obs)
            return {k: head(h) for k, head in self.heads.items()}

    return Net()


def train(case: str, out: Path, steps: int, seed: int = 3) -> raynforce.Run:
    env, algo, settings = CASES[case]
    return raynforce.train(env, algo, steps=steps, seed=seed, out=out, settings=settings, progress="quiet")


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_one_never_stopped(case: str, tmp_path: Path) -> None:
    whole = train(case, tmp_path / "whole", 2000)

    def stop_half_way(status: raynforce.Status) -> None:
        if status.steps >= 1000:
            status.stop("half way")

    env, algo, settings = CASES[case]
    path = tmp_path / "halves"
    half = raynforce.train(
        env, algo, steps=2000, seed=3, out=path, settings=settings, callbacks=[stop_half_way], progress="quiet"
    )
    assert half.result.stopped == "half way"
    assert half.result.steps < whole.result.steps
    resumed = raynforce.resume(path, progress="quiet")

    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    for count in ("steps", "episodes", "updates", "return_mean"):
        assert getattr(resumed.result, count) == getattr(whole.result, count), count
    # The first half was evaluated when it stopped; otherwise there is no gap, no double and no difference.
    stop = half.result.steps
    assert measured(tmp_path / "whole", but=stop) == measured(path, but=stop)
    assert times(path) == sorted(times(path))


@pytest.mark.parametrize("case", ["ppo-normalised-continuous", "dqn-everything"])
def test_a_crash_costs_nothing_but_the_time_since_the_last_checkpoint(case: str, tmp_path: Path) -> None:
    whole = train(case, tmp_path / "whole", 2000)
    env, algo, settings = CASES[case]

    class Crash(BaseException):
        """Not an Exception: nothing is saved on the way out, as after `kill -9`."""

    def crash(status: raynforce.Status) -> None:
        if status.steps >= 1300:
            raise Crash

    path, often = tmp_path / "crashed", settings | {"checkpoint.every": 500}
    with pytest.raises(Crash):
        raynforce.train(env, algo, steps=2000, seed=3, out=path, settings=often, callbacks=[crash], progress="quiet")
    resumed = raynforce.resume(path, progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert measured(tmp_path / "whole") == measured(path)


def test_a_callback_that_raises_loses_nothing(tmp_path: Path) -> None:
    env, algo, settings = CASES["ppo-native-env"]

    def raises(status: raynforce.Status) -> None:
        if status.steps >= 700:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raynforce.train(
            env, algo, steps=2000, out=tmp_path / "run", settings=settings, callbacks=[raises], progress="quiet"
        )
    last = events(tmp_path / "run")[-1]
    assert last["event"] == "failed"
    saved = json.loads((tmp_path / "run" / "last" / "manifest.json").read_text())
    assert saved["step"] == last["steps"] >= 700


class Signal:
    """A sink that presses Ctrl-C once, when the metrics of a step are reported: before that step is evaluated."""

    def __init__(self, step: int) -> None:
        self.step = step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self.step:
            self.step = 10**9
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", ["a signal", "a callback that raises"])
def test_an_end_in_the_round_of_an_evaluation_leaves_no_gap(how: str, tmp_path: Path) -> None:
    env, algo, settings = CASES["ppo-native-env"]
    settings = settings | {"eval.every": 1, "log_every": 1}
    raynforce.train(env, algo, steps=1536, seed=3, out=tmp_path / "whole", settings=settings, progress="quiet")

    def raises(status: raynforce.Status) -> None:
        if status.steps >= 1024:
            raise ZeroDivisionError

    ends: Any = {"sinks": [Signal(1024)]} if how == "a signal" else {"callbacks": [raises]}
    path = tmp_path / "run"
    with pytest.raises((raynforce.Interrupted, ZeroDivisionError)):
        raynforce.train(env, algo, steps=1536, seed=3, out=path, settings=settings, progress="quiet", **ends)
    assert checkpoint.manifest(path / "last")["step"] == events(path)[-1]["steps"] >= 1024
    raynforce.resume(path, progress="quiet")
    assert measured(path) == measured(tmp_path / "whole")


def test_when_the_target_was_met_counts_from_the_start_of_the_run(tmp_path: Path) -> None:
    train("ppo-native-env", tmp_path / "run", 800)
    before = checkpoint.load(tmp_path / "run" / "last")["run"]["seconds"]
    resumed = raynforce.resume(tmp_path / "run", steps=2000, target=1.0, progress="quiet")
    assert resumed.result.solved_steps is not None
    assert resumed.result.solved_at is not None
    assert resumed.result.solved_at > before


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = train("ppo-native-env", tmp_path / "run", 800)
    before = measured(tmp_path / "run")
    again = raynforce.resume(tmp_path / "run", progress="quiet")
    assert again.result.weights_sha256 == first.result.weights_sha256
    assert again.result.stopped == "steps done"
    assert measured(tmp_path / "run") == before


def measured(run: Path, but: int = -1) -> list[dict[str, Any]]:
    """Every line of metrics, evaluations included, but for the clock and what was evaluated at step `but`."""
    lines = [line for line in metrics(run) if not ("eval/return" in line and line["step"] == but)]
    return without(lines, "time", "charts/SPS", "disk")


def times(run: Path) -> list[float]:
    return [line["time"] for line in metrics(run)]


@pytest.mark.parametrize("case", ["ppo-native-env", "dqn-everything", "own-network-with-dropout"])
def test_equal_seeds_are_equal_runs_and_others_are_not(case: str, tmp_path: Path) -> None:
    first = train(case, tmp_path / "a", 800).result
    again = train(case, tmp_path / "b", 800).result
    other = train(case, tmp_path / "c", 800, seed=4).result
    assert first.weights_sha256 == again.weights_sha256
    assert first.weights_sha256 != other.weights_sha256


def test_saving_and_evaluating_do_not_change_the_run(tmp_path: Path) -> None:
    env, algo, settings = CASES["ppo-native-env"]
    quiet = raynforce.train(env, algo, steps=1500, out=tmp_path / "a", settings=settings, progress="quiet")
    busy = settings | {"checkpoint.every": 100, "eval.every": 100, "log_every": 1}
    noisy = raynforce.train(env, algo, steps=1500, out=tmp_path / "b", settings=busy, progress="quiet")
    assert quiet.result.weights_sha256 == noisy.result.weights_sha256
