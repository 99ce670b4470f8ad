"""What a user typed as a run: a local directory, or a URL whose run has a working copy on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import asking, disk, lock, remote_lock
from raynforce.runs.directory import RunDirectory, Saved
from raynforce.runs.remote import Remote, WorkingCopy
from raynforce.runs.store import is_url
from raynforce.trees import Tree

FINISH_SECONDS = 30.0  # that the last push of a run is tried for
PAUSE_SECONDS = 1.0  # between two attempts
TAKEOVER_SECONDS = 10.0  # that the end of a process of this machine is waited for
RELEASE_SECONDS = 10.0  # that a store is waited for when the run gives it back


class NotMirrored(RaynforceError):
    """What was written is safe in the working copy, but not at the URL."""


class MirroredRun(RunDirectory):
    """A run at a URL: everything happens in its working copy, and each checkpoint is then pushed."""

    patience = 3600.0  # an upload takes its time
    is_mirrored = True

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote.working_copy())
        self.remote = remote
        self.shown = remote.url
        self._created = self._pushed = False
        self._held: lock.Lock | None = None
        self._pushing = threading.Lock()

    def must_be_new(self) -> None:
        """Refuse a URL where there is anything; what an older run left of its working copy here is removed."""
        resume, other = f"raynforce resume {shlex.quote(self.shown)}", "choose another with --out"
        if self.remote.exists():
            raise UsageError(f"there is a run at {self.shown} already: {other}; to go on with that run: {resume}")
        if others := self.remote.strangers():
            raise UsageError(f"{self.shown} holds {others[0]!r} already: {other}")
        if (holder := lock.holder(self.path)) is not None:
            raise lock.in_use(self.shown, holder)
        if WorkingCopy(self.path).sent:  # it was there
            shutil.rmtree(self.path, ignore_errors=True)
            self.notes.append(f"the run that was at {self.shown} is gone: what this machine had of it was removed")
        elif self.config.exists():
            ways = f"to go on with it: {resume}; to drop it: rm -r {shlex.quote(str(self.path))}"
            raise UsageError(f"a run for {self.shown} began on this machine and never came there: {ways}")
        super().must_be_new()

    def began_here(self) -> bool:
        """Whether it began on this machine and nothing of it came to the URL yet."""
        return self.config.exists() and not WorkingCopy(self.path).sent

    def create(self, config: str) -> None:
        super().create(config)
        self._created = True

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """One process of this machine at a time fetches into the working copy, or begins to write there."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        return disk.alone(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT)

    def fetch(self, *, all: bool = False) -> None:
        """Fetch the run, unless a process of this machine writes to it; with `all`, to resume it, that is an error."""
        with self._alone():
            if (holder := lock.holder(self.path)) is None:
                self.notes += self.remote.fetch(self.path, all=all).notes
            elif all:
                raise lock.in_use(self.shown, holder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[lock.Lock]:
        """Be the one writer of the working copy, and of the run at the URL."""
        with contextlib.ExitStack() as stack:
            with self._alone():
                held = stack.enter_context(super().locked())
            try:
                self._held = remote_lock.claim(self.remote.store, held)
                stack.callback(self._held.release, RELEASE_SECONDS)  # a store that hangs for good is not waited for
                self.remote.begin_writing(self.path)
            except RaynforceError:
                if self._created:  # so that the same command can be tried again
                    shutil.rmtree(self.path, ignore_errors=True)
                raise
            yield self._held

    def holder(self) -> lock.Holder | None:
        return super().holder() or remote_lock.holder(self.remote.store)

    def save(self, step: int, parts: dict[str, Tree], keep: int, keep_nth: int = 0) -> Saved:
        saved = super().save(step, parts, keep, keep_nth)
        self._push(f"the checkpoint of step {step:,}")
        return saved

    def finish(self) -> None:
        """Push the end of the logs, as often as it takes a store that fails for a moment."""
        until = time.monotonic() + FINISH_SECONDS
        while True:
            try:
                self._push("the run")
                return
            except NotMirrored as error:
                if (self._held is not None and self._held.lost is not None) or time.monotonic() >= until:
                    hint = f"raynforce resume {shlex.quote(self.shown)} brings it there"
                    raise NotMirrored(f"{error}; on this machine, {hint}") from error
            time.sleep(PAUSE_SECONDS)

    def send_live(self, text: str) -> None:
        """Put what the run tells beside what was pushed of it, unless it is another's by now."""
        if self._pushed and self._held is not None and self._held.lost is None:
            self.remote.store.write(asking.LIVE, text.encode())

    def _push(self, what: str) -> None:
        try:
            with self._pushing:
                if self._held is not None:
                    self._held.beat()  # nothing is pushed to a run that is another's by now
                self.remote.push(self.path)
                self._pushed = True
        except RaynforceError as error:
            raise NotMirrored(f"{what} is safe in {self.path}, but not at {self.shown}: {error}") from error


def new_run(out: str | Path, *, numbered: bool = False) -> RunDirectory:
    """The directory for a new run, if need be `numbered`; `UsageError` if there is anything already."""
    if is_url(str(out)):
        run: RunDirectory = MirroredRun(Remote.open(str(out)))
    else:
        run = RunDirectory(Path(out).expanduser(), numbered=numbered)
    run.must_be_new()
    return run


def begun_run(out: str | Path) -> RunDirectory | None:
    """The run that began there, once nobody writes to it any more; None if there is none."""
    if is_url(str(out)):
        mirrored = MirroredRun(Remote.open(str(out)))
        if not (mirrored.remote.exists() or mirrored.began_here()):
            return None
        wait_until_free(mirrored)
        return open_run(out, all=True)
    run = RunDirectory(Path(out).expanduser())
    if not run.config.is_file():
        return None
    wait_until_free(run)
    return run


def wait_until_free(run: RunDirectory) -> None:
    """A process of another host that is gone holds its lock until that is stale."""
    since = time.monotonic()
    while (holder := run.holder()) is not None:
        patience = TAKEOVER_SECONDS if holder.same_kernel() else lock.STALE + 2 * lock.BEAT
        if time.monotonic() - since > patience:
            raise lock.in_use(run.shown, holder)
        time.sleep(PAUSE_SECONDS)


def open_run(run: str | os.PathLike[str] | RunDirectory, *, all: bool = False) -> RunDirectory:
    """An existing run, local or at a URL, whose logs and policies are fetched, and with `all` what resume needs."""
    if isinstance(run, RunDirectory):
        return run
    if not is_url(str(run)):
        return RunDirectory.open(Path(run))
    mirrored = MirroredRun(Remote.open(str(run)))
    mirrored.fetch(all=all)
    return mirrored


def local_path(path: str | os.PathLike[str]) -> Path:
    """Where the files are that a user typed the path of: a local path as it is, a URL's working copy."""
    return open_run(path).path if is_url(str(path)) else Path(path)
