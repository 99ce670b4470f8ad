"""Messages to bytes and back: which buffers a type has, and how long each is, follows from the agreed spaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.protocol.frame import (
    GREETINGS,
    HEADER,
    MOST_BODY,
    MOST_STATE,
    OTHER_META,
    TYPES,
    UNKNOWN_BODY,
    Header,
    Message,
    ProtocolError,
    Type,
    most_meta,
    open_header,
    padded,
    read_meta,
)
from raynforce.protocol.spaces import DTYPES, Spaces

AUTORESET = ("same_step", "next_step", "explicit")  # the next episode begins in the same RESULT, a STEP, or a RESET
TERMINATED, TRUNCATED, RESET = 1, 2, 4  # of a RESULT's status; RESET is alone: a first observation, and no env step
ENDED = TERMINATED | TRUNCATED
FIRST, BROKE = 4, 8  # of a FRAGMENT's status: an episode's first step; the env broke or was only reset, alone
ENDED_EPISODES, TIMING = 1, 2  # flags of RESULT: each ended episode's own return and length; what each env itself took
SEEDS = 1  # flag of RESET: a seed for each env is there

Data = bytes | bytearray | memoryview
_U32, _U64, _I64, _F32, _F64, _U8 = (np.dtype(d) for d in ("<u4", "<u8", "<i8", "<f4", "<f8", "u1"))


class BufferColumn(NamedTuple):
    """One buffer: a row of `dtype` and `shape` for each env of the message, or only for those that ended."""

    dtype: np.dtype
    shape: tuple[int, ...] = ()
    ended: bool = False
    tail: bool = False  # the last one, as long as the sizes before it say: saved states, one after the other
    steps: int = 0  # if there are several of each env: `[steps, envs, ...]`


class BufferPlace(NamedTuple):
    """`nbytes` of a tail is unknown here: it takes the rest of the body."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


_ENDING = frozenset((Type.RESULT, Type.FRAGMENT))
_NAMES = {number: type_.name for number, type_ in TYPES.items()}
_ID, _REQUEST = BufferColumn(_U32), BufferColumn(_U64)
_ROWLESS = frozenset((Type.REJECT, Type.PING, Type.PONG, Type.LOG, Type.CLOSE))
_CONTROL: dict[int, tuple[BufferColumn, ...]] = dict.fromkeys((Type.HELLO, *_ROWLESS), ())
_CONTROL |= {Type.WELCOME: (BufferColumn(_U64),), Type.ERROR: (_ID, _REQUEST)}
_FULL = frozenset((Type.HELLO, Type.WELCOME, Type.RESET, Type.STEP, Type.RESULT))  # at least one env
_FULL |= {Type.SNAPSHOT, Type.RESTORE, Type.FRAGMENT}
_STATES = (BufferColumn(_U64), BufferColumn(_U8, tail=True))  # sizes, and the states themselves


class Codec:
    """What one side of a session may receive, and how it is read. `agree` opens it for the hot messages."""

    def __init__(self, takes: Sequence[Type], most_envs: int) -> None:
        self.takes = frozenset(takes)
        self.most_envs = most_envs
        self.minor: int | None = None
        self.fragment = 0  # steps of each env in a FRAGMENT, if there are any
        self.columns: dict[tuple[int, int], tuple[BufferColumn, ...]] = {(t, 0): c for t, c in _CONTROL.items()}
        self.places = lru_cache(maxsize=1024)(self._places)  # a peer chooses the keys, so it is bounded

    def agree(
        self,
        spaces: Spaces,
        autoreset: str,
        envs: int,
        minor: int,
        capabilities: Sequence[str] = (),
        fragment: int = 0,
    ) -> None:
        obs = tuple(BufferColumn(DTYPES[leaf.dtype], leaf.shape) for leaf in spaces.obs)
        action = BufferColumn(DTYPES[spaces.action.dtype], spaces.action.shape)
        if "memory" in capabilities:  # they lie elsewhere
            obs = ()
        final = tuple(column._replace(ended=True) for column in obs) if autoreset == "same_step" else ()
        result = (_ID, _REQUEST, BufferColumn(_F32), BufferColumn(_U8))
        episodes = (BufferColumn(_F64, ended=True), BufferColumn(_U32, ended=True))
        self.columns |= {(Type.RESET, 0): (_ID,), (Type.RESET, SEEDS): (_ID, BufferColumn(_U64))}
        self.columns[Type.STEP, 0] = (_ID, action)
        agreed = result_flags(capabilities)
        for flags in (flags for flags in range(agreed + 1) if not flags & ~agreed):
            seconds = (BufferColumn(_F32),) if flags & TIMING else ()
            counts = episodes if flags & ENDED_EPISODES else ()
            self.columns[Type.RESULT, flags] = (*result, *seconds, *obs, *counts, *final)
        if "snapshot" in capabilities:
            asks = Type.WELCOME in self.takes
            self.columns[Type.SNAPSHOT, 0] = (_ID,) if asks else (_ID, _REQUEST, *_STATES)
            self.columns[Type.RESTORE, 0] = (_ID, *_STATES)
        if fragment:
            self.fragment = fragment
            seen = tuple(column._replace(steps=fragment + 1) for column in obs)
            recorded = BufferColumn(_F32 if spaces.action.kind == "box" else _I64, spaces.action.shape, steps=fragment)
            each = tuple(BufferColumn(dtype, steps=fragment) for dtype in (_F32, _F32, _U8, _U32))
            self.columns[Type.FRAGMENT, 0] = (*seen, recorded, *each, *episodes, *final)
        self.minor, self.most_envs = minor, envs
        self.places.cache_clear()

    def _places(self, type_: int, flags: int, envs: int, ended: int) -> tuple[tuple[BufferPlace, ...], int]:
        """Every buffer of such a message, and the length of its body; KeyError if there is no such layout."""
        places, offset = [], 0
        for column in self.columns[type_, flags]:
            shape = (ended if column.ended else envs, *column.shape)
            if column.steps:
                shape = (column.steps, *shape)
            nbytes = 0 if column.tail else math.prod(shape) * column.dtype.itemsize
            places.append(BufferPlace(column.dtype, shape, offset, nbytes))
            offset += padded(nbytes)
        return tuple(places), offset

    def measure(self, head: Data) -> Header:
        """Read a header and refuse whatever cannot be, before a byte is stored for what it announces."""
        header = open_header(head)
        minor, type_, flags, _, _, envs, ended, buffers, meta_bytes, body_bytes = header
        name = _NAMES.get(type_)
        if name is None:
            if meta_bytes > OTHER_META or body_bytes > UNKNOWN_BODY:
                unknown, size = f"a message of the unknown type {type_}", meta_bytes + body_bytes
                raise ProtocolError("size", f"{unknown} has {size} bytes; too long to skip")
            return header
        if type_ not in self.takes:
            raise ProtocolError("type", f"{name} is not for this side to receive")
        most = most_meta(type_)
        if meta_bytes > most or meta_bytes % 8:
            raise ProtocolError("size", f"{name}: meta bytes {meta_bytes}; expected a multiple of 8 to {most}")
        if envs > self.most_envs:
            raise ProtocolError("env", f"{name}: envs {envs}; at most {self.most_envs} are possible")
        if (envs and type_ in _ROWLESS) or (not envs and type_ in _FULL):
            raise ProtocolError("env", f"{name}: envs {envs}; expected {'0' if envs else '1 or more'}")
        if type_ == Type.FRAGMENT and envs != self.most_envs:
            raise ProtocolError("env", f"{name}: envs {envs}; it is of all {self.most_envs}")
        if ended and (type_ not in _ENDING or ended > envs * (self.fragment if type_ == Type.FRAGMENT else 1)):
            raise ProtocolError("env", f"{name}: ended {ended} of {envs} envs")
        try:
            places, body = self.places(type_, flags, envs, ended)
        except KeyError:
            if (type_, 0) in self.columns:
                raise ProtocolError("flags", f"{name}: flags {flags:#x}; unknown ones are set") from None
            done = "the handshake was done" if self.minor is None else "its capability was agreed upon"
            raise ProtocolError("state", f"{name} came before {done}") from None
        if self._has_tail(type_):
            body = _with_states(name, envs, body, body_bytes)
        if body_bytes != body or buffers != len(places):
            found, expected = f"{buffers} buffers of {body_bytes} bytes", f"{len(places)} of {body} bytes"
            raise ProtocolError("size", f"{name} of {envs} envs has {found}; its spaces make it {expected}")
        if minor != self.minor and type_ not in GREETINGS and self.minor is not None:
            raise ProtocolError("version", f"{name}: minor version {minor}; agreed was {self.minor}")
        return header

    def decode(self, data: Data, header: Header | None = None) -> Message:
        """Read a whole message from one piece of memory; its arrays are read-only views of it."""
        header = header or self.measure(data)
        if len(data) != header.whole:
            raise ProtocolError("size", f"the message has {len(data)} bytes; its header says {header.whole}")
        if header.type not in TYPES:
            return _message(header, {}, ())
        start = HEADER.size + header.meta_bytes
        meta = read_meta(data[HEADER.size : start]) if header.meta_bytes else {}
        view = data if type(data) is bytes else memoryview(data).toreadonly()
        places, _ = self.places(header.type, header.flags, header.envs, header.ended)
        if self._has_tail(header.type):
            tail = places[-1]
            places = *places[:-1], tail._replace(shape=(header.body_bytes - tail.offset,))
            buffers = [np.ndarray(p.shape, p.dtype, view, start + p.offset) for p in places]
            return _message(header, meta, _trimmed(buffers))
        return _message(header, meta, [np.ndarray(p.shape, p.dtype, view, start + p.offset) for p in places])

    def _has_tail(self, type_: int) -> bool:
        return type_ >= Type.SNAPSHOT and self.columns[type_, 0][-1].tail

    def decode_frames(self, frames: Sequence[Data]) -> Message:
        """Read a message that came as one frame, or as a head and one frame for each buffer (unpadded)."""
        if len(frames) == 1:
            return self.decode(frames[0])
        if not frames:
            raise ProtocolError("size", "the message has no frames")
        head = frames[0]
        header = self.measure(head)
        if header.type not in TYPES:
            return _message(header, {}, ())
        places, _ = self.places(header.type, header.flags, header.envs, header.ended)
        sizes = [memoryview(f).nbytes for f in frames]
        expected = [HEADER.size + header.meta_bytes, *(p.nbytes for p in places)]
        tailed = self._has_tail(header.type)
        if tailed and len(sizes) == len(expected) and padded(sizes[-1]) == header.body_bytes - places[-1].offset:
            expected[-1] = sizes[-1]
            places = *places[:-1], places[-1]._replace(shape=(sizes[-1],))
        if sizes != expected or (tailed and padded(sizes[-1]) != header.body_bytes - places[-1].offset):
            name = TYPES[header.type].name
            raise ProtocolError("size", f"{name} has frames of {sizes[:8]} bytes; its spaces make them {expected[:8]}")
        meta = read_meta(head[HEADER.size :]) if header.meta_bytes else {}
        pairs = zip(places, frames[1:], strict=True)
        buffers = [np.ndarray(p.shape, p.dtype, memoryview(f).toreadonly()) for p, f in pairs]
        return _message(header, meta, _trimmed(buffers) if tailed else buffers)


def _with_states(name: str, envs: int, least: int, body_bytes: int) -> int:
    """The length of a body with saved states, which the header tells."""
    most = min(MOST_BODY, least + envs * MOST_STATE)
    if not least <= body_bytes <= most or body_bytes % 8:
        raise ProtocolError("limit", f"{name} of {envs} envs has {body_bytes} bytes; from {least} to {most} can be")
    return body_bytes


def result_flags(capabilities: Sequence[str]) -> int:
    return (ENDED_EPISODES if "episodes" in capabilities else 0) | (TIMING if "timing" in capabilities else 0)


def _trimmed(buffers: list[np.ndarray]) -> list[np.ndarray]:
    """The same with the tail as long as the sizes before it say."""
    *_, sizes, tail = buffers
    if int(sizes.max()) > MOST_STATE:
        raise ProtocolError("limit", f"a state of {sizes.max()} bytes; at most {MOST_STATE} are allowed")
    total = int(sizes.sum())
    if padded(total) != padded(tail.nbytes) or total > tail.nbytes:
        raise ProtocolError("size", f"the states have {tail.nbytes} bytes; their sizes make them {total}")
    return [*buffers[:-1], tail[:total]]


def split_states(sizes: np.ndarray, states: np.ndarray) -> list[bytes]:
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [states[end - size : end].tobytes() for end, size in zip(ends, sizes.tolist(), strict=True)]


def join_states(states: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """`sizes` and `states` of a message."""
    sizes = [len(state) for state in states]
    if max(sizes) > MOST_STATE:
        raise UsageError(f"a state has {max(sizes):,} bytes; at most {MOST_STATE:,} are allowed")
    return np.array(sizes, np.uint64), np.frombuffer(b"".join(states), np.uint8)


def _message(header: Header, meta: dict[str, object], buffers: Sequence[np.ndarray]) -> Message:
    h = header
    return Message(h.type, h.session, h.sequence, h.envs, h.ended, h.flags, h.minor, meta, buffers)
