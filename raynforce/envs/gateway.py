"""The gateway: simulators that others started are found here, and connected with the roles that want them.

It listens where simulators connect, or connects to where they listen, over any transport; takes those in that prove
they have the key; and then hands messages on between a simulator and one role, which see each other as if they were
connected. It keeps both sides sure that the other is there: roles may be busy for long.

    simulators ── tcp, unix, zmq ──▶ gateway (a thread of the driver) ◀── unix, or tcp on a cluster ── roles
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raynforce.doorbell import Doorbell
from raynforce.envs.addresses import LAUNCH, LISTEN, Where, addresses, find_key, need_zmq, require_safe
from raynforce.envs.gateway_ends import CHUNK, End, StreamEnd, ZmqEnd, message_size
from raynforce.errors import UsageError
from raynforce.protocol.channel import Address
from raynforce.protocol.codec import Codec
from raynforce.protocol.frame import GREETING_META, HEADER, MOST_BODY, MOST_ENVS, Message, ProtocolError, Type
from raynforce.protocol.handshake import Hello, Offer, Refusal, prove, reject

PING_SECONDS, SILENCE_SECONDS = 1.0, 15.0
"""Nothing heard from a simulator for so long: ask; give its connection up. A link may be down for half of that."""
HELLO_SECONDS = 10.0
"""A connection without HELLO is dropped after so long."""
AGAIN = 0.5
"""Seconds between attempts to connect to a simulator that is not there."""
STRANGERS = 1024
TELL_SECONDS = 60.0
GOODBYE = 0.4
"""Seconds for the last messages of roles to be passed on, and for simulators that come back to be told."""
_OVER = reject(Refusal("over", "the trainer is done")).to_bytes()


class Want(NamedTuple):
    """A role that waits for a simulator: for the one with this session, if it is not 0."""

    end: StreamEnd
    session: int
    envs: int  # that it has lanes for
    at_most: bool  # whether fewer will do

    def prefers(self, envs: int) -> tuple[int, int]:
        """The larger, the better a simulator with so many envs suits it."""
        return (0, -envs) if self.at_most else (min(envs, self.envs), -envs)


class Counts(NamedTuple):
    """What is known of simulators: envs of those that serve a role, of those that are free, and roles that wait."""

    serving: int
    free: int
    wanting: int


class Gateway:
    """Finds the simulators of `listen:ADDRESS` or `connect:ADDRESS,…`; `address` is where roles ask for one."""

    def __init__(self, env: str, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.env, self._say = env, say
        self._places, self._key = addresses(env), find_key()
        self._listens = env.startswith(LISTEN)
        for place in self._places:
            require_safe(place, self._key)
        self._offer = Offer(token=self._key.token, launch=LAUNCH)
        self._codec = Codec((Type.HELLO,), MOST_ENVS)
        self._selector = selectors.DefaultSelector()
        self._ends: set[StreamEnd] = set()
        self._free: deque[End] = deque()  # simulators that no role has, the first one first
        self._wants: list[Want] = []
        self._routers: dict[Any, Where] = {}
        self._monitors: dict[Any, Any] = {}
        self._dealers: dict[tuple[Any, bytes], ZmqEnd] = {}
        self._listeners: dict[socket.socket, str] = {}  # and who connects there: simulators or roles
        self._calls: dict[Where, float] = {}  # where to connect to, and when next
        self._made: list[Path] = []  # sockets that are files
        self._token, self._launch = secrets.token_bytes(32), secrets.token_hex(8)
        self._inner: dict[str, Address] = {}
        self._closing, self._until = False, 0.0
        self._seen = threading.Condition()
        self._first: Hello | None = None
        self.refused, self._told_of_keys = 0, -math.inf
        self.counts = Counts(0, 0, 0)
        self._bell = Doorbell()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        try:
            for place in self._places:
                self._open(place)
            self.address = self.inner("unix")
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()

    # -- for the driver -----------------------------------------------------------------------------------

    def inner(self, kind: str, host: str = "") -> Address:
        """Where roles ask: on this machine, or with `tcp` from others of the cluster."""
        if kind not in self._inner:
            where = f"raynforce-{secrets.token_hex(8)}"
            if kind == "unix":
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(f"\0{where}")
                listener.listen(STRANGERS)
            else:
                listener = socket.create_server((host, 0), backlog=STRANGERS)
                where = f"{host}:{listener.getsockname()[1]}"
            self._add_listener(listener, "role")
            self._inner[kind] = Address(kind, where, self._token, self._launch)  # type: ignore[arg-type]
        return self._inner[kind]

    def wait_for(self, envs: int) -> Hello:
        """Wait without limit until there are simulators with so many envs; what the first one says of itself."""
        told, before = -math.inf, -1
        with self._seen:
            while (there := self.counts.serving + self.counts.free) < envs or self._first is None:
                if time.monotonic() - told > TELL_SECONDS or there != before:
                    told, before = time.monotonic(), there
                    self._say(self._waiting(there, envs))
                self._seen.wait(0.2)
        return self._first

    def _waiting(self, there: int, envs: int) -> str:
        where = ", ".join(map(str, self._places))
        how = f"start them with --connect {where}" if self._listens else f"at {where}, started with --listen"
        found = f"{there} of {envs} envs are there; " if there else ""
        return f"waiting for simulators: {found}{how}"

    def close(self) -> None:
        """Let go of all simulators; roles have closed theirs before."""
        self._until = time.monotonic() + (GOODBYE if self._first is not None else 0.0)
        self._closing = True
        self._bell.ring()
        self._thread.join()

    # -- its thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            look_at = 0.0
            while not self._closing or time.monotonic() < self._until:
                ready = self._selector.select(0.25)
                for key, events in ready:
                    self._serve(key, events)
                for router in self._routers:
                    self._read_router(router)
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + 0.25
                    self._look(now)
        finally:
            for end in (*self._ends, *self._dealers.values()):
                if end.about is not None and end.other is None:
                    with contextlib.suppress(OSError):
                        end.send(_OVER)
            self._close_all()

    def _close_all(self) -> None:
        for end in list(self._ends):
            end.close()
        for listener in self._listeners:
            listener.close()
        for router in self._routers:
            router.disable_monitor()
            self._monitors[router].close()
            router.close(linger=500)
        for path in self._made:
            path.unlink(missing_ok=True)
        self._selector.close()
        self._bell.close()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(key.data, StreamEnd):
            try:
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            except OSError as error:
                self._lose(key.data, error.strerror or str(error))
            except ProtocolError as error:
                self._refuse(key.data, error)
            self._watch(key.data)
        elif key.fileobj is self._bell:
            self._bell.clear()
        elif isinstance(key.fileobj, socket.socket):
            self._accept(key.fileobj)

    def _open(self, place: Where) -> None:
        if place.kind == "zmq":
            return self._open_router(place)
        if not self._listens:
            self._calls[place] = 0.0
            return None
        listener: socket.socket | None = None
        try:
            family, target = place.socket
            if place.kind == "tcp":
                listener = socket.create_server(target, family=family, backlog=STRANGERS)
            else:
                listener = socket.socket(family, socket.SOCK_STREAM)
                _remove_stale(target)
                listener.bind(target)
                if not place.place.startswith("@"):
                    os.chmod(target, 0o600)
                    self._made.append(Path(target))
                listener.listen(STRANGERS)
        except OSError as error:
            if listener is not None:
                listener.close()
            raise UsageError(f"cannot listen on {place}: {error.strerror}") from error
        self._add_listener(listener, "simulator")
        return None

    def _open_router(self, place: Where) -> None:
        zmq = need_zmq(str(place))
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            router.setsockopt(option, 0)  # the protocol bounds what is on its way
        router.setsockopt(zmq.MAXMSGSIZE, HEADER.size + GREETING_META + MOST_BODY)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, 1)
        if self._key.secret and not place.place.startswith("ipc:"):
            try:
                router.curve_server = True
                router.curve_secretkey, router.curve_publickey = self._key.secret, self._key.public
            except (zmq.ZMQError, ValueError) as error:
                router.close()
                raise UsageError(f"the key that RAYNFORCE_KEY names is no CURVE key: {error}") from error
        try:
            (router.bind if self._listens else router.connect)(place.place)
        except zmq.ZMQError as error:
            router.close()
            raise UsageError(f"cannot {'listen on' if self._listens else 'connect to'} {place}: {error}") from error
        if self._listens and place.place.startswith("ipc:///"):
            self._made.append(Path(place.place.removeprefix("ipc://")))
        events = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._monitors[router] = router.get_monitor_socket(events | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._routers[router] = place
        self._selector.register(router.fd, selectors.EVENT_READ, router)

    def _add_listener(self, listener: socket.socket, who: str) -> None:
        listener.setblocking(False)
        self._listeners[listener] = who
        self._selector.register(listener, selectors.EVENT_READ, who)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            strangers = [end for end in self._ends if end.about is None and end.other is None]
            if len(strangers) >= STRANGERS:
                self._lose(min(strangers, key=lambda end: end.since), "too many wait")
            self._add(StreamEnd(connection, self._listeners[listener]))

    def _add(self, end: StreamEnd) -> None:
        self._ends.add(end)
        self._selector.register(end.socket, selectors.EVENT_READ, end)

    def _watch(self, end: StreamEnd) -> None:
        if end.open and bool(end.waiting) != end.writing:
            end.writing = bool(end.waiting)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.writing else 0)
            self._selector.modify(end.socket, wanted, end)

    # -- what comes ---------------------------------------------------------------------------------------

    def _read(self, end: StreamEnd) -> None:
        for _ in range(16):
            try:
                data = end.socket.recv(CHUNK)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionError("hung up")
            if end.name == "role" and end.other is None:
                self._asked(end, data)
            else:
                for message in end.cutter.feed(data):
                    self._take(end, message)
            if len(data) < CHUNK or not end.open:
                return

    def _read_router(self, router: Any) -> None:
        import zmq

        while True:
            try:
                identity, *frames = router.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            end = self._dealers.get((router, identity))
            if end is None:
                if len(frames[0]) >= HEADER.size and frames[0][6] == Type.CLOSE:  # of a session that is over
                    continue
                end = self._dealers[router, identity] = ZmqEnd(router, identity)
            data = frames[0] if len(frames) == 1 else b"".join(f + bytes(-len(f) % 8) for f in frames)
            if not data:  # which says nothing
                continue
            try:
                if len(data) < HEADER.size or message_size(data) != len(data):
                    raise ProtocolError("size", f"a frame of {len(data):,} bytes is not one message")
                self._take(end, data)
            except ProtocolError as error:
                self._refuse(end, error)
            except OSError as error:
                self._lose(end, str(error))

    def _take(self, end: End, message: bytes) -> None:
        """A whole message of a simulator, or of a role that has one."""
        end.heard = time.monotonic()
        kind = message[6]
        if end.name == "role":
            if kind == Type.WELCOME and end.other is not None:
                end.other.session = end.session = int.from_bytes(message[8:16], "little")
            self._pass_on(end, message)
        elif end.about is None:
            self._greet(end, message)
        elif kind == Type.PING:
            session, sequence = (int.from_bytes(message[at : at + 8], "little") for at in (8, 16))
            end.send(Message(Type.PONG, session, sequence, meta={"progress_ms": 0}).to_bytes())
        elif kind != Type.PONG:
            self._pass_on(end, message)

    def _pass_on(self, end: End, message: bytes) -> None:
        other = end.other
        if other is None:
            return
        try:
            other.send(message)
        except OSError as error:
            self._lose(other, str(error))
        if isinstance(other, StreamEnd) and other.waiting:
            self._watch(other)

    def _greet(self, end: End, message: bytes) -> None:
        if self._closing:
            end.send(_OVER)
            return
        hello = Hello.read(self._codec.decode(message))
        if not self._offer.proven(hello):
            own = os.environ.get("RAYNFORCE_KEY", "~/.raynforce/token")
            raise Refusal("auth", f"the token is not the trainer's, which is in {Path(own).name}")
        end.about, end.hello, end.session = hello, message, hello.resume
        end.cutter.most = HEADER.size + GREETING_META + MOST_BODY
        end.since = time.monotonic()
        self._free.append(end)
        self._match()
        with self._seen:
            self._first = self._first or hello
            self._seen.notify_all()

    def _asked(self, end: StreamEnd, data: bytes) -> None:
        """The one line with which a role asks for a simulator."""
        try:
            asked = json.loads(data)
            proof, session, envs = str(asked["proof"]), int(asked["session"]), int(asked["envs"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError("not a request for a simulator") from error
        if not hmac.compare_digest(proof.encode("utf-8", "replace"), prove(self._token, self._launch).encode()):
            raise ConnectionError("not a role of this run")
        end.cutter.most = HEADER.size + GREETING_META + MOST_BODY
        self._wants.append(Want(end, session, envs, bool(asked.get("at_most"))))
        self._match()

    # -- who gets whom ------------------------------------------------------------------------------------

    def _match(self) -> None:
        """Simulators that come back go to the role that waits for them; others to who has waited longest."""
        while (pair := self._pair()) is not None:  # one after the other: to join may lose some
            self._join(*pair)
        serving = sum(end.about.envs for end in self._serving() if end.about)
        self.counts = Counts(serving, sum(e.about.envs for e in self._free if e.about), len(self._wants))

    def _pair(self) -> tuple[Want, End] | None:
        back = {end.session: end for end in self._free if end.session}
        for want in self._wants:
            if want.session in back:
                return want, back[want.session]
        new = next((want for want in self._wants if not want.session), None)
        if new is None or not self._free:
            return None
        strangers = [end for end in self._free if not end.session] or list(self._free)
        return new, max(strangers, key=lambda end: new.prefers(end.about.envs if end.about else 0))

    def _serving(self) -> list[End]:
        return [e for e in (*self._ends, *self._dealers.values()) if e.about is not None and e.other is not None]

    def _join(self, want: Want, end: End) -> None:
        self._free.remove(end)
        self._wants.remove(want)
        want.end.other, end.other = end, want.end
        self._pass_on(end, end.hello)

    # -- ends ---------------------------------------------------------------------------------------------

    def _refuse(self, end: End, error: ProtocolError) -> None:
        self.refused += 1
        if end.about is None and not isinstance(error, Refusal):
            error = Refusal("session", f"no session is known here ({error}): say HELLO")
        else:
            self._say(f"a simulator was refused: {error}")
        with contextlib.suppress(OSError):
            end.send(reject(error).to_bytes())
        self._lose(end, str(error))

    def _lose(self, end: End, why: str) -> None:
        """This end is gone; who it was connected with sees that as well."""
        if isinstance(end, StreamEnd) and end in self._ends:
            self._selector.unregister(end.socket)
            self._ends.remove(end)
            end.close()
        elif isinstance(end, ZmqEnd):
            self._dealers = {key: other for key, other in self._dealers.items() if other is not end}
        with contextlib.suppress(ValueError):
            self._free.remove(end)
        self._wants = [want for want in self._wants if want.end is not end]
        other, end.other = end.other, None
        if other is not None:
            other.other = None
            self._lose(other, why)
        self._match()

    def _look(self, now: float) -> None:
        for end in self._serving():
            if end.session and now - end.heard > SILENCE_SECONDS:
                self._lose(end, "silent")
            elif end.session and now - max(end.heard, end.asked) > PING_SECONDS:
                self._try(end, Message(Type.PING, end.session).to_bytes(), now)
        for free in [e for e in self._free if isinstance(e, ZmqEnd) and now - e.asked > PING_SECONDS]:
            self._try(free, b"", now)  # which says nothing, but fails if nobody is there
        wanting = {want.end for want in self._wants}
        for late in [e for e in self._ends - wanting if e.about is None and e.other is None]:
            if now - late.since > HELLO_SECONDS:
                self._lose(late, "it says nothing")
        for place, due in self._calls.items():
            if now >= due:
                self._calls[place] = now + AGAIN
                self._call(place)
        if (failed := sum(self._failed(monitor) for monitor in self._monitors.values())) > 0:
            self.refused += failed
            if now - self._told_of_keys > TELL_SECONDS:
                self._told_of_keys = now
                self._say("a simulator was refused: its key is not that of this trainer")

    def _try(self, end: End, data: bytes, now: float) -> None:
        end.asked = now
        try:
            end.send(data)
        except OSError as error:  # ZMQ tells now that it is gone
            self._lose(end, str(error))

    @staticmethod
    def _failed(monitor: Any) -> int:
        """Handshakes of CURVE that failed since this was last asked."""
        count = 0
        while monitor.poll(0):
            monitor.recv_multipart()
            count += 1
        return count

    def _call(self, place: Where) -> None:
        """Connect to a simulator that listens, unless that is done."""
        if any(end.name == str(place) for end in self._ends):
            return
        family, target = place.socket
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(1.0)
            connection.connect(target)
        except OSError:
            connection.close()
            return
        self._add(StreamEnd(connection, str(place)))


def _remove_stale(path: str) -> None:
    """A socket that a trainer left behind when it was killed: nobody listens there."""
    if path.startswith("\0") or not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)


# -- the gateways of this process ---------------------------------------------------------------------------

_OPEN: dict[str, Gateway] = {}
_DEPTH = 0


def gateway(env: str, say: Callable[[str], None] | None = None) -> Gateway:
    """The gateway to the simulators of `env` in this process, opened when it is first asked for."""
    if env not in _OPEN:
        _OPEN[env] = Gateway(env, say=say or _tell)
    return _OPEN[env]


def _tell(text: str) -> None:
    import sys

    print(text, file=sys.stderr)


@contextlib.contextmanager
def gateways() -> Iterator[None]:
    """What is opened in here stays open until the end of it."""
    global _DEPTH
    _DEPTH += 1
    try:
        yield
    finally:
        _DEPTH -= 1
        close_unused()


def close_unused() -> None:
    """Close all gateways, unless a run needs them."""
    if not _DEPTH:
        while _OPEN:
            _OPEN.popitem()[1].close()
