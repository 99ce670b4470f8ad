"""Messages over a byte stream: a reader that stores no more than a header's checked claim, and a bounded writer."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice

from raynforce.protocol.codec import Codec
from raynforce.protocol.frame import HEADER, Header, Message

CHUNK = 1 << 16
"""Bytes that are read at once; a message that is longer gets memory of its own, once its header is found right."""


class Reader:
    """Cuts a byte stream into messages: `space()`, fill some of it, `filled(count)`, then `next()` until None.

    Hand each message to the session before the next: a WELCOME changes how they are read. A `ProtocolError` is final.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._chunk = bytearray(CHUNK)
        self._start = self._stop = 0  # what of the chunk is not yet read
        self._header: Header | None = None
        self._long = bytearray()  # a message longer than a chunk, and how much of it is there
        self._have = 0

    def space(self) -> memoryview:
        """Where the next bytes go (`recv_into`); never empty."""
        if self._long:
            return memoryview(self._long)[self._have :]
        if self._start:
            rest = self._stop - self._start
            self._chunk[:rest] = self._chunk[self._start : self._stop]
            self._start, self._stop = 0, rest
        return memoryview(self._chunk)[self._stop :]

    def filled(self, count: int) -> None:
        if self._long:
            self._have += count
        else:
            self._stop += count

    def next(self) -> Message | None:
        """The next message if it is all there. Its arrays belong to it alone, and stay as long as they are used."""
        if self._header is None:
            if self._stop - self._start < HEADER.size:
                return None
            self._header = self.codec.measure(memoryview(self._chunk)[self._start : self._start + HEADER.size])
        header, whole = self._header, self._header.whole
        if not self._long and self._stop - self._start >= whole:
            data: bytes | bytearray = bytes(memoryview(self._chunk)[self._start : self._start + whole])
            self._start += whole
        elif not self._long and whole <= CHUNK:
            return None
        else:
            if not self._long:
                self._begin_long(whole)
            if self._have < whole:
                return None
            data, self._long, self._have = self._long, bytearray(), 0
        self._header = None
        return self.codec.decode(data, header)

    @property
    def partial(self) -> bool:
        return self._stop > self._start or self._header is not None

    def missing(self) -> int:
        """Bytes that `next`, which has just said None, waits for, as far as it knows."""
        have = self._have if self._long else self._stop - self._start
        return (self._header.whole if self._header else HEADER.size) - have

    def _begin_long(self, whole: int) -> None:
        self._long = bytearray(whole)
        self._have = self._stop - self._start
        self._long[: self._have] = memoryview(self._chunk)[self._start : self._stop]
        self._start = self._stop = 0

    def read(self, connection: socket.socket) -> bool:
        """Take what a socket has, once; False if the other side has hung up. What it raises is for the caller."""
        count = connection.recv_into(self.space())
        self.filled(count)
        return count > 0


class Full(Exception):
    """More would have to be kept than is allowed: the other side does not read."""


def _joined(pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same with small neighbours in one piece, and none that is empty."""
    if all(type(piece) is bytes for piece in pieces):
        return [b"".join(pieces)]
    return [piece if type(piece) is bytes else memoryview(piece).cast("B") for piece in pieces if len(piece)]


class Writer:
    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.waiting = 0  # bytes that were put and not sent yet
        self._pieces: deque[bytes | memoryview] = deque()

    def put(self, message: Message) -> None:
        """Add a message; `Full` if the other side is too far behind. Its arrays must not change until they are sent."""
        pieces = _joined(message.pieces())
        size = sum(map(len, pieces))
        if self.waiting and self.waiting + size > self.most_bytes:
            raise Full(f"{self.waiting:,} bytes are waiting to be sent, {size:,} more would exceed {self.most_bytes:,}")
        self._pieces.extend(pieces)
        self.waiting += size

    def write(self, connection: socket.socket) -> bool:
        """Send as much as the socket takes now; True if nothing is left. What it raises is for the caller."""
        while self._pieces:
            try:
                if len(self._pieces) == 1:
                    sent = connection.send(self._pieces[0])
                else:
                    sent = connection.sendmsg(list(islice(self._pieces, 512)))  # the kernel takes 1,024 at once
            except BlockingIOError:
                return False
            self.waiting -= sent
            while sent:
                first = self._pieces.popleft()
                if sent < len(first):
                    self._pieces.appendleft(memoryview(first)[sent:])
                sent -= min(sent, len(first))
        return True
