"""Ends of the gateway's connections: byte streams and ZMQ, and the whole messages that come out of them."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from raynforce.protocol.frame import GREETING_META, HEADER, MAGIC, ProtocolError
from raynforce.protocol.handshake import Hello
from raynforce.protocol.wire import prepare

CHUNK = 1 << 16
MOST_WAITING = 1 << 28
"""Bytes kept for an end that does not read."""
_SIZES = struct.Struct("<IQ")  # of meta and body, at offset 36


class Cutter:
    """Cuts a byte stream into whole messages."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """A `ProtocolError` for what is no message."""
        held = self._data
        held += data
        start = 0
        while len(held) - start >= HEADER.size:
            whole = message_size(held, start)
            if whole > self.most:
                raise ProtocolError("size", f"a message has {whole:,} bytes; at most {self.most:,} are possible")
            if len(held) - start < whole:
                break
            yield bytes(memoryview(held)[start : start + whole])
            start += whole
        del held[:start]


def message_size(data: bytes | bytearray, start: int = 0) -> int:
    if data[start : start + 4] != MAGIC:
        raise ProtocolError("magic", f"a message begins with {bytes(data[start : start + 4])!r}; expected {MAGIC!r}")
    meta, body = _SIZES.unpack_from(data, start + 36)
    return HEADER.size + int(meta) + int(body)


class End:
    """One end of a connection that the gateway has; `name` is `role` for one that a role has asked at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cutter = Cutter(HEADER.size + GREETING_META)
        self.other: End | None = None  # what its messages go to
        self.hello = b""  # of a simulator
        self.about: Hello | None = None
        self.session = 0
        self.heard = self.asked = self.since = time.monotonic()
        self.open = True

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.open = False


class StreamEnd(End):
    def __init__(self, connection: socket.socket, name: str) -> None:
        super().__init__(name)
        prepare(connection)
        self.socket = connection
        self.waiting: deque[memoryview] = deque()
        self.bytes_waiting = 0
        self.writing = False  # whether it is watched for room to write

    def send(self, data: bytes) -> None:
        if not self.open:
            return
        sent = 0
        if not self.waiting:
            with contextlib.suppress(BlockingIOError):
                sent = self.socket.send(data)
            if sent == len(data):
                return
        self.waiting.append(memoryview(data)[sent:])
        self.bytes_waiting += len(data) - sent
        if self.bytes_waiting > MOST_WAITING:
            raise ConnectionError("the other end does not read")
        self.flush()

    def flush(self) -> None:
        while self.waiting:
            try:
                sent = self.socket.send(self.waiting[0])
            except BlockingIOError:
                return
            self.bytes_waiting -= sent
            if sent == len(self.waiting[0]):
                self.waiting.popleft()
            else:
                self.waiting[0] = self.waiting[0][sent:]

    def close(self) -> None:
        if self.open:
            super().close()
            with contextlib.suppress(OSError):
                self.flush()
            self.socket.close()


class ZmqEnd(End):
    """A DEALER, as the ROUTER knows it."""

    def __init__(self, router: Any, identity: bytes) -> None:
        super().__init__("simulator")
        self._router, self.identity = router, identity

    def send(self, data: bytes) -> None:
        import zmq

        try:
            self._router.send_multipart([self.identity, data], zmq.DONTWAIT, copy=len(data) < CHUNK)
        except zmq.ZMQError as error:
            raise ConnectionError(error.strerror or "it is gone") from error
