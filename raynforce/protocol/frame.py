"""The outside of a message: its fixed header, its small JSON, the limits of both, and what breaking them raises."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import RaynforceError, UsageError, summary

MAGIC = b"RAYN"
MAJOR, MINORS = 1, (0, 0)  # the oldest and the newest minor version
# magic, major, minor, type, flags, session, sequence, envs, ended, buffers, reserved, meta bytes, body bytes
HEADER = struct.Struct("<4sBBBBQQIIHHIQ")
ALIGN = 8  # header, meta and every buffer begin at a multiple of this, so that a receiver may read numbers in place

MOST_ENVS = 65_536
MOST_LEAVES = 256
MOST_BODY = 1 << 30
MOST_STATE = 1 << 26  # bytes of one env's saved state
GREETING_META = 1 << 18  # of HELLO, WELCOME and REJECT, which carry spaces and settings
OTHER_META = 1 << 14
ROOM = OTHER_META - ALIGN  # bytes of JSON that fit for certain
UNKNOWN_BODY = 1 << 16  # of a type that we do not know, which is read to be skipped
DEPTH = 16
MOST_BRACKETS = 1 << 14  # `[` and `{` in a meta: an empty list costs a sender 2 bytes and us 64
TEXT = 4000

SMALL = 1 << 14  # bytes of an array, or a message, that are sooner copied than referred to
FEW = 32  # up to so many numbers are looked at one by one: that takes less time than numpy needs to begin
_PADDING = tuple(bytes(n) for n in range(ALIGN))


class Type(IntEnum):
    """What a message is. Numbers are never used again for something else."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    RESET = 4
    STEP = 5
    RESULT = 6
    ERROR = 7
    PING = 8
    PONG = 9
    LOG = 10
    CLOSE = 11
    SNAPSHOT = 12
    RESTORE = 13
    POLICY = 14
    SAMPLE = 15
    FRAGMENT = 16


TYPES = {int(t): t for t in Type}
GREETINGS = frozenset((Type.HELLO, Type.WELCOME, Type.REJECT))


class ProtocolError(RaynforceError):
    """The other side broke the protocol; the text is one line that names what was wrong."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code  # one of `docs/protocol.md`; peers see it, and refusals are counted by it


class Header(NamedTuple):
    minor: int
    type: int
    flags: int
    session: int
    sequence: int
    envs: int  # rows of the message: environments it is about
    ended: int  # rows of them whose episode has ended (RESULT alone)
    buffers: int
    meta_bytes: int
    body_bytes: int

    @property
    def whole(self) -> int:
        return HEADER.size + self.meta_bytes + self.body_bytes


class Message(NamedTuple):
    """One message, to be sent or received. What is received shows its arrays where they are: nothing is copied."""

    type: int
    session: int = 0
    sequence: int = 0
    envs: int = 0
    ended: int = 0
    flags: int = 0
    minor: int = MINORS[1]
    meta: Mapping[str, Any] = {}
    buffers: Sequence[np.ndarray] = ()

    def head(self) -> bytes:
        return self._head(sum(padded(buffer.nbytes) for buffer in self.buffers))

    def _head(self, body: int) -> bytes:
        type_, session, sequence, envs, ended, flags, minor, meta, buffers = self
        text = write_meta(meta, type_) if meta else b""
        counts = envs, ended, len(buffers), 0, len(text), body
        return HEADER.pack(MAGIC, MAJOR, minor, type_, flags, session, sequence, *counts) + text

    def pieces(self) -> list[bytes | memoryview]:
        """What goes over a byte stream, in pieces (`socket.sendmsg`); large arrays are not copied."""
        pieces: list[bytes | memoryview] = [b""]
        body = 0
        for buffer in self.buffers:
            size = buffer.nbytes
            pieces.append(buffer.tobytes() if size <= SMALL else buffer.data)
            if gap := -size % ALIGN:
                pieces.append(_PADDING[gap])
            body += size + gap
        pieces[0] = self._head(body)
        return pieces

    def frames(self) -> list[bytes | memoryview]:
        """What goes over a transport that keeps borders, in several frames: the head, then each buffer unpadded."""
        return [self.head(), *(buffer.data for buffer in self.buffers)]

    def to_bytes(self) -> bytes:
        return b"".join(self.pieces())


def padded(size: int) -> int:
    return (size + ALIGN - 1) & -ALIGN


def open_header(head: bytes | bytearray | memoryview) -> Header:
    """Read the first 48 bytes: only what no later version may change is checked here."""
    if len(head) < HEADER.size:
        raise ProtocolError("size", f"the message has {len(head)} bytes; a header alone has {HEADER.size}")
    magic, major, *_ = fields = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise ProtocolError("magic", f"the message begins with {magic!r}; expected {MAGIC!r}")
    if major != MAJOR:
        raise ProtocolError("version", f"major version {major}; this side speaks {MAJOR}")
    if fields[10]:
        raise ProtocolError("field", f"reserved is {fields[10]}; it must be 0")
    return Header(*fields[2:10], *fields[11:])


def most_meta(type_: int) -> int:
    return GREETING_META if type_ in GREETINGS or type_ == Type.FRAGMENT else OTHER_META


def write_meta(meta: Mapping[str, Any], type_: int) -> bytes:
    """JSON, padded with spaces."""
    name = TYPES[type_].name
    try:
        text = json.dumps(meta, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    except (TypeError, ValueError) as error:
        raise UsageError(f"what {name} is to say is not JSON: {summary(error)}") from error
    if len(text) > most_meta(type_) or text.count(b"[") + text.count(b"{") > MOST_BRACKETS:
        raise UsageError(f"the JSON of {name} has {len(text)} bytes; at most {most_meta(type_)} are allowed")
    return text + b" " * (-len(text) % ALIGN)


def sendable(meta: Mapping[str, Any], type_: int) -> bool:
    """Whether it is JSON that `read_meta` takes."""
    try:
        read_meta(write_meta(meta, type_))
    except (UsageError, ProtocolError, RecursionError):
        return False
    return True


def read_meta(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a peer's JSON: an object, not too deep, and all numbers finite."""
    data = bytes(data)
    if not data:
        return {}
    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise ProtocolError("meta", f"the meta has more than {MOST_BRACKETS:,} lists and objects")
    try:
        meta = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("meta", f"the meta is not JSON in UTF-8: {type(error).__name__}") from error
    if not isinstance(meta, dict):
        raise ProtocolError("meta", f"the meta is a {type(meta).__name__}; it must be an object")
    level: list[Any] = [meta]
    for _ in range(DEPTH):
        level = [below for value in level for below in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return meta
    raise ProtocolError("meta", f"the meta is nested deeper than {DEPTH}")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def clean(value: object, most: int = TEXT) -> str:
    """A peer's text, safe to print: bounded, and without control characters or halves of surrogates."""
    text = value if isinstance(value, str) else str(value)[:most]
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text[:most])
