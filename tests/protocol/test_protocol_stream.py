"""Byte streams: messages come out whole whatever the pieces, and a claim alone takes no memory."""

from __future__ import annotations

import contextlib
import socket
import tracemalloc

import numpy as np
import pytest
from protocol_worlds import CART, begun

from raynforce.protocol.frame import HEADER, MAGIC, Message, ProtocolError, Type
from raynforce.protocol.handshake import Hello, Offer
from raynforce.protocol.host_session import HostSession
from raynforce.protocol.policy_session import PolicySession, Results
from raynforce.protocol.spaces import Spaces
from raynforce.protocol.wire import CHUNK, Full, Reader, Writer
from raynforce.spaces import ObsLeaf

BIG = Spaces((ObsLeaf("obs", "box", (200, 200), "uint8"),), CART.action)


def feed(reader: Reader, data: bytes, piece: int) -> list[Message]:
    found, place = [], 0
    while place < len(data):
        space = reader.space()
        count = min(len(space), len(data) - place, piece)
        space[:count] = data[place : place + count]
        place += count
        reader.filled(count)
        while (message := reader.next()) is not None:
            found.append(message)
    return found


@pytest.mark.parametrize("piece", [5, 47, 48, 49, 1000, CHUNK])
def test_messages_come_out_whole(piece: int) -> None:
    host, policy = begun(BIG, 3)
    sent = []
    for envs in ([0], [1, 2], [2, 0, 1]):  # 40 kB, 80 kB and 120 kB: within a chunk, and longer
        host.take(policy.step(np.array(envs), np.zeros(len(envs)), 0.0).to_bytes(), 0.0)
        host.slots.obs["obs"][envs] = len(sent)
        sent.append(host.results(np.array(envs), 0.0))
        policy.receive(sent[-1], 0.0)
    sent += [host.log("info", "done")]
    reader = Reader(policy.codec)
    found = feed(reader, b"".join(m.to_bytes() for m in sent), piece)
    assert [m.type for m in found] == [m.type for m in sent]
    for message, again in zip(sent, found, strict=True):
        assert message.meta == again.meta
        for a, b in zip(message.buffers, again.buffers, strict=True):
            np.testing.assert_array_equal(a, b)


def test_earlier_messages_stay_as_they_were() -> None:
    host, policy = begun(CART, 1)
    reader, kept = Reader(policy.codec), []
    for number in range(3):
        host.take(policy.step(np.array([0]), np.zeros(1), 0.0).to_bytes(), 0.0)
        host.slots.reward[0] = number
        message = host.results(np.array([0]), 0.0)
        policy.receive(message, 0.0)
        kept += feed(reader, message.to_bytes(), CHUNK)
    assert [m.buffers[2].item() for m in kept] == [0, 1, 2]


@pytest.mark.parametrize("type_", [*Type, 77])
def test_claims_take_no_memory(type_: int) -> None:
    """A stranger, before any handshake, promises as much as fits into a header."""
    policy = PolicySession(Offer(1), 0.0)
    reader = Reader(policy.codec)
    huge = HEADER.pack(MAGIC, 1, 0, type_, 0, 0, 0, 1000, 0, 1, 0, (1 << 32) - 8, 1 << 62)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            feed(reader, huge, CHUNK)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


def test_the_longest_hello_fits_into_the_longest_meta() -> None:
    """262,144 bytes of spaces: what a stranger can make us store, and no more."""
    reader = Reader(PolicySession(Offer(1), 0.0).codec)
    head = HEADER.pack(MAGIC, 1, 0, Type.HELLO, 0, 0, 0, 1, 0, 0, 0, 1 << 18, 0)
    assert feed(reader, head + b" " * 100, CHUNK) == []
    assert len(reader.space()) == (1 << 18) - 100
    with pytest.raises(ProtocolError, match="meta bytes 262152"):
        feed(Reader(reader.codec), HEADER.pack(MAGIC, 1, 0, Type.HELLO, 0, 0, 0, 1, 0, 0, 0, (1 << 18) + 8, 0), CHUNK)


def test_a_session_over_sockets_that_do_not_wait() -> None:
    """Handshake, first observations and ten steps of 200x200 images in both directions, with nobody ever blocking."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        host, policy = HostSession(Hello(3, BIG), 0.0), PolicySession(Offer(5), 0.0)
        from_policy, to_policy = Reader(host.codec), Writer(1 << 20)
        from_host, to_host = Reader(policy.codec), Writer(1 << 20)
        to_policy.put(host.start())
        seen: list[int] = []
        for _ in range(2000):
            to_policy.write(theirs)
            to_host.write(ours)
            receive(from_host, ours)
            while (message := from_host.next()) is not None:
                outcome = policy.receive(message, 0.0)
                for reply in outcome.send:
                    to_host.put(reply)
                    to_host.put(policy.reset(np.arange(3), 0.0))
                for event in outcome.events:
                    if isinstance(event, Results):
                        seen += event.obs["obs"][:, 0, 0].tolist()
                        to_host.put(policy.step(event.envs, np.zeros(len(event.envs)), 0.0))
            receive(from_policy, theirs)
            while (message := from_policy.next()) is not None:
                for event in host.receive(message, 0.0).events:
                    for env in getattr(event, "envs", ()):
                        host.slots.obs["obs"][env] += 1
                        to_policy.put(host.results(np.array([env]), 0.0))
            if len(seen) >= 33:
                break
        assert sorted(seen)[:9] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert not host.refused
        assert not policy.refused


def receive(reader: Reader, end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        reader.filled(end.recv_into(reader.space()))


def test_a_peer_that_does_not_read_is_noticed() -> None:
    writer = Writer(1000)
    ping = Message(Type.PING)
    for _ in range(20):
        writer.put(ping)
    with pytest.raises(Full, match="960 bytes are waiting"):
        writer.put(ping)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert writer.write(ours)
        assert theirs.recv(2000) == ping.to_bytes() * 20
    assert writer.waiting == 0
