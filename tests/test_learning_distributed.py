"""DQN learns with its parts apart: CartPole is solved on every runtime with any number of samplers, at its ratio."""

from __future__ import annotations

from pathlib import Path

import pytest
import rays
from marks import slow
from running import metrics, solve

CELLS = [("process", samplers, seed) for samplers in (1, 2, 4) for seed in (0, 1, 2)]
CELLS += [("inline", 2, 0), ("ray", 2, 0)]


@slow
@pytest.mark.parametrize(
    ("topology", "runtime", "samplers", "seed"),
    [(topology, *cell) for topology in ("replay", "shared-agent") for cell in CELLS],
)
def test_cartpole_is_solved(
    topology: str, runtime: str, samplers: int, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rays.needs(runtime, request)
    settings = {"sampling.samplers": samplers}
    common = {"seed": seed, "runtime": runtime, "topology": topology, "settings": settings}
    run = solve("CartPole-v1", "dqn", tmp_path / "run", steps=200_000, target=475, **common)
    assert run.config.eval.episodes == 20
    hp = run.config.algorithm
    ratio = run.result.updates * hp.batch_size / (run.result.steps - hp.learning_starts)
    assert ratio == pytest.approx(hp.samples_per_insert, rel=0.1)
    assert run.result.lost_steps == 0
    if topology == "replay":
        last = [line for line in metrics(run.path) if "replay/samples_per_insert" in line][-1]
        assert last["replay/samples_per_insert"] == pytest.approx(hp.samples_per_insert, rel=0.1)
