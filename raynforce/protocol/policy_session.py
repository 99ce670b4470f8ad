"""The side that chooses actions: it takes a host in, asks its envs to step, and is given whatever is ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.infos import NOTHING as NO_INFO
from raynforce.infos import Info, numbers
from raynforce.protocol.agents import impossible
from raynforce.protocol.codec import (
    BROKE,
    ENDED,
    ENDED_EPISODES,
    FIRST,
    RESET,
    SEEDS,
    TERMINATED,
    TIMING,
    TRUNCATED,
    join_states,
    split_states,
)
from raynforce.protocol.fields import flag, mapping, one_of, take, whole
from raynforce.protocol.frame import Message, ProtocolError, Type, clean
from raynforce.protocol.handshake import Hello, Offer, Welcome, reject
from raynforce.protocol.session import LEVELS, NOTHING, Envs, Note, Outcome, Session
from raynforce.protocol.spaces import DTYPES, forbidden, misfits
from raynforce.spaces import FORBIDS, MASK, forbids_all

_WRONG = "has a value that its space does not have"
_DAY = int(np.float32(86_400).view(np.uint32))


class Joined(NamedTuple):
    hello: Hello
    welcome: Welcome


class Results(NamedTuple):
    """Some envs are ready, in any order and of any requests. Arrays are read-only views of what came."""

    envs: np.ndarray  # [K] env ids, as an index
    obs: dict[str, np.ndarray]  # [K, ...] what the policy sees next; without `same_step`, an ended episode's last
    reward: np.ndarray  # [K] float32
    terminated: np.ndarray  # [K] bool
    truncated: np.ndarray  # [K] bool
    valid: np.ndarray  # [K] bool, False where this is only the first observation of an episode, and no env step
    ended: np.ndarray  # [E] rows above whose episode has ended
    final_obs: dict[str, np.ndarray]  # [E, ...] with `same_step`, their last observations
    episode_return: np.ndarray | None  # [E] float64, as the host counts it, with the capability `episodes`
    episode_length: np.ndarray | None  # [E] likewise
    seconds: np.ndarray | None = None  # [K] float32, what each env itself took, with the capability `timing`
    info: Mapping[int, Info] = NO_INFO  # numbers of episodes that ended, by env id, with the capability `info`

    def some(self, keep: np.ndarray) -> Results:
        stays = keep[self.ended]
        envs, bits = self.envs[keep], (self.terminated[keep], self.truncated[keep], self.valid[keep])
        obs = {path: column[keep] for path, column in self.obs.items()}
        ended = (np.cumsum(keep) - 1)[self.ended[stays]]
        final = {path: column[stays] for path, column in self.final_obs.items()}
        total, length = (None if c is None else c[stays] for c in (self.episode_return, self.episode_length))
        seconds = None if self.seconds is None else self.seconds[keep]
        info = self.info and {env: self.info[env] for env in envs.tolist() if env in self.info}
        return Results(envs, obs, self.reward[keep], *bits, ended, final, total, length, seconds, info)


class Broken(NamedTuple):
    """Envs that broke: their episodes are cut. They can be reset, unless they are gone."""

    envs: np.ndarray
    recoverable: bool
    code: str
    text: str
    facts: Mapping[str, Any] = {}  # more details, as the host gave them: any JSON, of any text


class Snapshots(NamedTuple):
    """Saved states of some envs; what is in them is between host and user."""

    envs: np.ndarray
    states: list[bytes]


class Overdue(NamedTuple):
    envs: np.ndarray


class Gathered(NamedTuple):
    """T steps of all envs, whose actions the host has chosen. Arrays are read-only views of what came."""

    request: int  # sequence number of the SAMPLE
    obs: dict[str, np.ndarray]  # [T+1, B, ...]
    action: np.ndarray  # [T, B, ...] zero-based choices, or before bounds
    logp: np.ndarray  # [T, B] float32
    reward: np.ndarray  # [T, B] float32
    status: np.ndarray  # [T, B] uint8
    version: np.ndarray  # [T, B] uint32, which policy version chose
    episode_return: np.ndarray  # [K] float64, of ended rows by time, then env
    episode_length: np.ndarray  # [K] uint32
    final_obs: dict[str, np.ndarray]  # [K, ...]
    info: Mapping[int, Info]  # numbers of episodes that ended, by their place in [K]
    broken: Mapping[int, tuple[str, str]]  # code and text of envs that broke, as far as told
    skipped: int  # steps since the last one that are no part of any


class PolicySession(Session):
    """Takes what hosts say; `reset`, `step`, `snapshot` and `restore` ask each env for one thing at a time."""

    def __init__(self, offer: Offer, now: float) -> None:
        takes = Type.HELLO, Type.RESULT, Type.SNAPSHOT, Type.LOG, Type.FRAGMENT
        super().__init__(takes, offer.most_envs, offer.deadlines, now)
        self.offer = offer
        self._requests: dict[int, Message] | None = None  # by number, if they may have to be sent again
        self.sampling: deque[int] = deque()  # sequence numbers of SAMPLEs whose fragments have not come
        self._versions: deque[int] = deque(maxlen=66)  # of policies that were sent, as many as fragments may be of
        self._handlers |= {Type.RESULT: self._result, Type.SNAPSHOT: self._snapshot, Type.LOG: self._log}
        self._handlers[Type.FRAGMENT] = self._fragment

    def _greet(self, message: Message, now: float) -> Outcome:
        if message.type != Type.HELLO:
            raise ProtocolError("state", f"type {message.type} came before HELLO")
        hello = Hello.read(message)
        if self.session:
            return self._resume(hello, now)
        self.welcome = welcome = self.offer.answer(hello)
        self.hello, self.session = hello, welcome.session
        self.envs = Envs(hello.envs, welcome.autoreset)
        length = 0 if welcome.inference is None else welcome.inference.length
        self.codec.agree(hello.spaces, welcome.autoreset, hello.envs, welcome.minor, welcome.capabilities, length)
        action = hello.spaces.action
        self._action_shape, self._action_dtype = action.shape, DTYPES[action.dtype]
        self._due = np.full(hello.envs, np.inf)
        self._none, self._all = np.zeros(0, np.intp), np.arange(hello.envs)
        self.open, self._heard = True, now
        return Outcome([Joined(hello, welcome)], [welcome.message()])

    def keep_requests(self) -> None:
        """From now on requests are kept until they are answered, so that the session can outlive its connection."""
        self._requests = {}

    def suspend(self, now: float) -> None:
        """The connection is lost: the next message is a HELLO of the same host, over another one."""
        self.open, self.ended, self._began = False, None, now

    def _resume(self, hello: Hello, now: float) -> Outcome:
        now_and_then = [(one.envs, one.spaces, one.agents) for one in (hello, self.hello)]
        if hello.resume != self.session or now_and_then[0] != now_and_then[1]:
            raise ProtocolError("session", "HELLO is not from the host that this session was with")
        self.open, self._heard = True, now
        busy = self._open_requests()
        late = self._due < np.inf
        self._due[late] = np.maximum(self._due[late], now + self.deadlines.step_ms / 1000)
        return Outcome([Joined(hello, self.welcome)], [self.welcome.message(), *busy])

    def _open_requests(self) -> list[Message]:
        """Those that some env still owes an answer to; the others are forgotten."""
        owing = set(self.envs.request[self.envs.phase == Envs.BUSY].tolist())
        self._requests = {n: message for n, message in (self._requests or {}).items() if n in owing}
        return list(self._requests.values())

    def _kept(self, message: Message) -> Message:
        if self._requests is not None:
            self._requests[message.sequence] = message
            if len(self._requests) > 2 * len(self.envs.phase) + 16:
                self._open_requests()
        return message

    def _last_word(self, error: ProtocolError) -> Message:
        return super()._last_word(error) if self.open else reject(error)

    def reset(self, envs: np.ndarray, now: float, seeds: np.ndarray | None = None) -> Message:
        """Begin new episodes. Without seeds, the first of an env begins with its WELCOME's, and later ones go on."""
        rows = self._begin(envs, True, now, self.deadlines.reset_ms)
        columns = [rows.astype(np.uint32)]
        if seeds is not None:
            columns.append(np.broadcast_to(seeds, rows.shape).astype(np.uint64))
        flags = SEEDS if seeds is not None else 0
        return self._kept(self._message(Type.RESET, None, columns, len(rows), flags=flags))

    def step(self, envs: np.ndarray, actions: np.ndarray, now: float) -> Message:
        """Step these envs with actions `[K, ...]` that are ready for them: start added, clipped to their bounds."""
        self._speaking()
        shape = (len(envs), *self._action_shape)
        if np.shape(actions) != shape:
            raise UsageError(f"actions have shape {np.shape(actions)}; expected {shape}")
        rows = self._begin(envs, False, now, self.deadlines.step_ms)
        columns = rows.astype(np.uint32), np.array(actions, self._action_dtype, order="C")
        return self._kept(self._message(Type.STEP, None, columns, len(rows)))

    def snapshot(self, envs: np.ndarray, now: float) -> Message:
        """Ask for the states of these envs, which owe nothing and are in an episode."""
        rows = self._begin(envs, None, now, self.deadlines.reset_ms)
        return self._kept(self._message(Type.SNAPSHOT, None, [rows.astype(np.uint32)], len(rows)))

    def restore(self, envs: np.ndarray, states: Sequence[bytes], now: float) -> Message:
        """Have these envs go on from saved states; first rows with their observations answer it."""
        self._speaking()
        if len(states) != len(envs):
            raise UsageError(f"{len(states)} states for {len(envs)} envs")
        columns = join_states(states)
        rows = self._begin(envs, True, now, self.deadlines.reset_ms)
        return self._kept(self._message(Type.RESTORE, None, [rows.astype(np.uint32), *columns], len(rows)))

    @property
    def saves(self) -> bool:
        return "snapshot" in self.welcome.capabilities

    def policy(self, number: int, arrays: Sequence[np.ndarray], schedules: Mapping[str, float]) -> Message:
        """Have the host act with this version: parameters, and of a normaliser shift and scale."""
        self._speaking()
        self._versions.append(number)
        meta = {"version": number, "schedules": dict(schedules)}
        return self._message(Type.POLICY, meta, [np.ascontiguousarray(array, "<f4") for array in arrays])

    def sample(self, seed: int) -> Message:
        """Ask for one more fragment, whose random streams follow from `seed`."""
        self._speaking()
        message = self._message(Type.SAMPLE, {"seed": seed})
        self.sampling.append(message.sequence)
        return message

    @property
    def asks(self) -> bool:
        return self.open and not (self.ended or self._closing_here or self._closing_there)

    def _begin(self, envs: np.ndarray, reset: bool | None, now: float, deadline_ms: int) -> np.ndarray:
        """`reset` is None for SNAPSHOT."""
        self._speaking()
        if self._closing_there:
            raise UsageError("the host is closing; its envs take no more requests")
        try:
            rows = self.envs.rows(np.asarray(envs))
            if not len(rows):
                raise ProtocolError("env", "there are no envs to ask")
            if reset is None:
                self.envs.begin_saving(rows, self._sequence + 1)
            else:
                self.envs.begin(rows, self._sequence + 1, reset)
        except ProtocolError as error:
            raise UsageError(str(error)) from error
        self._due[rows] = now + deadline_ms / 1000
        return rows

    def poll(self, now: float) -> Outcome:
        outcome = super().poll(now)
        if self.ended or not self.open:
            return outcome
        late = np.flatnonzero(self._due < now)
        if not len(late):
            return outcome
        self._due[late] = np.inf
        return Outcome([*outcome.events, Overdue(late)], outcome.send)

    def _result(self, message: Message, now: float) -> Outcome:
        ids, request, _, status, *_ = message.buffers
        rows, envs = self.envs.rows(ids), self.envs
        told = status.tobytes()
        ended = np.flatnonzero(status & ENDED) if told.strip(b"\0") else self._none
        if max(told) > RESET or len(ended) != message.ended:
            found = f"RESULT: status up to {status.max()}, {len(ended)} rows ended of {message.ended}"
            known = "known bits are 1 and 2, or 4 alone, and ended rows must be as many as said"
            raise ProtocolError("status", f"{found}; {known}")
        results = self._results(message, rows, ended)
        if message.meta and len(ended) and "info" in self.welcome.capabilities:
            results = results._replace(info=self._told(message.meta.get("info"), rows[ended]))
        if (owed := envs.owed(rows, request)) is not None:
            self._dropped("late", ~owed)
            results, status = results.some(owed), status[owed]
            if not len(results.envs):
                return NOTHING
        envs.finish(results.envs, status)
        self._due[results.envs] = np.inf
        bad, where = self._misfits(results)
        if bad is None:
            return Outcome([results])
        self._dropped("value", bad)
        broken = results.envs[bad]
        envs.fail(broken, True)
        fault = Broken(broken, True, "value", where)
        kept = results.some(~bad)
        return Outcome([kept, fault] if len(kept.envs) else [fault])

    def _snapshot(self, message: Message, now: float) -> Outcome:
        ids, request, sizes, states = message.buffers
        rows = self.envs.rows(ids)
        owed = self.envs.owed_states(rows, request)
        self._dropped("late", ~owed)
        found = [state for state, keep in zip(split_states(sizes, states), owed, strict=True) if keep]
        rows = rows[owed]
        self.envs.phase[rows] = Envs.READY
        self._due[rows] = np.inf
        return Outcome([Snapshots(rows, found)]) if len(rows) else NOTHING

    def _fragment(self, message: Message, now: float) -> Outcome:
        meta, leaves = message.meta, self.hello.spaces.obs
        request = whole(take(meta, "request", "FRAGMENT"), "request", 0, 1 << 53)
        if not self.sampling or request != self.sampling[0]:
            raise ProtocolError("state", f"FRAGMENT answers request {request}, which is not the oldest SAMPLE")
        seen, rest = message.buffers[: len(leaves)], message.buffers[len(leaves) :]
        action, logp, reward, status, version, total, length, *final = rest
        if ((status > ENDED + FIRST) & (status != BROKE)).any() or np.count_nonzero(status & ENDED) != message.ended:
            known = "known bits are 1, 2 and 4, or 8 alone, and ended rows must be as many as said"
            raise ProtocolError("status", f"FRAGMENT: status up to {status.max()}; {known}")
        self._require_possible(seen, final, action, (reward, logp, total), version, status != BROKE)
        self.sampling.popleft()
        paths = [leaf.path for leaf in leaves]
        info = {i: numbers(told) for i, told in _by_number(meta.get("info"), message.ended)}
        broken = {
            env: (clean(told.get("code", ""), 40), clean(told.get("text", "")))
            for env, told in _by_number(meta.get("broken"), message.envs)
            if isinstance(told, dict)
        }
        return Outcome(
            [
                Gathered(
                    request,
                    dict(zip(paths, seen, strict=True)),
                    action,
                    logp,
                    reward,
                    status,
                    version,
                    total,
                    length,
                    dict(zip(paths, final, strict=True)),
                    info,
                    broken,
                    whole(take(meta, "skipped", "FRAGMENT", 0), "skipped", 0, 1 << 53),
                )
            ]
        )

    def _require_possible(
        self,
        seen: Sequence[np.ndarray],
        final: Sequence[np.ndarray],
        action: np.ndarray,
        floats: Sequence[np.ndarray],
        version: np.ndarray,
        chosen: np.ndarray,
    ) -> None:
        spaces, where = self.hello.spaces, ""
        for leaf, columns in zip(spaces.obs, zip(seen, final, strict=True), strict=True):
            for column in columns:
                rows = column.reshape(-1, *leaf.shape)
                if len(rows) and misfits(leaf, rows, self.welcome.finite) is not None:
                    where = leaf.path
        choices = replace(spaces.action, start=(0,) * len(spaces.action.sizes))
        if misfits(choices, action.reshape(-1, *spaces.action.shape), True) is not None:
            where = "action"
        if not all(np.isfinite(column).all() for column in floats):
            where = "a reward, return or log-probability"
        paths = [leaf.path for leaf in spaces.obs]
        if MASK in paths and forbidden(seen[paths.index(MASK)][:-1][chosen], action[chosen], spaces.action):
            where = f"an action that {MASK} forbids, or {MASK} itself,"
        if where:
            raise ProtocolError("value", f"FRAGMENT: {where} has a value that cannot be")
        if not np.isin(version, list(self._versions)).all():
            sent = [*self._versions][-8:]
            raise ProtocolError("value", f"FRAGMENT: versions {np.unique(version)[:8]}; the newest sent are {sent}")

    def _results(self, message: Message, rows: np.ndarray, ended: np.ndarray) -> Results:
        _, _, reward, status, *rest = message.buffers
        memory = self.welcome.memory
        leaves, flags, seconds = () if memory else self.hello.spaces.obs, message.flags, None
        if flags & TIMING:
            seconds, rest = self._possible(rest[0]), rest[1:]
        obs = {leaf.path: column for leaf, column in zip(leaves, rest, strict=False)}
        rest = rest[len(leaves) :]
        episodes: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if flags & ENDED_EPISODES:
            episodes, rest = (rest[0], rest[1]), rest[2:]
        final = {leaf.path: column for leaf, column in zip(leaves, rest, strict=False)}
        if memory is not None:
            some = slice(None) if len(rows) == len(self._due) and (rows == self._all).all() else rows
            obs = {path: column[some] for path, column in memory.obs.items()}
            final = {path: column[rows[ended]] for path, column in memory.final.items()}
        if status.tobytes().strip(b"\0"):
            bits = (status & TERMINATED).astype(bool), (status & TRUNCATED).astype(bool), status != RESET
        else:
            bits = np.zeros(len(rows), bool), np.zeros(len(rows), bool), np.ones(len(rows), bool)
        return Results(rows, obs, reward, *bits, ended, final, *episodes, seconds)

    def _told(self, info: object, ended: np.ndarray) -> Mapping[int, Info]:
        """Numbers that envs tell of episodes; what cannot be is left out, and breaks nothing."""
        if not isinstance(info, dict):
            return NO_INFO
        found = {env: numbers(info.get(str(env))) for env in ended.tolist()}
        return {env: told for env, told in found.items() if told}

    def _possible(self, seconds: np.ndarray) -> np.ndarray:
        """Times that cannot be are worth no env: they become 0."""
        wrong = seconds.view(np.uint32) > _DAY  # negative ones, infinity and NaN are all larger
        if not np.count_nonzero(wrong):
            return seconds
        self._dropped("seconds", wrong)
        return np.where(wrong, np.float32(0), seconds)

    def _misfits(self, results: Results) -> tuple[np.ndarray | None, str]:
        """`[K]` rows with values that cannot be, and what is wrong with the last that were found."""
        bad, where, finite = None, "", self.welcome.finite
        nothing = np.zeros(len(results.envs), bool)
        if finite and (good := np.isfinite(results.reward)).tobytes().count(1) < len(good):
            bad, where = ~good, f"reward {_WRONG}"
        for leaf in self.hello.spaces.obs:
            found = misfits(leaf, results.obs[leaf.path], finite)
            if found is not None:
                bad, where = (nothing if bad is None else bad) | found, f"{leaf.path} {_WRONG}"
            if len(results.ended) and results.final_obs:
                found = misfits(leaf, results.final_obs[leaf.path], finite)
                if found is not None:
                    bad = (nothing if bad is None else bad).copy()
                    bad[results.ended[found]], where = True, f"the final {leaf.path} {_WRONG}"
        if MASK in results.obs:
            found = forbids_all(results.obs[MASK], self.hello.spaces.action.sizes)
            if len(results.ended) and results.final_obs:
                found |= self._cut_without_choice(results)
            elif self.welcome.autoreset != "same_step":
                found &= ~results.terminated
            if found.any():
                bad, where = (nothing if bad is None else bad) | found, f"{MASK} {FORBIDS}"
        if self.hello.agents is not None:
            same_step = self.welcome.autoreset == "same_step"
            running = ~nothing if same_step else ~(results.terminated | results.truncated)
            found, what = impossible(results.obs, self.hello.agents, running)
            if found.any():
                bad, where = (nothing if bad is None else bad) | found, what
        return bad, where

    def _cut_without_choice(self, results: Results) -> np.ndarray:
        """`[K]` episodes that were truncated, and whose last mask leaves nothing to choose."""
        found = np.zeros(len(results.envs), bool)
        found[results.ended] = forbids_all(results.final_obs[MASK], self.hello.spaces.action.sizes)
        return found & ~results.terminated

    def _error(self, message: Message, now: float) -> Outcome:
        if one_of(take(message.meta, "scope", "ERROR"), "scope", ("env", "session")) == "session":
            return super()._error(message, now)
        if not message.envs:
            raise ProtocolError("env", "ERROR: scope 'env' without envs")
        recoverable = flag(take(message.meta, "recoverable", "ERROR"), "recoverable")
        code, text = clean(take(message.meta, "code", "ERROR"), 40), clean(take(message.meta, "text", "ERROR"))
        facts = mapping(take(message.meta, "facts", "ERROR", {}), "facts")
        ids, request = message.buffers
        rows = self.envs.rows(ids)
        if (owed := self.envs.owed(rows, request)) is not None:
            owed |= self.envs.owed_states(rows, request)
            self._dropped("late", ~owed)
            rows = rows[owed]
        self.envs.fail(rows, recoverable)
        self._due[rows] = np.inf
        return Outcome([Broken(rows, recoverable, code, text, facts)]) if len(rows) else NOTHING

    def _log(self, message: Message, now: float) -> Outcome:
        level = one_of(take(message.meta, "level", "LOG"), "level", LEVELS)
        return Outcome([Note(level, clean(take(message.meta, "text", "LOG")))])


def _by_number(told: object, count: int) -> list[tuple[int, Any]]:
    """What a peer tells by the numbers of rows or envs; what is of none is left out."""
    if not isinstance(told, dict):
        return []
    return [(int(key), value) for key, value in told.items() if key.isdecimal() and len(key) < 12 and int(key) < count]
