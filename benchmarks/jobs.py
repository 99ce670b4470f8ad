"""What a job costs: submitting beside `ray job submit` of an empty script, and training beside the same command here.

A head with dashboard and token is started once. `raynforce submit --detach` and `ray job submit --no-wait` take turns:
from the command to the end of the process, after one turn that is not counted and that uploads the package. Then
CartPole is trained for so many seconds as a job and by the same command on this machine, in turns; each gives its own
steps per second, without start-up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import ROOT, Table, command, ratio, row, take_turns

SUBMIT_BAR, SPEED_BAR = 3.0, 0.95  # seconds more than Ray's own; of the speed here
TOKEN = "facade" * 8
SPEED = 20_000  # steps per second, roughly: how many make up the seconds that were asked for
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
RAYNFORCE = [sys.executable, "-m", "raynforce"]


def measure(repeats: int = 5, seconds: int = 60, trainings: int = 3) -> list[Table]:
    """Submit, then train."""
    numbers = count()
    with _head() as environment:
        ours = partial(_submit, environment, numbers)
        rays = partial(_wall, [*RAY, "job", "submit", "--no-wait", "--", "true"], environment)
        take_turns(1, ours, rays)
        mine, theirs = take_turns(repeats, ours, rays, label="submit")
        more = [a - b for a, b in zip(mine, theirs, strict=True)]
        bar = f"bar: at most {SUBMIT_BAR:g} s, {'met' if sorted(more)[len(more) // 2] <= SUBMIT_BAR else 'missed'}"
        rows = [row("raynforce submit --detach", "s", mine), row("ray job submit, an empty script", "s", theirs)]
        tables = [Table(f"Submitting, {repeats} turns each", [*rows, row("more than Ray's", "s", more, bar)])]
        sides = [partial(_train, environment, numbers, seconds * SPEED, job) for job in (True, False)]
        job, here = take_turns(trainings, *sides, label="training")
    rows = [row("as a job", "steps/s", job), row("by the same command here", "steps/s", here)]
    rows.append(ratio("job / here", job, here, bar=("at least", SPEED_BAR)))
    return [*tables, Table(f"CartPole for about {seconds} s, {trainings} turns each", rows)]


def _submit(environment: dict[str, str], numbers: Iterator[int]) -> float:
    runs = f"{environment['HOME']}/runs"
    train = ["train", "ppo", "CartPole-v1", "--steps", "1", "--seed", str(next(numbers))]
    how = ["--runs", runs, "--python", sys.executable, "--detach"]
    seconds = _wall([*RAYNFORCE, "submit", *how, *train], environment)
    _idle(environment)
    return seconds


def _idle(environment: dict[str, str]) -> None:
    """Wait until no job is left, which would slow down what is measured next."""
    while True:
        listed = json.loads(_run([*RAYNFORCE, "jobs", "--json"], environment).splitlines()[-1])["jobs"]
        if not any(job["status"] in ("pending", "running") for job in listed):
            return
        time.sleep(0.5)


def _train(environment: dict[str, str], numbers: Iterator[int], steps: int, job: bool) -> float:
    runs, number = f"{environment['HOME']}/runs", next(numbers)
    train = ["train", "ppo", "CartPole-v1", "--steps", str(steps), "--json"]
    if job:
        submit = ["submit", "--runs", runs, "--id", f"train-{number}", "--python", sys.executable]
        found = json.loads(_run([*RAYNFORCE, *submit, *train], environment).splitlines()[-1])["result"]
    else:
        printed = _run([*RAYNFORCE, *train, "--out", f"{runs}/train-{number}"], environment)
        found = json.loads(printed.splitlines()[-1])
    return float(found["steps_per_second"])


def _wall(words: list[str], environment: dict[str, str]) -> float:
    began = time.monotonic()
    _run(words, environment)
    return time.monotonic() - began


def _run(words: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(words, cwd=environment["HOME"], env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr or done.stdout}")
    return done.stdout


@contextmanager
def _head() -> Iterator[dict[str, str]]:
    """A cluster of one node with a home of its own; gives the environment of a shell that knows it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rnb-", dir="/tmp", ignore_cleanup_errors=True)))
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        dashboard, agent, client = (one.getsockname()[1] for one in sockets)
        for one in sockets:
            one.close()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"HOME": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        environment |= {"PYTHONPATH": str(ROOT), "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        words = [
            "start",
            "--head",
            "--block",
            "--port=0",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
        ]
        words += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
        words += [f"--temp-dir={folder / 'r'}", "--object-store-memory=100000000", "--disable-usage-stats"]
        log = folder / "start.log"
        with log.open("w") as output:
            head = subprocess.Popen([*RAY, *words], cwd=folder, env=environment, stdout=output, stderr=output)
        stack.callback(head.wait, 60)
        stack.callback(head.send_signal, signal.SIGTERM)
        until = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            if head.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"Ray did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield environment


if __name__ == "__main__":
    command(measure, __doc__ or "")
