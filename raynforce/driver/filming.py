"""Films of a run as it learns: policies that evaluated best play a few episodes, in a process beside the training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from raynforce.driver.status import Callback, Status
from raynforce.runs.catalog import object_in

FOLDER = "episodes"
LOOK = 1.0  # seconds between looks for a new best policy
LAST = 60.0  # seconds that the last films may take after the end of a run


class Filming(Callback):
    """Leaves `episodes/step_000000050000-1.mp4`, and the mean return beside each in JSON."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._filmed = ""  # the name of the newest checkpoint that was taken
        self._next = 0.0
        self.failed = ""  # why there are no more films
        self._playing: subprocess.Popen[bytes] | None = None

    def on_round(self, status: Status) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK
            self._look(status.path)

    def on_end(self, status: Status) -> None:
        began = time.monotonic()
        for _ in range(2):  # what is being played, and the newest
            self._look(status.path)
            if self._playing is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._playing.wait(LAST)
                if self._playing.poll() is None:
                    self._playing.kill()
                    self._playing.wait()
                self._look(status.path)
        status.idle(time.monotonic() - began)

    def _look(self, run: Path) -> None:
        with contextlib.suppress(OSError):
            if self._playing is not None and self._playing.poll() is not None:
                self._finish(run)
            name = os.path.basename(os.readlink(run / "best"))
            if self._playing is None and not self.failed and name != self._filmed:
                self._begin(run, name)

    def _begin(self, run: Path, name: str) -> None:
        self._filmed = name
        folder = self._folder(run)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kept = folder / "run" / "checkpoints" / name  # the run deletes it when another policy is better
        shutil.copytree(run / "checkpoints" / name, kept, copy_function=_link)
        shutil.copy(run / "config.yaml", folder / "run")
        words = ["eval", str(kept), "--video", str(folder), "--episodes", str(self._episodes)]
        with (folder / "result").open("wb") as told, (folder / "errors").open("wb") as errors:
            self._playing = subprocess.Popen(
                [sys.executable, "-m", "raynforce", *words, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=errors,
            )

    def _finish(self, run: Path) -> None:
        folder, whole = self._folder(run), self._playing is not None and self._playing.returncode == 0
        self._playing = None
        if not whole:
            words = (folder / "errors").read_text(errors="replace").splitlines()[-1:] or ["the player has ended"]
            self.failed = words[0].removeprefix("raynforce: ")
        told = (folder / "result").read_bytes().splitlines()[-1:]
        score = object_in(told[0]).get("mean") if told else None
        step = self._filmed.partition("_")[2]
        for number, film in enumerate(sorted(folder.glob("*.mp4")) if whole else [], 1):
            target = run / FOLDER / f"step_{step}-{number}.mp4"
            target.with_suffix(".json").write_text(json.dumps({"return": score}))
            film.replace(target)
        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, run: Path) -> Path:
        return run / FOLDER / ".playing.tmp"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # not on every file system
        shutil.copy(source, target)
