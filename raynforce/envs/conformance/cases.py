"""What all cases share: a simulator of its own for each, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raynforce.envs.peer import AnswerRow, Peer
from raynforce.protocol.codec import ENDED
from raynforce.protocol.handshake import Deadlines

SECONDS = 10.0
"""For an answer, or to end."""
ENVS = 3
LENGTH = 16
"""Steps of each env in a fragment."""
STEPS = 2_000
"""Random steps in which episodes are waited for."""
QUICK = Deadlines(ping_ms=200, silence_ms=1500)


CASES: dict[str, tuple[str, Callable[[str], None]]] = {}


def case(title: str, envs: int = ENVS) -> Callable[[Callable[[Peer], None]], Callable[[str], None]]:
    """A case that is tried on a simulator of its own."""

    def decorate(check: Callable[[Peer], None]) -> Callable[[str], None]:
        def run(env: str) -> None:
            peer = Peer(env, envs, SECONDS)
            try:
                check(peer)
            finally:
                peer.close()

        CASES[check.__name__.replace("_", "-")] = (title, run)
        return run

    return decorate


def ready(peer: Peer, **how: Any) -> list[int]:
    """All envs, taken in and reset."""
    peer.welcome(**how)
    envs = list(range(peer.envs))
    peer.ask(peer.reset(envs))
    return envs


def stepped(peer: Peer, envs: list[int], rows: dict[int, AnswerRow] | None = None) -> dict[int, AnswerRow]:
    """One step of each, after a reset of those that need one."""
    if peer.autoreset == "explicit" and rows and (over := [e for e in envs if rows[e].status & ENDED]):
        peer.ask(peer.reset(over))
    return peer.ask(peer.step(envs))


def changed(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]
