"""`raynforce watch`, `train --watch`, and what a run is asked for through its directory."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Start, starting

import raynforce
from raynforce.cli import main
from raynforce.driver import filming, live
from raynforce.driver.status import Callback, Status
from raynforce.engines.native import engine, timing
from raynforce.runs import asking

TINY: dict[str, Any] = {"sampling.envs": 2, "sampling.fragment": 16, "eval.episodes": 2, "eval.final_episodes": 2}
SLOW = ["--no-preset", "--runtime", "inline", "--topology", "sync", "--quiet", "--set", "eval.every=0"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


def ask(url: str, path: str) -> Any:
    address, _, token = url.partition("/#token=")
    link = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
    link.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = link.getresponse()
    assert answer.status == 200
    found = json.loads(answer.read())
    link.close()
    return found


def test_watch_prints_a_link_and_ends_on_a_signal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    watch = start("watch", "--port", "0", "--no-browser", "--json")
    watch.until(lambda: watch.said.endswith("}\n"))
    told = json.loads(watch.said.splitlines()[-1])
    assert told["watching"] == ["runs"]
    assert ask(told["url"], "/api/runs")["runs"] == []
    watch.send("SIGTERM")
    assert watch.ended() in (143, -signal.SIGTERM)
    watch.nothing_left()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "nowhere does not exist: give a run, a folder of runs, or a URL"),
        (["--port", "70000"], "--port"),
        (["--port", "x"], "--port"),
        (["--port", "80"], "port 80 cannot be used"),
    ],
)
def test_wrong_use_is_one_line(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "80" in words:
        import socket

        from raynforce.web import server

        def taken(*_: Any) -> None:
            raise OSError(98, "Address already in use")

        class Taken(socket.socket):
            bind = taken  # type: ignore[assignment]

        monkeypatch.setattr(server.socket, "socket", Taken)
    assert main(["watch", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_training_with_its_page_ends_with_nothing_left(start: Start, tmp_path: Path) -> None:
    train = start("train", "ppo", "CartPole-v1", "--steps", "1e8", "--out", "mine", "--watch", *SLOW)
    train.until(lambda: "watch: http" in train.said and (tmp_path / "mine" / "live.json").exists())
    url = re.findall(r"watch: (\S+)", train.said)[0]
    deadline = time.monotonic() + 60
    while not (runs := ask(url, "/api/runs")["runs"]):
        assert time.monotonic() < deadline
    (run,) = runs
    assert (run["name"], run["status"], run["algo"]) == ("mine", "running", "ppo")
    told = ask(url, f"/api/run/{run['id']}")["live"]
    assert {role["kind"] for role in told["roles"]} >= {"learner", "sampler"}
    asking.ask(tmp_path / "mine", "stop")
    assert train.ended() == 143, "as SIGTERM would end it"
    assert not (tmp_path / "mine" / "asked.stop").exists()
    stopped, _ = map(json.loads, (tmp_path / "mine" / "events.jsonl").read_text().splitlines()[-2:])
    assert (stopped["event"], stopped["reason"]) == ("stopped", "SIGTERM")
    train.nothing_left()


@pytest.mark.slow
def test_a_training_that_is_killed_takes_its_page_along(start: Start, tmp_path: Path) -> None:
    train = start("train", "ppo", "CartPole-v1", "--steps", "1e8", "--out", "mine", "--watch", *SLOW)
    train.until(lambda: (tmp_path / "mine" / "live.json").exists())
    train.send("SIGKILL")
    train.ended()
    train.nothing_left()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs look at what is asked more often."""
    monkeypatch.setattr(live, "EVERY", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_is_written_when_it_is_asked_for(tmp_path: Path) -> None:
    class Ask(Callback):
        began = 0.0

        def on_round(self, status: Status) -> None:
            if not self.began:
                self.began = time.monotonic()
                asking.ask(status.path, "checkpoint")
            saved = sorted((status.path / "checkpoints").glob("step_*"))
            if len(saved) > 1 or time.monotonic() - self.began > 60:
                status.stop("enough")

    settings = {**TINY, "checkpoint.every": 0, "checkpoint.seconds": 0.0, "checkpoint.keep": 10, "eval.every": 0}
    how: dict[str, Any] = {"steps": 10**9, "runtime": "inline", "topology": "sync", "progress": "quiet"}
    run = raynforce.train("CartPole-v1", out=tmp_path / "run", settings=settings, callbacks=[Ask()], **how)
    assert len(list((run.path / "checkpoints").glob("step_*"))) >= 3, "the first, the one asked for, and the last"


@pytest.mark.usefixtures("quick")
def test_what_was_asked_of_an_earlier_process_is_forgotten(tmp_path: Path) -> None:
    how: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    run = raynforce.train("CartPole-v1", out=tmp_path / "run", steps=64, settings=TINY, **how)
    asking.ask(run.path, "stop")
    again = raynforce.resume(run.path, steps=1000, progress="quiet")
    assert again.result.stopped == "steps done"
    told = json.loads((run.path / "live.json").read_text())
    assert told["steps"] >= 1000
    assert told["time_went"].startswith("where the time went")
    assert {(role["state"], role["pid"]) for role in told["roles"]} == {("working", os.getpid())}, "of an inline run"


@pytest.mark.usefixtures("quick")
def test_while_a_run_goes_on_nothing_is_tried_out_to_say_what_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    monkeypatch.setattr(engine, "side_by_side", lambda config, seconds: tried.append(seconds) or "")
    monkeypatch.setattr(timing, "wall_shares", lambda total, config: {"env": 1.0})
    told: list[int] = []

    class Look(Callback):
        def on_round(self, status: Status) -> None:
            told.append(len(tried))
            time.sleep(0.06)

    how: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    settings = {**TINY, "eval.every": 0}
    run = raynforce.train("CartPole-v1", out=tmp_path / "run", steps=320, settings=settings, callbacks=[Look()], **how)
    assert set(told) == {0}
    assert tried, "at the end it is"
    assert (run.path / "live.json").exists()


def test_a_best_policy_is_filmed_though_the_run_has_deleted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, words = tmp_path / "run", list[list[str]]()
    best = run / "checkpoints" / "best_000000000100"
    best.mkdir(parents=True)
    (best / "policy.json").write_text("{}")
    (run / "config.yaml").write_text("env: CartPole-v1\n")
    (run / "best").symlink_to("checkpoints/best_000000000100")

    class Plays:
        returncode = None

        def __init__(self, command: list[str], **_: Any) -> None:
            words.append(command)

        def poll(self) -> None:
            return None

    monkeypatch.setattr(filming.subprocess, "Popen", Plays)
    filming.Filming(2)._look(run)
    shutil.rmtree(best)
    played = Path(words[0][words[0].index("eval") + 1])
    assert played.name == best.name
    assert (played / "policy.json").read_text() == "{}"
    assert (played.parent.parent / "config.yaml").exists(), "a checkpoint of a run"


def test_watch_from_python(tmp_path: Path) -> None:
    with raynforce.watch(tmp_path, port=0, browser=False) as server:
        assert ask(server.url, "/api/hello")["version"] == raynforce.__version__


@pytest.mark.slow
def test_a_run_is_filmed_as_it_learns(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("av")
    pytest.importorskip("pygame")
    train = start("train", "ppo", "CartPole-v1", "--target", "150", "--record", "1", "--out", "mine", "--quiet")
    assert train.ended() == 0, train.said
    films = sorted((tmp_path / "mine" / "episodes").iterdir())
    assert films
    assert {film.suffix for film in films} == {".json", ".mp4"}
    assert json.loads(films[0].read_text())["return"] > 0
    train.nothing_left()


def test_why_there_are_no_films_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av")
    words = ["train", "ppo", "raynforce.envs.tiny_agents:Together", "--steps", "600", "--record", "1", "--runtime"]
    assert main([*words, "inline", "--topology", "sync", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "no more films (--record): video shows environments of one agent" in told


def test_films_are_for_one_run_and_a_number_of_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "CartPole-v1", "--record", "2", "--seeds", "2"]) == 2
    assert "--record films one run" in capsys.readouterr().err
    assert main(["train", "ppo", "CartPole-v1", "--record", "none"]) == 2
    assert "--record" in capsys.readouterr().err
