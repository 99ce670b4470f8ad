"""The exchange printed in docs/protocol.md, byte for byte: what other languages are written against must not change.

`python tests/protocol/test_protocol_golden.py` prints it anew, for a new major version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from raynforce.protocol.agents import read_agents
from raynforce.protocol.codec import TERMINATED
from raynforce.protocol.frame import Message, Type
from raynforce.protocol.handshake import Deadlines, Hello, Offer, Welcome
from raynforce.protocol.host_session import HostSession
from raynforce.protocol.policy_session import PolicySession, Results
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import ActionSpec, AgentKind, Agents, ObsLeaf, joined

GOLDEN = Path(__file__).with_name("exchange.hex")
PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
SPACES = Spaces((ObsLeaf("obs", "box", (2,), "float32"),), ActionSpec("discrete", (), "int64", (3,), (0,)))
Said = list[tuple[str, Message]]


def exchange() -> Said:
    """Two envs: handshake, reset, a step answered in two parts (one ends its episode), an env that breaks, the end."""
    host = HostSession(Hello(2, SPACES, software="sim", version="1.0", pid=4242), 0.0)
    policy = PolicySession(Offer(0x0102030405060708, SPACES, config={"track": "oval"}), 0.0)
    said: Said = []

    def to_policy(message: Message) -> None:
        said.append(("host", message))
        for reply in policy.take(message.to_bytes(), 0.0).send:
            to_host(reply)

    def to_host(message: Message) -> None:
        said.append(("policy", message))
        host.take(message.to_bytes(), 0.0)

    to_policy(host.start())
    both = np.arange(2)
    to_host(policy.reset(both, 0.0))
    host.slots.obs["obs"][:] = [[0.5, 1], [2, 4]]
    to_policy(host.results(both, 0.0))
    to_host(policy.step(both, np.array([2, 0]), 0.0))
    host.slots.obs["obs"][1], host.slots.final["obs"][1] = (0, 0), (8, 16)
    host.slots.reward[1], host.slots.status[1] = 1, TERMINATED
    to_policy(host.results(both[1:], 0.0))
    to_policy(host.broken(0, "raised", "motor jammed", 0.0))
    said.append(("policy", policy.close(0.0, "done").send[0]))
    host.take(said[-1][1].to_bytes(), 0.0)
    to_policy(host.close(0.0, "bye").send[0])
    assert host.ended
    assert policy.ended
    return said


def dump(said: Said) -> str:
    parts = []
    for sender, message in said:
        data = message.to_bytes()
        lines = [f"{sender}: {Type(message.type).name}, {len(data)} bytes"]
        for start in range(0, len(data), 16):
            row = data[start : start + 16]
            shown = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
            lines.append(f"{start:04x}  {row.hex(' ', 1):<47}  {shown}".rstrip())
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def messages(text: str) -> list[bytes]:
    """The bytes of a dump."""
    rows = [part.splitlines()[1:] for part in text.strip().split("\n\n")]
    return [bytes.fromhex("".join(row[6:53] for row in part)) for part in rows]


def test_the_exchange_is_as_it_was() -> None:
    said = exchange()
    assert dump(said) == GOLDEN.read_text()
    assert messages(GOLDEN.read_text()) == [message.to_bytes() for _, message in said]


def test_the_page_shows_it() -> None:
    (shown,) = re.findall(r"```hexdump\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown == GOLDEN.read_text()


def test_the_bytes_on_the_page_are_understood() -> None:
    """A policy that is given the host's bytes by themselves, as a simulator in another language would send them."""
    policy = PolicySession(Offer(0x0102030405060708, SPACES, config={"track": "oval"}), 0.0)
    hello, welcome, reset, first, step, part, broken, _, _ = messages(GOLDEN.read_text())
    assert policy.take(hello, 0.0).send[0].to_bytes() == welcome
    assert policy.reset(np.arange(2), 0.0).to_bytes() == reset
    (event,) = policy.take(first, 0.0).events
    assert event.obs["obs"].tolist() == [[0.5, 1], [2, 4]]
    assert policy.step(np.arange(2), np.array([2, 0]), 0.0).to_bytes() == step
    (event,) = policy.take(part, 0.0).events
    assert isinstance(event, Results)
    assert (event.envs.tolist(), event.terminated.tolist(), event.final_obs["obs"].tolist()) == ([1], [True], [[8, 16]])
    assert policy.take(broken, 0.0).events[0].text == "motor jammed"


def test_the_handshake_on_the_page_is_understood() -> None:
    """HELLO and WELCOME as they are printed there, and the text that is hashed."""
    hello_json, agents_json, welcome_json = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    hello = Hello.read(Message(Type.HELLO, envs=2, meta=json.loads(hello_json)))
    assert (hello.software, hello.spaces.obs[1].start, hello.launch) == ("racing-sim", (-1,), "5f0c…")
    assert f"\n```\n{hello.spaces.canonical()}```\n" in PAGE.read_text()
    sees, choice = ObsLeaf("obs", "discrete", (), "int64", (9,), (0,)), ActionSpec("discrete", (), "int64", (3,), (0,))
    looks, pull = ObsLeaf("obs", "box", (2,), "float32"), ActionSpec("box", (1,), "float32", low=(-1.0,), high=(1.0,))
    kinds = AgentKind((0, 1), (sees,), choice), AgentKind((2,), (looks,), pull)
    agents = Agents(("hunter_0", "hunter_1", "prey"), kinds)
    assert read_agents(json.loads(agents_json)["agents"], Spaces(*joined(agents))) == agents
    told = json.loads(welcome_json)
    assert told["spec_hash"] == hello.spaces.digest()
    welcome = Welcome.read(Message(Type.WELCOME, 7, envs=2, meta=told, buffers=[np.zeros(2, np.uint64)]), hello)
    assert welcome.deadlines == Deadlines()
    assert welcome.env_config == [{"weather": "rain"}, {}]


if __name__ == "__main__":
    print(dump(exchange()), end="")
