"""What a run tells while it goes on, and what it is asked for; a thread of its own does the writing and reading."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from raynforce.errors import RaynforceError
from raynforce.runs import asking
from raynforce.runs.asking import Request
from raynforce.runs.directory import RunDirectory
from raynforce.runtimes.member import Member

EVERY = 1.0  # seconds
AFTER_FAILURE = 30.0  # seconds until a store that failed is tried again
END = 2.0  # seconds that the disk is waited for at the end


class Live:
    def __init__(self, run: RunDirectory) -> None:
        self._run = run.path
        self._asked: set[Request] = set()
        self._facts: dict[str, Any] | None = None  # not written yet
        self._due = 0.0
        self._end = threading.Event()
        with contextlib.suppress(OSError):
            asking.asked(self._run)  # what was asked of an earlier process
        self._thread = threading.Thread(target=self._work, name="raynforce-live", daemon=True)
        self._thread.start()
        self._sender = Sender(run) if run.is_mirrored else None

    @property
    def is_remote(self) -> bool:
        return self._sender is not None

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def tell(self, members: Sequence[Member], **facts: Any) -> None:
        """Have it written: each role with its state, and more."""
        self._due = time.monotonic() + EVERY
        self._facts = {"time": time.time(), "roles": [_role(member) for member in members], **facts}

    def asked(self) -> set[Request]:
        found = self._asked
        if found:
            self._asked = set()
        return found

    def _work(self) -> None:
        while not self._end.wait(EVERY):
            self._look()
        self._look()

    def _look(self) -> None:
        facts, self._facts = self._facts, None
        with contextlib.suppress(OSError):  # nobody can look on while the disk fails, that is all
            if facts is not None:
                asking.replace(self._run / asking.LIVE, text := json.dumps(facts))
                if self._sender is not None:
                    self._sender.newest = text
            if found := asking.asked(self._run):
                self._asked = self._asked | found

    def close(self) -> None:
        self._end.set()
        if self._sender is not None:
            self._sender.end.set()
        self._thread.join(END)


class Sender:
    """Sends what a run at a URL tells to there, the newest alone, in a thread that nobody waits for."""

    def __init__(self, run: RunDirectory) -> None:
        self._send = run.send_live
        self.newest: str | None = None
        self.end = threading.Event()
        threading.Thread(target=self._work, name="raynforce-live-send", daemon=True).start()

    def _work(self) -> None:
        pause = EVERY
        while not self.end.wait(pause):
            text, self.newest, pause = self.newest, None, EVERY
            if text is not None:
                try:
                    self._send(text)
                except RaynforceError:  # checkpoints tell of a store that fails
                    pause = AFTER_FAILURE


def _role(member: Member) -> dict[str, Any]:
    facts: dict[str, Any] = {"role": member.name, "kind": member.kind, "state": _state(member)}
    facts |= {"restarts": member.failures} if member.failures else {}
    handle: Any = member.handle
    if hasattr(handle, "where"):
        with contextlib.suppress(Exception):  # a node that has just left
            found = handle.where() if member.proven else None
            facts |= {"node": None} if found is None else {"pid": found.pid, "node": found.host}
        return facts
    inline = handle is not None and not hasattr(handle, "process")  # it was at work until now, and tells by itself
    facts |= {"state": "working"} if inline and facts["state"] == "waiting" else {}
    process = getattr(handle, "process", None)
    return {**facts, "pid": os.getpid() if inline else getattr(process, "pid", None), "node": os.uname().nodename}


def _state(member: Member) -> str:
    if member.gone:
        return "given up"
    if member.absent:
        return "away"
    if member.down_since is not None or member.handle is None:
        return "restarting"
    if not member.proven and member.fresh:
        return "starting"
    return "working" if member.open else "waiting"
