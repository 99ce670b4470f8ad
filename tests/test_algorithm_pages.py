"""The pages of docs/algorithms/ are true: quoted lines are in the source, and tables of settings are whole."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_readme import ROOT

from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.cli import main
from raynforce.experiment import resolve

FOLDER = ROOT / "docs" / "algorithms"
SECTIONS = ("Equations and lines", "Settings", "Results", "Common failures")
ALL = pytest.mark.parametrize("algo", BUILT_IN)


def page(algo: str) -> str:
    return (FOLDER / f"{algo}.md").read_text()


def section(algo: str, name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page(algo), flags=re.DOTALL | re.MULTILINE)
    assert found, f"{algo}.md has no section {name!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]


def sources(algo: str) -> str:
    """Of the modules that a page links to, in one line each."""
    linked = re.findall(r"\]\((\.\./\.\./raynforce/[\w/]+\.py)\)", page(algo))
    assert linked
    return " ".join(" ".join((FOLDER / link).read_text().split()) for link in linked)


def value(text: str) -> Any:
    """A default as a page writes it: 1e-3, 100,000, 256 by 256, null, true, relu."""
    words = {"null": None, "true": True, "false": False}
    if text in words:
        return words[text]
    if " by " in text:
        return tuple(value(part) for part in text.split(" by "))
    try:
        return float(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    except ValueError:
        return text


def told(algo: str) -> dict[str, Any]:
    """Each setting in the page's table, under its full name, and its default there."""
    found: dict[str, Any] = {}
    for cells in rows(section(algo, "Settings")):
        names = re.findall(r"`([a-z_.]+)`", cells[0])
        if not names:
            continue
        defaults = re.split(r"[:;]|\s\(", cells[1])[0].split(", ")
        assert len(defaults) >= len(names), f"{algo}.md: {cells}"
        for name, default in zip(names, defaults, strict=False):
            full = name if "." in name else f"algorithm.{name}"
            assert full not in found, f"{algo}.md has {full} twice"
            found[full] = value(default)
    return found


def defaults(algo: str) -> dict[str, Any]:
    """What an algorithm has by default: its own settings, and others where it changes them."""
    kind = algorithm_class(algo)
    env = {"env": "CartPole-v1", "algo": algo, "preset": "none"}
    config = resolve(env | ({"data": "episodes.parquet"} if algo == "bc" else {}))[0].to_dict()
    keys = [f"algorithm.{f.name}" for f in fields(kind.Settings)] + list(kind.defaults)
    return {key: config[key.partition(".")[0]][key.partition(".")[2]] for key in keys}


def test_every_algorithm_has_a_page_that_others_lead_to(capsys: pytest.CaptureFixture[str]) -> None:
    guide, readme = (ROOT / "docs" / "algorithms.md").read_text(), (ROOT / "README.md").read_text()
    for algo in BUILT_IN:
        assert f"](algorithms/{algo}.md)" in guide
        assert f"](docs/algorithms/{algo}.md)" in readme
        assert main(["explain", algo]) == 0
        assert f"docs/algorithms/{algo}.md" in capsys.readouterr().out


@ALL
def test_a_page_has_all_sections_in_order(algo: str) -> None:
    found = re.findall(r"^## (.*)$", page(algo), flags=re.MULTILINE)
    assert [name for name in found if name in SECTIONS] == list(SECTIONS)
    for name in SECTIONS:
        assert rows(section(algo, name)) or name == "Results", f"{algo}.md: {name} has no table"


@ALL
def test_lines_that_a_page_quotes_are_in_the_source(algo: str) -> None:
    """Those in the last column of the table beside the equations; `…` stands for what is left out."""
    table = rows(section(algo, "Equations and lines"))
    first = next(i for i, cells in enumerate(table) if cells[-1].startswith("in `"))
    width, source, count = len(table[first]), sources(algo), 0
    for cells in table[first + 1 :]:
        if len(cells) != width:
            break
        for quoted in re.findall(r"`([^`]+)`", cells[-1]):
            for part in re.split("…", quoted):
                assert " ".join(part.split()) in source, f"{algo}.md quotes {quoted!r}"
            count += 1
    assert count >= 4


@ALL
def test_metrics_that_a_page_names_are_reported(algo: str) -> None:
    source = sources(algo)
    for name in re.findall(r"`losses/(\w+)`", page(algo)):
        assert f'"{name}"' in source, f"{algo}.md names losses/{name}"


@ALL
def test_the_table_of_settings_is_whole_and_has_the_defaults(algo: str) -> None:
    """A page may leave settings to another that it names, if they have the same defaults."""
    wanted, found = defaults(algo), told(algo)
    if elsewhere := re.search(r"All others.*? as for \[\w+\]\((\w+)\.md#settings\)", section(algo, "Settings")):
        found = told(elsewhere[1]) | found
    found = {key: default for key, default in found.items() if key in wanted}
    assert sorted(found) == sorted(wanted)
    for key, default in wanted.items():
        same = tuple(default) if isinstance(default, list) else default
        assert found[key] == same, f"{algo}.md: {key} is {default}"


def test_a_wrong_default_would_be_seen() -> None:
    assert value("100,000") == 100_000
    assert value("256 by 256") == (256, 256)
    assert (value("null"), value("true"), value("1e-5"), value("no")) == (None, True, 1e-5, "no")


@ALL
def test_explain_tells_the_defaults_of_an_algorithm(algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", algo, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(ROOT, told["page"]).is_file()
    for key, default in defaults(algo).items():
        assert told["defaults"][key] == (list(default) if isinstance(default, tuple) else default)


def test_explain_knows_settings_that_are_in_no_default_config(capsys: pytest.CaptureFixture[str]) -> None:
    for topic, words in {"policies.opponents": "Self-play", "env_args.wrappers": "the first one innermost"}.items():
        assert main(["explain", topic]) == 0
        assert words in capsys.readouterr().out
