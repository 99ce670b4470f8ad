"""Numbers that environments put into `info` at the end of an episode: metrics of training and of evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import ALGOS, SMALL
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from info_envs import Teller
from marks import slowly
from rays import needs
from running import metrics, without

import raynforce
from raynforce import infos
from raynforce.cli import main
from raynforce.config import Config
from raynforce.driver.status import Tally
from raynforce.envs.native import NativeVector
from raynforce.envs.vector import VectorEnv, make_vector
from raynforce.experience.counts import Record
from raynforce.roles.learned import Learned

NAMES = ["is_success", "made/total", "sometimes", "steps"]
ENV = "info_envs:Teller"


def test_what_counts_as_a_number() -> None:
    fit: dict[str, Any] = {"a": True, "b": 2, "c": 2.5, "d": np.int8(-3), "e": np.float32(0.5), "f": np.array(7)}
    unfit = {"x": math.nan, "y": math.inf, "z": "1", "u": None, "v": np.ones(1), "w": 1j, "t": 10**400, 3: 1, "": 1}
    assert infos.numbers({**unfit, **fit, "n" * 65: 1, "\n": 1}) == {
        "a": 1,
        "b": 2,
        "c": 2.5,
        "d": -3,
        "e": 0.5,
        "f": 7,
    }
    assert len(infos.numbers({str(i): i for i in range(1000)})) == infos.MOST
    for odd in (None, 3, [("a", 1)], object()):
        assert infos.numbers(odd) == {}


def play(vector: VectorEnv, steps: int = 20) -> list[tuple[int, int, dict[str, float]]]:
    """Step, lane and numbers of all episodes that ended; each tells how long it was."""
    found = []
    lengths = np.zeros(vector.num_envs)
    vector.reset()
    for t in range(steps):
        step = vector.step(np.arange(vector.num_envs) % 2)
        lengths += step.valid
        ended = np.flatnonzero(step.terminated | step.truncated)
        assert sorted(step.info) == ended.tolist()
        for lane in ended.tolist():
            told = dict(step.info[lane])
            assert told["steps"] == lengths[lane]
            assert told["made/total"] == (lengths[lane] if lane % 2 else 0)
            assert told["is_success"] == lane % 2
            assert told.get("sometimes", 0) == (lengths[lane] if lengths[lane] % 2 else 0)
            assert set(told) <= set(NAMES)
            found.append((t, lane, told))
            lengths[lane] = 0
    vector.close()  # type: ignore[no-untyped-call]
    assert found
    return found


@pytest.mark.parametrize("parallel", ["threads", "processes"])
def test_every_way_to_step_tells_the_same(parallel: Any) -> None:
    assert play(make_vector(ENV, {}, 4, seed=1, parallel=parallel)) == play(make_vector(ENV, {}, 4, seed=1))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_environments_own_vector_implementation(mode: AutoresetMode) -> None:
    made = SyncVectorEnv([lambda: Teller(2), lambda: Teller(5)], autoreset_mode=mode)
    found = play(NativeVector("tellers", made, seed=0))
    assert {lane for _, lane, _ in found} == {0, 1}


@pytest.mark.parametrize(
    "odd", [None, 3, {"final_info": 3}, {"a": np.ones(2), "_a": 3}, {7: np.ones(2)}, {"a": [1, 2]}]
)
def test_odd_infos_of_a_vector_are_left_out(odd: Any) -> None:
    class Strange(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            return *super().step(actions)[:4], odd

    vector = NativeVector("tellers", Strange([lambda: Teller(2)] * 2), seed=0)
    vector.reset()
    assert not any(vector.step(np.zeros(2, np.int64)).info for _ in range(3))
    vector.close()


def train(out: Path, algo: str = "ppo", env: str = ENV, *, settings: Any = None, **more: Any) -> raynforce.Run:
    small = (
        SMALL | ALGOS.get(algo, {}) | {"log_every": 1, "eval.every": 700, "eval.episodes": 7, "eval.final_episodes": 0}
    )
    how: dict[str, Any] = {"steps": 2000, "seed": 3, "runtime": "inline", "progress": "quiet"} | more
    return raynforce.train(env, algo, out=out, settings=small | (settings or {}), **how)


@pytest.mark.parametrize(
    ("runtime", "topology", "algo", "settings"),
    [
        ("inline", "sync", "ppo", {}),
        ("inline", "shared-agent", "a3c", {}),
        ("inline", "central", "ppo", {}),
        *slowly(
            ("process", "central", "ppo", {"sampling.parallel": "threads"}),
            ("process", "replay", "dqn", {"replay.shards": 2}),
            ("process", "overlap", "ppo", {"sampling.parallel": "processes"}),
            ("process", "central", "ppo", {"sampling.parallel": "processes"}),
            ("ray", "async", "impala", {}),
            ("ray", "central", "ppo", {}),
        ),
    ],
)
def test_metrics_of_a_run(
    runtime: str, topology: str, algo: str, settings: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    run = train(tmp_path / "run", algo, runtime=runtime, topology=topology, settings=settings)
    lines = metrics(run.path)
    told = [line for line in lines if "charts/info/steps" in line]
    assert told
    for line in told:  # the same episodes as these are of
        assert line["charts/info/steps"] == pytest.approx(line["charts/episodic_length"])
        assert line["charts/info/made/total"] == pytest.approx(line["charts/episodic_return"])
        assert 0 <= line["charts/info/is_success"] <= 1
    evaluated = [line for line in lines if "eval/return" in line]
    assert evaluated
    for line in evaluated:
        assert line["eval/info/made/total"] == pytest.approx(line["eval/return"])
        assert {name for name in line if "/info/" in name} == {f"eval/info/{name}" for name in NAMES}
    assert {name for line in told for name in line if "/info/" in name} == {f"charts/info/{name}" for name in NAMES}


def test_a_resumed_run_tells_the_same(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")

    def stop(status: raynforce.Status) -> None:
        if status.steps > 900:
            status.stop()

    half = train(tmp_path / "half", callbacks=[stop])
    assert 900 < half.result.steps < 2000
    raynforce.resume(half.path, progress="quiet")
    lines = [[line for line in metrics(run.path) if "charts/SPS" in line] for run in (half, whole)]
    ours, theirs = (without(told, "time", "disk", "charts/SPS", "health") for told in lines)
    assert any("charts/info/sometimes" in line for line in ours)
    assert ours == theirs


def test_a_checkpoint_from_before_there_was_any_is_loaded() -> None:
    tally = Tally(Config(env="CartPole-v1"), 0.0)
    told = Record(0, 0, 8, np.ones(2), np.ones(2), {"a/b": np.array([1.0, 4.0])})
    tally.add(Learned(1, {}, {}, 1, [told]))
    state = tally.state()
    assert tally.status.metrics["charts/info/a/b"] == 2.5
    again, older = Tally(Config(env="CartPole-v1"), 0.0), Tally(Config(env="CartPole-v1"), 0.0)
    again.load(state)
    again.add(Learned(2, {}, {}, 1, [Record(0, 1, 8, np.ones(1), np.ones(1), {"a/b": np.array([7.0])})]))
    assert again.status.metrics["charts/info/a/b"] == 4.0
    older.load({name: part for name, part in state.items() if name != "info"})
    assert older.status.steps == 8


@pytest.mark.parametrize("kind", ["none", "raises", "names"])
def test_odd_info_stops_nothing_and_is_bounded(kind: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", env="info_envs:Odd", settings={"env_args.kind": kind}, steps=600)
    names = {name for line in metrics(run.path) for name in line if name.startswith("charts/info/")}
    assert len(names) == (infos.MOST if kind == "names" else 0)
    assert run.result.env_restarts == 0


def test_the_command_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", steps=300)
    assert main(["eval", str(run.path), "--episodes", "9", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["info"]["made/total"] == pytest.approx(facts["mean"])
    assert set(facts["info"]) <= set(NAMES)
    assert main(["eval", str(run.path), "--episodes", "9"]) == 0
    assert "info: is_success " in capsys.readouterr().out
    found = raynforce.evaluate(run.path, episodes=9)
    assert found.info["made/total"] == pytest.approx(found.returns)
