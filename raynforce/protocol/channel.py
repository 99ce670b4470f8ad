"""Connections with sessions on them: a policy listens, hosts connect, over Unix sockets, TCP, or within one process."""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from raynforce.errors import RaynforceError, UsageError, summary
from raynforce.protocol.frame import Message, ProtocolError
from raynforce.protocol.handshake import Hello, Offer, signed
from raynforce.protocol.host_session import HostSession, Rejected
from raynforce.protocol.policy_session import Joined, PolicySession
from raynforce.protocol.session import Ended, Outcome, Session
from raynforce.protocol.wire import DirectWire, Full, SocketWire, Wire

Kind = Literal["direct", "unix", "tcp"]
STRANGERS = 64  # connections that have not said a proven HELLO yet; beyond, the oldest is dropped
MOST_WAITING = 1 << 26  # bytes that are kept for an end that does not read
READS = 16  # in a row, before others have their turn
AGAIN = 0.02  # seconds between attempts to connect

S = TypeVar("S", bound=Session)


class ChannelError(RaynforceError):
    """There is no connection."""


class Refused(ChannelError):
    """The policy does not take this host in."""


class Address(NamedTuple):
    """Where a policy listens, and what a host needs to be taken in. The token is a secret."""

    kind: Kind
    where: str  # name of an abstract Unix socket without its leading NUL; `ip:port`; a name in a table of this process
    token: bytes
    launch: str

    def __repr__(self) -> str:
        return f"{self.kind}:{self.where}"  # so that no log shows the token


class _End(Generic[S]):
    _other = "the other side"

    def __init__(self, session: S, wire: Wire) -> None:
        self.session = session
        self._wire = wire
        self._mute = self._closed = False
        self._untold: list[Ended] = []  # what was found out by other than `receive` and `poll`

    def fileno(self) -> int:
        return self._wire.fileno()

    @property
    def wants_write(self) -> bool:
        return self._wire.waiting > 0 and not self._mute

    def send(self, *messages: Message) -> None:
        """Send what goes now, keep the rest. A lost connection is `Ended` in `receive`, after what came before."""
        if self._mute:
            return
        try:
            for message in messages:
                self._wire.put(message)
            self._wire.flush()
        except OSError:
            self._mute = True  # what the other side said before it went is still to be read
        except Full as error:
            self.end("full", f"{self._other} does not read: {error}")

    def flush(self) -> None:
        self.send()

    def receive(self, now: float) -> list[Any]:
        """Read what is there and send the answers; returns events in order. After `Ended`, `close` is due."""
        events: list[Any] = []
        try:
            for _ in range(READS):
                more = self._wire.read()
                self._take(now, events)
                if not more or self.session.ended:
                    break
        except OSError as error:
            self._lost(error)
        return self._told(events)

    def poll(self, now: float) -> list[Any]:
        """Ask whether the other side is there, and return what is overdue; to be called regularly."""
        outcome = self.session.poll(now)
        self._say(outcome)
        return self._told(list(outcome.events))

    def close(self, reason: str = "") -> None:
        """Say CLOSE if the session is open, and hang up without waiting for an answer."""
        if not self._closed:
            self._closed = True
            self._say(self.session.close(time.monotonic(), reason))
            self.session.drop("closed", reason)
            self._wire.close()

    def end(self, code: str, reason: str) -> None:
        """Give the connection up; `receive` tells `Ended` with this code."""
        self._untold += self.session.drop(code, reason).events
        self._mute = True
        self._wire.hang_up()

    def _take(self, now: float, events: list[Any]) -> None:
        session, wire = self.session, self._wire
        while not session.ended:
            try:
                message = wire.next()
            except ProtocolError as error:
                outcome = session.violated(error)
            else:
                if message is None:
                    return
                outcome = session.receive(message, now)
            events += outcome.events
            self._say(outcome)

    def _greet(self, now: float) -> list[Any]:
        """Read a first message, and no byte beyond it: so the socket stays readable if there is more."""
        events: list[Any] = []
        try:
            more = True
            while more and not events:
                more = self._wire.read(self._wire.missing())
                self._take(now, events)
        except OSError as error:
            self._lost(error)
        return self._told(events)

    def _say(self, outcome: Outcome) -> None:
        if outcome.send:
            self.send(*outcome.send)

    def _told(self, events: list[Any]) -> list[Any]:
        events += self._untold
        self._untold.clear()
        return events

    def _lost(self, error: OSError) -> None:
        self.end("lost", f"{self._other} is gone: {error.strerror or error}")


class Link(_End[PolicySession]):
    """A host that was taken in, as the policy sees it: `session.hello` and `session.welcome` are there."""

    _other = "the host"

    @property
    def host(self) -> int | None:
        return self.session.hello.host

    def _say(self, outcome: Outcome) -> None:
        if any(isinstance(event, Joined) for event in outcome.events) and (memory := self.session.welcome.memory):
            assert isinstance(self._wire, SocketWire)
            self._wire.attach(memory.fd)
        super()._say(outcome)


class HostLink(_End[HostSession]):
    _other = "the policy"

    def work_when_asked(self, work: Callable[[], None]) -> None:
        """With both ends in one process: what to do when the policy looks for answers."""
        assert isinstance(self._wire, DirectWire)
        self._wire.work = work


class Listener:
    """Where hosts connect. `offer` gets a token and a launch; `fileno` is readable when `accept` has work."""

    def __init__(
        self, kind: Kind, offer: Offer, *, bind_host: str = "127.0.0.1", most_waiting: int = MOST_WAITING
    ) -> None:
        token, launch = offer.token or secrets.token_bytes(32), offer.launch or secrets.token_hex(8)
        self.offer = replace(offer, token=token, launch=launch)
        self.refused: Counter[str] = Counter()  # dropped connections: `silence`, `crowd`, or the code of a refusal
        self.told = ""  # why the last one was refused
        self._most_waiting = most_waiting
        self._strangers: dict[Link, float] = {}  # the oldest first, and when each must be done
        self._proven: deque[Link] = deque()
        self._hosts: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
        self._socket: socket.socket | None = None
        if kind not in ("direct", "unix", "tcp"):
            raise UsageError(f"the kind of channel is {kind!r}; it must be direct, unix or tcp")
        where = secrets.token_hex(8) if kind == "direct" else self._listen(kind, bind_host)
        if kind == "direct":
            _DIRECT[where] = self
        self.address = Address(kind, where, self.offer.token, self.offer.launch)

    def _listen(self, kind: str, bind_host: str) -> str:
        where = f"raynforce-{secrets.token_hex(8)}"
        try:
            if kind == "unix":  # abstract: no file is left behind, whatever dies
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.bind(f"\0{where}")
                self._socket.listen(STRANGERS)
            else:
                family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
                self._socket = socket.create_server((bind_host, 0), family=family, backlog=STRANGERS)
                where = f"{bind_host}:{self._socket.getsockname()[1]}"
        except OSError as error:
            raise ChannelError(f"cannot listen on {kind} {bind_host if kind == 'tcp' else where}: {error}") from error
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        return where

    def fileno(self) -> int:
        return -1 if self._socket is None else cast(Any, self._selector).fileno()

    def accept(self, now: float | None = None) -> Link | None:
        """The next host that was taken in, if any; never waits. Call it regularly: it drops silent connections."""
        now = time.monotonic() if now is None else now
        if self._socket is not None:
            for key, _ in self._selector.select(0):
                if key.fileobj is self._socket:
                    self._admit(now)
                elif key.data in self._strangers:
                    self._greet(key.data, now)
            self._drop([link for link, due in self._strangers.items() if due < now], "silence")
        return self._proven.popleft() if self._proven else None

    def _admit(self, now: float) -> None:
        assert self._socket is not None
        for _ in range(STRANGERS):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise ChannelError("too many open files for one more host: raise `ulimit -n`") from error
                continue  # it is gone already
            if len(self._strangers) >= STRANGERS:
                self._drop([next(iter(self._strangers))], "crowd")
            session = self._session(now)
            link = Link(session, SocketWire(connection, session.codec, self._most_waiting))
            self._strangers[link] = now + session.deadlines.handshake_ms / 1000
            self._selector.register(link, selectors.EVENT_READ, link)

    def _session(self, now: float) -> PolicySession:
        return PolicySession(replace(self.offer, session=secrets.randbits(64) | 1), now)

    def _greet(self, link: Link, now: float) -> None:
        link._greet(now)
        if ended := link.session.ended:
            self._drop([link], ended.code)
        elif link.session.open:
            del self._strangers[link]
            self._selector.unregister(link)
            self._join(link)

    def _join(self, link: Link) -> None:
        if link.host is not None:
            if (older := self._hosts.get(link.host)) is not None:
                older.end("replaced", f"host {link.host} has connected again")
            self._hosts[link.host] = link
        self._proven.append(link)

    def _drop(self, links: Iterable[Link], reason: str) -> None:
        for link in links:
            self.refused[reason] += 1
            self.told = link.session.ended.reason if link.session.ended else reason
            del self._strangers[link]
            self._selector.unregister(link)
            link.close()

    def _connect_directly(self, host: HostLink, theirs: DirectWire, now: float) -> list[Any]:
        session = self._session(now)
        wire = DirectWire(session.codec)
        DirectWire.join(wire, theirs)
        link = Link(session, wire)
        host.send(host.session.start())
        link._greet(now)
        if link.session.open:
            self._join(link)
        else:
            self.refused[link.session.ended.code if link.session.ended else ""] += 1
        return host._greet(now)

    def close(self) -> None:
        """Listen no more; links that were handed out stay."""
        _DIRECT.pop(self.address.where, None)
        for link in (*self._strangers, *self._proven):
            link.close("the policy listens no more")
        self._strangers.clear()
        self._proven.clear()
        if self._socket is not None:
            self._selector.close()
            self._socket.close()
            self._socket = None


_DIRECT: dict[str, Listener] = {}


def connect(address: Address, hello: Hello, *, seconds: float, most_waiting: int = MOST_WAITING) -> HostLink:
    """Connect to a policy and be taken in, within `seconds`; `hello` gets the token's proof. A refusal is final."""
    hello = signed(hello, address.token, address.launch)
    if address.kind == "direct":
        return _connect_directly(address, hello)
    until, why = time.monotonic() + seconds, "there was no time"
    while (left := until - time.monotonic()) > 0:
        try:
            link = _connected(address, hello, left, most_waiting)
        except OSError as error:
            why = summary(error)
        else:
            if _welcomed(link, _answer(link, until), address):
                return link
            why = link.session.ended.reason if link.session.ended else "it does not answer"
            link.close()
        time.sleep(max(0.0, min(AGAIN, until - time.monotonic())))
    raise ChannelError(f"no policy answers at {address} within {seconds:g} s: {why}")


def _connect_directly(address: Address, hello: Hello) -> HostLink:
    listener = _DIRECT.get(address.where)
    if listener is None:
        raise ChannelError(f"nobody listens at {address}")
    now = time.monotonic()
    session = HostSession(hello, now)
    wire = DirectWire(session.codec)
    link = HostLink(session, wire)
    if not _welcomed(link, listener._connect_directly(link, wire, now), address):
        raise ChannelError(f"no policy answers at {address}")
    return link


def _connected(address: Address, hello: Hello, seconds: float, most_waiting: int) -> HostLink:
    if address.kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(seconds)
        try:
            connection.connect(f"\0{address.where}")
        except OSError:
            connection.close()
            raise
    else:
        host, _, port = address.where.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=seconds)
    session = HostSession(hello, time.monotonic())
    link = HostLink(session, SocketWire(connection, session.codec, most_waiting))
    link.send(session.start())
    return link


def _answer(link: HostLink, until: float) -> list[Any]:
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0))
        while (left := until - time.monotonic()) > 0:
            for _, ready in selector.select(left):
                if ready & selectors.EVENT_WRITE:
                    link.flush()
                    if not link.wants_write:
                        selector.modify(link, selectors.EVENT_READ)
                if ready & selectors.EVENT_READ and (events := link._greet(time.monotonic())):
                    return events
    return []


def _welcomed(link: HostLink, events: list[Any], address: Address) -> bool:
    for event in events:
        if isinstance(event, Rejected):
            link.close()
            raise Refused(f"the policy at {address} refuses this host ({event.code}): {event.text}")
    return link.session.open and not link.session.ended
