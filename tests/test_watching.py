"""Evaluations that are looked at: films, and a window."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import drawn_envs
import numpy as np
import pytest
from failing import SMALL

import raynforce
from raynforce.cli import main
from raynforce.envs.watching import Watched
from raynforce.errors import UsageError

PLACES = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")


def trained(out: Path, env: str = "drawn_envs:Drawn", **args: Any) -> Path:
    settings = SMALL | {f"env_args.{name}": value for name, value in args.items()} | {"eval.final_episodes": 0}
    how: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    return raynforce.train(env, steps=100, out=out, settings=settings, **how).path


def brightness(film: Path) -> list[float]:
    """Of each frame."""
    av = pytest.importorskip("av", reason="films need the extra `video`")
    with av.open(str(film)) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 48, 34)
        assert float(stream.average_rate) == 12.5
        return [float(frame.to_ndarray(format="rgb24").mean()) for frame in file.decode(stream)]


def test_a_film_of_each_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av", reason="films need the extra `video`")
    run, films = trained(tmp_path / "run"), tmp_path / "a" / "films"
    found = raynforce.evaluate(run, video=films)
    assert found.returns.tolist() == [5, 5, 5]  # three, where somebody is to look at them
    assert found.videos == [films / f"episode-{n}.mp4" for n in (1, 2, 3)]
    for film in found.videos:
        assert brightness(film) == pytest.approx([40 * t for t in range(6)], abs=6)
    assert main(["eval", str(run), "--video", str(films), "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["videos"] == [str(films / "episode-4.mp4")]
    assert sorted(films.iterdir()) == [films / f"episode-{n}.mp4" for n in (1, 2, 3, 4)]
    assert main(["eval", str(run), "--video", str(films), "--episodes", "1"]) == 0
    assert f"film: {films / 'episode-5.mp4'} (return 5.0" in capsys.readouterr().out


def test_an_episode_that_breaks_leaves_no_film(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="films need the extra `video`")
    run = trained(tmp_path / "run", broken="step")
    found = raynforce.evaluate(run, video=tmp_path / "films", episodes=3)
    assert found.returns.tolist() == [5, 5, 5]
    assert sorted((tmp_path / "films").iterdir()) == found.videos
    assert [len(brightness(film)) for film in found.videos] == [6, 6, 6]


@pytest.mark.parametrize(
    ("env", "args", "words"),
    [
        ("drawn_envs:Blind", {}, "env 'drawn_envs:Blind' has none such: its render modes are none"),
        ("drawn_envs:no_mode", {}, "its factory takes no render_mode, and made one with render_mode=None"),
        ("drawn_envs:Drawn", {"broken": "render"}, "cannot be filmed: render raised RuntimeError: no pencil"),
        (
            "drawn_envs:Drawn",
            {"broken": "frame"},
            "render returned float64 [33, 47]; expected uint8 [height,",
        ),
    ],
)
def test_what_cannot_be_filmed_is_one_line(env: str, args: Any, words: str, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="films need the extra `video`")
    run = trained(tmp_path / "run", env, **args)
    with pytest.raises(UsageError) as told:
        raynforce.evaluate(run, video=tmp_path / "films")
    assert words in str(told.value)
    assert "\n" not in str(told.value)
    assert not list(tmp_path.glob("films/*"))


def test_a_factory_may_choose_the_mode_itself(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="films need the extra `video`")
    run = trained(tmp_path / "run", "drawn_envs:has_mode")
    assert len(raynforce.evaluate(run, video=tmp_path / "films", episodes=2).videos) == 2


def test_without_the_extra_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert main(["eval", str(trained(tmp_path / "run")), "--video", str(tmp_path / "films")]) == 2
    wanted = 'raynforce: films need PyAV, which is not installed: pip install "raynforce[video]"\n'
    assert capsys.readouterr().err == wanted


def test_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    assert main(["eval", str(run), "--render"]) == 2
    assert "needs a display, and DISPLAY is not set: use --video DIR instead" in capsys.readouterr().err
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    drawn_envs.shown.clear()
    assert raynforce.evaluate(run, render=True, episodes=2).returns.tolist() == [5, 5]
    assert drawn_envs.shown[:12] == [*range(6)] * 2
    blind = trained(tmp_path / "blind", "drawn_envs:Blind")
    assert main(["eval", str(blind), "--render"]) == 2
    assert "needs the render mode 'human'" in capsys.readouterr().err


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for more in ({"render": True}, {"parallel": "threads"}):
        with pytest.raises(UsageError, match="do not go together"):
            raynforce.evaluate(tmp_path, video=tmp_path / "films", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "args"),
    [
        ("raynforce.envs.atari:make", {"game": "Pong"}),
        ("raynforce.envs.frames:stacked", {"env": "ALE/Pong-v5", "frames": 2}),
    ],
)
def test_games_can_be_filmed(env: str, args: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("av", reason="films need the extra `video`")
    pytest.importorskip("ale_py", reason="games need the extra `atari`")
    watched = Watched(env, args, seed=0, sampler=0, films=tmp_path)
    watched.reset()
    watched.step(np.zeros(1, np.int64))
    assert watched._lanes[0]._frame().shape == (210, 160, 3)
    watched.close()
    assert not list(tmp_path.iterdir())  # the episode has not ended
