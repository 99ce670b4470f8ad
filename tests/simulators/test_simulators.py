"""Simulators in C++ as environments: spaces, episodes, seeds, faults, and runs that train on them."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import raynforce
from raynforce.envs.make import make
from raynforce.envs.simulator_vector import SimulatorVector
from raynforce.envs.simulators import Simulators
from raynforce.envs.vector import make_vector, probe
from raynforce.errors import EnvError, UsageError

SMALL: dict[str, Any] = {
    "sampling.envs": 4,
    "sampling.fragment": 32,
    "algorithm.epochs": 2,
    "algorithm.minibatch_size": 64,
    "eval.every": 500,
    "eval.episodes": 2,
    "eval.envs": 2,
    "eval.final_episodes": 2,
    "checkpoint.every": 400,
}


@pytest.fixture
def vectors() -> Iterator[list[SimulatorVector]]:
    made: list[SimulatorVector] = []
    yield made
    for vector in made:
        vector.close()


def vector(made: list[SimulatorVector], env: str, envs: int = 3, seed: int = 1, **more: Any) -> SimulatorVector:
    args = {key: more.pop(key) for key in ("fault", "at", "length") if key in more}
    found = make_vector(env, args, envs, seed=seed, **more)
    assert isinstance(found, SimulatorVector)
    made.append(found)
    return found


def still(envs: int = 3) -> np.ndarray:
    return np.zeros((envs, 2), np.float32)


def test_its_spaces_come_from_its_hello(odd: str) -> None:
    spec = probe(odd)
    assert [(leaf.path, leaf.kind, leaf.shape, leaf.dtype) for leaf in spec.obs] == [
        ("obs/camera", "box", (4, 4, 3), "uint8"),
        ("obs/gear", "discrete", (), "int64"),
        ("obs/speed", "box", (2,), "float32"),
    ]
    assert (spec.obs[1].sizes, spec.obs[1].start) == ((6,), (-1,))
    assert (spec.action.kind, spec.action.low, spec.action.high) == ("box", (-1.0, -1.0), (1.0, 1.0))


def test_episodes_end_and_begin_in_one_step(odd: str, vectors: list[SimulatorVector]) -> None:
    envs = vector(vectors, odd, length=3)
    first = envs.reset()
    assert first["obs/gear"].tolist() == [-1, -1, -1]
    for _ in range(3):
        found = envs.step(np.full((3, 2), 0.25, np.float32))
        assert found.valid.all()
        assert found.reward.tolist() == [0.5] * 3
    assert (found.terminated ^ found.truncated).all()
    assert found.final_lanes.tolist() == [0, 1, 2]
    assert found.final_obs["obs/speed"].tolist() == [[3, 0.5]] * 3
    assert found.obs["obs/speed"][:, 0].tolist() == [0, 0, 0]
    assert found.info == {lane: {"laps": 2.5, "is_success": 1.0} for lane in range(3)}
    assert envs.take_faults() == []


def test_equal_seeds_give_equal_episodes_and_lanes_differ(odd: str, vectors: list[SimulatorVector]) -> None:
    def cameras(seed: int) -> np.ndarray:
        envs = vector(vectors, odd, seed=seed, length=2)
        seen = [envs.reset()["obs/camera"]] + [envs.step(still()).obs["obs/camera"] for _ in range(5)]
        return np.stack(seen)

    one, same, other = cameras(1), cameras(1), cameras(2)
    np.testing.assert_array_equal(one, same)
    assert (one[0] != other[0]).any()
    assert len({one[0, lane].tobytes() for lane in range(3)}) == 3
    assert (one[0] != one[2]).any(), "the next episode has another seed"


def test_a_reset_with_a_seed_repeats_itself(cartpole: str) -> None:
    env = make(cartpole)
    try:
        assert env.observation_space == gymnasium.spaces.Box(-math.inf, math.inf, (4,), np.float32)
        one, two, three = (env.reset(seed=seed)[0] for seed in (5, 5, 6))
        assert one.tolist() == two.tolist() != three.tolist()
        assert env.reset()[0].tolist() != three.tolist()
    finally:
        env.close()


def test_its_physics_are_gymnasiums(cartpole: str) -> None:
    ours, theirs, rng = make(cartpole), gymnasium.make("CartPole-v1").unwrapped, np.random.default_rng(0)
    theirs.reset()
    worst, ends = 0.0, 0
    try:
        for seed in range(20):
            obs, _ = ours.reset(seed=seed)
            theirs.state, over = np.array(obs, np.float64), False
            while not over:
                action = int(rng.integers(2))
                obs, reward, over, truncated, _ = ours.step(action)
                expected, _, ended, _, _ = theirs.step(action)
                worst = max(worst, float(np.abs(obs - expected).max()))
                assert (over, reward, truncated) == (ended, 1.0, False)
            theirs.reset()
            ends += 1
    finally:
        ours.close()
    assert ends == 20
    assert worst < 1e-6


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("throw", "raised", "motor jammed"),
        ("nan", "garbage", "obs/speed has a value that its space does not have"),
        ("range", "garbage", "obs/gear has a value that its space does not have"),
        ("exit", "died", "has exited with code 7; it said: out of fuel"),
        ("abort", "died", "was ended by SIGSEGV"),
        ("hang", "hung", "did not come back within 1.5 s; the simulator was ended by SIGKILL"),
    ],
)
def test_what_breaks_begins_a_new_episode(
    odd: str, vectors: list[SimulatorVector], fault: str, kind: str, words: str
) -> None:
    envs = vector(vectors, odd, 2, fault=fault, at=14, length=20, hang_seconds=1.5)
    envs.reset()
    for _ in range(13):
        assert not len(envs.step(still(2)).cut)
    found = envs.step(still(2))
    assert found.cut.tolist() == [0, 1]
    assert not found.valid.any()
    assert not (found.terminated | found.truncated).any()
    assert found.obs["obs/speed"][:, 0].tolist() == [0, 0]
    faults = envs.take_faults()
    assert {one.kind for one in faults} == {kind}
    assert all(words in one.cause for one in faults)
    assert len(faults) == (1 if kind in ("died", "hung") else 2), "a process that ends is one fault"
    assert envs.step(still(2)).valid.all()


def test_one_that_breaks_again_and_again_is_given_up(odd: str, vectors: list[SimulatorVector]) -> None:
    envs = vector(vectors, odd, 2, fault="exit", at=1)
    envs.reset()
    for _ in range(3):
        assert len(envs.step(still(2)).cut) == 2
    with pytest.raises(EnvError, match=r"4 times in a row within 10 steps .*: the simulator has exited with code 7"):
        envs.step(still(2))


def test_a_slow_env_does_not_hold_up_the_others(odd: str) -> None:
    lanes = Simulators(odd, {}, 2, seed=1)
    try:
        lanes.step(np.array([1]), still(1))
        lanes.wait()
        done, broken = lanes.collect()
        assert (done.tolist(), broken) == ([1], [])
        assert np.isinf(lanes.busy_since()).all()
    finally:
        lanes.close()


def test_a_saved_state_goes_on_in_new_episodes(odd: str, vectors: list[SimulatorVector]) -> None:
    envs = vector(vectors, odd)
    before = envs.reset()["obs/camera"].copy()
    envs.step(still())
    state = envs.state()
    told = vector(vectors, odd).load(state)
    assert told == [f"3 of 3 running episodes of env {odd!r} start over: the simulator cannot save them"]
    assert vectors[1].restarted == [0, 1, 2]
    assert (vectors[1].current()["obs/camera"] != before).any()


def test_no_process_is_left(odd: str) -> None:
    lanes = Simulators(odd, {}, 2, seed=1)
    assert lanes._simulator is not None
    pid = lanes._simulator.process.pid
    lanes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fault", ["", "hang"])
def test_it_does_not_outlive_a_trainer_that_is_killed(odd: str, fault: str) -> None:
    """Not even if a step never returns."""
    script = (
        "import sys, time, numpy as np\n"
        "from raynforce.envs.simulators import Simulators\n"
        f"lanes = Simulators({odd!r}, {{'fault': {fault!r}, 'at': 1}}, 2, seed=1)\n"
        "print(lanes._simulator.process.pid, flush=True)\n"
        "lanes.step(np.arange(2), np.zeros((2, 2), np.float32))\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    simulator = int(trainer.stdout.readline())
    time.sleep(0.5)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    until = time.monotonic() + 30
    while Path(f"/proc/{simulator}").exists() and "Z" not in Path(f"/proc/{simulator}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "it is still there"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("./no_such_simulator", "there is no file ./no_such_simulator"),
        ("/etc/passwd", "/etc/passwd cannot be executed"),
        ("/etc", "/etc cannot be executed"),
        ("sim:no-such-program --fast", "there is no program no-such-program on the PATH"),
        ("sim:", "names no simulator"),
        ("sim:'", "is no command"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(env: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(env)


def test_one_that_exits_at_once_says_how(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="has exited with code 3; it said: no licence, before it had connected"):
        Simulators("sim:sh -c 'echo no licence >&2; exit 3'", {}, 1, seed=0)
    with pytest.raises(EnvError, match=r"has not connected within 0\.3 s; it said nothing"):
        Simulators("sim:sleep 60", {}, 1, seed=0, start_seconds=0.3)


def test_other_numbers_of_envs_are_refused(odd: str) -> None:
    with pytest.raises(UsageError, match=r"has 2 envs in a process, not 3: give --envs 2"):
        Simulators(f"{odd} --envs 2", {}, 3, seed=0)


@pytest.mark.parametrize(("algo", "topology"), [("ppo", "sync"), ("ppo", "central")])
def test_it_trains_on_every_runtime(cartpole: str, tmp_path: Path, algo: str, topology: str) -> None:
    found = {}
    for runtime in ("inline", "process"):
        run = raynforce.train(
            cartpole, algo, steps=1024, runtime=runtime, topology=topology, settings=SMALL, out=tmp_path / runtime,
            progress="quiet",
        )  # fmt: skip
        assert run.result.steps >= 1024
        assert run.result.eval_return is not None
        found[runtime] = run.result.weights_sha256
    if topology == "sync":
        assert found["inline"] == found["process"]
    resumed = raynforce.resume(tmp_path / "process", steps=1500, progress="quiet")
    assert resumed.result.steps >= 1500
    assert raynforce.load(tmp_path / "process").act(np.zeros(4, np.float32)) in (0, 1)


def test_one_that_is_killed_costs_nothing_but_episodes(odd: str, tmp_path: Path) -> None:
    """Each process ends in the middle of its tenth episode."""
    settings = SMALL | {"env_args.fault": "exit", "env_args.at": 40, "env_args.length": 50, "sampling.envs": 2}
    run = raynforce.train(odd, steps=1000, runtime="process", settings=settings, out=tmp_path / "run", progress="quiet")
    assert run.result.steps >= 1000
    assert run.result.env_restarts > 5
    assert run.result.lost_steps == 0


def test_one_that_died_while_idle_is_told_at_the_next_step(cartpole: str) -> None:
    """Whoever sleeps on `fileno` is woken, though its simulator is back already and has nothing more to say."""
    lanes = Simulators(cartpole, {}, 3, seed=0)
    try:
        lanes.step_all(np.zeros(3, np.int64))
        assert lanes._simulator is not None
        os.kill(lanes._simulator.process.pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while (not lanes._unreported or lanes._making) and time.monotonic() < until:
            lanes.wait()
            assert not lanes.collect()[1]  # nothing was asked of them
        assert not select.select([lanes], [], [], 0.1)[0]
        lanes.step(np.array([0, 2]), np.zeros(2, np.int64))
        assert select.select([lanes], [], [], 5.0)[0]
        done, broken = lanes.collect()
        assert (len(done), [one.lane for one in broken]) == (0, [0, 2])
        assert not select.select([lanes], [], [], 0.1)[0]
        lanes.step(np.array([1]), np.zeros(1, np.int64))
        assert [one.lane for one in lanes.collect()[1]] == [1]
        assert not lanes.step_all(np.zeros(3, np.int64))
    finally:
        lanes.close()


# -- other ways to be a simulator -------------------------------------------------------------------------


def test_threads_step_side_by_side_to_the_same_results(odd: str, vectors: list[SimulatorVector]) -> None:
    def seen(command: str) -> list[np.ndarray]:
        envs = vector(vectors, command, 5, length=3)
        envs.reset()
        return [envs.step(still(5)).obs["obs/camera"] for _ in range(20)]

    np.testing.assert_array_equal(seen(odd), seen(f"{odd} --threads 3"))


def test_an_engine_may_own_its_loop(compiled: Callable[[str], str]) -> None:
    env = raynforce.simulator(compiled("tests/simulators/own_loop.cpp"), envs=3)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    try:
        first, _ = env.reset(seed=4)
        again, _ = env.reset(seed=4)
        np.testing.assert_array_equal(first, again)
        for step in range(1, 5):
            obs, reward, terminated, truncated, infos = env.step(np.array([0, 1, 2]))
            assert reward.tolist() == [1, 1, 1]
            assert not terminated.any()
            assert truncated.all() == (step == 4)
        np.testing.assert_array_equal(infos["final_obs"], first + 4 * np.array([[0], [1], [2]]))
        assert infos["_final_obs"].all()
        assert (obs != infos["final_obs"]).any()
    finally:
        env.close()


def test_other_libraries_see_an_ordinary_env(odd: str) -> None:
    env = raynforce.simulator(odd, length=3)
    assert isinstance(env, gymnasium.Env)
    try:
        assert env.observation_space["gear"] == gymnasium.spaces.Discrete(6, start=-1)
        obs, _ = env.reset(seed=1)
        assert env.observation_space.contains(obs)
        for _ in range(3):
            obs, _, terminated, truncated, info = env.step(env.action_space.sample())
            assert env.observation_space.contains(obs)
        assert terminated != truncated
        assert info == {"laps": 2.5, "is_success": 1.0}
        assert obs["speed"][0] == 3
    finally:
        env.close()


ODD_IN_PYTHON = """
import sys, time
sys.path.insert(0, {sdk!r})
import numpy as np
import raynforce_sim as sim

class Odd:
    observation_space = {{"eye": sim.box((2, 2), "uint8"), "place": {{"x": sim.box((1,))}}}}
    action_space = sim.multidiscrete([2, 3])

    def __init__(self, fault="", at=5):
        self.fault, self.at = fault, at

    def reset(self, seed):
        self.seed, self.steps = seed, 0
        return self.seen()

    def step(self, action):
        self.steps += 1
        if self.steps == self.at and self.fault == "raise":
            raise ValueError("motor jammed")
        if self.steps == self.at and self.fault == "exit":
            print("out of fuel", file=sys.stderr)
            sys.exit(7)
        return self.seen(), float(action.sum()), self.steps == 20, False, {{"laps": 2.5, "name": "x"}}

    def seen(self):
        return {{"eye": np.full((2, 2), self.seed % 256), "place": {{"x": [self.steps]}}}}

sim.serve(Odd)
"""


@pytest.mark.parametrize("fault", ["", "raise", "exit"])
def test_a_simulator_in_another_python(tmp_path: Path, fault: str) -> None:
    script = tmp_path / "odd_sim.py"
    script.write_text(ODD_IN_PYTHON.format(sdk=str(Path(__file__).parents[2] / "sdk" / "python")))
    envs = make_vector(f"sim:{sys.executable} {script}", {"fault": fault, "at": 15}, 2, seed=1)
    try:
        assert [leaf.path for leaf in envs.spec.obs] == ["obs/eye", "obs/place/x"]
        first = envs.reset()["obs/eye"]
        assert (first[0] != first[1]).any()
        for step in range(1, 15):
            found = envs.step(np.array([[0, 1], [1, 2]]))
            assert found.reward.tolist() == [1, 3]
            assert found.obs["obs/place/x"].tolist() == [[step]] * 2
        found = envs.step(np.array([[0, 1], [1, 2]]))
        faults = envs.take_faults()
        if not fault:
            assert found.valid.all()
            assert not faults
            for _ in range(5):
                found = envs.step(np.array([[0, 1], [1, 2]]))
            assert found.terminated.all()
            assert found.info == {0: {"laps": 2.5}, 1: {"laps": 2.5}}
            assert (found.obs["obs/eye"] != first).any()
        else:
            assert found.cut.tolist() == [0, 1]
            assert {"raise": "ValueError: motor jammed", "exit": "code 7; it said: out of fuel"}[fault] in faults[
                0
            ].cause
    finally:
        envs.close()


# -- the header -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [3000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_message_harms_it(compiled: Callable[..., str], messages: int) -> None:
    sanitized = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = compiled("tests/simulators/fuzz.cpp", *sanitized)
    done = subprocess.run([program, str(messages)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_cmake_package_is_found(tmp_path: Path, compiled: Callable[[str], str]) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake (Debian: apt install cmake)")
    root = Path(__file__).parents[2]

    def run(*words: object) -> None:
        done = subprocess.run([cmake, *map(str, words)], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    run("-S", root / "sdk" / "cpp", "-B", "sdk", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}")
    run("--install", "sdk")
    (tmp_path / "main.cpp").write_text(
        "#include <raynforce.hpp>\nint main() { return raynforce::version[0] != '0'; }\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(mine CXX)\nfind_package(raynforce 0.1 REQUIRED)\n"
        "add_executable(mine main.cpp)\ntarget_link_libraries(mine raynforce::raynforce)\n"
    )
    run("-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}")
    run("--build", "build")
    subprocess.run([tmp_path / "build" / "mine"], check=True)


def test_whoever_has_no_simulator_does_not_load_the_protocol() -> None:
    """A sampler that is restarted is back sooner."""
    code = "import sys, raynforce.roles.sampler; print(any('raynforce.protocol' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("wrappers", [["ClipReward"], [{"NoSuchWrapper": {}}]])
def test_wrappers_are_not_for_simulators(wrappers: list[Any]) -> None:
    line = r"env_args.wrappers = .* is not for simulators, such as '/bin/true': leave it out"
    for make_it in (lambda env, args: Simulators(env, args, 1, seed=0), make, probe):
        with pytest.raises(UsageError, match=line):
            make_it("/bin/true", {"wrappers": wrappers})  # which is not started
