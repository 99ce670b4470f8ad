"""A simulator process with its connection, from its start to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from raynforce.envs.launching import Launched
from raynforce.errors import EnvError
from raynforce.protocol.channel import Link, Listener
from raynforce.protocol.handshake import Deadlines, Offer

START_SECONDS = 60.0
_DAY = 86_400_000  # milliseconds


class Simulator:
    """A simulator process and the connection to it."""

    def __init__(self, env: str, envs: int, offer: Offer, seconds: float) -> None:
        """It has so many `seconds` to connect."""
        self._seconds, self.born = seconds, time.monotonic()
        self._until = self.born + seconds
        self.played = 0  # episodes that have ended in it
        self.link: Link | None = None  # once it has connected
        self._listener = Listener("unix", offer)
        address = self._listener.address
        try:
            self.process = Launched(env, f"unix:@{address.where}", address.token, address.launch, envs)
        except BaseException:
            self._listener.close()
            raise

    def fileno(self) -> int:
        """Readable when it connects, or once it has, when it says something."""
        return self._listener.fileno() if self.link is None else self.link.fileno()

    def connect(self) -> Link | None:
        """The connection, if it is there by now; never waits. An `EnvError` with the cause if it will not come."""
        if self.link is None:
            self.link = self._listener.accept()
        if self.link is not None:
            return self.link
        env, process = self.process.env, self.process
        if any(code != "lost" for code in self._listener.refused):
            raise EnvError(f"env {env!r} was refused: {self._listener.told}")
        if self._listener.refused or process.ended():
            told = f"env {env!r} {process.ending()}, before it had connected"
            raise EnvError(f"{told}: `raynforce sim check COMMAND` tells what a simulator has to do")
        if time.monotonic() > self._until:
            process.kill()
            raise EnvError(f"env {env!r} has not connected within {self._seconds:g} s{process.words()}")
        return None

    def close(self) -> None:
        if self.link is not None:
            self.link.close("the trainer is done")
        self._listener.close()
        self.process.close()


def patient_offer(hang_seconds: float, start_seconds: float, config: Mapping[str, Any]) -> Offer:
    """What a simulator is offered. Neither side sends PING: who ends hangs up, and a trainer may be busy for long."""
    step_ms, reset_ms = (int(min(_DAY, 1000 * seconds)) for seconds in (hang_seconds, start_seconds))
    deadlines = Deadlines(step_ms=step_ms, reset_ms=reset_ms, ping_ms=_DAY, silence_ms=_DAY)
    can = "timing", "info", "snapshot"
    return Offer(autoreset=("same_step",), capabilities=can, deadlines=deadlines, config=config)
