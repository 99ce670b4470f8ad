"""What is known of runs from the ends of their files, however long or broken these are."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.runs import catalog, checkpoint, lock
from raynforce.runs.catalog import checkpoints_of, find, glance, last_lines, look_at

CONFIG = "env: my_sims:make_arm\nalgo: ppo\nconfig_version: 1\nseed: 3\nsteps: 1000\ntarget: null\nruntime: inline\n"
Make = Callable[..., Path]


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes runs by name, from the events they have."""

    def made(name: str = "run", *events: dict[str, Any], config: str = CONFIG, metrics: str = "") -> Path:
        path = tmp_path / name
        (path / "checkpoints").mkdir(parents=True)
        (path / "config.yaml").write_text(config)
        (path / "events.jsonl").write_text(lines(*({"time": 100.0 + i, **event} for i, event in enumerate(events))))
        (path / "metrics.jsonl").write_text(metrics)
        return path

    return made


STARTED = {"event": "started", "steps": 0}
ENDS = {
    "finished": {"event": "stopped", "reason": "steps done", "steps": 900},
    "stopped": {"event": "stopped", "reason": "SIGINT", "steps": 900},
    "failed": {"event": "failed", "reason": "no licence", "steps": 900},
}


@pytest.mark.parametrize("state", ENDS)
def test_how_a_run_ended(make: Make, state: str) -> None:
    found = glance(make("run", STARTED, ENDS[state]))
    assert (found.state, found.reason, found.steps, found.active) == (state, ENDS[state]["reason"], 900, 101.0)
    assert (found.config["env"], found.config["algo"], found.config["seed"]) == ("my_sims:make_arm", "ppo", 3)
    assert (found.total, found.config["target"]) == (1000, None)


@pytest.mark.parametrize("reason", ["tune: behind others", "tune: goes on from trial 3, in run_2"])
def test_a_run_that_a_search_ended_was_stopped(make: Make, reason: str) -> None:
    found = glance(make("run", STARTED, {"event": "stopped", "reason": reason, "steps": 900}))
    assert (found.state, found.reason) == ("stopped", reason)


def test_a_run_that_left_no_word_was_killed(make: Make) -> None:
    metrics = lines({"step": 500, "time": 9.0, "charts/episodic_return": 1.5})
    found = glance(make("run", STARTED, ENDS["finished"], {"event": "started", "steps": 400}, metrics=metrics))
    assert (found.state, found.steps, found.return_mean) == ("killed", 500, 1.5)
    assert glance(make("early")).state == "killed"


def test_a_run_that_is_held_is_running(make: Make) -> None:
    path = make("run", STARTED, ENDS["finished"])
    with lock.locked(path):
        found = glance(path)
        assert found.state == "running"
        assert found.holder is not None
    assert glance(path).state == "finished"


def test_the_return_is_that_of_the_last_report_and_the_step_that_of_the_last_line(make: Make) -> None:
    metrics = lines(
        {"step": 10, "charts/episodic_return": 1.0},
        {"step": 20, "charts/episodic_return": 2.0},
        {"step": 25, "eval/return": 7.0},
    )
    found = glance(make("run", STARTED, metrics=metrics + '{"step": 30, "charts/ep'))
    assert (found.return_mean, found.steps) == (2.0, 25)


def test_the_return_is_that_of_the_last_step_where_a_checkpoint_has_it(make: Make) -> None:
    """The last report is up to `log_every` steps older; an evaluation's line tells the step that it began at."""
    metrics = lines({"step": 90, "charts/episodic_return": 2.0}, {"step": 100, "eval/return": 7.0})
    path = make("run", STARTED, metrics=metrics)
    checkpoint.save(path / "checkpoints" / "step_100", {"run": {"metrics": {"charts/episodic_return": 4.5}}}, step=100)
    checkpoint.point(path / "last", path / "checkpoints" / "step_100")
    assert glance(path).return_mean == 4.5
    later = lines({"step": 110, "charts/episodic_return": 5.5}, {"step": 95, "eval/return": 7.0})
    (path / "metrics.jsonl").write_text(metrics + later)
    assert (glance(path).return_mean, glance(path).steps) == (5.5, 110)


def test_a_run_too_short_for_a_report_has_the_return_of_its_checkpoint(make: Make) -> None:
    path = make("run", STARTED, metrics=lines({"step": 25, "eval/return": 7.0}))
    checkpoint.save(path / "checkpoints" / "step_25", {"run": {"metrics": {"charts/episodic_return": 4.5}}}, step=25)
    checkpoint.point(path / "last", path / "checkpoints" / "step_25")
    assert glance(path).return_mean == 4.5


def test_the_best_evaluation_is_that_of_the_best_checkpoint(make: Make) -> None:
    path = make("run", STARTED)
    checkpoint.save(path / "checkpoints" / "best_7", {"policy": {}}, step=7, eval_return=41.5)
    checkpoint.point(path / "best", path / "checkpoints" / "best_7")
    assert glance(path).best_eval == 41.5


def test_a_huge_file_is_not_read_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make("run", STARTED)
    with (path / "metrics.jsonl").open("r+b") as file:
        file.truncate(1 << 30)  # a gigabyte with nothing in it
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + lines({"step": 77, "charts/episodic_return": 3.0}).encode())
    read = 0
    original = catalog.open_regular

    class Counting:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def read(self, size: int) -> bytes:
            nonlocal read
            read += size
            return self.file.read(size)  # type: ignore[no-any-return]

    monkeypatch.setattr(catalog, "open_regular", lambda path: Counting(original(path)))
    found = list(last_lines(path / "metrics.jsonl", b'{"step":'))
    assert found == [{"step": 77, "charts/episodic_return": 3.0}]
    assert 0 < read <= 2 * catalog.MOST
    assert glance(path).size > 1 << 30


def test_lines_come_from_the_last_back_across_blocks_and_torn_ones_are_left_out(tmp_path: Path) -> None:
    records = [{"step": n, "text": "x" * 700} for n in range(100)]
    (tmp_path / "a").write_text(lines(*records[:99]) + '{"step": 98, "te' + lines(records[99]) + '{"step": 1')
    found = list(last_lines(tmp_path / "a", b'{"step":'))
    assert [record["step"] for record in found] == list(range(99, -1, -1))
    assert list(last_lines(tmp_path / "none", b"")) == []


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "yaml": (lambda run: (run / "config.yaml").write_text("{{"), "not valid YAML"),
    "list": (lambda run: (run / "config.yaml").write_text("- 1\n"), "must hold settings"),
    "no env": (lambda run: (run / "config.yaml").write_text("algo: ppo\n"), "names no env"),
    "bytes": (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00env"), "not valid YAML"),
    "missing": (lambda run: (run / "config.yaml").unlink(), "config.yaml: No such file"),
    "pipe": (lambda run: ((run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")), "not a regular file"),
    "folder": (lambda run: ((run / "events.jsonl").unlink(), (run / "events.jsonl").mkdir()), "events.jsonl"),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_run_is_told_with_its_reason(make: Make, tmp_path: Path, how: str) -> None:
    make("fine", STARTED)
    do, reason = BREAK[how]
    do(make("run", STARTED))
    states = {run.path.name: run for run in map(glance, find(tmp_path))}
    assert states["fine"].state == "killed"
    assert states["run"].state == "broken"
    assert reason in states["run"].reason


@pytest.mark.parametrize("text", ["[1, 2]\n", "null\n", '{"event": 3}\n', "\x00" * 100, '{"time": "x", "event": []}\n'])
def test_nonsense_in_the_files_is_no_end(make: Make, text: str) -> None:
    path = make("run", STARTED)
    for name in ("events.jsonl", "metrics.jsonl"):
        with (path / name).open("a") as file:
            file.write(text)
    assert glance(path).state == "killed"


def test_a_config_that_others_wrote_is_understood(make: Make) -> None:
    found = glance(make(config='# mine\nenv: "CartPole-v1"  # a comment\nalgo: ppo\nseed: 1\nsteps: 5\n'))
    assert (found.config["env"], found.total) == ("CartPole-v1", 5)


def test_runs_are_found_three_folders_deep_and_each_once(make: Make, tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e", "b/d/f/too_deep", ".hidden", "a/checkpoints/inside"):
        make(name, STARTED)
    (tmp_path / "notes").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "b" / "circle").symlink_to("..")
    assert sorted(str(path.relative_to(tmp_path)) for path in find(tmp_path)) == ["a", "b/c", "b/d/e"]
    assert list(find(tmp_path / "a")) == [tmp_path / "a"]
    assert list(find(tmp_path / "nothing")) == []


def test_a_thousand_runs_take_about_a_second(make: Make, tmp_path: Path) -> None:
    for index in range(200):
        make(f"run_{index}", STARTED, metrics=lines(*({"step": n, "x": "y" * 1000} for n in range(20))))
    began = time.process_time()
    assert len([glance(path) for path in find(tmp_path)]) == 200
    assert time.process_time() - began < 1.0  # a fifth of them: five times the time it takes


# -- checkpoints ----------------------------------------------------------------------------------------------------


def add(path: Path, **facts: Any) -> None:
    """Put facts into a manifest."""
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(checkpoint.sealed({**json.loads(manifest.read_text()), **facts})))


@pytest.fixture
def kept(make: Make) -> Path:
    """A run with two whole checkpoints, which share a segment, and a best policy."""
    path = make("run", STARTED)
    folder = path / "checkpoints"
    learner = {"a": 1, "segments": {"0-5": {"x": np.arange(5)}}}
    for step, number in ((10, 0), (20, 1)):
        facts = {"step": step, "number": number, "time": 50.0 + number, "torch": "2.9"}
        checkpoint.save(folder / f"step_{step:012d}", {"learner": learner, "policy": {"b": 2}, "run": {}}, **facts)
    checkpoint.save(folder / "best_000000000010", {"policy": {}}, step=10, eval_return=3.0)
    checkpoint.point(path / "last", folder / "step_000000000020")
    checkpoint.point(path / "best", folder / "best_000000000010")
    return path


def test_checkpoints_by_their_manifests(kept: Path) -> None:
    newest, *others = checkpoints_of(kept, verify=True)
    assert (newest.step, newest.number, newest.time, newest.marks) == (20, 1, 51.0, ("last",))
    assert newest.versions["torch"] == "2.9"
    (segment,) = (kept / "checkpoints" / "segments").iterdir()
    assert newest.segments == {segment.name: segment.stat().st_size}
    assert set(newest.parts) == {"learner", "policy", "run"}
    size = sum(f.stat().st_size for f in newest.path.iterdir() if f.name != "manifest.json")
    assert sum(newest.parts.values()) == size
    assert [(k.step, k.marks, k.resumable) for k in others] == [(10, (), True), (10, ("best",), False)]
    assert all(not k.wrong for k in (newest, *others))


def spoil(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize("name", ["learner.json", "learner.safetensors", "policy.json"])
def test_what_is_not_as_stated_is_found(kept: Path, name: str) -> None:
    spoil(kept / "last" / name)
    assert checkpoints_of(kept)[0].resumable  # sizes say nothing of it
    assert checkpoints_of(kept, verify=True)[0].wrong == (f"{name} is not what its manifest says: its hash is another",)
    (kept / "last" / name).write_bytes(b"")
    assert f"{name} is not what its manifest says: 0 bytes" in checkpoints_of(kept)[0].wrong[0]
    (kept / "last" / name).unlink()
    (kept / "last" / name).symlink_to("/dev/zero")
    assert checkpoints_of(kept, verify=True)[0].wrong == (f"{name} is a symbolic link",)
    (kept / "last" / name).unlink()
    assert checkpoints_of(kept)[0].wrong == (f"{name} is missing",)


def test_a_segment_concerns_all_that_refer_to_it(kept: Path) -> None:
    (segment,) = (kept / "checkpoints" / "segments").iterdir()
    spoil(segment)
    assert [bool(k.wrong) for k in checkpoints_of(kept)] == [False, False, False]
    assert [bool(k.wrong) for k in checkpoints_of(kept, verify=True)] == [True, True, False]


def test_a_checkpoint_is_the_same_through_the_link_to_it(kept: Path, tmp_path: Path) -> None:
    followed = shutil.copytree(kept, tmp_path / "followed")  # a copy of what links lead to
    for last in (kept / "last", followed / "last"):
        found = look_at(last, verify=True)
        assert (found.wrong, len(found.segments), found.resumable) == ((), 1, True)


@pytest.mark.parametrize("segments", [[], 3, {"a": 1}, {"../../config.yaml": {"size": 1, "sha256": ""}}, {"a": {}}])
def test_a_manifest_that_lies_is_no_harm(kept: Path, segments: Any) -> None:
    add(kept / "last", segments=segments)
    wrong = [k for k in checkpoints_of(kept, verify=True) if k.wrong]
    assert [k.marks for k in wrong] == [("last",)]
    (kept / "last" / "manifest.json").write_text("{")
    torn = checkpoints_of(kept)[0]
    assert (torn.step, torn.resumable) == (20, False)
    assert "manifest.json" in torn.wrong[0]
