"""The doctor names what is kept across episodes and what no seed reaches, and does not contradict itself."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.cli import main
from raynforce.envs.doctor import Report, check_env
from raynforce.envs.local import LocalVector

KEPT, UNSEEDED, LATER = "state is kept across episodes", "reset(seed) is not deterministic", "episodes are not determ"
DIFFERS = {KEPT, UNSEEDED, "episodes are not deterministic"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made again for a check, however busy this machine is."""
    monkeypatch.setattr("raynforce.envs.doctor._MAKES", 60.0)


def check(env: str, steps: int | None = 300, **args: Any) -> Report:
    report = check_env(f"hostile_envs:{env}", args, steps=steps)
    consistent(report)
    return report


def consistent(report: Report) -> None:
    """Nothing is fine and wrong at once."""
    titles = {finding.title: finding for finding in report.findings}
    ok = {title for title, finding in titles.items() if finding.level == "ok"}
    wrong = [finding for finding in report.findings if finding.level == "error"]
    assert len(titles) == len(report.findings)
    assert sum(title in DIFFERS for title in titles) <= 1, "one cause, one finding"
    if DIFFERS & set(titles):
        assert not {"determinism", "seeding"} & ok
        assert "replaying" not in (titles["running episodes"].detail if "running episodes" in ok else "")
    for finding in wrong:
        where = finding.detail.partition(":")[0]
        assert not ("mid-episode" in where and "reset in mid-episode" in ok)
        assert not (where.startswith("reset") and "reset" in ok)
        assert not (where.startswith("step ") and "mid-episode" not in where and "again" not in where and "steps" in ok)
    assert report.ok == (not wrong)
    assert all("\n" not in finding.detail + finding.fix for finding in report.findings)


def of(report: Report, title: str) -> tuple[str, str]:
    finding = next(f for f in report.findings if f.title.startswith(title))
    assert finding.level == "warning"
    return finding.detail, finding.fix


@pytest.mark.parametrize(
    ("env", "args", "title", "cause", "fix"),
    [
        ("wrapped", {"name": "NormalizeObservation"}, KEPT, "NormalizeObservation keeps running", "normalize_obs=true"),
        ("wrapped", {"name": "NormalizeReward"}, KEPT, "NormalizeReward keeps running", "by a constant"),
        ("wrapped", {"name": "RunningMean"}, KEPT, "a wrapper keeps RunningMean.count, RunningMean.mean", "save_state"),
        ("wrapped", {"name": "LongRunningMean"}, KEPT, "a wrapper keeps RunningMean.count", "save_state"),
        ("Curriculum", {}, KEPT, "reset leaves Curriculum.level as it is", "set it in reset()"),
        ("Hoarder", {}, KEPT, "reset leaves Hoarder.level as it is", "set it in reset()"),
        ("ClassCounter", {}, KEPT, "reset leaves ClassCounter.resets (of the class) as it is", "set it in reset()"),
        ("GlobalCounter", {}, KEPT, "hostile_envs.STEPS (a global)", "set it in reset()"),
        ("Unseeded", {}, KEPT, "Unseeded.rng is a random stream that reset(seed) does not start", "self.np_random"),
        ("GlobalNumpy", {}, UNSEEDED, "it draws from numpy's global np.random", "self.np_random"),
        ("GlobalRandom", {}, UNSEEDED, "it draws from Python's global random", "self.np_random"),
        ("NoSuper", {}, UNSEEDED, "its reset does not pass the seed on", "super().reset(seed=seed)"),
        ("Fresh", {}, UNSEEDED, "a random stream of its own, the clock", "self.np_random"),
        ("Clock", {}, UNSEEDED, "a random stream of its own, the clock", "self.np_random"),
    ],
)
def test_the_cause_is_named(env: str, args: dict[str, Any], title: str, cause: str, fix: str) -> None:
    report = check(env, **args)
    assert report.ok
    detail, what_to_do = of(report, title)
    assert cause in detail
    assert fix in what_to_do
    assert "at resume" in detail


def test_looking_for_causes_leaves_the_global_streams_alone() -> None:
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002
    check("Fresh", steps=50)
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


@pytest.mark.parametrize("name", ["RecordEpisodeStatistics", "StickyAction", "TimeAware"])
def test_wrappers_that_keep_nothing_that_is_seen(name: str) -> None:
    report = check("wrapped", name=name)
    assert not {f.title for f in report.findings} & DIFFERS
    assert "running episodes" in {f.title for f in report.findings}


def test_what_is_saved_comes_back() -> None:
    detail, _ = of(check("SavedCurriculum"), KEPT)
    assert detail.endswith("a resume brings it back, in evaluation a new environment begins without it")
    report = check("SavedCurriculum", forgets=True)
    assert "through save_state" in of(report, "running episodes go another way after resume")[0]
    assert "at resume and in evaluation" in of(report, KEPT)[0]


def test_one_that_is_slow_to_make_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.envs.doctor._MAKES", 0.0)
    detail, fix = of(check("Curriculum"), "episodes are not deterministic")
    assert detail.startswith("the same seed and actions gave something else at step 1 of episode 0")
    assert "keep nothing across episodes" in fix
    assert "NormalizeObservation keeps" in of(check("wrapped", name="NormalizeObservation"), KEPT)[0], "it is known"


@pytest.mark.parametrize(
    ("env", "args", "title", "where"),
    [
        ("LateNaN", {}, "the observation is not finite", "step 700 (step 20 of episode 34)"),
        ("NaNAtReset", {}, "the observation is not finite", "reset(seed=1)"),
        ("NaNAfterMid", {}, "the observation is not finite", "step 1 after a reset in mid-episode"),
        ("Ends", {"how": "reward"}, "the reward is not finite", "step 20 "),
        ("Ends", {"how": "large"}, "the reward is too large", "step 1 "),
        ("Huge", {}, "the observation is too large", "reset(seed=1)"),
        ("Leaky", {"how": "raises"}, "step raises", "step 100 "),
        ("Leaky", {"how": "exits"}, "step raises", "step 100 "),
        ("NoReset", {}, "reset does not return (obs, info)", "it returned a NoneType"),
        ("NoSpaces", {}, "spaces are missing", "AttributeError"),
        ("NoSeed", {}, "reset raises", "reset(seed=1)"),
        ("Spaced", {"obs": "empty"}, "spaces are not supported", "empty observation space"),
        ("Spaced", {"obs": "text"}, "spaces are not supported", "Text"),
        ("Spaced", {"obs": "slash"}, "spaces are not supported", "'a/b'"),
        ("Spaced", {"action": "box of ints"}, "spaces are not supported", "Box of floats"),
        ("Spaced", {"action": "dict"}, "spaces are not supported", "Dict"),
    ],
)
def test_errors_are_told_once_and_in_their_place(env: str, args: dict[str, Any], title: str, where: str) -> None:
    report = check(env, steps=800, **args)
    (error,) = [f for f in report.findings if f.level == "error"]
    assert error.title == title
    assert where in error.detail


def test_the_default_finds_a_nan_at_step_700() -> None:
    report = check("LateNaN", steps=None)
    assert not report.ok
    assert report.steps > 700


@pytest.mark.parametrize("obs", ["image", "float image", "scalar", "dict", "tuple", "start", "bool", "int"])
def test_odd_observations_that_are_fine(obs: str) -> None:
    assert all(f.level == "ok" for f in check("Spaced", steps=60, obs=obs).findings if "large" not in f.title)


@pytest.mark.parametrize("action", ["start", "box", "scalar box", "multi", "grid", "binary", "one", "box of one side"])
def test_odd_actions_that_are_fine(action: str) -> None:
    warnings = {f.title for f in check("Spaced", steps=60, action=action).findings if f.level != "ok"}
    expected = {"one": "there is one action only", "box of one side": "the action space has infinite bounds"}
    assert warnings == ({expected[action]} if action in expected else set())


# -- training says the same --------------------------------------------------------------------------------------------


def test_a_run_says_what_a_wrapper_keeps_before_it_begins() -> None:
    args = {"name": "NormalizeObservation"}
    vector = LocalVector("hostile_envs:wrapped", args, 1, seed=0)
    assert "start over at resume: NormalizeObservation keeps running statistics; drop the wrapper" in vector.note
    vector.reset()
    for _ in range(50):
        vector.step(np.array([1]))
    state = vector.state()
    vector.close()
    again = LocalVector("hostile_envs:wrapped", args, 1, seed=0)
    (lost,) = again.load(state)
    again.close()
    assert "replaying their actions led elsewhere, as NormalizeObservation keeps running statistics" in lost
    assert LocalVector("hostile_envs:Walk", {}, 1, seed=0).note == ""


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["CartPole-v1", "hostile_envs:Curriculum", "hostile_envs:LateNaN"])
def test_lines_fit_and_json_has_all(
    env: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["raynforce"])
    monkeypatch.setenv("COLUMNS", "80")
    code = main(["doctor", env, "--steps", "800"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert main(["doctor", env, "--steps", "800", "--json"]) == code == (1 if "NaN" in env else 0)
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 800
    flat = " ".join(text.split())
    for finding in found["findings"]:
        assert finding["title"] in flat
        if finding["title"] != "speed":  # another measurement
            for idea in (*finding["detail"].split("; "), finding["fix"]):
                assert " ".join(idea.split()) in flat


def test_steps_are_for_environments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--steps", "5"]) == 2
    assert main(["doctor", "CartPole-v1", "--steps", "none"]) == 2
    assert "--steps = 'none'" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("{}")
    assert main(["doctor", os.fspath(tmp_path), "--steps", "5"]) == 2
