"""Several agents in HELLO: written and read, and what cannot be is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raynforce.protocol.agents import misplaced
from raynforce.protocol.frame import ProtocolError
from raynforce.protocol.handshake import Hello
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import ActionSpec, AgentKind, Agents, ObsLeaf, joined

SEES = ObsLeaf("obs", "discrete", (), "int64", (4,), (1,))
CAMERA = ObsLeaf("obs/camera", "box", (2, 3), "uint8")
CHOICE = ActionSpec("multidiscrete", (2,), "int64", (3, 2), (0, 0))
PULL = ActionSpec("box", (1,), "float32", low=(-1.0,), high=(float("inf"),))
AGENTS = Agents(("a", "b", "c"), (AgentKind((0, 2), (SEES,), CHOICE), AgentKind((1,), (CAMERA,), PULL)), True, 5)
HELLO = Hello(envs=2, spaces=Spaces(*joined(AGENTS)), agents=AGENTS)


def test_what_all_see_and_do_has_a_place_for_each() -> None:
    obs, action = joined(AGENTS)
    assert [(leaf.path, leaf.kind, leaf.shape) for leaf in obs] == [
        ("obs/reward", "box", (3,)),
        ("obs/flags", "multibinary", (3, 3)),
        ("obs/seen_0_0", "multidiscrete", (2,)),
        ("obs/seen_1_0", "box", (1, 2, 3)),
        ("obs/state", "box", (5,)),
    ]
    assert (obs[2].sizes, obs[2].start) == ((4, 4), (1, 1))
    assert (action.shape, action.low) == ((5,), (0, 0, -1, 0, 0))  # in the order of the agents
    assert action.high == (2, 1, float("inf"), 2, 1)


def test_hello_says_who_takes_part() -> None:
    assert Hello.read(HELLO.message()) == HELLO
    alone = Hello(envs=1, spaces=Spaces((SEES,), PULL))
    assert "agents" not in alone.message().meta
    assert Hello.read(alone.message()).agents is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": []}, "agents.names is 0 items; expected a list of 1"),
        ({"names": ["a", "b", "a"]}, "agents.names has 'a' twice"),
        ({"names": ["a", "b", "c", "d"]}, "agents.kinds must have each of the 4 agents once"),
        ({"names": ["a", "b", 3]}, r"agents.names\[2\] is 3; expected printable text"),
        ({"kinds": []}, "agents.kinds is 0 items"),
        ({"turns": 1}, "agents.turns is 1; expected true or false"),
        ({"state": -1}, "agents.state is -1"),
        ({"state": 4}, r"spaces do not fit agents: obs/state.shape is \[5\]; expected \[4\]"),
        ({"state": 0}, r"spaces do not fit agents: obs/state.kind is box; expected None"),
    ],
)
def test_agents_that_cannot_be_are_named(change: dict[str, Any], said: str) -> None:
    message = HELLO.message()
    message.meta["agents"] |= change
    with pytest.raises(ProtocolError, match=said):
        Hello.read(message)


def test_an_action_that_does_not_fit_is_named() -> None:
    message = HELLO.message()
    message.meta["agents"]["kinds"][1]["action"]["low"] = [-2.0]
    with pytest.raises(ProtocolError, match=r"spaces do not fit agents: action\.low"):
        Hello.read(message)
    message.meta["agents"]["kinds"][1]["action"]["low"] = ["x"]
    with pytest.raises(ProtocolError, match=r"agents.kinds\[1\].action.low is 'x'"):
        Hello.read(message)


def test_somebody_acts_in_a_running_episode() -> None:
    acting = np.array([[1, 0], [0, 0], [1, 1], [1, 0]], np.uint8)
    over = np.array([[0, 0], [0, 1], [0, 1], [0, 1]], np.uint8)
    flags = np.stack([acting, over, np.zeros_like(over)], axis=1)
    assert misplaced(flags).tolist() == [False, True, True, False]
