"""The Python API: what a run leaves behind, callbacks, sinks, and policies that act without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from running import events, metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import raynforce
from raynforce.envs.tiny import Identity
from raynforce.spaces import ObsLeaf

SMALL = {
    "sampling.envs": 2,
    "sampling.fragment": 16,
    "algorithm.minibatch_size": 16,
    "eval.every": 200,
    "eval.episodes": 2,
    "eval.final_episodes": 2,
    "log_every": 50,
}


def small(out: Path, env: Any = "CartPole-v1", algo: Any = "ppo", **more: Any) -> raynforce.Run:
    settings = {k: v for k, v in SMALL.items() if algo == "ppo" or not k.startswith("algorithm")}
    settings |= more.pop("settings", {})
    more = {"steps": 400, "runtime": "inline"} | more
    return raynforce.train(env, algo, **more, settings=settings, out=out, progress="quiet")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> raynforce.Run:
    return small(tmp_path_factory.mktemp("api") / "run")


def test_a_run_leaves_config_metrics_events_and_checkpoints(run: raynforce.Run) -> None:
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["config_version"] == 1
    assert config["sampling"]["envs"] == 2
    assert config == run.config.to_dict()

    lines = metrics(run.path)
    names = {name for line in lines for name in line}
    assert {"charts/episodic_return", "charts/SPS", "losses/policy_loss", "losses/value_loss", "eval/return"} <= names
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)

    drawn = EventAccumulator(str(run.path / "tensorboard")).Reload()
    shown = drawn.Scalars("losses/policy_loss")
    assert [(e.step, e.value) for e in shown] == [
        (x["step"], pytest.approx(x["losses/policy_loss"])) for x in lines if "losses/policy_loss" in x
    ]

    for pointer in ("best", "last"):
        manifest = json.loads((run.path / pointer / "manifest.json").read_text())
        assert manifest["format_version"] == 2
        assert {"policy.safetensors", "policy.json"} <= set(manifest["files"])
    assert [line["event"] for line in events(run.path)] == ["started", "stopped", "result"]
    assert not list(run.path.rglob("*.tmp"))


def test_result_counts_what_happened(run: raynforce.Run) -> None:
    result = run.result
    assert 400 <= result.steps < 400 + 2 * 16
    assert result.updates > 0
    assert result.episodes > 0
    assert result.stopped == "steps done"
    assert result.solved_steps is None
    assert result.startup_seconds is not None
    assert result.startup_seconds < result.seconds
    assert len(result.weights_sha256) == 64


class Watcher(raynforce.Callback):
    """Stops at the second evaluation and writes down what it saw."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.evaluations: list[np.ndarray] = []
        self.ended = False

    def on_round(self, status: raynforce.Status) -> None:
        self.rounds.append(status.steps)

    def on_evaluation(self, status: raynforce.Status, returns: np.ndarray) -> None:
        self.evaluations.append(returns)
        if len(self.evaluations) == 2:
            status.stop("seen enough")

    def on_end(self, status: raynforce.Status) -> None:
        self.ended = True


def test_callbacks_look_on_and_stop_a_run(tmp_path: Path) -> None:
    watcher = Watcher()
    stopped = small(tmp_path / "run", steps=100_000, callbacks=[watcher])
    assert stopped.result.stopped == "seen enough"
    assert len(watcher.evaluations) == 2
    assert all(len(returns) == 2 for returns in watcher.evaluations)
    assert watcher.rounds == sorted(watcher.rounds)
    assert watcher.ended
    assert raynforce.load(stopped.path, "last").act(np.zeros(4, np.float32)) in (0, 1)


def test_a_function_is_a_callback(tmp_path: Path) -> None:
    stopped = small(tmp_path / "run", steps=100_000, callbacks=[lambda status: status.stop()])
    assert stopped.result.steps == 32
    assert stopped.result.stopped == "a callback asked for it"


def test_metrics_reach_a_sink_of_ones_own(tmp_path: Path) -> None:
    class Memory:
        def __init__(self) -> None:
            self.lines: list[tuple[int, dict[str, float]]] = []
            self.closed = False

        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            self.lines.append((step, dict(metrics)))

        def close(self) -> None:
            self.closed = True

    sink = Memory()
    small(tmp_path / "run", sinks=[sink])
    assert sink.closed
    assert any("charts/SPS" in metrics for _, metrics in sink.lines)


def test_the_target_ends_a_run(tmp_path: Path) -> None:
    solved = small(tmp_path / "run", steps=100_000, target=1.0)
    assert solved.result.stopped == "target met"
    assert solved.result.solved_steps == solved.result.steps
    assert solved.result.solved_at is not None


def test_acting_needs_neither_torch_nor_ray_nor_gymnasium(run: raynforce.Run) -> None:
    code = f"""
import sys, numpy as np, raynforce
policy = raynforce.load({str(run.path)!r}, seed=0)
one = policy.act(np.array([0.01, 0.0, 0.02, 0.0], np.float32))
many = policy.act(np.zeros((5, 4), np.float32), greedy=False)
assert one.shape == () and many.shape == (5,), (one, many)
loaded = [m for m in ("torch", "ray", "gymnasium") if m in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_run_is_taken_wherever_its_directory_is(tmp_path: Path) -> None:
    run = raynforce.train("CartPole-v1", "ppo", steps=256, out=tmp_path / "run", progress="quiet")
    assert os.fspath(run) == str(run) == str(run.path)
    obs = np.zeros(4, np.float32)
    assert raynforce.load(run).act(obs) == raynforce.load(run.path).act(obs)
    assert len(raynforce.evaluate(run, episodes=2).returns) == 2
    begun = raynforce.train("CartPole-v1", "ppo", steps=256, start_from=run, out=tmp_path / "next", progress="quiet")
    assert begun.config.start_from == str(run.path)
    assert raynforce.resume(run, steps=begun.result.steps + 256, progress="quiet").path == run.path


def test_greedy_actions_are_those_of_torch(run: raynforce.Run) -> None:
    policy = raynforce.load(run.path)
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    from raynforce.policies.torch_net import SpecNet

    net = SpecNet(policy.spec.network, policy.version.params, torch.device("cpu"))
    assert np.array_equal(policy.act(obs), net.predict({"obs": obs})["policy"].argmax(1))


class Buttons(Identity):
    """Multi-binary actions and observations."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.action_space = gymnasium.spaces.MultiBinary(3)

    def draw(self) -> Any:
        return self.np_random.integers(2, size=3).astype(np.int8)

    def score(self, action: Any) -> float:
        assert self.action_space.contains(action), action
        return float((action == self.shown).mean())


class Shifted(Identity):
    """Choices that begin at -2."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.action_space = gymnasium.spaces.Discrete(3, start=-2)

    def draw(self) -> int:
        return int(self.np_random.integers(-2, 1))

    def score(self, action: int) -> float:
        assert self.action_space.contains(action), action
        return float(action == self.shown)


@pytest.mark.parametrize(
    ("algo", "env"),
    [
        ("ppo", "FrozenLake-v1"),  # discrete observations
        ("dqn", "Blackjack-v1"),  # a tuple of them
        ("ppo", "MountainCarContinuous-v0"),
        ("ppo", "raynforce.envs.tiny:MultiIdentity"),
        ("dqn", "raynforce.envs.tiny:DictIdentity"),
        ("examples.own_algorithm:Reinforce", "Acrobot-v1"),
        ("ppo", f"{__name__}:Buttons"),
        ("dqn", f"{__name__}:Shifted"),
    ],
)
def test_every_kind_of_space_trains_and_acts(algo: str, env: str, tmp_path: Path) -> None:
    trained = small(tmp_path / "run", env, algo)
    returns, _ = raynforce.evaluate(trained.path, episodes=2, seed=1)
    again, _ = raynforce.evaluate(trained.path, episodes=2, seed=1)
    with pytest.raises(raynforce.UsageError, match="parallel = 'thread' is not one of: no, threads, processes"):
        raynforce.evaluate(trained.path, episodes=2, parallel="thread")  # type: ignore[arg-type]
    assert np.array_equal(returns, again)
    policy = raynforce.load(trained.path)
    if ":" not in env:
        made = gymnasium.make(env)
        obs, _ = made.reset(seed=0)
        assert made.action_space.contains(policy.act(obs)), policy.act(obs)
        made.close()


def test_policy_and_normaliser_travel_together(tmp_path: Path) -> None:
    settings = {"network.normalize_obs": True, "learner.scale_rewards": True}
    trained = small(tmp_path / "run", "Pendulum-v1", settings=settings)
    version = raynforce.load(trained.path, "last").version
    assert version.shift is not None
    assert version.scale is not None
    assert np.abs(version.shift).max() > 1e-3
    assert not np.allclose(version.scale, 1.0)


def make_network(leaves: tuple[ObsLeaf, ...], heads: Mapping[str, int]) -> torch.nn.Module:
    """A user's own network: one torso, a linear head for each output."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torso = torch.nn.Sequential(torch.nn.Linear(leaves[0].shape[0], 16), torch.nn.GELU())
            self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(16, size) for name, size in heads.items()})

        def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.torso(obs)
            return {name: head(h) for name, head in self.heads.items()}

    return Net()


@pytest.mark.parametrize(("algo", "env"), [("ppo", "CartPole-v1"), ("dqn", "CartPole-v1"), ("ppo", "Pendulum-v1")])
def test_a_torch_module_of_ones_own(algo: str, env: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"network.factory": f"{__name__}:make_network", "network.normalize_obs": True}
    if algo == "dqn":
        settings |= {"algorithm.learning_starts": 50}
    trained = small(tmp_path / "run", env, algo, settings=settings)
    assert trained.result.updates > 0
    resumed = raynforce.resume(trained.path, steps=600, progress="plain")
    assert resumed.result.steps >= 600
    assert "import torch for your own network" in capsys.readouterr().out
    assert raynforce.load(trained.path).act(np.zeros((3, 4 if env == "CartPole-v1" else 3), np.float32)).shape[0] == 3


@pytest.mark.parametrize(
    ("algo", "env", "named", "settings"),
    [
        ("sac", "Pendulum-v1", "action", {}),
        ("ppo", "raynforce.envs.tiny_agents:Aim", "global_state", {"algorithm.central_critic": True}),
    ],
)
def test_ones_own_network_takes_what_the_algorithm_gives_it(
    algo: str, env: str, named: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    own = {"network.factory": "examples.own_network:make", **settings}
    with pytest.raises(raynforce.UsageError, match=rf"does not take '{named}', .*forward\(self, obs, {named}=None\)"):
        raynforce.train(env, algo, steps=600, out=tmp_path / "run", settings=own, progress="quiet")
    assert not list(tmp_path.iterdir())


def test_arguments_for_ones_own_network(tmp_path: Path) -> None:
    own = {"network.factory": "examples.own_network:make"}
    trained = small(tmp_path / "run", settings=own | {"network.factory_args.width": 8})
    assert yaml.safe_load((trained.path / "config.yaml").read_text())["network"]["factory_args"] == {"width": 8}
    narrow, wide = trained.policy("last").version.params.size, small(tmp_path / "wide", settings=own)
    assert narrow < wide.policy("last").version.params.size  # it was loaded with its arguments
    assert raynforce.resume(trained.path, steps=600, progress="quiet").result.steps >= 600
    with pytest.raises(raynforce.RaynforceError, match=r"network.factory_args.width +8 +16"):
        raynforce.resume(trained.path, steps=800, settings={"network.factory_args.width": 16}, progress="quiet")
    with pytest.raises(raynforce.RaynforceError, match=r"network.factory_args"):
        small(tmp_path / "from", settings=own, start_from=trained.path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"network.factory_args.width": 8}, "needs network.factory: give both, or neither"),
        (
            {"network.factory": "examples.own_network:make", "network.factory_args.depth": 3},
            "does not take network.factory_args = {'depth': 3}: got an unexpected keyword argument 'depth'; "
            "after leaves and outputs it takes width",
        ),
    ],
)
def test_arguments_that_a_network_does_not_take(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(raynforce.UsageError) as told:
        small(tmp_path / "run", settings=settings)
    assert words in str(told.value)
    assert "\n" not in str(told.value)


class Looker(raynforce.Callback):
    """Asks for the policy and the run's directory wherever it is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Path]] = []

    def look(self, where: str, status: raynforce.Status) -> None:
        policy = status.policy()
        assert policy is status.policy()
        assert policy.act(np.zeros(4, np.float32)) in (0, 1)
        assert (status.path / "config.yaml").is_file()
        self.seen.append((where, policy.version.number, status.path))
        self.newest = policy

    def on_round(self, status: raynforce.Status) -> None:
        self.look("round", status)

    def on_evaluation(self, status: raynforce.Status, returns: np.ndarray) -> None:
        self.look("evaluation", status)

    def on_end(self, status: raynforce.Status) -> None:
        self.look("end", status)


@pytest.mark.parametrize(("runtime", "topology"), [("inline", "sync"), ("process", "overlap")])
def test_callbacks_see_the_runs_path_and_the_policy(runtime: str, topology: str, tmp_path: Path) -> None:
    looker = Looker()
    trained = small(tmp_path / "run", callbacks=[looker], runtime=runtime, topology=topology)
    assert {where for where, _, _ in looker.seen} == {"round", "evaluation", "end"}
    assert {path for _, _, path in looker.seen} == {trained.path}
    numbers = [number for where, number, _ in looker.seen if where == "round"]
    assert numbers == list(range(1, len(numbers) + 1))  # the newest each time
    assert np.array_equal(looker.newest.version.params, trained.policy("last").version.params)


def test_a_status_without_a_run_has_no_policy() -> None:
    with pytest.raises(raynforce.UsageError, match="no policy yet"):
        raynforce.Status(raynforce.Config(env="CartPole-v1")).policy()


def test_resume_may_change_what_makes_sense_and_refuses_what_does_not(run: raynforce.Run, tmp_path: Path) -> None:
    trained = small(tmp_path / "run")
    config = (trained.path / "config.yaml").read_text()
    with pytest.raises(raynforce.RaynforceError, match=r"does not fit this config:\n(.*\n)*  network.hidden "):
        raynforce.resume(trained.path, settings={"network.hidden": [8]}, progress="quiet")
    assert (trained.path / "config.yaml").read_text() == config
    more = raynforce.resume(trained.path, steps=600, settings={"algorithm.learning_rate": 1e-5}, progress="quiet")
    assert more.result.steps >= 600
    assert more.config.algorithm.learning_rate == 1e-5


def test_a_factory_and_a_class_may_be_given_themselves(tmp_path: Path) -> None:
    from examples.own_algorithm import Reinforce

    trained = small(tmp_path / "run", Identity, Reinforce)
    assert trained.config.env == "raynforce.envs.tiny:Identity"
    assert trained.config.algo == "examples.own_algorithm:Reinforce"
    with pytest.raises(raynforce.UsageError, match="neither"):
        small(tmp_path / "other", callbacks=[5])


def test_an_exception_in_a_network_says_what_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(raynforce.UsageError, match=r"forward raised .*it was given \(\d+, 4\)"):
        small(tmp_path / "run", settings={"network.factory": f"{__name__}:make_broken"})


def make_broken(leaves: tuple[ObsLeaf, ...], heads: Mapping[str, int]) -> torch.nn.Module:
    return torch.nn.Linear(7, 2)


def test_metrics_as_numpy_numbers_can_be_saved(tmp_path: Path) -> None:
    def add(status: raynforce.Status) -> None:
        status.metrics["mine/number"] = np.float32(1.5)

    small(tmp_path / "run", callbacks=[add])
    assert any(line.get("mine/number") == 1.5 for line in metrics(tmp_path / "run"))


def test_a_policy_keeps_its_environments_arguments(tmp_path: Path) -> None:
    trained = small(tmp_path / "run", "raynforce.envs.tiny:Identity", settings={"env_args.length": 3})
    returns, _ = raynforce.evaluate((trained.path / "best").resolve(), episodes=50)
    assert returns.max() > 1, "episodes of three steps, not of one"
