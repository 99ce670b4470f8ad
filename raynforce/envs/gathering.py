"""Simulators that choose their own actions and send whole fragments: a process, its policy versions, its faults."""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.envs.addresses import is_remote
from raynforce.envs.faults import EnvFault, count_break
from raynforce.envs.remote import RemoteSimulator
from raynforce.envs.simulator_process import START_SECONDS, Simulator
from raynforce.envs.vector import derive_seed, first_of_attempt
from raynforce.errors import EnvError, UsageError
from raynforce.protocol.channel import Address, Link
from raynforce.protocol.codec import BROKE
from raynforce.protocol.frame import MOST_BODY
from raynforce.protocol.handshake import Deadlines, Inference, Offer
from raynforce.protocol.policy_session import Broken, Gathered, Results
from raynforce.protocol.session import Ended, Envs, Note
from raynforce.protocol.spaces import Spaces

_DAY = 86_400_000  # milliseconds
_LOST = ("closed", "lost", "silence")  # codes of sessions that ended with the process, and not for what it said


class ActingSimulator:
    """A simulator process whose envs act by the policy versions that it is sent.

    One that ends, hangs or sends what cannot be is started again and begins new episodes. Lane i has the number i in
    seeds.
    """

    def __init__(
        self,
        env: str,
        args: Mapping[str, Any] | None,
        count: int,
        inference: Inference,
        *,
        row_bytes: int,
        seed: int,
        sampler: int = 0,
        hang_seconds: float = math.inf,
        start_seconds: float = START_SECONDS,
        gateway: Address | None = None,
    ) -> None:
        self.count, self.hang_seconds, self._gateway = count, hang_seconds, gateway
        self._env, self._args, self._inference = env, dict(args or {}), inference
        self._seed, self._sampler, self._start_seconds = seed, sampler, start_seconds
        self.episodes = np.zeros(count, np.int64)
        """`[N]` which of its episodes each lane's random stream began with."""
        self._lost = 0  # fragments that went with a process, at most
        self._faults: list[EnvFault] = []
        self._breaks, self._stepped = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._arrays: tuple[int, Sequence[np.ndarray], Mapping[str, float]] | None = None
        self._sent: int | None = None  # the version that the process has
        self._seeds: list[int] = []  # of fragments that were asked for and have not come
        self._arrived: deque[Gathered] = deque()
        self._simulator: Simulator | RemoteSimulator | None = None
        self._link: Link | None = None
        bytes_ = (2 * inference.length + 1) * count * row_bytes
        if bytes_ > MOST_BODY:
            raise UsageError(
                f"a fragment of {inference.length} steps of {count} envs may have {bytes_:,} bytes; at most "
                f"{MOST_BODY:,} are sent: lower sampling.fragment or --envs"
            )
        try:
            self._start()
            while not self._settled():
                self._wait()
        except BaseException:
            self.close()
            raise

    def begin_at(self, episodes: np.ndarray) -> None:
        """Begin these episodes, `[N]` by lane."""
        self.episodes[:] = episodes
        if self._sent is None and self._link is not None and self._settled():
            self._reset(np.arange(self.count))
        else:  # envs that act are never reset from here
            self._stop()
            self._seeds.clear()
            self._arrived.clear()
            self._start()
        while not self._settled():
            self._wait()
        self._faults.clear()

    def begin_attempt(self, attempt: int) -> None:
        self.begin_at(np.full_like(self.episodes, first_of_attempt(attempt)))

    def policy(self, number: int, arrays: Sequence[np.ndarray], schedules: Mapping[str, float]) -> None:
        """The version to act with from now on."""
        self._arrays = number, arrays, schedules

    @property
    def asked(self) -> int:
        """Fragments that were asked for and not handed over yet."""
        return len(self._seeds) + len(self._arrived)

    def ask(self, seed: int) -> None:
        """Have it gather one more fragment; its random streams follow from `seed`."""
        self._seeds.append(seed)
        if self._settled():
            self._tell()
            self._say(seed)

    def fragment(self) -> Gathered:
        """Wait for the oldest fragment that was asked for."""
        until = time.monotonic() + self.hang_seconds
        while True:
            if self._settled():
                self._tell()
                if not self._arrived:
                    self._events()
            if self._arrived:
                event = self._arrived.popleft()
                self._take(event)
                return event
            if time.monotonic() > until:
                self._restart("hung", f"no fragment came within {self.hang_seconds:g} s", kill=True)
                until = time.monotonic() + self.hang_seconds + self._start_seconds
            self._wait(until)

    def take_faults(self) -> list[EnvFault]:
        faults, self._faults = self._faults, []
        return faults

    def take_lost(self) -> int:
        """How many fragments, at most, went with a process since this was last asked."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        self._stop()

    # -- the process --------------------------------------------------------------------------------------

    def _start(self) -> None:
        # Neither side sends PING: a process that ends hangs up, and a trainer may be busy elsewhere for long.
        patient = {"ping_ms": _DAY, "silence_ms": _DAY}
        offer = Offer(
            autoreset=("same_step",),
            capabilities=(),
            deadlines=Deadlines(reset_ms=int(1000 * self._start_seconds), **patient),
            config=self._args,
            inference=self._inference,
        )
        if is_remote(self._env):
            self._simulator = RemoteSimulator(self._env, self._gateway, offer, self.count)
        else:
            self._simulator = Simulator(self._env, self.count, offer, self._start_seconds)
        self._link, self._sent = None, None

    def _stop(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
        self._simulator = self._link = None

    def _settled(self) -> bool:
        """Whether it has connected and shows the first observations of all envs; moves on towards that."""
        assert self._simulator is not None
        if self._link is None:
            try:
                link = self._simulator.connect()
            except EnvError as error:
                if not self._proven:
                    raise
                self._restart("died", str(error))
                return False
            if link is None:
                return False
            self._require_fit(link)
            self._link = link
            self._reset(np.arange(self.count))
        if self._ready():
            return True
        self._events()
        return self._ready()

    _proven = False  # whether a process has ever begun its episodes
    _spaces: Spaces | None = None

    def _ready(self) -> bool:
        if self._link is None or not (self._link.session.envs.phase == Envs.READY).all():
            return False
        self._proven = True
        return True

    def _require_fit(self, link: Link) -> None:
        hello = link.session.hello
        if "inference" not in link.session.welcome.capabilities:
            fix = "use --inference server, or a simulator that does (sdk/cpp/raynforce.hpp)"
            raise UsageError(f"env {self._env!r}: the simulator does not offer `inference`: {fix}")
        if hello.envs != self.count:
            raise UsageError(
                f"env {self._env!r} has {hello.envs} envs in a process, not {self.count}: give --envs {hello.envs}, or "
                "let it make as many as RAYNFORCE_ENVS says"
            )
        if self._spaces not in (None, hello.spaces):
            raise EnvError(f"env {self._env!r} has other spaces than before it was started again")
        self._spaces = hello.spaces

    def _reset(self, lanes: np.ndarray) -> None:
        assert self._link is not None
        keys = [(self._sampler, lane, int(self.episodes[lane])) for lane in lanes.tolist()]
        seeds = np.array([derive_seed(self._seed, *key) for key in keys], np.uint64)
        if self._link.session.asks:
            self._link.send(self._link.session.reset(lanes, time.monotonic(), seeds))

    def _tell(self) -> None:
        """Send the newest version, if the process does not have it; a new process is asked again for what is owed."""
        assert self._link is not None
        if self._arrays is None or self._sent == self._arrays[0] or not self._link.session.asks:
            return
        again = self._seeds if self._sent is None else ()
        self._sent = self._arrays[0]
        self._link.send(self._link.session.policy(*self._arrays))
        for seed in again:
            self._say(seed)

    def _say(self, seed: int) -> None:
        assert self._link is not None
        if self._link.session.asks and len(self._link.session.sampling) < len(self._seeds):
            self._link.send(self._link.session.sample(seed))

    def _wait(self, until: float = math.inf) -> None:
        assert self._simulator is not None
        poll = select.poll()
        writing = self._link is not None and self._link.wants_write
        poll.register(self._simulator.fileno(), select.POLLIN | (select.POLLOUT if writing else 0))
        most = 1.0 if self._link is not None else 0.05
        poll.poll(1000 * max(0.0, min(most, until - time.monotonic())))
        if writing and self._link is not None:
            self._link.flush()

    # -- what it says -------------------------------------------------------------------------------------

    def _events(self) -> None:
        """Take in what has come; faults are handled."""
        if self._link is None:
            return
        now = time.monotonic()
        for event in [*self._link.receive(now), *self._link.poll(now)]:
            if isinstance(event, Gathered):
                self._seeds.pop(0)
                self._arrived.append(event)
            elif isinstance(event, Broken):  # in its first reset
                for lane in event.envs.tolist():
                    self._lose(lane, "garbage" if event.code == "value" else "raised", event.text)
                self._reset(event.envs)
            elif not isinstance(event, Note | Results):
                self._ended(event)
                break

    def _ended(self, event: Any) -> None:
        ended = isinstance(event, Ended)
        lost = ended and event.code in _LOST
        reason = event.reason if ended else "its first observations did not come" if not self._proven else "it is late"
        if not self._proven and not lost:
            assert self._simulator is not None
            self._simulator.process.kill()
            raise EnvError(f"env {self._env!r}: {reason}")
        self._restart("died" if lost else "garbage", "" if lost else reason, kill=not lost)

    def _restart(self, kind: str, text: str, kill: bool = False) -> None:
        """The process is gone or not to be trusted: another takes its place, and begins new episodes."""
        assert self._simulator is not None
        if kill:
            self._simulator.process.kill()
        ending = f"the simulator {self._simulator.process.ending()}"
        for lane in range(self.count):
            self._lose(lane, kind, f"{text}; {ending}" if text else ending, alone=lane == 0)
        self._lost += len(self._seeds)
        self._stop()
        self._start()

    def _take(self, event: Gathered) -> None:
        """Count the envs that broke in a fragment, which have begun other episodes by themselves."""
        broke = event.status == BROKE
        for lane in np.flatnonzero(broke.any(axis=0)).tolist():
            code, text = event.broken.get(lane, ("raised", "it gave no reason"))
            before = 0
            for row in np.flatnonzero(broke[:, lane]).tolist():
                self._stepped[lane] += row - before
                before = row + 1
                self._lose(lane, "garbage" if code == "value" else "raised", text)
            self._stepped[lane] -= before
        self._stepped += len(event.reward)

    def _lose(self, lane: int, kind: str, text: str, alone: bool = True) -> None:
        seed = derive_seed(self._seed, self._sampler, lane, int(self.episodes[lane]))
        fault = EnvFault(self._env, self._args, kind, lane, seed, int(self._stepped[lane]), text)
        if alone:  # a process that ends is one fault, however many envs it has
            self._faults.append(fault)
        if not (is_remote(self._env) and kind == "died"):  # one that leaves is not broken
            self._breaks[lane] = count_break(fault, int(self._breaks[lane]), int(self._stepped[lane]))
        self._stepped[lane] = 0
        self.episodes[lane] += 1
