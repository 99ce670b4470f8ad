"""Event files, read back by TensorBoard itself."""

import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from raynforce.errors import RaynforceError
from raynforce.runs.tensorboard import TensorBoardSink, crc32c, masked_crc32c


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


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    before = time.time()
    sink = TensorBoardSink(tmp_path / "a" / "tensorboard")
    sink.write(0, {"charts/episodic_return": 20.5, "losses/policy": -0.25})
    sink.write(1 << 40, {"charts/episodic_return": 100.0, "größe/ß": 1})
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


def test_numbers_beyond_float32(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"nan": math.nan, "large": 1e300, "small": -1e300})
    sink.close()
    assert scalars(tmp_path, "large") == [(1, math.inf)]
    assert scalars(tmp_path, "small") == [(1, -math.inf)]
    assert math.isnan(scalars(tmp_path, "nan")[0][1])


def test_a_long_record_keeps_its_checksum(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(5, {f"losses/{'x' * 200}{i}": float(i) for i in range(50)})
    sink.close()
    assert scalars(tmp_path, f"losses/{'x' * 200}49") == [(5, 49.0)]


def test_resume_purges_later_points(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in (10, 20, 30, 40):
        sink.write(step, {"charts/SPS": step})
    sink.close()
    (old,) = tmp_path.iterdir()
    with open(old, "ab") as file:
        file.write(b"\x30\x00\x00")  # torn by a kill

    sink = TensorBoardSink(tmp_path, resume_step=20)
    sink.write(30, {"charts/SPS": 31})
    sink.close()
    assert scalars(tmp_path, "charts/SPS") == [(10, 10.0), (20, 20.0), (30, 31.0)]
    scripts = event_accumulator.EventAccumulator(str(tmp_path))  # the one that people's scripts use
    scripts.Reload()
    assert [(e.step, e.value) for e in scripts.Scalars("charts/SPS")] == [(10, 10.0), (20, 20.0), (30, 31.0)]

    _, new = sorted(tmp_path.iterdir())
    assert new != old
    version, start, _ = EventFileLoader(str(new)).Load()
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (SessionLog.START, 21)


def test_a_new_file_sorts_after_the_old_ones_even_if_the_clock_went_back(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.4000000000.other.1").touch()
    (tmp_path / "notes.txt").touch()
    for _ in range(2):
        TensorBoardSink(tmp_path, resume_step=0).close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert [name.split(".")[3] for name in names[:3]] == ["4000000000", "4000000001", "4000000002"]


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RaynforceError, match=r"cannot write .*/file/tensorboard: Not a directory"):
        TensorBoardSink(tmp_path / "file" / "tensorboard")


def test_a_write_takes_well_under_a_millisecond(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    metrics = {f"losses/some_metric_{i}": i / 7 for i in range(20)}
    took = []
    for step in range(50):
        begin = time.monotonic()
        sink.write(step, metrics)
        took.append(time.monotonic() - begin)
    sink.close()
    assert min(took) < 1e-3
