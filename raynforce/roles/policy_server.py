"""The policy server: batches the observations of env hosts, answers with actions, and gathers fragments."""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from raynforce.config import Config
from raynforce.doorbell import Doorbell
from raynforce.envs.faults import KEPT, RECYCLED
from raynforce.envs.vector import derive_seed
from raynforce.errors import RaynforceError
from raynforce.experience.counts import Receipt, Record
from raynforce.experience.fragment import Fragment
from raynforce.experience.trajectories import Trajectories
from raynforce.infos import NOTHING
from raynforce.memory import resident_bytes
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion, forget
from raynforce.protocol.channel import Address, Link, Listener
from raynforce.protocol.frame import Message
from raynforce.protocol.handshake import Deadlines, Hello, Offer, Refusal
from raynforce.protocol.policy_session import Broken, Overdue, Results
from raynforce.protocol.session import Closing, Ended, Envs, Note
from raynforce.protocol.spaces import Spaces
from raynforce.roles.agent_trajectories import AgentTrajectories
from raynforce.roles.batching import BatchFormer

LOOK = 0.25  # seconds between two checks of deadlines
POLL = 0.05  # seconds that a call waits for a fragment
ROOM = 2  # rows for each lane, in fragments: one that is faster than that fills several
NOISE = 4096  # rows of randomness drawn at once
Channel = Literal["direct", "unix", "tcp"]


class PolicyServer:
    """The policy's side of `central`. Backpressure: no actions while a fragment is not consumed."""

    def __init__(self, config: Config, acting: ActingSpec, channel: Channel) -> None:
        sampling, central = config.sampling, config.central
        self._config, self._envs, self._count = config, sampling.envs, sampling.samplers * sampling.envs
        self._trajectories = _trajectories(config, acting, self._count)
        agents = acting.env.agents
        moves = 1 if agents is None or agents.turns else len(agents.names)  # in a step of an environment
        self._steps = (config.stream.batch or sampling.samplers) * sampling.envs * sampling.fragment * moves
        self._recurrent = acting.network.initial_state(self._trajectories.lanes)  # of each; empty without memory
        self._former = BatchFormer(self._count, central.batch_min, central.batch_max, central.batch_wait)
        self._actor = Actor(acting)
        self._rng = np.random.default_rng([config.seed, 0, 1])
        self._noise, self._drawn = np.zeros(0), NOISE
        self._version: PolicyVersion | None = None
        self._loaded: PolicyVersion | None = None
        self._links: dict[int, Link] = {}
        self._batches = 0, 0  # forward passes since the last fragment, and the actions that these have chosen
        self._coming = 0  # environments that were asked to step or to reset, and have not answered
        self._times = EnvTimes(self._count)
        self._done: deque[Fragment] = deque()
        self._faults: deque[Mapping[str, Any]] = deque()
        self._silent: list[int] = []
        self._served: set[int] = set()
        self._failure: BaseException | None = None
        self._look_at = 0.0
        self._closed = False
        self._memory, self._measured = 0, -math.inf
        self._selector = selectors.DefaultSelector()
        hang = _ms(1.5 * config.faults.sample_seconds + 5)  # a host that works notices and replaces it before
        silence = max(hang, Deadlines().silence_ms)  # a step may keep its host from answering
        deadlines = Deadlines(step_ms=hang, silence_ms=silence, reset_ms=_ms(config.faults.start_seconds))
        spaces = Spaces.of(acting.env) if agents is None else None  # else `_offer` looks at them
        offer = Offer(spaces=spaces, autoreset=("same_step",), deadlines=deadlines, each=self._offer)
        home = os.environ.get("RAYNFORCE_NODE", "127.0.0.1")  # where other machines find this one
        self._listener = Listener(channel, offer, bind_host=home)
        self._changed = threading.Condition()
        self._bell = Doorbell()  # wakes the thread that serves
        self._thread: threading.Thread | None = None  # serves hosts that have processes of their own
        if channel != "direct":
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
            self._thread.start()

    def note(self) -> str:
        return self._actor.note

    def address(self) -> Address:
        return self._listener.address

    def start_fresh(self, sequence: int, attempt: int) -> Address:
        """Replace one that died: go on at fragment `sequence` with another random stream; returns the address."""
        self._rng = np.random.default_rng([self._config.seed, 0, 1, attempt])
        self._trajectories.sequence = sequence
        return self.address()

    def produce(self, version: PolicyVersion) -> tuple[Fragment | None, Receipt]:
        """The next fragment, or None after `POLL` seconds; from now on actions are chosen with this version."""
        began = time.perf_counter()
        self._version = version
        fragment = self._next_here() if self._thread is None else self._next_served()
        faults = [self._faults.popleft() for _ in range(len(self._faults))]
        silent, self._silent = self._silent, []
        served, self._served = sorted(self._served), set()
        if began > self._measured + 0.1:
            self._memory, self._measured = resident_bytes(), began
        seconds, envs = self._times.spent(time.perf_counter() - began)
        record = Record(0, self._trajectories.sequence - 1, 0) if fragment is None else fragment.record
        size = 0 if fragment is None else fragment.nbytes
        receipt = Receipt(record, seconds, faults, size, self._memory)
        (passes, chosen), self._batches = self._batches, (0, 0)
        receipt = receipt._replace(envs=envs, served=served, silent=silent, flying=self._trajectories.steps)
        return fragment, receipt._replace(passes=passes, chosen=chosen)

    def _next_here(self) -> Fragment:
        while not self._done:
            self._turn()
            if not self._links:
                raise RaynforceError("no env host is there")
        return self._done.popleft()

    def _next_served(self) -> Fragment | None:
        with self._changed:
            if self._loaded is None:
                self._bell.ring()
            self._changed.wait_for(lambda: self._done or self._failure is not None, POLL)
            if self._failure is not None:
                raise self._failure
            if not self._done:
                return None
            fragment = self._done.popleft()
        self._bell.ring()  # backpressure is over
        return fragment

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join(2.0)
        for link in self._links.values():
            link.close("the run has ended")
        self._listener.close()
        self._selector.close()
        self._bell.close()

    # -- serving ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify()

    def _turn(self) -> None:
        """Receive what hosts have sent, then choose actions for the environments that wait."""
        self._hear()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK
            for link in tuple(self._links.values()):
                self._handle(link, link.poll(now), now)
        if self._version is not None and self._version is not self._loaded:
            version = self._version
            self._actor.load(version)
            self._loaded = version
        full = bool(self._done)  # backpressure
        if self._loaded is not None:
            self._times.pause(full, now)
            while not full and self._former.due_in(now, self._coming) == 0.0:
                self._choose(self._loaded)
                now = time.monotonic()

    def _hear(self) -> None:
        if self._thread is None:
            self._accept()
            for link in tuple(self._links.values()):
                now = time.monotonic()
                self._handle(link, link.receive(now), now)
            return
        due = self._former.due_in(time.monotonic(), self._coming)
        rests = self._times.paused or self._loaded is None  # until the bell rings
        ready = self._selector.select(LOOK if rests else min(LOOK, due))
        for key, events in ready:
            now, link = time.monotonic(), key.data
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._bell:
                self._bell.clear()
                self._hand_over()
            else:
                if events & selectors.EVENT_WRITE:
                    link.flush()
                    self._watch(link)
                if events & selectors.EVENT_READ:
                    self._handle(link, link.receive(now), now)

    def _choose(self, version: PolicyVersion) -> None:
        """One batch through the policy, and the actions back to where the observations came from."""
        began = time.monotonic()
        envs, since = self._former.next_batch()
        actor, trajectories = self._actor, self._trajectories
        lanes = trajectories.acting(envs)
        seen = trajectories.newest(lanes)
        before = {name: state[lanes] for name, state in self._recurrent.items()}
        out = actor.masked(self._remembering(lanes, seen, before) if before else actor.outputs(seen), seen)
        chosen = actor.sample(out, self._draw(len(lanes)))
        actions = trajectories.for_envs(envs, actor.to_env(chosen))
        now = time.monotonic()
        hosts = envs // self._envs
        self._coming += len(envs)
        passes, actions_before = self._batches
        self._batches = passes + 1, actions_before + len(lanes)
        self._times.chosen(envs, since, now, now - began)
        for host in sorted(set(hosts.tolist())):
            mine = hosts == host
            link = self._links[host]
            self._send(link, link.session.step(envs[mine] - host * self._envs, actions[mine], now))
        sent = time.monotonic()
        logp = actor.distribution.logp(out, chosen)
        trajectories.act(lanes, chosen, logp, version.number, before)  # while hosts step
        self._times.wired(sent - now, time.monotonic() - sent)

    def _remembering(
        self, lanes: np.ndarray, seen: dict[str, np.ndarray], before: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The outputs of a policy with memory; these lanes remember that they have seen theirs."""
        out, after = self._actor.step(seen, before)
        for name, state in self._recurrent.items():
            state[lanes] = after[name]
        return out

    def _draw(self, count: int) -> np.ndarray:
        if self._drawn + count > len(self._noise):
            self._noise = np.asarray(self._actor.distribution.noise(self._rng, 1, max(NOISE, count))[0])
            self._drawn = 0
        self._drawn += count
        return self._noise[self._drawn - count : self._drawn]

    # -- what hosts say -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        now = time.monotonic()
        while (link := self._listener.accept(now)) is not None:
            if (older := self._links.get(_host(link))) is not None:  # it has not been missed yet
                self._gone(older)
            if self._thread is not None:
                self._selector.register(link, selectors.EVENT_READ, link)
            self._links[_host(link)] = link
            self._coming += self._envs
            self._times.begin(now)
            self._send(link, link.session.reset(np.arange(self._envs), now))

    def _send(self, link: Link, message: Message) -> None:
        link.send(message)
        if link.wants_write:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        """Select for writing while a link has unsent bytes."""
        if self._thread is not None and link.fileno() >= 0:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
            if self._selector.get_key(link).events != wanted:
                self._selector.modify(link, wanted, link)

    def _handle(self, link: Link, events: list[Any], now: float) -> None:
        for event in events:
            if isinstance(event, Results):
                self._results(link, event, now)
            elif isinstance(event, Broken):
                self._broken(link, event, now)
            elif isinstance(event, Note) and event.level == "error":
                self._fault(link, {"kind": "raised", "cause": event.text})
            elif isinstance(event, Note) and (kind := event.text.partition(": ")[0]) in (RECYCLED, KEPT):
                self._fault(link, {"kind": kind, "cause": event.text.removeprefix(f"{kind}: ")})
            elif isinstance(event, Overdue):
                self._gone(link, f"{len(event.envs)} environments are overdue", silent=True)
            elif isinstance(event, Closing):
                self._gone(link, "bye")
            elif isinstance(event, Ended):
                self._gone(link, silent=event.code == "silence")
        self._times.wired(time.monotonic() - now)

    def _results(self, link: Link, results: Results, now: float) -> None:
        first_env, trajectories = _host(link) * self._envs, self._trajectories
        envs = results.envs + first_env
        self._coming -= len(envs)
        self._former.add(envs, now)
        if results.valid.tobytes().count(1) < len(envs):
            first = ~results.valid  # these follow no action
            self._times.begun(envs[first])
            seen = {path: array[first] for path, array in results.obs.items()}
            forget(self._recurrent, trajectories.begin(envs[first], seen))
            if first.all():
                return
            envs, results = envs[results.valid], results.some(results.valid)
        info = {env + first_env: told for env, told in results.info.items()} if results.info else NOTHING
        over = trajectories.step(envs, *results[1:5], results.ended, results.final_obs, info)
        forget(self._recurrent, over)
        self._times.answered(envs, results.seconds, now)
        self._served.add(_host(link))
        self._hand_over()

    def _broken(self, link: Link, broken: Broken, now: float) -> None:
        self._trajectories.cut(broken.envs + _host(link) * self._envs)
        self._fault(link, {"kind": broken.code, "cause": broken.text, **broken.facts})
        if broken.recoverable and link.session.asks:  # else the host is closing
            self._send(link, link.session.reset(broken.envs, now))
        elif not broken.recoverable:
            self._coming -= len(broken.envs)

    def _fault(self, link: Link, facts: Mapping[str, Any]) -> None:
        self._faults.append({"env": self._config.env, **facts, "host": _host(link)})

    def _gone(self, link: Link, reason: str = "", *, silent: bool = False) -> None:
        """Forget a host and the episodes in flight of its environments; steps gathered before are kept."""
        if self._thread is not None and link.fileno() >= 0:
            self._selector.unregister(link)
        link.close(reason)
        if self._links.get(_host(link)) is not link:
            return
        del self._links[_host(link)]
        envs = np.arange(_host(link) * self._envs, (_host(link) + 1) * self._envs)
        gone = int(np.count_nonzero(link.session.envs.phase == Envs.GONE))
        self._coming -= self._envs - self._former.remove(envs) - gone
        self._trajectories.cut(envs)
        if silent:
            self._silent.append(_host(link))

    def _hand_over(self) -> None:
        """Cut a fragment if there are enough steps, and the one before was consumed."""
        if self._done or self._trajectories.steps < self._steps:
            return
        fragment = self._trajectories.fragment(self._steps)
        assert fragment is not None
        with self._changed:
            self._done.append(fragment)
            self._changed.notify()

    def _offer(self, offer: Offer, hello: Hello) -> Offer:
        """For one host: the seeds of its first episodes."""
        if hello.host is None or hello.host * self._envs >= self._count or hello.envs != self._envs:
            here = f"hosts 0 to {self._count // self._envs - 1} with {self._envs} envs each are expected"
            raise Refusal("capacity", f"host {hello.host} with {hello.envs} envs; {here}")
        if isinstance(self._trajectories, AgentTrajectories) and (wrong := self._trajectories.misfit(hello.spaces.obs)):
            raise Refusal("spaces", wrong)
        envs = range(hello.host * self._envs, (hello.host + 1) * self._envs)
        seeds = np.array([derive_seed(self._config.seed, 0, env, 0) for env in envs], np.uint64)
        return replace(offer, seeds=lambda envs: seeds)


def _trajectories(config: Config, acting: ActingSpec, envs: int) -> Trajectories:
    env, rows = acting.env, ROOM * config.sampling.fragment
    how: dict[str, Any] = {"states": acting.network.states, "every": acting.sequence}
    if env.agents is None:
        return Trajectories(env.obs, env.action, rows, envs, **how)
    central = bool(getattr(config.algorithm, "central_critic", False))
    return AgentTrajectories(env, rows, envs, ids=config.sampling.agent_ids, central=central, **how)


class EnvTimes:
    """How busy environments are, and what they wait for."""

    def __init__(self, lanes: int) -> None:
        self.paused = False
        self._lanes = lanes
        self._since: float | None = None
        self._sent = np.zeros(lanes)  # when each was asked to step
        self._paused_at = self._paused = 0.0  # when backpressure began, and its seconds so far
        self._paused_before = np.zeros(lanes)  # the same when each became ready
        self._policy = self._wire = 0.0  # seconds of this process
        self._of_envs = dict.fromkeys(("busy", "policy", "wire", "learner"), 0.0)  # of environments
        self._rest = 0.0  # what is not known of, below zero while more is known of than time has passed

    def begin(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def pause(self, full: bool, now: float) -> None:
        """Backpressure begins or ends: no actions while a fragment is not consumed."""
        if full and not self.paused:
            self._paused_at = now
        elif self.paused and not full:
            self._paused += now - self._paused_at
        self.paused = full

    def wired(self, seconds: float, policy: float = 0.0) -> None:
        """What messages took, and then the policy."""
        self._wire += seconds
        self._policy += policy

    def answered(self, lanes: np.ndarray, seconds: np.ndarray | None, now: float) -> None:
        away = len(lanes) * now - float(self._sent[lanes].sum())
        busy = away if seconds is None else min(float(seconds.sum()), away)
        self._of_envs["busy"] += busy
        self._of_envs["wire"] += away - busy
        self._paused_before[lanes] = self._paused

    def begun(self, lanes: np.ndarray) -> None:
        """They show the first observation of an episode; how long that took is not known."""
        self._paused_before[lanes] = self._paused

    def chosen(self, lanes: np.ndarray, since: np.ndarray, now: float, seconds: float) -> None:
        waited = len(lanes) * now - float(since.sum())
        learner = len(lanes) * self._paused - float(self._paused_before[lanes].sum()) if self._paused else 0.0
        self._of_envs["learner"] += learner
        self._of_envs["policy"] += max(0.0, waited - learner)
        self._sent[lanes] = now
        self._policy += seconds

    def spent(self, call: float) -> tuple[dict[str, float], dict[str, float]]:
        """Where the time of a call of so many seconds went, and that of all environments since the last one."""
        now = time.monotonic()
        wall, self._since = max(now - (self._since or now), 1e-9), now
        policy, wire = self._policy / wall, self._wire / wall
        seconds = {"env": max(0.0, 1 - policy - wire) * call, "policy": policy * call, "other": wire * call}
        known, self._of_envs = self._of_envs, dict.fromkeys(self._of_envs, 0.0)
        self._policy = self._wire = 0.0
        self._rest += wall * self._lanes - sum(known.values())  # of what is known much began before: it is made up for
        known["restart"] = max(0.0, self._rest)
        self._rest -= known["restart"]
        return seconds, known


def _host(link: Link) -> int:
    assert link.host is not None  # others are refused
    return link.host


def _ms(seconds: float) -> int:
    return int(min(1000 * seconds, 86_400_000))
