"""The conformance kit: both SDKs pass it, and for each case a broken simulator is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raynforce.cli import main
from raynforce.envs.conformance import CASES, cases, check

BROKEN = Path(__file__).parent / "broken_sim.py"
BROKEN_ACTING = Path(__file__).parent / "broken_acting.py"
ACTING = list(CASES)[list(CASES).index("acts") :]
QUICK = ("acts", "hello", "reset", "step-again", "equal-seeds", "ping", "env-twice", "timing",
         "restored", "bad-state")  # fmt: skip


def test_the_header_passes(cartpole: str) -> None:
    found = {name: why for name, _, why in check(cartpole)}
    assert len(found) == len(CASES) > 40
    assert not any(found.values()), found


def test_an_engines_own_loop_passes(compiled: Callable[[str], str]) -> None:
    found = {name: why for name, _, why in check(compiled("tests/simulators/own_loop.cpp"))}
    assert not any(found.values()), found


@pytest.mark.slow  # an interpreter for each case
def test_the_python_sdk_passes() -> None:
    found = {name: why for name, _, why in check(f"sim:{sys.executable} {BROKEN} none")}
    assert not any(why for name, why in found.items() if name not in ACTING), found
    assert {found[name] for name in ACTING} == {"skipped: it does not offer `inference`"}


@pytest.mark.slow
def test_one_that_cannot_save_is_not_blamed() -> None:
    found = {name: why for name, _, why in check(f"sim:{sys.executable} {BROKEN} 'none without snapshot'")}
    assert set(found.values()) <= {
        "",
        "skipped: it does not offer `snapshot`",
        "skipped: it does not offer `inference`",
    }
    assert len([why for why in found.values() if "snapshot" in why]) == 11


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_broken_simulator_is_found_out(name: str, cartpole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SECONDS", 2.0)
    script = f"{BROKEN_ACTING} {name} {cartpole}" if name in ACTING else f"{BROKEN} {name}"
    ((_, _, why),) = check(f"sim:{sys.executable} {script}", [name])
    assert why
    assert not why.startswith("skipped")


def test_the_command(cartpole: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "check", cartpole, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["ok"]
    assert facts["cases"] == len(CASES)
    assert [speed["envs"] for speed in facts["speed"]] == [1, 64]


def test_a_new_project_builds_and_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str], cartpole: str) -> None:
    folder = tmp_path / "my-sim"
    assert main(["sim", "new", str(folder)]) == 0
    build = next(line for line in capsys.readouterr().out.splitlines() if "g++" in line)
    subprocess.run(build, shell=True, check=True)
    program = build.split()[-1]
    assert not any(why for *_, why in check(program, ["hello", "step", "equal-seeds", "close", "restored"]))
    assert main(["sim", "new", str(folder)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["sim", "check", "CartPole-v1"]) == 2
    assert "is no simulator" in capsys.readouterr().err
