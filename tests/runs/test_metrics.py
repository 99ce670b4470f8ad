"""Metric sinks: valid JSON lines, exact continuation, and failures that do or do not end a run."""

import errno
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs.journal import Journal
from raynforce.runs.metrics import JsonlSink, Metrics
from raynforce.trees import Tree


class Flushed(Journal):
    """Appends are in the file when they return: these tests read it all the time."""

    def append(self, path: Path, line: bytes) -> None:
        super().append(path, line)
        assert self.flush(5.0)


@pytest.fixture
def another() -> Iterator[Callable[[], Journal]]:
    """Makes journals; every process has one of its own."""
    made: list[Journal] = []

    def make() -> Journal:
        made.append(Flushed())
        return made[-1]

    yield make
    for journal in made:
        journal.close()


@pytest.fixture
def journal(another: Callable[[], Journal]) -> Journal:
    return another()


def read(path: Path) -> list[dict[str, float | None]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


class Recorder:
    def __init__(self, fail_at: int | None = None, fail_close: bool = False) -> None:
        self.steps: list[int] = []
        self.closed = 0
        self.fail_at = fail_at
        self.fail_close = fail_close

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise ConnectionError("no route\nto host")
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1
        if self.fail_close:
            raise OSError("cannot close")


def test_each_write_is_one_json_line(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, journal)
    sink.write(1024, {"charts/SPS": 18311, "losses/policy": -0.0125, "time/seconds": 2.5})
    assert read(path) == [
        {"step": 1024, "time": 2.5, "charts/SPS": 18311, "losses/policy": -0.0125, "time/seconds": 2.5}
    ]
    sink.write(2048, {"charts/SPS": 18400})
    second = read(path)[1]
    assert list(second) == ["step", "time", "charts/SPS"]
    assert 0.0 <= (second["time"] or 0.0) < 60.0
    sink.close()
    sink.close()


def test_numbers_that_json_lacks_become_null(tmp_path: Path, journal: Journal) -> None:
    import numpy as np

    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, journal)
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": float(np.float32(0.5)), "e": np.float32(0.25)}
    sink.write(np.int64(3), {**values, "f": np.int64(7)})  # type: ignore[arg-type, dict-item]
    sink.close()
    (line,) = read(path)
    assert {k: line[k] for k in "abcdef"} == {"a": None, "b": None, "c": None, "d": 0.5, "e": 0.25, "f": 7}
    assert line["step"] == 3


@pytest.mark.parametrize(("metrics", "says"), [({"step": 1.0}, "'step' is taken"), ({"x": "high"}, "'x' is 'high'")])
def test_wrong_metrics_are_named(tmp_path: Path, metrics: dict[str, float], says: str, journal: Journal) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", journal)
    with pytest.raises(UsageError, match=says):
        sink.write(1, metrics)
    sink.close()
    assert read(tmp_path / "metrics.jsonl") == []


def test_resume_without_a_file_begins_one(tmp_path: Path, journal: Journal) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", journal, resume_step=5)
    sink.write(6, {})
    sink.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [6]


def test_a_new_run_does_not_write_into_an_old_one(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0.1}\n')
    with pytest.raises(UsageError, match="already holds a run"):
        JsonlSink(path, journal)
    assert len(read(path)) == 1


def written(path: Path, journal: Journal, count: int = 5) -> list[Tree]:
    """A file with a few lines, and the positions before the first and after each."""
    sink = JsonlSink(path, journal)
    positions = [sink.position()]
    for step in range(1, count + 1):
        sink.write(step, {"charts/SPS": step * 1000, "time/seconds": step * 10.0})
        positions.append(sink.position())
    return positions


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_resume_cuts_at_the_position_of_the_checkpoint(tmp_path: Path, another: Callable[[], Journal], at: int) -> None:
    path = tmp_path / "metrics.jsonl"
    positions = written(path, another())
    # An evaluation of step 2 that ended after the checkpoint: it comes again, although its step is an early one.
    JsonlSink(path, another(), resume_step=5, resume=positions[5]).write(2, {"eval/return": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"step": 7, "ti')  # torn
    assert path.read_bytes().count(b"step") == 7
    sink = JsonlSink(path, another(), resume_step=5, resume=positions[at])
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5][:at]
    sink.write(9, {})
    lines = read(path)
    assert [line["step"] for line in lines] == [*range(1, at + 1), 9]
    assert at * 10.0 <= (lines[-1]["time"] or 0.0) < at * 10.0 + 5.0
    assert sink.position() == {"bytes": path.stat().st_size}


def test_the_position_counts_what_is_not_written_yet(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal()
    sink = JsonlSink(path, journal)
    sink.write(1, {"time/seconds": 1.0})
    assert sink.position() == {"bytes": len('{"step": 1, "time": 1.0, "time/seconds": 1.0}\n')}
    journal.close()
    assert sink.position() == {"bytes": path.stat().st_size}


def test_a_file_that_lost_its_end_keeps_its_whole_lines(tmp_path: Path, another: Callable[[], Journal]) -> None:
    path = tmp_path / "metrics.jsonl"
    positions = written(path, another())
    whole, cut = positions[2]["bytes"], positions[3]["bytes"] - 4
    for size, position in ((cut, positions[5]), (positions[5]["bytes"], {"bytes": cut}), (whole, positions[5])):
        content = path.read_bytes()
        path.write_bytes(content[:size])
        JsonlSink(path, another(), resume=position)
        assert path.read_bytes() == content[:whole]
        path.write_bytes(content)


def test_a_very_long_line_is_found_whole(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"step": 1, "time": 7.0, "x" * 200_000: 1}) + "\n"
    path.write_text(2 * line)
    sink = JsonlSink(path, journal, resume={"bytes": 2 * len(line) - 1})
    assert path.read_text() == line
    sink.write(2, {})
    assert 7.0 <= (read(path)[1]["time"] or 0.0) < 12.0


def test_without_a_checkpoint_the_file_begins_anew(tmp_path: Path, another: Callable[[], Journal]) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, another())
    JsonlSink(path, another(), resume_step=0)
    assert read(path) == []


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = tmp_path / "metrics.jsonl", list[str]()
    journal = Journal(told.append)
    metrics = Metrics([JsonlSink(path, journal)])
    with monkeypatch.context() as patch:

        def full(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "write", full)
        deadline = time.monotonic() + 5.0
        while not told:
            metrics.write(1, {"charts/SPS": 1.0})
            assert time.monotonic() < deadline
            time.sleep(0.01)
    metrics.close()
    assert journal.close()
    assert read(path)
    assert f"cannot write {path}: No space left on device" in told[0]


def test_a_path_that_cannot_be_opened_is_one_clear_error(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(RaynforceError, match=r"cannot write .*/missing/metrics.jsonl: No such file or directory"):
        JsonlSink(tmp_path / "missing" / "metrics.jsonl", journal)


def test_a_failing_sink_is_left_out_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], journal: Journal
) -> None:
    good, bad = Recorder(), Recorder(fail_at=2)
    metrics = Metrics([bad, JsonlSink(tmp_path / "metrics.jsonl", journal), good])
    for step in (1, 2, 3, 4):
        metrics.write(step, {"charts/SPS": 1.0})
    metrics.close()
    assert good.steps == [1, 2, 3, 4]
    assert bad.steps == [1]
    assert (good.closed, bad.closed) == (1, 1)
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    warning = "raynforce: metric sink Recorder failed and is left out from step 2 on: ConnectionError: no route\n"
    assert capsys.readouterr().err == warning


def test_every_sink_is_closed_even_if_one_fails_to(capsys: pytest.CaptureFixture[str]) -> None:
    first, failing, last = Recorder(), Recorder(fail_close=True), Recorder()
    metrics = Metrics([first, failing, last])
    metrics.close()
    metrics.close()
    assert (first.closed, failing.closed, last.closed) == (1, 1, 1)
    assert capsys.readouterr().err == "raynforce: metric sink Recorder failed to close: OSError: cannot close\n"


def test_importing_is_cheap() -> None:
    code = (
        "import sys, raynforce.runs.metrics, raynforce.runs.tensorboard, raynforce.runs.progress as p;"
        "p.make_progress(sys.stderr, mode='live');"
        "print([m for m in ('rich', 'numpy', 'torch', 'tensorboard', 'google.protobuf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
