"""A host written from docs/protocol.md alone, with `struct` and `json`, as a simulator in another language would be."""

from __future__ import annotations

import json
import struct

import numpy as np

from raynforce.protocol.handshake import Offer
from raynforce.protocol.policy_session import Broken, Joined, PolicySession, Results
from raynforce.protocol.session import Note

HEADER = struct.Struct("<4sBBBBQQIIHHIQ")
HELLO, WELCOME, RESET, STEP, RESULT, ERROR, PING, PONG, LOG, CLOSE = 1, 2, 4, 5, 6, 7, 8, 9, 10, 11


def pad(data: bytes, fill: bytes = b"\0") -> bytes:
    return data + fill * (-len(data) % 8)


class Counting:
    """Two envs that count the sum of their actions from their seed, up to 5, and break at an action of 3."""

    def __init__(self) -> None:
        self.session = self.sequence = 0
        self.total, self.seeds = [0, 0], (0, 0)
        self.last: dict[int, tuple[int, bytes]] = {}

    def message(
        self, type_: int, meta: object = None, buffers: tuple[bytes, ...] = (), envs: int = 0, ended: int = 0
    ) -> bytes:
        self.sequence += 1
        text = pad(json.dumps(meta).encode(), b" ") if meta else b""
        body = b"".join(pad(b) for b in buffers)
        counts = envs, ended, len(buffers), 0, len(text), len(body)
        return HEADER.pack(b"RAYN", 1, 0, type_, 0, self.session, self.sequence, *counts) + text + body

    def hello(self) -> bytes:
        spaces = {
            "obs": [{"path": "obs", "kind": "box", "shape": [1], "dtype": "float64"}],
            "action": {"kind": "discrete", "shape": [], "dtype": "uint8", "sizes": [4]},
        }
        meta = {
            "protocol": {"major": 1, "minor_min": 0, "minor_max": 0},
            "software": {"name": "counting", "version": "1"},
        }
        return self.message(HELLO, meta | {"spaces": spaces, "autoreset": ["explicit"]}, envs=2)

    def answer(self, data: bytes) -> list[bytes]:
        _, _, _, type_, _, session, sequence, envs, _, _, _, meta, _ = HEADER.unpack_from(data)
        body = data[48 + meta :]
        if type_ == WELCOME:
            self.session, self.seeds = session, struct.unpack("<2Q", body)
            return [self.message(LOG, {"level": "info", "text": "here"})]
        if type_ == PING:
            return [self.message(PONG, {"progress_ms": 0})]
        if type_ == CLOSE:
            return [self.message(CLOSE, {"reason": "as you like", "grace_ms": 0})]
        ids = struct.unpack_from(f"<{envs}I", body)
        actions = body[len(pad(bytes(4 * envs))) :]
        return [self.one(type_, env, sequence, actions[i] if type_ == STEP else 0) for i, env in enumerate(ids)]

    def one(self, type_: int, env: int, sequence: int, action: int) -> bytes:
        """One env's answer in a message of its own, or again the last one."""
        if self.last.get(env, (0, b""))[0] < sequence:
            self.last[env] = sequence, self.do(type_, env, sequence, action)
        return self.last[env][1]

    def do(self, type_: int, env: int, sequence: int, action: int) -> bytes:
        who = struct.pack("<I", env), struct.pack("<Q", sequence)
        if action == 3:
            return self.message(
                ERROR, {"scope": "env", "recoverable": True, "code": "three", "text": "no"}, who, envs=1
            )
        self.total[env] = self.seeds[env] if type_ == RESET else self.total[env] + action
        status = 4 if type_ == RESET else int(self.total[env] >= 5)
        row = struct.pack("<f", action), bytes([status]), struct.pack("<d", self.total[env])
        return self.message(RESULT, None, (*who, *row), envs=1, ended=status & 1)


def test_a_host_written_from_the_page() -> None:
    host, policy = Counting(), PolicySession(Offer(7, seeds=lambda n: np.arange(n) + 1), 0.0)
    seen: list[tuple[int, float, float, bool]] = []

    def say(data: bytes) -> list[object]:
        events = []
        for answer in host.answer(data):
            events += policy.take(answer, 0.0).events
        for event in events:
            if isinstance(event, Results):
                rows = (
                    event.envs.tolist(),
                    event.obs["obs"][:, 0].tolist(),
                    event.reward.tolist(),
                    event.terminated.tolist(),
                )
                seen.extend(zip(*rows, strict=True))
        return events

    joined = policy.take(host.hello(), 0.0)
    assert isinstance(joined.events[0], Joined)
    assert say(joined.send[0].to_bytes()) == [Note("info", "here")]
    both = np.arange(2)
    say(policy.reset(both, 0.0).to_bytes())
    say(policy.step(both, np.array([2, 1]), 0.0).to_bytes())
    step = policy.step(both[::-1], np.array([2, 2]), 0.0).to_bytes()
    say(step)
    say(step)  # a retry
    assert seen == [
        (0, 1, 0, False),
        (1, 2, 0, False),
        (0, 3, 2, False),
        (1, 3, 1, False),
        (1, 5, 2, True),
        (0, 5, 2, True),
    ]
    say(policy.reset(both, 0.0).to_bytes())
    (fault,) = say(policy.step(both[:1], np.array([3]), 0.0).to_bytes())
    assert isinstance(fault, Broken)
    assert (fault.envs.tolist(), fault.code) == ([0], "three")
    assert say(policy.poll(1.5).send[0].to_bytes()) == []
    (ended,) = say(policy.close(1.5).send[0].to_bytes())
    assert ended == policy.ended
    assert policy.ended is not None
    assert policy.ended.code == "closed"
    assert policy.refused == {"late": 2}
