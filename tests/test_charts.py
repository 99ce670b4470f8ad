"""Plots, reports and tables of runs: what is in them, whatever the runs look like."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
import time
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import SMALL

import raynforce
from raynforce.algos import algorithm_class
from raynforce.charts import reading
from raynforce.charts.panels import thinned
from raynforce.charts.reading import grouped, runs_of
from raynforce.charts.svg import ticks
from raynforce.cli import charts, main
from raynforce.config import Config
from raynforce.errors import UsageError


def make_run(folder: Path, final: float = 100.0, *, seed: int = 0, stopped: str = "steps done", **config: Any) -> Path:
    """A run of 10 reports and 5 evaluations, whose return grows evenly."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(Config(**{"env": "CartPole-v1", "seed": seed} | config).to_yaml())
    lines = []
    for i in range(1, 11):
        line: dict[str, Any] = {"step": 100 * i, "time": float(i), "charts/episodic_return": final * i / 10}
        line |= {
            "losses/value_loss": 1.0 / i,
            "charts/SPS": 100.0 + i,
            "time/sampler/env": 0.7,
            "time/sampler/waiting": 0.3,
        }
        lines.append(line)
        if i % 2 == 0:
            lines.append({"step": 100 * i, "time": float(i), "eval/return": final * i / 10, "eval/deviation": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {"time": 1e9, "event": "started", "steps": 0},
        {
            "time": 1e9 + 1,
            "event": "fault",
            "role": "sampler 0",
            "kind": "died",
            "cause": "<b>boom</b>",
            "action": "restarted",
        },
        {"time": 1e9 + 9, "event": "stopped", "reason": stopped, "steps": 1000},
        {
            "time": 1e9 + 9,
            "event": "result",
            "eval_return": final,
            "stopped": stopped,
            "where_the_time_went": "where\nthe env bound it",
        },
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_atari_games_are_environments_of_their_own(tmp_path: Path) -> None:
    atari: dict[str, Any] = {"env": reading.ATARI}
    for game in ("Pong", "Breakout"):
        make_run(tmp_path / game, **atari, env_args={"game": game})
    groups = grouped(runs_of([tmp_path / "Pong", tmp_path / "Breakout"]))
    assert [(group.env, group.label) for group in groups] == [("Pong", "ppo"), ("Breakout", "ppo")]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in range(4):
        make_run(tmp_path / "ppo" / f"seed{seed}", 100.0 + seed, seed=seed)
        make_run(tmp_path / "dqn" / f"seed{seed}", 50.0 + seed, seed=seed, algo="dqn")
    return tmp_path


class Page(HTMLParser):
    """What tags there are, and what they refer to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.words = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [str(value) for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_seeds_are_one_curve_and_algorithms_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs / "curves.html"
    words = ["plot", str(runs / "ppo"), str(runs / "dqn"), "-o", str(out), "--target", "90", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["envs"]["CartPole-v1"]
    assert found["groups"]["ppo"] == {
        "runs": 4,
        "iqm": 101.5,
        "low": pytest.approx(100.5, 0.01),
        "high": pytest.approx(102.5, 0.01),
    }
    assert found["probability_of_improvement"]["ppo > dqn"]["estimate"] == 1.0
    assert found["time_to_target"]["ppo"] == {"met": 4, "runs": 4, "median": 1000.0, "low": 1000.0, "high": 1000.0}
    assert found["time_to_target"]["dqn"] == {"met": 0, "runs": 4, "median": None}
    page = Page(out)
    assert page.tags.count("polygon") == 4  # a band for each of two groups, in two charts
    assert not page.refers
    assert "never" in page.words


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")
def test_pictures_have_the_kind_that_their_name_says(runs: Path) -> None:
    raynforce.plot([runs / "ppo", runs / "dqn"], runs / "a.png", target=90)
    assert (runs / "a.png").read_bytes().startswith(b"\x89PNG")
    raynforce.plot(runs / "ppo", runs / "a.svg", metric="losses/value_loss", over="time")
    assert xml.parse(runs / "a.svg").getroot().tag.endswith("svg")
    assert sorted(path.name for path in runs.iterdir()) == ["a.png", "a.svg", "dqn", "ppo"]  # nothing half done


def test_without_matplotlib_one_line_says_what_to_install(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install "raynforce\[plot\]", or -o FILE.html'):
        raynforce.plot(runs / "ppo", runs / "a.png")
    raynforce.plot(runs / "ppo", runs / "a.html")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plot", "{runs}/ppo", "-o", "{runs}/a.txt"], "is to end in .png, .svg, .pdf, .html"),
        (["plot", "{runs}/none", "-o", "{runs}/a.html"], "there is no run at"),
        (["plot", "{runs}/empty", "-o", "{runs}/a.html"], "holds no runs"),
        (
            ["plot", "{runs}/ppo", "-o", "{runs}/a.html", "--metric", "losses/value"],
            "did you mean 'losses/value_loss'?",
        ),
        (["plot", "{runs}/ppo", "-o", "{runs}/no/a.html"], "cannot write"),
        (["plot", "{runs}/ppo", "-o", "{runs}/a.html", "--target", "high"], "--target"),
        (["report", "{runs}/empty"], "holds no runs"),
        (["export-metrics", "{runs}/ppo/seed0", "--json"], "add -o FILE"),
        (["export-metrics", "{runs}/none"], "there is no run at"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    words: list[str], told: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "empty").mkdir()
    before = sorted(runs.rglob("*"))
    assert main([word.replace("{runs}", str(runs)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert sorted(runs.rglob("*")) == before


def test_groups_are_named_by_what_they_differ_in(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            algorithm = algorithm_class("ppo").Settings(learning_rate=rate)  # type: ignore[call-arg]
            make_run(tmp_path / f"r{rate}" / f"seed{seed}", seed=seed, algorithm=algorithm)
    groups = grouped(runs_of([tmp_path]))
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("ppo learning_rate=0.1", 2),
        ("ppo learning_rate=0.2", 2),
    ]


def test_a_seed_that_met_its_target_counts_on(tmp_path: Path) -> None:
    from raynforce.charts.panels import curve

    make_run(tmp_path / "seed0", 100.0)
    early = make_run(tmp_path / "seed1", 100.0, seed=1, stopped="target met")
    lines = (early / "metrics.jsonl").read_text().splitlines()
    (early / "metrics.jsonl").write_text("\n".join(lines[:6]) + "\n")  # 4 reports: it ended with 40
    (group,) = grouped(runs_of([tmp_path]))
    (line,) = curve(group, reading.RETURN, "steps", 0)
    assert line.x[-1] == 400  # as far as half of them go
    early.joinpath("events.jsonl").write_text("")
    make_run(tmp_path / "seed2", 100.0, seed=2)
    (group,) = grouped(runs_of([tmp_path]))
    (line,) = curve(group, reading.RETURN, "steps", 0)
    assert (line.x[-1], line.y[-1]) == (1000, 100.0)  # of the two that are left


def test_nan_is_a_gap_and_torn_lines_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1100, "time": 11, "charts/episodic_return": null, "losses/value_loss": NaN}\n')
        file.write('{"step": 1200, "time": 12, "charts/episodic_return": 5.0}\n{"step": 13, "ti')
    (found,) = runs_of([run])
    values = found.series[reading.RETURN].values
    assert math.isnan(values[-2])
    assert values[-1] == 5.0
    assert found.left_out == 1
    page = Page(raynforce.report(run))
    assert "1 torn lines" in page.words


def test_a_report_is_one_file_that_runs_nothing_of_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "<script>alert(1)<", env_args={"x": "<img src=x onerror=alert(1)>"})
    assert main(["report", str(run), "-o", str(tmp_path / "r.html"), "--json"]) == 0
    page = Page(tmp_path / "r.html")
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert "b" in page.tags  # a tile's
    assert not page.refers
    assert "<b>boom</b>" in page.words
    assert "the env bound it" in page.words
    assert "default-src 'none'" in (tmp_path / "r.html").read_text()
    for heading in ("Learning", "Where the time went", "Faults", "Checkpoints", "Config", "Written by"):
        assert heading in page.words


def test_a_report_of_a_real_run_and_of_several(tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 300, "runtime": "inline", "progress": "quiet", "settings": SMALL | {"log_every": 1}}
    for seed in (0, 1):
        raynforce.train("CartPole-v1", out=tmp_path / "all" / f"seed{seed}", seed=seed, **how)
    one = Page(raynforce.report(tmp_path / "all" / "seed0"))
    assert "sampling.envs" in one.words
    assert "where the time went" in one.words.lower()
    assert one.tags.count("svg") > 5
    several = raynforce.report(tmp_path / "all")
    assert several == tmp_path / "all" / "report.html"
    assert Page(several).tags.count("details") >= 2


def test_a_run_that_has_only_begun_is_shown_as_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(Config(env="CartPole-v1").to_yaml())
    assert "Nothing was reported yet" in Page(raynforce.report(run)).words
    raynforce.plot(run, tmp_path / "a.html")
    assert "nothing yet" in Page(tmp_path / "a.html").words
    with pytest.raises(UsageError, match="has no metrics yet"):
        raynforce.export_metrics(run, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()


def test_a_table_has_every_figure_that_was_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "ppo" / "seed0"
    assert main(["export-metrics", str(run), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [{k: float(v) for k, v in row.items() if v} for row in rows] == written
    assert main(["export-metrics", str(runs / "ppo"), "-o", str(runs / "all.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 60
    with (runs / "all.csv").open() as file:
        assert {row["seed"] for row in csv.DictReader(file)} == {"0", "1", "2", "3"}


def test_long_files_are_read_here_and_there_evaluations_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_LINES", 100)
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for i in range(5000):
            what = "eval/return" if i % 500 == 0 else "charts/episodic_return"
            file.write(json.dumps({"step": i, "time": i, what: 1.0}) + "\n")
    (found,) = runs_of([run])
    assert len(found.series["eval/return"].values) == 10
    assert 50 < found.lines < 200


def test_no_peak_is_lost_where_points_are() -> None:
    y = np.zeros(100_000)
    y[[123, 77_777]] = 5.0, -5.0
    _, kept = thinned(np.arange(100_000), y, 600)
    assert len(kept) <= 600
    assert (kept.max(), kept.min()) == (5.0, -5.0)


def test_ticks_are_round() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(-0.35, 0.1, 5) == pytest.approx([-0.3, -0.2, -0.1, 0.0, 0.1])
    assert ticks(3, 3) == [3]
    assert all(re.fullmatch(r"-?\d", str(int(t))) for t in ticks(0, 9))


def test_a_run_of_rllib_has_its_time_and_what_bound_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]
    told = [line | {"time/sample": 3.0, "time/learn": 1.0} for line in kept]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    events[-1]["where_the_time_went"] = "where the time went: sampling 75%\n  sampling bound it: more --samplers"
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = raynforce.report(run, tmp_path / "report.html").read_text()
    assert "sample 75%" in page
    assert "<strong>sampling bound it: more --samplers</strong>" in page


def test_runs_in_a_folder_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for seed in (0, 1):
        make_run(tmp_path / "there" / f"seed{seed}", seed=seed)
    url, doing = f"file://{tmp_path}/there", list[str]()
    found = raynforce.plot(url, tmp_path / "curves.html", say=doing.append)
    assert found["runs"] == [f"{url}/seed0", f"{url}/seed1"]
    assert doing == [
        f"fetching {url}",
        f"reading {url}/seed0, 1 of 2",
        f"reading {url}/seed1, 2 of 2",
        "drawing 2 runs",
    ]


def test_what_lasts_is_told(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(charts, "TELL_AFTER", 0.01)
    read = reading.read

    def slowly(run: reading.RunData) -> None:
        read(run)
        time.sleep(0.1)

    monkeypatch.setattr(reading, "read", slowly)
    assert main(["plot", str(runs), "-o", str(tmp_path / "curves.html"), "--json"]) == 0
    said = capsys.readouterr()
    assert re.search(r"reading \S+, 2 of \d+, \d+ s", said.err)
    assert json.loads(said.out)["file"] == str(tmp_path / "curves.html"), "stdout is for the result"
    assert main(["report", str(runs), "-o", str(tmp_path / "report.html")]) == 0
    assert "reading " in capsys.readouterr().err


def test_long_labels_are_beside_the_scores_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    for index, rate in enumerate((0.000123456789, 0.000987654321)):
        make_run(tmp_path / "runs" / str(index), algorithm=algorithm_class("ppo").Settings(learning_rate=rate))
    found = raynforce.plot(tmp_path / "runs", tmp_path / "curves.svg")
    (facts,) = found["envs"].values()
    assert list(facts["groups"]) == ["ppo learning_rate=0.000123", "ppo learning_rate=0.000988"]
    drawn = (tmp_path / "curves.svg").read_text()
    assert "legend_1" in drawn, "these are short enough"
    for index, rate in enumerate((0.5, 0.25)):
        make_run(
            tmp_path / "more" / str(index), algorithm=algorithm_class("ppo").Settings(learning_rate=rate, gamma=rate)
        )
    raynforce.plot(tmp_path / "more", tmp_path / "curves.svg")
    assert "legend_1" not in (tmp_path / "curves.svg").read_text()
