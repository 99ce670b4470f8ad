"""Running episodes that come back in samplers and runs, what the doctor says of them, and the documentation's own."""

from __future__ import annotations

import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import walks
from saved_envs import EXACT, through_a_file

import raynforce
from raynforce.config import Config
from raynforce.envs import snapshots
from raynforce.envs.doctor import Report, check_env
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import ContractError
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler

pytestmark = pytest.mark.usefixtures("walk_id")


# -- roles and runs ---------------------------------------------------------------------------------------------------


def sampler(env: str, **env_args: Any) -> tuple[Sampler, PolicyVersion]:
    layers = {"env": env, "env_args": env_args, "preset": "none", "sampling": {"envs": 3, "fragment": 7}}
    config: Config = resolve(layers, {})[0]
    learner = Learner(config, probe(env, env_args))
    args = EnvArgs(env, 3, 0, env_args)
    return Sampler(learner._algo.acting(), args, 7), learner.publish()


@pytest.mark.parametrize("env", [*EXACT, "walks:delayed"])
def test_a_sampler_goes_on_where_it_was(env: str) -> None:
    first, version = sampler(env)
    for _ in range(4):
        first.sample(version)
    state = through_a_file(first.state())
    after = [first.sample(version) for _ in range(6)]
    other, _ = sampler(env)
    assert other.load(state) == []
    for then in after:
        now = other.sample(version)
        assert {k: v.tobytes() for k, v in now.columns.items()} == {k: v.tobytes() for k, v in then.columns.items()}
    assert sum(len(fragment["episode/return"]) for fragment in after) > 2


def test_a_sampler_counts_episodes_that_start_fresh_from_there() -> None:
    first, version = sampler("walks:Walk", fault="lies", far=math.inf)
    first.sample(version)
    other, _ = sampler("walks:Walk", fault="lies", far=math.inf)
    (sentence,) = other.load(first.state())
    assert "3 of 3 running episodes" in sentence
    assert other._flying.returns.tolist() == [0, 0, 0]
    assert other._flying.lengths.tolist() == [0, 0, 0]


SMALL = {
    "runtime": "inline",
    "topology": "sync",
    "sampling.envs": 4,
    "sampling.fragment": 32,
    "algorithm.minibatch_size": 64,
    "algorithm.epochs": 1,
    "eval.every": 0,
    "eval.final_episodes": 0,
}


def halves(env: str, path: Path, **env_args: Any) -> raynforce.Run:
    """A run that is stopped half way and resumed."""

    def stop(status: raynforce.Status) -> None:
        if status.steps >= 512:
            status.stop("half way")

    settings = SMALL | {f"env_args.{key}": value for key, value in env_args.items()}
    more: dict[str, Any] = {"steps": 1024, "seed": 3, "settings": settings, "progress": "quiet"}
    half = raynforce.train(env, "ppo", out=path, callbacks=[stop], **more)
    assert half.result.stopped == "half way"
    return raynforce.resume(path, progress="plain")


@pytest.mark.parametrize("env", ["walks:Walk", "Walk-v0", "walks:saved", "walks:delayed"])
def test_a_resumed_run_equals_one_never_stopped(env: str, tmp_path: Path) -> None:
    whole = raynforce.train(
        env, "ppo", steps=1024, seed=3, out=tmp_path / "whole", settings=SMALL, progress="quiet"
    ).result
    resumed = halves(env, tmp_path / "halves").result
    assert resumed.weights_sha256 == whole.weights_sha256
    assert (resumed.episodes, resumed.return_mean) == (whole.episodes, whole.return_mean)


def test_a_run_says_what_a_lying_pair_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = halves("walks:Walk", tmp_path / "run", fault="lies")
    assert resumed.result.steps == 1024
    assert resumed.result.stopped == "steps done"
    said = capsys.readouterr()
    assert (
        "note: 4 of 4 running episodes of env 'walks:Walk' start over: what its load_state was" in said.out + said.err
    )


def test_a_run_ends_with_one_line_if_what_is_saved_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"env 'walks:Walk' cannot be saved: save_state returned a bytes"):
        halves("walks:Walk", tmp_path / "run", fault="pickle")


# -- the doctor -------------------------------------------------------------------------------------------------------


def found(report: Report) -> dict[str, tuple[str, str]]:
    return {finding.title: (finding.level, finding.detail) for finding in report.findings}


@pytest.mark.parametrize(
    ("env", "way"),
    [
        ("walks:Walk", "through save_state and load_state of walks:Walk"),
        ("walks:Stranger", "through the snapshot registered for walks:Stranger"),
        ("walks:delayed", "by replaying their actions"),
        ("Pendulum-v1", "by replaying their actions"),
    ],
)
def test_the_doctor_tries_how_episodes_come_back(env: str, way: str) -> None:
    findings = found(check_env(env, steps=100))
    assert findings["running episodes"] == ("ok", f"come back {way}: 10 steps after loading were the same as before")
    assert ("walks:Delayed" in findings["vectorised by a loop"][1]) == (env == "walks:delayed")


@pytest.mark.parametrize(
    ("env", "args", "level", "title", "detail"),
    [
        ("Walk", {"fault": "lies"}, "warning", "running episodes start over at resume", "'body' differs"),
        ("Walk", {"fault": "load raises"}, "warning", "running episodes start over at resume", "another version"),
        ("Walk", {"fault": "forgets"}, "warning", "running episodes go another way after resume", "step 1 after"),
        ("Walk", {"fault": "save draws"}, "warning", "running episodes start over at resume", "'rng' differs"),
        ("Plain", {"drifts": True}, "warning", "state is kept across episodes", "Plain.taken (of the class)"),
        ("Walk", {"fault": "pickle"}, "error", "running episodes cannot be saved", "np.frombuffer"),
        ("Walk", {"fault": "save raises"}, "error", "running episodes cannot be saved", "no space"),
    ],
)
def test_the_doctor_finds_what_is_wrong_with_a_pair(
    env: str, args: dict[str, Any], level: str, title: str, detail: str
) -> None:
    report = check_env(f"walks:{env}", {"far": 1e4, **args}, steps=100)
    findings = found(report)
    assert findings[title][0] == level
    assert detail in findings[title][1]
    assert "running episodes" not in findings
    assert report.ok == (level == "warning")


def test_saving_must_not_change_the_course(monkeypatch: pytest.MonkeyPatch) -> None:
    save = walks.Walk.save_state

    def push(self: walks.Walk) -> Any:
        state = save(self)
        if abs(self.body[0]) > 0.0:
            self.far += 1.0  # not part of the state, and without effect on it
            self.body[1] += 1e-3 * (self.far > 10_001.5)
        return state

    monkeypatch.setattr(walks.Walk, "save_state", push)
    title = "running episodes go another way after resume"
    assert "step 2 after loading was not" in found(check_env("walks:Walk", {"far": 1e4}, steps=100))[title][1]


# -- the documentation ------------------------------------------------------------------------------------------------


class Simulator:
    """What the documentation has in C++."""

    def restart(self, seed: int | None) -> np.ndarray:
        self.place = np.full(3, 0.1)
        return self.place.astype(np.float32)

    def advance(self, force: np.ndarray) -> tuple[np.ndarray, bool]:
        self.place = np.clip(self.place + 0.1 * force, -1, 1)
        return self.place.astype(np.float32), bool(self.place[0] > 0.2)

    def save(self) -> bytes:
        return self.place.tobytes()

    def load(self, data: bytes) -> None:
        self.place = np.frombuffer(data).copy()


def test_the_pair_and_the_adapter_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    pair, adapter = (next(b for b in blocks if word in b) for word in ("def save_state", "register_snapshot"))
    monkeypatch.setitem(sys.modules, "simulator", types.SimpleNamespace(Simulator=Simulator))
    monkeypatch.setattr(snapshots, "SNAPSHOTS", dict(snapshots.SNAPSHOTS))
    theirs = types.ModuleType("their_sims.arm")
    monkeypatch.setitem(sys.modules, "their_sims", types.ModuleType("their_sims"))
    monkeypatch.setitem(sys.modules, "their_sims.arm", theirs)
    exec(pair, theirs.__dict__)
    findings = found(check_env("their_sims.arm:Arm", steps=100))
    assert findings["running episodes"][0] == "ok"
    assert "through save_state and load_state of their_sims.arm:Arm" in findings["running episodes"][1]
    exec(adapter, {})
    findings = found(check_env("their_sims.arm:Arm", steps=100))
    assert "through the snapshot registered for their_sims.arm:Arm" in findings["running episodes"][1]
    assert findings["running episodes"][0] == "ok"
