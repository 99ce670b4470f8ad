"""The trainer's side of a connection to a simulator, which may say anything: for the conformance kit."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raynforce.envs.addresses import LAUNCH, Where, addresses, find_key, is_remote, require_safe
from raynforce.envs.launching import Launched
from raynforce.envs.masks import random_actions, random_of
from raynforce.errors import UsageError
from raynforce.protocol.agents import impossible
from raynforce.protocol.codec import ENDED, RESET, SEEDS, Codec, join_states, split_states
from raynforce.protocol.frame import HEADER, MOST_ENVS, Message, ProtocolError, Type
from raynforce.protocol.handshake import CAPABILITIES, Deadlines, Hello, Inference, Welcome
from raynforce.protocol.spaces import DTYPES, misfits
from raynforce.spaces import FORBIDS, MASK, EnvSpec, forbids_all

SESSION = 0x1122334455667788


class Failed(Exception):
    """A case that does not hold, in one line."""


class Skipped(Exception):
    """A case that cannot be tried on this simulator."""


class Peer:
    """The trainer's side of one connection to a simulator, which may say whatever it likes."""

    def __init__(self, env: str, envs: int, seconds: float) -> None:
        """It has so many `seconds` to connect, and for each answer."""
        self.env, self.envs, self.seconds = env, envs, seconds
        self.process: Launched | None = None
        if is_remote(env):
            self.token, self.launch = find_key().token, LAUNCH
            self.socket = self._called(addresses(env)[0])
        else:
            self.token, self.launch = secrets.token_bytes(32), secrets.token_hex(8)
            self.socket = self._launched()
        takes = [Type.HELLO, Type.RESULT, Type.SNAPSHOT, Type.FRAGMENT, Type.LOG, Type.ERROR]
        takes += [Type.PING, Type.PONG, Type.CLOSE]
        self.codec = Codec(takes, envs if self.process else MOST_ENVS)
        self.sequence = 0
        self.hello: Hello | None = None

    def _called(self, where: Where) -> socket.socket:
        """A connection to a simulator that listens."""
        if where.kind == "zmq":
            raise UsageError(
                f"{where}: a simulator is checked over unix or tcp; start it with --listen tcp:127.0.0.1:PORT"
            )
        require_safe(where, find_key())
        until, (family, target) = time.monotonic() + self.seconds, where.socket
        while True:
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.connect(target)
                return connection
            except OSError as error:
                connection.close()
                if time.monotonic() > until:
                    raise Failed(f"no simulator listens at {where}: {error.strerror}") from error
            time.sleep(0.05)

    def _launched(self) -> socket.socket:
        env, envs, seconds = self.env, self.envs, self.seconds
        name = f"raynforce-check-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")
            listener.listen(1)
            listener.settimeout(0.05)
            self.process = Launched(env, f"unix:@{name}", self.token, self.launch, envs, echo=False)
            until = time.monotonic() + seconds
            while True:
                with contextlib.suppress(TimeoutError):
                    return listener.accept()[0]
                if self.process.ended() or time.monotonic() > until:
                    self.process.close()
                    how = self.process.ending() if self.process.ended() else f"has not connected within {seconds:g} s"
                    raise Failed(f"the simulator {how}")

    # -- bytes and messages

    def send(self, data: bytes) -> None:
        try:
            self.socket.settimeout(self.seconds)
            self.socket.sendall(data)
        except OSError as error:
            raise Failed(f"it does not read: {error}") from error

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None if it has hung up."""
        head = self._read(HEADER.size, seconds)
        if head is None:
            return None
        try:
            header = self.codec.measure(head)
            rest = self._read(header.meta_bytes + header.body_bytes, seconds)
            if rest is None:
                raise Failed("it hung up in the middle of a message")
            return self.codec.decode(head + rest, header)
        except ProtocolError as error:
            raise Failed(f"a message that cannot be ({error.code}): {error}") from error

    def _read(self, count: int, seconds: float | None) -> bytes | None:
        data, until = b"", time.monotonic() + (self.seconds if seconds is None else seconds)
        while len(data) < count:
            self.socket.settimeout(max(1e-3, until - time.monotonic()))
            try:
                more = self.socket.recv(count - len(data))
            except TimeoutError:
                raise Failed(f"no answer within {self.seconds if seconds is None else seconds:g} s") from None
            except OSError:
                more = b""
            if not more:
                if data:
                    raise Failed("it hung up in the middle of a message")
                return None
            data += more
        return data

    # -- the handshake

    def greeted(self) -> Hello:
        """Its HELLO."""
        message = self.receive()
        if message is None:
            raise Failed("it hung up before its HELLO")
        if message.type != Type.HELLO:
            raise Failed(f"its first message is of type {message.type}, not HELLO")
        try:
            self.hello = Hello.read(message)
        except ProtocolError as error:
            raise Failed(f"its HELLO is wrong ({error.code}): {error}") from error
        if self.process is None and self.hello.envs < self.envs:
            raise Skipped(
                f"it has {self.hello.envs} envs, and this needs {self.envs}: start it with --envs {self.envs}"
            )
        return self.hello

    def welcome(
        self,
        deadlines: Deadlines | None = None,
        autoreset: str = "",
        inference: Callable[[Hello], Inference] | None = None,
        **more: Any,
    ) -> Hello:
        """Take it in, with whatever it can do but shared memory; with `inference` it is to act by itself."""
        hello = self.greeted()
        acts = None if inference is None else inference(hello)
        self.autoreset = autoreset or next(m for m in ("same_step", "explicit", "next_step") if m in hello.autoreset)
        self.capabilities = tuple(c for c in hello.capabilities if c in CAPABILITIES)
        if acts is not None:
            self.capabilities = ("inference",)
        self.seeds = np.arange(100, 100 + hello.envs, dtype=np.uint64)
        answer = Welcome(
            SESSION,
            self.autoreset,
            self.seeds,
            capabilities=self.capabilities,
            spec_hash=hello.spaces.digest(),
            deadlines=deadlines or Deadlines(),
            inference=acts,
        ).message()
        length = 0 if acts is None else acts.length
        self.codec.agree(hello.spaces, self.autoreset, hello.envs, 0, self.capabilities, length)
        self.rng = np.random.default_rng(0)
        self.masks: dict[int, np.ndarray] = {}  # by env: the choices that are allowed at what it shows
        self.shown: dict[int, dict[str, np.ndarray]] = {}  # of several agents: what each env last showed
        self.send(answer._replace(meta={**answer.meta, **more}).to_bytes())
        return hello

    # -- requests and answers

    def message(self, type_: int, envs: Sequence[int] = (), *buffers: np.ndarray, **how: Any) -> Message:
        if "sequence" not in how:
            self.sequence += 1
            how["sequence"] = self.sequence
        ids = [np.array(envs, "<u4")] if len(envs) else []
        return Message(type_, how.pop("session", SESSION), envs=len(envs), buffers=[*ids, *buffers], **how)

    def reset(self, envs: Sequence[int], seeds: Sequence[int] | None = None, **how: Any) -> Message:
        if seeds is None:
            return self.message(Type.RESET, envs, **how)
        return self.message(Type.RESET, envs, np.array(seeds, "<u8"), flags=SEEDS, **how)

    def step(self, envs: Sequence[int], actions: np.ndarray | None = None, **how: Any) -> Message:
        assert self.hello is not None
        given = self.actions(envs) if actions is None else actions
        return self.message(Type.STEP, envs, given.astype(DTYPES[self.hello.spaces.action.dtype]), **how)

    def snapshot(self, envs: Sequence[int], **how: Any) -> Message:
        return self.message(Type.SNAPSHOT, envs, **how)

    def restore(self, envs: Sequence[int], states: Sequence[bytes], **how: Any) -> Message:
        return self.message(Type.RESTORE, envs, *join_states(states), **how)

    def states(self, message: Message) -> list[bytes]:
        """Send a SNAPSHOT, and the states that answer it, in its order."""
        self.send(message.to_bytes())
        envs: list[int] = message.buffers[0].tolist()
        found: dict[int, bytes] = {}
        while len(found) < len(envs):
            ids, requests, sizes, states = self.next(Type.SNAPSHOT).buffers
            for env, request, state in zip(ids.tolist(), requests.tolist(), split_states(sizes, states), strict=True):
                if env in found or env not in envs or request != message.sequence:
                    raise Failed(f"env {env} has told its state twice, or was not asked, or for request {request}")
                found[env] = state
        return [found[env] for env in envs]

    def actions(self, envs: Sequence[int]) -> np.ndarray:
        """Random ones, that are allowed at what these envs have last shown."""
        assert self.hello is not None
        action, agents = self.hello.spaces.action, self.hello.agents
        if agents is not None:
            none = {leaf.path: np.zeros(leaf.shape, leaf.dtype) for leaf in self.hello.spaces.obs}
            seen = [self.shown.get(env, none) for env in envs]
            spec = EnvSpec(self.hello.software, self.hello.spaces.obs, action, {}, agents)
            return random_of(spec, {path: np.stack([one[path] for one in seen]) for path in none}, self.rng)
        allowed = [self.masks.get(env, np.ones(sum(action.sizes), np.int8)) for env in envs]
        return random_actions(action, len(envs), self.rng, np.stack(allowed) if self.masks else None)

    def ask(self, message: Message) -> dict[int, AnswerRow]:
        """Send a request, and the rows that answer it, by env."""
        self.send(message.to_bytes())
        return self.rows(message.buffers[0].tolist(), message.sequence)

    def rows(self, envs: Sequence[int], sequence: int) -> dict[int, AnswerRow]:
        found: dict[int, AnswerRow] = {}
        while len(found) < len(envs):
            message = self.next(Type.RESULT)
            for row in self.unpacked(message):
                if row.env in found or row.env not in envs:
                    raise Failed(f"env {row.env} has answered twice, or was not asked")
                if row.request != sequence:
                    raise Failed(f"env {row.env} answers request {row.request}; it was asked by {sequence}")
                found[row.env] = row
        return found

    def next(self, *types: int, seconds: float | None = None) -> Message:
        """The next message of one of these types; LOG and PING may come in between."""
        until = time.monotonic() + (self.seconds if seconds is None else seconds)
        while True:
            message = self.receive(max(1e-3, until - time.monotonic()))
            wanted = " or ".join(Type(t).name for t in types)
            if message is None:
                raise Failed(f"it hung up; expected was {wanted}")
            if message.type == Type.PING and Type.PING not in types:
                pong = Message(Type.PONG, SESSION, message.sequence, meta={"progress_ms": 0})
                self.send(pong.to_bytes())
            elif message.type in types:
                return message
            elif message.type != Type.LOG:
                told = message.meta.get("text", "") if message.type == Type.ERROR else ""
                raise Failed(f"it sent {Type(message.type).name} {told}; expected was {wanted}")

    def unpacked(self, message: Message) -> Iterator[AnswerRow]:
        """The rows of a RESULT; what no row may be is a failure."""
        assert self.hello is not None
        ids, request, reward, status, *rest = message.buffers
        seconds = None
        if message.flags & 2:
            seconds, rest = rest[0], rest[1:]
        leaves = self.hello.spaces.obs
        obs, rest = rest[: len(leaves)], rest[len(leaves) :]
        counts, final = (rest[:2], rest[2:]) if message.flags & 1 else ([], rest)
        ended = np.flatnonzero(status & ENDED)
        if len(ended) != message.ended:
            raise Failed(f"its header says that {message.ended} rows have ended; {len(ended)} have")
        for leaf, column in zip(leaves, obs, strict=True):
            if misfits(leaf, column, True) is not None:
                raise Failed(f"{leaf.path} has a value that its space does not have")
        if not np.isfinite(reward).all():
            raise Failed("a reward is not finite")
        for leaf, column in zip(leaves, obs, strict=True):
            if leaf.path == MASK:
                if forbids_all(column, self.hello.spaces.action.sizes).any() and self.autoreset == "same_step":
                    raise Failed(f"{MASK} {FORBIDS}")
                self.masks |= dict(zip(ids.tolist(), column.copy(), strict=True))
        if self.hello.agents is not None:
            columns = {leaf.path: column for leaf, column in zip(leaves, obs, strict=True)}
            running = np.ones(len(ids), np.bool_) if self.autoreset == "same_step" else (status & ENDED) == 0
            wrong, what = impossible(columns, self.hello.agents, running)
            if wrong.any():
                raise Failed(what)
            for i, env in enumerate(ids.tolist()):
                self.shown[env] = {path: column[i].copy() for path, column in columns.items()}
        for i, env in enumerate(ids.tolist()):
            if int(status[i]) not in (0, 1, 2, 3, RESET):
                raise Failed(f"env {env} has status {status[i]}")
            over = np.flatnonzero(ended == i)
            yield AnswerRow(
                env,
                int(request[i]),
                float(reward[i]),
                int(status[i]),
                None if seconds is None else float(seconds[i]),
                b"".join(column[i].tobytes() for column in obs),
                b"".join(column[int(over[0])].tobytes() for column in final) if len(over) and len(final) else None,
                (float(counts[0][over[0]]), int(counts[1][over[0]])) if len(over) and len(counts) else None,
            )

    # -- how it ends

    def hangs_up(self, why: str) -> None:
        """It must end the session within a while; what it says before does not matter."""
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            try:
                if self.receive(max(0.05, until - time.monotonic())) is None:
                    return
            except Failed as failed:
                if "hung up" in str(failed):
                    return
                raise Failed(f"it goes on after {why}") from failed
        raise Failed(f"it goes on after {why}")

    def exits(self, why: str) -> int:
        if self.process is None:  # it goes on to serve others, as it should
            return 0
        code = self.process.wait(self.seconds)
        if code is None:
            raise Failed(f"its process goes on after {why}")
        return code

    def close(self) -> None:
        self.socket.close()
        if self.process is not None:
            self.process.close()


@dataclass(frozen=True)
class AnswerRow:
    """What one env answered."""

    env: int
    request: int
    reward: float
    status: int
    seconds: float | None
    obs: bytes
    final: bytes | None
    episode: tuple[float, int] | None
