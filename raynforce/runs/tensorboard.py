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
from io import BufferedWriter
from pathlib import Path

from raynforce.runs.metrics import cannot_write

_PREFIX = "events.out.tfevents."


class TensorBoardSink:
    """Scalars for `tensorboard --logdir DIRECTORY`, all metrics of a step in one record.

    With `resume_step`, TensorBoard drops what earlier files of the directory say about later steps.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        try:
            self._file = _new_file(Path(directory))
        except OSError as error:
            raise cannot_write(Path(directory), error) from error
        # Event: double wall_time = 1, int64 step = 2, string file_version = 3, Summary summary = 5,
        # SessionLog session_log = 7
        self._append(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))
        # SessionLog: status = 1, of which START is 1. TensorBoard purges from the step of every START but a
        # directory's first, so a run that was not resumed needs one too.
        first = 0 if resume_step is None else resume_step + 1
        self._append(_double(1, time.time()) + _int(2, first) + _bytes(7, _int(1, 1)))
        self._file.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one event; a TensorBoard that is open shows it at its next reload."""
        # Summary: repeated Value value = 1; Value: string tag = 1, float simple_value = 2
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in metrics.items())
        self._append(_double(1, time.time()) + _int(2, int(step)) + _bytes(5, summary))
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(
            length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
        )


def _new_file(directory: Path) -> BufferedWriter:
    """Open a file of a new name that sorts after its elders: TensorBoard reads them in the order of names."""
    directory.mkdir(parents=True, exist_ok=True)
    stamps = (name.removeprefix(_PREFIX).partition(".")[0] for name in os.listdir(directory))
    stamp = max([int(time.time()), *(int(s) + 1 for s in stamps if s.isdecimal())])
    while True:
        try:
            return open(directory / f"{_PREFIX}{stamp:010d}.{os.uname().nodename}.{os.getpid()}", "xb")
        except FileExistsError:
            stamp += 1


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


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli's polynomial, bits reversed
        table.append(crc)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """The CRC-32C checksum (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    table = _CRC
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum as records store it: rotated and shifted, so that checksums of checksums stay sound."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
