"""Episodes to look at: in a window, or as films.

Films are written by PyAV (the extra `video`), which brings its encoder along and writes mp4 files frame by frame.
Gymnasium's `RecordVideo` holds a whole episode in memory, and needs moviepy, which does not go with current Pillow.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raynforce.envs.describe import Args
from raynforce.envs.lane import Lane
from raynforce.envs.local import LocalVector
from raynforce.envs.make import close_env, locate, make
from raynforce.envs.wrappers import for_evaluation
from raynforce.errors import UsageError, summary

Mode = Literal["human", "rgb_array"]
MOST_FRAMES = 10_000  # of one film: some minutes. Longer episodes are played to their end, and their films end here
FRAMES_A_SECOND = 30  # where the environment does not say


class Watched(LocalVector):
    """One environment in a window, or filmed into the folder `films`."""

    films: Films | None = None

    def __init__(
        self, env: str, args: Args, *, seed: int, sampler: int, films: str | Path | None = None, masked: bool = False
    ) -> None:
        args = _showing(env, for_evaluation(args or {}), "human" if films is None else "rgb_array")
        super().__init__(env, args, 1, seed=seed, sampler=sampler, record=False, lane=_FilmedLane, masked=masked)
        if films is not None:
            (lane,) = self._lanes
            self.films = lane.films = Films(Path(films), lane.env.metadata.get("render_fps") or FRAMES_A_SECOND)

    def close(self) -> None:
        super().close()
        if self.films is not None:
            self.films.close()


class _FilmedLane(Lane):
    films: Films | None = None

    def _begin(self, episode: int) -> None:
        super()._begin(episode)
        if self.films is not None:
            self.films.begin(self._frame())

    def _advance(self, action: Any) -> tuple[float, bool, bool, Any]:
        result = super()._advance(action)
        if self.films is not None:
            self.films.add(self._frame())
            if result[1] or result[2]:
                self.films.end()
        return result

    def _frame(self) -> np.ndarray:
        cannot = f"env {self.plan.env!r} cannot be filmed: render"
        try:
            frame: Any = self.env.render()
        except Exception as error:
            raise UsageError(f"{cannot} raised {summary(error)}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            found = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise UsageError(f"{cannot} returned {found}; expected uint8 [height, width, 3]")
        return frame


def _showing(env: str, args: dict[str, Any], mode: Mode) -> dict[str, Any]:
    """The arguments with which the environment shows itself in this way."""
    option = "--render (render=True)" if mode == "human" else "--video (video=DIR)"
    places = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if mode == "human" and sys.platform == "linux" and not any(os.environ.get(name) for name in places):
        raise UsageError("--render (render=True) needs a display, and DISPLAY is not set: use --video DIR instead")
    with_mode = args | {"render_mode": mode}
    takes = _takes_render_mode(env)
    made = make(env, with_mode if takes else args)
    try:
        can = made.metadata.get("render_modes") or []
        has = made.render_mode if made.render_mode in can else None
        if has == mode:
            return with_mode if takes else args
        if not takes:
            why = f"its factory takes no render_mode, and made one with render_mode={has!r}: let it take one"
        else:
            why = f"its render modes are {', '.join(map(str, can)) or 'none'}"
        raise UsageError(f"{option} needs the render mode {mode!r}, and env {env!r} has none such: {why}")
    finally:
        close_env(made)


def _takes_render_mode(env: str) -> bool:
    found = locate(env)
    if isinstance(found, str):  # a gymnasium id: gymnasium.make takes it for all
        return True
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return True  # calling it tells
    return "render_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class Films:
    """A folder with a film for each episode: `episode-1.mp4`, …, after those that are there already."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.paths: list[Path] = []  # those that are done
        self._folder, self._rate = folder, Fraction(rate).limit_denominator(1000)
        try:
            self._av = importlib.import_module("av")
            folder.mkdir(parents=True, exist_ok=True)
        except ImportError:
            raise UsageError('films need PyAV, which is not installed: pip install "raynforce[video]"') from None
        except OSError as error:
            raise UsageError(f"video = {str(folder)!r} cannot be made: {error.strerror}") from error
        names = [path.stem.removeprefix("episode-") for path in folder.glob("episode-*.mp4")]
        self._number = max((int(name) for name in names if name.isdigit()), default=0)
        self._first: np.ndarray | None = None
        self._path: Path | None = None  # of the film that is being written
        self._file: Any = None
        self._stream: Any = None

    def begin(self, frame: np.ndarray) -> None:
        """An episode begins. If the one before has not ended, it broke, and is not worth a film."""
        self.close()
        self._first = frame  # there is no film before there is a step: the last episode that begins is not played

    def add(self, frame: np.ndarray) -> None:
        if self._path is None:
            self._open(self._folder / f"episode-{self._number + 1}.mp4")
            if self._first is not None:
                self.add(self._first)
        height, width = frame.shape[:2]
        even = height + height % 2, width + width % 2  # the encoder takes no others
        if even != (height, width):
            frame = np.pad(frame, ((0, even[0] - height), (0, even[1] - width), (0, 0)), mode="edge")
        if self._stream is None:
            self._stream = self._file.add_stream("libx264", rate=self._rate)
            self._stream.height, self._stream.width = even
            self._stream.pix_fmt = "yuv420p"  # which every player knows
        if even != (self._stream.height, self._stream.width):
            was = [self._stream.height, self._stream.width]
            raise UsageError(f"the film {self._path} cannot go on: frames were {was} and are now {list(even)}")
        self._frames += 1
        if self._frames <= MOST_FRAMES:
            self._write(self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24"))

    def end(self) -> None:
        if path := self._finish():
            self.paths.append(path)
            self._number += 1

    def close(self) -> None:
        if path := self._finish():
            path.unlink(missing_ok=True)

    def _open(self, path: Path) -> None:
        try:
            self._file = self._av.open(str(path), "w")
        except OSError as error:
            raise UsageError(f"the film {path} cannot be written: {error.strerror}") from error
        self._path, self._frames = path, 0

    def _write(self, picture: Any) -> None:
        for packet in self._stream.encode(picture):
            self._file.mux(packet)

    def _finish(self) -> Path | None:
        path, self._path = self._path, None
        if path is not None:
            if self._stream is not None:
                self._write(None)  # what the encoder still has
            self._file.close()
            self._stream = None
        return path
