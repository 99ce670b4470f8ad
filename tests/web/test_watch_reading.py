"""Metric files as columns, and lines thinned out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.web import reading
from raynforce.web.reading import Column, MetricsFile, draw, spark

KEY = "charts/episodic_return"


def line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "time": step / 10, **values}) + "\n"


def column(*points: tuple[float, float]) -> Column:
    return Column(*(np.array(each, float) for each in zip(*points, strict=True)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_file_is_read_as_it_grows_and_half_a_line_waits_for_its_rest(path: Path) -> None:
    path.write_text(line(1, a=1.0) + line(2, a=2.0, b=5.0) + '{"step": 3, "ti')
    file = MetricsFile(path)
    assert file.read(1.0)
    assert file.column("a", "step").x.tolist() == [1, 2]
    version = file.version
    with path.open("a") as more:
        more.write('me": 0.3, "a": 3.0}\n')
    file.read(1.0)
    assert file.column("a", "step").y.tolist() == [1, 2, 3]
    assert file.column("a", "time").x.tolist() == [0.1, 0.2, 0.3]
    assert file.version > version
    assert file.names == ["a", "b"]


def test_torn_lines_are_left_out_and_figures_that_are_none_are_gaps(path: Path) -> None:
    torn = '{"step": 2, "a": 1\n' + '{"st{"step": 3, "time": 0.3, "a": 7.0}\n' + "[1]\n" + '"x"\n' + "\n"
    odd = '{"step": 4, "time": 0.4, "a": NaN}\n{"step": 5, "time": 0.5, "a": "many"}\n'
    odd += '{"step": 6, "time": null, "a": 1e300}\n'
    path.write_text(line(1, a=None) + torn + odd + line(9, a=9.0))
    file = MetricsFile(path)
    file.read(1.0)
    found = file.column("a", "step")
    assert found.x.tolist() == [1, 3, 4, 5, 6, 9]
    assert [reading.plain(found.y)[i] for i in (0, 1, 2, 3, 4, 5)] == [None, 7, None, None, None, 9]  # type: ignore[index]


def test_a_file_that_a_resume_has_cut_is_read_anew(path: Path) -> None:
    path.write_text("".join(line(n, a=1.0) for n in range(1, 50)))
    file = MetricsFile(path)
    file.read(1.0)
    with path.open("r+") as cut:
        cut.truncate(len(line(1, a=1.0)) * 3)
        cut.seek(0, 2)
        cut.write("".join(line(n, a=2.0) for n in range(4, 200)))  # longer than before
    file.read(1.0)
    assert len(file.column("a", "step").x) == 199
    path.unlink()
    assert file.read(1.0)
    assert file.column("a", "step").x.tolist() == []


def test_evaluations_come_late_and_are_sorted_in(path: Path) -> None:
    path.write_text(line(10, **{KEY: 1.0}) + line(30, **{KEY: 3.0}) + line(20, **{KEY: 2.0, "eval/return": 9.0}))
    file = MetricsFile(path)
    file.read(1.0)
    assert file.column(KEY, "step").x.tolist() == [10, 20, 30]
    assert file.column("eval/return", "step").y.tolist() == [9]


def test_of_a_large_file_pieces_come_first_and_then_all_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGE", 100_000)
    monkeypatch.setattr(reading, "PIECES", 5)
    monkeypatch.setattr(reading, "PIECE", 1000)
    monkeypatch.setattr(reading, "BLOCK", 10_000)
    path.write_text("".join(line(n, a=float(n)) for n in range(5000)))
    file = MetricsFile(path)
    assert not file.read(0.0)
    pieces = file.column("a", "step")
    assert 20 < len(pieces.x) < 500
    assert pieces.x[0] == 0
    assert pieces.x[-1] > 4900
    while not file.read(0.0):
        pass
    assert file.column("a", "step").y.tolist() == list(range(5000))


def test_no_minimum_and_no_maximum_is_lost() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 700)
    y[33_333], y[77_777] = 40.0, -40.0
    found = draw([[Column(x, y)]], points=300)
    assert len(found.x) == 600
    assert (np.nanmax(found.y[0]), np.nanmin(found.y[0])) == (40.0, -40.0)
    assert (np.diff(found.x) > 0).all()
    assert found.points == [100_000]
    near = draw([[Column(x, y)]], view=(33_300, 33_400), points=300)
    assert 33_333 in near.x.tolist(), "what is zoomed into is exact"
    assert near.y[0][near.x.tolist().index(33_333)] == 40.0
    assert near.x[0] < 33_300
    assert near.x[-1] > 33_400, "lines go on to the edge"


def test_runs_share_x_so_that_they_can_be_compared() -> None:
    found = draw([[column((0, 1), (10, 2))], [column((5, 7), (10, 8))]])
    assert found.x.tolist() == [0, 5, 10]
    assert [reading.plain(y) for y in found.y] == [[1, None, 2], [None, 7, 8]]


def test_of_several_seeds_the_median_and_how_far_they_spread() -> None:
    seeds = [column((0, 0), (10, value)) for value in (10.0, 20.0, 60.0)]
    found = draw([seeds], points=16)
    last = int(np.argmin(np.abs(found.x - 5)))
    share = found.x[last] / 10
    assert found.y[0][last] == pytest.approx(20 * share)
    low, high = found.low[0], found.high[0]
    assert low is not None
    assert high is not None
    assert (low[last], high[last]) == (pytest.approx(10 * share), pytest.approx(60 * share))


def test_smoothing_keeps_the_mean_and_shows_what_it_was() -> None:
    x = np.arange(1000.0)
    noise = np.where(x % 2 == 0, 1.0, -1.0)
    found = draw([[Column(x, noise)]], points=600, smooth=0.5)
    assert np.abs(found.y[0]).max() < 0.1
    raw = found.raw[0]
    assert raw is not None
    assert np.abs(raw).max() == 1.0


def test_nothing_is_drawn_of_nothing() -> None:
    found = draw([[Column(np.empty(0), np.empty(0))]])
    assert (found.x.tolist(), found.span, found.points) == ([], None, [0])
    assert draw([[column((3, 4))]]).y[0].tolist() == [4]


def test_the_course_of_a_return_in_few_points(path: Path) -> None:
    assert spark(path) == []
    path.write_text("".join(line(n, **{KEY: float(n)}) for n in range(3000)))
    found = spark(path)
    assert len(found) <= reading.SPARK
    assert found[0] < 200
    assert found[-1] > 2900
    assert found == sorted(found)
