"""Bytes and messages: what is written is read again in place, and whatever else is refused by name."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from protocol_worlds import CART, ROBOT, begun, met

from raynforce.errors import UsageError
from raynforce.protocol.frame import HEADER, MAGIC, Message, ProtocolError, Type, read_meta
from raynforce.protocol.policy_session import Results


def result() -> tuple[Any, Message]:
    """A policy's codec, and a RESULT of two of three envs, one of which has ended."""
    host, policy = begun(ROBOT, 3)
    host.take(policy.step(np.array([2, 0]), np.zeros((2, 2)), 0.0).to_bytes(), 0.0)
    host.slots.obs["obs/camera"][:] = np.arange(18).reshape(3, 2, 3)
    host.slots.final["obs/gear"][:] = 3
    host.slots.reward[:] = 0.5, 1.5, 2.5
    host.slots.status[2] = 1
    return policy, host.results(np.array([2, 0]), 0.0)


def test_a_result_is_read_where_it_lies() -> None:
    policy, message = result()
    data = message.to_bytes()
    read = policy.codec.decode(data)
    assert len(data) % 8 == 0
    assert (read.type, read.session, read.envs, read.ended) == (Type.RESULT, 7, 2, 1)
    for sent, got in zip(message.buffers, read.buffers, strict=True):
        np.testing.assert_array_equal(sent, got)
        assert got.flags.aligned
        assert not got.flags.writeable
        assert not got.flags.owndata
    (event,) = policy.receive(read, 0.0).events
    assert isinstance(event, Results)
    assert event.envs.tolist() == [2, 0]
    assert event.reward.tolist() == [2.5, 0.5]
    assert event.obs["obs/camera"][1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (event.terminated.tolist(), event.valid.tolist()) == ([True, False], [True, True])
    assert (event.ended.tolist(), event.final_obs["obs/gear"].tolist()) == ([0], [3])


def test_frames_and_one_piece_are_the_same_message() -> None:
    policy, message = result()
    whole, framed = policy.codec.decode(message.to_bytes()), policy.codec.decode_frames(message.frames())
    assert whole[:8] == framed[:8]
    for a, b in zip(whole.buffers, framed.buffers, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ProtocolError, match="frames of"):
        policy.codec.decode_frames(message.frames()[:-1])


WRONG = [
    ("magic", 0, "4s", b"HTTP", "begins with b'HTTP'"),
    ("version", 4, "B", 2, "major version 2"),
    ("version", 5, "B", 9, "minor version 9; agreed was 0"),
    ("type", 6, "B", Type.STEP, "STEP is not for this side"),
    ("flags", 7, "B", 2, "flags 0x2"),
    ("flags", 7, "B", 1, "flags 0x1"),  # `episodes` was not agreed upon
    ("env", 24, "I", 4, "envs 4; at most 3"),
    ("env", 24, "I", 0, "envs 0; expected 1 or more"),
    ("env", 28, "I", 3, "ended 3 of 2 envs"),
    ("size", 28, "I", 2, "its spaces make it"),
    ("size", 32, "H", 9, "9 buffers"),
    ("field", 34, "H", 1, "reserved is 1"),
    ("size", 36, "I", 8, "its header says"),
    ("size", 36, "I", 4, "meta bytes 4"),
    ("size", 36, "I", 1 << 30, "meta bytes 1073741824"),
    ("size", 40, "Q", 1 << 60, "of 1152921504606846976 bytes"),
]


@pytest.mark.parametrize(("code", "place", "kind", "value", "text"), WRONG)
def test_a_wrong_header_is_refused_by_name(code: str, place: int, kind: str, value: Any, text: str) -> None:
    policy, message = result()
    data = bytearray(message.to_bytes())
    struct.pack_into(f"<{kind}", data, place, value)
    with pytest.raises(ProtocolError, match=text) as raised:
        policy.codec.decode(bytes(data))
    assert raised.value.code == code
    assert "\n" not in str(raised.value)


def test_a_message_that_is_cut_or_too_long_is_refused() -> None:
    policy, message = result()
    data = message.to_bytes()
    for wrong in (b"", data[:47], data[:-1], data + b"\0", data * 2):
        with pytest.raises(ProtocolError):
            policy.codec.decode(wrong)


def test_steps_are_refused_before_the_handshake() -> None:
    from raynforce.protocol.handshake import Hello
    from raynforce.protocol.host_session import HostSession

    _, policy = met()
    step = policy.reset(np.arange(3), 0.0).to_bytes()
    with pytest.raises(ProtocolError, match="before the handshake"):
        HostSession(Hello(3, CART), 0.0).codec.decode(step)


@pytest.mark.parametrize(
    "text",
    [
        b"[1]",
        b"nope",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b"\xff",
        b"[" * 9999,
        b'{"a":' * 17 + b"1" + b"}" * 17,
        b"1" * 9000,
    ],
)
def test_hostile_json_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError) as raised:
        read_meta(text)
    assert raised.value.code == "meta"


def test_json_of_the_greatest_depth_is_read() -> None:
    assert read_meta(b'{"a":' * 16 + b"1" + b"}" * 16 + b"  ")["a"]
    assert read_meta(b"") == {}


def test_what_cannot_be_sent_is_told_to_the_sender() -> None:
    with pytest.raises(UsageError, match="JSON of CLOSE has 20013 bytes; at most 16384"):
        Message(Type.CLOSE, meta={"reason": "x" * 20_000}).head()
    with pytest.raises(UsageError, match="LOG is to say is not JSON"):
        Message(Type.LOG, meta={"text": float("nan")}).head()


def test_the_header_has_48_bytes_at_fixed_places() -> None:
    head = Message(Type.PING, session=2, sequence=3, minor=0).head()
    assert (len(head), HEADER.size) == (48, 48)
    assert head[:8] == MAGIC + bytes([1, 0, 8, 0])
    assert head[8:24] == (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
    assert head[24:] == bytes(24)
