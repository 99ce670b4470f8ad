"""Steps are done once, go on after a kill at any of them, and run again when they changed; mistakes are one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import starting

import raynforce
from raynforce.cli import main
from raynforce.errors import UsageError
from raynforce.ops.command import command
from raynforce.ops.pipeline import pipeline, plan
from raynforce.ops.pipeline.state import State
from raynforce.ops.registry import Registry
from raynforce.runs import lock

ROOT = Path(raynforce.__file__).parents[1]
HERE = Path(__file__).parent
SMALL = {"sampling.fragment": 16, "sampling.envs": 2, "eval.episodes": 2, "eval.final_episodes": 2}
TRAIN: dict[str, Any] = {"algo": "ppo", "env": "pipe_envs:Choice", "steps": 64, "settings": SMALL}
TRAIN |= {"runtime": "inline", "topology": "sync"}
STEPS: dict[str, Any] = {
    "train": TRAIN,
    "evaluate": {"needs": "train", "episodes": 10},
    "promote": {"needs": "evaluate", "to": "registry"},
    "export": {"needs": "promote", "to": "numpy", "out": "exported"},
}


def changed(**steps: Any) -> dict[str, Any]:
    """The pipeline with other settings of some steps; None leaves one out."""
    found = {name: {**STEPS.get(name, {}), **(steps.get(name) or {})} for name in {**STEPS, **steps}}
    return {"dir": "state", "steps": {name: own for name, own in found.items() if steps.get(name, {}) is not None}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def run(given: dict[str, Any], **how: Any) -> dict[str, str]:
    """What became of each step."""
    return {step.step: step.status for step in pipeline(given, progress="quiet", **how).steps}


ALL = tuple(STEPS)


def test_each_step_is_done_once_and_a_dry_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.yaml").write_text(yaml.safe_dump(changed()))
    assert main(["pipeline", "p.yaml", "--dry-run"]) == 0
    assert "[1/4] train: would run (not done yet)" in capsys.readouterr().out
    assert sorted(os.listdir()) == ["p.yaml"]
    assert main(["pipeline", "p.yaml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(step["step"], step["status"]) for step in told["steps"]] == [(name, "ran") for name in ALL]
    assert told["promoted"] is True
    assert told["steps"][2]["outputs"]["entry"]["number"] == 1
    assert (Path("exported") / "predict.py").is_file()
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    assert run(changed()) == dict.fromkeys(ALL, "done")
    assert run(changed(), dry_run=True) == dict.fromkeys(ALL, "done")
    after = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    assert {p for p in after if p not in before or after[p] != before[p]} <= {Path("state/run.lock")}


def test_a_changed_step_runs_again_with_what_depends_on_it_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    run(changed())
    more = changed(evaluate={"episodes": 12})
    pipeline(more, dry_run=True)
    said = capsys.readouterr().out
    assert "train: done" in said
    assert "evaluate: would run (again: episodes was 10 and is 12)" in said
    assert "promote: would run (after evaluate)" in said
    assert run(more) == {"train": "done", "evaluate": "ran", "promote": "ran", "export": "done"}  # the same policy
    assert len(Registry("registry").entries) == 1
    assert run(changed()) == dict.fromkeys(ALL, "done")  # what was done stays done


def test_from_runs_a_step_again_and_all_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    run(changed())
    assert run(changed(), start_at="evaluate", dry_run=True)["train"] == "done"
    assert run(changed()) == dict.fromkeys(ALL, "done")  # the dry run has changed nothing
    assert run(changed(), start_at="evaluate") == {"train": "done", **dict.fromkeys(ALL[1:], "ran")}
    assert run(changed()) == dict.fromkeys(ALL, "done")
    with pytest.raises(UsageError, match=r"no step 'evaluat' .did you mean 'evaluate'"):
        run(changed(), start_at="evaluat")


def test_what_is_not_better_is_not_promoted_and_nothing_is_exported() -> None:
    flat = {"settings": {**SMALL, "env_args.worth": 0}}  # all policies are worth the same here
    run(changed(train=flat))
    other = changed(train={**flat, "seed": 5}, export={"out": "other"})
    found = pipeline(other, progress="quiet")
    assert [step.status for step in found.steps] == ["ran", "ran", "ran", "skipped"]
    assert found.promoted is False
    figures = (found.steps[2].outputs or {})["comparison"]
    assert figures["p"] > 0.05
    assert not Path("other").exists()
    assert len(Registry("registry").entries) == 1
    assert run(other) == {**dict.fromkeys(ALL, "done"), "export": "skipped"}


def test_the_best_of_several_seeds_plays_fresh_episodes() -> None:
    found = pipeline(changed(train={"seeds": 2}, promote=None, export=None), progress="quiet")
    evaluated = dict(found.steps[1].outputs or {})
    assert sorted(path[-5:] for path in evaluated["tried"]) == ["seed0", "seed1"]
    assert evaluated["run"] == max(evaluated["tried"], key=evaluated["tried"].get)
    assert evaluated["mean"] != evaluated["tried"][evaluated["run"]]


KILLER = """
import os, signal, sys
sys.path[:0] = [{root!r}, {here!r}]
from raynforce.cli import main
from raynforce.ops.pipeline import state, steps
at, when = sys.argv[1:3]
if when == "before its marker":
    finish = state.State.finish
    def killed(self, step, hash, marker):
        if step.name == at:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, step, hash, marker)
    state.State.finish = killed
if when == "while it writes" and at == "promote":
    from raynforce.ops import registry
    registry._point = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if when == "while it writes" and at == "export":
    steps.disk.flush = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main(["pipeline", "p.yaml", "--quiet"]))
"""


def killed(at: str = "", when: str = "") -> int:
    script = Path("killer.py")
    script.write_text(KILLER.format(root=str(ROOT), here=str(HERE)))
    done = subprocess.run([sys.executable, str(script), at, when], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def outcome(where: str) -> dict[str, Any]:
    """What the steps of a pipeline have made, without times and places."""
    found: dict[str, Any] = {}
    for marker in Path(where).glob("*/done.json"):
        data = json.loads(marker.read_text())
        found[data["step"]] = data["outputs"]["id"]
    return found


def test_ended_before_any_marker_it_goes_on_to_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    run({**changed(promote={"to": "plain"}, export={"out": "plainly"}), "dir": "undisturbed"})
    finish = State.finish
    for at in ALL:

        def ended(self: State, step: plan.Step, *args: Any, at: str = at) -> None:
            if step.name == at:
                raise KeyboardInterrupt
            finish(self, step, *args)

        with monkeypatch.context() as patch:
            patch.setattr(State, "finish", ended)
            with pytest.raises(KeyboardInterrupt):
                run(changed())
        assert at not in outcome("state")
    assert run(changed())["export"] == "ran"
    there, plain = outcome("state"), outcome("undisturbed")
    assert [there[name] for name in ALL[:3]] == [plain[name] for name in ALL[:3]]
    assert len(Registry("registry").entries) == 1


@pytest.mark.slow
def test_killed_at_every_step_it_ends_as_if_nobody_had_killed_it(tmp_path: Path) -> None:
    mark = tmp_path / "kill"
    more = {**SMALL, "env_args.kill": str(mark), "env_args.after": 40, "checkpoint.every": 32}
    training = {"steps": 128, "settings": more}
    run({**changed(train=training, promote={"to": "plain"}, export={"out": "plainly"}), "dir": "undisturbed"})
    Path("p.yaml").write_text(yaml.safe_dump(changed(train=training)))
    mark.touch()
    assert killed() == -signal.SIGKILL  # by the environment, in the midst of training
    assert (next(Path("state").glob("train-*")) / "run" / "last").exists()
    for at in ALL:
        for when in (*["while it writes"] * (at in ("promote", "export")), "before its marker"):
            assert killed(at, when) == -signal.SIGKILL, (at, when)
            assert at not in outcome("state")
    assert killed() == 0
    there, plain = outcome("state"), outcome("undisturbed")
    assert [there[name] for name in ALL[:3]] == [plain[name] for name in ALL[:3]]
    assert len(Registry("registry").entries) == 1
    assert sorted(os.listdir("exported")) == sorted(os.listdir("plainly"))
    assert not [path for path in os.listdir() if path.endswith(".tmp")]
    assert run(changed(train=training)) == dict.fromkeys(ALL, "done")


def test_a_run_that_met_its_target_is_not_trained_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    given = changed(train={"target": -9, "steps": 6400}, promote=None, export=None)
    with monkeypatch.context() as patch:
        patch.setattr(State, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(given)
    (events,) = Path("state").glob("train-*/run/events.jsonl")
    before = events.read_bytes()
    assert b"target met" in before
    assert run(given)["train"] == "ran"
    assert events.read_bytes() == before


@pytest.mark.slow
def test_a_signal_stops_it_after_a_checkpoint(tmp_path: Path) -> None:
    long = changed(train={"steps": 10_000_000, "settings": {**SMALL, "checkpoint.every": 1_000_000}})
    Path("p.yaml").write_text(yaml.safe_dump(long))
    with starting(tmp_path) as start:
        shutil.copy(HERE / "pipe_envs.py", tmp_path)
        going = start("pipeline", "p.yaml", "--json")
        going.until(lambda: "steps/s" in going.said)
        going.send("SIGTERM")
        assert going.ended() == 143
        assert "to go on: " in going.said
        assert json.loads(going.said.splitlines()[-1])["stopped"] == "SIGTERM"
        going.nothing_left()
    assert (next(Path("state").glob("train-*")) / "run" / "last").exists()


def test_a_pipeline_at_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SETTLE", 0.01)
    there = {**changed(promote={"to": "memory://b/registry"}, export={"out": None}), "dir": "memory://b/state"}
    del there["steps"]["export"]["out"]
    found = pipeline(there, progress="quiet")
    assert {step.status for step in found.steps} == {"ran"}
    assert run(there) == dict.fromkeys(ALL, "done")
    assert run(there, start_at="export")["export"] == "ran"
    assert (found.steps[3].outputs or {})["path"].startswith("memory://b/state/export-")


def test_two_do_not_work_on_one_pipeline() -> None:
    Path("state").mkdir()
    with lock.locked(Path("state")), pytest.raises(UsageError, match="is in use by"):
        run(changed())


WRONG: dict[str, tuple[Any, str]] = {
    "cycle": (changed(train={"needs": "train2"}, train2={**TRAIN, "kind": "train", "needs": "train"}), "in a cycle: "),
    "itself": (changed(train={"needs": "train"}), "in a cycle: train → train"),
    "unknown step": (changed(evaluate={"needs": "trian"}), "needs 'trian', which is no step (did you mean 'train'?)"),
    "unknown key": (changed(evaluate={"episods": 3}), "unknown key 'episods' (did you mean 'episodes'?)"),
    "unknown top": ({**changed(), "step": {}}, "unknown key 'step' (did you mean 'steps'?)"),
    "unknown kind": (changed(look={"kind": "evaluat", "needs": "train"}), "did you mean 'evaluate'"),
    "no kind": (changed(look={"needs": "train"}), "step 'look' has no kind: allowed are tune, train"),
    "missing need": (changed(evaluate={"needs": []}), "step evaluate needs a step of kind train: add needs"),
    "wrong need": (changed(promote={"needs": "train"}), "a step of kind train: it can need evaluate"),
    "too many needs": (
        changed(e2={**STEPS["evaluate"], "kind": "evaluate"}, promote={"needs": ["evaluate", "e2"]}),
        "2",
    ),
    "no registry": ({"steps": {**STEPS, "promote": {"needs": "evaluate"}}}, "step promote has no 'to'"),
    "wrong value": (changed(evaluate={"episodes": "many"}), "step evaluate: episodes = 'many' must be a whole number"),
    "wrong level": (changed(promote={"level": 3}), "level = 3 must be a number from 1e-06 to 0.5"),
    "wrong setting": (changed(train={"settings": {"algorithm.gama": 1}}), "step train: unknown setting"),
    "wrong algorithm": (changed(train={"algo": "pppo"}), "step train: "),
    "wrong format": (changed(export={"to": "onxx"}), "did you mean 'onnx'"),
    "no steps": ({"dir": "state"}, "a pipeline needs steps"),
    "no settings": ({"steps": {"train": 3}}, "must have settings of its own"),
    "a bad name": ({"steps": {"my train": {}}}, "is no name of a step"),
    "not a mapping": ({"steps": ["train"]}, "a pipeline needs steps"),
    "tune without env": (changed(tune={"algo": "ppo"}), "step tune has no 'env'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_changes_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, says = WRONG[name]
    Path("p.yaml").write_text(yaml.safe_dump(given))
    assert main(["pipeline", "p.yaml"]) == 2
    error = capsys.readouterr().err
    assert says in error, error
    assert len(error.splitlines()) == 1
    assert os.listdir() == ["p.yaml"]


def test_files_and_folders_that_are_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.yaml").write_text(yaml.safe_dump(changed()))
    Path("exported").mkdir()
    (Path("exported") / "mine.txt").write_text("x")
    for words, says in {
        ("p.yaml",): "step export: out = 'exported' is there already",
        ("none.yaml",): "cannot read config 'none.yaml'",
        ('{"steps": ',): "neither a file nor JSON",
        ("p.yaml", "--dir", "p.yaml"): "is a file",
        ("p.yaml", "--from", "x"): "no step 'x'",
    }.items():
        if words[-1] == "p.yaml" and len(words) > 1:
            (Path("exported") / "mine.txt").unlink()
        assert main(["pipeline", *words]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert len(error.splitlines()) == 1
    assert not Path("state").exists()


def test_a_submitted_pipeline_travels_in_its_command(tmp_path: Path) -> None:
    Path("more.yaml").write_text("algorithm: {gamma: 0.9}\n")
    Path("p.yaml").write_text(yaml.safe_dump(changed(train={"config": "more.yaml"}) | {"name": "mine"}))
    made = command(["pipeline", "p.yaml"], "s3://bucket/runs")
    assert made.run == "s3://bucket/runs/pipeline-mine"
    assert made.id.startswith("pipeline-mine-")
    assert "pipe_envs:Choice" in made.names
    there = plan.read(made.words[1])
    assert there.where == made.run
    assert there.step("promote").settings["to"] == str(tmp_path / "registry")
    assert there.step("train").settings["settings"]["algorithm"] == {"gamma": 0.9}
    assert plan.read(json.dumps(there.to_json())) == there
    assert made == command(["pipeline", "p.yaml", "--json"], "s3://bucket/runs")
    assert command(["pipeline", "p.yaml"]).run == str(tmp_path / "state")
    no_dir = {"steps": STEPS}
    Path("q.yaml").write_text(yaml.safe_dump(no_dir))
    for words, runs, says in (
        (["pipeline", "q.yaml"], None, "say where it is kept"),
        (["pipeline", "p.yaml", "--dry-run"], None, "without submit"),
        (["pipeline", "p.yaml", "--dir", "x"], "s3://b/r", "drop --runs"),
        (["pipeline", "p.yaml", "--from", "x"], "s3://b/r", "no step 'x'"),
    ):
        with pytest.raises(UsageError, match=re.escape(says)):
            command(words, runs)


def with_commands(monkeypatch: pytest.MonkeyPatch, parse: Callable[..., Any]) -> None:
    monkeypatch.setattr("raynforce.cli.parser.parse", parse)


def test_a_tuned_step_gives_its_settings_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from raynforce.ops.pipeline import steps

    with_commands(monkeypatch, lambda words: None)
    called: list[list[str]] = []

    class Done:
        returncode = 0

    def tune(words: list[str], **how: Any) -> Done:
        called.append(words[3:])
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "best.yaml").write_text("algorithm: {gamma: 0.5}\n")
        return Done()

    monkeypatch.setattr(steps.subprocess, "run", tune)
    tuned = {"kind": "tune", "algo": "ppo", "env": "pipe_envs:Choice", "trials": 3, "search": ["a=int(1,2)", "b"]}
    training = {key: value for key, value in TRAIN.items() if key not in ("algo", "env")} | {"needs": "tune"}
    given = {"dir": "state", "steps": {"tune": tuned, "train": training}}
    found = pipeline(given, progress="quiet")
    (words,) = called
    assert words[:3] == ["tune", "ppo", "pipe_envs:Choice"]
    assert words[-5:] == ["--trials", "3", "--search", "a=int(1,2)", "b"]
    run_path = (found.steps[1].outputs or {})["runs"][0]["run"]
    assert yaml.safe_load((Path(run_path) / "config.yaml").read_text())["algorithm"]["gamma"] == 0.5


def test_a_submitted_pipeline_with_a_token_is_refused() -> None:
    hushed = changed(serve={"needs": "promote", "local": True, "token": "hush-hush-hush-hush"})
    with pytest.raises(UsageError, match="RAYNFORCE_SERVE_TOKEN") as error:
        command(["pipeline", json.dumps(hushed)], "runs")
    assert "hush" not in str(error.value)


def test_serving_comes_last_and_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with_commands(monkeypatch, lambda words: None)
    found = pipeline(changed(serve={"needs": "promote", "port": 8123, "local": True}), progress="quiet", dry_run=True)
    assert [*found.serve] == ["serve", str(Path("registry").absolute()), "--follow", "--port", "8123", "--local"]
    assert found.steps[-1].status == "last"
    hushed = changed(serve={"needs": "promote", "local": True, "token": "hush-hush-hush-hush"})
    found = pipeline(hushed, progress="quiet", dry_run=True)
    assert "hush" not in f"{found} {json.dumps(found.to_json())}"
    assert found.token == "hush-hush-hush-hush"
    two = changed(serve={"needs": "promote"}, other={"kind": "serve", "needs": "promote"})
    with pytest.raises(UsageError, match="both serve"):
        pipeline(two, dry_run=True)
