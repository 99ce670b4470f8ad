"""What carries messages between two ends: a socket, or two queues of one process."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from raynforce.protocol.codec import Codec
from raynforce.protocol.frame import Message
from raynforce.protocol.stream import Reader, Writer

SOCKET_BUFFER = 1 << 22  # bytes that the kernel is asked to keep for each direction; it may grant less


class HungUp(ConnectionError):
    """The other end is closed."""


class Wire(Protocol):
    """One end. An `OSError` of any method, or `Full` of `put`, is final."""

    def fileno(self) -> int:
        """For selectors; -1 if there is no file."""

    def put(self, message: Message) -> None:
        """Add a message to what is to be sent."""

    def flush(self) -> None:
        """Send as much as goes now."""

    @property
    def waiting(self) -> int:
        """Bytes that could not be sent yet."""

    def read(self, most: int | None = None) -> bool:
        """Take what is there, for `next`, which is to be called until None after that; whether there may be more."""

    def missing(self) -> int:
        """Bytes that `next` waits for, as far as is known: by reading no more, nothing of another message is read."""

    def next(self) -> Message | None:
        """The next message if it is all there."""

    def hang_up(self) -> None:
        """No more is sent or read; both ends see that. `close` is still due."""

    def close(self) -> None: ...


class SocketWire:
    """A connected socket; it is made non-blocking."""

    def __init__(self, connection: socket.socket, codec: Codec, most_waiting: int) -> None:
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._reader, self._writer = Reader(codec), Writer(most_waiting)
        self.next, self.put = self._reader.next, self._writer.put

    def fileno(self) -> int:
        return self._socket.fileno()

    def flush(self) -> None:
        self._writer.write(self._socket)

    @property
    def waiting(self) -> int:
        return self._writer.waiting

    def read(self, most: int | None = None) -> bool:
        space = self._reader.space()
        try:
            count = self._socket.recv_into(space, most or 0)
        except BlockingIOError:
            return False
        if not count:
            raise HungUp("hung up in the middle of a message" if self._reader.partial else "hung up")
        self._reader.filled(count)
        return count == (most or len(space))

    def missing(self) -> int:
        return self._reader.missing()

    def hang_up(self) -> None:
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
            raise HungUp("hung up")
        self._other._inbox.append(message.to_bytes())

    def flush(self) -> None:
        pass

    def read(self, most: int | None = None) -> bool:
        if self._other is None and not self._inbox:
            raise HungUp("hung up")
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

    def close(self) -> None:
        self.hang_up()
