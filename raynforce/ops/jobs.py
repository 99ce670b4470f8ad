"""Runs as jobs of a Ray cluster: submitted, followed, stopped, and submitted again when they were lost.

A run's id is its submission id. Ray takes an id once, so the second job of a run that was lost is `ID~2`, and so on; of
two that submit at once, one job is made. The job is a command that goes on with its run if there is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from raynforce import __version__
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.command import Command, command
from raynforce.ops.dashboard import Dashboard, Taken, Unknown, Unreachable

Status = Literal["pending", "running", "succeeded", "failed", "stopped"]
ENDED = ("succeeded", "failed", "stopped")
GRACE = 300  # seconds for the last checkpoint and its upload; Ray's own 3 are not enough
LOST = 60.0  # seconds without an answer after which a cluster counts as gone
PAUSE = 1.0
LAST = ("{", "raynforce: ")  # how the last line of a job begins: its result, or what went wrong
STOPPED = 143  # as of a local run that SIGTERM has ended
LATER = "~"  # between a run's id and the number of its job, from the second on


class Job:
    """A job of a cluster, by the id of its run: the newest of the jobs that this run has had there."""

    def __init__(self, id: str, address: str | None = None) -> None:
        self._dashboard = Dashboard(address)
        self._details = _newest(self._dashboard, id)
        self.submission = str(self._details["submission_id"])
        """The id that Ray knows it by."""
        self.note = ""
        """What there was to tell when it was submitted."""

    @classmethod
    def _of(cls, dashboard: Dashboard, details: Mapping[str, Any]) -> Job:
        job = cls.__new__(cls)
        job._dashboard, job._details = dashboard, dict(details)
        job.submission, job.note = str(details["submission_id"]), ""
        return job

    def __repr__(self) -> str:
        return f"<Job {self.id}: {_status(self._details)}>"

    @property
    def id(self) -> str:
        """Of the run."""
        return self.submission.partition(LATER)[0]

    @property
    def address(self) -> str:
        return self._dashboard.url

    @property
    def command(self) -> str:
        """As it would be typed."""
        return re.sub(r"^exec \S+ -m raynforce ", "raynforce ", str(self._details.get("entrypoint") or ""))

    @property
    def run(self) -> str | None:
        """Where the run is kept."""
        return (self._details.get("metadata") or {}).get("run")

    @property
    def details(self) -> Mapping[str, Any]:
        """What Ray tells of it, without its environment."""
        return {key: value for key, value in self._details.items() if key != "runtime_env"}

    def status(self) -> Status:
        self._details = self._dashboard.job(self.submission)
        return _status(self._details)

    @property
    def exit_code(self) -> int | None:
        """As of a local run; None while it lasts, as far as `status` was last asked."""
        status, code = _status(self._details), self._details.get("driver_exit_code")
        if status == "succeeded":
            return 0
        if status == "stopped":
            return STOPPED
        if status == "failed":
            return 1 if code is None else 128 - code if code < 0 else int(code) or 1
        return None

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Its lines so far; with `follow` also those to come, until it has ended."""
        if follow:
            yield from self._followed()
        else:
            yield from _own_lines(self._dashboard.logs(self.submission).splitlines())

    def _followed(self) -> Iterator[str]:
        """From the beginning; where the connection breaks, it goes on after what was seen."""
        seen, answered = 0, time.monotonic()
        lines = _Lines()
        while True:
            skip = seen
            try:
                for chunk in self._chunks() if self.status() not in ENDED else ():
                    answered = time.monotonic()
                    new, skip = chunk[skip:], max(0, skip - len(chunk))
                    seen += len(new)
                    whole = lines.add(new)
                    yield from _own_lines(whole)
                    if whole and whole[-1].startswith(LAST) and self._ends():
                        break
                if self.status() in ENDED:
                    yield from _own_lines([*lines.add(self._dashboard.logs(self.submission)[seen:]), *lines.rest()])
                    return
                answered = time.monotonic()
            except Unknown as error:
                raise _gone(self) from error
            except Exception as error:  # of a connection that broke; Ray's client raises what it likes
                if time.monotonic() - answered > LOST:
                    raise _gone(self) from error
            time.sleep(PAUSE)

    def _ends(self) -> bool:
        """Whether it has ended right after its result; Ray's log would tell so seconds later."""
        until = time.monotonic() + PAUSE
        while self.status() not in ENDED and time.monotonic() < until:
            time.sleep(PAUSE / 10)
        return _status(self._details) in ENDED

    def _chunks(self) -> Iterator[str]:
        """What Ray's client hears of the log, until it ends or the connection breaks."""
        with asyncio.Runner() as runner:
            chunks = self._dashboard.client().tail_job_logs(self.submission)
            try:
                while True:
                    try:
                        yield runner.run(anext(chunks))
                    except StopAsyncIteration:
                        return
            finally:
                runner.run(chunks.aclose())

    def wait(self, timeout: float | None = None) -> Status:
        """Until it has ended; `RaynforceError` if that takes longer than `timeout` seconds."""
        began = answered = time.monotonic()
        while True:
            try:
                if (status := self.status()) in ENDED:
                    return status
                answered = time.monotonic()
            except Unknown as error:
                raise _gone(self) from error
            except Unreachable as error:
                if time.monotonic() - answered > LOST:
                    raise _gone(self) from error
            if timeout is not None and time.monotonic() - began >= timeout:
                now = _status(self._details)
                raise RaynforceError(f"job {self.id} has not ended within {timeout:g} s: it is {now}")
            time.sleep(PAUSE)

    def stop(self) -> bool:
        """Ask it to write a last checkpoint and end; False if it had ended already. `wait` says when it is done."""
        return self.status() not in ENDED and self._dashboard.stop(self.submission)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait, and give what the command prints as `--json`; raises what a local run would have raised."""
        self.wait(timeout)
        lines = list(self.logs())
        found = result_in(lines)
        if found is None or self.exit_code not in (0, STOPPED, 130):
            raise failure(self, lines)
        return found


def result_in(lines: Sequence[str]) -> dict[str, Any] | None:
    """The object that `--json` has printed, which is the last of its kind."""
    for line in reversed(lines):
        if line.startswith("{"):
            with suppress(ValueError):
                found = json.loads(line)
                return found if isinstance(found, dict) else None
    return None


def failure(job: Job, lines: Sequence[str]) -> RaynforceError:
    """What a job that has failed says of it, as the error that a local run would have been."""
    kind = UsageError if job.exit_code == 2 else RaynforceError
    told = [line.removeprefix("raynforce: ") for line in lines if line.startswith(("raynforce: ", "failed: "))]
    if told:
        return kind(f"{told[-1]} (job {job.id})")
    code, last = job.exit_code, next((line for line in reversed(lines) if line.strip()), "")
    if code == 127 or "No module named" in last:
        fix = "give the Python of its nodes with --python, and install there what raynforce needs"
        return UsageError(f"job {job.id} could not start: {last.strip()}; {fix}")
    if code is not None and code > 128:
        return RaynforceError(f"job {job.id} was killed by signal {code - 128}: submit it again to go on")
    message = str(job.details.get("message") or "").strip().splitlines()
    return kind(f"job {job.id} has {_status(job.details)}: {last.strip() or (message or ['no log'])[0]}")


def submit(
    command_line: Sequence[str],
    *,
    address: str | None = None,
    runs: str | None = None,
    id: str | None = None,
    env: Sequence[str] = (),
    working_dir: str | Path | None = None,
    python: str = "python",
    cpus: float = 0,
    gpus: float = 0,
    grace: int = GRACE,
) -> Job:
    """Submit a command of `raynforce`, in words, to a Ray cluster; returns its job without waiting for it.

    `job = raynforce.submit(["train", "ppo", "CartPole-v1"], runs="s3://bucket/runs")`, then `job.result()`.

    `address` is the URL of the cluster's dashboard; `runs` where runs are kept: a URL, or a folder that all nodes see.
    The run's `id` follows from the command, so that submitting it twice is one run: a job that lasts or has succeeded
    is returned as it is, one that was lost goes on. `env` names variables of this process that the job gets;
    `working_dir` is sent in place of the folder of your modules; `python` is the interpreter there. With `cpus` or
    `gpus` the driver asks for them and may be on any node, else it is on the head. After a stop it has `grace` seconds.
    """
    if isinstance(command_line, str):
        raise UsageError(f"a command is a list of words, not {command_line!r}: use .split()")
    made = command(list(command_line), None if runs is None else str(runs), id)
    variables = _variables(env, grace)
    dashboard = Dashboard(address)
    dashboard.require_jobs()
    before = _attempts(dashboard, made.id)
    if before and (going := _goes_on_as(dashboard, before[-1], made)) is not None:
        return going
    with ExitStack() as stack:
        request = {
            "entrypoint": made.entrypoint(python),
            "runtime_env": {**_code(made, working_dir, stack), "env_vars": variables},
            "metadata": _metadata(made),
            "entrypoint_num_cpus": cpus or None,
            "entrypoint_num_gpus": gpus or None,
            "submission_id": made.id if not before else f"{made.id}{LATER}{len(before) + 1}",
        }
        try:
            submission = dashboard.submit(request)
        except Taken:  # another has submitted it at the same moment
            found = dashboard.job(str(request["submission_id"]))
            going = _goes_on_as(dashboard, found, made)
            if going is None:
                raise UsageError(f"job {made.id} was submitted and ended at the same moment: try again") from None
            return going
    job = Job._of(dashboard, dashboard.job(submission))
    job.note = made.note
    return job


def jobs(address: str | None = None) -> list[Job]:
    """All jobs that were submitted to a cluster, the newest first; of a run with several, each."""
    dashboard = Dashboard(address)
    dashboard.require_jobs()
    return [Job._of(dashboard, details) for details in dashboard.jobs()]


def _attempts(dashboard: Dashboard, id: str) -> list[dict[str, Any]]:
    """The jobs that a run has had on this cluster, the newest last."""

    def number(job: Mapping[str, Any]) -> int:
        last = str(job["submission_id"]).partition(LATER)[2]
        return int(last) if last.isdecimal() else 1

    found = [job for job in dashboard.jobs() if str(job["submission_id"]).partition(LATER)[0] == id]
    return sorted(found, key=number)


def _newest(dashboard: Dashboard, id: str) -> dict[str, Any]:
    if LATER in id:
        return dashboard.job(id)
    dashboard.require_jobs()
    if not (found := _attempts(dashboard, id)):
        from raynforce.errors import nearest

        known = {str(job["submission_id"]).partition(LATER)[0] for job in dashboard.jobs()}
        raise Unknown(f"there is no job {id!r} at {dashboard.url}{nearest(id, known)}; `raynforce jobs` lists them")
    return found[-1]


def _goes_on_as(dashboard: Dashboard, details: Mapping[str, Any], made: Command) -> Job | None:
    """The job that a command is already; None if it has to be submitted; `UsageError` if its id is another's."""
    status, metadata = _status(details), details.get("metadata") or {}
    job = Job._of(dashboard, details)
    if metadata.get("command") == made.digest:
        return None if status in ("failed", "stopped") else job
    if status not in ENDED:
        how = f"wait, stop it with `raynforce jobs stop {made.id}`, or give another --id"
        raise UsageError(f"job {made.id} is {status} with another command ({job.command}): {how}")
    if made.kind in ("train", "tune") and not (job.exit_code == 2 and status == "failed"):
        how = "give another --id"
        if made.kind == "train":
            how += f", or change the run with: raynforce submit resume {made.run} ..."
        raise UsageError(f"run id {made.id} is taken by another command ({job.command}): {how}")
    return None


def _status(details: Mapping[str, Any]) -> Status:
    status: Status = str(details["status"]).lower()  # type: ignore[assignment]
    return status


def _variables(names: Sequence[str], grace: int) -> dict[str, str]:
    """Of this process, those that were named; and how long the supervisor of the job waits after SIGTERM."""
    if grace < 1:
        raise UsageError(f"grace is {grace!r}: give the seconds that the last checkpoint may take, 1 or more")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageError(f"--env {missing[0]}: there is no such variable here; set it, or drop it")
    if reserved := [name for name in names if name.startswith("RAY_")]:
        raise UsageError(f"--env {reserved[0]}: Ray sets its own variables on the cluster; drop it")
    return {**{name: os.environ[name] for name in names}, "RAY_JOB_STOP_WAIT_TIME_S": str(int(grace))}


def _metadata(made: Command) -> dict[str, str]:
    found = {"tool": f"raynforce {__version__}", "command": made.digest, "run": made.run}
    return {key: value for key, value in found.items() if value}


def _code(made: Command, working_dir: str | Path | None, stack: ExitStack) -> dict[str, Any]:
    """This package and the user's modules, as a run on Ray sends them."""
    from raynforce.runtimes.ray.shipping import packed, roots_of

    if working_dir is None:
        return packed(roots_of(made.names), stack)
    root = Path(working_dir).expanduser().resolve()
    if not root.is_dir():
        raise UsageError(f"--working-dir {str(working_dir)!r} is no folder")
    return packed([root], stack)


def _gone(job: Job) -> RaynforceError:
    where = f"its run is at {job.run}; " if job.run else ""
    why = f"the cluster at {job.address} is gone, or is another one"
    return RaynforceError(f"job {job.id} is lost: {why}; {where}submit it again to go on")


class _Lines:
    """Whole lines out of pieces."""

    def __init__(self) -> None:
        self._begun = ""

    def add(self, text: str) -> list[str]:
        *whole, self._begun = (self._begun + text).split("\n")
        return whole

    def rest(self) -> list[str]:
        begun, self._begun = self._begun, ""
        return [begun] if begun else []


def _own_lines(lines: Sequence[str]) -> Iterator[str]:
    """Without those that Ray puts before them."""
    for line in lines:
        if "INFO job_manager.py" not in line and not line.startswith("Running entrypoint for job "):
            yield line
