"""Learning is the product: the presets solve their environments, one quick run each here, the rest under `slow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from marks import slow, slowly
from running import solve

import raynforce


@pytest.mark.parametrize(
    ("algo", "env", "target", "within", "seed"),
    [
        ("ppo", "CartPole-v1", 475, 200_000, 0),
        pytest.param("ppo", "CartPole-v1", 475, 200_000, 1, marks=slow),
        pytest.param("ppo", "CartPole-v1", 475, 200_000, 2, marks=slow),
        ("dqn", "CartPole-v1", 475, 200_000, 0),
        pytest.param("dqn", "CartPole-v1", 475, 200_000, 1, marks=slow),
        pytest.param("dqn", "CartPole-v1", 475, 200_000, 2, marks=slow),
        ("ppo", "Pendulum-v1", -300, 400_000, 0),
        pytest.param("ppo", "Pendulum-v1", -300, 400_000, 1, marks=slow),
        pytest.param("ppo", "Pendulum-v1", -300, 400_000, 2, marks=slow),
        pytest.param("ppo", "Acrobot-v1", -100, 300_000, 0, marks=slow),
        pytest.param("ppo", "Acrobot-v1", -100, 300_000, 1, marks=slow),
        pytest.param("ppo", "Acrobot-v1", -100, 300_000, 2, marks=slow),
        pytest.param("dqn", "Acrobot-v1", -100, 300_000, 0, marks=slow),
        ("examples.own_algorithm:Reinforce", "CartPole-v1", 475, 200_000, 0),
    ],
)
def test_preset_solves(algo: str, env: str, target: float, within: int, seed: int, tmp_path: Path) -> None:
    run = solve(env, algo, tmp_path / "run", steps=within, target=target, seed=seed)
    assert run.config.eval.episodes == 20
    # The policy that is kept is the one that solved it, on a hundred other episodes too.
    assert run.result.eval_return is not None
    assert run.result.eval_return >= target - 0.2 * abs(target)


@pytest.mark.parametrize("seed", [2, *slowly(0, 1, 3, 4)])
def test_impala_does_not_collapse(seed: int, tmp_path: Path) -> None:
    """A return that has risen to hundreds stays there; one version behind, as two samplers of the README's command."""
    settings = {"sampling.samplers": 2, "eval.every": 0, "eval.episodes": 1, "eval.final_episodes": 0}
    where: dict[str, Any] = {"runtime": "inline", "topology": "overlap", "out": tmp_path / "run"}
    run = raynforce.train(
        "CartPole-v1", "impala", steps=100_000, seed=seed, settings=settings, progress="quiet", **where
    )
    assert run.result.return_mean is not None
    assert run.result.return_mean > 400


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("preset", ["auto", "none"])
def test_lunar_lander_is_solved_with_the_preset_and_with_the_defaults(preset: str, seed: int, tmp_path: Path) -> None:
    pytest.importorskip("Box2D", reason='needs pip install "raynforce[box2d]"')
    run = solve("LunarLander-v3", "ppo", tmp_path / "run", steps=1_000_000, target=200, seed=seed, preset=preset)
    assert run.result.solved_steps is not None
    assert run.result.solved_steps <= 500_000
