"""Simulators with several agents: who acts and what each earns, and the weights of the same game in Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import is_sound
from marks import slow
from running import events

import raynforce
from raynforce.envs.addresses import find_key
from raynforce.envs.agents import Seats, World
from raynforce.envs.conformance import check
from raynforce.envs.make import make
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import UsageError
from raynforce.spaces import ACTING

GAMES = Path(__file__).parent / "agent_games.py"
TEAM = {"hunter": {"agents": ["hunter_*"], "algorithm": {"learning_rate": 1e-3}}, "prey": {"agents": ["prey"]}}
SELF_PLAY = {"hero": {"agents": ["*"], "opponents": 4, "opponents_every": 2}}
STAY = np.ones(2, np.int64)


@pytest.fixture(scope="session")
def hunt(compiled: Callable[[str], str]) -> str:
    return compiled("examples/cpp/hunt.cpp")


@pytest.fixture(scope="session")
def nim(compiled: Callable[[str], str]) -> str:
    return compiled("tests/simulators/nim.cpp")


def in_python(game: str) -> str:
    return f"sim:{sys.executable} {GAMES} {game}"


def short(env: str, out: Path, algo: str = "ppo", steps: int = 400, **more: Any) -> raynforce.Run:
    config = {"sampling": {"envs": 3, "fragment": 16}, "eval": {"every": 0, "final_episodes": 0}}
    config |= more.pop("config", {})
    how: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet", **more}
    return raynforce.train(env, algo, steps=steps, out=out, config=config, **how)


def hunting(env: str, **args: Any) -> World:
    """Two environments, seen by the hunters and by the prey."""
    made = EnvArgs(env, 2, 0, args).environments(0)
    world = World(made, [Seats.all_of(2, [0, 1]), Seats.all_of(2, [2])])
    world.begin(made.reset())
    return world


@pytest.mark.parametrize("language", ["C++", "Python"])
def test_agents_come_and_go_and_are_lanes(language: str, request: pytest.FixtureRequest) -> None:
    env = request.getfixturevalue("hunt") if language == "C++" else in_python("Hunt")
    world = hunting(env, start=3)
    found = []
    for _ in range(12):
        hunters, prey = world.step([np.tile(STAY, 2), np.zeros((2, 1), np.float32)])
        assert prey.reward == pytest.approx([0.1, 0.1])
        assert not hunters.reward.any()
        assert hunters.obs["obs"].tolist() == [3, 6, 3, 6]  # also of those that are not there
        found.append((hunters.valid[:2].tolist(), hunters.terminated[:2].tolist(), hunters.truncated[:2].tolist()))
    here, none = [[True, False]] * 2 + [[True, True]] * 6 + [[False, True]] * 4, [False, False]
    assert [valid for valid, _, _ in found] == here
    assert [over for _, over, _ in found] == [none] * 7 + [[True, False]] + [none] * 4
    assert [cut for _, _, cut in found] == [none] * 11 + [[False, True]]
    assert prey.truncated.all()
    assert hunters.final_lanes.tolist() == [1, 3]  # the first left before: it saw the end itself
    for pull in (-1, 0):
        hunters, prey = world.step([np.array([2, 1, 1, 1]), np.full((2, 1), pull, np.float32)])
    assert hunters.reward.tolist() == [1, 0, 0, 0]  # that of the first environment went towards it
    assert prey.reward == pytest.approx([-1, 0.1])
    assert prey.terminated.tolist() == [True, False]
    world.inner.close()


def test_turns_masks_and_the_global_state(nim: str) -> None:
    envs = EnvArgs(nim, 1, 0, {"heap": 4}, states=True).vector(0)
    seen = envs.reset()
    assert seen["global_state"].tolist() == [[4], [4]]
    step = envs.step(np.array([1, 0]))  # two are left
    assert step.valid.tolist() == [True, False]
    assert step.obs["obs/action_mask"][1].tolist() == [1, 1, 0]
    step = envs.step(np.array([0, 1]))
    assert step.valid.tolist() == [False, True]
    assert step.reward.tolist() == [-1, 1]
    assert step.terminated.all()
    envs.close()


CASES = [
    ("hunt", "Hunt", "ppo", {"policies": TEAM, "env_args": {"start": 3}}),
    ("nim", "Nim", "ppo", {"policies": SELF_PLAY, "env_args": {"heap": 10}}),
    ("nim", "Nim", "ppo", {"algorithm": {"central_critic": True}, "env_args": {"heap": 7}}),
    pytest.param("nim", "Nim", "dqn", {"env_args": {"heap": 9}}, marks=slow),
    pytest.param("nim", "Nim", "impala", {"env_args": {"heap": 9}}, marks=slow),
]


@pytest.mark.parametrize(("program", "game", "algo", "config"), CASES)
def test_weights_are_those_of_the_same_game_in_python(
    program: str, game: str, algo: str, config: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One policy, policies of their own, self-play, a central critic: also where agents come and go."""
    ours = short(request.getfixturevalue(program), tmp_path / "sim", algo, config=config)
    theirs = short(f"agent_games:{game}", tmp_path / "python", algo, config=config)
    assert ours.result.weights_sha256 == theirs.result.weights_sha256
    assert ours.result.episodes == theirs.result.episodes > 0
    assert not events(ours.path, "fault")  # Nim throws on a forbidden move


@pytest.mark.parametrize("runtime", ["inline", pytest.param("process", marks=slow)])
def test_they_may_go_their_own_pace(nim: str, runtime: str, tmp_path: Path) -> None:
    config = {"env_args": {"heap": 7}, "algorithm": {"central_critic": True}}
    run = short(nim, tmp_path / "run", topology="central", runtime=runtime, config=config)
    assert run.result.episodes > 0
    assert run.result.steps >= 400
    assert not events(run.path, "fault")  # it throws on a forbidden move


@pytest.mark.parametrize(
    ("game", "config"),
    [
        ("Hunt", {"policies": TEAM, "env_args": {"start": 3}}),
        pytest.param("Nim", {"policies": SELF_PLAY, "env_args": {"heap": 10}}, marks=slow),
    ],
)
def test_an_environment_of_pettingzoo_is_served_as_it_is(game: str, config: dict[str, Any], tmp_path: Path) -> None:
    served = short(in_python(game), tmp_path / "sim", config=config)
    here = short(f"agent_games:{game}", tmp_path / "python", config=config)
    assert served.result.weights_sha256 == here.result.weights_sha256
    assert probe(in_python(game)).agents == probe(f"agent_games:{game}").agents


@pytest.mark.parametrize("runtime", [pytest.param("process", marks=slow), pytest.param("ray", marks=slow)])
def test_equal_seeds_give_equal_runs_on_every_runtime(hunt: str, runtime: str, tmp_path: Path) -> None:
    config = {"policies": TEAM, "sampling": {"samplers": 2, "envs": 2, "fragment": 16}}
    runs = [short(hunt, tmp_path / where, config=config, runtime=where) for where in ("inline", runtime)]
    assert len({run.result.weights_sha256 for run in runs}) == 1


@pytest.mark.parametrize(
    ("program", "config", "topology"),
    [
        ("hunt", {"policies": TEAM}, "sync"),
        ("nim", {"policies": SELF_PLAY}, "overlap"),
        pytest.param("nim", {}, "sync", marks=slow),
    ],
)
def test_resume_is_exact(
    program: str, config: dict[str, Any], topology: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    env = request.getfixturevalue(program)
    whole = short(env, tmp_path / "whole", steps=800, config=config, topology=topology)

    def stop(status: Any) -> None:
        if status.steps >= 300:
            status.stop_reason = "enough"

    short(env, tmp_path / "parts", steps=800, config=config, topology=topology, callbacks=[stop])
    resumed = raynforce.resume(tmp_path / "parts", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert resumed.result.episodes == whole.result.episodes


def children(program: str) -> list[int]:
    """Processes of a program that this one has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(program.encode()):
                found.append(int(child))
    return found


def test_a_simulator_that_is_killed_cuts_the_episodes_of_its_agents(hunt: str, tmp_path: Path) -> None:
    left = [240, 120]

    def kill(status: Any) -> None:
        if left and status.steps >= left[-1]:
            left.pop()
            os.kill(children(hunt)[0], signal.SIGKILL)

    run = short(hunt, tmp_path / "run", config={"policies": TEAM, "log_every": 60}, callbacks=[kill])
    assert run.result.stopped == "steps done"
    assert run.result.env_restarts == 2
    assert not left
    is_sound(run)


def test_a_running_episode_in_which_nobody_acts_is_a_fault() -> None:
    world = hunting(in_python("Nobody"), start=3)
    for number in range(3):
        hunters, prey = world.step([np.tile(STAY, 2), np.zeros((2, 1), np.float32)])
        assert prey.valid.all() == (number < 2)
    assert prey.cut.tolist() == [0, 1]
    assert hunters.cut.tolist() == [0, 1, 2, 3]
    (fault, *_) = world.inner.take_faults()
    assert "some agent must be to act" in fault.facts()["cause"]
    world.inner.close()


def test_simulators_that_others_start_may_have_several_agents(
    nim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # a token of its own
    monkeypatch.delenv("RAYNFORCE_KEY", raising=False)
    find_key()  # writes the token that simulators read
    where = f"unix:{tmp_path / 's'}"
    started = subprocess.Popen([nim, "--connect", where, "--envs", "3"], stderr=subprocess.DEVNULL)
    try:
        run = short(f"listen:{where}", tmp_path / "run", steps=300, config={"policies": SELF_PLAY})
        assert run.result.episodes > 0
        assert started.wait(20) == 0
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize(
    ("game", "said"),
    [("Twice", "agents.names has 'prey' twice"), ("Empty", "has no agents: its possible_agents is empty")],
)
def test_agents_that_cannot_be_are_refused_in_one_line(game: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        probe(in_python(game))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("program", "config", "said"),
    [
        ("hunt", {}, "different spaces"),
        ("hunt", {"policies": {"prey": {"agents": ["prey"]}}}, "agent 'hunter_0' .* has no policy"),
        ("nim", {"sampling": {"inference": "client"}}, "is for simulators of one agent, .* --inference server"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(
    program: str, config: dict[str, Any], said: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    env = request.getfixturevalue(program)
    with pytest.raises(UsageError, match=said) as error:
        raynforce.train(env, "ppo", config=config, out=tmp_path / "run", progress="quiet", runtime="inline")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("program", ["hunt", "nim"])
def test_they_hold_against_the_protocol(program: str, request: pytest.FixtureRequest) -> None:
    some = ("step", "final-observations", "equal-seeds", "step-again", "restored")
    found = {name: why for name, _, why in check(request.getfixturevalue(program), some)}
    assert {name: why for name, why in found.items() if why} == {}
    assert len(found) == len(some)


@slow
@pytest.mark.parametrize("program", ["hunt", "nim"])
def test_they_pass_the_check(program: str, request: pytest.FixtureRequest) -> None:
    found = {name: why for name, _, why in check(request.getfixturevalue(program))}
    assert {name: why for name, why in found.items() if why and "does not offer `inference`" not in why} == {}


def test_random_moves_are_those_that_masks_allow() -> None:
    made = make(in_python("Nim"), {"heap": 4})
    try:
        made.action_space.seed(0)
        for seed in range(12):
            seen, over = made.reset(seed=seed)[0], False
            while not over:
                (agent,), action = np.flatnonzero(seen["flags"][ACTING]), made.action_space.sample()
                mask = next(array for array in seen.values() if array.shape == (2, 3))
                assert mask[agent, int(action[agent])]
                seen, _, over, _, _ = made.step(action)
    finally:
        made.close()
