"""Simulators that others started, as lanes: several of them behind one role, which come and go."""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raynforce.envs.faults import Unavailable
from raynforce.envs.lanes import BrokenLane
from raynforce.envs.masks import require_declared
from raynforce.envs.simulator_process import patient_offer
from raynforce.envs.simulators import LOOK, Simulators
from raynforce.envs.vector import derive_seed
from raynforce.envs.wrappers import require_none
from raynforce.errors import EnvError, UsageError, summary
from raynforce.protocol.channel import MOST_WAITING, Address, Link
from raynforce.protocol.frame import Message
from raynforce.protocol.handshake import Offer, prove
from raynforce.protocol.policy_session import Broken, Overdue, PolicySession, Results, Snapshots
from raynforce.protocol.session import Ended
from raynforce.protocol.spaces import Spaces
from raynforce.protocol.wire import SocketWire
from raynforce.spaces import EnvSpec

_DAY = 86_400_000  # milliseconds
LINK_SECONDS = 10.0
"""A simulator whose link is lost may come back for so long; then its episodes are cut."""
LINK_DEADLINES = {"ping_ms": 1000, "silence_ms": 15_000}
"""For the host, which the gateway asks and answers."""
FREE_SECONDS = 5.0
"""An evaluation waits so long for a simulator that is free."""


class GatewayGone(EnvError):
    """The driver has closed it, or is gone itself."""


class Peer:
    """A simulator at the other side of the gateway, or one that is asked for."""

    def __init__(self, gateway: Address, offer: Offer, envs: int, at_most: bool = False) -> None:
        """Ask for one that has `envs`, or what there is."""
        self._gateway, self._wanted = gateway, {"envs": envs, "at_most": at_most}
        self.session = PolicySession(offer, time.monotonic())
        self.session.keep_requests()
        # The host is asked by the gateway whether it is there, and may ask; this role may be busy for long.
        self.session.deadlines = replace(offer.deadlines, ping_ms=_DAY, silence_ms=_DAY)
        self.lanes = np.empty(0, np.int64)  # `[envs]` the lane of each env; those beyond are not used
        self.since = time.monotonic()  # when it was asked for, or its link was lost
        self.watched = 0  # events that are waited for
        self._connect(0)

    def _connect(self, session: int) -> None:
        address = self._gateway
        try:
            if address.kind == "unix":
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.connect(f"\0{address.where}")
            else:
                host, _, port = address.where.rpartition(":")
                connection = socket.create_connection((host, int(port)), 10.0)
        except OSError as error:
            raise GatewayGone(f"the gateway to the simulators is gone: {summary(error)}") from error
        asked = {"proof": prove(address.token, address.launch), "session": session, **self._wanted}
        connection.sendall(json.dumps(asked).encode())
        self.link = Link(self.session, SocketWire(connection, self.session.codec, MOST_WAITING))

    @property
    def name(self) -> str:
        hello = self.session.hello
        return f"simulator {hello.software}" + (f" (pid {hello.pid})" if hello.pid else "")

    def joined(self, now: float) -> bool:
        """Whether it is there by now; an `EnvError` if the gateway is gone, or it was refused."""
        if self.session.open:
            return True
        self.link._greet(now)
        if (ended := self.session.ended) is not None:
            if ended.code != "lost":
                raise EnvError(f"a simulator was refused: {ended.reason}")
            raise GatewayGone("the gateway to the simulators is gone")
        return self.session.open

    def send(self, message: Message) -> None:
        """Send a request; while its link is lost, the session keeps it."""
        if self.session.open:
            self.link.send(message)

    def suspend(self, now: float) -> None:
        """Its link is lost: wait for it to come back."""
        self.link._wire.close()
        self.session.suspend(now)
        self.since = now
        self._connect(self.session.session)

    def close(self, reason: str = "the trainer is done with it") -> None:
        with contextlib.suppress(OSError):
            self.link.close(reason)


class RemoteSimulator:
    """One simulator that others started, with the interface of `Simulator`: there is no process of ours."""

    def __init__(self, env: str, gateway: Address | None, offer: Offer, envs: int) -> None:
        self._env = env
        deadlines = replace(offer.deadlines, **LINK_DEADLINES)
        self._peer = Peer(gateway_of(env, gateway), replace(offer, deadlines=deadlines), envs)
        self.process = self

    def fileno(self) -> int:
        return self._peer.link.fileno()

    def connect(self) -> Link | None:
        return self._peer.link if self._peer.joined(time.monotonic()) else None

    def kill(self) -> None:
        """It is not ours to kill: only the connection is given up."""
        self._peer.close("the trainer has given it up")

    def ending(self) -> str:
        return f"{self._env} has left, or its link was lost"

    def close(self) -> None:
        self._peer.close()


class RemoteSimulators(Simulators):
    """The envs of simulators that come and go, with the interface of `Lanes`.

    A simulator that leaves, or does not come back after its link was lost, takes its episodes with it; the next one
    that is free takes its lanes over. The other lanes go on.
    """

    way_back = "as new episodes: the simulators are not ours"
    link_seconds = LINK_SECONDS

    def __init__(
        self,
        env: str,
        args: Mapping[str, Any] | None,
        count: int,
        *,
        gateway: Address,
        at_most: bool = False,
        free_seconds: float = FREE_SECONDS,
        sampler: int = 0,
        first: int = 0,
        **more: Any,
    ) -> None:
        """With `at_most` it has as many lanes as the first simulator has envs, if these are fewer than `count`."""
        require_none(env, args or {})
        self._gateway = gateway
        self._peers: list[Peer] = []
        self._fds: dict[int, Peer] = {}
        self._asking: Peer | None = None
        hang = more.get("hang_seconds", math.inf)
        offer = patient_offer(hang, more.get("start_seconds", 60.0), dict(args or {}))
        self._offer = replace(offer, deadlines=replace(offer.deadlines, **LINK_DEADLINES))
        if at_most:
            self._asking = Peer(gateway, self._offer, count, at_most=True)
            until = time.monotonic() + free_seconds
            while not self._asking.joined(time.monotonic()):
                select.select([self._asking.link], [], [], 0.1)
                if time.monotonic() > until:
                    self._asking.close()
                    told = f"no simulator was free within {free_seconds:g} s"
                    raise Unavailable(f"{told}: connect one more, or --set eval.every=0 --set eval.final_episodes=0")
            count = min(count, self._asking.session.hello.envs)
        self._owner = np.full(count, -1)  # `[N]` which of the peers has a lane
        self._env_of = np.zeros(count, np.int64)  # `[N]` and as which of its envs
        super().__init__(env, args, count, sampler=sampler, first=first, **more)

    # -- as `Lanes` ---------------------------------------------------------------------------------------

    def step(self, lanes: np.ndarray, actions: np.ndarray) -> None:
        now = time.monotonic()
        lanes, actions = self._able(lanes, actions, now)
        owner = self._owner[lanes]
        for number, peer in enumerate(self._peers):
            mine = owner == number
            if mine.any() and not peer.session.ended:
                peer.send(peer.session.step(self._env_of[lanes[mine]], actions[mine], now))
                self._watch_peer(peer)

    def collect(self) -> tuple[np.ndarray, list[BrokenLane]]:
        done: list[np.ndarray] = []
        now = time.monotonic()
        self._bell.clear()
        for fd, events in self._poll.poll(0):
            peer = self._fds.get(fd)
            if peer is None or not peer.session.open:
                continue
            if events & select.EPOLLOUT:
                peer.link.flush()
                self._watch_peer(peer)
            done += self._handle_peer(peer, peer.link.receive(now))
        if now >= self._look or self._asking is not None or self._suspended:
            self.overdue(now)
        broken = self._replacements() if self._unreported else []
        return np.concatenate(done) if done else np.empty(0, np.int64), broken

    def overdue(self, now: float) -> list[BrokenLane]:
        self._look = now + min(LOOK, self.hang_seconds / 4)
        self._joined()
        for peer in list(self._peers):
            if peer.session.open:
                self._handle_peer(peer, peer.link.poll(now))
        return []

    def begin_at(self, episodes: np.ndarray) -> None:
        self.episodes[:] = episodes
        there = np.flatnonzero(self._owner >= 0)
        self._making |= set(range(self.count))
        if len(there):
            self._begin(there)
        self._settle()

    def states(self) -> list[bytes | None]:
        self._saved, now = {}, time.monotonic()
        asked = [i for i in range(self.count) if i not in self._making and i not in self._unreported]
        lanes = np.array(asked, np.intp)
        for number, peer in enumerate(self._peers):
            mine = lanes[self._owner[lanes] == number]
            if len(mine) and peer.session.saves and not peer.session.ended:
                self._saving |= set(mine.tolist())
                peer.send(peer.session.snapshot(self._env_of[mine], now))
                self._watch_peer(peer)
        while self._saving:
            self.wait()
            self.collect()
        return [self._saved.pop(lane, None) for lane in range(self.count)]

    def _load(self, states: Sequence[tuple[int, bytes]]) -> None:
        for number, peer in enumerate(self._peers):
            mine = [(lane, state) for lane, state in states if self._owner[lane] == number]
            if mine and peer.session.saves and not peer.session.ended:
                lanes = np.array([lane for lane, _ in mine])
                self._loading |= set(lanes.tolist())
                bytes_ = [state for _, state in mine]
                peer.send(peer.session.restore(self._env_of[lanes], bytes_, time.monotonic()))
                self._watch_peer(peer)
            elif mine and self._unloaded is not None:
                self._unloaded |= {lane: f"{peer.name} cannot load it" for lane, _ in mine}

    def close(self) -> None:
        for peer in (*self._peers, *([self._asking] if self._asking else [])):
            peer.close()
        self._peers, self._asking = [], None
        if not self._poll.closed:
            self._poll.close()
        self._bell.close()

    # -- episodes -----------------------------------------------------------------------------------------

    def _begin(self, lanes: np.ndarray) -> None:
        keys = [(self._sampler, self._first + lane, int(self.episodes[lane])) for lane in lanes.tolist()]
        seeds = np.array([derive_seed(self._seed, *key) for key in keys], np.uint64)
        self.rows.steps[lanes] = 0
        self._making |= set(lanes.tolist())
        for number, peer in enumerate(self._peers):
            mine = self._owner[lanes] == number
            if mine.any() and not peer.session.ended:
                peer.send(peer.session.reset(self._env_of[lanes[mine]], time.monotonic(), seeds[mine]))
                self._watch_peer(peer)

    # -- faults -------------------------------------------------------------------------------------------

    def _handle_peer(self, peer: Peer, events: Sequence[Any]) -> list[np.ndarray]:
        """Act on what one of them says; the lanes that have stepped."""
        found: list[Any] = []
        lost = None
        for event in events:
            if isinstance(event, Results):
                lanes = peer.lanes[event.envs]
                info = {int(peer.lanes[env]): told for env, told in event.info.items()} if event.info else event.info
                found.append(event._replace(envs=lanes, info=info))
            elif isinstance(event, Broken | Snapshots):
                found.append(event._replace(envs=peer.lanes[event.envs]))
            elif isinstance(event, Overdue | Ended):
                lost = event
                break
        done = self._handle(found)
        if isinstance(lost, Overdue):
            self._lose_peer(peer, "hung", f"it did not come back within {self.hang_seconds:g} s")
        elif lost is not None and lost.code == "lost":
            self._suspend(peer)
        elif lost is not None:
            self._lose_peer(peer, "died", f"it has left: {lost.reason}" if lost.reason else "it has left")
        return done

    @property
    def _suspended(self) -> bool:
        return any(not peer.session.open for peer in self._peers)

    def _suspend(self, peer: Peer) -> None:
        self._forget(peer)
        try:
            peer.suspend(time.monotonic())
        except EnvError as error:
            self._lose_peer(peer, "died", str(error))
            return
        self._watch_peer(peer)

    def _lose_peer(self, peer: Peer, kind: str, text: str) -> None:
        """It is gone: its lanes wait for another one."""
        text = f"{peer.name}: {text}"
        number = self._peers.index(peer)
        for order, lane in enumerate(np.flatnonzero(self._owner == number).tolist()):
            self._breaks[lane] = 0  # it is not the env that breaks
            self._lose(lane, kind, text, alone=order == 0)
        self._owner[self._owner == number] = -1
        self._owner[self._owner > number] -= 1
        self._forget(peer)
        peer.close(text)
        self._peers.remove(peer)
        self._start()

    # -- simulators ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Ask for one more, if there are lanes without."""
        if self._asking is None and (self._owner < 0).any():
            self._asking = Peer(self._gateway, self._wanted_offer(), int(np.count_nonzero(self._owner < 0)))
        if self._asking is not None and self._asking.link.fileno() not in self._fds:
            self._watch_peer(self._asking)

    def _wanted_offer(self) -> Offer:
        spaces = Spaces.of(self.spec) if hasattr(self, "spec") else None
        return replace(self._offer, spaces=spaces)

    def _joined(self) -> Link | None:
        """Take in those that have come, or come back; a link once all lanes have one."""
        now = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.session.open]:
            try:
                back = peer.joined(now)
            except EnvError as error:
                self._lose_peer(peer, "died", f"its link was lost, and it did not come back: {error}")
                continue
            if not back and now - peer.since > self.link_seconds:
                self._lose_peer(peer, "died", f"its link was lost for {self.link_seconds:g} s")
        if self._asking is not None:
            try:
                joined = self._asking.joined(now)
            except EnvError as error:
                self._forget(self._asking)
                self._asking.close()
                self._asking = None
                if isinstance(error, GatewayGone):
                    raise
                self._start()
                return None
            if joined:
                self._place(self._asking)
        return self._peers[0].link if self._peers and not (self._owner < 0).any() else None

    def _place(self, peer: Peer) -> None:
        """Give lanes to a simulator that is new here."""
        self._asking = None
        free = np.flatnonzero(self._owner < 0)[: peer.session.hello.envs]
        peer.lanes = free
        self._peers.append(peer)
        self._owner[free], self._env_of[free] = len(self._peers) - 1, np.arange(len(free))
        self._watch_peer(peer)
        if hasattr(self, "spec"):
            self._begin(free)
        else:
            first, other = self._peers[0].session.hello, peer.session.hello
            if (first.spaces, first.agents) != (other.spaces, other.agents):
                told = f"{peer.name} has other spaces or agents than {self._peers[0].name}"
                raise UsageError(f"env {self._env!r}: {told}")
        self._start()

    def _watch(self) -> None:
        """There is no process to watch."""

    def _watch_peer(self, peer: Peer) -> None:
        fd = peer.link.fileno()
        wanted = select.EPOLLIN | (select.EPOLLOUT if peer.link.wants_write else 0)
        if self._fds.get(fd) is not peer:
            self._fds[fd] = peer
            self._poll.register(fd, wanted)
            peer.watched = wanted
        elif peer.watched != wanted:
            self._poll.modify(fd, wanted)
            peer.watched = wanted

    def _forget(self, peer: Peer) -> None:
        fd = peer.link.fileno()
        if self._fds.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(fd)


def remote_lanes(
    env: str, args: Mapping[str, Any] | None, count: int, *, gateway: Address | None, **more: Any
) -> RemoteSimulators:
    """Lanes of simulators behind the gateway at this address; without one, behind this process's own."""
    return RemoteSimulators(env, args, count, gateway=gateway_of(env, gateway), **more)


def gateway_of(env: str, gateway: Address | None) -> Address:
    """The address that a role was given; in a driver or a script that of this process's own gateway."""
    if gateway is not None:
        return gateway
    from raynforce.envs import gateway as gateways

    return gateways.gateway(env).address


def remote_spec(env: str, args: Mapping[str, Any] | None = None) -> EnvSpec:
    """What the simulators take and give: what the first one says, which is waited for."""
    from raynforce.envs import gateway as gateways

    require_none(env, args or {})
    hello = gateways.gateway(env).wait_for(1)
    require_declared(env, hello.spaces.obs, hello.spaces.action, hello.agents)
    return EnvSpec(env, hello.spaces.obs, hello.spaces.action, dict(args or {}), hello.agents)
