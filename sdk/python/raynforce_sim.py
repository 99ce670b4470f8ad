"""Raynforce: a simulator in another Python as an environment. One file, numpy alone, Python 3.9 or newer: copy it.

    import raynforce_sim as sim

    class Pendulum:
        observation_space = sim.box((3,))
        action_space = sim.box((1,), low=-2, high=2)

        def reset(self, seed): ...            # returns the first observation
        def step(self, action): ...           # returns observation, reward, terminated, truncated

    sim.serve(Pendulum)

Then: raynforce train ppo "sim:/path/to/other/python pendulum.py" --envs 16

An observation is an array, or a dictionary of arrays with `observation_space` a dictionary of the same keys. The
class gets the settings (`--set env_args.NAME=…`) as keyword arguments. `step` may return a fifth value, numbers of an
episode that ends. Environments with gymnasium's interface (`reset(*, seed)` that returns a pair) are served as well.
With `save_state()` and `load_state(state)`, as Raynforce's own environments have them, episodes come back exactly after
a resume: `save_state` returns bytes, or dicts and lists of numpy arrays and of None, bool, int, float and str;
`load_state` gets the same after a reset, and `np_random` is saved beside.

Environments of several agents have PettingZoo's methods, parallel or AEC; the package itself is not needed. Their
spaces may be the above: `def observation_space(self, agent): return sim.box((3,))`. The wire is docs/protocol.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import inspect
import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
import zlib

import numpy as np

HEADER = struct.Struct("<4sBBBBQQIIHHIQ")
HELLO, WELCOME, REJECT, RESET, STEP, RESULT, ERROR, PING, PONG, LOG, CLOSE, SNAPSHOT, RESTORE = range(1, 14)
TERMINATED, TRUNCATED, FIRST = 1, 2, 4
EPISODES, TIMING, SEEDS = 1, 2, 1
MOST_STATE, MOST_BODY = 1 << 26, 1 << 30
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")


class Refused(Exception):
    """The trainer does not take this simulator in."""


class Over(Exception):
    """The trainer is done."""


class Violation(Exception):
    """The trainer broke the protocol."""


# -- spaces -----------------------------------------------------------------------------------------------


def box(shape, dtype="float32", low=None, high=None):
    """Numbers; `box((84, 84, 4), "uint8")` is an image. Bounds are for actions."""
    leaf = {"kind": "box", "shape": [int(n) for n in shape], "dtype": np.dtype(dtype).name}
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            flat = np.broadcast_to(np.asarray(bound, float), shape).reshape(-1)
            leaf[name] = [float(x) if np.isfinite(x) else None for x in flat]
    return leaf


def discrete(count, start=0):
    """One of `count` choices, from `start`."""
    return {"kind": "discrete", "shape": [], "dtype": "int64", "sizes": [int(count)], "start": [int(start)]}


def multidiscrete(counts):
    """Several choices at once."""
    return {"kind": "multidiscrete", "shape": [len(counts)], "dtype": "int64", "sizes": [int(n) for n in counts],
            "start": [0] * len(counts)}  # fmt: skip


def _leaf(space, action):
    """One of the above, or a space of gymnasium's."""
    if isinstance(space, dict):
        return dict(space)
    kind = type(space).__name__
    if kind == "Discrete":
        return discrete(space.n, getattr(space, "start", 0))
    if kind == "MultiDiscrete":
        return multidiscrete(np.asarray(space.nvec).reshape(-1))
    if kind == "MultiBinary":
        return {"kind": "multibinary", "shape": [int(n) for n in space.shape], "dtype": "int8"}
    if kind == "Box":
        dtype = "uint8" if np.dtype(space.dtype) == bool else space.dtype
        return box(space.shape, dtype, space.low, space.high) if action else box(space.shape, dtype)
    raise TypeError(f"{space!r} is no space that can be served: use box, discrete or multidiscrete")


def _leaves(space, path="obs"):
    entries = getattr(space, "spaces", space if isinstance(space, dict) and "kind" not in space else None)
    if isinstance(entries, dict):
        return [leaf for key, below in entries.items() for leaf in _leaves(below, f"{path}/{key}")]
    leaf = {"path": path, **_leaf(space, False)}
    if path == "obs/action_mask" and leaf["dtype"] in ("uint8", "int8"):
        leaf["kind"] = "multibinary"  # flags, also if they were declared as a Box
    return [leaf]


def _value(obs, path):
    for key in path.split("/")[1:]:
        obs = obs[key]
    return obs


# -- saved states: JSON with the places of arrays and bytes that follow it, under a checksum ---------------


def _dumped(value):
    parts, at = [], 0

    def placed(kind, data, *more):
        nonlocal at
        parts.append(data)
        at += len(data)
        return {kind: [at - len(data), len(data), *more]}

    def walk(value):
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, (bytes, bytearray)):
            return placed("bytes", bytes(value))
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
            array = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            return placed("array", array.tobytes(), array.dtype.str, list(value.shape), isinstance(value, np.generic))
        if isinstance(value, list):
            return {"list": [walk(one) for one in value]}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {key: walk(one) for key, one in value.items()}}
        raise TypeError(f"a state has a {type(value).__name__}; it may have bytes, dicts with text as keys, lists, "
                        "numpy arrays of numbers, None, bool, int, float and str")  # fmt: skip

    text = json.dumps(walk(value)).encode()
    body = len(text).to_bytes(8, "little") + text + b"".join(parts)
    return b"RPY1" + zlib.crc32(body).to_bytes(4, "little") + body


def _loaded(data):
    body = data[8:]
    if data[:4] != b"RPY1" or len(data) < 16 or zlib.crc32(body) != int.from_bytes(data[4:8], "little"):
        raise ValueError("a state that was not saved by such a simulator, or is damaged")
    start = 8 + int.from_bytes(body[:8], "little")

    def walk(value):
        if not isinstance(value, dict):
            return value
        ((kind, found),) = value.items()
        if kind == "dict":
            return {key: walk(one) for key, one in found.items()}
        if kind == "list":
            return [walk(one) for one in found]
        part = body[start + found[0] : start + found[0] + found[1]]
        if kind == "bytes":
            return part
        array = np.frombuffer(part, found[2]).reshape(found[3])
        array = array.astype(array.dtype.newbyteorder("="))  # a copy, which may be written to
        return array[()] if found[4] else array

    return walk(json.loads(body[8:start]))


def _generator(env):
    """gymnasium's `np_random`, if it has been made."""
    found = getattr(getattr(env, "unwrapped", env), "_np_random", None)
    return found if isinstance(found, np.random.Generator) else None


def _plain(state):
    """A generator's state without numpy's own numbers."""
    if isinstance(state, dict):
        return {key: _plain(one) for key, one in state.items()}
    return int(state) if isinstance(state, np.integer) else state


# -- several agents ---------------------------------------------------------------------------------------


def _of_agents(env):
    """Whether it has the methods of a PettingZoo environment."""
    return hasattr(env, "possible_agents") and all(
        callable(getattr(env, name, None)) for name in ("observation_space", "action_space", "step", "reset")
    )


class _Joined:
    """An environment of several agents as one: what all see, get and do, in the order that docs/protocol.md says."""

    def __init__(self, env):
        self.env, self.turns = env, hasattr(env, "agent_iter")
        self.unwrapped = getattr(env, "unwrapped", env)
        names, count = list(env.possible_agents), len(env.possible_agents)
        if not names:
            sys.exit(f"{type(env).__name__} has no agents: its possible_agents is empty")
        self.index = {name: i for i, name in enumerate(names)}
        self.leaves = [_leaves(env.observation_space(name)) for name in names]
        self.actions = [_leaf(env.action_space(name), True) for name in names]
        kinds, self.places = [], []  # of each agent: its kind, and its row in it
        for agent, found in enumerate(zip(self.leaves, self.actions)):
            kind = next((k for k in kinds if (k["obs"], k["action"]) == found), None)
            if kind is None:
                kind = {"agents": [], "obs": found[0], "action": found[1]}
                kinds.append(kind)
            self.places.append((kinds.index(kind), len(kind["agents"])))
            kind["agents"].append(agent)
        self.observation_space = {"reward": box((count,)), "flags": box((3, count), "uint8")}
        self.observation_space["flags"]["kind"] = "multibinary"
        for k, kind in enumerate(kinds):
            rows = len(kind["agents"])
            for i, leaf in enumerate(kind["obs"]):
                all_of = {**leaf, "shape": [rows, *leaf["shape"]]}
                del all_of["path"]
                if "sizes" in leaf:
                    all_of.update(kind="multidiscrete", sizes=leaf["sizes"] * rows, start=leaf["start"] * rows)
                self.observation_space[f"seen_{k}_{i}"] = all_of
        try:
            state = int(np.prod(env.state_space.shape))
        except Exception:  # most have none
            state = 0
        if state:
            self.observation_space["state"] = box((state,))
        bounds, self.slices = [], []
        for leaf in self.actions:
            size = int(np.prod(leaf["shape"]))
            self.slices.append(slice(len(bounds), len(bounds) + size))
            start, sizes = leaf.get("start"), leaf.get("sizes")
            none = [None] * size
            if sizes is None:
                bounds += zip(leaf.get("low", none), leaf.get("high", none))
            else:
                bounds += [(a, a + n - 1) for a, n in zip(start, sizes)]
        self.action_space = box((len(bounds),))
        self.action_space.update(low=[low for low, _ in bounds], high=[high for _, high in bounds])
        self.agents = {"names": [str(name) for name in names], "turns": self.turns, "kinds": kinds, "state": state}
        self.seen = {name: np.zeros(leaf["shape"], leaf["dtype"]) for name, leaf in self.observation_space.items()}
        self.reward, self.flags = self.seen["reward"], self.seen["flags"]
        if all(callable(getattr(env, name, None)) for name in ("save_state", "load_state")):
            self.save_state, self.load_state = self._save, self._load

    def reset(self, seed):
        for name, leaf in self.observation_space.items():
            self.seen[name][...] = np.reshape(leaf.get("start", 0), leaf["shape"] if "start" in leaf else ())
        found = self.env.reset(seed=seed % (1 << 32))
        if self.turns:
            self._to_next()
        else:
            self._show(*found)
            self.flags[0, [self.index[name] for name in self.env.agents]] = 1
        return self._given()

    def step(self, action):
        acting = np.flatnonzero(self.flags[0]).tolist()
        self.reward[:], self.flags[:] = 0, 0
        moves = {self.env.possible_agents[i]: self._move(i, action[self.slices[i]]) for i in acting}
        if self.turns:
            (move,) = moves.values()
            self.env.step(move)
            self._to_next()
        else:
            seen, rewards, terminated, truncated, infos = self.env.step(moves)
            self._show(seen, infos)
            for name in moves:
                i, left = self.index[name], name not in self.env.agents
                self.reward[i] = rewards.get(name, 0.0)
                self.flags[1, i] = bool(terminated.get(name, False))
                self.flags[2, i] = bool(truncated.get(name, left)) and not self.flags[1, i]
            for name in self.env.agents:
                i = self.index[name]
                self.flags[0, i] = not (self.flags[1, i] or self.flags[2, i])
        return self._given(), float(self.reward.sum()), not self.flags[0].any(), False

    def _move(self, agent, part):
        leaf = self.actions[agent]
        if leaf["kind"] == "discrete":
            return round(float(part[0]))
        whole = leaf["kind"] != "box"
        return (np.rint(part) if whole else part).astype(leaf["dtype"]).reshape(leaf["shape"])

    def _to_next(self):
        """Let agents that are over leave, up to one that is to move."""
        while self.env.agents:
            name = self.env.agent_selection
            seen, reward, terminated, truncated, info = self.env.last()
            self._show({name: seen}, {name: info})
            self.reward[self.index[name]] += reward
            if not (terminated or truncated):
                self.flags[0, self.index[name]] = 1
                return
            self.flags[1 if terminated else 2, self.index[name]] = 1
            self.env.step(None)

    def _show(self, seen, infos):
        for name, obs in seen.items():
            agent = self.index[name]
            shown = any(leaf["path"] == "obs/action_mask" for leaf in self.leaves[agent])
            if not shown and "action_mask" in (infos.get(name) or ()):
                raise ValueError(f"{name} has an action_mask in its info: give it as a key of what it sees, a dict")
            kind, row = self.places[agent]
            for i, leaf in enumerate(self.leaves[agent]):
                self.seen[f"seen_{kind}_{i}"][row] = np.reshape(_value(obs, leaf["path"]), leaf["shape"])

    def _given(self):
        if "state" in self.seen:
            self.seen["state"][:] = np.reshape(self.env.state(), -1)
        return self.seen

    def _save(self):
        return {"env": self.env.save_state(), "seen": {name: array.copy() for name, array in self.seen.items()}}

    def _load(self, state):
        self.env.load_state(state["env"])
        for name, array in state["seen"].items():
            self.seen[name][...] = array


# -- one session ------------------------------------------------------------------------------------------


class _Lane:
    """One env: its last answer, and what it is at."""

    def __init__(self):
        self.env = None
        self.request, self.busy, self.failure = 0, False, None
        self.stream, self.seeded = 0, False
        self.total, self.length = 0.0, 0
        self.row = None  # reward, status, seconds, obs, final, return, length, info
        self.state = None  # bytes, if that was its last answer

    def seed(self):
        """The first episode of a stream has its seed, each further one a seed of its own."""
        if self.seeded:
            self.stream = int(np.random.SeedSequence(self.stream).generate_state(1, np.uint64)[0])
        self.seeded = True
        return self.stream


class _Host:
    def __init__(self, connection, make, envs, name, who, again=None):
        """`who` is launch and token; `again` makes another connection once this one is lost, if it can."""
        self.connection, self.again = connection, again
        self.make = lambda config: _Joined(made) if _of_agents(made := make(config)) else made
        self.lanes = [_Lane() for _ in range(envs)]
        self.lock = threading.Lock()
        self.session = self.sequence = self.minor = self.flags = 0
        self.progress = self.heard = time.monotonic()
        self.requests = queue.SimpleQueue()
        self.silence, self.ping, self.done = 30.0, 30.0, None
        first = self.lanes[0].env = self.make({})
        self.obs, self.action = _leaves(first.observation_space), _leaf(first.action_space, True)
        self.dtypes = {leaf["path"]: np.dtype(leaf["dtype"]).newbyteorder("<") for leaf in self.obs}
        self.shapes = {leaf["path"]: tuple(leaf["shape"]) for leaf in self.obs}
        self.like_gymnasium = "seed" in (p := inspect.signature(first.reset).parameters) and (
            p["seed"].kind is inspect.Parameter.KEYWORD_ONLY
        )
        self.can_save = all(callable(getattr(first, name, None)) for name in ("save_state", "load_state"))
        meta = {
            "protocol": {"major": 1, "minor_min": 0, "minor_max": 0},
            "software": {"name": name, "version": "0"},
            "pid": os.getpid(),
            "spaces": {"obs": self.obs, "action": self.action},
            "autoreset": ["same_step"],
            "capabilities": ["episodes", "timing", "info"] + ["snapshot"] * self.can_save,
        }
        if isinstance(first, _Joined):
            meta["agents"] = first.agents
        launch, token = who
        if launch:
            proof = hmac.new(token, b"raynforce hello " + launch.encode(), hashlib.sha256).hexdigest()
            meta.update(launch=launch, proof=proof)
        self.meta = meta
        self._send(HELLO, meta, envs=envs, sequence=0)

    # -- what goes

    def _send(self, kind, meta=None, buffers=(), envs=0, ended=0, flags=0, sequence=None):
        text = json.dumps(meta).encode() if meta else b""
        text += b" " * (-len(text) % 8)
        parts = []
        for buffer in buffers:
            data = np.ascontiguousarray(buffer).tobytes()
            parts += [data, bytes(-len(data) % 8)]
        body = b"".join(parts)
        with self.lock:
            if sequence is None:
                self.sequence += 1
                sequence = self.sequence
            sizes = (envs, ended, len(buffers), 0, len(text), len(body))
            session = 0 if kind == HELLO else self.session
            head = HEADER.pack(b"RAYN", 1, self.minor, kind, flags, session, sequence, *sizes)
            try:
                self.connection.sendall(head + text + body)
            except OSError:
                if self.again is None or not self.session:
                    raise  # else it is asked for again, over another connection

    def _send_rows(self, ids):
        rows = [self.lanes[i].row for i in ids]
        ended = [row for row in rows if row["status"] & (TERMINATED | TRUNCATED)]
        column = lambda name, dtype, some=rows: np.array([row[name] for row in some], dtype)  # noqa: E731
        buffers = [np.array(ids, "<u4"), np.array([self.lanes[i].request for i in ids], "<u8")]
        buffers += [column("reward", "<f4"), column("status", "u1")]
        if self.flags & TIMING:
            buffers.append(column("seconds", "<f4"))
        buffers += [np.stack([row["obs"][path] for row in rows]) for path in self.shapes]
        if self.flags & EPISODES:
            buffers += [column("return", "<f8", ended), column("length", "<u4", ended)]
        for path, shape in self.shapes.items():
            final = [row["final"][path] for row in ended]
            buffers.append(np.stack(final) if final else np.empty((0, *shape), self.dtypes[path]))
        told = {str(i): self.lanes[i].row["info"] for i in ids if self.lanes[i].row["info"]} if self.info else {}
        meta = {"info": told} if told and len(json.dumps(told)) < 16_000 else None
        self._send(RESULT, meta, buffers, len(ids), len(ended), self.flags)

    def _send_states(self, ids):
        while ids:
            some, size = [], 0
            while ids and (not some or size + len(self.lanes[ids[0]].state) <= MOST_STATE):
                size += len(self.lanes[ids[0]].state)
                some.append(ids.pop(0))
            states = [self.lanes[i].state for i in some]
            columns = [np.array(some, "<u4"), np.array([self.lanes[i].request for i in some], "<u8")]
            columns += [np.array([len(state) for state in states], "<u8"), np.frombuffer(b"".join(states), "u1")]
            self._send(SNAPSHOT, None, columns, len(some))

    def _say_error(self, recoverable, code, text):
        meta = {"scope": "session", "recoverable": recoverable, "code": code, "text": text}
        self._send(ERROR, meta, [np.empty(0, "<u4"), np.empty(0, "<u8")])

    def _send_broken(self, i):
        meta = {"scope": "env", "recoverable": True, "code": "raised", "text": self.lanes[i].failure}
        self._send(ERROR, meta, [np.array([i], "<u4"), np.array([self.lanes[i].request], "<u8")], 1)

    # -- what comes, read in a thread of its own so that PING is answered while an env steps

    def _read(self, count):
        parts = []
        while count:
            data = self.connection.recv(min(count, 1 << 20))
            if not data:
                raise ConnectionError("the trainer has closed the connection")
            self.heard = time.monotonic()
            parts.append(data)
            count -= len(data)
        return b"".join(parts)

    def _message(self):
        magic, major, minor, kind, flags, session, sequence, envs, _, _, _, meta, body = HEADER.unpack(self._read(48))
        if magic != b"RAYN" or (major != 1 and kind != REJECT):
            raise Violation("this is another protocol")
        if meta > 1 << 18 or body > MOST_BODY or envs > len(self.lanes):
            raise Violation("a message that is too large")
        if kind == RESTORE and body > 4 * envs + 4 + envs * (8 + MOST_STATE):
            raise Violation("a message that is too large")
        text, data = self._read(meta), self._read(body)
        try:
            known = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise Violation("a meta that is not JSON") from error
        return kind, minor, flags, session, sequence, envs, known, data

    def greet(self):
        self.connection.settimeout(30 if self.again is None else None)  # others may be served first
        kind, minor, _, session, _, _, meta, data = self._message()
        self.connection.settimeout(None)
        if kind == REJECT and meta.get("code") == "over":
            raise Over(meta.get("text"))
        if kind == REJECT:
            raise Refused(f"the trainer refuses this simulator ({meta.get('code')}): {meta.get('text')}")
        if kind != WELCOME or meta.get("autoreset") != "same_step" or len(data) != 8 * len(self.lanes):
            raise Violation("an answer to HELLO that cannot be")
        self.session, self.minor, self.config = session, minor, meta.get("config") or {}
        agreed = meta.get("capabilities", [])
        self.flags = (EPISODES if "episodes" in agreed else 0) | (TIMING if "timing" in agreed else 0)
        self.info, self.saves = "info" in agreed, "snapshot" in agreed
        self.env_config = meta.get("env_config") or [{}] * len(self.lanes)
        deadlines = meta.get("deadlines", {})
        self.ping, self.silence = deadlines.get("ping_ms", 1000) / 1000, deadlines.get("silence_ms", 10000) / 1000
        for lane, seed in zip(self.lanes, np.frombuffer(data, "<u8")):
            lane.stream = int(seed)
        if self.config or any(self.env_config):
            self.lanes[0].env = None  # that one was made without them
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _resumed(self):
        """Go on over another connection, within the time that `again` takes for it."""
        print(f"{self.meta['software']['name']}: the link to the trainer is lost; trying again", file=sys.stderr)
        while True:
            with self.lock:
                self.connection.close()
                self.connection = self.again()
            self.heard = time.monotonic()
            try:
                self._send(HELLO, {**self.meta, "resume": f"{self.session:016x}"}, envs=len(self.lanes), sequence=0)
                kind, _, _, session, _, _, meta, _ = self._message()
            except OSError:
                continue
            if kind == WELCOME and session == self.session:
                return
            if kind == REJECT and meta.get("code") == "over":
                raise Over(meta.get("text"))
            self.session = session
            if kind == WELCOME:
                self._send(CLOSE, {"reason": "the simulator begins another session", "grace_ms": 0})
            raise Violation("the trainer has given the session up")

    def _listen(self):
        try:
            while True:
                try:
                    kind, _, flags, session, sequence, envs, meta, data = self._message()
                except OSError:
                    if self.again is None:
                        raise
                    self._resumed()
                    continue
                if session != self.session:
                    continue
                if kind == PING:
                    self._send(PONG, {"progress_ms": int(1000 * (time.monotonic() - self.progress))}, sequence=sequence)
                elif kind == CLOSE or (kind == ERROR and not meta.get("recoverable", True)):
                    return self.requests.put(None if kind == CLOSE else Violation(str(meta.get("text"))))
                elif kind in (RESET, STEP) or (kind in (SNAPSHOT, RESTORE) and self.saves):
                    if flags & ~(SEEDS if kind == RESET else 0):
                        raise Violation("unknown flags")
                    self.requests.put((kind, flags, sequence, envs, data))
                elif kind not in (PONG, ERROR):
                    if kind in (HELLO, WELCOME, REJECT, RESULT, LOG):
                        raise Violation(f"type {kind} is not for a simulator")
                    self._say_error(True, "type", f"type {kind} is unknown")
        except Exception as error:
            self.requests.put(error)

    def _watch(self):
        while True:
            time.sleep(min(self.ping, 1.0))
            silent = time.monotonic() - self.heard
            if silent > self.silence and self.again is not None:
                self.heard = time.monotonic()
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)  # who reads will look for another
            elif silent > self.silence:
                print(f"the trainer has not answered for {silent:.0f} s", file=sys.stderr)
                os._exit(1)
            if silent > self.ping:
                try:
                    self._send(PING)
                except OSError:
                    return

    # -- what is asked

    def run(self):
        """Do what is asked until the trainer is done."""
        ready = []
        sent = time.monotonic()
        waiting = []
        while True:
            if not waiting:
                if ready:
                    self._send_rows(ready)
                    ready, sent = [], time.monotonic()
                request = self.requests.get()
                if request is None:
                    with contextlib.suppress(OSError):  # it may have hung up already
                        self._send(CLOSE, {"reason": "the trainer is done", "grace_ms": 0})
                    return
                if isinstance(request, Exception):
                    raise request
                waiting = self._taken(*request)
            for i, action in waiting:
                self._do(i, action)
                if self.lanes[i].failure is not None:
                    self._send_broken(i)
                elif self.lanes[i].state is not None:
                    self._send_states([i])
                else:
                    ready.append(i)
                self.progress = time.monotonic()
                if ready and self.progress - sent > 2e-3:
                    self._send_rows(ready)
                    ready, sent = [], self.progress
            waiting = []

    def _taken(self, kind, flags, sequence, envs, data):
        """The envs of a request that is new, with their actions; what comes again is answered again."""
        at = 4 * envs + (-4 * envs % 8)
        if kind in (SNAPSHOT, RESTORE):
            return self._taken_state(kind, sequence, envs, data, at)
        each = np.dtype(self.action["dtype"]).itemsize * int(np.prod(self.action["shape"])) if kind == STEP else 8
        more = envs * each if kind == STEP or flags & SEEDS else 0
        if len(data) != at + more + (-more % 8):
            raise Violation("a request of a wrong length")
        ids = np.frombuffer(data, "<u4", envs).tolist()
        if not ids or len(set(ids)) < len(ids) or max(ids) >= len(self.lanes):
            raise Violation("an env that does not exist, or comes twice")
        if kind == STEP:
            shape = (envs, *self.action["shape"])
            rest = np.frombuffer(
                data, np.dtype(self.action["dtype"]).newbyteorder("<"), int(np.prod(shape)), at
            ).reshape(shape)
        else:
            rest = np.frombuffer(data, "<u8", envs, at) if flags & SEEDS else [None] * envs
        return self._fresh(kind, sequence, ids, rest)

    def _taken_state(self, kind, sequence, envs, data, at):
        ids, rest = np.frombuffer(data, "<u4", envs).tolist() if len(data) >= at else [], [None] * envs
        if not ids or len(set(ids)) < len(ids) or max(ids) >= len(self.lanes):
            raise Violation("an env that does not exist, or comes twice")
        if kind == RESTORE:
            if len(data) < at + 8 * envs:
                raise Violation("a request of a wrong length")
            sizes = np.frombuffer(data, "<u8", envs, at).tolist()
            at += 8 * envs
            if max(sizes) > MOST_STATE:
                raise Violation("a state that is too large")
            rest = []
            for size in sizes:
                rest.append(data[at : at + size])
                at += size
        if len(data) != at + -at % 8:
            raise Violation("a request of a wrong length")
        return self._fresh(kind, sequence, ids, rest)

    def _fresh(self, kind, sequence, ids, rest):
        found, again, told = [], [], []
        for i, more in zip(ids, rest):
            lane = self.lanes[i]
            if sequence < lane.request:
                continue
            if sequence == lane.request:
                if lane.failure is not None:
                    self._send_broken(i)
                else:
                    (again if lane.state is None else told).append(i)
                continue
            if kind in (STEP, SNAPSHOT) and (lane.row is None or lane.failure is not None):
                raise Violation(f"env {i} must be reset before it is stepped")
            lane.request, lane.failure, lane.state = sequence, None, None
            if kind == RESET and more is not None:
                lane.stream, lane.seeded = int(more), False
            found.append((i, SNAPSHOT if kind == SNAPSHOT else more if kind != RESET else None))
        if again:
            self._send_rows(again)
        self._send_states(told)
        return found

    def _do(self, i, action):
        """Reset (None), step (an action), save (SNAPSHOT) or load (bytes) an env."""
        lane, began = self.lanes[i], time.perf_counter()
        row = {"reward": 0.0, "status": FIRST, "final": None, "return": 0.0, "length": 0, "info": None}
        try:
            if lane.env is None:
                lane.env = self.make({**self.config, **self.env_config[i]})
            if action is SNAPSHOT:
                lane.state = self._saved(lane)
                return
            if isinstance(action, bytes):
                row["obs"] = self._load(lane, action)
            elif action is None:
                lane.total, lane.length = 0.0, 0
                row["obs"] = self._reset(lane)
            else:
                obs, reward, terminated, truncated, *info = lane.env.step(action.item() if action.ndim == 0 else action)
                lane.total, lane.length = lane.total + float(reward), lane.length + 1
                row["reward"], row["obs"] = float(reward), self._seen(obs)
                row["status"] = (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
                if row["status"]:
                    row.update({"final": row["obs"], "return": lane.total, "length": lane.length})
                    numbers = info[0] if info and isinstance(info[0], dict) else {}
                    row["info"] = {
                        k: float(v) for k, v in numbers.items() if isinstance(v, (bool, int, float, np.number))
                    }
                    lane.total, lane.length = 0.0, 0
                    row["obs"] = self._reset(lane)
        except Exception as error:
            lane.env, lane.failure = None, f"{type(error).__name__}: {error}"[:4000].replace("\n", " ")
            return
        row["seconds"] = time.perf_counter() - began
        lane.row = row

    def _saved(self, lane):
        generator = _generator(lane.env)
        kept = {"stream": lane.stream, "total": lane.total, "length": lane.length, "obs": lane.row["obs"]}
        rng = None if generator is None else _plain(generator.bit_generator.state)
        state = _dumped({**kept, "rng": rng, "env": lane.env.save_state()})
        if len(state) > MOST_STATE:
            raise ValueError(f"its state has {len(state):,} bytes; at most {MOST_STATE:,} can be saved")
        return state

    def _load(self, lane, data):
        """Go on where an env was saved, after a reset; its observation."""
        kept = _loaded(data)
        lane.stream, lane.seeded = kept["stream"], False
        self._reset(lane)
        lane.env.load_state(kept["env"])
        generator = _generator(lane.env)
        if generator is not None and kept["rng"] is not None:
            generator.bit_generator.state = kept["rng"]  # last, because loading may have drawn from it
        lane.total, lane.length = kept["total"], kept["length"]
        return {path: kept["obs"][path].astype(dtype).reshape(self.shapes[path]) for path, dtype in self.dtypes.items()}

    def _reset(self, lane):
        seed = lane.seed()
        found = lane.env.reset(seed=seed % (1 << 32)) if self.like_gymnasium else lane.env.reset(seed)
        return self._seen(found[0] if self.like_gymnasium else found)

    def _seen(self, obs):
        return {
            path: np.array(_value(obs, path), dtype).reshape(self.shapes[path]) for path, dtype in self.dtypes.items()
        }


# -- where the trainer is ---------------------------------------------------------------------------------


class _Dealer:
    """ZMQ with the methods of a socket that are used here; one frame is one message."""

    family = None

    def __init__(self, where, listen, key):
        try:
            import zmq
        except ImportError:
            sys.exit("ZMQ is not installed here: pip install pyzmq, or use a unix: or tcp: address")
        self.zmq, self.lock, self.held, self.open = zmq, threading.Lock(), b"", True
        self.dealer = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.set_hwm(0)
        self.dealer.linger, self.dealer.ipv6 = 500, True
        if key:
            self.dealer.curve_publickey, self.dealer.curve_secretkey = zmq.curve_keypair()
            self.dealer.curve_serverkey = key.encode()
        for left in range(60 if listen else 0, -1, -1):
            try:
                (self.dealer.bind if listen else self.dealer.connect)(where)
                break
            except zmq.ZMQError as error:
                if not left:
                    sys.exit(f"cannot {'listen on' if listen else 'connect to'} zmq:{where}: {error}")
            time.sleep(0.05)  # ZMQ lets go of an address after a while
        self.timeout = None

    def settimeout(self, seconds):
        self.timeout = seconds

    def sendall(self, data):
        if not self.open:
            raise ConnectionError("closed")
        with self.lock:
            self.dealer.send(data)

    def recv(self, most):
        until = time.monotonic() + (self.timeout or 1e9)
        while not self.held and self.open:
            with self.lock:
                if self.dealer.closed:
                    break
                with contextlib.suppress(self.zmq.Again):
                    self.held = b"".join(f + bytes(-len(f) % 8) for f in self.dealer.recv_multipart(self.zmq.DONTWAIT))
                    continue  # an empty frame says nothing
                fd = self.dealer.fd
            select.select([fd], [], [], 0.05)
            if time.monotonic() > until:
                raise TimeoutError("the trainer does not answer")
        data, self.held = self.held[:most], self.held[most:]
        return data

    def shutdown(self, how):
        self.open = False

    def close(self):
        self.open = False
        with self.lock:
            self.dealer.close()


def _is_local(place):
    host = place.rpartition(":")[0]
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _socket(address, listen, key=""):
    kind, _, where = address.partition(":")
    if kind == "zmq" and where.startswith(("tcp://", "ipc://")):
        if where.startswith("tcp://") and not _is_local(where[6:]) and not key:
            sys.exit(f"address {address} reaches beyond this machine and needs a key: give --key simulator.key")
        return _Dealer(where, listen, key if where.startswith("tcp://") else "")
    if kind == "unix" and where:
        family, place = socket.AF_UNIX, "\0" + where[1:] if where[0] == "@" else where
    elif kind == "tcp" and where.rpartition(":")[2].isdigit():
        if not _is_local(where):
            sys.exit(f"address {address} reaches beyond this machine and is not encrypted: use zmq:tcp://{where}")
        family, place = socket.AF_INET, (where.rpartition(":")[0], int(where.rpartition(":")[2]))
    else:
        sys.exit(f"address {address} is not one of: unix:/path, unix:@name, tcp:host:port, zmq:tcp://…, zmq:ipc://…")
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if listen:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen(8)
        else:
            made.connect(place)
    except OSError:
        made.close()
        raise
    if family == socket.AF_INET:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _connect(address, key, seconds):
    until = time.monotonic() + seconds
    while True:
        try:
            return _socket(address, False, key)
        except OSError as error:
            if time.monotonic() >= until:
                raise ConnectionError(f"cannot connect to {address}: {error.strerror or error}") from error
        time.sleep(0.1)


def _who(path):
    """Launch, token, and the trainer's public key: of the trainer that started this, of a key, or of this user."""
    if os.environ.get("RAYNFORCE_LAUNCH"):
        return os.environ["RAYNFORCE_LAUNCH"], bytes.fromhex(os.environ.get("RAYNFORCE_TOKEN", "")), ""
    try:
        if path:
            with open(path) as file:
                found = json.load(file)
            return "sims", bytes.fromhex(found["token"]), found.get("public", "")
        with open(os.path.expanduser("~/.raynforce/token")) as file:
            return "sims", bytes.fromhex(file.read().strip()), ""
    except (OSError, ValueError, KeyError, TypeError):
        if path:
            sys.exit(f"{path} is no key of `raynforce sim keys`")
        return "sims", b"", ""  # the trainer will say what is missing


def serve(make, argv=None):
    """Serve envs that `make(**settings)` makes, to the trainer that started this, or as the command line says."""
    parser = argparse.ArgumentParser(description="A simulator for `raynforce train`.", allow_abbrev=False)
    where = "unix:/path, tcp:host:port, zmq:tcp://host:port or zmq:ipc:///path"
    parser.add_argument("--connect", default=os.environ.get("RAYNFORCE_CONNECT"), metavar="ADDRESS", help=where)
    parser.add_argument("--listen", metavar="ADDRESS", help="the same: a trainer comes here")
    parser.add_argument("--envs", type=int, default=int(os.environ.get("RAYNFORCE_ENVS", "1")))
    parser.add_argument("--key", default=os.environ.get("RAYNFORCE_KEY"), help="simulator.key, for other machines")
    parser.add_argument("--retry", type=float, default=60.0, help="seconds that a trainer is looked for")
    options = parser.parse_args(argv)
    if not options.connect and not options.listen:
        parser.error("no trainer to connect to: start this by raynforce train, or give --connect or --listen ADDRESS")
    if not 1 <= options.envs <= 65536:
        parser.error(f"--envs = {options.envs} must be from 1 to 65536")
    *who, key = _who(options.key)
    launched = "RAYNFORCE_LAUNCH" in os.environ
    zmq = (options.listen or options.connect).startswith("zmq:")
    listener = again = None
    retry = 0.0 if launched else options.retry
    if options.listen:
        listener = None if zmq else _listening(options.listen)
    elif not launched:
        again = lambda: _connect(options.connect, key, options.retry)  # noqa: E731
    while True:
        if listener:
            connection = listener.accept()[0]
        elif options.listen:
            connection = _socket(options.listen, True, key)  # ZMQ
        else:
            try:
                connection = _connect(options.connect, key, retry)
            except OSError as error:
                if retry == 0.0 and not launched:
                    return  # it has closed a session, and is gone
                sys.exit(str(error))
        code = _serve_one(connection, make, options.envs, who, again)
        if code == 0 and again is not None:
            retry = 0.0
        elif not options.listen:
            sys.exit(max(0, code))


def _listening(address):
    try:
        return _socket(address, True)
    except OSError as error:
        sys.exit(f"cannot listen on {address}: {error.strerror or error}")


def _serve_one(connection, make, envs, who, again):
    """One session; the exit code, and -1 once the trainer is done with all."""
    host = None
    try:
        host = _Host(connection, lambda config: make(**config), envs, os.path.basename(sys.argv[0]), who, again)
        host.greet()
        host.run()
        return 0
    except Over:
        return -1
    except Refused as error:
        print(error, file=sys.stderr)
        return 78  # EX_CONFIG: trying again cannot help
    except (Violation, OSError) as error:
        print(error, file=sys.stderr)
        if isinstance(error, Violation):
            with contextlib.suppress(OSError):
                host._say_error(False, "state", str(error))
        return 1
    finally:
        (host.connection if host else connection).close()
