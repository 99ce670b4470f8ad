"""Roles in processes of this machine: calls travel on socket pairs, arrays through shared memory."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import raynforce
from raynforce.errors import UsageError, how_it_ended
from raynforce.runtimes import role_host
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, Runtime, Split
from raynforce.runtimes.messages import Packed, pack, receive, send

GRACE = 3.0  # seconds a role has to close before it is killed
LAST_WORDS = 300  # characters of what a role said last that are worth repeating in one line


class _Answer(Pending):
    """A call's answer, still packed: it can be handed on without being opened."""

    def __init__(self, runtime: ProcessRuntime, name: str) -> None:
        self.name = name
        self.packed: Packed | None = None
        self.error: Exception | None = None
        self._runtime = runtime
        self._opened: list[Any] = []  # the value, once it was unpacked

    @property
    def done(self) -> bool:
        return self.packed is not None or self.error is not None

    def failure(self) -> BaseException | None:
        return self.error and role_host.with_cause(self.error)

    @property
    def size(self) -> int:
        return self.packed.nbytes if self.packed is not None else 0

    def result(self) -> Any:
        if not self.done:
            self._runtime.wait([self])
        if self.error is not None:
            raise role_host.with_cause(self.error)
        if not self._opened and self.packed is not None:
            self._opened.append(self.packed.value())
        return self._opened[0]


class _Call(NamedTuple):
    answers: Sequence[_Answer]
    method: str
    args: Sequence[_Answer]


class _Worker(Handle):
    """The driver's end of one process."""

    def __init__(self, runtime: ProcessRuntime, name: str) -> None:
        self.name = name
        self.alive = True
        self.queue: deque[_Call] = deque()  # not sent yet: an argument of the first one is not there
        self.sent: dict[int, Sequence[_Answer]] = {}
        self.said = role_host.LastLines()
        self.words = b""  # of a line that has not ended yet
        self._runtime = runtime
        self._count = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guard, self._guard = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "raynforce.runtimes.worker", str(theirs.fileno()), str(guard)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), guard),
                process_group=0,  # a terminal's Ctrl-C is not for it, and its children can be ended with it
                env={**os.environ, "PYTHONPATH": first_on_path(Path(raynforce.__file__).parent.parent)},
            )
        except BaseException:
            ours.close()
            os.close(self._guard)
            raise
        finally:
            theirs.close()
            os.close(guard)
        self.socket = ours
        self.death = os.pidfd_open(self.process.pid)  # a child that it has forked may hold its end of the socket open
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        return self.ask("call", [method, *args], parts)

    def ask(self, method: str, args: Sequence[Any], parts: int = 1) -> list[Pending]:
        """Call a method of the host that the role lives in."""
        answers = [_Answer(self._runtime, self.name) for _ in range(parts)]
        if self.alive:
            shared = [a if isinstance(a, _Answer) else self._runtime.share(a) for a in args]
            self.queue.append(_Call(answers, method, shared))
            self.flush()
        else:
            _fail(answers, self.reason)
        return list(answers)

    def flush(self) -> bool:
        """Send what can be sent, in order; whether there was anything."""
        some = False
        while self.queue and all(arg.done for arg in self.queue[0].args):
            some = True
            call = self.queue.popleft()
            if broken := [arg.error for arg in call.args if arg.error is not None]:
                _fail(call.answers, broken[0])
                continue
            self._count += 1
            self.sent[self._count] = call.answers
            with contextlib.suppress(ConnectionError):  # it has died, and its end of the socket will tell
                if self._runtime.read_until_writable(self):
                    head = (self._count, call.method, len(call.answers))
                    send(self.socket, head, [arg.packed for arg in call.args if arg.packed is not None])
        return some

    def hear(self) -> None:
        if not self.alive:  # noticed a moment ago, by another sign
            return
        message = receive(self.socket)
        if message is None:
            self._lost()
            return
        (number, ok), values = message
        answers = self.sent.pop(number)
        for answer, packed in zip(answers, values if ok else values * len(answers), strict=True):
            if ok:
                answer.packed = packed
            else:
                answer.error = packed.value()

    def died(self) -> None:
        """Take the answers that it gave before, then notice the end."""
        if not self.alive:
            return
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while self.alive and poll.poll(0):
            self.hear()
        self._lost()

    def read(self, say: Callable[[str], None], *, over: bool = False) -> None:
        """Pass on what the role has printed; if it is `over`, also the line that has not ended."""
        if not (self.alive or over):
            return
        try:
            chunk = os.read(self.output.fileno(), 65536)
        except BlockingIOError:
            if not over:
                return
            chunk = b""
        if not chunk:
            self._runtime.unlisten(self.output)
        *lines, self.words = (self.words + chunk).split(b"\n")
        if self.words and (over or not chunk or len(self.words) > 65536):
            lines, self.words = [*lines, self.words], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text.strip() and self.said.append(text):
                say(f"{self.name}: {text}")

    def end(self) -> None:
        if self.alive:
            self.kill()
            self._lost()

    def kill(self) -> None:
        """Kill the process and its children, without waiting for their end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _lost(self) -> None:
        """Kill what is left of it and its children, and fail every call that it has not answered."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)  # let it end by itself, so that we can say how it did
        self.kill()
        code = self.process.wait()
        self.read(self._runtime.say, over=True)
        lines = list(self.said)
        said = f"; the last it said: {lines[-1].strip()[-LAST_WORDS:]}" if lines else ""
        what = role_host.hung(lines)
        text = f"{self.name}: {what}" if what else f"{self.name} {how_it_ended(code)}{said}"
        self.reason = RoleDied(text, self.name, "\n".join(lines))
        for answers in [*self.sent.values(), *(call.answers for call in self.queue)]:
            _fail(answers, self.reason)
        self.sent.clear()
        self.queue.clear()
        self._runtime.forget(self)
        self.socket.close()
        self.output.close()
        os.close(self.death)
        os.close(self._guard)


class ProcessRuntime(Runtime):
    """Each role in a process of its own. What they print is passed on to `say`."""

    def __init__(self, places: Mapping[str, Place], say: Callable[[str], None], given: bytes = b"") -> None:
        if not hasattr(os, "memfd_create"):
            raise UsageError("--runtime process needs Linux: use inline or ray")
        _allow_many_files()
        super().__init__(places)
        self.say = say
        self._given = given  # see `raynforce.given`
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> Handle:
        worker = _Worker(self, name)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker.hear)
        self._selector.register(worker.death, selectors.EVENT_READ, worker.died)
        self._selector.register(worker.output, selectors.EVENT_READ, lambda: worker.read(self.say))
        packed = role_host.pack(role, args, name, place or Place(), given=self._given)
        self._starting += worker.ask("build", [packed])
        return worker

    def wait(self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None) -> Split:
        answers = [p for p in pendings if isinstance(p, _Answer)]
        wanted = len(answers) if count is None else min(count, len(answers))
        until = None if timeout is None else time.monotonic() + timeout
        self._pump(0)
        while sum(a.done for a in answers) < wanted:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self._pump(left)
        return [a for a in answers if a.done], [a for a in answers if not a.done]

    def _pump(self, timeout: float | None) -> None:
        """Read everything that has come, and send what waited for it."""
        self._read(timeout)
        while sum(worker.flush() for worker in tuple(self._workers)):  # a failed call may fail others in turn
            pass

    def _read(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def read_until_writable(self, worker: _Worker) -> bool:
        """A worker that cannot get rid of its answers takes no calls either; False if it has died meanwhile."""
        poll = select.poll()
        poll.register(worker.socket, select.POLLOUT)
        while not poll.poll(0):
            self._read(0.01)
            if not worker.alive:
                return False
        return True

    def share(self, value: Any) -> _Answer:
        answer = _Answer(self, "shared")
        answer.packed = pack(value)
        return answer

    def forget(self, worker: _Worker) -> None:
        self.unlisten(worker.socket, worker.death, worker.output)
        if worker in self._workers:
            self._workers.remove(worker)

    def unlisten(self, *files: Any) -> None:
        for file in files:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(file)

    def health(self) -> dict[str, float]:
        return {"health/object_store_mb": Packed.held / 1e6}

    def close(self, *, now: bool = False) -> None:
        workers = tuple(self._workers)
        until = time.monotonic() + (0 if now else GRACE)
        try:
            for worker in workers:
                with contextlib.suppress(OSError):
                    worker.socket.shutdown(socket.SHUT_WR)  # it finishes its call, closes its role and ends
            while any(w.alive and w.process.poll() is None for w in workers) and time.monotonic() < until:
                self._read(0.02)
        finally:  # also if a second Ctrl-C cuts their time short
            for worker in workers:
                if worker.alive:
                    worker.kill()
            for worker in workers:
                worker.end()
            self._selector.close()


def _fail(answers: Sequence[_Answer], error: Exception) -> None:
    for answer in answers:
        answer.error = error


def first_on_path(directory: Path) -> str:
    """PYTHONPATH with this in front; `worker.forget_home` undoes it."""
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])


def _allow_many_files() -> None:
    """Each worker takes three descriptors and each fragment on its way one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
