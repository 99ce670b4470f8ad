"""Where processes of environments come from: one that has a single thread and all imported, forked for each lane."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from select import POLLIN, poll
from typing import TYPE_CHECKING, Any, NoReturn

from raynforce.threads import cap_threads

if TYPE_CHECKING:
    from raynforce.envs.lane import Lane

GRACE = 3.0
"""Seconds that environments have to close."""
TOLD = struct.Struct("<III")
"""What a lane writes when it is done: its index, its generation, and whether there is more to read on its socket."""
STEP, CALL, MEMORY = b"s", b"c", b"m"
_PR_SET_PDEATHSIG = 1


class Birth:
    """An order to the nursery: a process for a lane. Its socket comes after it.

    `given` is the environment itself, where it is not from a module.
    """

    def __init__(self, lane: int, generation: int, plan: Any, episode: int, given: bytes) -> None:
        self.lane, self.generation, self.plan, self.episode, self.given = lane, generation, plan, episode, given


def main() -> None:
    """Fork and bury processes until the other side hangs up."""
    cap_threads()  # before numpy is imported: a process that forks must have no other threads
    import raynforce.envs.lane  # noqa: F401  # once for all of them

    gc.freeze()  # what is there now is shared by all of them, as long as nobody writes to it

    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    Nursery(line).run()


class Nursery:
    """The processes that were forked and have not ended."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._orders = line, Connection(os.dup(line.fileno()))
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
                    self._bury()
                if self._line.fileno() in ready:
                    self._obey(self._orders.recv())
        except (EOFError, ConnectionError):
            pass
        self._end()

    def _obey(self, order: Birth | tuple[int, int]) -> None:
        if isinstance(order, tuple):
            for pid, child in self._children.items():
                if child == order:
                    os.kill(pid, signal.SIGKILL)
            return
        fd = receive_fd(self._line)
        try:
            pid = os.fork()
        except OSError as error:
            self._orders.send((order.lane, order.generation, str(error)))
        else:
            if not pid:
                self._live(order, fd)
            self._children[pid] = order.lane, order.generation
        os.close(fd)

    def _bury(self) -> None:
        """Tell of children that have ended."""
        os.read(self._ended, 4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._orders.send((*self._children.pop(pid), os.waitstatus_to_exitcode(status)))

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

    def _live(self, birth: Birth, fd: int) -> NoReturn:
        """What a child does, until its end."""
        code = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == self._pid:  # otherwise that came too late
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._line.close()
                self._orders.close()
                os.close(self._ended)
                Resident(birth, socket.socket(fileno=fd), self._told).run()
                code = 0
        except (EOFError, ConnectionError):  # nobody is there any more
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


class Resident:
    """A lane in a process of its own: it does as it is asked, until the other side hangs up."""

    lane: Lane

    def __init__(self, birth: Birth, line: socket.socket, told: int) -> None:
        self._birth, self._line, self._told = birth, line, told
        self._answers = Connection(os.dup(line.fileno()))
        self._done, self._more = (TOLD.pack(birth.lane, birth.generation, flag) for flag in (0, 1))

    def run(self) -> None:
        import numpy as np

        np.random.seed()  # noqa: NPY002  # otherwise all of them would draw the same, if their envs use this
        if not self._try(self._make):
            return
        orders = {STEP: self._step, CALL: self._call, MEMORY: self._map}
        while order := os.read(self._line.fileno(), 1):
            self._try(orders[order])
        self.lane.close()

    def _make(self) -> None:
        from raynforce.given import unpack

        birth = self._birth
        unpack(birth.given)
        self.lane = birth.plan.lane(birth.lane, birth.episode)
        self._about = self.lane.about()
        self._tell("spaces", self._about)

    def _map(self) -> None:
        """Use memory that others can read too."""
        from raynforce.envs.rows import Rows, row_bytes

        memory, size = receive_fd(self._line), row_bytes(self.lane.spec)
        rows = memoryview(mmap.mmap(memory, 0))
        os.close(memory)
        self.lane.write_to(Rows(self.lane.spec, 1, rows[self._birth.lane * size : (self._birth.lane + 1) * size]))
        self._tell("made", self._about)

    def _step(self) -> None:
        broke = self.lane.step_one(self.lane.row.action)
        if (told := self.lane.take_told(broke)) is not None:
            self._tell("step", told)
        else:
            os.write(self._told, self._done)

    def _call(self) -> None:
        method, args = self._answers.recv()
        self._tell("answer", getattr(self.lane, method)(*args))

    def _tell(self, what: str, value: Any) -> None:
        os.write(self._told, self._more)
        self._answers.send((what, value))

    def _try(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except (EOFError, ConnectionError):
            raise
        except BaseException as error:
            self._tell("error", portable(error))
            return False
        return True


def receive_fd(line: socket.socket) -> int:
    """A descriptor that comes with a byte of its own; programs that are started do not get it."""
    byte, fds, _, _ = socket.recv_fds(line, 1, 1)
    if not byte:
        raise EOFError
    os.set_inheritable(fds[0], False)
    return fds[0]


def portable(error: BaseException) -> BaseException:
    """An error that can travel, with where it was raised."""
    import pickle

    from raynforce.errors import EnvError, RaynforceError, summary

    if isinstance(error, RaynforceError):
        error.trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return EnvError(summary(error))
