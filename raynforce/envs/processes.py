"""A process for each lane: for environments that compute, that must not be in a thread, or that crash."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from raynforce.envs.executors import FEWER, GRACE, EnvExecutor, LaneReport
from raynforce.envs.fork_server import CALL, DONE, MEMORY, START, STEP, SpawnRequest
from raynforce.envs.lane import LanePlan
from raynforce.envs.make import closed_on_error
from raynforce.envs.rows import Rows, row_bytes
from raynforce.errors import EnvError, UsageError, how_it_ended
from raynforce.given import pack
from raynforce.spaces import EnvSpec

_AT_ONCE = 4096  # lanes told of by one read


class Processes(EnvExecutor):
    """Rows are in memory that all share. An order is one byte on a lane's own socket, and all answer on one pipe."""

    def __init__(self, plan: LanePlan, count: int) -> None:
        self._given = pack([plan.env])
        super().__init__(plan, count)
        self._memory = -1
        self._lines: dict[int, socket.socket] = {}
        self._generations = np.zeros(count, np.uint32)
        self._ending: set[int] = set()  # lanes that were abandoned, and whose processes have not ended yet
        with contextlib.ExitStack() as stack:
            stack.callback(self.bell.close)
            self._epoll = stack.enter_context(select.epoll())
            self._pipe, told = os.pipe()
            stack.callback(os.close, self._pipe)
            os.set_blocking(self._pipe, False)
            with open(told, "wb"):
                self.server, self._line = _start_server()
                stack.callback(self._end_server)
                self._requests = stack.enter_context(Connection(os.dup(self._line.fileno())))
                socket.send_fds(self._line, [b"t"], [told])
            for fd in (self._pipe, self._line.fileno(), self.bell.fileno()):
                self._epoll.register(fd, select.EPOLLIN)
            self._open = stack.pop_all()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def make(self, lane: int, episode: int) -> None:
        ours, theirs = socket.socketpair()
        if lane in self._lines:
            self._lines[lane].close()
        self._lines[lane] = ours
        self._generations[lane] += 1
        with theirs, self._server_lives():
            self._requests.send(SpawnRequest(lane, int(self._generations[lane]), self.plan, episode, self._given))
            socket.send_fds(self._line, [b"b"], [theirs.fileno()])

    def step(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            with contextlib.suppress(ConnectionError):  # it has died: the server will tell
                self._lines[lane].send(STEP)

    def call(self, lane: int, method: str, args: tuple[Any, ...]) -> None:
        with contextlib.suppress(ConnectionError), self._connection(lane) as connection:
            self._lines[lane].send(CALL)
            connection.send((method, args))

    def collect(self) -> tuple[list[int], list[LaneReport]]:
        ready = [fd for fd, _ in self._epoll.poll(0)]
        self.bell.clear()
        deaths = self._deaths() if self._line.fileno() in ready else []
        done: list[int] = []
        reports: list[LaneReport] = []
        for lane, more in self._answered():  # also of those that have died since
            if lane in self._ending:
                continue
            if not more:
                done.append(lane)
            elif (report := self._read(lane)) is not None:
                reports.append(report)
        return done, reports + deaths

    def abandon(self, lane: int) -> bool:
        self._ending.add(lane)
        with self._server_lives():
            self._requests.send((lane, int(self._generations[lane])))
        return False

    def close(self) -> None:
        for line in self._lines.values():
            line.close()  # it finishes its step, closes its environment and ends
        self._open.close()

    def _answered(self) -> list[tuple[int, int]]:
        """Lanes that are done, and whether there is more to read from them."""
        try:
            told = np.frombuffer(os.read(self._pipe, _AT_ONCE * DONE.size), "<u4").reshape(-1, 3)
        except BlockingIOError:
            return []
        return told[self._generations[told[:, 0]] == told[:, 1]][:, ::2].tolist()

    def _read(self, lane: int) -> LaneReport | None:
        try:
            with self._connection(lane) as connection:
                report: LaneReport = connection.recv()
        except (EOFError, ConnectionError):  # it died over it
            return None
        report = self._checked(report)
        if report.what != "spaces":
            return report
        with contextlib.suppress(ConnectionError):
            self._lines[lane].send(MEMORY)
            socket.send_fds(self._lines[lane], [b"m"], [self._memory])
        return None

    def _deaths(self) -> list[LaneReport]:
        found = []
        while self._requests.poll():
            with self._server_lives():
                lane, generation, how = self._requests.recv()
            if generation != self._generations[lane]:
                continue
            if isinstance(how, str):
                started = f"not all of {self.count} processes for envs can be started ({how})"
                found.append(LaneReport(lane, "error", UsageError(f"{started}: {FEWER}")))
            elif lane in self._ending:
                self._ending.remove(lane)
                found.append(LaneReport(lane, "gone", None))
            else:
                found.append(LaneReport(lane, "died", f"its process {how_it_ended(how)}"))
        return found

    @contextlib.contextmanager
    def _server_lives(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            raise EnvError(f"the process that those of env {self.plan.env!r} come from has died") from None

    def _connection(self, lane: int) -> Connection:
        return Connection(os.dup(self._lines[lane].fileno()))

    def _make_rows(self, spec: EnvSpec) -> Rows:
        size = self.count * row_bytes(spec)
        self._memory = os.memfd_create("raynforce", os.MFD_CLOEXEC)
        self._open.callback(os.close, self._memory)
        os.ftruncate(self._memory, size)
        return Rows(spec, self.count, mmap.mmap(self._memory, size))

    def _end_server(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
        try:
            self.server.wait(GRACE + 1)
        except subprocess.TimeoutExpired:
            self.server.kill()  # and its children with it
            self.server.wait()


def _start_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A fork server of our process group, which ends with us, and the line to it."""
    ours, theirs = socket.socketpair()
    start = START.format(path=[os.path.abspath(path) for path in sys.path])
    with theirs, closed_on_error(ours):
        command = [sys.executable, "-P", "-u", "-c", start, str(theirs.fileno())]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)), ours
