"""Whole runs at a URL: trained, stopped, resumed, read and refused as in a local directory."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Start, starting
from odd_store import OddStore, empty_stores
from running import events, metrics, without

import raynforce
from raynforce import cli
from raynforce.driver import saving
from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import lock, mirrored, remote_lock
from raynforce.runs.mirrored import MirroredRun, new_run, open_run
from raynforce.runs.remote import Remote

SMALL: dict[str, Any] = {"runtime": "inline", "topology": "sync", "eval.episodes": 2, "eval.final_episodes": 0}
SMALL |= {"eval.every": 700, "log_every": 100, "checkpoint.every": 400}
SMALL |= {"sampling.envs": 4, "sampling.fragment": 8, "algorithm.learning_starts": 100, "algorithm.buffer_size": 1200}
CRASH = 1300  # steps


class Crash(BaseException):
    """Not an Exception: nothing is saved on the way out, as after `kill -9`."""


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lock, "SETTLE", 0.0)
    yield
    empty_stores()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> raynforce.Run:
    """A run in a local directory that was never stopped."""
    return train(tmp_path_factory.mktemp("whole") / "run")


def train(out: str | Path, *callbacks: Callable[[raynforce.Status], None], **more: Any) -> raynforce.Run:
    given = {"steps": 1600, "seed": 3, "progress": "quiet", "callbacks": callbacks, "settings": SMALL, **more}
    return raynforce.train("CartPole-v1", "dqn", out=out, **given)


def crash(status: raynforce.Status) -> None:
    if status.steps >= CRASH:
        raise Crash


def measured(run: Path) -> list[dict[str, Any]]:
    return without(metrics(run), "time", "disk/", "charts/SPS", "charts/steps_per_second")


def last_step(url: str) -> int:
    loaded = open_run(url).load_newest()
    assert loaded is not None
    return int(loaded.manifest["step"])


def command(*words: str) -> tuple[int, str, str]:
    """Exit code and output of a command, in this process, where the stores in memory are."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue()


# -- there and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_run_whose_machine_is_lost_goes_on_from_the_url_to_the_same_weights(
    kind: str, whole: raynforce.Run, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store/run" if kind == "file" else "memory://bucket/run"
    with pytest.raises(Crash):
        train(url, crash)
    for thread in threading.enumerate():
        if thread.name == "checkpoints":  # what was handed to it before
            thread.join()
    copy = Remote.open(url).working_copy()
    shutil.rmtree(copy)
    assert 0 < last_step(url) < CRASH
    shutil.rmtree(copy)

    run = raynforce.resume(url, progress="quiet")
    assert run.result.weights_sha256 == whole.result.weights_sha256
    assert run.result.run == url
    assert run.path == copy
    assert measured(copy) == measured(whole.path)
    assert remote_lock.holder(Remote.open(url).store) is None

    shutil.rmtree(copy)  # all of it is there, to the last event
    read = open_run(url)
    assert read.path == copy
    assert [event["event"] for event in events(copy)][-1] == "result"
    assert measured(copy) == measured(whole.path)
    assert not (copy / "run.lock").exists()


def test_a_policy_is_loaded_and_evaluated_from_the_url(whole: raynforce.Run) -> None:
    run = train("memory://bucket/run")
    shutil.rmtree(run.path)
    policy = raynforce.load("memory://bucket/run", "last")
    assert (policy.version.params == raynforce.load(whole.path, "last").version.params).all()
    shutil.rmtree(run.path)
    returns, path = raynforce.evaluate("memory://bucket/run", episodes=3, seed=1)
    assert (returns == raynforce.evaluate(whole.path, episodes=3, seed=1)[0]).all()
    assert path == run.path / "best"
    other = train("memory://bucket/other", steps=64, start_from="memory://bucket/run")
    assert other.config.start_from == "memory://bucket/run"


def test_every_command_takes_the_url_and_tells_it() -> None:
    url = "memory://bucket/run"
    words = [f"--set={name}={value}" for name, value in SMALL.items() if name not in ("runtime", "topology")]
    words += ["--steps", "64", "--runtime", "inline", "--topology", "sync", "--out", url]
    code, out, err = command("train", "dqn", "CartPole-v1", *words)
    assert (code, err) == (0, "")
    assert f"resume {url} --steps " in out
    copy = Remote.open(url).working_copy()
    for words, expected in [
        (["eval", url, "--episodes", "2", "--json"], {"run": url, "episodes": 2}),
        (["show", url, "--json"], {"run": url, "status": "finished"}),
        (["doctor", url, "--json"], {"run": url, "running": False}),
        (["resume", url, "--steps", "120", "--quiet", "--json"], {"run": url, "topology": "sync"}),
    ]:
        shutil.rmtree(copy)
        code, out, err = command(*words)
        told = f"{url}\n" if "--quiet" in words else ""  # where the run is
        assert (code, err) == (0, told), words
        found = json.loads(out)
        assert {name: found[name] for name in expected} == expected
    assert f"resume {url}" in command("show", url)[1]


# -- a store that fails -----------------------------------------------------------------------------------


def test_training_goes_on_while_the_store_fails_and_the_url_is_complete_at_the_end(
    whole: raynforce.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "BACKOFF", (0.0,))

    def outage(status: raynforce.Status) -> None:
        OddStore.wrong, OddStore.left = OSError("no route"), 0 if 300 < status.steps < 1000 else -1

    run = train("odd://bucket/run", outage)
    assert run.result.weights_sha256 == whole.result.weights_sha256
    told = events(run.path, "storage")
    assert told[0]["state"] == "failed"
    assert f"is safe in {run.path}, but not at odd://bucket/run: cannot" in told[0]["cause"]
    assert "OSError: no route; training goes on" in told[0]["cause"]
    assert told[-1]["state"] == "works again"
    files = {path.relative_to(run.path): path.read_bytes() for path in run.path.rglob("*.json*")}
    shutil.rmtree(run.path)
    open_run("odd://bucket/run", all=True)
    found = {path.relative_to(run.path): path.read_bytes() for path in run.path.rglob("*.json*")}
    for each in (files, found):
        each.pop(Path(".remote.json"))
        each.pop(Path("live.json"), None)  # for those who look on: it is sent once in some seconds
    assert found == files


def test_a_store_that_stays_away_ends_the_run_with_nothing_lost(
    whole: raynforce.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LAST_SECONDS", 0.3)

    def away(status: raynforce.Status) -> None:
        OddStore.wrong, OddStore.left = OSError("no route"), 0 if status.steps > 300 else -1

    with pytest.raises(RaynforceError, match=r"^the checkpoint of step 1,606 is safe in .*, but not at odd://") as said:
        train("odd://bucket/run", away)
    assert "lost" not in str(said.value)
    OddStore.left = -1
    run = raynforce.resume("odd://bucket/run", progress="quiet")
    assert run.result.weights_sha256 == whole.result.weights_sha256
    shutil.rmtree(run.path)
    assert last_step("odd://bucket/run") == 1606


def test_the_end_of_the_logs_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrored, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(mirrored, "FINISH_SECONDS", 0.05)
    run = MirroredRun(Remote.open("odd://bucket/run"))
    run.create("env: CartPole-v1\n")
    with run.locked():
        OddStore.wrong, OddStore.left = OSError("no route"), 0
        again = threading.Timer(0.03, lambda: setattr(OddStore, "left", -1))
        again.start()
        run.finish()
        again.join()
        assert run.remote.exists()
        OddStore.left = 0
        with pytest.raises(RaynforceError, match=r"is safe in .*; on this machine, raynforce resume odd://bucket/run"):
            run.finish()
        OddStore.left = -1


# -- one writer -------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


def test_a_second_process_is_refused_by_name_on_this_machine_and_on_another(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store/run"
    first = start("train", "ppo", "CartPole-v1", "--runtime", "inline", "--out", url, "--steps", "100000000")
    first.until((tmp_path / "store" / "run" / "last").exists)
    name = rf"run {url} is in use by process {first.process.pid} on host \S+ since .*: wait, or end it first"
    with pytest.raises(UsageError, match=name):
        raynforce.resume(url, progress="quiet")
    assert open_run(url).holder() is not None  # to read it is well
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match=name):
        raynforce.resume(url, progress="quiet")
    with pytest.raises(UsageError, match=f"there is a run at {url} already: .*: raynforce resume {url}$"):
        train(url)
    assert json.loads(command("doctor", url, "--json")[1])["running"]
    assert json.loads(command("show", url, "--json")[1])["status"] == "running"
    first.send("SIGTERM")
    assert first.ended() == 128 + 15
    assert f"resume {url}" in first.said
    assert open_run(url, all=True).holder() is None


def test_a_run_that_another_has_taken_over_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    run = MirroredRun(Remote.open("memory://bucket/run"))
    run.create("env: CartPole-v1\n")
    store = Remote.open("memory://bucket/run").store
    far = lock.Holder("far", 4321, "another boot", 1_800_000_000.0, "token of far")
    with run.locked() as held:
        run.remote.push(run.path)
        remote_lock.InStore(store).touch(far)
        with pytest.raises(RaynforceError, match="was taken over by process"):
            run.finish()
        with pytest.raises(RaynforceError, match="was taken over by process"):
            held.check()
    assert remote_lock.holder(store) == far


def test_a_run_that_was_continued_elsewhere_in_between_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    train("memory://bucket/run", steps=64)
    here = open_run("memory://bucket/run", all=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.path.parent / "elsewhere"))
    raynforce.resume("memory://bucket/run", steps=200, progress="quiet")
    with pytest.raises(UsageError, match="was continued elsewhere a moment ago: try again"), here.locked():
        pass


# -- refused, and begun again -----------------------------------------------------------------------------


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"holds 'mine.txt' already: choose another with --out$"):
        train(f"file://{tmp_path}/store")
    assert not Remote.open(f"file://{tmp_path}/store").working_copy().exists()


def test_a_run_that_was_deleted_there_may_be_begun_anew() -> None:
    run = train("memory://bucket/run", steps=64)
    (run.path / "old.txt").write_text("of the first")
    Remote.open("memory://bucket/run").store.fs.rm("/bucket/run", recursive=True)
    with pytest.raises(UsageError, match="there is no run at memory://bucket/run"):
        raynforce.resume("memory://bucket/run", progress="quiet")
    again = new_run("memory://bucket/run")
    assert again.notes == ["the run that was at memory://bucket/run is gone: what this machine had of it was removed"]
    train("memory://bucket/run", steps=64)
    assert not (run.path / "old.txt").exists()


def test_a_run_that_never_came_there_is_kept() -> None:
    run = MirroredRun(Remote.open("memory://bucket/run"))
    run.create("env: CartPole-v1\n")
    with pytest.raises(UsageError, match=r"began on this machine and never came there: .*; to drop it: rm -r "):
        new_run("memory://bucket/run")
    assert run.config.exists()


def test_a_new_run_that_is_refused_leaves_nothing_here() -> None:
    run = MirroredRun(Remote.open("memory://bucket/run"))
    run.create("env: CartPole-v1\n")
    other = remote_lock.claim(Remote.open("memory://bucket/run").store)
    with pytest.raises(UsageError, match="in use by process"), run.locked():
        pass
    other.release()
    assert not run.path.exists()


@pytest.mark.parametrize("words", ["resume", "eval", "show", "doctor", "train ppo CartPole-v1 --out"])
def test_a_url_that_nothing_knows_is_one_line(words: str) -> None:
    code, out, err = command(*words.split(), "nonsense://bucket/run")
    assert code == 2
    assert out == ""
    assert err == "raynforce: cannot use nonsense://bucket/run: ValueError: Protocol not known: nonsense\n"
