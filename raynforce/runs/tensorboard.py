"""Event files for TensorBoard, written by hand: the format is small, tensorboard and its packages are not.

A file is a series of records (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details):
length, its checksum, data, its checksum. The data is an `Event` message of TensorFlow's `event.proto`.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from raynforce.runs import disk
from raynforce.runs.journal import Journal
from raynforce.runs.metrics import cannot_write

if TYPE_CHECKING:
    from raynforce.trees import Tree

_PREFIX = "events.out.tfevents."


class TensorBoardSink:
    """Scalars for `tensorboard --logdir DIRECTORY`, all metrics of a step in one record.

    A process writes a file of its own. With `resume_step`, TensorBoard drops what earlier files of the directory say
    about later steps. With `resume`, the `position()` that a checkpoint holds, that is not in them any more: the file
    of then is cut there, and those that came after it are deleted.
    """

    def __init__(
        self, directory: Path, journal: Journal, *, resume_step: int | None = None, resume: Tree | None = None
    ) -> None:
        self._journal = journal
        try:
            _go_back(directory, resume or {})
            self._path = _new_file(directory)
            journal.add(self._path)
        except OSError as error:
            raise cannot_write(directory, error) from error
        # Event: double wall_time = 1, int64 step = 2, string file_version = 3, Summary summary = 5,
        # SessionLog session_log = 7
        self._append(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))
        # SessionLog: status = 1, of which START is 1. TensorBoard purges from the step of every START but a
        # directory's first, so a run that was not resumed needs one too.
        first = 0 if resume_step is None else resume_step + 1
        self._append(_double(1, time.time()) + _int(2, first) + _bytes(7, _int(1, 1)))

    def position(self) -> Tree:
        """The file, and how long it will be after what was written so far, for a checkpoint."""
        return {self._path.name: self._journal.position(self._path)}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one event; a TensorBoard that is open shows it at its next reload."""
        # Summary: repeated Value value = 1; Value: string tag = 1, float simple_value = 2
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in metrics.items())
        self._append(_double(1, time.time()) + _int(2, int(step)) + _bytes(5, summary))

    def close(self) -> None:
        """Nothing is left to do here: the journal closes the file."""

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
        self._journal.append(self._path, record)


def _new_file(directory: Path) -> Path:
    """Make a file of a new name that sorts after its elders: TensorBoard reads them in the order of names."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = max([int(time.time()), *(_stamp(name) + 1 for name in os.listdir(directory))])
    while True:
        path = directory / f"{_PREFIX}{stamp:010d}.{os.uname().nodename}.{os.getpid()}"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            stamp += 1


def _stamp(name: str) -> int:
    """The time in the name of an event file; -1 if it is none."""
    stamp = name.removeprefix(_PREFIX).partition(".")[0]
    return int(stamp) if name.startswith(_PREFIX) and stamp.isdecimal() else -1


def _go_back(directory: Path, sizes: Tree) -> None:
    """Undo what was written to the directory since there were these files of these sizes."""
    sizes = {name: size for name, size in sizes.items() if _stamp(name) >= 0 and isinstance(size, int)}
    if not sizes or not directory.is_dir():
        return
    newest = max(map(_stamp, sizes))
    for name in os.listdir(directory):
        path = directory / name
        if name in sizes:
            with open(path, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                file.truncate(sizes[name] if 0 <= sizes[name] <= size else _whole_records(file))
                disk.sync(file.fileno())
        elif _stamp(name) > newest:
            path.unlink()


def _whole_records(file: BinaryIO) -> int:
    """Where the last whole record ends, of a file that may end in a torn one."""
    end, size = 0, os.fstat(file.fileno()).st_size
    while True:
        file.seek(end)
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if end + 16 + length > size:  # a record is length, checksum, data, checksum: 8 + 4 + n + 4 bytes
            return end
        end += 16 + length


# The wire types of protocol buffers that we need. A key is the field's number and its wire type.


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # too large for 32 bits
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _varint(field << 3 | 5) + packed


_CRC = list(range(256))
for _ in range(8):  # Castagnoli's polynomial, bits reversed
    _CRC = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in _CRC]


def crc32c(data: bytes) -> int:
    """The CRC-32C checksum (RFC 3720, appendix B.4)."""
    crc, table = 0xFFFFFFFF, _CRC
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum as records store it: rotated and shifted, so that checksums of checksums stay sound."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
