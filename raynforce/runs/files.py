"""Files of a checkpoint: hashed as they are written, and read with the care that a stranger's file asks for."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import safetensors

from raynforce.errors import summary
from raynforce.runs import disk

CHUNK = 8 << 20  # large, since each one waits for Python's lock while another thread trains
LARGEST_JSON = 64 << 20
LARGEST_HEADER = 16 << 20
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

_SIZES = {"u": (1, 2, 4, 8), "i": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8,)}
_DTYPES = {f"{kind.upper()}{8 * n}": np.dtype(f"<{kind}{n}") for kind, sizes in _SIZES.items() for n in sizes}
_DTYPES["BOOL"] = np.dtype("?")
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Stated(NamedTuple):
    size: int
    sha256: str


class Unreadable(Exception):
    """Why a file is not to be used: the end of a sentence that begins with its name."""


class Unavailable(Unreadable):
    """The disk does not give it now; that says nothing of what is in it."""


def pack(arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, in pieces: contiguous arrays are not copied."""
    header: dict[str, Any] = {}
    ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # so that each is aligned
    end = 0
    for name in ordered:
        array = arrays[name]
        kind = _NAMES.get(array.dtype.newbyteorder("<"))
        if kind is None or name == "__metadata__":
            raise ValueError(f"{name} of dtype {array.dtype} cannot be saved")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"{len(arrays)} arrays are too many for one file")
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        little = np.asarray(arrays[name], arrays[name].dtype.newbyteorder("<"), order="C")
        flat = little.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK].data


def to_json(value: Any) -> bytes:
    text = json.dumps(value).encode()
    if len(text) > LARGEST_JSON:
        raise ValueError(f"{len(text)} bytes of JSON are more than {LARGEST_JSON}: save large data as arrays")
    return text


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> Stated:
    """Write a new file through to the disk; returns its size and hash."""
    with path.open("xb") as file:
        stated = state(chunks, file)
        file.flush()
        disk.sync(file.fileno())
    return stated


def state(chunks: Iterable[bytes | memoryview], file: IO[bytes] | None = None) -> Stated:
    """The size and hash that a file of these bytes has; they are written to `file`, if there is one."""
    sha, size = hashlib.sha256(), 0
    for chunk in chunks:
        if file is not None:
            file.write(chunk)
        sha.update(chunk)
        size += len(chunk)
    return Stated(size, sha.hexdigest())


@contextlib.contextmanager
def _opened(path: Path, stated: Stated | None, most: int) -> Iterator[io.BufferedReader]:
    """A regular file of the stated size; whatever is wrong with it, or with reading it, is `Unreadable`."""
    descriptor = -1
    try:
        # Neither waits for the other end of a FIFO nor follows a link.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable("is not a regular file")
        if stated is not None and found.st_size != stated.size:
            raise Unreadable(f"is not what its manifest says: {found.st_size} bytes instead of {stated.size}")
        if found.st_size > most:
            raise Unreadable(f"is too large: {found.st_size} bytes, and at most {most} are read")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise Unreadable("is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unreadable("is a symbolic link") from None
        raise Unavailable(f"cannot be read ({error.strerror})") from None
    except MemoryError:
        raise Unreadable("does not fit into memory") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _require(sha256: str, stated: Stated | None) -> None:
    if stated is not None and sha256 != stated.sha256:
        raise Unreadable("is not what its manifest says: its hash is another")


def check_size(path: Path, stated: Stated) -> None:
    with _opened(path, stated, stated.size):
        pass


def verify(path: Path, stated: Stated) -> None:
    """Read a file again, from the disk and not from memory where that can be had."""
    with _opened(path, stated, stated.size) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        _require(hashlib.file_digest(file, "sha256").hexdigest(), stated)


def read_json(path: Path, stated: Stated | None) -> dict[str, Any]:
    with _opened(path, stated, LARGEST_JSON) as file:
        data = file.read()
        _require(hashlib.sha256(data).hexdigest(), stated)
        try:
            value = json.loads(data.decode())
        except (ValueError, RecursionError):
            raise Unreadable("is not JSON") from None
        if not isinstance(value, dict):
            raise Unreadable("is not a JSON object")
        return value


def read_arrays(path: Path, stated: Stated) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file that is as stated."""
    with _opened(path, stated, _MEMORY) as file:
        data = file.read()
    _require(hashlib.sha256(data).hexdigest(), stated)
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        arrays = {n: np.frombuffer(e["data"], _DTYPES[e["dtype"]]).reshape(e["shape"]) for n, e in found}
    except (safetensors.SafetensorError, KeyError, ValueError, OverflowError) as error:
        raise Unreadable(f"is not a safetensors file ({summary(error)[:200]})") from None
    for name, array in arrays.items():
        if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise Unreadable(f"has truth values in {name[:80]!r} that are none")
    return arrays
