"""Simulators as environments: the envs of a process as lanes, and as one vector environment."""

from __future__ import annotations

import math
import select
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raynforce.doorbell import Doorbell
from raynforce.envs.addresses import is_remote
from raynforce.envs.cost import PASSES, STEPS, TRIAL_SECONDS, Cost
from raynforce.envs.faults import EnvFault, count_break
from raynforce.envs.lanes import BrokenLane, Lanes, ParallelVector
from raynforce.envs.launching import Launched, is_simulator
from raynforce.envs.rows import Rows
from raynforce.envs.vector import EnvArgs, derive_seed, first_of_attempt
from raynforce.errors import EnvError, UsageError
from raynforce.infos import NOTHING, Info
from raynforce.protocol.channel import Link, Listener
from raynforce.protocol.handshake import Deadlines, Offer
from raynforce.protocol.policy_session import Broken, Overdue, Results
from raynforce.protocol.session import Ended
from raynforce.protocol.shared import SharedObs
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import ActionSpec, EnvSpec
from raynforce.trees import Tree

START_SECONDS = 60.0
LOOK = 1.0
"""Seconds between two looks at who is silent."""
_DAY = 86_400_000  # milliseconds


class Simulator:
    """A simulator process and the connection to it."""

    def __init__(self, env: str, envs: int, offer: Offer, seconds: float) -> None:
        """It has so many `seconds` to connect."""
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self.link: Link | None = None  # once it has connected
        self._listener = Listener("unix", offer)
        address = self._listener.address
        try:
            self.process = Launched(env, f"unix:@{address.where}", address.token, address.launch, envs)
        except BaseException:
            self._listener.close()
            raise

    def fileno(self) -> int:
        """Readable when it connects, or once it has, when it says something."""
        return self._listener.fileno() if self.link is None else self.link.fileno()

    def connect(self) -> Link | None:
        """The connection, if it is there by now; never waits. An `EnvError` with the cause if it will not come."""
        if self.link is None:
            self.link = self._listener.accept()
        if self.link is not None:
            return self.link
        env, process = self.process.env, self.process
        if self._listener.refused:
            raise EnvError(f"env {env!r} was refused ({next(iter(self._listener.refused))}){process.words()}")
        if process.ended():
            told = f"env {env!r} {process.ending()}, before it had connected"
            raise EnvError(f"{told}: `raynforce sim check COMMAND` tells what a simulator has to do")
        if time.monotonic() > self._until:
            process.kill()
            raise EnvError(f"env {env!r} has not connected within {self._seconds:g} s{process.words()}")
        return None

    def close(self) -> None:
        if self.link is not None:
            self.link.close("the trainer is done")
        self._listener.close()
        self.process.close()


class Simulators:
    """The envs of a simulator process, with the interface of `Lanes`.

    An env that breaks is reset by the simulator, a process that ends or hangs is started again; both begin new
    episodes, and `collect` tells of them as `Broken`. Other lanes go on. Lane i has the number `first` + i in seeds.
    """

    note = ""
    way_back = "as new episodes: the simulator cannot save them"
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
    ) -> None:
        self.count, self.hang_seconds = count, hang_seconds
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
        self._watched = -1
        try:
            self._start()
            while (link := self._joined()) is None:
                self.wait()
            hello = link.session.hello
            self.spec = EnvSpec(env, hello.spaces.obs, hello.spaces.action, self._args)
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
        lanes, actions = self._able(lanes, actions, now)
        if len(lanes) and self._link is not None and self._link.session.asks:
            self._link.send(self._link.session.step(lanes, actions, now))
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
        broken = self._replacements() if self._unreported else []
        if len(done) == 1:
            return done[0], broken
        return np.concatenate(done) if done else np.empty(0, np.int64), broken

    def overdue(self, now: float) -> list[BrokenLane]:
        """A process that hangs, or is silent, is started again; `collect` tells of its lanes when they are back."""
        self._look = now + min(LOOK, self.hang_seconds / 4)
        if (link := self._joined()) is not None:
            self._handle(link.poll(now))
        return []

    def wait(self, seconds: float | None = None) -> None:
        """Until there is something to `collect`, or to look after."""
        most = min(LOOK, self.hang_seconds / 4) if self._link is not None else 0.05
        self._poll.poll(most if seconds is None else max(0.0, min(seconds, most)))

    def step_all(self, actions: np.ndarray) -> list[BrokenLane]:
        """Step all lanes and wait for them; those that broke."""
        self.step(np.arange(self.count), actions)
        left, broken = self.count, []
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
        if self._link is not None:
            self._begin(np.arange(self.count))
        self._settle()

    def close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator = self._link = None
        if self._memory is not None:
            self._memory.close()
        self._poll.close()
        self._bell.close()

    # -- episodes -----------------------------------------------------------------------------------------

    def _begin(self, lanes: np.ndarray) -> None:
        """New episodes in these lanes, whose random streams begin with seeds of their own."""
        assert self._link is not None
        keys = [(self._sampler, self._first + lane, int(self.episodes[lane])) for lane in lanes.tolist()]
        seeds = np.array([derive_seed(self._seed, *key) for key in keys], np.uint64)
        self.rows.steps[lanes] = 0
        self._making |= set(lanes.tolist())
        if self._link.session.asks:
            self._link.send(self._link.session.reset(lanes, time.monotonic(), seeds))

    def _settle(self) -> None:
        """Wait for the first observations of new episodes."""
        while self._making:
            self.wait()
            self.collect()
        self._unreported.clear()  # nothing was asked of them

    def _take(self, results: Results) -> np.ndarray:
        """Write results into the rows; the lanes that have stepped."""
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
        if self._making:
            self._making -= set(lanes[~results.valid].tolist())
            lanes = lanes[results.valid]
        rows.steps[lanes] += 1
        self._stepped[lanes] += 1
        self._since[lanes] = math.inf
        if len(results.ended):
            rows.steps[over] = 0
        return lanes

    # -- faults -------------------------------------------------------------------------------------------

    def _handle(self, events: Sequence[Any]) -> list[np.ndarray]:
        """Act on what the simulator says; the lanes that have stepped."""
        done = []
        for event in events:
            if isinstance(event, Results):
                done.append(self._take(event))
            elif isinstance(event, Broken):
                for lane in event.envs.tolist():
                    self._lose(lane, "garbage" if event.code == "value" else "raised", event.text)
                self._begin(event.envs)
            elif isinstance(event, Overdue):
                self._restart("hung", f"it did not come back within {self.hang_seconds:g} s", kill=True)
                break
            elif isinstance(event, Ended):
                self._restart("died", event.reason)
                break
        return done

    def _replacements(self) -> list[BrokenLane]:
        """Lanes that are in new episodes, and were asked to step."""
        back = [i for i in self._unreported if i not in self._making and self._since[i] < math.inf]
        self.rows.reward[back], self.rows.terminated[back], self.rows.truncated[back] = 0.0, False, False
        self._since[back] = math.inf
        return [self._unreported.pop(lane) for lane in back]

    def _restart(self, kind: str, text: str, kill: bool = False) -> None:
        """The process is gone or hangs: another takes its place, and begins new episodes once it has connected."""
        assert self._simulator is not None
        if kill:
            self._simulator.process.kill()
        ending = f"the simulator {self._simulator.process.ending()}"
        text = f"{text}; {ending}" if kill else ending
        for lane in range(self.count):
            self._lose(lane, kind, text, alone=lane == 0)
        self._simulator.close()
        self._start()

    def _lose(self, lane: int, kind: str, text: str, alone: bool = True) -> None:
        number, steps = self._first + lane, int(self.rows.steps[lane])
        seed = derive_seed(self._seed, self._sampler, number, int(self.episodes[lane]))
        fault = EnvFault(self._env, self._args, kind, number, seed, steps, text)
        if alone:  # a process that ends is one fault, however many envs it has
            self._faults.append(fault)
        self._unreported.setdefault(lane, BrokenLane(lane, kind, text, fault.facts()))
        self._making.add(lane)
        self._breaks[lane] = count_break(fault, int(self._breaks[lane]), int(self._stepped[lane]))
        self._stepped[lane] = 0
        self.episodes[lane] += 1

    # -- the process --------------------------------------------------------------------------------------

    def _start(self) -> None:
        offer = patient_offer(self.hang_seconds, self._start_seconds, self._args)
        offer = replace(offer, memory=self._shared)
        self._simulator = Simulator(self._env, self.count, offer, self._start_seconds)
        self._link = None
        self._watch()

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
        hello = link.session.hello
        if hello.envs != self.count:
            raise UsageError(
                f"env {self._env!r} has {hello.envs} envs in a process, not {self.count}: give --envs {hello.envs}, or "
                "let it make as many as RAYNFORCE_ENVS says"
            )
        if hasattr(self, "spec") and Spaces.of(self.spec) != hello.spaces:
            raise EnvError(f"env {self._env!r} has other spaces than before it was started again")
        self._link = link
        self._watch()
        if hasattr(self, "spec"):
            self._begin(np.arange(self.count))
        return link

    def _watch(self) -> None:
        """Have the poll watch the right socket for the right things."""
        assert self._simulator is not None
        fd, writing = self._simulator.fileno(), self._link is not None and self._link.wants_write
        wanted = select.EPOLLIN | (select.EPOLLOUT if writing else 0)
        if fd != self._watched:  # a socket that is closed is not watched any more
            self._watched, self._wanted = fd, wanted
            self._poll.register(fd, wanted)
        elif wanted != self._wanted:
            self._wanted = wanted
            self._poll.modify(fd, wanted)


class SimulatorVector(ParallelVector):
    """The envs of a simulator as one vector environment. Episodes in flight cannot be saved: they start over."""

    _lanes: Simulators  # type: ignore[assignment]

    def __init__(self, lanes: Simulators) -> None:
        super().__init__(lanes)  # type: ignore[arg-type]

    def state(self) -> Tree:
        obs = {str(i): column.copy() for i, column in enumerate(self.current().values())}
        return {"kind": "simulator", "obs": obs, "episodes": self._lanes.episodes.copy()}

    def load(self, tree: Tree) -> list[str]:
        self._saved_obs(tree, "simulator")
        self.take_faults()
        self._lanes.begin_at(np.asarray(tree["episodes"]) + 1)
        self.restarted = list(range(self.num_envs))
        self._show()
        return [
            f"{self.num_envs} of {self.num_envs} running episodes of env {self.spec.env!r} start over: "
            "the simulator cannot save them"
        ]


def patient_offer(hang_seconds: float, start_seconds: float, config: Mapping[str, Any]) -> Offer:
    """What a simulator is offered. Neither side sends PING: who ends hangs up, and a trainer may be busy for long."""
    step_ms, reset_ms = (int(min(_DAY, 1000 * seconds)) for seconds in (hang_seconds, start_seconds))
    deadlines = Deadlines(step_ms=step_ms, reset_ms=reset_ms, ping_ms=_DAY, silence_ms=_DAY)
    return Offer(autoreset=("same_step",), capabilities=("timing", "info"), deadlines=deadlines, config=config)


def random_actions(action: ActionSpec, count: int, rng: np.random.Generator) -> np.ndarray:
    if action.kind == "box":
        low, high = (np.array(b).reshape(action.shape) for b in (action.low, action.high))
        low, high = np.where(np.isfinite(low), low, -1), np.where(np.isfinite(high), high, 1)
        return rng.uniform(low, high, (count, *action.shape))
    start = np.array(action.start or (0,) * len(action.sizes)).reshape(action.shape)
    return start + rng.integers(0, np.array(action.sizes).reshape(action.shape), (count, *action.shape))


def cost_of_simulator(env: str, args: Mapping[str, Any] | None, envs: int = 8) -> tuple[EnvSpec, Cost]:
    """What a simulator takes and gives, and what a step costs with so many envs in a process."""
    if is_remote(env):
        from raynforce.envs.remote import remote_lanes

        lanes: Simulators = remote_lanes(env, args, envs, seed=0, gateway=None, at_most=True)
        envs = lanes.count
    else:
        lanes = Simulators(env, args, envs, seed=0)
    rng, took = np.random.default_rng(0), array("d")
    try:
        until = time.monotonic() + TRIAL_SECONDS
        while len(took) < STEPS * PASSES and (not took or time.monotonic() < until):
            actions = random_actions(lanes.spec.action, envs, rng).astype(lanes.spec.action.dtype)
            began = time.perf_counter()
            lanes.step_all(actions)
            took.append((time.perf_counter() - began) / envs)
    finally:
        lanes.close()
    low, high = (float(x) for x in np.percentile(took, [10, 90]))
    return lanes.spec, Cost(min(took), sum(took) / len(took), (low, high), 0.0, envs * len(took))


def make_lanes(args: EnvArgs, host: int, attempt: int, hang_seconds: float) -> Lanes | Simulators:
    """The environments of an env host, which are stepped side by side."""
    first = host * args.num_envs
    if is_remote(args.env):
        from raynforce.envs.remote import remote_lanes

        how: dict[str, Any] = {"first": first, "attempt": attempt, "hang_seconds": hang_seconds}
        return remote_lanes(args.env, args.args, args.num_envs, seed=args.seed, gateway=args.gateway, **how)
    if is_simulator(args.env):
        where: dict[str, Any] = {"first": first, "attempt": attempt, "hang_seconds": hang_seconds}
        return Simulators(args.env, args.args, args.num_envs, seed=args.seed, **where)
    return Lanes(
        args.env,
        args.args,
        args.num_envs,
        seed=args.seed,
        first=first,
        parallel=args.parallel,
        attempt=attempt,
        hang_seconds=hang_seconds,
    )
