"""What breaks around a run (environments, disks, checkpoints) is one clear line, and nothing is overwritten or lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import cli_envs
import pytest
from cli_helpers import PLAIN, SICK, TINY, Answer, contents
from disks import Disk, fail_to_write_config

import raynforce
from raynforce.driver import saving
from raynforce.runs import checkpoint

Cli = Callable[..., Answer]


# -- environments that break ------------------------------------------------------------------------------

FAULTS = {
    "reset raises": "reset raised RuntimeError: no licence",
    "step raises": "step raised RuntimeError: no licence",
    "nan obs": "obs = nan",
    "nan reward": "reward = nan",
    "inf reward": "reward = inf",
    "text reward": "the reward is '1'",
    "shape": "has shape (2,); expected (1,)",
    "none": "is a NoneType",
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, before the reward is looked at
@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_that_breaks_in_training(cli: Cli, fault: str) -> None:
    cli("train", "ppo", PLAIN, *TINY, "--set", f"env_args.fault={fault}").refused(1, PLAIN, FAULTS[fault])


def test_what_was_saved_can_be_continued_is_said_where_something_was_trained(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in TINY if word != "--quiet"]
    answer = cli("train", "ppo", PLAIN, *words, "--set", "env_args.fault=step raises", "--out", "run")
    answer.refused(1, "no licence")
    assert "can be continued" not in answer.out

    def fail(status: raynforce.Status) -> None:
        raise RuntimeError("enough")

    small = {"sampling.envs": 2, "sampling.fragment": 16}
    with pytest.raises(RuntimeError, match="enough"):
        raynforce.train(PLAIN, steps=64, settings=small, out=tmp_path / "second", callbacks=[fail], progress="plain")
    assert "can be continued" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_environment_that_exits_in_training(cli: Cli, where: str) -> None:
    cli("train", "ppo", PLAIN, *TINY, "--set", f"env_args.fault={where} exits").refused(1, PLAIN, "SystemExit")


@pytest.mark.parametrize("fault", ["close raises", "close exits"])
def test_an_environment_that_cannot_be_closed_costs_nothing(cli: Cli, fault: str) -> None:
    assert cli("train", "ppo", PLAIN, *TINY, "--set", f"env_args.fault={fault}", "--json").json["steps"] == 64


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "fault",
    ["step raises", "shape", "nan reward", "inf reward", "nan obs"],
)
def test_an_environment_that_breaks_in_evaluation_alone_costs_the_evaluation_alone(cli: Cli, fault: str) -> None:
    words = ["train", "ppo", "cli_envs:SickInEvaluation", *[word for word in TINY if word != "--quiet"]]
    answer = cli(*words, "--set", "eval.every=32", "--json", "--set", f"env_args.fault={fault}")
    assert answer.code == 0
    assert answer.json["steps"] == 64
    assert (answer.json["eval_return"], answer.json["evaluations"]) == (None, 0)
    assert "the evaluation of step 32 is given up: env 'cli_envs:SickInEvaluation'" in answer.err


@pytest.fixture
def sick_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A run whose environment was well until now."""

    def make(fault: str) -> Path:
        assert cli("train", "ppo", SICK, *TINY, "--set", f"env_args.fault={fault}", "--out", "run").code == 0
        monkeypatch.setattr(cli_envs, "sick", True)
        return tmp_path / "run"

    return make


@pytest.mark.parametrize("fault", ["step raises", "shape", "nan reward"])
def test_an_environment_that_breaks_in_eval(cli: Cli, sick_run: Callable[[str], Path], fault: str) -> None:
    sick_run(fault)
    for words in (["eval", "run"], ["eval", "run", "--json"]):
        cli(*words).refused(1, SICK)


@pytest.mark.parametrize("fault", ["step raises", "nan reward", "shape"])
def test_an_environment_that_breaks_after_a_resume_leaves_the_checkpoints(
    cli: Cli, sick_run: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = sick_run(fault)
    before = contents(run / "checkpoints")
    cli("resume", "run", "--steps", "128", "--quiet").refused(1, SICK, FAULTS[fault])
    assert contents(run / "checkpoints") == before
    monkeypatch.setattr(cli_envs, "sick", False)  # mended
    assert cli("resume", "run", "--steps", "128", "--quiet", "--json").json["steps"] == 128


def test_an_environment_that_can_no_longer_be_made(cli: Cli, sick_run: Callable[[str], Path]) -> None:
    run = sick_run("make raises")
    before = contents(run)
    cli("resume", "run", "--steps", "128").refused(2, SICK, "no licence")
    cli("eval", "run").refused(2, SICK, "no licence")
    assert contents(run) == before


# -- output directories -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "config.yaml", ".hidden"])
def test_a_directory_in_use_is_refused_and_untouched(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("precious")
    cli("train", "ppo", PLAIN, *TINY, "--out", "mine").refused(2, "mine exists already", "--out")
    assert contents(tmp_path) == {"mine": "directory", f"mine/{name}": b"precious"}


def test_training_into_a_run_points_to_resume(cli: Cli, run: Path) -> None:
    before = contents(run)
    cli("train", "ppo", PLAIN, *TINY, "--out", "run").refused(2, "raynforce resume run")
    assert contents(run) == before


def test_a_file_in_the_place_of_a_directory(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    cli("train", "ppo", PLAIN, *TINY, "--out", "file").refused(2, "file exists already")
    cli("train", "ppo", PLAIN, *TINY, "--out", "file/below").refused(2, "file/below", "Not a directory")
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null", "/dev/null/x", "x" * 300, ".", "/"])
def test_places_where_no_run_can_be(cli: Cli, tmp_path: Path, out: str) -> None:
    (tmp_path / "precious").write_text("")
    cli("train", "ppo", PLAIN, *TINY, "--out", out).refused(2, "output directory", out)
    assert os.listdir(tmp_path) == ["precious"]


def test_a_disk_that_is_full_before_the_start(cli: Cli, disk: Disk) -> None:
    disk.fill()
    cli("train", "ppo", PLAIN, *TINY, "--out", "disk/run").refused(2, "disk/run", "No space left on device")


def test_a_disk_that_cannot_be_written(cli: Cli, disk: Disk, run: Path) -> None:
    shutil.copytree(run, disk.path / "run", symlinks=True)
    (disk.path / "empty").mkdir()
    disk.remount("ro")
    for name in ("new", "empty"):
        cli("train", "ppo", PLAIN, *TINY, "--out", f"disk/{name}").refused(2, f"disk/{name}", "Read-only file system")
    cli("resume", "disk/run", "--steps", "128", "--quiet").refused(1, "disk/run", "Read-only file system")
    assert cli("eval", "disk/run", "--json").json["mean"] == 5.0


def test_a_disk_that_is_full_at_a_checkpoint_keeps_the_older_ones(
    cli: Cli, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint fits, the last does not; with room again the run goes on from the first."""
    monkeypatch.setattr(saving, "LAST_SECONDS", 1.0)
    words = ["train", "dqn", PLAIN, *TINY, "--steps", "40000", "--set", "log_every=1e6", "--set", "eval.every=0"]
    words += ["--set", "checkpoint.every=3000", "--set", "checkpoint.keep=100", "--set", "network.hidden=[64]"]
    words += ["--set", "algorithm.samples_per_insert=0.1"]
    answer = cli(*words, "--out", "disk/run")
    answer.refused(1, "last checkpoint could not be written", "No space left on device", after_faults=True)
    assert answer.err.startswith("ALARM: ")
    run = disk.path / "run"
    last = checkpoint.manifest(run / "last")["step"]
    checkpoint.load(run / "last")
    assert cli("eval", "disk/run", "--episodes", "2").code == 0
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk.path)], check=True)
    resumed = cli("resume", "disk/run", "--steps", str(last + 500), "--quiet", "--json").json
    assert last + 500 <= resumed["steps"] < last + 600


def test_a_disk_that_is_full_at_a_resume_keeps_the_run(cli: Cli, disk: Disk, run: Path) -> None:
    shutil.copytree(run, disk.path / "run", symlinks=True)
    disk.fill()
    before = {k: v for k, v in contents(disk.path / "run").items() if not k.startswith("tensorboard")}
    cli("resume", "disk/run", "--steps", "128", "--quiet").refused(1, "disk/run", "No space left on device")
    after = contents(disk.path / "run")
    assert {k: after[k] for k in before} == before
    disk.free()
    assert cli("resume", "disk/run", "--steps", "128", "--quiet", "--json").json["steps"] == 128


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # and the metrics are left open
def test_a_disk_that_fills_up_while_resume_writes_the_config(cli: Cli, run: Path) -> None:
    before = (run / "config.yaml").read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        fail_to_write_config(patch)
        answer = cli("resume", "run", "--steps", "128", "--quiet")
    assert (run / "config.yaml").read_bytes() == before
    answer.refused(1, "config.yaml", "No space left on device")


# -- checkpoints that are missing, torn or of another shape -------------------------------------------------


@pytest.mark.parametrize("words", [["eval"], ["resume"]])
def test_no_run_there(cli: Cli, run: Path, tmp_path: Path, words: list[str]) -> None:
    cli(*words, "runn").refused(2, "runn", "did you mean 'run'")
    cli(*words, "no/such/parent").refused(2, "no/such/parent")
    (tmp_path / "empty").mkdir()
    cli(*words, "empty").refused(2, "empty")
    cli(*words, "run/config.yaml").refused(2, "run/config.yaml")


def test_a_run_that_was_stopped_before_its_first_checkpoint(cli: Cli, run: Path) -> None:
    (run / "last").unlink()
    (run / "best").unlink()
    shutil.rmtree(run / "checkpoints")
    cli("eval", "run").refused(2, "no checkpoint")
    assert cli("resume", "run", "--quiet", "--json").json["steps"] == 64  # from its start


PARTS = ["learner", "policy", "run", "sampler_0"]


@pytest.mark.parametrize("name", ["manifest.json", *(f"{p}.{e}" for p in PARTS for e in ("json", "safetensors"))])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_torn_checkpoint_is_named_and_an_older_one_taken(cli: Cli, run: Path, name: str, damage: str) -> None:
    file = run / "last" / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[:-3])
    else:
        file.write_bytes(b"\x00" + data[1:])
    before = contents(run)
    if name.startswith(("policy", "manifest")):
        cli("eval", "run/last").refused(2, "run/last", "" if damage == "missing" else name)
    assert cli("eval", "run", "--episodes", "1").code == 0  # the best one is whole
    assert contents(run) == before
    resumed = cli("resume", "run", "--steps", "128")
    assert resumed.code == 0
    said = next(line for line in resumed.out.splitlines() if "skipped" in line)
    assert "step_000000000064 is torn" in said
    assert name in said
    assert "taken instead: run/checkpoints/step_000000000032, at step 32" in resumed.out
    assert checkpoint.manifest(run / "last")["step"] == 128


def test_torn_checkpoints_alone_are_named_and_the_run_untouched(cli: Cli, run: Path) -> None:
    for path in (run / "checkpoints").glob("step_*"):
        (path / "learner.safetensors").write_bytes(b"")
    before = contents(run)
    words = ("no checkpoint that can be used", "step_000000000032 is torn", "step_000000000064 is torn", "learner.safe")
    cli("resume", "run", "--steps", "128", "--quiet").refused(2, *words)
    assert contents(run) == before


def test_a_best_policy_that_is_gone_is_one_line_and_resume_finds_a_new_one(cli: Cli, run: Path) -> None:
    (run / "best" / "policy.json").unlink()
    cli("eval", "run").refused(2, "run/best", "policy.json")
    answer = cli("resume", "run", "--steps", "128")
    assert answer.code == 0
    assert "the next evaluation decides which policy is the best" in answer.out
    assert cli("eval", "run").out.startswith("run/best: ")
    (run / "best").unlink()
    assert cli("eval", "run").out.startswith("run/last: ")
    assert cli("resume", "run", "--steps", "192", "--quiet").code == 0
    assert cli("eval", "run").out.startswith("run/best: ")


def vouch(path: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint and let its manifest vouch for it."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(checkpoint.sealed(manifest)))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("run.json", b"{}"),
        ("learner.json", b"{}"),
        ("sampler_0.json", b"{}"),
        ("policy.json", b"{}"),
        ("policy.json", b'{"acting": 3, "version": {}}'),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(cli: Cli, run: Path, name: str, data: bytes) -> None:
    vouch(run / "last", name, data)
    before = contents(run)
    cli("resume", "run", "--steps", "128", "--quiet").refused(2)
    if name == "policy.json":
        cli("eval", "run/last").refused(2, "run/last", "policy")
    assert contents(run) == before


def test_a_policy_of_another_shape_is_refused(cli: Cli, run: Path) -> None:
    assert cli("train", "ppo", PLAIN, *TINY, "--set", "network.hidden=[8]", "--out", "small").code == 0
    other = (run.parent / "small" / "last" / "policy.safetensors").read_bytes()
    vouch(run / "last", "policy.safetensors", other)
    cli("eval", "run/last").refused(2, "another shape", "expected 8771", "found 59")


@pytest.mark.parametrize("text", ["", "][", "env: CartPole-v1\nzzz: 1\n", "- 1\n"])
def test_a_run_with_a_spoilt_config(cli: Cli, run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    before = contents(run)
    cli("resume", "run").refused(2)
    assert cli("eval", "run").code == 0  # the checkpoint holds all that evaluation needs
    assert contents(run) == before
