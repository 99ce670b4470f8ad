"""Event files, read back by TensorBoard itself."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from raynforce.errors import RaynforceError
from raynforce.runs.journal import Journal
from raynforce.runs.tensorboard import TensorBoardSink, crc32c, masked_crc32c
from raynforce.trees import Tree


@pytest.fixture
def journal() -> Iterator[Journal]:
    journal = Journal()
    yield journal
    journal.close()


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    assert accumulator.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
    return [(e.step, e.tensor_proto.float_val[0]) for e in accumulator.Tensors(tag)]


def test_checksum_has_the_values_of_rfc_3720() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283
    assert masked_crc32c(b"") == 0xA282EAD8


def test_tensorboard_reads_the_scalars(tmp_path: Path, journal: Journal) -> None:
    before = time.time()
    sink = TensorBoardSink(tmp_path / "a" / "tensorboard", journal)
    sink.write(0, {"charts/episodic_return": 20.5, "losses/policy": -0.25})
    sink.write(1 << 40, {"charts/episodic_return": 100.0, "größe/ß": 1})
    assert journal.flush(5.0)
    (path,) = (tmp_path / "a" / "tensorboard").iterdir()
    events: list[Event] = list(EventFileLoader(str(path)).Load())  # while the sink is still open
    sink.close()
    sink.close()

    assert path.name.startswith("events.out.tfevents.")
    assert [e.file_version for e in events] == ["brain.Event:2", "", "", ""]
    assert [e.step for e in events] == [0, 0, 0, 1 << 40]
    assert [len(e.summary.value) for e in events] == [0, 0, 2, 2]
    assert all(before <= e.wall_time <= time.time() for e in events)
    directory = tmp_path / "a" / "tensorboard"
    assert scalars(directory, "charts/episodic_return") == [(0, 20.5), (1 << 40, 100.0)]
    assert scalars(directory, "losses/policy") == [(0, -0.25)]
    assert scalars(directory, "größe/ß") == [(1 << 40, 1.0)]


def test_numbers_beyond_float32(tmp_path: Path, journal: Journal) -> None:
    sink = TensorBoardSink(tmp_path, journal)
    sink.write(1, {"nan": math.nan, "large": 1e300, "small": -1e300})
    assert journal.flush(5.0)
    assert scalars(tmp_path, "large") == [(1, math.inf)]
    assert scalars(tmp_path, "small") == [(1, -math.inf)]
    assert math.isnan(scalars(tmp_path, "nan")[0][1])


def test_a_long_record_keeps_its_checksum(tmp_path: Path, journal: Journal) -> None:
    sink = TensorBoardSink(tmp_path, journal)
    sink.write(5, {f"losses/{'x' * 200}{i}": float(i) for i in range(50)})
    assert journal.flush(5.0)
    assert scalars(tmp_path, f"losses/{'x' * 200}49") == [(5, 49.0)]


def test_resume_purges_later_points(tmp_path: Path, journal: Journal) -> None:
    sink = TensorBoardSink(tmp_path, journal)
    for step in (10, 20, 30, 40):
        sink.write(step, {"charts/SPS": step})
    assert journal.flush(5.0)
    (old,) = tmp_path.iterdir()
    with open(old, "ab") as file:
        file.write(b"\x30\x00\x00")  # torn by a kill

    sink = TensorBoardSink(tmp_path, journal, resume_step=20)
    sink.write(30, {"charts/SPS": 31})
    assert journal.flush(5.0)
    assert scalars(tmp_path, "charts/SPS") == [(10, 10.0), (20, 20.0), (30, 31.0)]
    scripts = event_accumulator.EventAccumulator(str(tmp_path))  # the one that people's scripts use
    scripts.Reload()
    assert [(e.step, e.value) for e in scripts.Scalars("charts/SPS")] == [(10, 10.0), (20, 20.0), (30, 31.0)]

    _, new = sorted(tmp_path.iterdir())
    assert new != old
    version, start, _ = EventFileLoader(str(new)).Load()
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (SessionLog.START, 21)


def test_a_new_file_sorts_after_the_old_ones_even_if_the_clock_went_back(tmp_path: Path, journal: Journal) -> None:
    (tmp_path / "events.out.tfevents.4000000000.other.1").touch()
    (tmp_path / "notes.txt").touch()
    for _ in range(2):
        TensorBoardSink(tmp_path, journal, resume_step=0).close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert [name.split(".")[3] for name in names[:3]] == ["4000000000", "4000000001", "4000000002"]


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path, journal: Journal) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RaynforceError, match=r"cannot write .*/file/tensorboard: Not a directory"):
        TensorBoardSink(tmp_path / "file" / "tensorboard", journal)


def test_a_write_takes_well_under_a_millisecond(tmp_path: Path, journal: Journal) -> None:
    sink = TensorBoardSink(tmp_path, journal)
    metrics = {f"losses/some_metric_{i}": i / 7 for i in range(20)}
    took = []
    for step in range(50):
        begin = time.monotonic()
        sink.write(step, metrics)
        took.append(time.monotonic() - begin)
    assert journal.flush(5.0)
    assert min(took) < 1e-3


# -- resume -----------------------------------------------------------------------------------------------


def begin(
    directory: Path, resume_step: int | None = None, resume: Tree | None = None
) -> tuple[TensorBoardSink, Journal]:
    """As a new process does."""
    journal = Journal()
    return TensorBoardSink(directory, journal, resume_step=resume_step, resume=resume), journal


def test_resume_goes_back_to_exactly_the_checkpoint(tmp_path: Path) -> None:
    sink, journal = begin(tmp_path)
    for step in (10, 20, 30):
        sink.write(step, {"charts/SPS": step})
    position = sink.position()
    sink.write(20, {"eval/return": 1.0})  # of an early step, but after the checkpoint: it comes again
    sink.write(40, {"charts/SPS": 40})
    journal.close()
    (first,) = tmp_path.iterdir()
    assert list(position) == [first.name]
    assert 0 < position[first.name] < first.stat().st_size

    sink, journal = begin(tmp_path, 30, position)  # is killed before its first checkpoint
    sink.write(40, {"charts/SPS": 41})
    journal.close()
    assert first.stat().st_size == position[first.name]
    assert len(list(tmp_path.iterdir())) == 2

    (tmp_path / "events.out.tfevents.0000000001.mine").write_bytes(b"")  # of somebody else
    (tmp_path / "notes.txt").touch()
    sink, journal = begin(tmp_path, 30, position)
    sink.write(20, {"eval/return": 2.0})
    sink.write(40, {"charts/SPS": 42})
    later = sink.position()
    sink.write(50, {"charts/SPS": 50})
    journal.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {first.name, *later, "events.out.tfevents.0000000001.mine", "notes.txt"}

    sink, journal = begin(tmp_path, 40, later)
    sink.write(50, {"charts/SPS": 51})
    journal.close()
    assert first.stat().st_size == position[first.name]
    assert scalars(tmp_path, "charts/SPS") == [(10, 10.0), (20, 20.0), (30, 30.0), (40, 42.0), (50, 51.0)]
    assert scalars(tmp_path, "eval/return") == [(20, 2.0)]


@pytest.mark.parametrize("lost", [1, 8, 15, 40])
def test_a_file_that_lost_its_end_keeps_its_whole_records(tmp_path: Path, lost: int) -> None:
    sink, journal = begin(tmp_path)
    sizes = []
    for step in (10, 20, 30):
        sizes.append(sum(sink.position().values()))
        sink.write(step, {"charts/SPS": step})
    position = sink.position()
    journal.close()
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - lost)
    assert path.stat().st_size > sizes[2] > 0
    sink, journal = begin(tmp_path, 30, position)
    journal.close()
    assert path.stat().st_size == sizes[2]
    assert scalars(tmp_path, "charts/SPS") == [(10, 10.0), (20, 20.0)]


@pytest.mark.parametrize("position", [{}, {"../precious": 1}, {"events.out.tfevents.x": 1}, {"notes.txt": 0}])
def test_a_position_that_is_none_deletes_and_cuts_nothing(tmp_path: Path, position: Tree) -> None:
    directory = tmp_path / "tensorboard"
    for step in (None, 10):
        sink, journal = begin(directory, step)
        sink.write(10, {"charts/SPS": 10})
        journal.close()
    for path in (tmp_path / "precious", directory / "notes.txt", directory / "events.out.tfevents.x"):
        path.write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    _, journal = begin(directory, 10, position)
    journal.close()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(after) == len(before) + 1
    assert before.items() <= after.items()
