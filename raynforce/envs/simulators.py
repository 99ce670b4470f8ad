"""Simulators as environments: the envs of a process as lanes, through faults, saved states and replaced processes."""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raynforce.doorbell import Doorbell
from raynforce.envs.faults import CUT, KEPT, RECYCLED, EnvFault, count_break
from raynforce.envs.lanes import BrokenLane
from raynforce.envs.masks import require_declared
from raynforce.envs.rows import Rows
from raynforce.envs.simulator_process import START_SECONDS, Simulator, patient_offer
from raynforce.envs.vector import NEVER, Recycle, derive_seed, first_of_attempt
from raynforce.envs.wrappers import require_none
from raynforce.errors import EnvError, UsageError
from raynforce.infos import NOTHING, Info
from raynforce.memory import tree_bytes
from raynforce.protocol.channel import Link
from raynforce.protocol.frame import MOST_STATE
from raynforce.protocol.policy_session import Broken, Overdue, Results, Snapshots
from raynforce.protocol.session import Ended
from raynforce.protocol.shared import SharedObs
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree

LOOK = 1.0
"""Seconds between two looks at who is silent."""
LEAVE_SECONDS = 10.0
"""That episodes have at least to end in a process that was replaced."""


class Simulators:
    """The envs of a simulator process, with the interface of `Lanes`.

    An env that breaks is reset by the simulator, a process that ends or hangs is started again; both begin new
    episodes, and `collect` tells of them as `Broken`. Other lanes go on. Lane i has the number `first` + i in seeds.

    A process that is due to `recycle` is replaced: once another has connected, lanes leave the old one, when they are
    next asked to step if they can be saved, else when their episodes end; those that take too long are cut.
    """

    note = ""
    way_back = "as new episodes: the simulator cannot save them"
    saves = False  # whether lanes can be saved and loaded
    _memory: SharedObs | None = None  # that observations are in, if the simulator can

    def __init__(
        self,
        env: str,
        args: Mapping[str, Any] | None,
        count: int,
        *,
        seed: int,
        sampler: int = 0,
        first: int = 0,
        attempt: int = 0,
        hang_seconds: float = math.inf,
        start_seconds: float = START_SECONDS,
        recycle: Recycle = NEVER,
    ) -> None:
        require_none(env, args or {})
        self.count, self.hang_seconds, self._recycle = count, hang_seconds, recycle
        self._env, self._args = env, dict(args or {})
        self._seed, self._sampler, self._first = seed, sampler, first
        self._start_seconds = start_seconds
        self._since = np.full(count, math.inf)  # when a lane was asked to step, if it has not answered
        self._unreported: dict[int, BrokenLane] = {}  # lanes that begin another episode, until `collect` tells of it
        self._making: set[int] = set()  # those whose first observation is not there yet
        self._faults: list[EnvFault] = []
        self._info: dict[int, Info] = {}
        self._breaks, self._stepped = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._look = 0.0
        self._poll: Any = select.epoll()
        self._bell = Doorbell()  # rung for lanes that are back before they are asked to step
        self._poll.register(self._bell, select.EPOLLIN)
        self.episodes = np.full(count, first_of_attempt(attempt) if attempt else 0, np.int64)
        """`[N]` which of its episodes each lane's random stream began with."""
        self._simulator: Simulator | None = None
        self._link: Link | None = None  # to its process, once that has connected
        self._watched: dict[int, int] = {}  # what the poll watches sockets for
        self._saving: set[int] = set()  # lanes that `states` waits for
        self._saved: dict[int, bytes] = {}  # what came
        self._loading: set[int] = set()  # lanes that are to go on from a saved state
        self._unloaded: dict[int, str] | None = None  # during `load_states`: why lanes could not
        self._next: Simulator | None = None  # that is to replace the process, until it has connected
        self._old: Simulator | None = None  # the process that was replaced, while it has lanes
        self._leaving = np.zeros(count, np.bool_)  # lanes that it has
        self._held: dict[int, np.ndarray] = {}  # actions of lanes that are on their way from it
        self._states: dict[int, bytes] = {}  # of such lanes, while there is nobody to load them
        self._moving: set[int] = set()  # lanes that have stepped in it, and wait for a first observation elsewhere
        self._cut_at = self._put_off = 0.0  # when lanes leave it in any case; before, no other is started
        try:
            self._start()
            while (link := self._joined()) is None:
                self.wait()
            hello = link.session.hello
            require_declared(env, hello.spaces.obs, hello.spaces.action, hello.agents)
            self.spec = EnvSpec(env, hello.spaces.obs, hello.spaces.action, self._args, hello.agents)
            if link.session.saves:
                self.saves, self.way_back = True, "through the simulator's own snapshots"
            rows = self.rows = Rows(self.spec, count)
            if self._memory is not None:
                rows.obs, rows.final = self._memory.obs, self._memory.final
            self.obs, self.final = rows.obs, rows.final
            self.reward, self.seconds = rows.reward, rows.seconds
            self.terminated, self.truncated = rows.terminated, rows.truncated
            self._begin(np.arange(count))
            self._settle()
        except BaseException:
            self.close()
            raise

    # -- as `Lanes` ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable while there is something to `collect`."""
        fd: int = self._poll.fileno()
        return fd

    def step(self, lanes: np.ndarray, actions: np.ndarray) -> None:
        """Have these lanes step, `[K]`, with these actions, `[K, ...]`, ready for the environment. Returns at once."""
        now = time.monotonic()
        if self._old is not None:
            self._let_go(lanes, now)
        lanes, actions = self._able(lanes, actions, now)
        if self._old is not None and (leaving := self._leaving[lanes]).any():
            self._step_old(lanes[leaving], actions[leaving], now)
            lanes, actions = lanes[~leaving], actions[~leaving]
        if len(lanes) and self._link is not None and self._link.session.asks:
            self._link.send(self._link.session.step(lanes, actions, now))
            if self._link.wants_write:
                self._watch()

    def _able(self, lanes: np.ndarray, actions: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Those of the lanes that can step; `collect` tells of the others."""
        self._since[lanes] = now
        if not self._unreported:
            return lanes, actions
        able = np.array([lane not in self._unreported for lane in lanes.tolist()], np.bool_)
        if any(lane not in self._making for lane in lanes[~able].tolist()):
            self._bell.ring()
        return lanes[able], actions[able]

    def collect(self) -> tuple[np.ndarray, list[BrokenLane]]:
        """Lanes that are done with a step since this was last asked, `[K]`, and those that broke."""
        done: list[np.ndarray] = []
        self._bell.clear()
        if (link := self._joined()) is not None:
            if link.wants_write:
                link.flush()
                self._watch()
            now = time.monotonic()
            done = self._handle(link.receive(now))
            if now >= self._look:
                self.overdue(now)
        if self._old is not None or self._next is not None:
            done += self._replace()
        broken = self._replacements() if self._unreported else []
        if len(done) == 1:
            return done[0], broken
        return np.concatenate(done) if done else np.empty(0, np.int64), broken

    def overdue(self, now: float) -> list[BrokenLane]:
        """A process that hangs, or is silent, is started again; `collect` tells of its lanes when they are back."""
        self._look = now + min(LOOK, self.hang_seconds / 4)
        if (link := self._joined()) is not None:
            self._handle(link.poll(now))
        if self._old is not None and self._old.link is not None:
            self._handle(self._old.link.poll(now), self._old)
        if self._recycle != NEVER and self._next is self._old is None and self._link and now >= self._put_off:
            self._start_next(now)
        return []

    def wait(self, seconds: float | None = None) -> None:
        """Until there is something to `collect`, or to look after."""
        most = min(LOOK, self.hang_seconds / 4) if self._link is not None else 0.05
        self._poll.poll(most if seconds is None else max(0.0, min(seconds, most)))

    def step_all(self, actions: np.ndarray) -> list[BrokenLane]:
        """Step all lanes and wait for them; those that broke."""
        return self.step_some(np.arange(self.count), actions)

    def step_some(self, lanes: np.ndarray, actions: np.ndarray) -> list[BrokenLane]:
        """Step these lanes, all others being idle, and wait for them; those that broke."""
        broken: list[BrokenLane] = []
        left = len(lanes)
        if left:
            self.step(lanes, actions)
        while left:
            self.wait()
            done, lost = self.collect()
            broken += lost
            left -= len(done) + len(lost)
        return broken

    def busy_since(self) -> np.ndarray:
        """When each lane was asked to step, `[N]` in monotonic seconds; infinite where it is idle."""
        return self._since

    def threads(self) -> list[int]:
        return []

    def take_faults(self) -> list[EnvFault]:
        faults, self._faults = self._faults, []
        return faults

    def take_info(self) -> Mapping[int, Info]:
        if not self._info:
            return NOTHING
        info, self._info = self._info, {}
        return info

    def reset(self, seed: int | None = None) -> None:
        """Begin the next episode in all lanes, while they are idle; with `seed`, their first ones by it."""
        if seed is not None:
            self._seed = seed
        self.begin_at(self.episodes + 1 if seed is None else np.zeros_like(self.episodes))

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`reset` or `start_fresh` of all lanes, while they are idle."""
        if method == "start_fresh":
            self.begin_at(np.full_like(self.episodes, first_of_attempt(args[0][0])))
        else:
            self.reset(*args[0])
        return [None] * self.count

    def begin_at(self, episodes: np.ndarray) -> None:
        """Begin these episodes, `[N]` by lane, while all are idle."""
        self.episodes[:] = episodes
        self._leave_old()
        if self._link is not None:
            self._begin(np.arange(self.count))
        self._settle()

    def states(self) -> list[bytes | None]:
        """What each lane goes on from, while all are idle; None where that cannot be had, or a new episode begins."""
        self._saved, asked = {}, []
        if self.saves:
            asked = [i for i in range(self.count) if i not in self._making and i not in self._unreported]
        self._saving = set(asked)
        lanes = np.array(asked, np.intp)
        for link, some in ((None if self._old is None else self._old.link, True), (self._link, False)):
            part = lanes[self._leaving[lanes] == some]
            if link is not None and link.session.asks and len(part):
                link.send(link.session.snapshot(part, time.monotonic()))
            else:
                self._saving -= set(part.tolist())
        self._watch()
        while self._saving:
            self.wait()
            self.collect()
        return [self._saved.pop(lane, None) for lane in range(self.count)]

    def load_states(self, states: Sequence[bytes | None], episodes: np.ndarray, steps: np.ndarray) -> dict[int, str]:
        """Go on from saved states, while all are idle; lanes that cannot begin new episodes, and why."""
        self._leave_old()
        self._settle()
        self.episodes[:] = episodes
        self._unloaded = {i: "it was not saved" for i, state in enumerate(states) if state is None}
        left = [(i, state) for i, state in enumerate(states) if state is not None]
        try:
            while left:
                some: list[tuple[int, bytes]] = []
                size = 0
                while left and (not some or size + len(left[0][1]) <= MOST_STATE):
                    some.append(left.pop(0))
                    size += len(some[-1][1])
                self._load(some)
                while self._loading:
                    self.wait()
                    self.collect()
                left = [(i, state) for i, state in left if i not in self._unloaded]  # its process may have ended
            lost = self._unloaded
        finally:
            self._unloaded = None
        self._settle()
        self.rows.steps[:] = steps
        self.begin_anew(list(lost))
        return lost

    def breaks(self) -> dict[str, np.ndarray]:
        """How often lanes have broken in a row, and how long ago."""
        return {"breaks": self._breaks.copy(), "unbroken": self._stepped.copy()}

    def load_breaks(self, tree: Tree) -> None:
        self._breaks[:], self._stepped[:] = tree["breaks"], tree["unbroken"]

    def begin_anew(self, lanes: Sequence[int]) -> None:
        """The next episode in these lanes, while all are idle."""
        if lanes:
            self.episodes[lanes] += 1
            self._begin(np.array(lanes))
            self._settle()

    def close(self) -> None:
        if self._next is not None:
            self._next.process.hush()  # it will say that nobody answers
        for one in (self._old, self._next, self._simulator):
            if one is not None:
                one.close()
        self._simulator = self._link = self._old = self._next = None
        if self._memory is not None:
            self._memory.close()
        self._poll.close()
        self._bell.close()

    # -- episodes -----------------------------------------------------------------------------------------

    def _begin(self, lanes: np.ndarray) -> None:
        """New episodes in these lanes, whose random streams begin with seeds of their own."""
        if not len(lanes):
            return
        keys = [(self._sampler, self._first + lane, int(self.episodes[lane])) for lane in lanes.tolist()]
        seeds = np.array([derive_seed(self._seed, *key) for key in keys], np.uint64)
        self.rows.steps[lanes] = 0
        self._making |= set(lanes.tolist())
        if self._link is not None and self._link.session.asks:
            self._link.send(self._link.session.reset(lanes, time.monotonic(), seeds))

    def _settle(self) -> None:
        """Wait for the first observations of new episodes."""
        while self._making:
            self.wait()
            self.collect()
        self._unreported.clear()  # nothing was asked of them

    def _take(self, results: Results, simulator: Simulator | None) -> np.ndarray:
        """Write results into the rows; the lanes that have stepped."""
        arrived: list[int] = []
        if self._moving:
            here = np.array([lane in self._moving for lane in results.envs.tolist()], np.bool_) & ~results.valid
            if here.any():
                arrived, results = self._arrive(results.some(here)), results.some(~here)
        lanes, rows = results.envs, self.rows
        for path, column in results.obs.items() if self._memory is None else ():
            rows.obs[path][lanes] = column
        rows.reward[lanes] = results.reward
        rows.terminated[lanes], rows.truncated[lanes] = results.terminated, results.truncated
        if results.seconds is not None:
            rows.seconds[lanes] = results.seconds
        if len(results.ended):
            over = lanes[results.ended]
            for path, column in results.final_obs.items() if self._memory is None else ():
                rows.final[path][over] = column
            self._info.update(results.info)
        if self._making or self._loading:
            first = lanes[~results.valid].tolist()
            self._making.difference_update(first)
            loaded = [lane for lane in first if lane in self._loading]
            self._loading.difference_update(loaded)
            lanes = lanes[results.valid]
            self._go_on([lane for lane in loaded if lane in self._held])
        rows.steps[lanes] += 1
        self._stepped[lanes] += 1
        if len(results.ended):
            rows.steps[over] = 0
            if simulator is not None:  # one that others started is not ours to replace
                lanes = self._count_played(simulator, lanes, over)
        self._since[lanes] = math.inf
        return np.concatenate([lanes, np.array(arrived, lanes.dtype)]) if arrived else lanes

    def _count_played(self, simulator: Simulator, lanes: np.ndarray, over: np.ndarray) -> np.ndarray:
        """Episodes have ended in these lanes; `lanes` without those that go to another process for the next one."""
        simulator.played += len(over)
        if simulator is self._old and not self.saves:
            return self._move(lanes, over)
        if 0 < self._recycle.episodes <= simulator.played:
            self._look = 0.0
        return lanes

    # -- one process after another ------------------------------------------------------------------------

    def _start_next(self, now: float) -> None:
        """Start another process if this one is due to be replaced."""
        assert self._simulator is not None
        one, most = self._simulator, self._recycle
        if (
            0 < most.episodes <= one.played
            or 0 < 3600 * most.hours <= now - one.born
            or (most.bytes and tree_bytes(one.process.pid) >= most.bytes)
        ):
            try:
                self._next = self._launched()
            except UsageError as error:  # its program is not there any more
                self._keep(f"its process is due to be replaced, and {error}")
            self._watch()

    def _replace(self) -> list[np.ndarray]:
        """Look after the process that is to come and the one that is to go; lanes that have stepped in that."""
        done: list[np.ndarray] = []
        now = time.monotonic()
        if self._next is not None and self._simulator is not None:
            try:
                link = self._next.connect()
            except EnvError as error:
                self._keep(f"its process is due to be replaced, and {error}")
                return done
            if link is None:
                return done
            self._require_same(link)
            self._old, self._simulator, self._link, self._next = self._simulator, self._next, link, None
            self._leaving[:] = True
            self._cut_at = now + max(LEAVE_SECONDS, now - self._old.born)
            self._watch()
        if self._old is not None and (link := self._old.link) is not None:
            if link.wants_write:
                link.flush()
                self._watch()
            done = self._handle(link.receive(now), self._old)
        if self._old is not None and not self._leaving.any():
            self._leave_old()
        return done

    def _keep(self, cause: str) -> None:
        """The process that was to replace another is no good: it is tried again after a while."""
        for one in (self._next, self._simulator if self._old is not None else None):
            if one is not None:
                self._drop(one)
        if self._old is not None:
            self._simulator, self._link, self._old = self._old, self._old.link, None
            self._leaving[:] = False
        self._next = None
        assert self._simulator is not None
        now = time.monotonic()
        self._put_off = now + max(LOOK, now - self._simulator.born)
        self._faults.append(EnvFault(self._env, self._args, KEPT, None, None, 0, cause))
        self._watch()

    def _leave_old(self) -> None:
        """Nothing more is asked of the process that was replaced."""
        if self._old is not None:
            old, self._old = self._old, None
            self._leaving[:] = False
            told = f"its process was replaced after {old.played:,} episodes and {time.monotonic() - old.born:.0f} s"
            self._faults.append(EnvFault(self._env, self._args, RECYCLED, None, None, 0, told))
            self._drop(old)
            self._watch()

    def _let_go(self, lanes: np.ndarray, now: float) -> None:
        """Cut the episodes that keep lanes in the process that was replaced for too long."""
        if self.saves or now < self._cut_at:
            return
        late = lanes[self._leaving[lanes]]
        for lane in late.tolist():
            text = "its episode was cut: it did not end in a process that is to be replaced (sims.recycle)"
            number, steps = self._first + lane, int(self.rows.steps[lane])
            seed = derive_seed(self._seed, self._sampler, number, int(self.episodes[lane]))
            fault = EnvFault(self._env, self._args, CUT, number, seed, steps, text)
            self._faults.append(fault)
            self._unreported.setdefault(lane, BrokenLane(lane, CUT, text, fault.facts()))
        self._leaving[late] = False
        self.episodes[late] += 1
        self._begin(late)

    def _step_old(self, lanes: np.ndarray, actions: np.ndarray, now: float) -> None:
        """Step lanes of the process that was replaced; if they can be saved, they leave it first."""
        assert self._old is not None
        link = self._old.link
        if link is None or not link.session.asks:
            return  # it has ended, which `collect` will see
        if self.saves:
            self._held.update(zip(lanes.tolist(), actions.copy(), strict=True))
            link.send(link.session.snapshot(lanes, now))
        else:
            link.send(link.session.step(lanes, actions, now))
        if link.wants_write:
            self._watch()

    def _move(self, lanes: np.ndarray, over: np.ndarray) -> np.ndarray:
        """Lanes whose episodes have ended begin the next one in the new process; those that are done already."""
        self._leaving[over] = False
        self._moving.update(over.tolist())
        self.episodes[over] += 1
        self._begin(over)
        return lanes[~np.isin(lanes, over)]

    def _arrive(self, results: Results) -> list[int]:
        """First observations after `_move`: these lanes are done with the step that ended their last episodes."""
        lanes = results.envs
        for path, column in results.obs.items() if self._memory is None else ():
            self.rows.obs[path][lanes] = column
        self._since[lanes] = math.inf
        arrived: list[int] = lanes.tolist()
        self._making.difference_update(arrived)
        self._moving.difference_update(arrived)
        return arrived

    def _states_came(self, event: Snapshots) -> None:
        found = dict(zip(event.envs.tolist(), event.states, strict=True))
        for lane in self._saving & found.keys():
            self._saved[lane] = found.pop(lane)
            self._saving.discard(lane)
        if moving := [(lane, state) for lane, state in found.items() if lane in self._held]:
            self._leaving[[lane for lane, _ in moving]] = False
            self._load(moving)

    def _load(self, states: Sequence[tuple[int, bytes]]) -> None:
        """Have lanes go on from these states, as soon as there is a process."""
        self._loading |= {lane for lane, _ in states}
        if self._link is None or not self._link.session.asks:
            self._states.update(states)
            return
        lanes = np.array([lane for lane, _ in states])
        self._link.send(self._link.session.restore(lanes, [state for _, state in states], time.monotonic()))
        self._watch()

    def _go_on(self, lanes: Sequence[int]) -> None:
        """Step lanes that have moved."""
        if lanes and self._link is not None and self._link.session.asks:
            actions = np.stack([self._held.pop(lane) for lane in lanes])
            self._link.send(self._link.session.step(np.array(lanes), actions, time.monotonic()))
            self._watch()

    # -- faults -------------------------------------------------------------------------------------------

    def _handle(self, events: Sequence[Any], simulator: Simulator | None = None) -> list[np.ndarray]:
        """Act on what a simulator says, the present one if none is named; the lanes that have stepped."""
        done = []
        simulator = simulator or self._simulator
        for event in events:
            if isinstance(event, Results):
                done.append(self._take(event, simulator))
            elif isinstance(event, Snapshots):
                self._states_came(event)
            elif isinstance(event, Broken):
                self._broke(event)
            elif isinstance(event, Overdue):
                text = f"it did not come back within {self.hang_seconds:g} s"
                self._restart("hung", text, kill=True, simulator=simulator)
                break
            elif isinstance(event, Ended):
                self._restart("died", event.reason, simulator=simulator)
                break
        return done

    def _broke(self, event: Broken) -> None:
        lanes: list[int] = event.envs.tolist()
        if self._unloaded is not None and self._loading.issuperset(lanes):  # a state that cannot be loaded is no fault
            self._unloaded.update(dict.fromkeys(lanes, f"the simulator could not load it ({event.text})"))
            self._loading.difference_update(lanes)
            return
        for lane in lanes:
            self._lose(lane, "garbage" if event.code == "value" else "raised", event.text)
        self._leaving[event.envs] = False
        self._begin(event.envs)

    def _replacements(self) -> list[BrokenLane]:
        """Lanes that are in new episodes, and were asked to step."""
        back = [i for i in self._unreported if i not in self._making and self._since[i] < math.inf]
        self.rows.reward[back], self.rows.terminated[back], self.rows.truncated[back] = 0.0, False, False
        self._since[back] = math.inf
        return [self._unreported.pop(lane) for lane in back]

    def _restart(self, kind: str, text: str, kill: bool = False, simulator: Simulator | None = None) -> None:
        """A process is gone or hangs: another takes its place, and begins new episodes once it has connected."""
        simulator = simulator or self._simulator
        assert simulator is not None
        if kill:
            simulator.process.kill()
        ending = f"the simulator {simulator.process.ending()}"
        text = f"{text}; {ending}" if kill else ending
        old = simulator is self._old
        lanes = np.flatnonzero(self._leaving == old)
        if not len(lanes):
            self._keep(f"its process is due to be replaced, and the next one did not last: {text}")
            return
        for lane in lanes.tolist():
            self._lose(lane, kind, text, alone=lane == lanes[0])
        if old:
            self._leave_old()
            self._begin(lanes)
        else:
            self._drop(simulator)
            self._start()

    def _drop(self, simulator: Simulator) -> None:
        if self._watched.pop(fd := simulator.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)
        simulator.close()

    def _lose(self, lane: int, kind: str, text: str, alone: bool = True) -> None:
        number, steps = self._first + lane, int(self.rows.steps[lane])
        seed = derive_seed(self._seed, self._sampler, number, int(self.episodes[lane]))
        fault = EnvFault(self._env, self._args, kind, number, seed, steps, text)
        if alone:  # a process that ends is one fault, however many envs it has
            self._faults.append(fault)
        if self._unloaded is not None:
            self._unloaded[lane] = text
        if lane not in self._moving:  # its last episode has ended well
            self._unreported.setdefault(lane, BrokenLane(lane, kind, text, fault.facts()))
        self._held.pop(lane, None)
        self._states.pop(lane, None)
        self._saving.discard(lane)
        self._loading.discard(lane)
        self._making.add(lane)
        self._breaks[lane] = count_break(fault, int(self._breaks[lane]), int(self._stepped[lane]))
        self._stepped[lane] = 0
        self.episodes[lane] += 1

    # -- the process --------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._simulator = self._launched()
        self._link = None
        self._watch()

    def _launched(self) -> Simulator:
        offer = patient_offer(self.hang_seconds, self._start_seconds, self._args)
        return Simulator(self._env, self.count, replace(offer, memory=self._shared), self._start_seconds)

    def _shared(self, spaces: Spaces, envs: int) -> SharedObs:
        """The memory for observations: the same for a process and the one that takes its place."""
        if self._memory is None:
            self._memory = SharedObs(spaces, envs)
        return self._memory

    def _joined(self) -> Link | None:
        """The connection, as soon as there is one."""
        if self._link is not None or self._simulator is None:
            return self._link
        try:
            link = self._simulator.connect()
        except EnvError as error:
            if not hasattr(self, "spec"):  # the first one: it says best what is wrong
                raise
            self._restart("died", str(error))
            return None
        if link is None:
            return None
        self._require_same(link)
        self._link = link
        self._watch()
        if hasattr(self, "spec"):
            self._begin(np.array(sorted(self._making), np.intp))
            states, self._states = self._states, {}
            if states:
                self._load(list(states.items()))
        return link

    def _require_same(self, link: Link) -> None:
        """The envs and spaces that are expected."""
        hello = link.session.hello
        if hello.envs != self.count:
            raise UsageError(
                f"env {self._env!r} has {hello.envs} envs in a process, not {self.count}: give --envs {hello.envs}, or "
                "let it make as many as RAYNFORCE_ENVS says"
            )
        if hasattr(self, "spec") and (Spaces.of(self.spec), self.spec.agents) != (hello.spaces, hello.agents):
            raise EnvError(f"env {self._env!r} has other spaces or agents than before it was started again")

    def _watch(self) -> None:
        """Have the poll watch the right sockets for the right things."""
        found = [one for one in (self._simulator, self._old, self._next) if one is not None]
        writes = [one.link is not None and one.link.wants_write for one in found]
        wanted = {
            one.fileno(): select.EPOLLIN | (select.EPOLLOUT if writing else 0)
            for one, writing in zip(found, writes, strict=True)
        }
        for fd in self._watched.keys() - wanted.keys():
            with contextlib.suppress(OSError):  # a socket that is closed is not watched any more
                self._poll.unregister(fd)
        for fd, mask in wanted.items():
            if fd not in self._watched:
                self._poll.register(fd, mask)
            elif mask != self._watched[fd]:
                self._poll.modify(fd, mask)
        self._watched = wanted
