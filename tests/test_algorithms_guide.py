"""Every block of docs/algorithms.md does what the page says."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import metrics, solve
from test_readme import ROOT

import raynforce
from raynforce.cli import main
from raynforce.policy import read_policy
from raynforce.runs.directory import find_policy

GUIDE = (ROOT / "docs" / "algorithms.md").read_text()
EXAMPLE = ROOT / "examples" / "own_off_policy.py"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", GUIDE, flags=re.DOTALL)
FILES = {found[1]: code for kind, code in BLOCKS if kind == "python" and (found := re.match(r"# (\w+\.py)\n", code))}
COMMANDS = [line for kind, code in BLOCKS if kind == "sh" for line in code.splitlines()]
IDENTITY = "raynforce.envs.tiny:IdentityBox"
SMALL: dict[str, Any] = {
    "runtime": "inline",
    "topology": "sync",
    "progress": "quiet",
    "settings": {
        "sampling.envs": 2,
        "network.hidden": [8],
        "algorithm.learning_starts": 64,
        "algorithm.batch_size": 16,
        "algorithm.samples_per_insert": 4.0,
        "algorithm.anneal_learning_rate": True,
        "eval.final_episodes": 0,
        "log_every": 100,
    },
}
STILL = """
import my_sac
from raynforce import Group


class SAC(my_sac.SAC):
    def groups(self):
        return {"critics": Group(("q1", "q2"), learning_rate=0.0), "temperature": Group("log_alpha", learning_rate=0.1)}
"""
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
    files = ["my_algos.py", "my_settings.py", "my_memory.py", "my_q.py", "my_buffer.py", "my_marwil.py", "my_sac.py"]
    assert list(FILES) == [*files, "test_my_algos.py"]
    assert len(COMMANDS) == 15


def test_its_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("raynforce.checkup.MANY", 12)
    for line in COMMANDS:
        words = line.split()[1:]
        if words[0] not in ("doctor", "record"):
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


def test_groups_are_resumed_to_the_same_weights(folder: Path) -> None:
    """Actor, critics and temperature learn at rates of their own, in a run that was stopped as in one that was not."""

    def stop(status: raynforce.Status) -> None:
        if status.steps >= 200:
            status.stop("half way")

    whole = raynforce.train(IDENTITY, "my_sac:SAC", steps=400, out=folder / "whole", **SMALL)
    raynforce.train(IDENTITY, "my_sac:SAC", steps=400, out=folder / "halves", callbacks=[stop], **SMALL)
    resumed = raynforce.resume(folder / "halves", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    last = [line for line in metrics(whole.path) if "charts/learning_rate" in line][-1]
    rates = [last[f"charts/learning_rate{group}"] for group in ("", "/critics", "/temperature")]
    assert rates == [rates[0]] * 3
    assert 0 < rates[0] < 5e-4


def test_each_group_has_its_own_rate(folder: Path) -> None:
    (folder / "my_still.py").write_text(STILL)
    run = raynforce.train(IDENTITY, "my_still:SAC", steps=200, out=folder / "still", **SMALL)
    spec, version = read_policy(find_policy(run.path))
    start = spec.network.initial(np.random.default_rng([0, 7]))
    moved = {
        name.partition(".")[0] for name, part in spec.network.parts.items() if (version.params != start)[part].any()
    }
    assert moved == {"policy", "log_std", "log_alpha"}
    alpha = spec.network.parts["log_alpha"]
    assert abs(float((version.params - start)[alpha][0])) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["own_off_policy:DDPG", "my_sac:SAC"])
def test_pendulum_is_learned(algo: str, folder: Path) -> None:
    solve("Pendulum-v1", algo, folder / "run", steps=20_000, target=-200, seed=0, runtime="inline", topology="sync")
