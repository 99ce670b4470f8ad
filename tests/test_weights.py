"""A new run from an old one's weights: what is taken over, what is fresh, and what does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raynforce
from raynforce import policy
from raynforce.config import Config
from raynforce.envs.vector import probe
from raynforce.errors import CheckpointError
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.normalizer import ObservationNormalizer
from raynforce.policies.spec import Input, NetworkSpec
from raynforce.roles.learner import Learner
from raynforce.runs import checkpoint

SETTINGS = {"sampling.envs": 2, "sampling.fragment": 32, "eval.episodes": 1, "eval.final_episodes": 0, "eval.every": 64}
NETWORK = {"network.hidden": [8], "network.activation": "tanh", "network.normalize_obs": True, "preset": "none"}


def train(out: Path, algo: str = "ppo", env: str = "CartPole-v1", **how: Any) -> raynforce.Run:
    given = SETTINGS | NETWORK | how.pop("settings", {})
    small = {"steps": 128, "runtime": "inline", "progress": "quiet"}
    return raynforce.train(env, algo, out=out, settings=given, **small | how)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("old") / "run").path


def first_version(run: Path) -> PolicyVersion:
    """What a run began with: the policy of its checkpoint at step 0."""
    return policy.read_policy(run / "checkpoints" / "step_000000000000")[1]


KEEP = {"checkpoint.keep": 10}


@pytest.mark.parametrize("which", ["", "best", "last", "checkpoints/step_000000000000"])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_weights_and_normaliser_are_taken_over_and_the_rest_is_fresh(
    old: Path, tmp_path: Path, which: str, algo: str
) -> None:
    given = policy.read_policy(old / (which or "best"))[1]
    run = train(tmp_path / "new", algo, start_from=old / which, seed=5, settings=KEEP)
    begun = first_version(run.path)
    np.testing.assert_array_equal(begun.params, given.params)
    assert given.shift is not None
    np.testing.assert_array_equal(begun.shift, given.shift)
    np.testing.assert_array_equal(begun.scale, given.scale)
    assert begun.number == 0
    state = checkpoint.load(run.path / "checkpoints" / "step_000000000000", only=["learner"])["learner"]
    assert (state["steps"], state["number"]) == (0, 0)
    assert not any(np.any(a) for a in state["adam"].values())
    step = checkpoint.manifest(old / (which or "best"))["step"]
    assert state["normalizer"]["count"] == max(step, 1)
    assert run.config.start_from == str(old / which)
    assert run.result.weights_sha256 != train(tmp_path / "plain", algo, seed=5).result.weights_sha256


def test_a_run_without_a_best_policy_gives_its_last(old: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "some", settings={"eval.every": 0} | KEEP)
    (run.path / "best").unlink()
    new = train(tmp_path / "new", start_from=run.path, settings=KEEP)
    np.testing.assert_array_equal(first_version(new.path).params, policy.read_policy(run.path / "last")[1].params)


def test_it_is_resumed_as_if_never_stopped_and_needs_the_old_one_no_more(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old, tmp_path / "old", symlinks=True)
    straight = train(tmp_path / "straight", start_from=tmp_path / "old", steps=300)
    run = train(tmp_path / "run", start_from=tmp_path / "old")
    shutil.rmtree(tmp_path / "old")
    resumed = raynforce.resume(run.path, steps=300, progress="quiet")
    assert resumed.result.steps > run.result.steps
    assert resumed.result.weights_sha256 == straight.result.weights_sha256
    with pytest.raises(raynforce.UsageError, match="start_from"):
        raynforce.resume(run.path, settings={"start_from": "elsewhere"}, progress="quiet")


@pytest.mark.slow
def test_on_processes_it_is_the_same(old: Path, tmp_path: Path) -> None:
    here, there = (train(tmp_path / r, start_from=old, runtime=r) for r in ("inline", "process"))
    assert here.result.weights_sha256 == there.result.weights_sha256


def test_what_does_not_fit_is_a_table_and_nothing_is_made(old: Path, tmp_path: Path) -> None:
    wider = {"network.hidden": [16], "network.activation": "relu"}
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "new", start_from=old, settings=wider)
    head, *rows, hint = str(caught.value).splitlines()
    assert head == f"the checkpoint in {old} does not fit this config:"
    assert [row.split() for row in rows[1:4]] == [
        ["network.hidden[0]", "8", "16"],
        ["network.activation", "tanh", "relu"],
        ["policy.0.weight", "[4,", "8]", "[4,", "16]"],
    ]
    assert hint == "the checkpoint's own settings: --set network.hidden=[8] --set network.activation=tanh"
    of_another = r"heads\.q +– +2\n(.*\n)*the checkpoint is of ppo, whose policy acts in another way than that of dqn"
    with pytest.raises(CheckpointError, match=of_another):
        train(tmp_path / "new", "dqn", start_from=old)
    with pytest.raises(CheckpointError, match=r"obs\.shape\[0\] +4 +6"):
        train(tmp_path / "new", env="Acrobot-v1", start_from=old)
    with pytest.raises(CheckpointError, match="no run or checkpoint at"):
        train(tmp_path / "new", start_from=tmp_path / "nothing")
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_another_environment_of_the_same_shapes(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "new", env="CartPole-v0", start_from=old, progress="plain")
    said = capsys.readouterr().out
    assert f"begins with the weights of {old}/best at step" in said
    assert "trained on CartPole-v1" in said


def config(algo: str, **network: Any) -> Config:
    given = {"env": "CartPole-v1", "algo": algo, "preset": "none", "network": {"hidden": [8], **network}}
    return resolve(given, {"sampling": {"envs": 2}})[0]


def test_a_target_network_starts_equal() -> None:
    env = probe("CartPole-v1", {})
    learner = Learner(config("dqn"), env)
    params = np.arange(len(learner.publish().params), dtype=np.float32)
    learner.begin_from(PolicyVersion(7, params), 100)
    state = learner.state()
    np.testing.assert_array_equal(state["params"], params)
    np.testing.assert_array_equal(state["algo"]["target"], params)
    assert learner.publish().number == 0


def test_parameters_of_another_number_are_refused() -> None:
    learner = Learner(config("ppo"), probe("CartPole-v1", {}))
    with pytest.raises(CheckpointError, match="has 3 parameters, and this network has"):
        learner.begin_from(PolicyVersion(7, np.zeros(3, np.float32)), 100)


def test_a_normaliser_goes_on_as_if_it_had_seen_the_samples() -> None:
    spec = NetworkSpec((Input("obs", "vector", (3,)), Input("kind", "onehot", (), (4,), (0,))), (), normalize=True)
    rng = np.random.default_rng(0)

    def batch(n: int) -> dict[str, np.ndarray]:
        obs = rng.normal([5.0, -2.0, 0.0], [3.0, 0.1, 0.0], (n, 3)).astype(np.float32)
        return {"obs": obs, "kind": rng.integers(0, 4, n)}

    first, second = ObservationNormalizer(spec), ObservationNormalizer(spec)
    first.update(batch(500))
    second.begin_from(*first.affine(), 500)
    for mine, theirs in zip(first.affine(), second.affine(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    more = batch(300)
    first.update(more)
    second.update(more)
    np.testing.assert_allclose(second.stats.mean[:2], first.stats.mean[:2], rtol=1e-6)
    np.testing.assert_allclose(second.stats.variance[:2], first.stats.variance[:2], rtol=1e-5)
