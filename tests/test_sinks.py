"""Sinks for services: what they are told, that a resumed run goes on there, and that none of them stops training."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from failing import SMALL
from running import metrics

import raynforce
from raynforce import sinks
from raynforce.cli import main
from raynforce.errors import UsageError
from raynforce.sinks import Line, Service

TINY = ["--steps", "96", "--runtime", "inline", "--quiet", "--set", "sampling.fragment=16", "--set", "log_every=16"]
TINY += ["--envs", "2", "--no-preset", "--set", "eval.episodes=2", "--set", "eval.final_episodes=0"]
ENV = "info_envs:Teller"


class Fake(Service):
    """Keeps what it is sent; fails or hangs where it is told to."""

    name, package, extra = "Fake", "json", "fake"

    def __init__(self, fails: str = "", hangs: str = "") -> None:
        super().__init__()
        self.fails, self.hangs = fails, hangs
        self.sent: list[Line] = []
        self.ended: list[bool] = []
        self.go_on = threading.Event()

    def does(self, what: str) -> None:
        if self.fails == what:
            raise OSError(f"no {what} today\nnor tomorrow")
        if self.hangs == what:
            self.go_on.wait(20)

    def _open(self, path: Path, config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        self.path, self.config, self.known = path, config, dict(known)
        self.does("open")
        return {"id": known.get("id", 0) + 1}

    def _send(self, lines: Sequence[Line]) -> None:
        self.does("send")
        self.sent += lines

    def _finish(self, failed: bool) -> None:
        self.does("finish")
        self.ended.append(failed)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "EVERY", 0.01)


def train(out: Path, sink: Any, **more: Any) -> raynforce.Run:
    how: dict[str, Any] = {"steps": 500, "runtime": "inline", "progress": "quiet", "settings": SMALL | {"log_every": 1}}
    return raynforce.train(ENV, out=out, **how | {"sinks": [sink]} | more)


def test_a_service_gets_every_line_and_knows_the_run_when_it_goes_on(tmp_path: Path) -> None:
    first = Fake()
    run = train(tmp_path / "run", first)
    assert (first.path, first.known, first.ended) == (run.path, {}, [False])
    assert first.config == run.config.to_dict()
    lines = [(line["step"], line.get("losses/value_loss")) for line in metrics(run.path)]
    assert [(line.step, line.metrics.get("losses/value_loss")) for line in first.sent] == lines
    again = Fake()
    raynforce.resume(run.path, steps=run.result.steps + 300, sinks=[again], progress="quiet")
    assert again.known == {"id": 1}
    assert json.loads((run.path / "fake.json").read_text()) == {"id": 2}
    assert again.sent[0].step >= first.sent[-1].step
    run = train(tmp_path / "other", again)  # one after another may use it
    assert again.known == {}
    assert again.sent[-1].step == run.result.steps


def test_a_run_that_is_done_before_its_first_report_is_told_of_at_its_end(tmp_path: Path) -> None:
    run = train(tmp_path / "run", Fake(), settings={"log_every": 100_000})
    (line,) = [line for line in metrics(run.path) if "losses/value_loss" in line]
    assert line["step"] == run.result.steps
    assert line["charts/updates"] == run.result.updates


class Listening(Fake):
    """Keeps what it is told beside metrics."""

    def _tell(self) -> None:
        self.told = [event["event"] for event in self._events]

    def _conclude(self, result: Mapping[str, Any], where_the_time_went: str) -> None:
        self.result, self.went, self.films = result, where_the_time_went, [film.name for film in self._videos]


def test_a_service_is_told_of_faults_the_result_what_bound_the_run_and_films(tmp_path: Path) -> None:
    sink = Listening()

    def film(status: raynforce.Status) -> None:
        (status.path / "episodes").mkdir(exist_ok=True)
        (status.path / "episodes" / "one.mp4").write_bytes(b"")
        (status.path / "notes.txt").write_text("to remember")

    run = train(tmp_path / "run", sink, callbacks=[film])
    assert sink.told[:1] == ["started"]
    assert [json.loads(line)["event"] for line in sink._event_lines().splitlines()] == ["started", "stopped", "result"]
    assert sink.result == run.result.to_json()
    assert sink.went == run.where_the_time_went
    assert sink.films == ["one.mp4"]
    assert sink._notes == "to remember"


def test_faults_and_their_reasons_reach_sinks(tmp_path: Path) -> None:
    sink = Listening()
    run = raynforce.train(
        "fault_envs:Raising",
        out=tmp_path / "run",
        steps=400,
        runtime="inline",
        progress="quiet",
        sinks=[sink],
        settings=SMALL | {"log_every": 1},
    )
    assert run.result.env_restarts
    assert "fault" in sink.told
    assert sink._faults[0].endswith("; environment restarted")
    assert sink.sent[-2].metrics["health/restarts/env/raised"] > 0


@pytest.mark.parametrize("fails", ["open", "send", "finish"])
def test_a_service_that_fails_is_left_out_with_one_line(
    fails: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", Fake(fails))
    assert run.result.stopped == "steps done"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("raynforce: metric sink Fake failed ")
    assert line.endswith(f": Fake: OSError: no {fails} today")


@pytest.mark.parametrize("hangs", ["open", "send", "finish"])
def test_a_service_that_hangs_holds_nobody_up(
    hangs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
    fake = Fake(hangs=hangs)
    began = time.monotonic()
    try:
        assert train(tmp_path / "run", fake).result.stopped == "steps done"
        assert time.monotonic() - began < 15  # it hangs for 20
    finally:
        fake.go_on.set()
    (line,) = capsys.readouterr().err.splitlines()
    assert "Fake has not answered for 0 s" in line


def test_what_a_slow_service_may_be_behind_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sinks, "MOST_WAITING", 3)
    fake = Fake(hangs="open")
    fake.begin(tmp_path, {})
    for step in range(10):
        fake.write(step, {"a": 1.0})
    fake.go_on.set()
    with pytest.raises(raynforce.RaynforceError, match="too slow: 7 lines of metrics are lost"):
        fake.close()
    assert [line.step for line in fake.sent] == [0, 1, 2]


def test_a_run_that_fails_is_told_as_such(tmp_path: Path) -> None:
    def fail(status: raynforce.Status) -> None:
        raise ZeroDivisionError

    fake = Fake()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", fake, callbacks=[fail])
    assert fake.ended == [True]


def test_a_sink_of_ones_own_may_begin_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Bare:
        def __init__(self) -> None:
            self.lines = 0

        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            self.lines += 1

        def close(self) -> None: ...

    class Wrong(Bare):
        def begin(self, path: Path, config: Any) -> None:
            raise KeyError("what?")

    bare, wrong = Bare(), Wrong()
    train(tmp_path / "run", bare, sinks=[bare, wrong])
    assert bare.lines > 1
    assert wrong.lines == 0
    assert "metric sink Wrong cannot begin and is left out: KeyError: 'what?'" in capsys.readouterr().err


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sinks.WandbSink, "package", "no_such_package_wandb")
    with pytest.raises(UsageError, match=r'WandbSink needs .* not installed: pip install "raynforce\[wandb\]"'):
        sinks.WandbSink()
    assert main(["train", "ppo", ENV, *TINY, "--log", "wandb"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["train", "ppo", ENV, *TINY, "--log", "wand"]) == 2
    told = capsys.readouterr().err
    assert "wand" in told
    assert told.count("\n") == 1


def test_which_services_a_run_has(tmp_path: Path) -> None:
    (tmp_path / "mlflow.json").write_text("{}")
    if not all(map(importlib.util.find_spec, ("wandb", "mlflow"))):
        pytest.skip("needs the extras `wandb` and `mlflow`")
    names = [[type(made).extra for made in sinks.services(given, tmp_path)] for given in ([], ["wandb"] * 2, ["none"])]
    assert names == [["mlflow"], ["mlflow", "wandb"], []]
    assert sinks.services([]) == []


def test_a_run_goes_on_without_a_service_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb.json").write_text("{}")
    monkeypatch.setattr(sinks.WandbSink, "package", "no_such_package_wandb")
    assert sinks.services([], tmp_path) == []
    assert "goes on without W&B: no_such_package_wandb is not installed" in capsys.readouterr().err
    with pytest.raises(UsageError):  # asked for, it is another matter
        sinks.services(["wandb"])


# -- the services themselves, without a network ---------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb", reason="W&B needs the extra `wandb`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "carts")
    yield wandb
    wandb.teardown()  # ends its process


def records(folder: Path) -> list[Any]:
    """What W&B has written down to be sent later: its process may be at it when the run has ended."""
    until = time.monotonic() + 30
    found = _records_so_far(folder)
    while not any(made.WhichOneof("record_type") == "exit" for made in found):
        assert time.monotonic() < until, [made.WhichOneof("record_type") for made in found]
        time.sleep(0.1)
        found = _records_so_far(folder)
    return found


def _records_so_far(folder: Path) -> list[Any]:
    store = importlib.import_module("wandb.sdk.internal.datastore").DataStore()
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    (file,) = folder.glob("*.wandb")
    store.open_for_scan(str(file))
    found = []
    with contextlib.suppress(AssertionError):
        while (data := store.scan_data()) is not None:
            made = record()
            made.ParseFromString(data)
            found.append(made)
    store._fp.close()  # nobody else does
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [made.history.item for made in records(folder) if made.WhichOneof("record_type") == "history"]
    keys = [[item.key or "/".join(item.nested_key) for item in items] for items in lines]
    values = [[json.loads(item.value_json) for item in items] for items in lines]
    return [dict(zip(*pair, strict=True)) for pair in zip(keys, values, strict=True)]


def test_wandb_offline(offline: Any, tmp_path: Path) -> None:
    assert main(["train", "ppo", ENV, *TINY, "--out", "run", "--log", "wandb"]) == 0
    known = json.loads(Path("run/wandb.json").read_text())
    assert known["project"] == "carts"
    (first,) = Path("wandb").glob(f"offline-run-*-{known['id']}")
    told, written = history(first), metrics(tmp_path / "run")
    assert [line["step"] for line in told] == [line["step"] for line in written]
    for ours, theirs in zip(written, told, strict=True):
        assert {name: theirs[name] for name in ours if name != "time"} == {k: v for k, v in ours.items() if k != "time"}
    (opened,) = [made.run for made in records(first) if made.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert config["run_path"] == str(tmp_path / "run")
    assert (config["env"], config["sampling"]["envs"]) == (ENV, 2)
    (events,) = first.glob("files/events.jsonl")
    assert [json.loads(line)["event"] for line in events.read_text().splitlines()] == ["started", "stopped", "result"]
    told = [
        item.key
        for made in records(first)
        if made.WhichOneof("record_type") == "summary"
        for item in made.summary.update
    ]
    assert {"result/weights_sha256", "where_the_time_went"} <= set(told)
    axes = [made.metric for made in records(first) if made.WhichOneof("record_type") == "metric"]
    assert [axis.step_metric for axis in axes if axis.glob_name == "*"] == ["step"]

    Path("run/notes.txt").write_text("to remember")
    time.sleep(1.1)  # W&B names folders by the second
    assert main(["resume", "run", "--steps", "160", "--quiet"]) == 0  # it goes on there without being told
    assert json.loads(Path("run/wandb.json").read_text()) == known
    (second,) = set(Path("wandb").glob(f"offline-run-*-{known['id']}")) - {first}
    later = metrics(tmp_path / "run")[len(written) :]
    assert [line["step"] for line in history(second)] == [line["step"] for line in later]
    assert "to remember" in [made.run.notes for made in records(second) if made.WhichOneof("record_type") == "run"]


@pytest.mark.slow  # its database takes its time to be made
def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow needs the extra `mlflow`")
    pytest.importorskip("sqlalchemy", reason="MLflow needs the extra `mlflow`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "carts")
    level = logging.getLogger("mlflow").level
    try:
        assert main(["train", "ppo", ENV, *TINY, "--out", "run", "--log", "mlflow"]) == 0
        known = json.loads(Path("run/mlflow.json").read_text())
        Path("run/notes.txt").write_text("to remember")
        assert main(["resume", "run", "--steps", "160", "--quiet"]) == 0
        assert json.loads(Path("run/mlflow.json").read_text()) == known
    finally:
        logging.getLogger("mlflow").setLevel(level)
    client = mlflow.tracking.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("carts").experiment_id])
    assert (found.info.run_id, found.info.status, found.info.run_name) == (known["run_id"], "FINISHED", "run")
    assert found.data.params["sampling.envs"] == "2"
    assert found.data.tags["raynforce.path"] == str(tmp_path / "run")
    assert found.data.tags["raynforce.result.stopped"] == "steps done"
    assert found.data.tags["mlflow.note.content"] == "to remember"
    assert "time went" in found.data.tags["raynforce.where_the_time_went"]
    assert "events.jsonl" in [artifact.path for artifact in client.list_artifacts(known["run_id"])]
    for name in ("charts/episodic_return", "eval/return", "charts/info/is_success", "charts/info/made/total"):
        told = [(point.step, point.value) for point in client.get_metric_history(known["run_id"], name)]
        written = [(line["step"], pytest.approx(line[name])) for line in metrics(tmp_path / "run") if name in line]
        assert sorted(told) == written
        assert told


@pytest.mark.parametrize("uri", ["/tmp/somewhere", "mlruns", "file:///tmp/somewhere"])
def test_a_folder_for_mlflow_is_refused_before_training(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UsageError, match=r"use a database, such as sqlite:////.*\.db"):
        sinks.MlflowSink()
