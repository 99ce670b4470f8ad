"""Sessions over real connections: both ends, strangers, whoever does not read, hangs up, or comes again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from protocol_worlds import CART

from raynforce.errors import UsageError
from raynforce.protocol import channel, wire
from raynforce.protocol.channel import Address, ChannelError, HostLink, Link, Listener, connect
from raynforce.protocol.frame import Message, Type
from raynforce.protocol.handshake import Deadlines, Hello, Offer, Refusal
from raynforce.protocol.host_session import ResetRequest, StepRequest
from raynforce.protocol.policy_session import Results
from raynforce.protocol.session import Closing, Ended
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import ObsLeaf

KINDS = ("direct", "unix", "tcp")
SOCKETS = ("unix", "tcp")
IMAGE = Spaces((ObsLeaf("obs", "box", (300, 300), "uint8"),), CART.action)


@contextmanager
def listening(kind: str, offer: Offer | None = None, **more: Any) -> Iterator[Listener]:
    listener = Listener(kind, offer or Offer(), **more)  # type: ignore[arg-type]
    try:
        yield listener
    finally:
        listener.close()


def joined(listener: Listener, hello: Hello | None = None, **more: Any) -> tuple[Link, HostLink]:
    """Both ends of a host that was taken in."""
    hosts: list[HostLink] = []

    def host() -> None:
        hosts.append(connect(listener.address, hello or Hello(3, CART), seconds=5, **more))

    thread = threading.Thread(target=host)
    thread.run() if listener.address.kind == "direct" else thread.start()
    link = wait(listener.accept)
    if thread.ident:
        thread.join()
    return link, hosts[0]


def wait(there: Callable[[], Any]) -> Any:
    until = time.monotonic() + 5
    while not (found := there()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.001)
    return found


def events(end: Link | HostLink) -> list[Any]:
    return list(wait(lambda: end.receive(time.monotonic())))


def last(end: Link | HostLink) -> Ended:
    """How it ended."""
    found: list[Any] = []
    wait(lambda: found.extend(end.receive(time.monotonic())) or end.session.ended)
    assert isinstance(found[-1], Ended)
    return found[-1]


def raw(address: Address) -> socket.socket:
    """A stranger."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{address.where}")
    return connection


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_from_hello_to_close(kind: str) -> None:
    def each(offer: Offer, hello: Hello) -> Offer:
        assert hello.host is not None
        return replace(offer, seeds=lambda envs: np.arange(envs) + 10, config={"lanes": [hello.host * hello.envs]})

    with listening(kind, Offer(spaces=CART, each=each)) as listener:
        link, host = joined(listener, Hello(3, CART, host=2))
        assert host.session.welcome is not None
        assert (link.host, host.session.welcome.config) == (2, {"lanes": [6]})
        assert (link.fileno() >= 0) == (host.fileno() >= 0) == (listener.fileno() >= 0) == (kind != "direct")
        link.send(link.session.reset(np.arange(3), 0.0))
        (reset,) = events(host)
        assert isinstance(reset, ResetRequest)
        assert reset.seeds is not None
        assert reset.seeds.tolist() == [10, 11, 12]
        host.session.slots.obs["obs"][:, 0] = 1, 2, 3
        host.send(host.session.results(np.array([2, 0]), 0.0), host.session.results(np.array([1]), 0.0))
        results = []
        while len(results) < 2:
            results += events(link)
        assert [r.obs["obs"][:, 0].tolist() for r in results] == [[3, 1], [2]]
        link.send(link.session.step(np.array([1]), np.array([1]), 0.0))
        (step,) = events(host)
        assert isinstance(step, StepRequest)
        host.close("done")
        host.close()
        assert last(link) == Ended("closed", "done")
        assert not link.receive(0.0)
        link.close()
        assert host.fileno() == link.fileno() == -1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_before_hanging_up_is_heard(kind: str) -> None:
    with listening(kind) as listener:
        link, host = joined(listener)
        link.close("enough")
        host.send(host.session.log("info", "too late"))  # and nothing is raised
        assert last(host) == Ended("closed", "enough")
        host.close()
        link, host = joined(listener)
        link.send(*link.session.close(0.0, "in good order").send)
        assert events(host) == [Closing("in good order", 5.0)]
        host.close("so be it")
        assert last(link) == Ended("closed", "so be it")
        link.close()


@pytest.mark.parametrize("kind", KINDS)
def test_time_passes(kind: str) -> None:
    with listening(kind) as listener:
        link, host = joined(listener)
        now = time.monotonic()
        host.session.progress(now)
        assert link.poll(now + 1.5) == []  # it asks
        wait(lambda: host.receive(now + 1.75) or (link.receive(now + 2), link.session.peer_stalled)[1])
        assert link.session.peer_stalled == pytest.approx(1.75, abs=0.01)
        (ended,) = link.poll(now + 60)
        assert ended.code == "silence"
        link.close()
        assert last(host).code == "lost"
        host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_does_not_know_the_token_is_refused(kind: str) -> None:
    with listening(kind) as listener:
        address = listener.address._replace(token=b"guess")
        told: list[str] = []

        def host() -> None:
            with pytest.raises(ChannelError) as error:
                connect(address, Hello(3, CART), seconds=5)
            told.append(str(error.value))

        thread = threading.Thread(target=host)
        thread.run() if kind == "direct" else thread.start()
        wait(lambda: listener.accept() or listener.refused)
        if thread.ident:
            thread.join()
        assert listener.refused == {"auth": 1}
        assert told[0].startswith(f"the policy at {address} refuses this host (auth): launch and proof do not belong")
        assert "guess" not in repr(address)


def test_an_owner_may_refuse_a_host() -> None:
    def each(offer: Offer, hello: Hello) -> Offer:
        raise Refusal("host", f"there is no host {hello.host}")

    with (
        listening("direct", Offer(each=each)) as listener,
        pytest.raises(ChannelError, match=r"\(host\): there is no host 7"),
    ):
        connect(listener.address, Hello(3, CART, host=7), seconds=1)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_there(kind: str) -> None:
    with listening(kind) as listener:
        address = listener.address
    began = time.monotonic()
    with pytest.raises(ChannelError, match=f"at {kind}:.*"):
        connect(address, Hello(3, CART), seconds=0.1)
    assert time.monotonic() - began < 10
    with pytest.raises(UsageError, match="the kind of channel is 'smoke'"):
        Listener("smoke", Offer())  # type: ignore[arg-type]


def test_a_policy_that_does_not_answer_is_given_up() -> None:
    with listening("unix") as listener, pytest.raises(ChannelError, match=r"within 0\.1 s: it does not answer"):
        connect(listener.address, Hello(3, CART), seconds=0.1)


@pytest.mark.parametrize("kind", SOCKETS)
def test_hanging_up_in_the_middle_of_a_message(kind: str) -> None:
    with listening(kind) as listener:
        link, host = joined(listener)
        data = host.session.log("info", "cut").to_bytes()
        connection = host._wire._socket  # type: ignore[attr-defined]
        connection.sendall(data + data[:60])
        connection.close()
        found = []
        while not link.session.ended:
            found += events(link)
        assert [type(e).__name__ for e in found] == ["Note", "Ended"]
        assert found[-1] == Ended("lost", "the host is gone: hung up in the middle of a message")
        link.close()


def test_a_host_that_breaks_the_protocol_is_told() -> None:
    with listening("unix") as listener:
        link, host = joined(listener)
        host.send(Message(Type.STEP, host.session.session))
        assert last(link) == Ended("type", "STEP is not for this side to receive")
        link.close()
        assert last(host) == Ended("type", "the other side ended the session: STEP is not for this side to receive")
        host.close()


def test_strangers_are_few_and_have_little_time() -> None:
    with listening("unix", Offer(deadlines=Deadlines(handshake_ms=200))) as listener:
        strangers = []
        for _ in range(channel.STRANGERS + 10):
            strangers.append(raw(listener.address))
            listener.accept()
        assert listener.refused == {"crowd": 10}
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n" * 3)
        wait(lambda: listener.accept() or listener.refused["magic"])
        assert strangers[-1].recv(1 << 16)[:4] == b"RAYN"  # a REJECT
        link, host = joined(listener)  # they are in nobody's way
        wait(lambda: listener.accept() or not listener._strangers)
        assert listener.refused == {"crowd": 10, "magic": 1, "silence": channel.STRANGERS - 1}
        assert strangers[20].recv(1) == b""
        assert len(listener._selector.get_map()) == 1
        link.close(), host.close()
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("kind", SOCKETS)
def test_large_results_arrive_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SOCKET_BUFFER", 1 << 16)
    with listening(kind) as listener:
        link, host = joined(listener, Hello(64, IMAGE))
        link.send(link.session.reset(np.arange(64), 0.0))
        events(host)
        host.session.slots.obs["obs"][:] = np.random.default_rng(0).integers(0, 256, (64, 300, 300))
        host.send(host.session.results(np.arange(64), 0.0))  # 5.8 MB
        assert host.wants_write
        found: list[Any] = []
        while not found:
            host.flush()
            found = link.receive(0.0)
        (results,) = found
        assert isinstance(results, Results)
        np.testing.assert_array_equal(results.obs["obs"], host.session.slots.obs["obs"])
        assert not host.wants_write
        link.close(), host.close()


def test_a_policy_that_does_not_read_is_given_up() -> None:
    with listening("unix") as listener:
        link, host = joined(listener, most_waiting=1 << 16)
        for _ in range(100_000):
            if host.session.ended:
                break
            host.send(host.session.log("info", "x" * 1000))
        ended = last(host)
        assert ended.code == "full"
        assert "the policy does not read: " in ended.reason
        assert not host.wants_write
        assert last(link).code == "lost"  # after all that has come
        link.close(), host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_comes_again_takes_its_place(kind: str) -> None:
    with listening(kind) as listener:
        older, old = joined(listener, Hello(3, CART, host=1))
        other, also = joined(listener, Hello(3, CART, host=0))
        newer, new = joined(listener, Hello(3, CART, host=1))
        assert last(older) == Ended("replaced", "host 1 has connected again")
        assert last(old).code == "lost"
        assert not other.session.ended
        older.close("it is gone")  # changes nothing for the newer
        newer.send(newer.session.reset(np.arange(3), 0.0))
        assert isinstance(events(new)[0], ResetRequest)
        for end in (old, other, also, newer, new):
            end.close()
