"""The fork server: a process with one thread and all imports done, forked for each environment that has a process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from multiprocessing.connection import Connection
from select import POLLIN, poll
from typing import NamedTuple, NoReturn

import numpy as np

from raynforce.envs.lane import Lane, Plan
from raynforce.envs.rows import Rows, row_bytes
from raynforce.envs.worker import GRACE, About, LaneWorker, Report
from raynforce.errors import EnvError, RaynforceError, summary
from raynforce.given import unpack

START = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM):  # those are for the process that started this one to answer
    signal.signal(number, lambda *_: None)
sys.path[:] = {path!r}
from raynforce.threads import cap_threads
cap_threads()  # before numpy is imported: a process that forks must have no other threads
from raynforce.envs.fork_server import main
main()
"""
"""What its process runs."""

TOLD = struct.Struct("<III")
"""What a process writes when it is done: its lane, its generation, and whether there is more to read on its socket."""
STEP, CALL, MEMORY = b"s", b"c", b"m"
_PR_SET_PDEATHSIG = 1


class SpawnRequest(NamedTuple):
    """For a process for a lane; its socket follows."""

    lane: int
    generation: int
    plan: Plan
    episode: int
    given: bytes
    """The environment itself, where it is not from a module."""


def main() -> None:
    """Serve until the other side hangs up."""
    gc.freeze()  # what is imported by now is shared by all of them, as long as it is not written to
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    ForkServer(line).run()


class ForkServer:
    """The processes that were forked and have not ended."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._requests = line, Connection(os.dup(line.fileno()))
        self._libc = ctypes.CDLL(None)
        self._pid = os.getpid()
        self._children: dict[int, tuple[int, int]] = {}  # lane and generation by process id
        self._ended, ended = os.pipe()  # written to when a child ends
        for fd in (self._ended, ended):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._told = receive_fd(line)

    def run(self) -> None:
        events = poll()
        parent = os.pidfd_open(os.getppid())  # a process that it has forked may hold its end of the line open
        for fd in (self._line.fileno(), self._ended, parent):
            events.register(fd, POLLIN)
        ready: list[int] = []
        try:
            while parent not in ready:
                ready = [fd for fd, _ in events.poll()]
                if self._ended in ready:
                    self._reap()
                if self._line.fileno() in ready:
                    self._serve(self._requests.recv())
        except (EOFError, ConnectionError):
            pass
        self._end()

    def _serve(self, request: SpawnRequest | tuple[int, int]) -> None:
        """Fork a process, or kill the one of a lane and generation."""
        if not isinstance(request, SpawnRequest):
            for pid in [pid for pid, child in self._children.items() if child == request]:
                os.kill(pid, signal.SIGKILL)
            return
        child, fd = (request.lane, request.generation), receive_fd(self._line)
        try:
            pid = os.fork()
        except OSError as error:
            self._requests.send((*child, str(error)))
        else:
            if not pid:
                self._run_child(request, fd)
            self._children[pid] = child
        os.close(fd)

    def _reap(self) -> None:
        """Tell of children that have ended."""
        os.read(self._ended, 4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._requests.send((*self._children.pop(pid), os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        """Children close their environments by themselves, unless it takes them too long."""
        until = time.monotonic() + GRACE
        while self._children:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            self._children.pop(ended, None)
            if time.monotonic() > until:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
            if not ended:
                time.sleep(0.005)

    def _run_child(self, request: SpawnRequest, fd: int) -> NoReturn:
        code = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == self._pid:  # otherwise that came too late
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._line.close()
                self._requests.close()
                os.close(self._ended)
                EnvProcess(request, socket.socket(fileno=fd), self._told).run()
                code = 0
        except (EOFError, ConnectionError):  # the other side is gone
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


class EnvProcess(LaneWorker):
    """A lane in a process of its own: it does as it is asked, until the other side hangs up."""

    def __init__(self, request: SpawnRequest, line: socket.socket, told: int) -> None:
        super().__init__(request.plan, request.lane, request.episode)
        self._given, self._line, self._told = request.given, line, told
        self._answers = Connection(os.dup(line.fileno()))
        self._done, self._more = (TOLD.pack(request.lane, request.generation, flag) for flag in (0, 1))

    def run(self) -> None:
        np.random.seed()  # noqa: NPY002  # otherwise all of them would draw the same, if their envs use this
        made = self.make()
        if self.lane is None:
            self._tell(made)
            return
        self._tell(made._replace(what="spaces"))
        while order := os.read(self._line.fileno(), 1):
            if order == STEP:
                self._tell(self.step())
            elif order == CALL:
                self._tell(self.call(*self._answers.recv()))
            else:
                self._map(self.lane)
                self._tell(made)
        self.close()

    def _make(self) -> About:
        unpack(self._given)
        return super()._make()

    def _map(self, lane: Lane) -> None:
        """Use memory that others can read too."""
        memory, size = receive_fd(self._line), row_bytes(lane.spec)
        rows = memoryview(mmap.mmap(memory, 0))
        os.close(memory)
        lane.write_to(Rows(lane.spec, 1, rows[self.index * size : (self.index + 1) * size]))
        self.action = lane.row.action

    def _tell(self, report: Report | None) -> None:
        if report is None:
            os.write(self._told, self._done)
            return
        os.write(self._told, self._more)
        self._answers.send(report if report.what != "error" else report._replace(value=_portable(report.value)))


def receive_fd(line: socket.socket) -> int:
    """A descriptor that comes with a byte of its own; programs that are started do not get it."""
    byte, fds, _, _ = socket.recv_fds(line, 1, 1)
    if not byte:
        raise EOFError
    os.set_inheritable(fds[0], False)
    return fds[0]


def _portable(error: BaseException) -> BaseException:
    """An error that can be pickled, with where it was raised."""
    if isinstance(error, RaynforceError):
        error.trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return EnvError(summary(error))
