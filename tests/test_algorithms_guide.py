"""Every block of docs/algorithms.md does what the page says."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
from running import solve
from test_readme import ROOT

from raynforce.cli import main

GUIDE = (ROOT / "docs" / "algorithms.md").read_text()
EXAMPLE = ROOT / "examples" / "own_off_policy.py"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", GUIDE, flags=re.DOTALL)
FILES = {found[1]: code for kind, code in BLOCKS if kind == "python" and (found := re.match(r"# (\w+\.py)\n", code))}
COMMANDS = [line for kind, code in BLOCKS if kind == "sh" for line in code.splitlines()]
QUICK = ["--set", "eval.episodes=2", "--set", "eval.final_episodes=0", "--quiet"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with the files of the page in it."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    shutil.copy(EXAMPLE, tmp_path / "own_off_policy.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [*FILES, "own_off_policy.py"]:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def test_the_page_has_what_is_tested() -> None:
    assert list(FILES) == ["my_algos.py", "my_settings.py", "my_q.py", "my_buffer.py", "my_sac.py", "test_my_algos.py"]
    assert len(COMMANDS) == 10


def test_its_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("raynforce.checkup.MANY", 12)
    for line in COMMANDS:
        words = line.split()[1:]
        if words[0] != "doctor":
            words += ["--steps", "1200", *QUICK] if words[0] == "train" else ["--steps", "1400", "--quiet"]
        assert main(words) == 0, (line, capsys.readouterr())
        said = capsys.readouterr()
        if words[0] == "doctor":
            assert "ready to train" in said.out, line
            assert "warning" not in said.out, line


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", FILES["test_my_algos.py"], flags=re.MULTILINE))
def test_its_tests(name: str, folder: Path) -> None:
    test = getattr(importlib.import_module("test_my_algos"), name)
    test(*([folder] if inspect.signature(test).parameters else []))


def test_what_it_quotes_of_the_example_is_there() -> None:
    (quoted,) = [code for kind, code in BLOCKS if kind == "python" and not code.startswith("# ")]
    example = EXAMPLE.read_text()
    for line in quoted.splitlines():
        text = line.partition("  #")[0].strip()
        if not text.startswith("def "):  # types are left out
            assert text in example, text


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#h][^)]*)\)", GUIDE):
        assert (ROOT / "docs" / link).exists(), link


def test_what_it_says_of_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = FILES["my_algos.py"].replace('minibatch["advantage"]', 'minibatch["advantages"]')
    (folder / "my_wrong.py").write_text(code)
    line = next(i for i, text in enumerate(code.splitlines(), 1) if '"advantages"' in text)
    assert main(["train", "my_wrong:Mine", "CartPole-v1", "--runtime", "inline", *QUICK]) == 1
    said = capsys.readouterr().err
    assert said == f"raynforce: algorithm my_wrong:Mine raised KeyError: 'advantages' in loss (my_wrong.py:{line})\n"


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["own_off_policy:DDPG", "my_sac:SAC"])
def test_pendulum_is_learned(algo: str, folder: Path) -> None:
    solve("Pendulum-v1", algo, folder / "run", steps=20_000, target=-200, seed=0, runtime="inline", topology="sync")
