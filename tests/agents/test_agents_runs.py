"""Runs of several agents: learned in seconds, equal on every runtime, resumed as if never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import slow, slowly
from rays import needs
from running import metrics, solve

import raynforce
from raynforce.cli import main
from raynforce.data.files import read
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import UsageError
from raynforce.policy import read_policy
from raynforce.runs.directory import find_policy

TINY = "raynforce.envs.tiny_agents:"
TEAM = {"prey": {"agents": ["prey_*"], "algorithm": {"learning_rate": 1e-3}}, "hunter": {"agents": ["hunter_*"]}}
SELF_PLAY = {"hero": {"agents": ["*"], "opponents": 4, "opponents_every": 2}}
FIRST_AND_SECOND = {name: {"agents": [name]} for name in ("first", "second")}
REPLAY = {"learning_starts": 100, "batch_size": 32, "buffer_size": 1_500, "prioritized": True}
CRITICAL = {"agents": ["hunter_*"], "algorithm": {"central_critic": True}}
MEMORY = {"network": {"memory": "lstm", "memory_size": 16, "hidden": [16]}}
BURNING_IN = FIRST_AND_SECOND | {"second": {"agents": ["second"], "algorithm": {"burn_in": 2}}}
REMEMBERING = {"hero": SELF_PLAY["hero"] | MEMORY | {"algorithm": {"epochs": 2}}}
QUICK = {"learning_rate": 1e-2, "minibatch_size": 256, "epochs": 4}
ECHO = MEMORY | {"algorithm": QUICK, "sampling": {"envs": 8, "fragment": 32}, "eval": {"every": 2000}}
DQN = {"algorithm": {"learning_starts": 200, "samples_per_insert": 4.0, "buffer_size": 1200}}
SMALL = {"sampling": {"envs": 4, "fragment": 32}, "eval": {"every": 0, "episodes": 4, "final_episodes": 0}}


def short(env: str, out: Path, steps: int = 2_000, algo: str = "ppo", **more: Any) -> raynforce.Run:
    config = {**SMALL, **more.pop("config", {})}
    if "learning_starts" in config.get("algorithm", {}):
        algo = "dqn"
    return raynforce.train(TINY + env, algo, steps=steps, out=out, config=config, progress="quiet", **more)


@pytest.mark.parametrize(
    ("env", "best", "config"),
    [
        ("Together", 4.0, {}),
        ("Together", 4.0, {"algorithm": {"central_critic": True}}),
        ("Leaving", 2.0, {}),  # the mean of 1, 2 and 3
        ("Hunt", 4.0, {"policies": TEAM}),
        ("EchoInTurns", 3.0, ECHO),  # what cannot be known without memory
        *slowly(
            ("Echo", 3.0, ECHO),
            ("Echo", 3.0, ECHO | {"topology": "central"}),
            ("EchoInTurns", 3.0, ECHO | {"topology": "central"}),
            ("Echo", 3.0, ECHO | {"algorithm": {**QUICK, "central_critic": True}}),
            ("Echo", 3.0, ECHO | {"policies": {"a": {"agents": ["agent_0"]}, "b": {"agents": ["agent_1"]}}}),
        ),
    ],
)
def test_the_best_return_is_learned(env: str, best: float, config: dict[str, Any], tmp_path: Path) -> None:
    run = solve(TINY + env, "ppo", tmp_path / "run", steps=60_000, target=best, config=config, runtime="inline")
    told = [line for line in metrics(run.path) if "eval/return" in line][-1]
    returns = {name: value for name, value in told.items() if name.startswith("eval/agents/")}
    assert told["eval/team_return"] == pytest.approx(sum(returns.values()))
    assert told["eval/return"] == pytest.approx(np.mean(list(returns.values())))


def test_competitors_both_learn_the_best_bid(tmp_path: Path) -> None:
    run = short("Bidding", tmp_path / "run", steps=12_000, runtime="inline", config={"sampling": {"envs": 8}})
    policy = run.policy("last")
    assert [int(policy.act(i)) for i in range(4)] == [3, 3, 3, 3]


def test_self_play_beats_a_random_player(tmp_path: Path) -> None:
    config = {"policies": {"hero": {"agents": ["*"], "opponents": 8}}}
    run = solve(f"{TINY}Nim", "ppo", tmp_path / "run", steps=100_000, target=0.8, config=config, runtime="inline")
    returns, _ = raynforce.evaluate(run.path, episodes=200, seed=5)
    assert returns.mean() > 0.7  # two random players: 0 on average
    with pytest.raises(UsageError, match="here a run with one policy for all agents is needed"):
        read_policy(find_policy(run.path))
    hero = raynforce.load(run.path, policy="hero")
    assert [int(hero.act(left)) for left in (1, 2, 3)] == [0, 1, 2]  # takes the last ones


CELLS = [
    ("Hunt", {"policies": TEAM}, "sync"),
    pytest.param("Nim", {"policies": SELF_PLAY}, "sync", marks=slow),
    pytest.param("Nim", {}, "sync", marks=slow),
    pytest.param("Leaving", {}, "sync", marks=slow),
    pytest.param("Together", {"algorithm": {"central_critic": True}}, "overlap", marks=slow),
    pytest.param("Hunt", {"policies": TEAM}, "overlap", marks=slow),
    pytest.param("Nim", {"policies": SELF_PLAY}, "overlap", marks=slow),
    *slowly(
        ("Nim", {"policies": REMEMBERING}, "overlap"),
        ("EchoInTurns", MEMORY, "sync"),
        ("EchoInTurns", MEMORY | DQN, "sync"),
        ("Leaving", MEMORY | {"algorithm": {"central_critic": True}}, "sync"),
    ),
]


@pytest.mark.parametrize(("env", "config", "topology"), CELLS)
@pytest.mark.parametrize("runtime", ["process", "ray"])
def test_equal_seeds_give_equal_runs_on_every_runtime(
    env: str, config: dict[str, Any], topology: str, runtime: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    config = {**config, "sampling": {"samplers": 2, "envs": 2, "fragment": 16}}
    hashes = {
        where: short(env, tmp_path / where, 600, config=config, topology=topology, runtime=where).result.weights_sha256
        for where in ("inline", runtime)
    }
    assert hashes["inline"] == hashes[runtime]


@pytest.mark.parametrize(
    ("env", "config", "topology"),
    [
        ("Hunt", {"policies": TEAM}, "sync"),
        ("Nim", {"policies": REMEMBERING}, "overlap"),
        pytest.param("Nim", {"policies": SELF_PLAY}, "overlap", marks=slow),
        pytest.param("Nim", MEMORY, "sync", marks=slow),
        pytest.param("EchoInTurns", MEMORY | DQN, "sync", marks=slow),
        pytest.param("Leaving", MEMORY | DQN | {"env_args": {"late": 1}}, "sync", marks=slow),
        pytest.param("Nim", {}, "sync", marks=slow),
        pytest.param("Leaving", {"env_args": {"late": 1}}, "sync", marks=slow),
        pytest.param("Together", {"algorithm": {"central_critic": True}}, "sync", marks=slow),
    ],
)
def test_resume_is_exact(env: str, config: dict[str, Any], topology: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"config": config, "topology": topology, "runtime": "inline"}
    whole = short(env, tmp_path / "whole", 3_000, **how)

    def stop(status: Any) -> None:
        if status.steps >= 1_200:
            status.stop_reason = "enough"

    short(env, tmp_path / "parts", 3_000, callbacks=[stop], **how)
    resumed = raynforce.resume(tmp_path / "parts", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert resumed.result.episodes == whole.result.episodes


def test_agents_see_who_they_are(tmp_path: Path) -> None:
    config = {"sampling": {"agent_ids": True, "envs": 4, "fragment": 32}}
    run = short("Together", tmp_path / "run", config=config, runtime="inline")
    policy = raynforce.load(run.path, "last")
    assert policy.act({"observation": 1, "agent": 0}).shape == ()
    assert {leaf.path for leaf in policy.spec.env.obs} == {"obs/observation", "obs/agent"}
    assert len(raynforce.evaluate(run.path, episodes=4, which="last").returns) == 4


def test_agents_that_see_who_they_are_are_recorded(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    config = {"sampling": {"agent_ids": True, "envs": 2, "fragment": 8}, "eval": {"every": 0, "final_episodes": 0}}
    how: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    run = raynforce.train(f"{TINY}Together", "ppo", steps=32, config=config, out=tmp_path / "run", **how)
    recorded = raynforce.record(run, out=tmp_path / "played.parquet", episodes=3, which="last")
    assert len(recorded.returns) == 3
    pytest.importorskip("minari")
    with pytest.raises(UsageError, match=r"'minari' is for environments of one agent, and env .* has 2: use parquet"):
        raynforce.record(run, out=tmp_path / "played-v0", format="minari", episodes=3, which="last")
    assert not (tmp_path / "played-v0").exists()


def test_each_agents_episodes_are_recorded_whole(tmp_path: Path) -> None:
    """Also of those that end before others, and of those that have fewer moves than others in a fragment."""
    pytest.importorskip("pyarrow")
    raynforce.record(f"{TINY}Leaving", policy="random", steps=500, out=tmp_path / "leaving.parquet", seed=1)
    leaving = read(str(tmp_path / "leaving.parquet"), probe(f"{TINY}Leaving", {}))
    assert set(leaving.length[:-3].tolist()) == {1, 2, 3}
    args = {"heap": 30}
    raynforce.record(f"{TINY}Nim", policy="random", episodes=60, out=tmp_path / "nim.parquet", seed=1, env_args=args)
    nim = read(str(tmp_path / "nim.parquet"), probe(f"{TINY}Nim", args))
    assert nim.terminated.all()
    assert set(nim.returns().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("name", ["Together", "EchoInTurns"])
def test_a_clone_of_agents_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    """What rewards are scaled by counts the reader's lanes, of which there are fewer than agents."""
    pytest.importorskip("pyarrow")
    data = tmp_path / "data.parquet"
    raynforce.record(f"{TINY}{name}", policy="random", episodes=40, out=data, seed=1)
    settings = {"eval.every": 0, "eval.episodes": 2, "eval.final_episodes": 0, "sampling.fragment": 16}
    how: dict[str, Any] = {"data": data, "runtime": "inline", "progress": "quiet", "settings": settings}
    whole = raynforce.train(f"{TINY}{name}", "bc", steps=512, out=tmp_path / "whole", **how)
    raynforce.train(f"{TINY}{name}", "bc", steps=256, out=tmp_path / "half", **how)
    resumed = raynforce.resume(tmp_path / "half", steps=512, progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256


def test_a_frozen_policy_plays_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remembering = TEAM["hunter"] | MEMORY
    first = short("Hunt", tmp_path / "first", config={"policies": TEAM | {"hunter": remembering}}, runtime="inline")
    frozen = {"hunter": {"agents": ["hunter_0"], "frozen": f"{first.path}:hunter"}, "prey": TEAM["prey"]}
    second = short("Hunt", tmp_path / "second", config={"policies": frozen}, runtime="inline")
    before, after = (raynforce.load(run.path, which) for run, which in ((first, "best"), (second, "last")))
    assert np.array_equal(before.policies["hunter"].version.params, after.policies["hunter"].version.params)
    assert not np.array_equal(before.policies["prey"].version.params, after.policies["prey"].version.params)
    names = {name for line in metrics(second.path) for name in line}
    assert "prey/losses/policy_loss" in names
    assert not any(name.startswith("hunter/") for name in names)
    with pytest.raises(UsageError, match="several policies"):
        after.act(1)
    hunter, prey = (raynforce.load(second.path, "last", policy=name) for name in ("hunter", "prey"))
    _, state = hunter.act(np.zeros(2), hunter.initial_state())
    assert {name: array.shape for name, array in state.items()} == {"torso.2": (1, 32)}
    assert prey.act(1).shape == (2,)
    capsys.readouterr()
    assert main(["show", str(second.path)]) == 0
    assert "hunter of hunter_0, frozen; prey of " in capsys.readouterr().out
    assert len(raynforce.evaluate(second.path, episodes=4, which="last").returns) == 4
    assert json.loads(second.path.joinpath("events.jsonl").read_text().splitlines()[-1])["episodes"] > 0


@pytest.mark.parametrize(
    ("env", "algo", "config", "told"),
    [
        ("Hunt", "ppo", {}, "different spaces"),
        ("Hunt", "ppo", {"policies": {"all": {"agents": ["*"]}}}, "different spaces"),
        ("Hunt", "ppo", {"policies": {"prey": {"agents": ["prey_*"]}}}, "agent 'hunter_0' .* has no policy"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"]}, "b": {"agents": ["x_*"]}}}, "is nobody in env"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"]}, "b": {"agents": ["*_1"]}}}, "leave it to one"),
        ("Together", "ppo", {"policies": {"1st": {"agents": ["*"]}}}, "'1st': use a to z, .*but for the first, digits"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"], "rate": 1}}}, "policies.a: unknown setting 'rate'"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"], "lr": 1}}}, "'lr': here it is algorithm.learning"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"], "algorithm": {"lr": 1}}}}, "here it is algorithm.le"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"], "algorithm": {"clip": "x"}}}}, "policies.a: .*clip"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"], "frozen": "/no"}}}, "a.frozen = '/no': there is no"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"]}}, "topology": "async"}, "sync or overlap"),
        ("Together", "ppo", {"policies": {"a": {"agents": ["*"]}}, "topology": "central"}, "sync or overlap"),
        ("Nim", "dqn", MEMORY | {"algorithm": {"burn_in": 2}}, "those of env .* take turns"),
        ("Nim", "dqn", MEMORY | {"policies": BURNING_IN}, "policies.second: .*those of env .* take turns"),
        ("Hunt", "ppo", {"policies": TEAM | {"hunter": CRITICAL}}, "policies.hunter: .*central_critic .*for the run"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(
    env: str, algo: str, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=told) as error:
        raynforce.train(TINY + env, algo, config=config, out=tmp_path / "run", progress="quiet", runtime="inline")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting",
    [
        {"policies": {"a": {"agents": ["*"]}}},
        {"algorithm": {"central_critic": True}},
        {"sampling": {"agent_ids": True}},
    ],
)
def test_settings_of_several_agents_need_several(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is for environments of several agents.*leave it out"):
        raynforce.train("CartPole-v1", "ppo", config=setting, out=tmp_path / "run", progress="quiet", runtime="inline")


def workers() -> list[int]:
    """Processes of roles that this one has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            with contextlib.suppress(OSError):
                if b"raynforce.runtimes.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return sorted(found)


@pytest.mark.parametrize(
    ("env", "algo", "config"),
    [
        ("Hunt", "ppo", {"policies": TEAM}),
        pytest.param("Nim", "ppo", {"policies": SELF_PLAY}, marks=slow),
        pytest.param("Nim", "ppo", {"policies": REMEMBERING}, marks=slow),
        pytest.param("Nim", "dqn", {"policies": FIRST_AND_SECOND, "algorithm": REPLAY}, marks=slow),
    ],
)
def test_killed_roles_change_nothing(env: str, algo: str, config: dict[str, Any], tmp_path: Path) -> None:
    config = {**config, "sampling": {"samplers": 2, "envs": 2, "fragment": 16}}
    quiet = short(env, tmp_path / "quiet", 1_500, algo, config=config, topology="sync", runtime="inline")
    left = [0, 1, 2]  # the learner, and each sampler

    def kill(status: Any) -> None:
        if left and status.steps >= 300 * (4 - len(left)):
            os.kill(workers()[left.pop(0)], signal.SIGKILL)

    how: dict[str, Any] = {"config": config, "topology": "sync", "runtime": "process", "callbacks": [kill]}
    killed = short(env, tmp_path / "killed", 1_500, algo, **how)
    assert killed.result.restarts >= 2
    assert killed.result.lost_steps == 0
    assert killed.result.weights_sha256 == quiet.result.weights_sha256
    assert killed.result.episodes == quiet.result.episodes


@pytest.mark.slow
def test_mappo_is_far_better_than_chance_on_simple_spread(tmp_path: Path) -> None:
    pytest.importorskip("mpe2", reason="needs pip install mpe2")
    env = "mpe2.simple_spread_v3:parallel_env"
    learning = {"central_critic": True, "minibatch_size": 2048, "entropy_coef": 0.01, "learning_rate": 7e-4}
    central = {"algorithm": learning, "sampling": {"envs": 16}}
    chance = random_return(env, 100)
    run = raynforce.train(env, steps=3_000_000, out=tmp_path / "run", config=central, progress="quiet", topology="sync")
    assert run.result.eval_return is not None
    assert run.result.eval_return > chance + 8  # of three standard deviations of a mean, about 2


@pytest.mark.slow
def test_self_play_of_tic_tac_toe_beats_a_random_player(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo", reason='needs pip install "raynforce[agents]"')
    env, config = "pettingzoo.classic.tictactoe_v3:env", {"policies": {"hero": {"agents": ["*"], "opponents": 8}}}
    run = raynforce.train(env, steps=60_000, out=tmp_path / "run", config=config, progress="quiet", runtime="inline")
    assert raynforce.evaluate(run.path, episodes=400, seed=3).returns.mean() > 0.6


def random_return(env: str, episodes: int) -> float:
    """The mean return of an agent where all choose at random."""
    envs = EnvArgs(env, 4, 0).vector(0)
    rng, total, ended = np.random.default_rng(0), 0.0, 0
    envs.reset()
    while ended < episodes * envs.num_envs // 4:
        step = envs.step(rng.integers(0, envs.spec.action.sizes[0], envs.num_envs))
        total += float(step.reward.sum())
        ended += int((step.terminated | step.truncated).sum())
    envs.close()
    return total / ended
