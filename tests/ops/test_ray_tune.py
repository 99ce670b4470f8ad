"""Searches for settings on Ray: to their end, through kill -9 and signals, with PBT and Optuna, in one's own Tuner."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from disks import Disk

import raynforce
from raynforce.ops.tuning.study import Study, Trial
from raynforce.runs.catalog import glance
from raynforce.runs.lock import Holder
from raynforce.runtimes.placing import cores
from raynforce.runtimes.ray.state import Process, workers

pytest.importorskip("pyarrow", reason="Ray Tune needs it")
ROOT = Path(raynforce.__file__).parents[1]
SEARCH = {"algorithm.learning_rate": "log(1e-4,1e-2)", "algorithm.epochs": "int(1,4)"}
SMALL = {"sampling.envs": 2, "sampling.fragment": 64, "eval.episodes": 2, "eval.envs": 2, "eval.final_episodes": 2}
HOW: dict[str, Any] = {"search": SEARCH, "settings": SMALL, "progress": "quiet", "cpus": 1}


def events(run: Path) -> Counter[str]:
    return Counter(json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines())


def test_every_trial_is_ordinary_runs_and_the_best_can_be_trained_again(shared_ray: None, tmp_path: Path) -> None:
    out = tmp_path / "t"
    tuned = raynforce.tune("CartPole-v1", steps=1024, trials=3, seeds=2, scheduler="random", out=out, **HOW)
    assert [trial.status for trial in tuned.trials] == ["done"] * 3
    assert not (out / ".tune").exists()
    for trial in tuned.trials:
        assert len(trial.runs) == 2
        for run in trial.runs:
            assert raynforce.load(out / run).act is not None
            assert events(out / run) == {"started": 1, "stopped": 1, "result": 1}
    best = tuned.best
    assert best is not None
    assert best.objective(tuned.plan) == max(trial.objective(tuned.plan) or -1 for trial in tuned.trials)
    again = raynforce.train("CartPole-v1", config=tuned.config, seed=1, out=tmp_path / "again", progress="quiet")
    assert again.config.algorithm.learning_rate == best.config["algorithm.learning_rate"]
    theirs = json.loads((out / best.runs[1] / "result.json").read_text())
    assert theirs["seed"] == 1
    # Only evaluations may differ, which are more in trials: that changes nothing of what is learned.
    assert again.result.weights_sha256 == theirs["weights_sha256"]

    study = Study.open(out)  # as after a kill in the midst of the last trial
    lost = study.trials[2].runs
    study.trials[2] = Trial(2, study.trials[2].config, "running")
    study.save()
    shutil.rmtree(out / lost[0])
    (out / lost[1] / "result.json").unlink()
    resumed = raynforce.tune(resume=out, progress="quiet")
    assert [trial.status for trial in resumed.trials] == ["done"] * 3
    assert resumed.trials[:2] == tuned.trials[:2]
    assert [events(out / run)["started"] for trial in resumed.trials for run in trial.runs] == [1] * 6


@pytest.mark.slow
def test_optuna_proposes_asha_stops_and_a_failure_says_why(shared_ray: None, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = raynforce.tune("CartPole-v1", steps=2048, trials=5, seeds=1, scheduler="optuna", out=tmp_path / "o", **HOW)
    assert len(found.trials) == 5
    assert all(trial.over for trial in found.trials)
    assert len({json.dumps(trial.config) for trial in found.trials}) == 5
    with pytest.raises(raynforce.RaynforceError, match=r"all trials failed; the first: .*boom"):
        raynforce.tune(Broken, steps=512, trials=2, seeds=1, out=tmp_path / "b", **HOW)
    assert {trial.status for trial in Study.open(tmp_path / "b").trials} == {"failed"}


class Broken:
    """Not an environment."""

    made = 0

    def __new__(cls) -> Any:
        import gymnasium

        cls.made += 1
        if os.environ.get("RAY_RAYLET_PID") or "ray" in sys.argv[0]:
            raise RuntimeError("boom")
        return gymnasium.make("CartPole-v1")


@pytest.mark.slow
def test_the_worst_of_a_population_go_on_from_the_best(shared_ray: None, tmp_path: Path) -> None:
    out = tmp_path / "p"
    how = {**HOW, "settings": {**SMALL, "eval.every": 100}}
    tuned = raynforce.tune("CartPole-v1", steps=1024, trials=4, seeds=1, scheduler="pbt", out=out, **how)
    assert [trial.status for trial in tuned.trials] == ["done"] * 4
    heirs = [trial for trial in tuned.trials if trial.history]
    assert heirs
    for trial in heirs:
        facts = trial.history[-1]
        assert int(facts["of"]) != trial.id
        assert trial.config == facts["settings"]
        run = out / trial.runs[0]
        assert events(run)["exploited"] >= 1
        settings = raynforce.load(run) and json.loads((run / "result.json").read_text())
        assert settings["steps"] >= 1024
        assert all(domain.clip(trial.config[key]) == trial.config[key] for key, domain in tuned.plan.search.items())


@pytest.mark.slow
def test_a_tuner_of_ones_own(shared_ray: None, tmp_path: Path) -> None:
    from ray import tune

    trainable = raynforce.trainable("CartPole-v1", steps=1024, settings=SMALL)
    tuner = tune.Tuner(
        trainable,
        param_space={"algorithm.learning_rate": tune.grid_search([1e-3, 1e-4])},
        tune_config=tune.TuneConfig(metric="return", mode="max"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="own", verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    assert len(results) == 2
    for result in results:
        assert result.metrics["done"]
        assert result.metrics["steps"] >= 1024


def start(*words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raynforce", "tune", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def trials(out: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads((out / "trials.json").read_text()))
    except FileNotFoundError:
        return []


def wait(process: subprocess.Popen[str], out: Path, ready: Any) -> None:
    until = time.monotonic() + 120
    while not ready(trials(out)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_trials_live_in_the_processes_that_ray_started_ahead(no_ray: None, tmp_path: Path) -> None:
    seen: set[Process] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for process in workers():
                with suppress(OSError):
                    own = "gent" in Path(f"/proc/{process.pid}/cmdline").read_text()  # an agent of Ray's
                    if process.began and not own:
                        seen.add(process)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        tuned = raynforce.tune("CartPole-v1", steps=256, trials=2, seeds=1, out=tmp_path / "t", **HOW)
    finally:
        over.set()
        watcher.join()
    assert all(trial.over for trial in tuned.trials)
    assert 1 <= len(seen) <= cores()


@pytest.mark.slow
def test_after_kill_9_no_finished_trial_is_repeated_and_none_is_lost(no_ray: None, tmp_path: Path) -> None:
    out = tmp_path / "k"
    words = ["ppo", "CartPole-v1", "--trials", "4", "--seeds", "1", "--steps", "4k", "--scheduler", "random"]
    words += ["--search", *(f"{key}={value}" for key, value in SEARCH.items())]
    words += ["--set", "eval.episodes=2", "--set", "eval.final_episodes=2", "--cpus", "1"]
    first = start(*words, "--out", str(out))
    try:

        def one_is_over(found: list[dict[str, Any]]) -> bool:
            states = Counter(trial["status"] for trial in found)
            return states["done"] >= 1 and states["done"] < 4

        wait(first, out, one_is_over)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    before = trials(out)
    finished = [trial for trial in before if trial["status"] == "done"]
    files = {run: (out / run / "result.json").stat().st_mtime_ns for trial in finished for run in trial["runs"]}
    again = start("--resume", str(out), "--json")
    said, errors = again.communicate(timeout=200)
    assert again.returncode == 0, errors
    facts = json.loads(said.splitlines()[-1])
    assert [trial["status"] for trial in facts["trials"]] == ["done"] * 4
    assert [trial["config"] for trial in facts["trials"]] == [trial["config"] for trial in before]
    assert {run: (out / run / "result.json").stat().st_mtime_ns for run in files} == files
    for trial in finished:
        assert facts["trials"][trial["id"]] == trial
        assert all(events(out / run)["started"] == 1 for run in trial["runs"])
    assert all(trial["steps"] >= 4000 for trial in facts["trials"])
    assert len(list(out.glob("trial_*"))) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_population_that_was_killed_goes_on_with_all_heirs(no_ray: None, tmp_path: Path) -> None:
    out = tmp_path / "p"
    words = ["ppo", "CartPole-v1", "--trials", "4", "--seeds", "1", "--steps", "20k", "--scheduler", "pbt"]
    words += ["--search", *(f"{key}={value}" for key, value in SEARCH.items()), "--cpus", "1"]
    words += ["--set", "eval.episodes=2", "--set", "eval.final_episodes=2", "--set", "eval.every=1000"]
    first = start(*words, "--out", str(out))
    try:
        wait(first, out, lambda found: sum(len(trial.get("history", ())) for trial in found) >= 2)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    before = trials(out)
    finished = {run: written(out / run) for trial in before if trial["status"] == "done" for run in trial["runs"]}
    again = start("--resume", str(out), "--json")
    said, errors = again.communicate(timeout=400)
    assert again.returncode == 0, errors
    found = json.loads(said.splitlines()[-1])["trials"]
    assert [(trial["id"], trial["status"]) for trial in found] == [(id, "done") for id in range(4)]
    assert {run: written(out / run) for run in finished} == finished
    for trial, had in zip(found, before, strict=True):
        history, earlier = trial.get("history", []), had.get("history", [])
        assert history[: len(earlier)] == earlier
        run = out / trial["runs"][0]
        assert len(history) == int(run.name.partition(".")[2] or 1) - 1
        config = raynforce.settings.read_yaml(str(run / "config.yaml"))  # type: ignore[attr-defined]
        assert {key: config["algorithm"][key.partition(".")[2]] for key in SEARCH} == trial["config"]
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps)
        assert steps[0] < 3000  # the whole history of those that it goes on from
        assert trial["steps"] >= 20_000
        for number in range(1, len(history) + 1):  # those that it went on from others instead of
            left = run.with_name("seed0" if number == 1 else f"seed0.{number}")
            assert glance(left).state == "stopped"
            assert f"goes on from trial {history[number - 1]['of']}" in glance(left).reason


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_on_a_full_disk_ends_with_a_line_and_goes_on_when_there_is_room(
    no_ray: None, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = disk.path / "t"
    words = ["ppo", "CartPole-v1", "--trials", "4", "--seeds", "1", "--steps", "3k", "--scheduler", "random"]
    words += ["--search", *(f"{key}={value}" for key, value in SEARCH.items()), "--cpus", "1"]
    words += ["--set", "eval.episodes=2", "--set", "eval.final_episodes=2"]
    process = start(*words, "--out", str(out))  # four such trials take more than one megabyte
    said, errors = process.communicate(timeout=400)
    assert process.returncode == 1, (said, errors)
    (line,) = [line for line in errors.splitlines() if line.startswith("raynforce: ")]
    assert "No space left on device" in line
    assert f"tune --resume {out}" in line
    assert "Traceback" not in errors
    before = trials(out)
    assert "failed" not in {trial["status"] for trial in before}
    disk.remount("size=16m")
    again = start("--resume", str(out), "--json")
    said, errors = again.communicate(timeout=400)
    assert again.returncode == 0, errors
    found = json.loads(said.splitlines()[-1])["trials"]
    assert [trial["status"] for trial in found] == ["done"] * 4
    assert all(found[trial["id"]] == trial for trial in before if trial["status"] == "done")
    assert not list(out.rglob("*.tmp"))


def written(run: Path) -> int:
    return (run / "result.json").stat().st_mtime_ns


@pytest.mark.slow
def test_ctrl_c_stops_with_checkpoints_and_says_how_to_go_on(no_ray: None, tmp_path: Path) -> None:
    out = tmp_path / "c"
    process = start("ppo", "CartPole-v1", "--trials", "3", "--seeds", "1", "--steps", "10M", "--out", str(out))
    try:
        wait(process, out, lambda found: any(trial["steps"] for trial in found))
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert f"tune --resume {out}" in said
    found = trials(out)
    assert {trial["status"] for trial in found} == {"pending"}
    begun = [out / run for trial in found for run in trial["runs"]]
    assert begun
    for run in begun:
        assert events(run)["stopped"] == 1
        assert (glance(run).state, glance(run).reason) == ("stopped", "tune: the search was stopped")
        assert Holder.parse((run / "run.lock").read_bytes()) is None
        assert int(json.loads((run / "last" / "manifest.json").read_text())["step"]) > 0
