"""Several agents on the wire: what a host declares of them in its HELLO, and what their flags may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from raynforce.protocol.fields import flag, items, mapping, take, text, whole
from raynforce.protocol.frame import ProtocolError, clean
from raynforce.protocol.spaces import Spaces, differences
from raynforce.spaces import (
    ACTING,
    FORBIDS,
    MASK,
    TERMINATED,
    TRUNCATED,
    AgentKind,
    Agents,
    forbids_all,
    joined,
    leaf_name,
)

MOST_AGENTS = 4096
MOST_STATE = 1 << 24  # numbers in the global state
MISPLACED = "obs/flags of a running episode: some agent must be to act, and none that has just ended its episode"
NO_CHOICE = f"the action_mask of an agent {FORBIDS}"


def agents_json(agents: Agents) -> dict[str, Any]:
    kinds = [{"agents": list(kind.agents), **Spaces(kind.obs, kind.action).to_json()} for kind in agents.kinds]
    return {"names": list(agents.names), "turns": agents.turns, "kinds": kinds, "state": agents.state}


def read_agents(data: object, spaces: Spaces) -> Agents:
    """From a peer, whose spaces must be those of all its agents."""
    found = mapping(data, "agents")
    given = items(take(found, "names", "agents"), "agents.names", 1, MOST_AGENTS)
    names = [text(name, f"agents.names[{i}]") for i, name in enumerate(given)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ProtocolError("field", f"agents.names has {clean(twice, 80)!r} twice")
    kinds = items(take(found, "kinds", "agents"), "agents.kinds", 1, len(names))
    read = tuple(_kind(kind, f"agents.kinds[{i}]", len(names)) for i, kind in enumerate(kinds))
    if sorted(agent for kind in read for agent in kind.agents) != list(range(len(names))):
        raise ProtocolError("field", f"agents.kinds must have each of the {len(names)} agents once")
    turns = flag(take(found, "turns", "agents", False), "agents.turns")
    agents = Agents(tuple(names), read, turns, whole(take(found, "state", "agents", 0), "agents.state", 0, MOST_STATE))
    if diff := differences(spaces, Spaces(*joined(agents))):
        first = diff[0]
        has, needs = clean(first["host"], 80), clean(first["policy"], 80)
        raise ProtocolError("spaces", f"spaces do not fit agents: {first['field']} is {has}; expected {needs}")
    return agents


def _kind(data: object, where: str, count: int) -> AgentKind:
    found = mapping(data, where)
    who = items(take(found, "agents", where), f"{where}.agents", 1, count)
    agents = tuple(whole(agent, f"{where}.agents[{i}]", 0, count - 1) for i, agent in enumerate(who))
    spaces = Spaces.from_json(found, where)
    return AgentKind(agents, tuple(replace(leaf, stack=1) for leaf in spaces.obs), spaces.action)


def misplaced(flags: np.ndarray) -> np.ndarray:
    """`[K]` rows of running episodes in which nobody is to act, or one whose episode has just ended."""
    acting = flags[:, ACTING] != 0
    over = (flags[:, TERMINATED] | flags[:, TRUNCATED]) != 0
    found: np.ndarray = ~acting.any(axis=1) | (acting & over).any(axis=1)
    return found


def impossible(obs: Mapping[str, np.ndarray], agents: Agents, running: np.ndarray) -> tuple[np.ndarray, str]:
    """`[K]` rows of `running` episodes that cannot be, and what is wrong with them."""
    nothing = without_choice(obs, agents)
    return misplaced(obs["obs/flags"]) & running | nothing, NO_CHOICE if nothing.any() else MISPLACED


def without_choice(obs: Mapping[str, np.ndarray], agents: Agents) -> np.ndarray:
    """`[K]` rows in which the mask of an agent that is to act leaves it nothing to choose."""
    acting = obs["obs/flags"][:, ACTING] != 0
    found = np.zeros(len(acting), np.bool_)
    for k, kind in enumerate(agents.kinds):
        for i, leaf in enumerate(kind.obs):
            if leaf.path == MASK:
                mask = obs[f"obs/{leaf_name(k, i)}"]  # [K, A, n]
                nothing = forbids_all(mask.reshape(-1, mask.shape[2]), kind.action.sizes).reshape(mask.shape[:2])
                found |= (nothing & acting[:, list(kind.agents)]).any(axis=1)
    return found
