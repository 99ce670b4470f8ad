"""`doctor ENV` says how to run it: from what was measured to the command to type."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from raynforce.cli import main
from raynforce.cli.advice import how_to_run
from raynforce.envs.cost import Cost
from raynforce.envs.doctor import Report
from raynforce.envs.vector import probe
from raynforce.policies.cost import PolicyCost

CARTPOLE = "CartPole-v1"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.auto.cores", lambda: 4)
    monkeypatch.setattr("raynforce.auto.cost_of_acting", lambda spec, envs: PolicyCost(20e-6, 40e-6, envs))


def advice(
    seconds: float, spread: tuple[float, float], computing: float, env: str = CARTPOLE, **env_args: Any
) -> dict[str, str]:
    cost = Cost(seconds, seconds, spread, computing, 100)
    report = Report(env, spec=probe(env, env_args if env != CARTPOLE else {}), cost=cost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raynforce.cli.advice.cost_of_env", lambda env, args: (report.spec, cost))
        rows = [line.split(maxsplit=1) for line in how_to_run(report, env_args, me="raynforce")]
    assert all("\n" not in text for _, text in rows)
    return {name: text for name, text in rows}  # noqa: C416  (rows are lists)


def test_one_that_waits() -> None:
    rows = advice(0.032, (0.014, 0.046), 0.01, joints=3, name="arm 2", id="7")
    assert rows["step"].startswith(
        "takes 32 ms with its share of the resets, most of them 14 ms to 46 ms, of which it "
    )
    assert rows["step"].endswith("computes 1%: it waits, which many can do side by side in threads")
    assert rows["policy"] == "takes 20 µs to choose for one environment, 40 µs for 8 at once"
    assert "at most 31 steps/s" in rows["sync"]
    assert rows["central"].endswith("8 environments would give at most 250 steps/s, 64 (--envs 64) 2,000")
    assert rows["chosen"].startswith("process and central with threads, because a step of CartPole-v1 takes 32 ms")
    assert rows["type"] == (
        "raynforce train ppo CartPole-v1 --runtime process --topology central --samplers 1 --envs 8 "
        """--set env_args.joints=3 --set 'env_args.name=arm 2' --set 'env_args.id="7"' """
        "--set sampling.parallel=threads"
    )


def test_one_that_computes() -> None:
    uneven = advice(0.040, (0.01, 0.07), 1.0)
    assert "at most 100 steps/s on 4 cores" in uneven["central"]
    assert "--topology central" in uneven["type"]
    assert uneven["type"].endswith("--set sampling.parallel=processes")
    even = advice(0.040, (0.039, 0.041), 1.0)
    assert "--samplers 4 does as well" in even["central"]
    assert "--runtime process --topology sync" in even["type"]


def test_one_that_is_cheap() -> None:
    rows = advice(10e-6, (9e-6, 12e-6), 1.0)
    assert "at most 66,667 steps/s" in rows["sync"]
    assert "would not pay" in rows["central"]
    assert rows["chosen"] == "inline and sync, because a step of CartPole-v1 takes 10 µs"
    assert rows["type"].endswith("--runtime inline --topology sync --samplers 1 --envs 8")


def test_what_learning_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = advice(10e-6, (9e-6, 12e-6), 1.0)
    assert small["learner"].startswith("takes about 27 µs a step, by the 8,896 products of its network")
    assert small["learner"].endswith("and sampling 15 µs: process and overlap do both at once")
    assert "--runtime process --topology overlap" in small["or"]
    assert "--runtime inline --topology sync" in small["type"], "what auto chooses"
    slow = advice(0.032, (0.014, 0.046), 0.01)
    assert slow["learner"].startswith("takes about 27 µs a step")
    assert "or" not in slow, "learning is next to nothing"
    large = advice(50e-6, (49e-6, 51e-6), 1.0, "raynforce.envs.tiny:Identity", n=4000)
    assert large["learner"].endswith("of the time; torch in 4 threads takes less, if cores are free")
    assert large["or"] == f"{large['type']} --set learner.threads=4"
    monkeypatch.setattr("raynforce.auto.cores", lambda: 1)
    assert "or" not in advice(10e-6, (9e-6, 12e-6), 1.0), "one core"


def test_a_policy_that_acts_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.auto.cost_of_acting", lambda spec, envs: None)
    assert "not measured" in advice(0.032, (0.014, 0.046), 0.01)["policy"]


def test_nothing_is_said_of_what_is_broken() -> None:
    report = Report(CARTPOLE, spec=probe(CARTPOLE), cost=Cost(1.0, 1.0, (1.0, 1.0), 0.0, 9))
    report.add("error", "the reward is not finite", "")
    assert how_to_run(report, {}, me="raynforce") == []
    assert how_to_run(Report(CARTPOLE), {}, me="raynforce") == []


def test_the_command_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", CARTPOLE, "--steps", "200"]) == 0
    text = capsys.readouterr().out
    assert "\nhow to run it:\n  step     takes " in text
    assert main(["doctor", CARTPOLE, "--steps", "200", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["how_to_run"]
    name, _, command = lines[-1].partition("  ")
    assert name == "type"
    words = shlex.split(command)
    assert main([*words[words.index("train") :], "--print-config"]) == 0
    assert "topology: sync" in capsys.readouterr().out


def test_agents_with_different_spaces_have_a_policy_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "raynforce.envs.tiny_agents:Hunt", "--steps", "300"]) == 0
    told = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    words = shlex.split(told.partition(" type ")[2].partition(" ready")[0])
    (policies,) = (word for word in words if word.startswith("policies="))
    found = json.loads(policies.partition("=")[2])
    assert found == {"hunter": {"agents": ["hunter_0"]}, "prey": {"agents": ["prey_0", "prey_1"]}}
    assert main([*words[words.index("train") :], "--steps", "64", "--print-config"]) == 0
