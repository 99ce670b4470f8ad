"""What carries messages between two ends: a socket, or two queues of one process."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice

from raynforce.protocol.codec import Codec
from raynforce.protocol.frame import HEADER, Header, Message

SOCKET_BUFFER = 1 << 22  # bytes that the kernel is asked to keep for each direction; it may grant less
CHUNK = 1 << 16  # bytes read at once; a longer message gets memory of its own, once its header is found right


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
                self._long, self._have = bytearray(whole), self._stop - self._start
                self._long[: self._have] = memoryview(self._chunk)[self._start : self._stop]
                self._start = self._stop = 0
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
        self.attached: int | None = None  # a file descriptor that goes with the next of them
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
                if self.attached is not None:
                    sent = socket.send_fds(connection, [self._pieces[0]], [self.attached])
                    self.attached = None
                elif len(self._pieces) == 1:
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


def prepare(connection: socket.socket) -> None:
    """Non-blocking, with room for large messages, and small ones sent at once."""
    connection.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class SocketWire:
    """A connected socket, made non-blocking. An `OSError` of any method, or `Full` of `put`, is final."""

    def __init__(self, connection: socket.socket, codec: Codec, most_waiting: int) -> None:
        prepare(connection)
        self._socket = connection
        self._reader, self._writer = Reader(codec), Writer(most_waiting)
        self.next, self.missing, self.put = self._reader.next, self._reader.missing, self._writer.put

    def fileno(self) -> int:
        return self._socket.fileno()

    def attach(self, fd: int) -> None:
        """Send a file descriptor with the next byte; for Unix sockets."""
        self._writer.attached = fd

    def flush(self) -> None:
        """Send as much as goes now."""
        self._writer.write(self._socket)

    @property
    def waiting(self) -> int:
        """Bytes that could not be sent yet."""
        return self._writer.waiting

    def read(self, most: int | None = None) -> bool:
        """Read what is there; call `next` until None after that. Returns whether there may be more."""
        space = self._reader.space()
        try:
            count = self._socket.recv_into(space, most or 0)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("hung up in the middle of a message" if self._reader.partial else "hung up")
        self._reader.filled(count)
        return count == (most or len(space))

    def hang_up(self) -> None:
        """No more is sent or read, and both ends see that. `close` is still due."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class DirectWire:
    """Both ends in one process and one thread. What goes through is the same bytes."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._inbox: deque[bytes] = deque()
        self._other: DirectWire | None = None
        self.work: Callable[[], None] | None = None  # what this end does when the other one looks for answers
        self.waiting = 0

    @staticmethod
    def join(one: DirectWire, other: DirectWire) -> None:
        one._other, other._other = other, one

    def fileno(self) -> int:
        return -1

    def put(self, message: Message) -> None:
        if self._other is None:
            raise ConnectionError("hung up")
        self._other._inbox.append(message.to_bytes())

    def flush(self) -> None:
        pass

    def read(self, most: int | None = None) -> bool:
        if self._other is None and not self._inbox:
            raise ConnectionError("hung up")
        if self._other is not None and self._other.work is not None:
            self._other.work()
        return self._other is None

    def missing(self) -> int:
        return 0

    def next(self) -> Message | None:
        return self._codec.decode(self._inbox.popleft()) if self._inbox else None

    def hang_up(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other._other = None

    close = hang_up


Wire = SocketWire | DirectWire
