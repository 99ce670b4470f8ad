"""The env host: many environments side by side, stepped for a policy that is elsewhere; it needs no torch."""

from __future__ import annotations

import faulthandler
import math
import select
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from raynforce.envs.faults import KEPT, RECYCLED
from raynforce.envs.lanes import Lanes
from raynforce.envs.simulator_vector import make_lanes
from raynforce.envs.simulators import Simulators
from raynforce.envs.vector import EnvArgs
from raynforce.memory import resident_bytes
from raynforce.protocol.channel import Address, ChannelError, HostLink, Refused, connect
from raynforce.protocol.codec import TERMINATED, TRUNCATED
from raynforce.protocol.handshake import Hello
from raynforce.protocol.host_session import ResetRequest, StepRequest
from raynforce.protocol.session import Closing, Ended
from raynforce.protocol.spaces import Spaces
from raynforce.roles.learned import Served, ServeOutcome
from raynforce.roles.one_core import OneCore
from raynforce.threads import exact_timers

LOOK = 0.25  # seconds between two looks at who is silent, or hangs
CONNECTING, TRIES = 3.0, 20  # seconds for the policy to be found, and how often in a row it may be looked for again
GAP = 3e-10  # seconds, times environments cubed, to gather answers for one message: worth it for busy hosts alone
LARGEST_GAP = 0.03  # of a step's mean time
FEW_FILES = 1024  # that `select` can name
CALM = 1.0  # seconds after which a host's memory is looked at
GROWTH = 1.25  # how much larger it may become then, whatever the limit: environments may be large from the start


class EnvHost:
    """Number `index` of the hosts of a run. `serve` steps its environments until the policy hangs up."""

    def __init__(
        self,
        envs: EnvArgs,
        index: int = 0,
        hang_seconds: float = math.inf,
        start_seconds: float = math.inf,
        most_bytes: float = math.inf,
        one_core: bool = False,
    ) -> None:
        """What takes longer than `start_seconds`, or a step than `hang_seconds`, ends the process it is in."""
        self.index = index
        self._args, self._hang_seconds, self._start_seconds = envs, hang_seconds, start_seconds
        self._most_bytes = most_bytes
        self._one_core = one_core and envs.parallel == "threads"
        self._lanes: Lanes | Simulators | Simulators | None = None
        self._link: HostLink | None = None
        self._tries = 0
        self._untold: list[str] = []  # faults while no policy was connected
        self._fresh = np.zeros(envs.num_envs, np.bool_)  # shows the first observation of an episode

    def note(self) -> str:
        return self._made().note

    def start_fresh(self, attempt: int) -> None:
        """Replace one that died: play episodes that it has not played."""
        if self._lanes is None:
            self._made(attempt)
            return
        with self._watched(self._start_seconds):
            self._lanes.call("start_fresh", [(attempt,)] * self._lanes.count)
        self._fresh[:] = True

    def _made(self, attempt: int = 0) -> Lanes | Simulators:
        if self._lanes is None:
            exact_timers()
            args = self._args
            with self._watched(self._start_seconds):
                self._lanes = make_lanes(args, self.index, attempt, self._hang_seconds)
            self._fresh[:] = True
        return self._lanes

    def serve(self, address: Address) -> Served:
        """Step environments for the policy at this address until it hangs up, or this process exceeds `most_bytes`."""
        lanes = self._made()
        if not self._fresh.all():  # it has served another policy before
            self._settle(lanes, apart=address.kind != "direct")
        hello = Hello(lanes.count, Spaces.of(lanes.spec), capabilities=("timing", "info"), host=self.index)
        try:
            self._link = link = connect(address, hello, seconds=CONNECTING)
        except Refused:
            raise
        except ChannelError as error:  # it may be another one by now, elsewhere
            self._tries += 1
            if self._tries > TRIES:
                raise
            return Served(ServeOutcome.ENDED, str(error))
        self._tries = 0
        slots = link.session.slots  # each has one row for an env, and what is in them stays until its next step
        slots.obs, slots.final, slots.reward, slots.seconds = lanes.obs, lanes.final, lanes.reward, lanes.seconds
        if address.kind == "direct":
            link.work_when_asked(self._work)
            return Served(ServeOutcome.JOINED)
        core = OneCore(lanes.threads, zlib.crc32(address.launch.encode()) + self.index, self._one_core)
        with self._watched(self._hang_seconds), closing(core):
            outcome = self._turn(link, lanes, core)
        assert link.session.ended is not None
        reason = link.session.ended.reason
        link.close()
        self._link = None
        if outcome is ServeOutcome.GROWN:  # another process will go on
            lanes.close()
            self._lanes = None
        return Served(outcome, reason)

    @contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        """End this process if it hangs: an environment may hold the GIL, or be stepped in this very thread."""
        _still_there(seconds)
        try:
            yield
        finally:
            if seconds < math.inf:
                faulthandler.cancel_dump_traceback_later()

    def _turn(self, link: HostLink, lanes: Lanes | Simulators, core: OneCore) -> ServeOutcome:
        """Do what is asked for, and hand over what is ready, until the session ends."""
        outcome = ServeOutcome.ENDED
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        poll.register(lanes.fileno(), select.POLLIN)
        look_at, calm, gap, writing = 0.0, time.monotonic() + CALM, 0.0, False
        most_bytes = math.inf  # until it is seen how large it is
        while link.session.ended is None:
            ready = poll.poll(1000 * LOOK)
            now = time.monotonic()
            for fd, events in ready:
                if fd != link.fileno():
                    self._gather(link, lanes, now + gap)
                    continue
                if events & select.POLLOUT:
                    link.flush()
                if events & ~select.POLLOUT:
                    self._do(link, lanes, link.receive(now), now)
            if now >= look_at:
                look_at = now + LOOK
                gap = min(GAP * lanes.count**3, LARGEST_GAP * float(lanes.seconds.mean()))
                _still_there(self._hang_seconds)
                self._do(link, lanes, link.poll(now), now)
                lanes.overdue(now)
                core.look(now)
                if now > calm and (size := resident_bytes()) > most_bytes:
                    if link.session.ended is None:
                        outcome = ServeOutcome.GROWN
                    link.close(f"has grown to {size / 1e6:,.0f} MB")
                elif now > calm and most_bytes == math.inf:
                    most_bytes = max(self._most_bytes, GROWTH * size)
            if link.wants_write != writing and link.session.ended is None:
                writing = link.wants_write
                poll.modify(link.fileno(), select.POLLIN | (select.POLLOUT if writing else 0))
        return outcome

    def _gather(self, link: HostLink, lanes: Lanes | Simulators, until: float) -> None:
        """Hand over what is ready then; what is asked for meanwhile does not wait."""
        socket = [link] if link.fileno() < FEW_FILES else []
        while (left := until - time.monotonic()) > 0 and link.session.ended is None:
            if select.select(socket, (), (), left)[0]:  # of all its kind, it alone knows less than a millisecond
                now = time.monotonic()
                self._do(link, lanes, link.receive(now), now)
        self._answer(link, lanes, time.monotonic())

    def _settle(self, lanes: Lanes | Simulators, apart: bool) -> None:
        """Wait for steps in flight, and begin new episodes; `apart`: in a process that may be ended."""
        seconds = self._hang_seconds if apart else math.inf
        with self._watched(seconds):
            while np.isfinite(lanes.busy_since()).any():
                lanes.wait(LOOK)
                self._untold += [one.text for one in lanes.collect()[1] if one.code in ("hung", "died")]
                lanes.overdue(time.monotonic())
                _still_there(seconds)
            lanes.call("reset", [()] * lanes.count)
        lanes.take_info()
        self._fresh[:] = True

    def _work(self) -> None:
        assert self._link is not None
        lanes, now = self._made(), time.monotonic()
        self._do(self._link, lanes, self._link.receive(now), now)
        self._answer(self._link, lanes, now)

    def _do(self, link: HostLink, lanes: Lanes | Simulators, events: list[Any], now: float) -> None:
        for event in events:
            if isinstance(event, StepRequest):
                self._fresh[event.envs] = False
                lanes.step(event.envs, event.actions)
            elif isinstance(event, ResetRequest):
                self._show(link, lanes, event.envs, now)
            elif isinstance(event, Closing):
                link.close("bye")
            elif isinstance(event, Ended):
                return

    def _answer(self, link: HostLink, lanes: Lanes | Simulators, now: float) -> None:
        done, broken = lanes.collect()
        if link.session.ended is not None:
            return
        if len(done):
            self._show(link, lanes, done, now)
        for one in broken:
            self._fresh[one.lane] = True
            link.send(link.session.broken(one.lane, one.code, one.text, now, facts=one.facts))
        while self._untold:
            link.send(link.session.log("error", self._untold.pop()))
        told = [one.facts for one in broken]
        for fault in lanes.take_faults():  # also between two episodes, where no step is lost
            if fault.kind in ("raised", "garbage") and fault.facts() not in told:
                link.send(link.session.log("error", fault.cause))
            elif fault.kind in (RECYCLED, KEPT):
                link.send(link.session.log("info", f"{fault.kind}: {fault.cause}"))

    def _show(self, link: HostLink, lanes: Lanes | Simulators, rows: np.ndarray, now: float) -> None:
        slots = link.session.slots
        slots.info |= lanes.take_info()
        slots.status[rows] = lanes.terminated[rows] * TERMINATED + lanes.truncated[rows] * TRUNCATED
        link.send(link.session.results(rows, now))

    def close(self) -> None:
        if self._link is not None:
            self._link.close("the run has ended")
        if self._lanes is not None:
            self._lanes.close()


def _still_there(seconds: float) -> None:
    """End this process unless this is called again, or a watch ends, within so many seconds and one more."""
    if seconds < math.inf:
        faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
