"""Disks that fail in the middle of a run: training goes on, the last good checkpoint stays, nothing is missing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import Disk
from marks import slowly
from running import events, metrics, without

import raynforce
from raynforce.driver import saving
from raynforce.errors import RaynforceError
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory

SETTINGS: dict[str, Any] = {"eval.every": 0, "eval.episodes": 2, "eval.final_episodes": 0, "checkpoint.every": 640}
SETTINGS |= {"log_every": 64, "sampling.envs": 2, "sampling.fragment": 32, "network.hidden": [8], "preset": "none"}
STEPS, FAILS, WORKS = 6400, 1500, 4500


class Trouble(raynforce.Callback):
    """Something happens to the disk at one step, and is mended at another."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None] | None) -> None:
        self.begin, self.end = begin, end
        self.began = self.ended = False
        self.newest = -1

    def on_round(self, status: raynforce.Status) -> None:
        if not self.began and status.steps >= FAILS:
            self.began = True
            self.begin()
        if self.end is not None and not self.ended and status.steps >= WORKS:
            self.ended = True
            time.sleep(0.3)  # so that an attempt is due
            self.end()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "BACKOFF", (0.05, 0.1))
    monkeypatch.setattr(saving, "LAST_SECONDS", 3.0)


def train(out: Path, *callbacks: raynforce.Callback, runtime: str = "inline") -> raynforce.Run:
    return raynforce.train(
        "CartPole-v1", "ppo", steps=STEPS, seed=2, out=out, settings=SETTINGS, progress="quiet",
        runtime=runtime, topology="sync", callbacks=callbacks,
    )  # fmt: skip


@pytest.mark.parametrize("runtime", ["inline", *slowly("process")])
def test_a_disk_that_is_full_for_a_while_changes_nothing(runtime: str, disk: Disk, tmp_path: Path) -> None:
    quiet = train(tmp_path / "quiet")
    trouble = Trouble(disk.fill, disk.free)
    run = train(disk.path / "run", trouble, runtime=runtime)
    assert trouble.ended
    assert run.result.weights_sha256 == quiet.result.weights_sha256
    assert checkpoint.manifest(run.path / "last")["step"] == run.result.steps
    told = events(run.path, "storage")
    assert told[0]["state"] == "failed"
    assert told[-1]["state"] == "works again"
    assert "No space left" in told[0]["cause"]
    skipped = ("time", "charts/SPS", "disk", "health")
    assert without(metrics(run.path), *skipped) == without(metrics(quiet.path), *skipped)


ORDINARY = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]  # root who minds permissions


@pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root may write anywhere")
def test_a_directory_that_becomes_read_only_in_mid_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "ppo", "CartPole-v1", "--steps", "10000000", "--out", str(run), "--runtime", "inline"]
    for name, value in (SETTINGS | {"network.hidden": "[8]", "checkpoint.seconds": 0.2}).items():
        words += ["--set", f"{name}={value}"]
    command = [*(ORDINARY if os.getuid() == 0 else []), sys.executable, "-m", "raynforce", *words]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        _until(lambda: len(list((run / "checkpoints").glob("step_*"))) > 1, process, log)
        for path in (run, run / "checkpoints"):
            path.chmod(0o555)
        _until(lambda: "ALARM: cannot write checkpoint" in log.read_text(), process, log)
        assert "Permission denied" in " ".join(log.read_text().split())  # lines are wrapped
        kept = RunDirectory.open(run).load_newest()
        assert kept is not None
        assert kept.notes == []
        for path in (run, run / "checkpoints"):
            path.chmod(0o755)
        _until(lambda: "the storage works again" in log.read_text(), process, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert checkpoint.manifest(run / "last")["step"] > kept.manifest["step"]
    finally:
        process.kill()
        process.wait()


def _until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    while not true():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def test_a_disk_that_stays_full_ends_the_run_with_the_cause_and_leaves_the_last_good_checkpoint(disk: Disk) -> None:
    trouble = Trouble(disk.fill, None)
    began = time.monotonic()
    with pytest.raises(RaynforceError, match=r"the last checkpoint could not be written \(.*No space left"):
        train(disk.path / "run", trouble)
    assert time.monotonic() - began < 60
    loaded = RunDirectory.open(disk.path / "run").load_newest()
    assert loaded is not None
    assert 640 <= loaded.manifest["step"] <= FAILS
    assert loaded.notes == []
    disk.free()
    assert raynforce.resume(disk.path / "run", progress="quiet").result.steps >= STEPS


def test_storage_that_is_slow_does_not_hold_training_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = train(tmp_path / "quiet")
    save = RunDirectory.save

    def slowly(self: RunDirectory, *args: Any) -> Any:
        if args[0]:
            time.sleep(2.0)
        return save(self, *args)

    monkeypatch.setattr(RunDirectory, "save", slowly)
    run = train(tmp_path / "run")
    pauses = [line["disk/checkpoint_pause"] for line in metrics(run.path) if "losses/policy_loss" in line]
    assert max(pauses) < 1.8
    assert run.result.weights_sha256 == quiet.result.weights_sha256
    assert checkpoint.manifest(run.path / "last")["step"] == run.result.steps


def test_the_best_policy_is_not_forgotten_when_it_alone_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_best, attempts = RunDirectory.save_best, iter(range(10))

    def failing(self: RunDirectory, *what: Any) -> Any:
        if next(attempts) < 2:  # when it was evaluated, and again with the last checkpoint
            raise RaynforceError("cannot write it: No space left on device")
        return save_best(self, *what)

    monkeypatch.setattr(RunDirectory, "save_best", failing)
    settings = SETTINGS | {"checkpoint.every": 0}
    raynforce.train("CartPole-v1", "ppo", steps=128, out=tmp_path / "run", settings=settings, progress="quiet")
    score, _ = RunDirectory(tmp_path / "run").load_best()
    assert score == checkpoint.load(tmp_path / "run" / "last")["run"]["best_eval"]


def test_after_a_resume_the_best_policy_is_the_one_on_the_disk(tmp_path: Path) -> None:
    """It could not be written when a better one was found: what evaluates better than the disk's is the best then."""
    settings = SETTINGS | {"checkpoint.every": 0}
    where: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    raynforce.train("CartPole-v1", "ppo", steps=128, out=tmp_path / "run", settings=settings, **where)
    run = RunDirectory(tmp_path / "run")
    _, policy = run.load_best()
    run.save_best(64, policy, 1.0)
    seen: list[float | None] = []
    raynforce.resume(run.path, steps=256, progress="quiet", callbacks=[lambda status: seen.append(status.best_eval)])
    assert seen[0] == 1.0
    assert run.load_best()[0] > 1.0
