"""The doctor finds what is wrong with an environment."""

from __future__ import annotations

import time

import pytest
from bad_envs import Bad

from raynforce.envs.doctor import Report, check_env
from raynforce.errors import UsageError


def check(fault: str, steps: int | None = 60, **env_args: object) -> Report:
    return check_env("bad_envs:Bad", {"fault": fault, **env_args}, steps=steps)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "raynforce.envs.tiny:DictIdentity"])
def test_good_envs_pass(env: str) -> None:
    report = check_env(env, steps=100)
    assert report.ok
    assert all(f.level == "ok" for f in report.findings)
    titles = [f.title for f in report.findings]
    assert {"spaces", "reset", "seeding", "steps", "episodes", "determinism", "reset in mid-episode"} <= set(titles)
    assert ("vectorised by its own implementation" in titles) == (env == "CartPole-v1")


@pytest.mark.parametrize(
    ("fault", "level", "title", "detail"),
    [
        ("make", "error", "cannot be made", "no licence"),
        ("text", "error", "spaces are not supported", "Text"),
        ("unbounded", "warning", "the action space has infinite bounds", "finite low and high"),
        ("reset raises", "error", "reset raises", "KeyError: 'map'"),
        ("reset obs", "error", "reset does not return (obs, info)", "a ndarray"),
        ("shape", "error", "the observation does not fit its space", "shape (1,); expected (2,)"),
        ("dict", "error", "the observation does not fit its space", "is a dict"),
        ("discrete", "error", "the observation does not fit its space", "is 7"),
        ("float64", "warning", "the observation has another dtype", "float64 but declared float32"),
        ("outside", "warning", "the observation leaves its bounds", "widen low and high"),
        ("nan", "error", "the observation is not finite", "step 2 (step 2 of episode 0): 'obs' holds NaN"),
        ("random", "warning", "reset(seed) is not deterministic", "self.np_random"),
        ("fixed", "warning", "every episode starts the same", "four different seeds"),
        ("late", "warning", "episodes are not deterministic", "at step 2 of episode 0"),
        ("step raises", "error", "step raises", "step 3 (step 3 of episode 0), action "),
        ("old", "error", "step does not return 5 values", "4 values (ndarray, float, bool, dict)"),
        ("reward", "error", "the reward is not a number", "ndarray"),
        ("reward nan", "error", "the reward is not finite", "nan"),
        ("flag", "error", "truncated is not a bool", "None (NoneType)"),
        ("int flag", "warning", "truncated is not a bool", "return bool(truncated)"),
        ("alias", "warning", "observations share memory", "obs.copy()"),
        ("mid", "error", "reset raises", "not now"),
        ("large", "warning", "observations are large", "network.normalize_obs=true"),
    ],
)
def test_faults(fault: str, level: str, title: str, detail: str) -> None:
    # 60 steps of episodes of 20 end exactly with one, so that only the check itself resets in mid-episode
    report = check(fault, length=20 if fault == "mid" else 5)
    found = {f.title: f for f in report.findings}
    assert title in found
    assert found[title].level == level
    assert detail in f"{found[title].detail}; {found[title].fix}"
    assert report.ok == (level == "warning")
    assert all("\n" not in f.detail for f in report.findings)


def test_a_sound_env_has_none_of_these() -> None:
    assert {f.title for f in check("").findings if f.level != "ok"} == {"observations are large"}


def test_that_agents_are_joined_in_the_same_arrays_is_no_fault_of_theirs() -> None:
    found = {f.title for f in check_env("raynforce.envs.tiny_agents:Together", steps=60).findings}
    assert "agents" in found
    assert "observations share memory" not in found


def test_ends() -> None:
    def titles(length: int, end: str) -> set[str]:
        return {f.title for f in check("", length=length, end=end).findings if f.level == "warning"}

    assert "episodes may never end" in titles(10_000, "terminated")
    assert "terminated may be a time limit" in titles(5, "terminated")
    assert "terminated and truncated together" in titles(5, "terminated and truncated")
    assert titles(5, "truncated") == {"observations are large"}
    pendulum = {f.title: f for f in check_env("Pendulum-v1", steps=50).findings}
    assert pendulum["episodes"].detail == "none ended in 50 steps; the time limit ends them"


def test_speed() -> None:
    cheap, slow = check(""), check("slow", steps=20)
    assert "steps/s; step p50 " in next(f.detail for f in cheap.findings if f.title == "speed")
    assert cheap.cost is not None
    assert slow.cost is not None
    assert (cheap.cost.steps, slow.cost.steps) == (60, 20)
    assert cheap.cost.seconds is not None
    assert slow.cost.seconds is not None
    assert cheap.cost.seconds < 4e-3 < slow.cost.seconds < 50e-3
    assert cheap.cost.computing is not None
    assert slow.cost.computing is not None
    assert slow.cost.computing < 0.5 < cheap.cost.computing, "it sleeps"
    assert check("step raises").cost is None


def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.envs.checkup.HANGS", 0.3)
    monkeypatch.setattr("raynforce.envs.doctor.HANGS", 0.3)
    monkeypatch.setattr(Bad, "step", lambda self, action: time.sleep(20))
    started = time.monotonic()
    found = check("").findings[-1]
    assert time.monotonic() - started < 10
    assert (found.level, found.title) == ("error", "hangs")
    assert found.detail == "step 1 (step 1 of episode 0) was not through in 0.3 seconds"


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.envs.checkup.SECONDS", 0.2)
    monkeypatch.setattr("raynforce.envs.checkup._AGAIN_SECONDS", 0.1)
    report = check("slow", steps=None)
    assert report.ok
    assert 1 <= report.steps < 60, "4 ms each"
    said = next(f.detail for f in report.findings if f.title == "steps")
    assert said.startswith(f"{report.steps} random steps gave numbers and flags of the right kind")
    assert said.endswith("of 10,000 that were to be tried: time was up")


def test_who_asks_for_steps_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.envs.checkup.SECONDS", 0.0)
    report = check("", steps=300)
    assert report.steps == 300
    assert next(f.detail for f in report.findings if f.title == "steps").startswith("300 random steps gave")


def test_unknown_names_are_wrong_use() -> None:
    with pytest.raises(UsageError, match="did you mean 'CartPole-v1'"):
        check_env("CartPol-v1")
    with pytest.raises(UsageError, match="no module named"):
        check_env("no_such_module:Env")
    with pytest.raises(UsageError, match="steps is 0"):
        check_env("CartPole-v1", steps=0)
    assert check_env("CartPole-v1", steps=1).ok
