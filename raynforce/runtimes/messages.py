"""Values between processes of this machine: a pickle on an unnamed socket pair, its large arrays in a memfd."""

from __future__ import annotations

import array
import errno
import mmap
import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

LARGE = 4096  # bytes; below this a copy through the socket is cheaper than shared memory
LONGEST = 32_768  # bytes of one message, well below the socket's buffer, so that sending never has to wait
FDS = 250  # descriptors in one message; the kernel allows 253
_ALIGN = 64


class Packed:
    """A value ready to travel. It can be sent to any number of processes; the shared memory is written once."""

    held: ClassVar[int] = 0  # bytes of shared memory that this process keeps alive

    def __init__(self, data: bytes, small: Sequence[bytes] = (), sizes: Sequence[int] = (), fd: int = -1) -> None:
        self.data = data
        self.small = small  # arrays that are not worth shared memory; as bytes, so that they too arrive read-only
        self.sizes = sizes
        self.fd = fd
        Packed.held += self.nbytes

    @property
    def nbytes(self) -> int:
        return sum(_padded(size) for size in self.sizes)

    def value(self) -> Any:
        """Unpack it. Arrays are views of what came: read-only, and those in shared memory never copied."""
        if self.fd < 0:
            return pickle.loads(self.data, buffers=self.small)
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)
        memory = memoryview(mmap.mmap(self.fd, self.nbytes, flags=flags, prot=mmap.PROT_READ))
        buffers, start = [], 0
        for size in self.sizes:
            buffers.append(memory[start : start + size])
            start += _padded(size)
        return pickle.loads(self.data, buffers=buffers)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        Packed.held -= self.nbytes


def pack(value: Any) -> Packed:
    """Pickle a value; if its arrays are large, they are written to shared memory instead."""
    found: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=found.append)
    buffers = [buffer.raw() for buffer in found]
    if sum(b.nbytes for b in buffers) < LARGE:
        return Packed(data, [bytes(b) for b in buffers])
    return Packed(data, sizes=[b.nbytes for b in buffers], fd=_write(buffers))


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _write(buffers: Sequence[memoryview | bytes]) -> int:
    fd = os.memfd_create("raynforce", os.MFD_CLOEXEC)
    try:
        parts: list[memoryview | bytes] = []
        for buffer in buffers:
            parts += [buffer, bytes(_padded(len(buffer)) - len(buffer))]
        for first in range(0, len(parts), 512):  # the kernel takes 1,024 at once
            _write_all(fd, parts[first : first + 512])
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, parts: list[memoryview | bytes]) -> None:
    left = sum(len(part) for part in parts)
    while left:
        written = os.writev(fd, parts)
        left -= written
        while left and written:  # more than two gigabytes go in pieces
            if written >= len(parts[0]):
                written -= len(parts.pop(0))
            else:
                parts[0], written = parts[0][written:], 0


def send(connection: socket.socket, head: tuple[Any, ...], values: Sequence[Packed]) -> None:
    """Send a small header and any number of values as one message (of several packets if need be)."""
    fds = [v.fd for v in values if v.fd >= 0]
    packet = pickle.dumps((head, len(fds), [(v.data, v.small, v.sizes, v.fd >= 0) for v in values]), protocol=5)
    spilled = -1
    if len(packet) > LONGEST:
        spilled = _write([packet])
        fds.insert(0, spilled)
        packet = len(packet).to_bytes(8, "little")
    try:
        _send(connection, packet, fds[:FDS])
        for first in range(FDS, len(fds), FDS):
            _send(connection, b"+", fds[first : first + FDS])
    finally:
        if spilled >= 0:
            os.close(spilled)


def receive(connection: socket.socket) -> tuple[tuple[Any, ...], list[Packed]] | None:
    """The next message; None once the other side has gone."""
    packet, fds = _receive(connection)
    if not packet:
        return None
    if len(packet) == 8:  # too long for a packet: it is in the first descriptor
        with os.fdopen(fds.pop(0), "rb") as file:
            file.seek(0)
            packet = file.read(int.from_bytes(packet, "little"))
    head, count, described = pickle.loads(packet)
    while len(fds) < count:
        more = _receive(connection)
        if not more[0]:
            for fd in fds:
                os.close(fd)
            return None
        fds += more[1]
    left = iter(fds)
    return head, [Packed(data, small, sizes, next(left) if has_fd else -1) for data, small, sizes, has_fd in described]


def _send(connection: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([packet], rights)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    how = 2 * LONGEST, socket.CMSG_SPACE(4 * (FDS + 1)), socket.MSG_CMSG_CLOEXEC
    try:
        packet, rights, flags, _ = connection.recvmsg(*how)
    except ConnectionError:  # said once if it died with messages of ours unread; those that it had sent come after it
        packet, rights, flags, _ = connection.recvmsg(*how)
    for _, kind, data in rights:
        if kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:  # the rest of the descriptors is lost, and the message with them
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}; raise the limit (ulimit -n) or use fewer samplers")
    return packet, list(fds)
