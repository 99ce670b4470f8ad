"""Whole runs of networks with memory: what cannot be learned without is learned, equal seeds, resume, and acting."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rays
from marks import slow, slowly
from memory_nets import WIDTH
from running import solve
from test_readme import ROOT

import raynforce
from raynforce.cli import main
from raynforce.envs.tiny import Recall
from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import checkpoint

RECALL = "raynforce.envs.tiny:Recall"
ALONE: dict[str, Any] = {"eval.final_episodes": 0, "checkpoint.every": 0, "runtime": "inline", "topology": "sync"}
PPO = {"sampling.fragment": 32, "algorithm.learning_rate": 3e-3, "algorithm.minibatch_size": 128}
DQN = {"algorithm.learning_starts": 500, "algorithm.n_step": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", PPO | {"network.memory": "lstm"}),
    "ppo-short-sequences": ("ppo", PPO | {"network.memory": "gru", "algorithm.sequence": 6}),
    "impala": ("impala", {"network.memory": "gru", "topology": "overlap"}),
    "impala-central": ("impala", {"network.memory": "gru", "topology": "central"}),
    "a3c": ("a3c", {"network.memory": "gru", "topology": "shared-agent"}),
    "dqn": ("dqn", DQN | {"network.memory": "gru"}),
    "dqn-burn-in": ("dqn", DQN | {"network.memory": "lstm", "algorithm.burn_in": 4, "algorithm.prioritized": True}),
    "own-module": (
        "ppo",
        PPO | {"network.factory": "memory_nets:make", "network.memory": "own", "network.memory_size": WIDTH},
    ),
}
SEVERAL = ("ppo-short-sequences", "impala-central", "a3c", "dqn-burn-in", "own-module")


@pytest.mark.parametrize("case", ["ppo", "impala", "dqn", *slowly(*SEVERAL)])
def test_what_was_shown_is_remembered(case: str, tmp_path: Path) -> None:
    algo, settings = CASES[case]
    run = solve(RECALL, algo, tmp_path / "run", steps=20_000, target=1.0, seed=1, settings=ALONE | settings)
    policy = raynforce.load(run.path)
    assert policy.recurrent
    played, right = Recall(), 0
    for seed in range(20):
        obs, _ = played.reset(seed=seed)
        state, over, reward = policy.initial_state(), False, 0.0
        while not over:
            action, state = policy.act(obs, state)
            obs, reward, over, _, _ = played.step(int(action))
        right += reward == 1.0
    assert right == 20


@pytest.mark.parametrize("case", ["ppo", *slowly("impala", "dqn")])
def test_without_memory_it_is_a_guess(case: str, tmp_path: Path) -> None:
    algo, settings = CASES[case]
    settings = {k: v for k, v in settings.items() if not k.startswith("network.memory")}
    steps = 8000
    run = raynforce.train(
        RECALL, algo, steps=steps, seed=1, out=tmp_path / "run", progress="quiet", settings=ALONE | settings
    )
    returns, _ = raynforce.evaluate(run.path, episodes=200)
    assert np.mean(returns) < 0.65  # chance is 0.5


SMALL: dict[str, Any] = ALONE | {"eval.every": 0, "eval.episodes": 2, "sampling.envs": 4}
FEW = {"algorithm.learning_starts": 100, "algorithm.samples_per_insert": 4.0}  # updates
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"sampling.fragment": 16, "algorithm.sequence": 8, "algorithm.epochs": 2, "network.memory": "lstm"}),
    "impala": ("impala", {"topology": "overlap", "network.memory": "gru"}),
    "a3c": ("a3c", {"network.memory": "gru", "sampling.samplers": 2}),
    "dqn": ("dqn", {"algorithm.buffer_size": 1200, "network.memory": "lstm"} | FEW),
    "dqn-shards": (
        "dqn",
        {"topology": "replay", "replay.shards": 2, "sampling.samplers": 2, "algorithm.buffer_size": 1200}
        | {"network.memory": "gru", "algorithm.prioritized": True}
        | FEW,
    ),
    "own-module": (
        "ppo",
        {"sampling.fragment": 16, "network.factory": "memory_nets:make", "network.memory": "own"}
        | {"network.memory_size": WIDTH},
    ),
}


def train(case: str, out: Path, steps: int = 2000, callbacks: Any = (), **more: Any) -> raynforce.Run:
    algo, settings = EQUAL[case]
    given = SMALL | settings | {"env_args": {"length": 9}, "checkpoint.every": 500} | more
    how: dict[str, Any] = {"steps": steps, "seed": 1, "progress": "quiet", "callbacks": callbacks}
    return raynforce.train(RECALL, algo, out=out, settings=given, **how)


def weights(run: raynforce.Run) -> str:
    return str(run.result.weights_sha256)


@pytest.mark.parametrize("case", ["ppo", "dqn", *slowly("impala", "a3c", "dqn-shards", "own-module")])
def test_a_killed_and_resumed_run_is_the_one_that_was_never_stopped(case: str, tmp_path: Path) -> None:
    whole, killed = train(case, tmp_path / "whole"), tmp_path / "killed"
    pid = os.fork()
    if pid == 0:
        train(case, killed, callbacks=[lambda s: s.steps < 1300 or os.kill(os.getpid(), signal.SIGKILL)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert weights(raynforce.resume(killed, progress="quiet")) == weights(whole)


@pytest.mark.parametrize("case", ["ppo", *slowly("impala", "a3c", "dqn", "own-module")])
def test_equal_seeds_give_equal_runs_in_processes(case: str, tmp_path: Path) -> None:
    inline, process = (train(case, tmp_path / runtime, runtime=runtime) for runtime in ("inline", "process"))
    assert weights(inline) == weights(process)


@slow
@pytest.mark.parametrize("case", ["ppo", "impala", "dqn"])
def test_equal_seeds_give_equal_runs_on_ray(case: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    rays.needs("ray", request)
    inline, ray = (train(case, tmp_path / runtime, runtime=runtime) for runtime in ("inline", "ray"))
    assert weights(inline) == weights(ray)


@slow
def test_impala_balances_cartpole_without_velocities_by_its_defaults(tmp_path: Path) -> None:
    env, settings = "raynforce.envs.tiny:blind_cartpole", ALONE | {"network.memory": "lstm"}
    solve(env, "impala", tmp_path / "run", steps=300_000, target=400, seed=1, settings=settings)


@slow
def test_cartpole_without_velocities_is_balanced_with_memory(tmp_path: Path) -> None:
    settings = ALONE | {"network.memory": "lstm", "algorithm.learning_rate": 1e-3, "algorithm.minibatch_size": 256}
    env = "raynforce.envs.tiny:blind_cartpole"
    solve(env, "ppo", tmp_path / "run", steps=300_000, target=450, seed=1, settings=settings)


# -- acting with what was learned --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("ppo", tmp_path_factory.mktemp("memory") / "run", steps=64).path


def test_a_policy_with_memory_wants_a_state(trained: Path) -> None:
    policy = raynforce.load(trained)
    with pytest.raises(UsageError, match=r"this policy has memory: act\(obs, state\) wants the state before"):
        policy.act(1)
    with pytest.raises(UsageError, match=r"state 'torso.4' has shape \[1, 128\]; wanted is \[2, 128\]"):
        policy.act(np.array([1, 0]), policy.initial_state())
    with pytest.raises(UsageError, match=r"state is not a dict of torso.4"):
        policy.act(1, {"h": np.zeros(3)})
    with pytest.raises(UsageError, match="lanes = -1 must be a whole number"):
        policy.initial_state(-1)
    action, state = policy.act(np.array([1, 2]), policy.initial_state(2))
    assert action.shape == (2,)
    assert {k: v.shape for k, v in state.items()} == {"torso.4": (2, 128)}
    one, after = policy.act(1, {})
    assert one == action[0]
    np.testing.assert_allclose(after["torso.4"][0], state["torso.4"][0], atol=1e-6)


def test_a_served_policy_answers_with_the_next_state(trained: Path) -> None:
    policy, token = raynforce.load(trained), "c0ffee" * 8
    service = raynforce.serve(trained, port=0, token=token, local=True)
    try:
        with raynforce.Client(service.url, token) as client:
            here, there = policy.initial_state(), {}
            for obs in (1, 0, 0):
                (action, here), (answer, there) = policy.act(obs, here), client.act(obs, there)
                assert action == answer
                np.testing.assert_allclose(there["torso.4"], here["torso.4"], atol=1e-6)
            with pytest.raises(RaynforceError, match="this policy has memory"):
                client.act(1)
    finally:
        service.stop()


def test_the_module_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "algorithms" / "memory.md").read_text()
    (code,) = re.findall(r"```python\n(# my_memory_net.py\n.*?)```", page, flags=re.DOTALL)
    (command,) = [line for line in page.splitlines() if "my_memory_net:make" in line]
    (tmp_path / "my_memory_net.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    short = ["--steps", "600", "--set", "sampling.fragment=32", "--set", "eval.final_episodes=0", "--quiet"]
    assert main([*command.split()[1:], *short, "--runtime", "inline", "--out", "run"]) == 0


def test_what_is_exported_has_no_memory(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this policy has memory"):
        raynforce.export(trained, to="numpy", out=tmp_path / "out")


def test_the_sampler_keeps_what_it_remembers(trained: Path) -> None:
    saved = checkpoint.load(max((trained / "checkpoints").iterdir()))
    (memory,) = (tree["memory"] for name, tree in saved.items() if name.startswith("sampler"))
    assert np.abs(memory["torso.4"]).max() > 0


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD = {
    "longer than a fragment": ("ppo", {"network.memory": "gru", "algorithm.sequence": 300}, "longer than a fragment"),
    "no memory": ("ppo", {"algorithm.sequence": 8}, r"algorithm.sequence = 8 is for networks with memory"),
    "no memory, burn-in": ("dqn", {"algorithm.burn_in": 2}, r"algorithm.burn_in = 2 is for networks with memory"),
    "not a multiple": ("dqn", {"network.memory": "gru", "algorithm.sequence": 5}, "algorithm.sequence = 5"),
    "one step": ("dqn", {"network.memory": "gru", "algorithm.sequence": 1}, "sequences of two steps or more"),
    "shared-agent": (
        "dqn",
        {"network.memory": "gru", "topology": "shared-agent"},
        "sampling.fragment = 1 is too short for network.memory = 'gru', .*: set sampling.fragment=8",
    ),
    "sac": ("sac", {"network.memory": "lstm", "algorithm.discrete": True}, "sac learns without memory"),
    "own without a module": ("ppo", {"network.memory": "own"}, "give network.factory"),
    "both": ("ppo", {"network.memory": "lstm", "network.factory": "memory_nets:make"}, "network.memory=own"),
    "takes a state": ("ppo", {"network.factory": "memory_nets:make"}, "takes `state`"),
    "returns none": (
        "ppo",
        {"network.factory": "memory_nets:forgetful", "network.memory": "own", "network.memory_size": WIDTH},
        "must return a dict of outputs, and the next state",
    ),
    "another size": (
        "ppo",
        {"network.factory": "memory_nets:make", "network.memory": "own"},
        r"got 64, expected 16; it was given \(\d+,\) and a state \(\d+, 64\) \(network.memory_size\)",
    ),
    "rllib": ("ppo", {"network.memory": "lstm", "engine": "rllib", "runtime": "ray"}, "network.memory"),
}


@pytest.mark.parametrize("case", [*(case for case in BAD if case != "rllib"), *slowly("rllib")])
def test_what_cannot_be_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    algo, settings, why = BAD[case]
    with pytest.raises(UsageError, match=why) as error:
        raynforce.train(RECALL, algo, steps=500, out=tmp_path / "run", progress="quiet", settings=ALONE | settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
