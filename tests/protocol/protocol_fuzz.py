"""Hostile peers: valid sessions, recorded, mutated in every way and played to both sides. Nothing may come of it.

What is required of each message: no exception leaves the session; no env is stepped twice or unasked, none is answered
for twice; and whoever is still in session afterwards goes on as if nothing had been.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from raynforce.protocol.codec import RESET
from raynforce.protocol.frame import HEADER, MAGIC, MAJOR, Message, ProtocolError, Type
from raynforce.protocol.handshake import CAPABILITIES, Hello, Offer
from raynforce.protocol.host_session import HostSession, ResetRequest, RestoreRequest, SnapshotRequest, StepRequest
from raynforce.protocol.policy_session import Broken, PolicySession, Results, Snapshots
from raynforce.protocol.session import Envs, Outcome, Session
from raynforce.protocol.spaces import Spaces
from raynforce.protocol.wire import Reader
from raynforce.spaces import ActionSpec, ObsLeaf

ENVS, ROUNDS = 4, 3
_CART = Spaces((ObsLeaf("obs", "box", (4,), "float32"),), ActionSpec("discrete", (), "int64", (2,), (0,)))
_ROBOT = Spaces(
    (
        ObsLeaf("obs/camera", "box", (6, 6, 3), "uint8"),
        ObsLeaf("obs/gear", "discrete", (), "int64", (5,), (-1,)),
        ObsLeaf("obs/on", "multibinary", (3,), "int8"),
    ),
    ActionSpec("box", (2,), "float32", low=(-1.0, -np.inf), high=(1.0, np.inf)),
)
WORLDS = [(spaces, mode) for spaces in (_CART, _ROBOT) for mode in ("same_step", "next_step", "explicit")]
_NUMBERS = (0, 1, 2, 3, 5, 255, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, (1 << 64) - 1)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 40,
    10**400,
    1e308,
    "",
    "x" * 5000,
    "\x1b[2J\ud800",
    [],
    {},
    [[]],
)
_PLACES = (4, 5, 6, 7, 8, 16, 24, 28, 32, 34, 36, 40)  # of the header's numbers
_SIZES = (1, 1, 1, 1, 8, 8, 4, 4, 2, 2, 4, 8)


ACTED = ResetRequest | StepRequest | SnapshotRequest | RestoreRequest | Results | Snapshots | Broken


class Crack(AssertionError):
    """Something that must not be."""


class Side:
    """One side of a session under test, and what may happen to it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.done: set[tuple[int, int]] = set()  # (env, request) that were acted upon

    def see(self, outcome: Outcome) -> Outcome:
        for event in outcome.events:
            if isinstance(event, ACTED):
                self._once(event.envs)
            if isinstance(event, Results):
                self._in_range(event)
        if len(outcome.events) > 2 or len(outcome.send) > 1 + ENVS:
            raise Crack(f"one message made {len(outcome.events)} events and {len(outcome.send)} replies")
        return outcome

    def _once(self, envs: np.ndarray) -> None:
        assert isinstance(self.session, HostSession | PolicySession)
        for env in envs.tolist():
            key = env, int(self.session.envs.request[env])
            if key in self.done:
                raise Crack(f"env {env} was acted upon twice for request {key[1]}")
            self.done.add(key)

    def _in_range(self, results: Results) -> None:
        floats = [results.reward, *(c for c in results.obs.values() if c.dtype.kind == "f")]
        floats += [] if results.seconds is None else [results.seconds]
        floats += [np.array(list(told.values())) for told in results.info.values()]
        if not all(np.isfinite(c).all() for c in floats) or not 0 < len(results.envs) <= ENVS:
            raise Crack("a result that is not finite, or of no env, came through")


def ask(policy: PolicySession) -> list[Message]:
    """Everything that can be asked of a host now."""
    phase, shape = policy.envs.phase, policy.hello.spaces.action.shape
    new, ready = np.flatnonzero(phase == Envs.NEW), np.flatnonzero(phase == Envs.READY)
    asked = [policy.reset(new, 0.0, new.astype(np.uint64))] if len(new) else []
    if policy.saves and len(ready) > 2:
        save, load, ready = ready[:1], ready[1:2], ready[2:]
        if policy.envs.autoreset != "next_step":
            asked.append(policy.snapshot(save, 0.0))
        asked.append(policy.restore(load, [b"some state"], 0.0))
    return asked + ([policy.step(ready, np.zeros((len(ready), *shape)), 0.0)] if len(ready) else [])


def answer(host: HostSession, message: Message, rng: np.random.Generator) -> list[Message]:
    """What a host says to that: results in parts, as is normal, and now and then an env that breaks."""
    outcome = host.take(message.to_bytes(), 0.0)
    said = list(outcome.send)
    for event in outcome.events:
        if isinstance(event, SnapshotRequest):
            said.append(host.snapshots(event.envs, [b"some state"] * len(event.envs), 0.0))
        elif isinstance(event, ResetRequest | StepRequest | RestoreRequest):
            host.slots.status[event.envs] = rng.integers(0, 4, len(event.envs))
            host.slots.info |= {env: {"is_success": 1.0, "laps": 2.5} for env in event.envs.tolist()}
            if len(event.envs) > 2 and rng.random() < 0.3:
                said.append(
                    host.broken(int(event.envs[-1]), "raised", "ValueError: so it goes", 0.0, facts={"step": 3})
                )
                event = event._replace(envs=event.envs[:-1])
            said += [host.results(some, 0.0) for some in (event.envs[:1], event.envs[1:]) if len(some)]
    return said


def record(spaces: Spaces, mode: str) -> tuple[list[Message], list[Message]]:
    """A whole valid session: what the host received, and what the policy received."""
    rng = np.random.default_rng(0)
    host = HostSession(Hello(ENVS, spaces, (mode,), CAPABILITIES, "fuzz", "1"), 0.0)
    policy = PolicySession(Offer(7, spaces, most_envs=ENVS), 0.0)
    to_host: list[Message] = []
    said = to_policy = [host.start()]
    for _ in range(ROUNDS + 1):
        asked = [reply for message in said for reply in policy.take(message.to_bytes(), 0.0).send]
        asked += ask(policy)
        said = [reply for message in asked for reply in answer(host, message, rng)]
        to_host, to_policy = to_host + asked, to_policy + said
    last = [host.log("info", "so far"), *host.close(0.0, "enough").send]
    return to_host + list(policy.close(0.0, "enough").send), to_policy + last


class Fuzzer:
    """Plays `play()` hostile messages at a time; `counts` says what became of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.records = [record(spaces, mode) for spaces, mode in WORLDS]
        self.counts: Counter[str] = Counter()
        self._mutations: tuple[Callable[[bytes], bytes], ...] = (
            *(self._field, self._byte, self._json) * 2,
            *(self._cut, self._longer, self._claim, self._noise),
        )

    def play(self, messages: int) -> None:
        while self.counts["messages"] < messages:
            world = self.random.randrange(len(WORLDS))
            if self.random.random() < 0.5:
                self._session(world, self._host(world), self.records[world][0])
            else:
                self._session(world, self._policy(world), self.records[world][1])

    def _host(self, world: int) -> HostSession:
        spaces, mode = WORLDS[world]
        return HostSession(Hello(ENVS, spaces, (mode,), CAPABILITIES, "fuzz", "1"), 0.0)

    def _policy(self, world: int) -> PolicySession:
        any_spaces = self.random.random() < 0.3
        return PolicySession(
            Offer(7, None if any_spaces else WORLDS[world][0], most_envs=ENVS, most_bytes=1 << 20), 0.0
        )

    def _session(self, world: int, session: HostSession | PolicySession, script: list[Message]) -> None:
        """Some of a valid session, then hostile messages until it ends, then what is valid again."""
        side = Side(session)
        for message in script[: self.random.randrange(len(script))]:
            self._mirror(session, message)
            side.see(session.receive(message, 0.0))
            if isinstance(session, HostSession):
                _results(session)
        for _ in range(self.random.randrange(1, 60)):
            if session.ended:
                break
            self.counts["messages"] += 1
            self._hostile(side, script)
            self._work(side)
        last = session.ended.code if session.ended else ""
        self.counts[f"ended: {last}" if last else "survived"] += 1
        self.counts.update({f"dropped: {reason}": n for reason, n in session.refused.items() if reason != last})
        self._goes_on(side)

    def _mirror(self, session: HostSession | PolicySession, message: Message) -> None:
        """Before a recorded result comes, a policy has asked for it, with the number that it was recorded with."""
        if isinstance(session, PolicySession) and session.open and not session.ended and message.envs:
            for env, request in zip(*(b.tolist() for b in message.buffers[:2]), strict=True):
                if request > session.envs.request[env] and session.envs.phase[env] != Envs.BUSY:
                    session._sequence = request - 1
                    new = session.envs.phase[env] == Envs.NEW
                    shape = session.hello.spaces.action.shape
                    asked = np.array([env])
                    if message.type == Type.SNAPSHOT:
                        session.snapshot(asked, 0.0)
                    elif new or (
                        message.type == Type.RESULT and message.buffers[3][message.buffers[0] == env] == RESET
                    ):
                        session.reset(asked, 0.0)
                    else:
                        session.step(asked, np.zeros((1, *shape)), 0.0)

    def _hostile(self, side: Side, script: list[Message]) -> None:
        message = self.random.choice(script)
        data = message.to_bytes()
        kind = self.random.random()
        if kind < 0.1:
            self.counts["replayed"] += 1
        else:
            for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                data = self.random.choice(self._mutations)(data)
        codec = side.session.codec
        try:
            if kind < 0.6:
                side.see(side.session.receive(codec.decode(data), 0.0))
            elif kind < 0.7:
                side.see(side.session.receive(codec.decode_frames(self._frames(message, data)), 0.0))
            else:
                self._stream(side, data + self.random.choice(script).to_bytes())
        except ProtocolError as error:
            self.counts[f"refused: {error.code}"] += 1
            if self.random.random() < 0.05:  # it ends the session; most go on, to spare us the way to here
                side.see(side.session.violated(error))
        except Exception as error:
            raise Crack(f"{type(error).__name__} came out of {data[:80]!r}") from error

    def _stream(self, side: Side, data: bytes) -> None:
        """The same over a byte stream, in pieces of any length."""
        reader, longest = Reader(side.session.codec), self.random.choice((7, 48, 400, 1 << 16))
        while data and not side.session.ended:
            space = reader.space()
            count = min(len(space), len(data), self.random.randrange(1, longest + 1))
            space[:count], data = data[:count], data[count:]
            reader.filled(count)
            while (message := reader.next()) is not None:
                side.see(side.session.receive(message, 0.0))

    def _work(self, side: Side) -> None:
        """A host does now and then what it was asked to; a policy may ask for more."""
        session = side.session
        if session.ended or not session.open or self.random.random() < 0.3:
            return
        if isinstance(session, HostSession):
            _results(session, self.random.randrange(1, ENVS + 1))
        elif isinstance(session, PolicySession) and not session._closing_there:
            ask(session)

    def _goes_on(self, side: Side) -> None:
        """If the session has not ended, every env of it can still be worked with."""
        session = side.session
        assert isinstance(session, HostSession | PolicySession)
        if session.ended or not session.open or session._closing_there:
            return
        before = len(side.done)
        if isinstance(session, HostSession):
            _results(session)
            envs = np.flatnonzero((session.envs.phase != Envs.GONE) & (session.envs.request < np.uint64((1 << 64) - 1)))
            request = Message(Type.RESET, session.session, (1 << 64) - 1, len(envs), buffers=[envs.astype("<u4")])
        else:
            ask(session)
            saving = np.flatnonzero(session.envs.phase == Envs.SAVING)
            session.envs.phase[saving] = Envs.BUSY  # what follows is about results
            session.envs.first[saving] = False
            envs = np.flatnonzero(session.envs.phase == Envs.BUSY)
            request = self._honest(session, envs)
        if not len(envs):
            return
        side.see(session.take(request.to_bytes(), 0.0))
        if len(side.done) != before + len(envs) or session.ended:
            raise Crack(f"{len(envs)} envs were to go on, {len(side.done) - before} did: {session.ended}")
        self.counts["went on"] += 1

    def _honest(self, session: PolicySession, envs: np.ndarray) -> Message:
        status = np.where(session.envs.first[envs], RESET, 0).astype(np.uint8)
        rows = [envs.astype("<u4"), session.envs.request[envs], np.zeros(len(envs), "<f4"), status]
        places, _ = session.codec.places(Type.RESULT, 0, len(envs), 0)
        return Message(
            Type.RESULT,
            session.session,
            0,
            len(envs),
            buffers=[*rows, *(np.zeros(p.shape, p.dtype) for p in places[4:])],
        )

    # Ways to be wrong

    def _field(self, data: bytes) -> bytes:
        """A number of the header is another."""
        place = self.random.randrange(len(_PLACES))
        size = _SIZES[place]
        value = self.random.choice((*_NUMBERS, self.random.getrandbits(64))) % (1 << 8 * size)
        return data[: _PLACES[place]] + value.to_bytes(size, "little") + data[_PLACES[place] + size :]

    def _byte(self, data: bytes) -> bytes:
        """A few bytes anywhere are others."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8)) if changed else 0):
            changed[self.random.randrange(len(changed))] = self.random.choice(
                (0, 1, 4, 255, self.random.getrandbits(8))
            )
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        return data[: self.random.randrange(len(data) + 1)]

    def _longer(self, data: bytes) -> bytes:
        return data + self.random.choice((b"\0", b"x" * 8, data, MAGIC, self.random.randbytes(100)))

    def _claim(self, data: bytes) -> bytes:
        """A header alone that promises much more."""
        sizes = [self.random.choice(_NUMBERS) for _ in range(5)]
        envs, ended, buffers, meta, body = (n % (1 << b) for n, b in zip(sizes, (32, 32, 16, 32, 64), strict=True))
        type_ = self.random.choice((*range(17), 77, 255))
        return (
            HEADER.pack(MAGIC, MAJOR, 0, type_, self.random.randrange(5), 7, 1, envs, ended, buffers, 0, meta, body)
            + data
        )

    def _json(self, data: bytes) -> bytes:
        """The meta is other JSON, or none, of the size that the header says."""
        if len(data) < HEADER.size:
            return data
        fields = list(HEADER.unpack_from(data))
        meta, body = data[HEADER.size : HEADER.size + fields[11]], data[HEADER.size + fields[11] :]
        try:
            told = json.loads(meta) if meta else {}
        except (ValueError, RecursionError):
            told = {}
        text = json.dumps(self._changed(told)).encode()
        text = self.random.choice(
            (text, text, text, text, b"[" * 20_000, b'{"a":' * 40, b"NaN", b"\xff\xfe", meta + b"}")
        )
        text += b" " * (-len(text) % 8)
        fields[11] = len(text)
        return HEADER.pack(*fields) + text + body

    def _changed(self, told: Any) -> Any:
        """One value, at any depth, is another, is missing, or has another name."""
        if isinstance(told, dict) and told and self.random.random() < 0.8:
            key = self.random.choice(list(told))
            rest = {k: v for k, v in told.items() if k != key}
            how = self.random.random()
            return rest if how < 0.1 else rest | {key + "_" if how < 0.2 else key: self._changed(told[key])}
        if isinstance(told, list) and told and self.random.random() < 0.8:
            place = self.random.randrange(len(told))
            return [*told[:place], self._changed(told[place]), *told[place + 1 :]]
        return self.random.choice(_VALUES)

    def _noise(self, data: bytes) -> bytes:
        return self.random.randbytes(self.random.randrange(200))

    def _frames(self, message: Message, data: bytes) -> list[bytes]:
        frames = [bytes(frame) for frame in message.frames()]
        place = self.random.randrange(len(frames))
        how = self.random.randrange(4)
        if how == 0:
            frames[place] = self.random.choice((data, b"", frames[place][:-1], frames[place] + b"x"))
        elif how == 1:
            del frames[place]
        elif how == 2:
            frames.insert(place, data[:20])
        return frames


def _results(host: HostSession, most: int = ENVS) -> None:
    """Answer for what a host owes."""
    if host.open and not host.ended and len(busy := np.flatnonzero(host.envs.phase == Envs.BUSY)[:most]):
        host.slots.status[busy] = 0
        host.results(busy, 0.0)
    if host.open and not host.ended and len(saving := np.flatnonzero(host.envs.phase == Envs.SAVING)[:most]):
        host.snapshots(saving, [b"some state"] * len(saving), 0.0)
