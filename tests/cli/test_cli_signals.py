"""The command as a process: signals end it with a checkpoint, pipes that nobody reads do no harm."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import KEYS, PLAIN, TINY, Answer
from marks import slowly
from running import events

import raynforce
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory

PATH = [str(Path(raynforce.__file__).parents[1]), str(Path(__file__).parent)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # few people set it, and it changes what a broken pipe does
ENDLESS = ["train", "ppo", "CartPole-v1", "--steps", "1e9", "--envs", "2", "--no-preset", "--set", "log_every=100"]
DEADLINE = 60.0

Cli = Callable[..., Answer]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command in a directory of its own; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(*words: str, **how: Any) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT} | how
        command = [sys.executable, "-m", "raynforce", *words]
        processes.append(subprocess.Popen(command, cwd=tmp_path, text=True, **streams))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> Answer:
    out, err = process.communicate(timeout=DEADLINE)
    return Answer(process.returncode, out or "", err or "")


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, ended(process)
        time.sleep(0.01)


def trains(run: Path) -> Callable[[], bool]:
    """Whether the first line of metrics is there: rounds of learning follow each other."""
    return lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_resume_goes_on(
    cli: Cli, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    answer = cli(*interrupted(tmp_path, number), "--out", "run", "--json")
    assert answer.code == code
    assert "Traceback" not in answer.err
    assert answer.out.count("\n") == 1
    result = answer.json
    assert list(result)[: len(KEYS)] == KEYS
    assert result["stopped"] == number.name
    assert checkpoint.manifest(run / "last")["step"] == result["steps"] > 0
    told = [(e["event"], e.get("reason")) for e in events(run)]
    assert told == [("started", None), ("stopped", number.name), ("result", None)]

    more = result["steps"] + 300
    resumed = cli("resume", "run", "--steps", str(more), "--json")
    assert resumed.code == 0, resumed
    assert more <= resumed.json["steps"] < more + 2 * 128
    assert resumed.json["updates"] > result["updates"]
    assert resumed.json["episodes"] > result["episodes"]


def interrupted(where: Path, number: signal.Signals) -> list[str]:
    """A command that is sent a signal in the middle of a round."""
    (where / "signal").write_text(str(int(number)))
    return ["train", "ppo", "cli_envs:Interrupting", *TINY, "--steps", "1e9"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *slowly((signal.SIGTERM, 143))])
def test_the_second_signal_ends_at_once(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The environment hangs, so the round never ends: only the second one helps."""
    (tmp_path / "hang.py").write_text(
        "import time, pathlib, cli_envs\n"
        "class Hang(cli_envs.Plain):\n"
        "    def step(self, action):\n"
        "        pathlib.Path('hangs').touch()\n"
        "        time.sleep(1000)\n"
    )
    process = start("train", "ppo", "hang:Hang", *TINY, "--out", "run")
    until((tmp_path / "hangs").exists, process)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(number)
    answer = ended(process)
    assert (answer.code, answer.out, answer.err) == (code, "run\n", "")


def fullest_pipe(spare: int) -> tuple[int, int]:
    """A pipe whose reader is asleep, with room for a few bytes more."""
    read, write = os.pipe()
    os.write(write, b"." * (fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) - spare))
    return read, write


def test_ctrl_c_while_the_terminal_is_slow_still_saves(start: Start, tmp_path: Path) -> None:
    """`raynforce train … | less`, not scrolled: the progress line waits for room when the signal comes."""
    read, write = fullest_pipe(spare=100)  # the title fits, the first line of progress does not
    try:
        process = start(*ENDLESS, "--out", "run", stdout=write)
        os.close(write)
        until(trains(tmp_path / "run"), process)
        until(lambda: "pipe" in Path(f"/proc/{process.pid}/wchan").read_text(), process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        os.set_blocking(read, False)
        until_read = time.monotonic() + DEADLINE
        while process.poll() is None and time.monotonic() < until_read:
            try:
                os.read(read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        answer = ended(process)
    finally:
        os.close(read)
    assert (answer.code, answer.err) == (130, "")
    checkpoint.load(tmp_path / "run" / "last")


def test_what_to_type_after_a_signal_finishes_the_run(cli: Cli, tmp_path: Path) -> None:
    loud = [word for word in interrupted(tmp_path, signal.SIGINT) if word != "--quiet"]
    answer = cli(*loud, "--out", "run")
    (line,) = (line for line in answer.out.splitlines() if " resume run" in line)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["steps"] == 10**9
    assert "--steps" not in line or int(line.split("--steps")[1]) >= 10**9


def test_a_run_in_use_is_not_resumed_by_another_process(start: Start, cli: Cli, run: Path) -> None:
    with RunDirectory(run).locked():
        ended(start("resume", "run")).refused(2, "run", "in use")


def test_a_pipe_that_closes_early_does_not_end_the_training(start: Start, tmp_path: Path) -> None:
    """`raynforce train … | head -1`."""
    loud = [word for word in TINY if word != "--quiet"]
    process = start("train", "ppo", PLAIN, *loud, "--steps", "500", "--out", "run")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ppo on ")
    process.stdout.close()
    assert process.wait(DEADLINE) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert checkpoint.manifest(tmp_path / "run" / "last")["step"] >= 500


@pytest.mark.parametrize("words", [["train", "ppo", "CartPole-v1", "--print-config"], ["--help"]])
def test_output_that_nobody_reads_is_no_error(start: Start, words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        answer = ended(start(*words, stdout=write))
    finally:
        os.close(write)
    assert answer.err == ""
    assert answer.code in (0, 141)


def test_no_stdout_at_all_does_no_harm(start: Start, tmp_path: Path) -> None:
    """`raynforce train … >&-`, as some daemons start their children."""
    loud = [word for word in TINY if word != "--quiet"]
    answer = ended(start("train", "ppo", PLAIN, *loud, "--out", "run", stdout=None, preexec_fn=lambda: os.close(1)))
    assert (answer.code, answer.err) == (0, "")
    assert (tmp_path / "run" / "last").is_dir()


def test_help_on_a_terminal_without_unicode(start: Start) -> None:
    answer = ended(start("train", "--help", env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}))
    assert (answer.code, answer.err) == (0, "")
