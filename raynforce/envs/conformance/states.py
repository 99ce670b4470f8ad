"""Cases of states that are saved and restored, for simulators that offer `snapshot`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raynforce.envs.conformance.cases import case, changed, ready, stepped
from raynforce.envs.peer import Failed, Peer, Skipped
from raynforce.protocol.codec import ENDED, RESET
from raynforce.protocol.frame import Type


def saving(peer: Peer) -> list[int]:
    """All envs, taken in and reset, of a simulator that can save them."""
    envs = ready(peer)
    if "snapshot" not in peer.capabilities:
        raise Skipped("it does not offer `snapshot`")
    return envs


def _followed(peer: Peer, envs: list[int], steps: int, seed: int) -> list[Any]:
    """What so many random steps give."""
    peer.rng, rows, seen = np.random.default_rng(seed), None, []
    for _ in range(steps):
        rows = stepped(peer, envs, rows)
        seen += [(env, r.status, r.reward, r.obs, r.final, r.episode) for env, r in sorted(rows.items())]
    if peer.autoreset == "explicit" and rows and (over := [e for e in envs if rows[e].status & ENDED]):
        peer.ask(peer.reset(over))
    return seen


@case("goes on from a restored state as it did from the saved one")
def restored(peer: Peer) -> None:
    envs = saving(peer)
    for round_ in range(3):
        _followed(peer, envs, 5 + round_, round_)
        states = peer.states(peer.snapshot(envs))
        expected = _followed(peer, envs, 60, 10 + round_)
        peer.ask(peer.restore(envs, states))
        if _followed(peer, envs, 60, 10 + round_) != expected:
            raise Failed("the same actions gave other steps after RESTORE than after SNAPSHOT")


@case("answers RESTORE with the observation that the env had, as a first row")
def restored_observation(peer: Peer) -> None:
    envs = saving(peer)
    rows = peer.ask(peer.step(envs))
    if peer.autoreset != "same_step" and any(row.status & ENDED for row in rows.values()):
        raise Skipped("an episode has ended in its first step")
    states = peer.states(peer.snapshot(envs))
    peer.ask(peer.reset(envs))
    for env, row in peer.ask(peer.restore(envs, states)).items():
        if row.status != RESET or row.reward != 0:
            raise Failed(f"env {env}: status {row.status}, reward {row.reward}; expected were 4 and 0")
        if row.obs != rows[env].obs:
            raise Failed(f"env {env} shows another observation than before")


@case("saving changes nothing")
def saving_changes_nothing(peer: Peer) -> None:
    envs = saving(peer)
    peer.ask(peer.reset(envs, [7, 8, 9]))
    expected = _followed(peer, envs, 30, 1) + _followed(peer, envs, 30, 2)
    peer.ask(peer.reset(envs, [7, 8, 9]))
    found = _followed(peer, envs, 30, 1)
    peer.states(peer.snapshot(envs))
    if found + _followed(peer, envs, 30, 2) != expected:
        raise Failed("the same actions gave other steps after SNAPSHOT than without")


@case("restores a state in another process")
def restored_elsewhere(peer: Peer) -> None:
    if peer.process is None:
        raise Skipped("it listens: there is no other process to try")
    envs = saving(peer)
    _followed(peer, envs, 5, 1)
    states = peer.states(peer.snapshot(envs))
    expected = _followed(peer, envs, 60, 2)
    other = Peer(peer.env, peer.envs, peer.seconds)
    try:
        other.welcome()
        other.ask(other.restore(envs, states))
        if _followed(other, envs, 60, 2) != expected:
            raise Failed("another process goes on otherwise from the same state")
    finally:
        other.close()


@case("a state that it cannot read breaks that env alone")
def bad_state(peer: Peer) -> None:
    envs = saving(peer)
    (good,) = peer.states(peer.snapshot([1]))
    for bad in (b"", b"\xff\x00 garbage", good[: len(good) // 2]):
        request = peer.restore([1], [bad])
        peer.send(request.to_bytes())
        answer = peer.next(Type.ERROR)
        facts = {key: answer.meta.get(key) for key in ("scope", "recoverable")}
        about = [buffer.tolist() for buffer in answer.buffers]
        if facts != {"scope": "env", "recoverable": True} or about != [[1], [request.sequence]]:
            raise Failed(f"it answers {dict(answer.meta)} of {about}; expected was a recoverable ERROR of env 1")
        peer.ask(peer.step([0, 2]) if peer.autoreset != "explicit" else peer.reset([0, 2]))
        peer.ask(peer.reset([1]))
    peer.ask(peer.restore(envs[1:2], [good]))


@case("a SNAPSHOT that comes again is answered again")
def snapshot_again(peer: Peer) -> None:
    envs = saving(peer)
    request = peer.snapshot(envs)
    states = peer.states(request)
    if peer.states(request) != states or peer.states(peer.snapshot([1], sequence=request.sequence)) != states[1:2]:
        raise Failed("the same SNAPSHOT was answered otherwise the second time")


@case("a RESTORE that comes again is answered again; an old one is ignored")
def restore_again(peer: Peer) -> None:
    envs = saving(peer)
    states = peer.states(peer.snapshot(envs))
    request = peer.restore(envs, states)
    if peer.ask(request) != peer.ask(request):
        raise Failed("the same RESTORE was answered otherwise the second time")
    newer = peer.step(envs)
    rows = peer.ask(newer)
    peer.send(request.to_bytes())
    if peer.ask(newer) != rows:  # which is answered again, and nothing before
        raise Failed("an old RESTORE was done after a newer STEP")


def _state_violation(name: str, title: str, spoil: Callable[[Peer], bytes], reset_first: bool = True) -> None:
    def check(peer: Peer) -> None:
        if reset_first:
            saving(peer)
        elif "snapshot" not in peer.welcome().capabilities:
            raise Skipped("it does not offer `snapshot`")
        peer.send(spoil(peer))
        peer.hangs_up(title)

    check.__name__ = name
    case(f"ends after {title}")(check)


def _with_sizes(peer: Peer, *sizes: int) -> bytes:
    message = peer.restore(range(len(sizes)), [bytes(8)] * len(sizes))
    ids, _, states = message.buffers
    return message._replace(buffers=[ids, np.array(sizes, "<u8"), states]).to_bytes()


_state_violation("states_and_sizes", "states that are not as long as their sizes say", lambda p: _with_sizes(p, 8, 24))
_state_violation(
    "large_state", "a state of more than 64 MiB, by its size", lambda p: _with_sizes(p, (1 << 63) + 8, 1 << 63)
)
_state_violation(
    "large_body",
    "a RESTORE of more bytes than states may have, by its header alone",
    lambda p: changed(p.restore([0], [b""]).head(), 40, ((1 << 26) + 32).to_bytes(8, "little")),
)
_state_violation("save_before_reset", "a SNAPSHOT before the first RESET", lambda p: p.snapshot([0]).to_bytes(), False)
