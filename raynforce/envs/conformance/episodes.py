"""Cases of the handshake, of episodes and their seeds, and of requests that come again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from raynforce.envs.conformance.cases import ENVS, STEPS, case, ready, stepped
from raynforce.envs.peer import SESSION, AnswerRow, Failed, Peer, Skipped
from raynforce.protocol.codec import ENDED, RESET
from raynforce.protocol.frame import Message, Type
from raynforce.protocol.handshake import prove

# -- the handshake ------------------------------------------------------------------------------------------


@case("connects, and says HELLO first")
def hello(peer: Peer) -> None:
    peer.greeted()


@case("has as many envs as it is told")
def number_of_envs(peer: Peer) -> None:
    if peer.greeted().envs != ENVS:
        raise Failed(f"HELLO says {peer.hello and peer.hello.envs} envs; RAYNFORCE_ENVS says {ENVS}")


@case("proves that it knows the token")
def proof(peer: Peer) -> None:
    found = peer.greeted()
    if found.launch != peer.launch or found.proof != prove(peer.token, peer.launch):
        raise Failed("launch and proof do not fit RAYNFORCE_LAUNCH and RAYNFORCE_TOKEN")


@case("keeps the token to itself")
def token_secret(peer: Peer) -> None:
    found = peer.greeted()
    if peer.token.hex() in repr(found):
        raise Failed("HELLO has the token in it")


@case("ends, not with 0, when it is refused")
def refused(peer: Peer) -> None:
    peer.greeted()
    peer.send(Message(Type.REJECT, meta={"code": "spaces", "text": "not these", "diff": []}).to_bytes())
    if peer.exits("REJECT") == 0 and peer.process is not None:
        raise Failed("it exits with 0 after REJECT; 78 is a good code")


@case("ends when the other side speaks another major version")
def other_major(peer: Peer) -> None:
    peer.greeted()
    data = bytearray(Message(Type.PING, SESSION, 1).to_bytes())
    data[4] = 9
    peer.send(bytes(data))
    peer.hangs_up("a message of major version 9")


@case("ignores keys of WELCOME that it does not know")
def unknown_keys(peer: Peer) -> None:
    peer.welcome(from_the_future={"deep": [1, {"x": None}]})
    peer.ask(peer.reset(range(ENVS)))


@case("ends when a request comes instead of WELCOME")
def request_before_welcome(peer: Peer) -> None:
    peer.greeted()
    peer.send(peer.message(Type.RESET, [0]).to_bytes())
    peer.hangs_up("RESET before WELCOME")


# -- episodes -----------------------------------------------------------------------------------------------


@case("answers RESET with a first observation of each env")
def reset(peer: Peer) -> None:
    peer.welcome()
    for row in peer.ask(peer.reset(range(ENVS))).values():
        if row.status != RESET or row.reward != 0:
            raise Failed(f"env {row.env}: status {row.status}, reward {row.reward}; expected were 4 and 0")


@case("resets some envs alone")
def reset_some(peer: Peer) -> None:
    peer.welcome()
    for envs in ([1], [2, 0], [1]):
        peer.ask(peer.reset(envs))


@case("answers STEP for each env once, and repeats the request's number")
def step(peer: Peer) -> None:
    envs, rows = ready(peer), None
    for _ in range(20):
        rows = stepped(peer, envs, rows)
        if any(row.status == RESET for row in rows.values()) and peer.autoreset != "next_step":
            raise Failed("a STEP is answered with a first observation")


@case("steps some envs alone, in any order")
def step_some(peer: Peer) -> None:
    ready(peer)
    for envs in ([2], [1, 0], [2, 0, 1]):
        rows = peer.ask(peer.step(envs))
        if peer.autoreset == "explicit" and (over := [e for e in envs if rows[e].status & ENDED]):
            peer.ask(peer.reset(over))


@case("two requests may be under way at once, for different envs")
def requests_cross(peer: Peer) -> None:
    ready(peer)
    one, other = peer.step([0]), peer.step([1, 2])
    peer.send(one.to_bytes() + other.to_bytes())
    wanted = {0: one.sequence, 1: other.sequence, 2: other.sequence}
    while wanted:
        for row in peer.unpacked(peer.next(Type.RESULT)):
            if wanted.pop(row.env, None) != row.request:
                raise Failed(f"env {row.env} answers request {row.request}, or has answered twice")


def _episodes(peer: Peer) -> Iterator[tuple[AnswerRow, float, int, bytes]]:
    """Ended rows, with the return and length that were counted here, and the env's observation before."""
    envs, rows = ready(peer), None
    total, length = dict.fromkeys(envs, 0.0), dict.fromkeys(envs, 0)
    before = dict.fromkeys(envs, b"")
    found = 0
    for _ in range(STEPS):
        rows = stepped(peer, envs, rows)
        for env, row in rows.items():
            if row.status == RESET:
                continue
            total[env] += row.reward
            length[env] += 1
            if row.status & ENDED:
                yield row, total[env], length[env], before[env]
                total[env], length[env], found = 0.0, 0, found + 1
            before[env] = row.obs
        if found >= 3 * ENVS:
            return
    if not found:
        raise Skipped(f"no episode has ended in {STEPS:,} random steps")


@case("shows the last observation of an episode apart from the next one's first")
def final_observations(peer: Peer) -> None:
    for row, *_ in _episodes(peer):
        if peer.autoreset == "same_step" and row.final is None:
            raise Failed(f"env {row.env} has ended without a final observation")
        if peer.autoreset == "same_step" and row.final == row.obs:
            raise Failed(f"env {row.env}: the final observation is the next episode's first")


@case("counts returns and lengths as they are, if it offers `episodes`")
def returns_and_lengths(peer: Peer) -> None:
    for row, total, length, _ in _episodes(peer):
        if row.episode is None:
            raise Skipped("it does not offer `episodes`")
        if row.episode[1] != length or not math.isclose(row.episode[0], total, rel_tol=1e-4, abs_tol=1e-3):
            raise Failed(f"env {row.env} says {row.episode} of an episode of {length} steps that returned {total:g}")


@case("tells times that can be, if it offers `timing`")
def timing(peer: Peer) -> None:
    envs = ready(peer)
    began = time.monotonic()
    rows = peer.ask(peer.step(envs))
    took = time.monotonic() - began
    for row in rows.values():
        if row.seconds is None:
            raise Skipped("it does not offer `timing`")
        if not 0 <= row.seconds <= 1.5 * took + 0.01:
            raise Failed(f"env {row.env} says that it took {row.seconds:g} s of {took:g}")


# -- seeds --------------------------------------------------------------------------------------------------


def _trajectory(peer: Peer, seeds: Sequence[int]) -> list[bytes]:
    envs = list(range(ENVS))
    rows = peer.ask(peer.reset(envs, seeds))
    seen = [rows[env].obs for env in envs]
    peer.rng = np.random.default_rng(5)
    for _ in range(50):
        rows = stepped(peer, envs, rows)
        seen += [rows[env].obs for env in envs]
    if peer.autoreset == "explicit" and (over := [e for e in envs if rows[e].status & ENDED]):
        peer.ask(peer.reset(over))
    return seen


@case("equal seeds and actions give equal episodes")
def equal_seeds(peer: Peer) -> None:
    peer.welcome()
    if _trajectory(peer, [7, 8, 9]) != _trajectory(peer, [7, 8, 9]):
        raise Failed("equal seeds and actions gave other observations: runs cannot be repeated")


@case("other seeds give other episodes")
def other_seeds(peer: Peer) -> None:
    peer.welcome()
    if _trajectory(peer, [7, 8, 9]) == _trajectory(peer, [17, 18, 19]):
        raise Failed("seeds make no difference")


@case("begins with the seeds of WELCOME")
def seeds_of_welcome(peer: Peer) -> None:
    peer.welcome()
    first = peer.ask(peer.reset(range(ENVS)))
    again = peer.ask(peer.reset(range(ENVS), peer.seeds.tolist()))
    if [first[e].obs for e in range(ENVS)] != [again[e].obs for e in range(ENVS)]:
        raise Failed("the first RESET does not begin with the seeds of WELCOME")


@case("the next episode is not the last one again")
def episodes_differ(peer: Peer) -> None:
    peer.welcome()
    first = peer.ask(peer.reset([0]))[0].obs
    others = {peer.ask(peer.reset([0]))[0].obs for _ in range(5)}
    if others == {first}:
        raise Failed("RESET without a seed begins the same episode again")


# -- retry --------------------------------------------------------------------------------------------------


@case("a STEP that comes again is answered again, and not done twice")
def step_again(peer: Peer) -> None:
    envs = ready(peer)
    request = peer.step(envs)
    one, other = peer.ask(request), peer.ask(request)
    if one != other:
        raise Failed("the same STEP was answered otherwise the second time: it was done twice")


@case("a RESET that comes again is answered again, and not done twice")
def reset_again(peer: Peer) -> None:
    peer.welcome()
    request = peer.reset(range(ENVS))
    one, other = peer.ask(request), peer.ask(request)
    if one != other:
        raise Failed("the same RESET was answered otherwise the second time: it was done twice")


@case("a part of a request may come again")
def part_again(peer: Peer) -> None:
    envs = ready(peer)
    actions = peer.actions(range(ENVS))
    rows = peer.ask(request := peer.step(envs, actions))
    again = peer.ask(peer.step([1], actions[1:2], sequence=request.sequence))
    if again[1] != rows[1]:
        raise Failed("env 1 answered otherwise when it was asked again")


@case("an old request is ignored")
def old_request(peer: Peer) -> None:
    ready(peer)
    old, newer = peer.reset([0]), peer.reset([0])
    peer.ask(old)
    peer.ask(newer)
    peer.send(old.to_bytes())
    peer.ask(newer)  # which is answered again, and nothing before
