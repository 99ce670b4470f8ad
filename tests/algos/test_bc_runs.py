"""Whole runs of behaviour cloning: equal everywhere, killed and resumed; bad data; and others that go on from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rays
from failing import is_sound
from marks import slowly
from running import metrics, solve
from test_failures import Kills

import raynforce
from raynforce.data.files import read
from raynforce.errors import RaynforceError, UsageError
from raynforce.policy import read_policy
from raynforce.runs.directory import find_policy

QUICK: dict[str, Any] = {"eval.every": 0, "eval.episodes": 2, "eval.final_episodes": 0, "log_every": 512}
QUICK |= {"sampling.envs": 8, "sampling.fragment": 16, "checkpoint.every": 512}
PENDULUM: dict[str, Any] = {"network.hidden": [16], "algorithm.gaussian": "squashed", "network.activation": "relu"}
ENVS: dict[str, tuple[str, dict[str, Any]]] = {"discrete": ("CartPole-v1", {}), "squashed": ("Pendulum-v1", PENDULUM)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Steps at random of each environment."""
    folder = tmp_path_factory.mktemp("data")
    found = {}
    for kind, (env, _) in ENVS.items():
        found[kind] = folder / f"{kind}.parquet"
        raynforce.record(env, policy="random", steps=2000, out=found[kind], seed=5)
    return found


def train(out: Path, data: Path, kind: str = "discrete", steps: int = 2048, **more: Any) -> raynforce.Run:
    env, own = ENVS[kind]
    settings = QUICK | own | more.pop("settings", {})
    how: dict[str, Any] = {"runtime": "inline", "progress": "quiet", "seed": 3} | more
    return raynforce.train(env, "bc", steps=steps, data=data, out=out, settings=settings, **how)


@pytest.mark.parametrize("kind", ENVS)
def test_equal_seeds_are_equal_runs_and_so_is_a_killed_and_resumed_one(
    kind: str, data: dict[str, Path], tmp_path: Path
) -> None:
    whole, again = (train(tmp_path / out, data[kind], kind) for out in ("whole", "again"))
    assert whole.result.weights_sha256 == again.result.weights_sha256
    assert whole.result.steps == 2048  # transitions that it has learned from
    assert train(tmp_path / "other", data[kind], kind, seed=4).result.weights_sha256 != whole.result.weights_sha256
    killed = tmp_path / "killed"
    pid = os.fork()
    if pid == 0:
        kill = [lambda status: status.steps < 1300 or os.kill(os.getpid(), signal.SIGKILL)]
        train(killed, data[kind], kind, callbacks=kill)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    resumed = raynforce.resume(killed, progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert resumed.result.updates == whole.result.updates
    is_sound(resumed)


@pytest.mark.parametrize("runtime", ["process", *slowly("ray")])
@pytest.mark.parametrize("kind", ["discrete", *slowly("squashed")])
def test_every_runtime_gives_the_same_weights(
    kind: str, runtime: str, data: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rays.needs(runtime, request)
    here, there = (train(tmp_path / r, data[kind], kind, runtime=r) for r in ("inline", runtime))
    assert here.result.weights_sha256 == there.result.weights_sha256
    is_sound(there)


def test_both_formats_give_the_same_weights(data: dict[str, Path], tmp_path: Path) -> None:
    how: dict[str, Any] = {"policy": "random", "steps": 2000, "seed": 5}
    raynforce.record("CartPole-v1", out=tmp_path / "same-v0", format="minari", **how)
    one, other = (train(tmp_path / path.name[:4], path) for path in (data["discrete"], tmp_path / "same-v0"))
    assert one.result.weights_sha256 == other.result.weights_sha256


def test_a_killed_reader_costs_nothing(data: dict[str, Path], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", data["discrete"], runtime="process")

    kills = Kills("sampler", (4, 9))
    struck = train(tmp_path / "struck", data["discrete"], runtime="process", callbacks=[kills])
    assert struck.result.restarts == len(kills.killed) >= 1
    assert struck.result.lost_steps == 0
    assert struck.result.weights_sha256 == whole.result.weights_sha256


def test_a_resume_with_other_data_is_refused(data: dict[str, Path], tmp_path: Path) -> None:
    run = train(tmp_path / "run", data["discrete"])
    other = tmp_path / "other.parquet"
    raynforce.record("CartPole-v1", policy="random", steps=500, out=other, seed=6)
    with pytest.raises(RaynforceError, match=r"config: data .* is not what this run has learned from so far"):
        raynforce.resume(run.path, steps=4096, settings={"data": str(other)}, progress="quiet")
    moved = tmp_path / "moved.parquet"
    moved.write_bytes(data["discrete"].read_bytes())
    more = raynforce.resume(run.path, steps=4096, settings={"data": str(moved)}, progress="quiet")
    assert more.result.weights_sha256 == train(tmp_path / "whole", data["discrete"], steps=4096).result.weights_sha256


# -- what goes on from it ----------------------------------------------------------------------------------------------


def test_ppo_takes_all_of_a_clone(data: dict[str, Path], tmp_path: Path) -> None:
    clone = train(tmp_path / "clone", data["discrete"])
    given: Any = {"start_from": clone.path, "steps": 16, "settings": {**QUICK, "algorithm.learning_rate": 0.0}}
    run = raynforce.train("CartPole-v1", out=tmp_path / "ppo", runtime="inline", progress="quiet", **given)
    assert run.result.weights_sha256 == clone.result.weights_sha256


def test_sac_takes_the_actor_of_a_clone_and_says_so(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = train(tmp_path / "clone", data["squashed"], "squashed")
    still: dict[str, Any] = {"algorithm.learning_rate": 0.0, "network.hidden": [16], "network.normalize_obs": False}
    still |= {"algorithm.learning_starts": 64, "eval.every": 0, "eval.episodes": 2, "eval.final_episodes": 0}
    how: dict[str, Any] = {"steps": 128, "settings": still, "runtime": "inline", "topology": "sync"}
    fresh = raynforce.train("Pendulum-v1", "sac", out=tmp_path / "fresh", progress="quiet", **how)
    capsys.readouterr()
    how |= {"start_from": clone.path, "progress": "plain"}
    run = raynforce.train("Pendulum-v1", "sac", out=tmp_path / "sac", **how)
    assert "policy taken; q1, q2, log_alpha new; value left out" in " ".join(capsys.readouterr().out.split())
    (its, own), (_, new), (_, old) = (read_policy(find_policy(each.path, "last")) for each in (run, fresh, clone))
    parts, before = its.network.parts, read_policy(find_policy(clone.path))[0].network.parts
    for name, place in parts.items():
        wanted = old.params[before[name]] if name.startswith("policy.") else new.params[place]
        np.testing.assert_array_equal(own.params[place], wanted)


def test_an_actor_that_does_not_fit_is_refused(data: dict[str, Path], tmp_path: Path) -> None:
    clone = train(tmp_path / "clone", data["squashed"], "squashed", settings={"algorithm.gaussian": "free"})
    with pytest.raises(RaynforceError, match=r"does not fit this config:\n(.*\n)*the checkpoint is of bc"):
        raynforce.train("Pendulum-v1", "sac", start_from=clone.path, out=tmp_path / "sac", progress="quiet")
    squashed, own = train(tmp_path / "squashed", data["squashed"], "squashed"), {"network.hidden": [32]}
    with pytest.raises(RaynforceError, match=r"the checkpoint's own settings: --set network.hidden=\[16\]"):
        raynforce.train("Pendulum-v1", "sac", start_from=squashed.path, out=tmp_path / "sac", settings=own)
    assert not (tmp_path / "sac").exists()


@pytest.mark.parametrize(
    ("algo", "given", "line"),
    [
        ("bc", {}, "bc learns from recorded episodes, and data is not given: add --data PATH"),
        (
            "ppo",
            {"data": True},
            "is for algorithms that learn from recorded episodes, such as bc, and ppo samples its own",
        ),
        ("bc", {"data": "nowhere.parquet"}, "data '.*nowhere.parquet' is not there"),
        ("bc", {"data": True, "topology": "sync"}, "topology = 'sync' samples, and bc learns from recorded episodes"),
        ("ppo", {"topology": "dataset"}, "topology = 'dataset' reads recorded episodes, and ppo samples its own"),
        (
            "bc",
            {"data": True, "settings": {"sampling.samplers": 2}},
            "sampling.samplers = 2: one reader reads all data",
        ),
    ],
)
def test_what_does_not_go_together_has_its_line(
    algo: str, given: dict[str, Any], line: str, data: dict[str, Path], tmp_path: Path
) -> None:
    given = {**given, **({"data": data["discrete"]} if given.get("data") is True else {})}
    with pytest.raises(UsageError, match=line) as caught:
        raynforce.train("CartPole-v1", algo, out=tmp_path / "run", progress="quiet", **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("runtime", ["inline", "process"])
def test_data_of_another_environment_has_its_line(runtime: str, data: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RaynforceError, match=r"obs has shape .* and does not fit env 'Pendulum-v1'") as caught:
        raynforce.train(
            "Pendulum-v1", "bc", data=data["discrete"], out=tmp_path / "run", progress="quiet", runtime=runtime
        )
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


# -- from a solved run to a clone, and on ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clone_of_a_solved_run_is_solved_and_ppo_goes_on_without_falling_back(tmp_path: Path) -> None:
    expert = solve("CartPole-v1", "ppo", tmp_path / "expert", steps=100_000, target=475, seed=1)
    data = tmp_path / "expert.parquet"
    made = raynforce.record(expert.path, episodes=50, out=data, seed=0)
    assert made.episodes == 50
    assert made.returns.mean() >= 475
    clone = solve("CartPole-v1", "bc", tmp_path / "clone", steps=200_000, target=475, data=data)
    assert clone.result.eval_return is not None
    assert clone.result.eval_return >= 475
    longer = raynforce.train("CartPole-v1", "bc", steps=100_000, data=data, out=tmp_path / "longer", progress="quiet")
    settings = {"algorithm.learning_rate": 3e-4, "eval.every": 4096}
    given: Any = {"start_from": longer.path, "settings": settings, "progress": "quiet", "runtime": "inline"}
    run = raynforce.train("CartPole-v1", steps=50_000, out=tmp_path / "on", **given)
    scores = [line["eval/return"] for line in metrics(run.path) if "eval/return" in line]
    assert len(scores) >= 10
    assert min(scores) >= 475


@pytest.mark.slow
def test_a_clone_of_sac_swings_the_pendulum_up(tmp_path: Path) -> None:
    expert = solve("Pendulum-v1", "sac", tmp_path / "expert", steps=10_000, target=-180, seed=0)
    data = tmp_path / "expert.parquet"
    raynforce.record(expert.path, episodes=50, out=data, seed=0)
    settings = {"algorithm.gaussian": "squashed", "network.activation": "relu", "network.normalize_obs": False}
    clone = solve("Pendulum-v1", "bc", tmp_path / "clone", steps=400_000, target=-200, data=data, settings=settings)
    given: Any = {"start_from": clone.path, "steps": 64, "progress": "quiet", "runtime": "inline"}
    begun = raynforce.train("Pendulum-v1", "sac", out=tmp_path / "sac", **given)
    returns, _ = raynforce.evaluate(begun.path, which="last", seed=1)
    assert returns.mean() >= -250
    assert read(str(data), begun.policy().spec.env).count == 50
