"""`raynforce submit` and `raynforce jobs`: runs as jobs of a Ray cluster, seen from here."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from shlex import quote
from typing import Any, TextIO

from raynforce.errors import RaynforceError, UsageError
from raynforce.ops import jobs as api
from raynforce.ops.dashboard import DEFAULT
from raynforce.ops.jobs import ENDED, Job, failure, result_in
from raynforce.runs.progress import LiveProgress, can_draw, clock_time, read_plain_line
from raynforce.runs.terminal import columns, shortened

ACTIONS = ("list", "logs", "stop", "status", "wait")
SEVERAL = ("seeds done ", "trials ")  # how lines begin that tell where several runs stand
DETACHED = 128 + signal.SIGINT


def submit(words: Sequence[str], *, address: str | None, me: str, as_json: bool, detach: bool, **how: Any) -> int:
    """Submit a command and follow it to its end, unless `detach`."""
    if not words:
        raise UsageError(f"submit needs a command, such as: {me} submit --runs s3://bucket/runs train ppo CartPole-v1")
    stream = sys.stderr if as_json else sys.stdout
    job = api.submit(words, address=address, **how)
    told = f"job {job.id} at {job.address}" + (f", its run at {job.run}" if job.run else "")
    _say(stream, told if job.details.get("status") == "PENDING" else f"{told}: it is {_word(job)} already")
    if job.note:
        _say(stream, f"note: {job.note}")
    if detach:
        _how_to_come_back(stream, job, me)
        return _tell(job, None, as_json, code=0)
    return _follow(job, stream, me, as_json)


def act(action: str, id: str | None, *, address: str | None, me: str, follow: bool, **how: Any) -> int:
    """What `raynforce jobs` does."""
    as_json, timeout = how["as_json"], how["timeout"]
    if follow and action != "logs":
        raise UsageError(f"--follow is for logs: {me} jobs logs ID --follow")
    if timeout is not None and action != "wait":
        raise UsageError(f"--timeout is for wait: {me} jobs wait ID --timeout S")
    if action == "list" or id is None:
        return _list(api.jobs(address), as_json)
    job = Job(id, address)
    stream = sys.stderr if as_json else sys.stdout
    if action == "logs":
        if follow:
            return _follow(job, stream, me, as_json)
        lines = list(job.logs())
        if not as_json:
            print(*lines, sep="\n")
        return _tell(job, lines, as_json, code=0)
    if action == "stop":
        stopped = job.stop()
        if stopped:
            _say(stream, f"job {job.id} writes its last checkpoint, and ends")
            job.wait()
        _say(stream, f"job {job.id} is {_word(job)}" if stopped else f"job {job.id} was {_word(job)} already")
        return _tell(job, None, as_json, code=0)
    if action == "wait":
        job.wait(timeout)
        return _ended(job, _log_if_any(job), stream, as_json)
    _say(stream, *_facts(job))
    return _tell(job, None, as_json, code=0)


def _follow(job: Job, stream: TextIO, me: str, as_json: bool) -> int:
    """Show a job's log until it ends; Ctrl-C leaves it alone."""
    lines: list[str] = []
    view = _View(stream, f"job {job.id}", (job.details.get("start_time") or 1e3 * time.time()) / 1e3)
    try:
        with _interruptible():
            for line in job.logs(follow=True):
                lines.append(line)
                view.show(line)
    except KeyboardInterrupt:
        view.close()
        _say(stream, f"detached: job {job.id} goes on")
        _how_to_come_back(stream, job, me)
        return _tell(job, None, as_json, code=DETACHED)
    finally:
        view.close()
    return _ended(job, lines, stream, as_json)


class _View:
    """The lines of a log: where there is a terminal, progress is a panel as of a local run."""

    def __init__(self, stream: TextIO, title: str, began: float) -> None:
        self._stream, self._began = stream, began
        self._panel = LiveProgress(stream) if can_draw(stream) else None
        self._trained = False
        if self._panel is not None:
            self._panel.start(title)

    def show(self, line: str) -> None:
        if result_in([line]) is not None or line.startswith("raynforce: "):  # which are told at the end
            return
        if not line and self._trained:  # the summary comes
            self.close()
        if self._panel is None:
            print(line, file=self._stream, flush=True)
        elif (state := read_plain_line(line, time.time() - self._began)) is not None:
            self._trained = True
            self._panel.update(state)
        elif line.startswith(SEVERAL):
            self._trained = True
            self._panel.announce(line)
        else:
            self._panel.message(line)

    def close(self) -> None:
        if self._panel is not None:
            self._panel.stop()
            self._panel = None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises here, also where a script has set it to be ignored or a library has its own handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _ended(job: Job, lines: Sequence[str], stream: TextIO, as_json: bool) -> int:
    """Tell how a job has ended, and exit as its run would have."""
    status, code = job.status(), job.exit_code
    if status == "failed" and code not in (130, 143):
        if as_json:
            _tell(job, lines, as_json, code=code or 1)
        raise failure(job, lines)
    _say(stream, f"job {job.id} is {_word(job)}")
    return _tell(job, lines, as_json, code=code or 0)


def _tell(job: Job, lines: Sequence[str] | None, as_json: bool, *, code: int) -> int:
    if as_json:
        if lines is None and _word(job) in ENDED:
            lines = _log_if_any(job)
        print(json.dumps({**_about(job), "result": result_in(lines or ())}))
    return code


def _about(job: Job) -> dict[str, Any]:
    facts = {"job": job.id, "submission": job.submission, "address": job.address, "status": _word(job)}
    return {**facts, "exit_code": job.exit_code, "run": job.run, "command": job.command}


def _log_if_any(job: Job) -> list[str]:
    """Of a job whose node is gone there is none any more."""
    with suppress(RaynforceError):
        return list(job.logs())
    return []


def _how_to_come_back(stream: TextIO, job: Job, me: str) -> None:
    at = "" if job.address == DEFAULT else f" --address {quote(job.address)}"
    commands = {"follow": f"logs {quote(job.id)} --follow", "stop": f"stop {quote(job.id)}"}
    for what, words in commands.items():
        _say(stream, f"  to {what} it: {me} jobs {words}{at}")


def _list(found: Sequence[Job], as_json: bool) -> int:
    if as_json:
        times = ("start_time", "end_time")
        print(json.dumps({"jobs": [_about(job) | {name: job.details.get(name) for name in times} for job in found]}))
        return 0
    if not found:
        print("no jobs were submitted to this cluster")
        return 0
    width = max(len(job.submission) for job in found)
    for job in found:
        head = f"{job.submission:<{width}}  {_word(job):<9}  {clock_time(_seconds(job)):>8}  "
        print(head + shortened(job.command, max(20, columns(sys.stdout) - len(head))))
    return 0


def _facts(job: Job) -> Iterator[str]:
    yield f"job {job.id} is {_word(job)}, {clock_time(_seconds(job))} after it was submitted"
    if job.run:
        yield f"  run: {job.run}"
    yield f"  command: {job.command}"
    if job.exit_code:
        yield f"  exit code: {job.exit_code}"


def _seconds(job: Job) -> float:
    began, ended = (job.details.get(name) for name in ("start_time", "end_time"))
    return (ended or 1e3 * time.time()) / 1e3 - (began or 0) / 1e3


def _word(job: Job) -> str:
    return str(job.details["status"]).lower()


def _say(stream: TextIO, *lines: str) -> None:
    print(*lines, sep="\n", file=stream, flush=True)
