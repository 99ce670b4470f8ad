"""Ends that nobody planned: Ctrl-C, SIGTERM and `kill -9` of a run with processes of its own leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import DEADLINE, Start, starting
from running import events

from raynforce.driver import signals
from raynforce.runs import checkpoint

RUNTIMES = ["process", pytest.param("ray", marks=pytest.mark.slow)]
TOPOLOGIES = ["sync", "overlap", "async"]
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "terminal": 130}

ENV = """
import os, pathlib, subprocess, time
import gymnasium, numpy as np
from gymnasium import spaces

class Slow(gymnasium.Env):
    '''Takes its time: a signal finds it in the middle of a fragment. Has a child, as a simulator would.'''

    observation_space, action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(2)

    def __init__(self, seconds=0.01, child=True):
        self.seconds = seconds
        self.child = subprocess.Popen(["sleep", "1000"]) if child else None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        pathlib.Path("steps").touch()
        time.sleep(self.seconds)
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t >= 5, False, {}

    def close(self):
        if self.child:
            self.child.kill()
            self.child.wait()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in a directory of their own, which has the environment."""
    (tmp_path / "slow_env.py").write_text(ENV)
    with starting(tmp_path) as start:
        yield start


def train(runtime: str, topology: str, *more: str, steps: str = "1e9", samplers: int = 2) -> list[str]:
    small = ["sampling.fragment=16", "log_every=1", "eval.every=0", "eval.episodes=1", "eval.final_episodes=0"]
    words = ["train", "ppo", "slow_env:Slow", "--runtime", runtime, "--topology", topology, "--steps", steps]
    words += ["--samplers", str(samplers), "--envs", "2", "--out", "run", "--no-preset", *more]
    return [*words, *(word for setting in small for word in ("--set", setting))]


def trains(run: Path) -> Callable[[], bool]:
    """Whether the first line of metrics is there: rounds of learning follow each other."""
    return lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0


def resume_works(start: Start, run: Path, runtime: str) -> None:
    """It goes on where it stood, counted from the checkpoint."""
    before = checkpoint.manifest(run / "last")["step"]
    where = "inline" if runtime == "process" else runtime
    resumed = start("resume", "run", "--steps", str(before + 64), "--runtime", where, "--json")
    assert resumed.ended() == 0, resumed.said
    result = json.loads(resumed.said.splitlines()[-1])
    assert result["stopped"] == "steps done"
    assert before + 64 <= result["steps"] <= before + 64 + 6 * 32
    resumed.nothing_left(5)


# -- one signal ---------------------------------------------------------------------------------------------

QUICK = [("async", "SIGTERM")]
ALL = [(topology, how) for topology in TOPOLOGIES for how in SIGNALS]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("topology", "how"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL]
)
def test_one_signal_ends_the_run_with_a_checkpoint(
    start: Start, tmp_path: Path, runtime: str, topology: str, how: str
) -> None:
    one_signal(start, tmp_path, runtime, topology, how)
    resume_works(start, tmp_path / "run", runtime)


def one_signal(start: Start, tmp_path: Path, runtime: str, topology: str, how: str) -> None:
    run = tmp_path / "run"
    command = start(*train(runtime, topology), terminal=how == "terminal")
    command.until(trains(run))
    steps = tmp_path / "steps"
    steps.unlink()
    command.until(steps.exists)  # in the middle of a fragment
    command.send(how)
    assert command.ended() == SIGNALS[how], command.said
    assert "Traceback" not in command.said
    assert "stopping after this round" in command.said
    command.nothing_left(5)
    assert [line["event"] for line in events(run)] == ["started", "stopped", "result"]
    assert checkpoint.manifest(run / "last")["step"] == events(run)[-1]["steps"] > 0


def test_ctrl_c_in_a_terminal_on_ray(start: Start, tmp_path: Path) -> None:
    one_signal(start, tmp_path, "ray", "overlap", "terminal")


# -- two signals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("topology", "how"),
    [
        ("async", "terminal"),
        *(pytest.param(t, h, marks=pytest.mark.slow) for t, h in ALL if (t, h) != ("async", "terminal")),
    ],
)
def test_the_second_signal_ends_at_once(start: Start, tmp_path: Path, runtime: str, topology: str, how: str) -> None:
    """The environment hangs, so the round never ends."""
    hanging = ["--set", "env_args.seconds=1000"]
    command = start(*train(runtime, topology, *hanging), terminal=how == "terminal")
    command.until((tmp_path / "steps").exists)
    command.send(how)
    command.until(lambda: "stopping after this round" in command.said)
    time.sleep(0.2)
    assert command.process.poll() is None
    command.send(how)
    assert command.ended() == SIGNALS[how], command.said
    assert "Traceback" not in command.said
    command.nothing_left(5)
    checkpoint.load(tmp_path / "run" / "last")  # of the beginning


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_many_signals_change_nothing(start: Start, tmp_path: Path, runtime: str) -> None:
    """A finger that stays on Ctrl-C."""
    command = start(*train(runtime, "async"), terminal=True)
    command.until(trains(tmp_path / "run"))
    for _ in range(30):
        with contextlib.suppress(OSError):
            command.send("terminal")
        time.sleep(0.02)
    assert command.ended() in (130, -signal.SIGINT), command.said  # the latter if Python itself was already ending
    assert "Traceback" not in command.said
    command.nothing_left(5)
    resume_works(start, tmp_path / "run", runtime)


# -- kill -9 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    "topology", ["async", pytest.param("sync", marks=pytest.mark.slow), pytest.param("overlap", marks=pytest.mark.slow)]
)
def test_kill_9_leaves_nothing_and_can_be_resumed(start: Start, tmp_path: Path, runtime: str, topology: str) -> None:
    run = tmp_path / "run"
    command = start(*train(runtime, topology, "--set", "checkpoint.every=64"))
    command.until(lambda: (run / "last").exists() and checkpoint.manifest(run / "last")["step"] > 0)
    assert len(command.alive()) >= 4 + 4, "driver, learner, two samplers, and a child of each environment"
    command.process.kill()
    command.process.wait()
    command.nothing_left(15)
    resume_works(start, run, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("victim", ["learner", "sampler 1"])
def test_a_killed_role_ends_the_run_with_one_line(start: Start, tmp_path: Path, runtime: str, victim: str) -> None:
    """And with what was saved: the run can be resumed."""
    run = tmp_path / "run"
    command = start(*train(runtime, "async", "--set", "checkpoint.every=64"))
    command.until(lambda: (run / "last").exists() and checkpoint.manifest(run / "last")["step"] > 0)
    has_torch = {
        pid: "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        for pid in command.alive()
        if pid != command.process.pid and b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    pid = max(pid for pid, torch in has_torch.items() if torch == (victim == "learner"))
    os.kill(pid, signal.SIGKILL)
    assert command.ended() == 1
    last = command.said.splitlines()[-1]
    how = {"process": "was killed by SIGKILL", "ray": "died: its process ended unexpectedly"}
    assert last.startswith(f"raynforce: {victim} {how[runtime]}"), command.said
    command.nothing_left(5)
    assert events(run)[-1]["event"] == "failed"
    resume_works(start, run, runtime)


# -- start-up -----------------------------------------------------------------------------------------------


def ends_cleanly(start: Start, runtime: str, how: str, moment: float) -> None:
    command = start(*train(runtime, "async"), terminal=how == "terminal")
    deadline = time.monotonic() + moment
    while time.monotonic() < deadline:
        command.read()
        time.sleep(0.001)
    command.send(how)
    code = command.ended()
    number = SIGNALS[how] - 128
    # Before our first line runs, Python and the kernel answer: a shell shows the same code for both.
    assert code in (SIGNALS[how], -number), (moment, code, command.said)
    if code > 0:
        assert "Traceback" not in command.said, (moment, command.said)
    command.nothing_left(5)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("how", "moment"), [("SIGINT", 0.5), ("SIGTERM", 0.9), ("terminal", 1.3)])
def test_a_signal_while_starting(start: Start, runtime: str, how: str, moment: float) -> None:
    ends_cleanly(start, runtime, how, moment)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("how", SIGNALS)
def test_a_signal_at_any_moment_of_the_start(start: Start, tmp_path: Path, runtime: str, how: str) -> None:
    source = random.Random(how)
    for _ in range(25):
        ends_cleanly(start, runtime, how, source.uniform(0.05, 2.0))
        if (run := tmp_path / "run").exists():
            run.rename(tmp_path / f"run-{time.monotonic()}")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_kill_9_at_any_moment_of_the_start(start: Start, tmp_path: Path, runtime: str) -> None:
    source = random.Random(0)
    for _ in range(25):
        command = start(*train(runtime, "async"))
        time.sleep(source.uniform(0.05, 2.0))
        command.process.kill()
        command.process.wait()
        command.nothing_left(15)
        if (run := tmp_path / "run").exists():
            run.rename(tmp_path / f"run-{time.monotonic()}")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_signals_while_resuming_do_no_harm(start: Start, tmp_path: Path, runtime: str) -> None:
    run, source = tmp_path / "run", random.Random(1)
    command = start(*train(runtime, "async"))
    command.until(trains(run))
    command.send("SIGTERM")
    assert command.ended() == 143, command.said
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) * 3:
        before = checkpoint.manifest(run / "last")["step"]
        resumed = start("resume", "run")
        time.sleep(source.uniform(0.3, 3.0))
        resumed.process.send_signal(number)
        assert resumed.ended() in (128 + number, -number), resumed.said
        resumed.nothing_left(15)
        assert checkpoint.manifest(run / "last")["step"] >= before
    resume_works(start, run, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_terminal_that_is_closed_leaves_nothing(start: Start, tmp_path: Path, runtime: str) -> None:
    """An ssh connection that breaks: SIGHUP, and nowhere to print to."""
    command = start(*train(runtime, "async", "--set", "checkpoint.every=64"), terminal=True)
    command.until(trains(tmp_path / "run"))
    assert command.master is not None
    os.close(command.master)
    command.master = None
    command.process.wait(DEADLINE)
    command.nothing_left(15)
    resume_works(start, tmp_path / "run", runtime)


# -- the request itself -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_end_that_got_lost_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in `__del__`, and a signal may come just there."""
    monkeypatch.setattr(signals, "AGAIN", 0.05, raising=False)

    def ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    class Swallows:
        def __del__(self) -> None:
            ctrl_c()

    request = signals.StopRequest(lambda: None)
    with request.watching(at_once=True):
        Swallows()
        ctrl_c()  # too soon: everything is being ended
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
