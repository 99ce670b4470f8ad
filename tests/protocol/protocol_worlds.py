"""What the tests of the protocol share: spaces, and two sides that have met."""

from __future__ import annotations

from typing import Any

import numpy as np

from raynforce.protocol.handshake import Hello, Offer
from raynforce.protocol.host_session import HostSession
from raynforce.protocol.policy_session import PolicySession
from raynforce.protocol.session import Outcome, Session
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import ActionSpec, ObsLeaf

CART = Spaces((ObsLeaf("obs", "box", (4,), "float32"),), ActionSpec("discrete", (), "int64", (2,), (0,)))
ROBOT = Spaces(
    (
        ObsLeaf("obs/camera", "box", (2, 3), "uint8", stack=2),
        ObsLeaf("obs/gear", "discrete", (), "int64", (5,), (-1,)),
        ObsLeaf("obs/on", "multibinary", (3,), "int8"),
    ),
    ActionSpec("box", (2,), "float32", low=(-1.0, -np.inf), high=(1.0, np.inf)),
)


def tell(session: Session, outcome: Outcome, now: float = 0.0) -> Outcome:
    """Give everything that is to be sent to the other side; what follows from all of it."""
    told = [session.take(message.to_bytes(), now) for message in outcome.send]
    return Outcome([e for o in told for e in o.events], [m for o in told for m in o.send])


def met(
    spaces: Spaces = CART, envs: int = 3, autoreset: str = "same_step", offer: Any = None, **hello: Any
) -> tuple[HostSession, PolicySession]:
    """A host and a policy after the handshake."""
    host = HostSession(Hello(envs, spaces, (autoreset,), **hello), 0.0)
    policy = PolicySession(Offer(session=7, spaces=spaces, **(offer or {})), 0.0)
    tell(host, tell(policy, Outcome(send=[host.start()])))
    assert host.open
    assert policy.open
    return host, policy


def begun(*args: Any, **kwargs: Any) -> tuple[HostSession, PolicySession]:
    """The same, with the first observations of all envs there."""
    host, policy = met(*args, **kwargs)
    everyone = np.arange(host.hello.envs)
    host.take(policy.reset(everyone, 0.0).to_bytes(), 0.0)
    policy.take(host.results(everyone, 0.0).to_bytes(), 0.0)
    return host, policy
