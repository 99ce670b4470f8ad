"""The fork server: a process with one thread and all imports done, forked for each environment that has a process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from multiprocessing.connection import Connection
from select import POLLIN, poll
from typing import NamedTuple, NoReturn

import numpy as np

from raynforce.envs.executors import GRACE, EnvFacts, LaneReport, LaneWorker
from raynforce.envs.lane import Lane, LanePlan
from raynforce.envs.rows import Rows, row_bytes
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
DONE = struct.Struct("<III")  # lane, generation, whether there is more to read on its socket
STEP, CALL, MEMORY = b"s", b"c", b"m"
_PR_SET_PDEATHSIG = 1


class SpawnRequest(NamedTuple):
    lane: int
    generation: int
    plan: LanePlan
    episode: int
    given: bytes  # the environment itself, where it is not from a module


def main() -> None:
    gc.freeze()  # what is imported by now is shared by all of them, as long as it is not written to
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    ForkServer(line).run()


class ForkServer:
    """The processes that were forked and have not ended."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._requests = line, Connection(os.dup(line.fileno()))
        self._libc, self._pid = ctypes.CDLL(None), os.getpid()
        self._children: dict[int, tuple[int, int, int]] = {}  # pid, lane, generation, by pidfd
        self._pipe = receive_fd(line)
        self._events = poll()
        self._events.register(line, POLLIN)

    def run(self) -> None:
        parent = os.pidfd_open(os.getppid())  # a process that it has forked may hold its end of the line open
        self._events.register(parent, POLLIN)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                for fd, _ in self._events.poll():
                    if fd == parent:
                        raise EOFError
                    if fd in self._children:
                        self._reap(fd)
                    else:
                        self._serve(self._requests.recv())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GRACE)  # the end of this process, and with it of children that have not closed their envs by then
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _serve(self, request: SpawnRequest | tuple[int, int]) -> None:
        """Fork a process, or kill the one of a lane and generation."""
        if not isinstance(request, SpawnRequest):
            for fd in [fd for fd, child in self._children.items() if child[1:] == request]:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return
        line = receive_fd(self._line)
        try:
            pid = os.fork()
        except OSError as error:
            self._requests.send((request.lane, request.generation, str(error)))
        else:
            if not pid:
                self._run_child(request, line)
            fd = os.pidfd_open(pid)
            self._children[fd] = pid, request.lane, request.generation
            self._events.register(fd, POLLIN)
        os.close(line)

    def _reap(self, fd: int) -> None:
        self._events.unregister(fd)
        os.close(fd)
        pid, lane, generation = self._children.pop(fd)
        self._requests.send((lane, generation, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    def _run_child(self, request: SpawnRequest, line: int) -> NoReturn:
        code = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == self._pid:  # otherwise that came too late
                for fd in self._children:
                    os.close(fd)
                self._line.close()
                self._requests.close()
                EnvProcess(request, socket.socket(fileno=line), self._pipe).run()
                code = 0
        except (EOFError, ConnectionError):  # the other side is gone
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


class EnvProcess(LaneWorker):
    def __init__(self, request: SpawnRequest, line: socket.socket, pipe: int) -> None:
        super().__init__(request.plan, request.lane, request.episode)
        self._given, self._line, self._pipe = request.given, line, pipe
        self._answers = Connection(os.dup(line.fileno()))
        self._done, self._more = (DONE.pack(request.lane, request.generation, flag) for flag in (0, 1))

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

    def _make(self) -> EnvFacts:
        unpack(self._given)
        return super()._make()

    def _map(self, lane: Lane) -> None:
        memory, size = receive_fd(self._line), row_bytes(lane.spec)
        rows = memoryview(mmap.mmap(memory, 0))
        os.close(memory)
        lane.write_to(Rows(lane.spec, 1, rows[self.index * size : (self.index + 1) * size]))
        self.action = lane.row.action

    def _tell(self, report: LaneReport | None) -> None:
        os.write(self._pipe, self._done if report is None else self._more)
        if report is not None:
            self._answers.send(report if report.what != "error" else report._replace(value=_portable(report.value)))


def receive_fd(line: socket.socket) -> int:
    """A descriptor that comes with a byte of its own; not inherited."""
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
