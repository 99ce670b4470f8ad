"""What both sides of a session do: liveness, closing, refusing, and the table of what each env is at.

A session has no clock, no socket and no queue. It is given decoded messages and the time, and gives back the messages
that are to be sent and the events that its owner should know of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.protocol.codec import ENDED, RESET, Codec, Data
from raynforce.protocol.fields import flag, one_of, take, whole
from raynforce.protocol.frame import FEW, GREETINGS, TYPES, Message, ProtocolError, Type, clean
from raynforce.protocol.handshake import Deadlines

Meta = dict[str, Any]
Buffers = Sequence[np.ndarray]
LEVELS = ("debug", "info", "warning", "error")


class Closing(NamedTuple):
    """The other side wants to end: send what is left and then `close`, within `grace` seconds."""

    reason: str
    grace: float


class Ended(NamedTuple):
    """The session is over; nothing more is sent or taken."""

    code: str  # `closed` after CLOSE; else `silence`, `refused`, a `ProtocolError`'s code, or that of `drop`
    reason: str


class Note(NamedTuple):
    """The other side says something that changes nothing: a LOG, or an ERROR that the session survives."""

    level: str
    text: str


class Outcome(NamedTuple):
    events: Sequence[Any] = ()
    send: Sequence[Message] = ()


NOTHING = Outcome()
Handler = Callable[[Message, float], Outcome]


class Envs:
    """What each env is at. Both sides keep this table, and notice when the other goes astray."""

    # May be stepped; owes a result; must be reset first; broken for good; owes a snapshot. Odd ones cannot be reset.
    READY, BUSY, NEW, GONE, SAVING = 0, 1, 2, 3, 5
    _STUCK = (BUSY, GONE, SAVING)

    def __init__(self, count: int, autoreset: str) -> None:
        self.autoreset = autoreset
        self.phase = np.full(count, self.NEW, np.uint8)
        self.request = np.zeros(count, np.uint64)  # number of the last STEP or RESET of each env
        self.first = np.zeros(count, bool)  # whether what it owes is the first observation of an episode
        self._over = np.zeros(count, bool)  # with `next_step`: its episode has ended
        self._mark = np.zeros(count, np.intp)
        self._order = np.arange(count, dtype=np.intp)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Env ids as an index; each must exist and come once."""
        if 0 < len(ids) <= FEW:
            few = ids.tolist()
            if len(set(few)) == len(few) and min(few) >= 0 and max(few) < len(self.phase):
                return ids if ids.dtype == np.intp else ids.astype(np.intp)
        ids = ids.astype(np.uint32)
        rows, order = ids.astype(np.intp), self._order[: len(ids)]
        if len(order) < len(rows):
            raise ProtocolError("env", f"{len(rows)} env ids; there are {len(self.phase)} envs")
        try:
            self._mark[rows] = order
        except IndexError:
            raise ProtocolError("env", f"env id {ids.max()}; there are {len(self.phase)} envs") from None
        if len(rows) > 1 and np.count_nonzero(self._mark[rows] != order):
            raise ProtocolError("env", "an env id comes twice in one message")
        return rows

    def begin(self, rows: np.ndarray, sequence: int, reset: bool) -> None:
        phase = self.phase[rows].tobytes()  # in bytes, such questions are answered at once
        if sum(map(phase.count, self._STUCK)) if reset else phase.count(self.READY) < len(phase):
            self._refuse(rows, "RESET" if reset else "STEP", bool(reset))
        self.phase[rows] = self.BUSY
        self.request[rows] = sequence
        self.first[rows] = reset or (self._over[rows] if self.autoreset == "next_step" else False)

    def begin_saving(self, rows: np.ndarray, sequence: int) -> None:
        over = self._over[rows] & (self.autoreset == "next_step")
        if self.phase[rows].any() or over.any():
            self._refuse(rows[over] if over.any() else rows, "SNAPSHOT", False)
        self.phase[rows] = self.SAVING
        self.request[rows] = sequence

    def _refuse(self, rows: np.ndarray, what: str, reset: bool) -> None:
        now = self.phase[rows]
        row = int(np.argmax((now & 1 if reset else now) != 0))
        why = ("is between two episodes", "still owes a result", "must be reset first", "is gone", "", "is being saved")
        raise ProtocolError("env", f"{what}: env {rows[row]} {why[now[row]]}")

    def owed_states(self, rows: np.ndarray, request: np.ndarray) -> np.ndarray:
        """`[N]` bool, which of these snapshots are waited for."""
        return (self.phase[rows] == self.SAVING) & (self.request[rows] == request)

    def owed(self, rows: np.ndarray, request: np.ndarray) -> np.ndarray | None:
        """`[N]` bool, which of these answers are waited for; None, most often, if all are."""
        busy = self.phase[rows].tobytes().count(self.BUSY) == len(rows)
        if busy and self.request[rows].tobytes() == request.tobytes():
            return None
        return (self.phase[rows] == self.BUSY) & (self.request[rows] == request)

    def finish(self, rows: np.ndarray, status: np.ndarray) -> None:
        """Their results. Whether a row is a first observation is known beforehand, so it is checked."""
        if status.tobytes().count(RESET) or self.first[rows].tobytes().count(1):
            for row in np.flatnonzero((status == RESET) != self.first[rows])[:1]:
                wanted = f"it is{'' if self.first[rows[row]] else ' not'} an episode's first observation"
                raise ProtocolError("status", f"env {rows[row]}: status {status[row]}; {wanted}")
        self.phase[rows] = self.READY
        if self.autoreset == "explicit":
            self.phase[rows[(status & ENDED) != 0]] = self.NEW
        elif self.autoreset == "next_step":
            self._over[rows] = (status & ENDED) != 0

    def fail(self, rows: np.ndarray, recoverable: bool) -> None:
        self.phase[rows] = self.NEW if recoverable else self.GONE
        self._over[rows] = False


class Session:
    """One side of one session. It belongs to the thread that has the connection; others may only call `progress`."""

    def __init__(self, takes: Sequence[Type], most_envs: int, deadlines: Deadlines, now: float) -> None:
        self.codec = Codec((*takes, Type.ERROR, Type.PING, Type.PONG, Type.CLOSE), most_envs)
        self.deadlines = deadlines
        self.session = 0
        self.open = False  # whether the handshake is done
        self.ended: Ended | None = None
        self.refused: Counter[str] = Counter()  # how much was refused or dropped, by reason
        self.peer_stalled = 0.0  # seconds since the other side's main loop last went on, as it said in its last PONG
        self._began = self._heard = self._asked = self._progressed = now
        self._sequence = 0
        self._close_by = np.inf
        self._closing_here = self._closing_there = False
        self._closing_reason = ""  # theirs
        self._handlers: dict[int, Handler] = {Type.PING: self._ping, Type.PONG: self._pong}
        self._handlers |= {Type.ERROR: self._error, Type.CLOSE: self._close}

    def take(self, data: Data, now: float) -> Outcome:
        """A whole message as it came over a transport that keeps borders."""
        try:
            message = self.codec.decode(data)
        except ProtocolError as error:
            return self.violated(error)
        return self.receive(message, now)

    def receive(self, message: Message, now: float) -> Outcome:
        if self.ended:
            self.refused["ended"] += 1
            return NOTHING
        try:
            return self._receive(message, now)
        except ProtocolError as error:
            return self.violated(error)

    def _receive(self, message: Message, now: float) -> Outcome:
        if not self.open:
            return self._greet(message, now)
        if message.type not in TYPES:
            self.refused["type"] += 1
            told = f"type {message.type} is unknown to version 1.{self.codec.minor}"
            return Outcome(send=[self._error_message(True, "type", told)])
        if message.type in GREETINGS:
            raise ProtocolError("state", f"{TYPES[message.type].name} came after the handshake")
        if message.session != self.session:
            self.refused["session"] += 1
            return NOTHING
        self._heard = now
        if self._closing_there:
            self.refused["closed"] += 1
            return NOTHING
        return self._handlers[message.type](message, now)

    def _greet(self, message: Message, now: float) -> Outcome:
        raise NotImplementedError

    def violated(self, error: ProtocolError) -> Outcome:
        """The other side broke the protocol: say so, and end."""
        if self.ended:
            return NOTHING
        self.refused[error.code] += 1
        return self._end(error.code, str(error), self._last_word(error))

    def drop(self, code: str, reason: str) -> Outcome:
        """The connection is lost or given up."""
        if self.ended:
            return NOTHING
        if self._closing_there:  # after its CLOSE a side may hang up
            code, reason = "closed", self._closing_reason
        return self._end(code, reason)

    def _last_word(self, error: ProtocolError) -> Message:
        return self._error_message(False, error.code, str(error))

    def _ping(self, message: Message, now: float) -> Outcome:
        stalled = min(max(0, int(1000 * (now - self._progressed))), 1 << 40)
        return Outcome(send=[self._message(Type.PONG, {"progress_ms": stalled})._replace(sequence=message.sequence)])

    def _pong(self, message: Message, now: float) -> Outcome:
        self.peer_stalled = whole(take(message.meta, "progress_ms", "PONG", 0), "progress_ms", 0, 1 << 53) / 1000
        return NOTHING

    def _error(self, message: Message, now: float) -> Outcome:
        meta = message.meta
        one_of(take(meta, "scope", "ERROR"), "scope", ("session",))
        if message.envs:
            raise ProtocolError("env", f"ERROR: scope 'session' with {message.envs} envs")
        text = clean(take(meta, "text", "ERROR"))
        if flag(take(meta, "recoverable", "ERROR"), "recoverable"):
            self.refused["told"] += 1
            return Outcome([Note("error", text)])
        return self._end(clean(take(meta, "code", "ERROR"), 40), f"the other side ended the session: {text}")

    def _close(self, message: Message, now: float) -> Outcome:
        self._closing_there = True
        self._closing_reason = reason = clean(take(message.meta, "reason", "CLOSE", ""))
        if self._closing_here:
            return self._end("closed", reason)
        grace = whole(take(message.meta, "grace_ms", "CLOSE", 0), "grace_ms", 0, 86_400_000) / 1000
        self._close_by = now + grace
        return Outcome([Closing(reason, grace)])

    def _dropped(self, reason: str, rows: np.ndarray) -> None:
        if count := int(np.count_nonzero(rows)):
            self.refused[reason] += count

    def progress(self, now: float) -> None:
        """The main loop went on: what a PONG tells the other side."""
        self._progressed = now

    def poll(self, now: float) -> Outcome:
        """What is overdue; to be called regularly."""
        if self.ended:
            return NOTHING
        if not self.open:
            if now - self._began <= self.deadlines.handshake_ms / 1000:
                return NOTHING
            return self._end("silence", f"no handshake within {self.deadlines.handshake_ms} ms")
        if now >= self._close_by:
            if self._closing_here:
                return self._end("silence", "no CLOSE in answer to ours within its grace")
            return self.close(now, "the grace is over")
        if self._close_by < np.inf:
            return NOTHING
        silent = now - self._heard
        if silent > self.deadlines.silence_ms / 1000:
            self.refused["silence"] += 1
            return self._end("silence", f"nothing heard for {silent:.1f} s")
        if now - max(self._heard, self._asked) > self.deadlines.ping_ms / 1000:
            self._asked = now
            return Outcome(send=[self._message(Type.PING)])
        return NOTHING

    def close(self, now: float, reason: str = "") -> Outcome:
        """End in good order: unless the other side has closed, `poll` waits for it within the grace."""
        if self.ended or self._closing_here:
            return NOTHING
        if not self.open:
            return self._end("closed", reason)
        self._closing_here = True
        grace = self.deadlines.close_ms
        message = self._message(Type.CLOSE, {"reason": clean(reason), "grace_ms": grace})
        if self._closing_there:
            return self._end("closed", reason, message)
        self._close_by = now + grace / 1000
        return Outcome(send=[message])

    def _speaking(self) -> None:
        if not self.session or self.ended or self._closing_here:  # one without a connection may get another
            state = "over" if self.ended else "closing" if self._closing_here else "not open yet"
            raise UsageError(f"the session is {state}; nothing can be sent")

    def _end(self, code: str, reason: str, *send: Message) -> Outcome:
        self.ended = Ended(code, reason)
        return Outcome([self.ended], send)

    def _message(
        self, kind: Type, meta: Meta | None = None, buffers: Buffers = (), envs: int = 0, ended: int = 0, flags: int = 0
    ) -> Message:
        self._sequence += 1
        minor = self.codec.minor or 0
        return Message(kind, self.session, self._sequence, envs, ended, flags, minor, meta or {}, buffers)

    def _error_message(self, recoverable: bool, code: str, text: str) -> Message:
        meta = {"scope": "session", "recoverable": recoverable, "code": code, "text": clean(text)}
        return self._message(Type.ERROR, meta, (np.zeros(0, np.uint32), np.zeros(0, np.uint64)))
