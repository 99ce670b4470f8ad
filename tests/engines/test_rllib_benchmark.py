"""What `benchmarks/rllib_engine.py` is made of, without its runs; and that RLlib takes the script it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rllib_engine
from benchmarks.measure import replace_table
from benchmarks.runs import tree_megabytes
from raynforce.engines.rllib.code import program
from raynforce.engines.rllib.translation import translate
from raynforce.experiment import resolve

LIFETIME = "rllib/env_runners/num_env_steps_sampled_lifetime"


def reports(*steps: int, total: int = 100) -> list[dict[str, float]]:
    return [{"step": s, LIFETIME: s, "charts/learning_rate": 1e-3 * (1 - s / total)} for s in steps]


def test_reports_that_go_on_are_taken() -> None:
    rllib_engine.require_continued(reports(10, 50, 60, 100), at=50, end=100, steps=100)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (reports(10, 50, 40, 100), "go back"),
        (reports(10, 50), "no reports"),
        (reports(10, 50, 60), "last report"),
        ([*reports(10, 50), {**reports(100)[0], LIFETIME: 50}], "RLlib counts"),
        ([*reports(10, 50), {**reports(100)[0], "charts/learning_rate": 0.001}], "learning rate"),
    ],
)
def test_reports_that_do_not_go_on_are_refused(lines: list[dict[str, float]], told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        rllib_engine.require_continued(lines, at=50, end=100, steps=100)


def test_the_table_has_a_line_for_each_engine_and_no_figure_where_a_run_has_none() -> None:
    turns: list[rllib_engine.Figures] = [
        {"steps/s": speed, "start-up": 2.0, "memory": 300.0, "time to target": None} for speed in (1000.0, 3000.0)
    ]
    lines = rllib_engine.markdown({("PPO", "native"): rllib_engine.middle(turns)}).splitlines()
    assert lines[0] == "| experiment | engine | steps/s | start-up, s | memory, MB | time to target, s |"
    assert lines[2] == "| PPO | Raynforce | 2,000 | 2.0 | 300 | – |"


def test_only_what_is_between_the_marks_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert not replace_table(page, "rllib", "new")
    page.write_text("a\n<!-- table: rllib -->\nold\n<!-- /table -->\nb\n<!-- table: other -->\nkept\n<!-- /table -->\n")
    assert replace_table(page, "rllib", "new\\1")
    assert page.read_text().startswith("a\n<!-- table: rllib -->\nnew\\1\n<!-- /table -->\nb\n")
    assert "kept" in page.read_text()


def test_the_memory_of_a_process_is_counted() -> None:
    assert tree_megabytes(os.getpid()) > 10


@pytest.mark.parametrize("parallel", ["no", "processes"])
def test_rllib_takes_the_printed_script(parallel: str) -> None:
    config, _ = resolve({"env": "CartPole-v1", "algo": "ppo", "engine": "rllib", "sampling": {"parallel": parallel}})
    found: dict[str, Any] = {"__name__": "experiment"}
    exec(program(translate(config, None), config), found)
    found["config"].validate()
