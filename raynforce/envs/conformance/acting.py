"""Cases of simulators that choose their own actions, which offer `inference`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from raynforce.envs.conformance.cases import ENVS, LENGTH, STEPS, case
from raynforce.envs.peer import Failed, Peer, Skipped
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.distributions import head_size
from raynforce.policies.spec import Activation, Free, Linear, NetworkSpec, Tower, inputs_of
from raynforce.protocol.codec import BROKE, ENDED, FIRST
from raynforce.protocol.frame import Message, Type
from raynforce.protocol.handshake import Hello, Inference
from raynforce.protocol.spaces import misfits
from raynforce.spaces import EnvSpec


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
