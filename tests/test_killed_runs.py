"""Runs that are killed with `kill -9` at any moment and resumed end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rays import Head
from tensorboard_files import points

SMALL = {"eval.every": 500, "eval.episodes": 2, "eval.final_episodes": 0, "log_every": 96, "checkpoint.every": 300}
SMALL |= {"sampling.samplers": 2, "sampling.envs": 3, "sampling.fragment": 16, "network.hidden": "[16]"}
ALGOS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ppo": ("Pendulum-v1", 12_000, {"network.normalize_obs": "true", "algorithm.minibatch_size": 32}),
    "dqn": ("CartPole-v1", 9_600, {"algorithm.learning_starts": 100, "algorithm.buffer_size": 3_000}),
}
MOMENTS = 10  # for each topology
slow = pytest.mark.slow


def command(algo: str, out: Path, runtime: str, topology: str, *more: str) -> list[str]:
    env, steps, settings = ALGOS[algo]
    words = ["train", algo, env, "--steps", str(steps), "--seed", "5", "--no-preset", "--out", str(out)]
    words += ["--runtime", runtime, "--topology", topology, *more, "--quiet", "--json"]
    for name, value in {**SMALL, **settings}.items():
        words += ["--set", f"{name}={value}"]
    return words


def start(words: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("a") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "raynforce", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
        )


def finish(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, log.read_text()
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


@cache
def quiet(base: Path, algo: str, topology: str) -> tuple[Path, dict[str, Any]]:
    """The run that nobody kills, in one process."""
    out, log = base / f"{algo}-{topology}", base / f"{algo}-{topology}.log"
    return out, finish(start(command(algo, out, "inline", topology), {}, log), log)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[dict[str, Any]]:
    """What was measured in training, but for times and health."""
    skipped = ("time", "health", "charts/SPS", "replay/mb", "eval", "disk")
    found = [{k: v for k, v in line.items() if not k.startswith(skipped)} for line in lines(run)]
    return [line for line in found if len(line) > 1]


def evaluated(run: Path) -> Counter[int]:
    return Counter(line["step"] for line in lines(run) if "eval/return" in line)


CI = {("dqn", "process", "sync"): 1}
CELLS = [(a, r, t) for a in ALGOS for r in ("inline", "process", "ray") for t in ("sync", "overlap")]


@pytest.mark.parametrize(
    ("algo", "runtime", "topology", "moments"),
    [
        *(pytest.param(*cell, count, id="-".join(cell)) for cell, count in CI.items()),
        *(pytest.param(*cell, MOMENTS, id="-".join([*cell, "all"]), marks=slow) for cell in CELLS),
    ],
)
def test_a_run_killed_at_any_moment_and_resumed_is_the_run_that_was_not(
    algo: str, runtime: str, topology: str, moments: int, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where, environment = [], {}
    if runtime == "ray":
        head: Head = request.getfixturevalue("head")
        where = ["--address", head.address]
        environment = {"HOME": str(head.folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token}
    expected_run, expected = quiet(base, algo, topology)
    chance = random.Random(f"{algo} {runtime} {topology}")
    for moment in range(moments):
        out, log = tmp_path / f"run{moment}", tmp_path / f"log{moment}"
        process = start(command(algo, out, runtime, topology, *where), environment, log)
        _kill_at(process, out, chance, log)
        again = ["resume", str(out), *where, "--quiet", "--json"]
        if not (out / "config.yaml").exists():  # killed before the run had begun
            again = command(algo, out, runtime, topology, *where)
        result = finish(start(again, environment, log), log)
        names = ("weights_sha256", "steps", "episodes", "updates", "return_mean", "lost_steps")
        assert {n: result[n] for n in names} == {n: expected[n] for n in names}, f"moment {moment}: {log.read_text()}"
        assert learned(out) == learned(expected_run), moment
        assert set(evaluated(out).values()) <= {1}
        if runtime == "inline":
            assert evaluated(out) == evaluated(expected_run)
        assert Counter((step, tag) for step, tag, _ in points(out / "tensorboard")) == Counter(
            (line["step"], tag) for line in lines(out) for tag in line if "/" in tag
        )
        assert result["abandoned_episodes"] == 0


def _kill_at(process: subprocess.Popen[str], out: Path, chance: random.Random, log: Path) -> None:
    """Kill it while it starts, one time in five, or else when the run has got to some line of its metrics."""
    if chance.random() < 0.2:
        time.sleep(chance.uniform(0.0, 4.0))
    else:
        wanted = chance.randrange(1, 60)
        while process.poll() is None:
            if (out / "metrics.jsonl").exists() and len(lines_so_far(out)) >= wanted:
                break
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0), log.read_text()


def lines_so_far(out: Path) -> list[bytes]:
    return (out / "metrics.jsonl").read_bytes().splitlines()
