"""The conformance kit: cases of docs/protocol.md that any simulator can be held against, in any language."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.envs.launching import is_simulator
from raynforce.envs.peer import SESSION, AnswerRow, Failed, Peer, Skipped
from raynforce.envs.simulator_envs import close_simulators, simulators
from raynforce.envs.simulators import random_of
from raynforce.errors import UsageError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.distributions import head_size
from raynforce.policies.spec import Activation, Free, Linear, NetworkSpec, Tower, inputs_of
from raynforce.protocol.codec import BROKE, ENDED, FIRST, RESET
from raynforce.protocol.frame import Message, Type
from raynforce.protocol.handshake import Deadlines, Hello, Inference, prove
from raynforce.protocol.spaces import misfits
from raynforce.spaces import EnvSpec

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


# -- the handshake ----------------------------------------------------------------------------------------


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


# -- episodes ---------------------------------------------------------------------------------------------


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


# -- seeds ------------------------------------------------------------------------------------------------


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


# -- retry ------------------------------------------------------------------------------------------------


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


# -- is it there ------------------------------------------------------------------------------------------


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


# -- the end ----------------------------------------------------------------------------------------------


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


# -- what it must not do ----------------------------------------------------------------------------------


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


def _changed(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


_NOTE = Message(Type.ERROR, SESSION, 9, meta={"scope": "session"}, buffers=[np.zeros(0, "<u4"), np.zeros(0, "<u8")])
_violation("bad_magic", "bytes that are no message", lambda p: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(96))
_violation("bad_length", "a length that the spaces do not make", lambda p: _changed(p.step([0]).to_bytes(), 40, b"\1"))
_violation("bad_meta", "a meta that is not JSON", lambda p: _changed(_NOTE.to_bytes(), 48, b"{]"))
_violation("no_such_env", "an env id that does not exist", lambda p: p.step([ENVS + 5]).to_bytes())
_violation("env_twice", "an env that comes twice in a request", lambda p: p.step([1, 1]).to_bytes())
_violation("too_many_envs", "a request for more envs than there are", lambda p: p.reset(range(ENVS + 2)).to_bytes())
_violation("unknown_flags", "flags that nobody knows", lambda p: _changed(p.reset([0]).to_bytes(), 7, b"\x80"))


@case("ends after a STEP before the first RESET")
def step_before_reset(peer: Peer) -> None:
    peer.welcome()
    peer.send(peer.step([0]).to_bytes())
    peer.hangs_up("a STEP before the first RESET")


# -- saved states -----------------------------------------------------------------------------------------


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
    lambda p: _changed(p.restore([0], [b""]).head(), 40, ((1 << 26) + 32).to_bytes(8, "little")),
)
_state_violation("save_before_reset", "a SNAPSHOT before the first RESET", lambda p: p.snapshot([0]).to_bytes(), False)


# -- the policy on its side, if it offers `inference` -------------------------------------------------------


class Acting:
    """A simulator that was given a small random policy, and what numpy makes of the same."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        peer.welcome(autoreset="same_step", inference=self._inference)
        peer.ask(peer.reset(range(ENVS), range(7, 7 + ENVS)))

    def _inference(self, hello: Hello) -> Inference:
        if "inference" not in hello.capabilities or "same_step" not in hello.autoreset:
            raise Skipped("it does not offer `inference`")
        obs, action = hello.spaces.obs, hello.spaces.action
        layers = Linear(8), Activation("tanh"), Linear(head_size(action))
        free = (Free("log_std", head_size(action)),) if action.kind == "box" else ()
        network = NetworkSpec(inputs_of(obs), (Tower("policy", layers),), free, normalize=True)
        self.spec = ActingSpec(EnvSpec("", obs, action), network, {"policy": head_size(action)})
        return Inference(LENGTH, self.spec.for_host())

    def version(self, number: int) -> PolicyVersion:
        rng, network = np.random.default_rng(number), self.spec.network
        params = rng.normal(0, 0.3, sum(p.size for p in network.params())).astype(np.float32)
        width = network.input_width
        return PolicyVersion(number, params, rng.normal(0, 1, width).astype(np.float32), np.ones(width, np.float32))

    def policy(self, number: int) -> Message:
        meta = {"version": number, "schedules": {}}
        return self.peer.message(Type.POLICY, (), *self.version(number).arrays(), meta=meta)

    def sample(self, seed: int = 1) -> Message:
        return self.peer.message(Type.SAMPLE, meta={"seed": seed})

    def fragment(self, request: Message) -> Message:
        """The answer to a SAMPLE; what no fragment may be is a failure."""
        assert self.peer.hello is not None
        found = self.peer.next(Type.FRAGMENT)
        if found.meta.get("request") != request.sequence:
            raise Failed(f"FRAGMENT answers request {found.meta.get('request')}; it was asked by {request.sequence}")
        leaves = self.peer.hello.spaces.obs
        for leaf, column in zip(leaves, found.buffers, strict=False):
            if misfits(leaf, column.reshape(-1, *leaf.shape), True) is not None:
                raise Failed(f"{leaf.path} has a value that its space does not have")
        return found

    def of(self, found: Message) -> dict[str, np.ndarray]:
        """What comes after the observations, by name."""
        names = "action", "logp", "reward", "status", "version", "returns", "lengths"
        return dict(zip(names, found.buffers[len(self.spec.env.obs) :], strict=False))

    def require_chosen_by(self, found: Message, number: int) -> None:
        columns, actor = self.of(found), Actor(self.spec, light=True)
        if not (columns["version"] == number).all():
            raise Failed(f"its steps are of versions {np.unique(columns['version'])}; the newest was {number}")
        actor.load(self.version(number))
        obs = {
            leaf.path: c[:-1].reshape(-1, *leaf.shape)
            for leaf, c in zip(self.spec.env.obs, found.buffers, strict=False)
        }
        expected = actor.distribution.logp(
            actor.masked(actor.outputs(obs), obs), columns["action"].reshape(-1, *self.spec.env.action.shape)
        )
        worst = np.abs(expected - columns["logp"].reshape(-1))[columns["status"].reshape(-1) != BROKE].max(initial=0)
        if not worst < 1e-3:
            raise Failed(f"log-probabilities of version {number} are wrong by up to {worst:g}")


@case("sends a fragment for a SAMPLE, with actions that its policy has chosen")
def acts(peer: Peer) -> None:
    acting = Acting(peer)
    peer.send(acting.policy(1).to_bytes())
    for seed in range(3):
        peer.send((asked := acting.sample(seed)).to_bytes())
        acting.require_chosen_by(acting.fragment(asked), 1)


@case("counts the episodes in its fragments as they are")
def fragment_episodes(peer: Peer) -> None:
    acting, ends = Acting(peer), 0
    peer.send(acting.policy(1).to_bytes())
    total, length, whole = np.zeros(ENVS), np.zeros(ENVS, int), np.ones(ENVS, bool)
    for seed in range(STEPS // LENGTH):
        peer.send((asked := acting.sample(seed)).to_bytes())
        found = acting.of(answer := acting.fragment(asked))
        if answer.meta.get("skipped"):
            whole[:] = False
        count = 0
        for t, env in np.ndindex(LENGTH, ENVS):
            status = int(found["status"][t, env])
            if status > ENDED + FIRST and status != BROKE:
                raise Failed(f"env {env} has status {status}")
            if status & (FIRST | BROKE):
                total[env], length[env], whole[env] = 0.0, 0, status != BROKE
            total[env] += found["reward"][t, env]
            length[env] += 1
            if status & ENDED:
                told = float(found["returns"][count]), int(found["lengths"][count])
                right = told[1] == length[env] and math.isclose(told[0], total[env], rel_tol=1e-4, abs_tol=1e-3)
                if whole[env] and not right:
                    raise Failed(f"env {env} says {told} of an episode of {length[env]} steps: {total[env]:g}")
                total[env], length[env], count, ends = 0.0, 0, count + 1, ends + 1
        if count != answer.ended:
            raise Failed(f"its header says that {answer.ended} rows have ended; {count} have")
        if ends > 3 * ENVS:
            return
    if not ends:
        raise Skipped(f"no episode has ended in {STEPS:,} steps")


@case("a fragment begins where the last one ended")
def fragments_join(peer: Peer) -> None:
    acting = Acting(peer)
    peer.send(acting.policy(1).to_bytes())
    last: list[np.ndarray] = []
    for seed in range(3):
        peer.send((asked := acting.sample(seed)).to_bytes())
        found = acting.fragment(asked)
        seen = found.buffers[: len(acting.spec.env.obs)]
        if last and not found.meta.get("skipped") and any((a != b[0]).any() for a, b in zip(last, seen, strict=True)):
            raise Failed("a fragment's first observations are not the last ones of the fragment before")
        last = [column[-1] for column in seen]


@case("acts by the newest policy that has come")
def newest_policy(peer: Peer) -> None:
    acting = Acting(peer)
    for number in (1, 2, 5):
        asked = acting.policy(number), acting.sample(number)
        peer.send(asked[0].to_bytes() + asked[1].to_bytes())
        acting.require_chosen_by(acting.fragment(asked[1]), number)


@case("answers several SAMPLEs in their order")
def samples_in_order(peer: Peer) -> None:
    acting = Acting(peer)
    asked = [acting.policy(1), *(acting.sample(seed) for seed in range(4))]
    peer.send(b"".join(message.to_bytes() for message in asked))
    for message in asked[1:]:
        acting.fragment(message)


@case("sends no fragment that was not asked for")
def unasked_fragments(peer: Peer) -> None:
    acting = Acting(peer)
    asked = acting.policy(1), acting.sample()
    peer.send(asked[0].to_bytes() + asked[1].to_bytes())
    acting.fragment(asked[1])
    time.sleep(0.2)
    peer.send(peer.message(Type.PING, sequence=77).to_bytes())
    peer.next(Type.PONG)


@case("equal seeds give equal fragments")
def equal_fragments(peer: Peer) -> None:
    if peer.process is None:
        raise Skipped("it listens: there is no other process to try")
    other = Peer(peer.env, peer.envs, peer.seconds)
    try:
        found = []
        for one in (peer, other):
            acting = Acting(one)
            asked = acting.policy(1), acting.sample(), acting.sample(2)
            one.send(b"".join(message.to_bytes() for message in asked))
            answers = [acting.fragment(message) for message in asked[1:]]
            if any(answer.meta.get("skipped") for answer in answers):
                raise Skipped("it acts on while it is asked for nothing")
            found.append([b"".join(column.tobytes() for column in answer.buffers) for answer in answers])
    finally:
        other.close()
    if found[0] != found[1]:
        raise Failed("equal seeds and policies gave other fragments: runs cannot be repeated")


def _acting_violation(name: str, title: str, spoil: Callable[[Acting], bytes]) -> None:
    def check(peer: Peer) -> None:
        acting = Acting(peer)
        peer.send(spoil(acting))
        peer.hangs_up(title)

    check.__name__ = name
    case(f"ends after {title}")(check)


_acting_violation("sample_before_policy", "a SAMPLE before the first POLICY", lambda a: a.sample().to_bytes())
_acting_violation(
    "policy_length",
    "a POLICY of another network",
    lambda a: a.policy(1)._replace(buffers=[np.zeros(4, "<f4")]).to_bytes(),
)
_acting_violation("step_while_acting", "a STEP, though it acts by itself", lambda a: a.peer.step([0]).to_bytes())


# -- what it achieves -------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """Of steps of all envs in one message, as fast as they are answered; a round trip's median and 99th percentile."""

    envs: int
    steps_per_second: float
    median_seconds: float
    worst_seconds: float


def speed(env: str, envs: int, seconds: float = 1.0) -> Speed:
    lanes, times = simulators(env, {}, envs), array("d")
    try:
        rng, spec = np.random.default_rng(0), lanes.spec
        actions = random_of(spec, lanes.obs, rng)
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(times) < 10:
            if spec.masked or spec.agents is not None:
                actions = random_of(spec, lanes.obs, rng)
            began = time.perf_counter()
            lanes.step_all(actions)
            times.append(time.perf_counter() - began)
    finally:
        close_simulators(lanes)
    return Speed(envs, envs * len(times) / sum(times), float(np.median(times)), float(np.quantile(times, 0.99)))


def check(env: str, only: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Try each case: its name, what it asks, and why it does not hold; empty if it does, `skipped: …` if it cannot."""
    if not is_simulator(env):
        raise UsageError(f"{env!r} is no simulator: give its command, such as ./my_sim")
    for name, (title, run) in CASES.items():
        if only and name not in only:
            continue
        try:
            run(env)
        except Skipped as reason:
            yield name, title, f"skipped: {reason}"
        except Failed as reason:
            yield name, title, str(reason)
            if name == "hello":  # there is nothing to try the other cases on
                return
        else:
            yield name, title, ""
