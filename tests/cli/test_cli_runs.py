"""`raynforce runs` and `raynforce show`, and the table of what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import PLAIN, TINY, Answer, contents

from raynforce import kernels
from raynforce.runs import checkpoint, lock
from raynforce.runs.directory import RunDirectory

Cli = Callable[..., Answer]


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A folder with a finished run, a stopped one, a killed one and a broken one."""
    folder = tmp_path / "runs"
    for name in ("finished-seed0-20260101-000000", "stopped", "deep/er/killed", "broken"):
        shutil.copytree(trained, folder / name, symlinks=True)
    (folder / "stopped" / "events.jsonl").write_text(
        '{"time": 1000.0, "event": "stopped", "reason": "SIGINT", "steps": 48}\n'
    )
    (folder / "deep/er/killed" / "events.jsonl").write_text('{"time": 1000.0, "event": "started", "steps": 0}\n')
    (folder / "broken" / "config.yaml").write_text("\x1b[31m: [")
    return folder


# -- runs -------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_what_became_of_them(cli: Cli, runs: Path) -> None:
    answer = cli("runs")
    head, *rows = answer.out.splitlines()
    assert (answer.code, answer.err) == (0, "")
    assert head.split() == ["run", "algo", "env", "status", "steps", "return", "best", "active", "size"]
    found = {row.split()[0]: row.split() for row in rows}
    assert found["finished-seed0-20260101-000000"][1:7] == [
        "ppo",
        "Sick",
        "finished",
        "64/64",
        "5.000",
        "5.000",
    ]
    assert found["stopped"][3:5] == ["stopped", "48/64"]
    assert found["deep/er/killed"][3] == "killed"
    assert found["broken"][3:5] == ["broken", "config"]
    assert rows[-1].startswith("stopped")  # in 1970: the newest are first
    assert "\x1b" not in answer.out


@pytest.mark.parametrize("columns", [200, 120, 100, 80, 60])
def test_the_list_fits_the_terminal_and_names_stay_whole(
    cli: Cli, runs: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ["a-very-long-name-" * 6 + "1", "a-very-long-name-" * 6 + "2"]
    shutil.move(runs / "stopped", runs / long[0])
    shutil.copytree(runs / "deep/er/killed", runs / long[1], symlinks=True)
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = cli("runs").out.splitlines()
    assert {"run", "status", "steps", "return"} <= set(rows[0].split())
    names = {row.split()[0] for row in rows}
    assert {"finished-seed0-20260101-000000", "deep/er/killed", "broken", *long} <= names
    assert max(len(row) for row in rows if row not in long) <= columns
    if columns <= 120:  # a name that no table has room for stands alone, above its row
        assert rows[rows.index(long[1]) + 1].split()[:1] in (["killed"], ["ppo"], ["Sick"])


def test_other_columns_give_way_to_names(cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ppo-CartPole-v1-seed0-20260101-000000"
    shutil.move(runs / "stopped", runs / name)
    monkeypatch.setenv("COLUMNS", "80")
    head, *rows = cli("runs").out.splitlines()
    assert head.split()[:5] == ["run", "env", "status", "steps", "return"]
    (row,) = [row for row in rows if row.startswith("ppo-CartPole")]
    assert row.split()[:3] == [name, "Sick", "stopped"]


def test_without_a_terminal_a_list_stays_below_120_columns(
    cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shutil.move(runs / "stopped", runs / ("x" * 150))
    rows = cli("runs").out.splitlines()
    assert "x" * 150 in rows
    assert max(len(row) for row in rows if "xxx" not in row) <= 119


def test_runs_as_json(cli: Cli, runs: Path) -> None:
    found = {run["name"]: run for run in cli("runs", str(runs), "--json").json["runs"]}
    run = found["finished-seed0-20260101-000000"]
    expected = {"status": "finished", "algo": "ppo", "env": "cli_envs:Sick", "seed": 0, "steps": 64, "total_steps": 64}
    assert {k: run[k] for k in expected} == expected
    assert (run["return_mean"], run["best_eval"], run["holder"]) == (5.0, 5.0, None)
    assert run["bytes"] == sum(f.stat().st_size for f in Path(run["run"]).rglob("*") if f.is_file() and _own(f))
    assert 0 <= run["age_seconds"] < 3600
    assert found["broken"]["status"] == "broken"
    assert "YAML" in found["broken"]["reason"]


def _own(file: Path) -> bool:
    return not {"last", "best"}.intersection(file.parts)


def test_a_folder_that_is_a_run_itself(cli: Cli, run: Path) -> None:
    _, row = cli("runs", "run").out.splitlines()
    assert row.split()[:4] == ["run", "ppo", "Sick", "finished"]


def test_no_runs_is_one_kind_line(cli: Cli, tmp_path: Path) -> None:
    answer = cli("runs")
    assert (answer.code, answer.out.count("\n"), "train ppo CartPole-v1" in answer.out) == (0, 1, True)
    assert cli("runs", "--json").json == {"folder": "runs", "runs": []}
    (tmp_path / "empty").mkdir()
    assert cli("runs", "empty").out.startswith("no runs in empty yet")
    cli("runs", "nowhere").refused(2, "nowhere does not exist")


def test_a_terminal_that_knows_few_characters(run: Path, tmp_path: Path) -> None:
    add_fault(run)
    run.rename(tmp_path / "r\udcffun–")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for words in (["runs", "."], ["show", "r\udcffun–"], ["doctor", "r\udcffun–"]):
        command = [sys.executable, "-m", "raynforce", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr, "un?" in done.stdout) == (0, "", True)


# -- show -------------------------------------------------------------------------------------------------


def shown(answer: Answer) -> dict[str, str]:
    """The lines by their labels."""
    assert answer.code == 0
    return {line[:12].strip(): line[12:] for line in answer.out.splitlines() if line[:12].strip()}


def test_what_is_in_a_run(cli: Cli, run: Path) -> None:
    answer = cli("show", "run")
    lines = shown(answer)
    assert answer.out.startswith("run  ppo on cli_envs:Sick, seed 0\n")
    assert lines["status"].startswith("finished ")
    assert lines["status"].endswith(": all steps are done")
    assert lines["runs on"] == "inline, sync, 1 sampler, 2 environments"
    assert lines["steps"] == "64 of 64 (100%)"
    assert lines["return"] == "5.000 over the last 100 episodes; best evaluation 5.000 at step 64"
    assert lines["faults"] == "none"
    assert lines["next"] == "resume goes on at step 64"
    assert " resume run --steps 128\n" in answer.out
    assert lines["last"].split()[0] == "64"
    assert lines["last"].endswith("all there")
    assert lines["best"].endswith("the policy alone, all there")
    assert "checkpoints/" in lines["files"]


def test_show_as_json(cli: Cli, run: Path) -> None:
    facts = cli("show", "run", "--json", "--verify").json
    assert (facts["status"], facts["steps"], facts["faults"], facts["verified"]) == ("finished", 64, 0, True)
    assert facts["next"]["step"] == 64
    last, *others = facts["checkpoints"]
    assert (last["step"], last["marks"], last["wrong"]) == (64, ["last"], [])
    assert set(last["parts"]) == {"policy", "learner", "run", "sampler_0"}
    assert len(others) == 2


def test_what_resume_would_do_after_a_kill(cli: Cli, run: Path) -> None:
    (run / "events.jsonl").write_text('{"time": 1000.0, "event": "started", "steps": 0}\n')
    (run / "last" / "learner.safetensors").write_bytes(b"")
    answer = cli("show", "run")
    lines = shown(answer)
    assert lines["status"].startswith("killed")
    assert lines["next"] == "resume goes on at step 32, because 1 newer one is torn"
    assert "torn: learner.safetensors is not what its manifest says: 0 bytes" in lines["last"]


def test_show_and_resume_agree_on_which_is_the_newest(cli: Cli, run: Path) -> None:
    state(run / "checkpoints" / "step_000000000032", number=9)  # of a run that went back, and on from there
    (run / "last").unlink()
    loaded = RunDirectory(run).load_newest()
    assert loaded is not None
    assert loaded.manifest["step"] == 32
    assert shown(cli("show", "run"))["next"] == "resume goes on at step 32"


def test_what_resume_would_do_after_ctrl_c_and_without_checkpoints(cli: Cli, run: Path) -> None:
    (run / "events.jsonl").write_text('{"time": 1000.0, "event": "stopped", "reason": "SIGINT", "steps": 64}\n')
    assert shown(cli("show", "run"))["status"].endswith(" days ago: Ctrl-C")
    for name in os.listdir(run / "checkpoints"):
        (run / "checkpoints" / name / "manifest.json").write_text("{")
    assert shown(cli("show", "run"))["next"].startswith("no checkpoint is whole")
    shutil.rmtree(run / "checkpoints")
    assert shown(cli("show", "run"))["next"] == "resume begins at step 0: there is no checkpoint"


@pytest.mark.parametrize(
    "config",
    ["env: 2020-01-01x\nseed: 2020-01-01\nsteps: .nan", f"env: a\nsteps: 1{'0' * 400}\nseed: nan\nalgo: [1]"],
)
def test_strange_files_are_no_harm(cli: Cli, run: Path, config: str) -> None:
    (run / "config.yaml").write_text(f"{config}\nstart_from: 2020-01-01\n")
    (run / "events.jsonl").write_text('{"time": 1e300, "event": "stopped", "steps": NaN}\n{"time": NaN, "event": "x"}')
    (run / "metrics.jsonl").write_text('{"step": 1e400, "time": NaN, "charts/episodic_return": Infinity}\n')
    for command in ("runs", "show"):
        assert cli(command, "run").code == 0
        assert cli(command, "run", "--json").json


def test_a_run_that_is_running(cli: Cli, run: Path) -> None:
    with lock.locked(run):
        lines = shown(cli("show", "run"))
        assert lines["status"].startswith("running")
        assert "refused" in lines["next"]


def add_fault(run: Path) -> None:
    fault = {"time": 1.0, "event": "fault", "role": "sampler 0", "kind": "died", "cause": "SIGKILL", "steps": 3}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(fault) + "\n")


def test_faults_lead_to_the_doctor(cli: Cli, run: Path) -> None:
    add_fault(run)
    assert "1; `" in shown(cli("show", "run"))["faults"]
    assert "doctor run` tells more" in shown(cli("show", "run"))["faults"]


def test_verify_finds_a_flipped_byte(cli: Cli, run: Path) -> None:
    file = run / "last" / "policy.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert cli("show", "run").code == 0
    answer = cli("show", "run", "--verify")
    assert answer.code == 1
    assert "torn: policy.safetensors is not what its manifest says: its hash is another" in answer.out
    answer = cli("show", "run/last", "--verify", "--json")
    assert (answer.code, len(answer.json["wrong"])) == (1, 1)


def test_a_checkpoint(cli: Cli, run: Path) -> None:
    lines = shown(cli("show", "run/best"))
    assert lines["step"].startswith("64, written ")
    assert lines["evaluation"] == "5.000"
    assert lines["files"] == "the policy alone, all there"
    assert lines["parts"].split()[0] == "policy"
    assert cli("show", "run/last", "--json").json["step"] == 64


def state(path: Path, **facts: object) -> None:
    """Put facts into a manifest."""
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(checkpoint.sealed({**json.loads(manifest.read_text()), **facts})))


def test_versions_and_segments_of_a_manifest(cli: Cli, run: Path) -> None:
    facts = {"number": 3, "raynforce": "9.1", "torch": "9.2", "python": "3.99", "host": "crow", "cpu": "Z80"}
    name = f"learner.0-9.{'0' * 16}.safetensors"
    facts |= {"segments": {name: {"size": 2000, "sha256": "0" * 64}}}
    state(run / "last", **facts)
    (run / "checkpoints" / "segments").mkdir(exist_ok=True)
    (run / "checkpoints" / "segments" / name).write_bytes(b"x" * 2000)
    lines = shown(cli("show", "run"))
    assert lines["last"].split()[1] == "3"
    assert lines["replay"] == "1 segment that they share, 2.0 kB"
    assert lines["written by"].startswith("raynforce 9.1, torch 9.2")
    assert lines["written by"].endswith(f"Python 3.99 on crow (Z80) with {kernels.kind().kernels} kernels")
    assert lines["last"].endswith("1 segment, all there")
    lines = shown(cli("show", "run/last"))
    assert (lines["replay"], lines["files"]) == ("1 segment, 2.0 kB", "1 segment, all there")


def test_show_of_what_is_none(cli: Cli, runs: Path, tmp_path: Path) -> None:
    cli("show", "stopped").refused(2, "did you mean runs/stopped?")
    cli("show", "nothing").refused(2, "there is no run at nothing")
    (tmp_path / "plain").mkdir()
    cli("show", "plain").refused(2, "plain is not a run directory")
    answer = cli("show", "runs/broken")
    assert answer.code == 0
    assert "broken" in shown(answer)["status"]


# -- what does not fit ------------------------------------------------------------------------------------


def test_resume_with_another_network_is_a_table_and_changes_nothing(cli: Cli, run: Path) -> None:
    before = contents(run)
    answer = cli("resume", "run", "--steps", "128", "--set", "network.hidden=[32,64]", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines()[:4] == [
        "raynforce: the checkpoint in run does not fit this config:",
        "  what               found in the checkpoint  expected here",
        "  network.hidden[0]  64                       32",
        "  policy.0.weight    [1, 64]                  [1, 32]",
    ]
    assert contents(run) == before


def test_train_from(cli: Cli, run: Path, tmp_path: Path) -> None:
    result = cli("train", "ppo", PLAIN, *TINY, "--from", "run", "--out", "new", "--json").json
    assert result["steps"] == 64
    assert f"start_from: {run}\n" in (tmp_path / "new" / "config.yaml").read_text()
    assert shown(cli("show", "new"))["began from"] == str(run)
    cli("train", "ppo", PLAIN, *TINY, "--from", "nowhere").refused(2, "no run or checkpoint at", "nowhere")
    cli("train", "ppo", PLAIN, *TINY, "--from", "").refused(2, "--from is empty")
