"""What a process of the `process` runtime runs: `python -m raynforce.runtimes.worker SOCKET GUARD`."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from raynforce.errors import RaynforceError, summary
from raynforce.runtimes.base import RoleError
from raynforce.runtimes.messages import Packed, pack, receive, send
from raynforce.runtimes.role_host import RoleHost

_F_SETSIG = 10  # Linux; the fcntl module has no name for it before Python 3.12


def main() -> None:
    """Build the role, then answer calls until the driver hangs up."""
    connection, guard = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    connection.set_inheritable(False)  # a simulator that the role starts must not keep them open
    os.set_inheritable(guard, False)
    die_with_driver(guard)
    forget_home()
    host = RoleHost()
    while (message := _next(connection, host.place.awake)) is not None:
        (number, method, parts), values = message
        ok, answer = _answer(host, method, values, parts)
        del message, values
        try:
            send(connection, (number, ok), answer)
        except ConnectionError:
            break
        del answer  # shared memory that only we still hold goes back now, not after the next call
    host.close()


def _next(connection: socket.socket, awake: float) -> tuple[tuple[Any, ...], list[Packed]] | None:
    """The next call. A core that has gone to sleep is slow for a while, so a short wait is spent awake."""
    if awake:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        until = time.monotonic() + awake
        while not poll.poll(0) and time.monotonic() < until:
            pass
    return receive(connection)


def _answer(host: RoleHost, method: str, values: list[Packed], parts: int) -> tuple[bool, list[Packed]]:
    try:
        args = [value.value() for value in values]
        answer = getattr(host, method)(*args)
        return True, [pack(answer)] if parts == 1 else [pack(part) for part in answer]
    except RaynforceError as error:
        return False, [pack(error)]
    except Exception as error:  # an answer that cannot be packed
        return False, [pack(RoleError(f"{host.name}: {summary(error)}"))]


def forget_home() -> None:
    """Take our first entry out of PYTHONPATH: it led here, and is not for a program that the role may start."""
    _, _, rest = os.environ.pop("PYTHONPATH").partition(os.pathsep)
    if rest:
        os.environ["PYTHONPATH"] = rest


def die_with_driver(guard: int) -> None:
    """Let the kernel kill this process group, whatever it is doing, when the driver dies and with it the writing end of
    `guard`."""
    # Ctrl-C and a batch system's SIGTERM are the driver's to answer. Programs that we start would inherit `SIG_IGN`.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    fcntl.fcntl(guard, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(guard, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(guard, fcntl.F_SETFL, fcntl.fcntl(guard, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(guard)
    if poll.poll(0):  # it was gone before we were ready
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
