"""docs/data.md and the pages of docs/algorithms/ say what is there: commands run, and settings exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_readme import ROOT

from raynforce import settings
from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.cli import main
from raynforce.config import Config

GUIDE = (ROOT / "docs" / "data.md").read_text()
PAGES = [page for page in sorted((ROOT / "docs" / "algorithms").glob("*.md")) if page.stem in BUILT_IN]
FEW = {"--episodes": "5", "--steps": "2048"}


def commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def few(words: list[str]) -> list[str]:
    """The same command for fewer steps and episodes."""
    short = list(words)
    for option, number in FEW.items():
        if option in short:
            short[short.index(option) + 1] = number
    if short[0] == "train":
        short += [] if "--steps" in short else ["--steps", FEW["--steps"]]
        short += ["--runtime", "inline", "--set", "eval.episodes=1", "--set", "eval.final_episodes=0"]
    return short


def test_the_commands_of_the_page_in_a_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = commands(GUIDE)
    assert len(found) >= 6
    for name, *words in found:
        assert name == "raynforce"
        assert main(few(words)) == 0, capsys.readouterr().err
    for code in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        exec(code.replace("steps=20_000", 'steps=2_048, progress="quiet"'), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    """Those in the first column of its table of settings, and all that are assigned or have a section."""
    text = page.read_text()
    kind = algorithm_class(page.stem).Settings
    known = set(settings.known_keys(Config, {"algorithm": kind}))
    table = re.search(r"## Settings\n(.*?)\n## ", text, flags=re.DOTALL)
    assert table
    rows = [line.split("|")[1] for line in table.group(1).splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row)}
    assert len(named) >= 4
    sections = "algorithm|network|learner|sampling|stream|replay"
    named |= set(re.findall(rf"\b((?:{sections})\.(?!md\b)[a-z_]+)\b(?!\.py|\()", text))
    for name in named:
        assert name in known or f"algorithm.{name}" in known, f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)h][^)]*)\)", page.read_text()):
        assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_understood(page: Path) -> None:
    from raynforce.cli.commands import experiment
    from raynforce.cli.parser import parse

    found = [words[1:] for words in commands(page.read_text()) if words[1] == "train"]
    assert found
    for words in found:
        experiment(parse(words))
