"""`raynforce doctor my_algos:Mine`: what is fine, and one of each thing that is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Answer
from marks import slowly

from raynforce.checkup import TINY, check_algorithm
from raynforce.envs.doctor import Report
from raynforce.envs.vector import probe

Cli = Callable[..., Answer]

sys.path.append(str(Path(__file__).parents[1] / "algos"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.checkup.MANY", 12)


def found(report: Report, title: str) -> str:
    """The detail of the finding with this title."""
    details = [f"{f.level}: {f.detail}" for f in report.findings if f.title == title]
    assert details, [f"{f.level} {f.title}: {f.detail}" for f in report.findings]
    return details[0]


@pytest.mark.parametrize("algo", ["dqn", "own_algos:Declared", *slowly("ppo", "impala", "a3c")])
def test_a_right_one_is_ready(algo: str) -> None:
    report = check_algorithm(algo)
    assert report.ok, report.findings
    assert {f.level for f in report.findings} == {"ok"}
    assert "equal to the bit" in found(report, "resume")
    assert "the same weights" in found(report, "repeats")


def test_it_begins_with_the_plain_case() -> None:
    """A vector is observed, and one of a few actions taken: what most environments are."""
    report = check_algorithm("own_algos:Plain")
    assert "Largest, discrete actions" in found(report, "tried on")
    assert [f.title for f in report.findings if f.title.startswith("fails")] == []
    (leaf,) = probe(*TINY["discrete"]).obs
    assert (next(iter(TINY)), leaf.kind, leaf.shape) == ("discrete", "box", (4,))


def test_it_tells_what_is_declared() -> None:
    report = check_algorithm("examples.own_off_policy:DDPG")
    assert {f.level for f in report.findings} == {"ok"}
    assert "discrete actions: this DDPG is for" in found(report, "refuses")
    assert "IdentityBox, continuous actions" in found(report, "tried on")
    declares = found(report, "declares")
    assert "outputs: policy 1; max_lag: any; learns from replay; keeps critics, target_critics" in declares
    assert "sampling.fragment=4" in declares
    assert found(report, "topologies") == "ok: sync, overlap, async, replay"
    assert "12 tensors" in found(report, "own parameters")
    assert "log_std" in found(report, "constant")


def test_what_is_not_saved() -> None:
    report = check_algorithm("own_algos:Curious")
    assert not report.ok
    detail = found(report, "does not resume exactly")
    assert "error: a copy that was saved, loaded and trained on has another network, optimiser" in detail
    assert "it changes model (Linear), slow (Linear), optimizer (Adam)" in detail


def test_what_is_copied_now_and_then_and_not_saved() -> None:
    assert "target (Tensor)" in found(check_algorithm("own_algos:CopiesLate"), "does not resume exactly")


def test_gradients_that_are_zero() -> None:
    report = check_algorithm("own_algos:HalfDead")
    assert "warning: of policy in all" in found(report, "gradients are zero")


def test_a_loss_that_does_not_depend_on_the_network() -> None:
    report = check_algorithm("own_algos:Detached")
    assert not report.ok
    detail = found(report, "fails with discrete actions")
    assert detail.startswith("error: the loss does not depend on the network's parameters: make Loss.total of")
    report = check_algorithm("own_algos:TimesZero")
    assert not report.ok
    assert "every gradient" in found(report, "the loss does not depend on the network")


def test_gradients_that_are_not_finite() -> None:
    report = check_algorithm("own_algos:InfiniteGradient")
    detail = found(report, "fails with continuous actions")
    assert detail.startswith("error: the gradients of log_std are not finite: look for")


def test_an_optimiser_that_does_nothing() -> None:
    report = check_algorithm("own_algos:Frozen")
    assert "model.weight, model.bias did not change" in found(report, "own parameters do not learn")


def test_chance_without_a_seed() -> None:
    report = check_algorithm("own_algos:Unseeded")
    assert "not from np.random" in found(report, "does not repeat")


def test_one_that_raises() -> None:
    report = check_algorithm("own_algos:Raises")
    detail = found(report, "fails with discrete actions")
    assert detail.startswith("error: algorithm own_algos:Raises raised KeyError: 'advantages' in helper (")


def test_one_that_lacks_something() -> None:
    assert "does not define loss" in found(check_algorithm("own_algos:NoLoss"), "is not complete")


def test_an_environment_and_settings_may_be_named() -> None:
    report = check_algorithm("dqn", "CartPole-v1", {"algorithm": {"dueling": True}})
    assert report.ok
    assert "CartPole-v1, discrete actions" in found(report, "tried on")
    assert "outputs: value 1, advantage 2" in found(report, "declares")
    refused = check_algorithm("dqn", "Pendulum-v1")
    assert not refused.ok
    assert "dqn needs discrete actions" in found(refused, "refuses")


def test_faults_of_the_environment_are_told_too() -> None:
    report = check_algorithm("own_algos:Plain", "fault_envs:Garbage", {"env_args": {"p": 1.0}})
    titles = [finding.title for finding in report.findings]
    assert not report.ok
    assert titles
    assert all(title.startswith("fault_envs:Garbage: ") for title in titles), titles
    report = check_algorithm("own_algos:Plain", "fault_envs:NotDetermined")
    assert report.ok
    found(report, "fault_envs:NotDetermined: episodes are not deterministic")
    assert "fault_envs:NotDetermined" in found(report, "tried on")
    assert "no_such" in found(check_algorithm("own_algos:Plain", "no_such:Env"), "refuses")


def test_the_command(cli: Cli) -> None:
    answer = cli("doctor", "own_algos:Plain", "--json")
    assert answer.code == 0
    assert answer.json["ok"]
    assert "tried on" in {finding["title"] for finding in answer.json["findings"]}
    answer = cli("doctor", "own_algos:Raises")
    assert answer.code == 1
    assert "error    fails with discrete actions" in answer.out
    assert "fix the errors above" in answer.out
    answer = cli("doctor", "CartPole-v1", "Pendulum-v1")
    answer.refused(2, "a second argument is for an algorithm, and 'CartPole-v1' is none")
