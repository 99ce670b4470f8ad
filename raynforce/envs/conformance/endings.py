"""Cases of who is there, of the end, and of messages that must not be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raynforce.envs.conformance.cases import ENVS, QUICK, case, changed, ready
from raynforce.envs.peer import SESSION, Failed, Peer
from raynforce.protocol.frame import Message, Type

# -- is it there --------------------------------------------------------------------------------------------


@case("answers PING with PONG of the same number")
def ping(peer: Peer) -> None:
    ready(peer)
    for number in (77, 78, 79):
        peer.send(peer.message(Type.PING, sequence=number).to_bytes())
        pong = peer.next(Type.PONG)
        if pong.sequence != number:
            raise Failed(f"PONG has the number {pong.sequence}; PING had {number}")
        if not isinstance(pong.meta.get("progress_ms"), int):
            raise Failed("PONG has no progress_ms")


@case("asks whether the trainer is there when that is silent")
def asks(peer: Peer) -> None:
    ready(peer, deadlines=QUICK)
    peer.next(Type.PING, seconds=3.0)


@case("ends when the trainer stays silent")
def silence(peer: Peer) -> None:
    ready(peer, deadlines=QUICK)
    peer.hangs_up("a silence longer than silence_ms")
    peer.exits("a silence longer than silence_ms")


# -- the end ------------------------------------------------------------------------------------------------


@case("answers CLOSE with CLOSE, and exits with 0")
def close(peer: Peer) -> None:
    ready(peer)
    peer.send(peer.message(Type.CLOSE, meta={"reason": "done", "grace_ms": 5000}).to_bytes())
    peer.next(Type.CLOSE)
    if (code := peer.exits("CLOSE")) != 0:
        raise Failed(f"it exits with {code} after CLOSE")


@case("ends when the trainer hangs up")
def hang_up(peer: Peer) -> None:
    ready(peer)
    peer.socket.close()
    peer.exits("the trainer hung up")


@case("ends when the trainer hangs up in the middle of a message")
def hang_up_in_message(peer: Peer) -> None:
    ready(peer)
    peer.send(peer.step(range(ENVS)).to_bytes()[:50])
    peer.socket.close()
    peer.exits("the trainer hung up")


@case("ends when the trainer hangs up before WELCOME")
def hang_up_before_welcome(peer: Peer) -> None:
    peer.greeted()
    peer.socket.close()
    peer.exits("the trainer hung up")


# -- what it must not do ------------------------------------------------------------------------------------


@case("an unknown type is told and survived")
def unknown_type(peer: Peer) -> None:
    envs = ready(peer)
    data = bytearray(peer.message(Type.PING, sequence=5).to_bytes())
    data[6] = 200
    peer.send(bytes(data))
    answer = peer.next(Type.ERROR)
    if answer.meta.get("scope") != "session" or answer.meta.get("recoverable") is not True:
        raise Failed(f"it answers an unknown type with {dict(answer.meta)}; expected was a recoverable ERROR")
    peer.ask(peer.step(envs))


@case("messages of another session are ignored")
def other_session(peer: Peer) -> None:
    envs = ready(peer)
    peer.send(peer.step(envs, session=SESSION + 1).to_bytes())
    peer.ask(peer.step(envs))


@case("messages may come byte by byte")
def byte_by_byte(peer: Peer) -> None:
    envs = ready(peer)
    request = peer.step(envs)
    for byte in request.to_bytes():
        peer.send(bytes([byte]))
    peer.rows(envs, request.sequence)


@case("messages may come several at once")
def several_at_once(peer: Peer) -> None:
    envs = ready(peer)
    pings = b"".join(peer.message(Type.PING, sequence=n).to_bytes() for n in range(1, 51))
    request = peer.step(envs)
    peer.send(pings + request.to_bytes())
    pongs, rows = 0, 0
    while pongs < 50 or rows < ENVS:
        message = peer.next(Type.PONG, Type.RESULT)
        pongs += message.type == Type.PONG
        rows += message.envs


def _violation(name: str, title: str, spoil: Callable[[Peer], bytes]) -> None:
    def check(peer: Peer) -> None:
        ready(peer)
        peer.send(spoil(peer))
        peer.hangs_up(title)

    check.__name__ = name
    case(f"ends after {title}")(check)


_NOTE = Message(Type.ERROR, SESSION, 9, meta={"scope": "session"}, buffers=[np.zeros(0, "<u4"), np.zeros(0, "<u8")])
_violation("bad_magic", "bytes that are no message", lambda p: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(96))
_violation("bad_length", "a length that the spaces do not make", lambda p: changed(p.step([0]).to_bytes(), 40, b"\1"))
_violation("bad_meta", "a meta that is not JSON", lambda p: changed(_NOTE.to_bytes(), 48, b"{]"))
_violation("no_such_env", "an env id that does not exist", lambda p: p.step([ENVS + 5]).to_bytes())
_violation("env_twice", "an env that comes twice in a request", lambda p: p.step([1, 1]).to_bytes())
_violation("too_many_envs", "a request for more envs than there are", lambda p: p.reset(range(ENVS + 2)).to_bytes())
_violation("unknown_flags", "flags that nobody knows", lambda p: changed(p.reset([0]).to_bytes(), 7, b"\x80"))


@case("ends after a STEP before the first RESET")
def step_before_reset(peer: Peer) -> None:
    peer.welcome()
    peer.send(peer.step([0]).to_bytes())
    peer.hangs_up("a STEP before the first RESET")
