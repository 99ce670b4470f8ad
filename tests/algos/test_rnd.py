"""RND: the bonus falls where much has been seen, is part of checkpoints, and finds what luck does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raynforce
from raynforce.algos.ppo import PPOConfig
from raynforce.algos.rnd import Novelty
from raynforce.config import Config, NetworkConfig
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.spaces import ObsLeaf

LEAF = ObsLeaf("obs", "box", (3,), "float32")
CORRIDOR = "tests.algos.rnd_envs:Corridor"


def novelty(seed: int = 0) -> Novelty:
    network = NetworkConfig(hidden=(16,))
    return Novelty([LEAF], Config("test", seed=seed, network=network, algorithm=PPOConfig()), torch.device("cpu"))


def fragment(obs: np.ndarray, ends: Any = (), last: Any = None) -> Fragment:
    """Of one lane, without rewards."""
    steps = len(obs) - 1
    columns = {"obs": obs[:, None], "reward": np.zeros((steps, 1), np.float32), "valid": np.ones((steps, 1), bool)}
    columns |= {"final/index": np.array(ends, np.int64)}
    columns["final/obs"] = np.zeros((0, 3), np.float32) if last is None else np.asarray(last, np.float32)
    return Fragment(columns, 0, 0, 0)


def test_what_is_seen_again_and_again_has_less_of_a_bonus_than_what_is_new() -> None:
    rng, found = np.random.default_rng(0), novelty()
    often = fragment(rng.normal(size=(4097, 3)).astype(np.float32))
    first = found.rewarded([often], 1.0)[0]["reward"].mean()
    for _ in range(15):
        last = found.rewarded([often], 1.0)[0]["reward"].mean()
    assert 0 < last < first / 2
    new = fragment(rng.normal(loc=3, size=(65, 3)).astype(np.float32))
    assert found.rewarded([new], 1.0)[0]["reward"].mean() > 3 * last


def test_the_bonus_is_of_the_observation_that_a_step_led_to() -> None:
    found, obs = novelty(), np.zeros((5, 3), np.float32)
    found.rewarded([fragment(np.random.default_rng(0).normal(size=(65, 3)).astype(np.float32))], 1.0)
    far = np.full((1, 3), 5.0, np.float32)
    bonus = found.rewarded([fragment(obs, [1], far)], 1.0)[0]["reward"][:, 0]
    assert bonus.argmax() == 1
    assert bonus[0] == bonus[2] == bonus[3]


def test_its_state_is_all_that_later_bonuses_depend_on() -> None:
    rng, one, two = np.random.default_rng(0), novelty(0), novelty(1)
    batches = [fragment(rng.normal(size=(65, 3)).astype(np.float32)) for _ in range(3)]
    one.rewarded(batches[:1], 1.0)
    two.load(one.state())
    for batch in batches[1:]:
        assert (one.rewarded([batch], 0.5)[0]["reward"] == two.rewarded([batch], 0.5)[0]["reward"]).all()


def _trained(out: Path, steps: int, coef: float, seed: int = 0, **more: Any) -> Any:
    settings = {"algorithm.rnd_coef": coef, "eval.every": 1024, "eval.final_episodes": 1, "eval.episodes": 1}
    how = {"runtime": "inline", "topology": "sync", "progress": "quiet"}
    return raynforce.train(CORRIDOR, steps=steps, seed=seed, out=out, settings=settings | more, **how)


QUICK = {
    "sampling.fragment": 64,
    "algorithm.epochs": 4,
    "algorithm.minibatch_size": 128,
    "algorithm.learning_rate": 2e-3,
}


def test_a_corridor_is_learned_with_it_and_not_without(tmp_path: Path) -> None:
    explores = {**QUICK, "algorithm.entropy_coef": 0.01, "target": 1.0}
    assert _trained(tmp_path / "with", 16_384, 1.0, **explores).result.solved_steps is not None
    assert _trained(tmp_path / "without", 16_384, 0.0, **explores).result.solved_steps is None


def test_a_resumed_run_is_the_one_that_went_through(tmp_path: Path) -> None:
    small = {"sampling.fragment": 32}
    whole = _trained(tmp_path / "whole", 1024, 1.0, **small)
    _trained(tmp_path / "part", 512, 1.0, **small)
    run = raynforce.resume(tmp_path / "part", steps=1024, progress="quiet")
    params = [raynforce.load(each.path, "last").version.params for each in (whole, run)]
    assert (params[0] == params[1]).all()


def test_a_weight_below_zero_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"algorithm.rnd_coef = -1 must be a number at least 0"):
        _trained(tmp_path / "run", 512, -1)
