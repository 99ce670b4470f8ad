"""What the README and the example say is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raynforce.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=200)


def tour(word: str) -> list[list[str]]:
    """The words of each command of the tour in which this occurs."""
    lines = next(block for block in blocks("sh") if word in block).splitlines()
    return [line.split("#")[0].split() for line in lines]


TOURS = [("raynforce eval", 6), ("--runtime process", 4)]


@pytest.mark.parametrize(("word", "count"), TOURS)
def test_the_tour_in_a_few_steps(
    word: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And in this process."""
    monkeypatch.chdir(tmp_path)
    commands, few = tour(word), {"train": "1200", "resume": "5000"}
    assert len(commands) >= count
    for name, *words in commands:
        assert name == "raynforce"
        if words[0] in few:
            words += ["--steps", few[words[0]], "--runtime", "inline", "--set", "eval.final_episodes=1"]
        if any("slowed" in word for word in words):
            words += ["--set", "env_args.milliseconds=0.1"]
        assert main(words) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("word", "count"), TOURS)
def test_the_tour(word: str, count: int, tmp_path: Path) -> None:
    for command in tour(word):
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(code.replace("steps=20_000", "steps=2_000"), {"__name__": "__main__"})


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)h][^)]*)\)", README):
        file, _, title = link.partition("#")
        assert (ROOT / file).exists(), link
        titles = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.M) if title else []
        assert not title or title in [name.lower().replace(" ", "-") for name in titles], link


def test_the_example_stays_short() -> None:
    assert len((ROOT / "examples/own_algorithm.py").read_text().splitlines()) < 120


def test_it_can_be_imported_from_the_folder_that_holds_the_clone() -> None:
    done = run([sys.executable, "-c", "import raynforce; raynforce.train"], ROOT.parent)
    assert done.returncode == 0, done.stderr
