"""Runs at a URL: what they tell while they go on, and how the page sees it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raynforce
from benchmarks.watch_runs import make_run
from raynforce.driver import live
from raynforce.driver.status import Callback, Status
from raynforce.errors import RaynforceError
from raynforce.runs.directory import RunDirectory
from raynforce.runs.lock import Holder
from raynforce.runs.remote_lock import InStore
from raynforce.runs.store import Store
from raynforce.web import mirror
from raynforce.web.board import Board

TINY: dict[str, Any] = {"sampling.envs": 2, "sampling.fragment": 16, "eval.every": 0, "eval.final_episodes": 0}


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live, "EVERY", 0.05)
    monkeypatch.setattr(mirror, "EVERY_LIVE", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_run_at_a_url_tells_there_between_checkpoints(tmp_path: Path) -> None:
    there, told = tmp_path / "there" / "run", list[dict[str, Any]]()

    class Look(Callback):
        def on_round(self, status: Status) -> None:
            if (there / "live.json").exists():
                told.append(json.loads((there / "live.json").read_text()))
                if len({each["steps"] for each in told}) > 1 and told[-1]["metrics"]:
                    status.stop("enough")
            time.sleep(0.02)

    settings = {**TINY, "checkpoint.every": 0, "checkpoint.seconds": 0.0, "log_every": 1}
    how: dict[str, Any] = {"steps": 10**6, "runtime": "inline", "topology": "sync", "progress": "quiet"}
    raynforce.train("CartPole-v1", out=f"file://{there}", settings=settings, callbacks=[Look()], **how)
    assert told[-1]["metrics"]["charts/SPS"] > 0
    assert [role["kind"] for role in told[-1]["roles"]] == ["learner", "sampler"]
    last = json.loads((there / "live.json").read_text())
    assert last["steps"] >= told[-1]["steps"], "the end comes there too"


def test_a_local_run_has_no_metrics_in_live_json(tmp_path: Path) -> None:
    how: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    run = raynforce.train("CartPole-v1", out=tmp_path / "run", steps=64, settings=TINY, **how)
    assert "metrics" not in json.loads((run.path / "live.json").read_text())


class Elsewhere(RunDirectory):
    is_mirrored = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sent: list[str] = []
        self.failing, self.free = False, threading.Event()
        self.free.set()

    def send_live(self, text: str) -> None:
        self.sent.append(text)
        self.free.wait(60)
        if self.failing:
            raise RaynforceError("the store is away")


def test_a_store_that_hangs_or_fails_holds_nobody_up(tmp_path: Path) -> None:
    run = Elsewhere(tmp_path)
    run.free.clear()
    telling = live.Live(run)
    telling.tell([], steps=1)
    until(lambda: run.sent)
    for steps in (2, 3):  # it hangs, and those who look on here see more
        telling.tell([], steps=steps)
        until(lambda steps=steps: json.loads((tmp_path / "live.json").read_text())["steps"] == steps)
    assert len(run.sent) == 1
    run.failing = True
    run.free.set()
    telling.tell([], steps=4)
    until(lambda: json.loads((tmp_path / "live.json").read_text())["steps"] == 4)
    telling.close()
    assert len(run.sent) == 1, "a store that failed is left alone for a while"


def test_nothing_is_told_at_a_url_before_a_run_is_there_or_once_it_is_anothers(tmp_path: Path) -> None:
    from raynforce.runs.mirrored import MirroredRun
    from raynforce.runs.remote import Remote

    run = MirroredRun(Remote.open(f"file://{tmp_path}/run"))
    run.send_live("{}")
    assert not (tmp_path / "run").exists(), "else it would be in the way of the next one"


def test_the_page_shows_what_a_run_at_a_url_tells(tmp_path: Path) -> None:
    there = make_run(tmp_path / "there" / "one", lines=4, ended=False)
    store = Store.open(f"file://{there}")
    InStore(store).touch(replace(Holder.me(), host="elsewhere"))
    board = Board([f"file://{tmp_path}/there"])
    board.start()
    try:
        seen = until(lambda: [run for run in board.to_json()["runs"] if run["status"] == "running"])
        assert seen[0]["steps"] == 8000
        told = {"time": time.time(), "roles": [], "steps": 9000, "metrics": {"charts/SPS": 77.0}}
        (there / "live.json").write_text(json.dumps(told))
        until(lambda: board.to_json()["runs"][0]["steps"] == 9000)
        assert board.to_json()["runs"][0]["speed"] == 77.0
        assert board.to_json()["runs"][0]["path"] == f"file://{there}"
    finally:
        board.close()


def test_a_store_that_hangs_does_not_hold_up_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "here" / "two", lines=4)
    (tmp_path / "there").mkdir()
    hangs, asked = threading.Event(), threading.Event()

    def hang(self: Store, **_: Any) -> dict[str, int]:
        asked.set()
        hangs.wait(60)
        return {}

    monkeypatch.setattr(Store, "list", hang)
    board = Board([f"file://{tmp_path}/there", str(tmp_path / "here")])
    board.start()
    try:
        assert asked.wait(60)
        until(lambda: [run["name"] for run in board.to_json()["runs"]] == ["here/two"])
        assert not board.to_json()["ready"]
    finally:
        hangs.set()
        board.close()
