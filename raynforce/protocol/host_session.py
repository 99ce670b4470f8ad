"""The side that has the environments: what it is asked to do, where it writes results, and how it hands them over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.infos import Info
from raynforce.protocol.codec import (
    ENDED,
    ENDED_EPISODES,
    RESET,
    SEEDS,
    TIMING,
    join_states,
    result_flags,
    split_states,
)
from raynforce.protocol.frame import ROOM, Message, ProtocolError, Type, clean, sendable
from raynforce.protocol.handshake import Deadlines, Hello, Welcome
from raynforce.protocol.session import LEVELS, Envs, Meta, Outcome, Session
from raynforce.protocol.spaces import DTYPES, Spaces, misfits

Facts = Mapping[str, Any]


class ResetRequest(NamedTuple):
    envs: np.ndarray  # [K] env ids, as an index
    seeds: np.ndarray | None  # [K] uint64, or None: go on with the random streams


class StepRequest(NamedTuple):
    envs: np.ndarray  # [K] env ids, as an index
    actions: np.ndarray  # [K, ...] ready for the environment: start added, clipped to its bounds; read-only


class SnapshotRequest(NamedTuple):
    envs: np.ndarray  # [K] env ids, as an index; `snapshots` answers


class RestoreRequest(NamedTuple):
    envs: np.ndarray  # [K] env ids, as an index; `results` answers with their observations
    states: list[bytes]


class Rejected(NamedTuple):
    code: str
    text: str
    diff: object


class Slots:
    """Each env's last result, written in place as it is stepped, and sent again if the request is repeated."""

    def __init__(self, spaces: Spaces, envs: int, final: bool) -> None:
        self.obs = {leaf.path: np.zeros((envs, *leaf.shape), DTYPES[leaf.dtype]) for leaf in spaces.obs}
        self.reward = np.zeros(envs, np.float32)
        self.status = np.zeros(envs, np.uint8)  # TERMINATED, TRUNCATED, both or neither; `results` sets RESET
        # With `same_step`, an ended episode's last observation; `obs` then has the next one's first.
        self.final = {path: np.zeros_like(leaf) for path, leaf in self.obs.items()} if final else {}
        # If such a capability was agreed upon:
        self.episode_return, self.episode_length = np.zeros(envs, np.float64), np.zeros(envs, np.uint32)  # `episodes`
        self.seconds = np.zeros(envs, np.float32)  # `timing`: what the env itself took
        self.info: dict[int, Info] = {}  # `info`: numbers of an episode that ended, by env


class HostSession(Session):
    """Takes WELCOME and requests; `results`, `snapshots` and `broken` answer for each env exactly once."""

    def __init__(self, hello: Hello, now: float, deadlines: Deadlines | None = None) -> None:
        requests = Type.RESET, Type.STEP, Type.SNAPSHOT, Type.RESTORE
        super().__init__((Type.WELCOME, Type.REJECT, *requests), hello.envs, deadlines or Deadlines(), now)
        self.hello = hello
        self.welcome: Welcome | None = None
        self._handlers |= {Type.RESET: self._reset, Type.STEP: self._step}
        self._handlers |= {Type.SNAPSHOT: self._snapshot, Type.RESTORE: self._restore}
        self._failures: dict[int, Message] = {}  # of envs that broke, until they are reset
        self._saved: dict[int, bytes] = {}  # states that were the last answers

    def start(self) -> Message:
        return self.hello.message()

    def _greet(self, message: Message, now: float) -> Outcome:
        if message.type == Type.REJECT:
            meta = message.meta
            code, text = clean(meta.get("code", ""), 40), clean(meta.get("text", ""))
            self._end("refused", text)
            return Outcome([Rejected(code, text, meta.get("diff", []))])
        self.session = message.session
        if message.type != Type.WELCOME:
            raise ProtocolError("state", f"type {message.type} came before WELCOME")
        self.welcome = welcome = Welcome.read(message, self.hello)
        spaces, envs = self.hello.spaces, self.hello.envs
        self.codec.agree(spaces, welcome.autoreset, envs, welcome.minor, welcome.capabilities)
        self.deadlines = welcome.deadlines
        self.envs = Envs(envs, welcome.autoreset)
        self.slots = Slots(spaces, envs, final=welcome.autoreset == "same_step")
        self._unseeded = np.ones(envs, bool)
        self._flags = result_flags(welcome.capabilities)
        self._tells_info = "info" in welcome.capabilities
        self.open, self._heard = True, now
        return Outcome([welcome])

    def _reset(self, message: Message, now: float) -> Outcome:
        assert self.welcome is not None
        rows, fresh, again = self._asked_of(message)
        if not len(fresh):
            return Outcome(send=again)
        envs = rows[fresh]
        self.envs.begin(envs, message.sequence, reset=True)
        new = self._unseeded[envs]
        self._unseeded[envs] = False
        if message.flags & SEEDS:
            return Outcome([ResetRequest(envs, message.buffers[1][fresh])], again)
        # The first episode of each env begins with the seed of the WELCOME.
        events = [ResetRequest(envs[new], self.welcome.seeds[envs[new]]), ResetRequest(envs[~new], None)]
        return Outcome([event for event in events if len(event.envs)], again)

    def _step(self, message: Message, now: float) -> Outcome:
        assert self.welcome is not None
        rows, fresh, again = self._asked_of(message)
        if not len(fresh):
            return Outcome(send=again)
        actions = message.buffers[1]
        if len(fresh) < len(rows):
            rows, actions = rows[fresh], actions[fresh]
        if (bad := misfits(self.hello.spaces.action, actions, self.welcome.finite)) is not None:
            raise ProtocolError("action", f"STEP: the action of env {rows[bad][0]} is not in its space")
        self.envs.begin(rows, message.sequence, reset=False)
        self.slots.status[rows] = 0
        for env in rows.tolist() if self.slots.info else ():
            self.slots.info.pop(env, None)
        return Outcome([StepRequest(rows, actions)], again)

    def _snapshot(self, message: Message, now: float) -> Outcome:
        rows, fresh, again = self._asked_of(message)
        if not len(fresh):
            return Outcome(send=again)
        self.envs.begin_saving(rows[fresh], message.sequence)
        return Outcome([SnapshotRequest(rows[fresh])], again)

    def _restore(self, message: Message, now: float) -> Outcome:
        rows, fresh, again = self._asked_of(message)
        if not len(fresh):
            return Outcome(send=again)
        states = split_states(*message.buffers[1:])
        self.envs.begin(rows[fresh], message.sequence, reset=True)
        self._unseeded[rows[fresh]] = False
        return Outcome([RestoreRequest(rows[fresh], [states[row] for row in fresh.tolist()])], again)

    def _asked_of(self, message: Message) -> tuple[np.ndarray, np.ndarray, list[Message]]:
        """The rows of a request, which of them are asked for the first time, and the answers to the others."""
        rows = self.envs.rows(message.buffers[0])
        if self._closing_here:  # it crossed our CLOSE
            self.refused["closed"] += len(rows)
            return rows, rows[:0], []
        order = np.arange(len(rows))
        last = self.envs.request[rows]
        fresh = last < message.sequence
        for env in rows[fresh].tolist() if self._saved else ():
            self._saved.pop(env, None)
        if fresh.tobytes().count(1) == len(rows):
            return rows, order, []
        same = last == message.sequence
        owed = same & ((self.envs.phase[rows] == Envs.BUSY) | (self.envs.phase[rows] == Envs.SAVING))
        self._dropped("stale", ~fresh & ~same)
        self._dropped("duplicate", same)
        answered = rows[same & ~owed]
        broken = [env for env in answered.tolist() if env in self._failures]
        saved = [env for env in answered.tolist() if env in self._saved]
        whole = answered[~np.isin(answered, broken + saved)]
        again = [self._rows(whole)] if len(whole) else []
        again += [self._states(np.array(saved))] if saved else []
        return rows, order[fresh], again + [self._failures[env] for env in broken]

    def results(self, envs: np.ndarray, now: float) -> Message:
        """Send the slots of these envs, each of which must owe a result."""
        self._speaking()
        rows = self._owing(envs)
        first = self.envs.first[rows]
        if first.tobytes().count(1):
            self.slots.status[rows[first]], self.slots.reward[rows[first]] = RESET, 0
        status = self.slots.status[rows]
        if max(status.tobytes()) > RESET:
            raise UsageError(f"status {status.max()} of env {rows[status.argmax()]}; it must be 0 to 3")
        try:
            self.envs.finish(rows, status)
        except ProtocolError as error:
            raise UsageError(str(error)) from error
        for env in rows.tolist() if self._failures else ():
            self._failures.pop(env, None)
        self._progressed = now
        return self._rows(rows)

    def snapshots(self, envs: np.ndarray, states: Sequence[bytes], now: float) -> Message:
        """Send the states of these envs, each of which must owe one."""
        self._speaking()
        rows = self._owing(envs, Envs.SAVING)
        self._saved |= zip(rows.tolist(), states, strict=True)
        self.envs.phase[rows] = Envs.READY
        self._progressed = now
        return self._states(rows)

    def _states(self, rows: np.ndarray) -> Message:
        columns = join_states([self._saved[env] for env in rows.tolist()])
        ids, requests = rows.astype(np.uint32), self.envs.request[rows]
        return self._message(Type.SNAPSHOT, None, [ids, requests, *columns], len(rows))

    def _rows(self, rows: np.ndarray) -> Message:
        slots = self.slots
        status = slots.status[rows]
        over = rows[(status & ENDED) != 0] if status.tobytes().strip(b"\0") else rows[:0]
        columns = [rows.astype(np.uint32), self.envs.request[rows], slots.reward[rows], status]
        if self._flags & TIMING:
            columns.append(slots.seconds[rows])
        columns += [leaf.take(rows, 0) for leaf in slots.obs.values()]
        if self._flags & ENDED_EPISODES:
            columns += [slots.episode_return[over], slots.episode_length[over]]
        columns += [leaf.take(over, 0) for leaf in slots.final.values()]
        meta = self._told(over) if self._tells_info and slots.info and len(over) else None
        return self._message(Type.RESULT, meta, columns, len(rows), len(over), self._flags)

    def _told(self, over: np.ndarray) -> dict[str, Any]:
        told: dict[str, Info] = {}
        room = ROOM - len('{"info":{}}')
        for env in over.tolist():
            if info := self.slots.info.get(env):
                room -= len(json.dumps({str(env): info}, ensure_ascii=False).encode("utf-8", "replace"))
                if room < 0:
                    break
                told[str(env)] = info
        return {"info": told} if told else {}

    def broken(
        self, env: int, code: str, text: str, now: float, recoverable: bool = True, facts: Facts | None = None
    ) -> Message:
        """Report an env that broke, and may be reset if `recoverable`; `facts` are left out if too many or not JSON."""
        self._speaking()
        rows = self._owing(np.array([env]), Envs.BUSY, Envs.SAVING)
        meta: Meta = {"scope": "env", "recoverable": recoverable, "code": clean(code, 40), "text": clean(text)}
        if facts and sendable(meta | {"facts": facts}, Type.ERROR):
            meta["facts"] = facts
        ids, requests = rows.astype(np.uint32), self.envs.request[rows]
        self.envs.fail(rows, recoverable)
        self._failures[env] = message = self._message(Type.ERROR, meta, (ids, requests), 1)
        self._progressed = now
        return message

    def log(self, level: str, text: str) -> Message:
        self._speaking()
        if level not in LEVELS:
            raise UsageError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}")
        return self._message(Type.LOG, {"level": level, "text": clean(text)})

    def _owing(self, envs: np.ndarray, *phases: int) -> np.ndarray:
        try:
            rows = self.envs.rows(np.asarray(envs))
        except ProtocolError as error:
            raise UsageError(str(error)) from error
        phase = self.envs.phase[rows].tobytes()
        if not len(rows) or sum(map(phase.count, phases or (Envs.BUSY,))) < len(rows):
            idle = ~np.isin(self.envs.phase[rows], phases or (Envs.BUSY,))
            raise UsageError(f"env {rows[idle][0]} owes no result" if len(rows) else "there are no envs to answer for")
        return rows
