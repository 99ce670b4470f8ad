"""A simulator in C++ with action masks: trained in both ways, held against the protocol, refused where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import is_sound
from running import events

import raynforce
from raynforce.cli import main
from raynforce.envs.masks import random_actions, require_leaves
from raynforce.envs.vector import make_vector, probe
from raynforce.errors import UsageError
from raynforce.spaces import MASK, ActionSpec, ObsLeaf

CHOICE = ActionSpec("discrete", (), "int64", (4,), (0,))
PLACE = ObsLeaf("obs/place", "box", (1,), "float32")


@pytest.fixture(scope="session")
def masked(compiled: Callable[[str], str]) -> str:
    return compiled("examples/cpp/masked.cpp")


@pytest.mark.parametrize(
    ("algo", "more"),
    [("ppo", {}), ("ppo", {"sampling.inference": "client"}), ("dqn", {"sampling.inference": "client"})],
)
def test_it_is_trained_without_a_forbidden_action(algo: str, more: dict[str, Any], masked: str, tmp_path: Path) -> None:
    """It throws on one, which would be a fault; a terminal observation allows nothing."""
    given = {"sampling.envs": 4, "preset": "none", "eval.every": 0, "log_every": 512, **more}
    how: Any = {"runtime": "inline", "topology": "sync", "progress": "quiet", "seed": 1}
    run = raynforce.train(masked, algo, steps=2048, out=tmp_path / "run", settings=given, **how)
    is_sound(run)
    assert not events(run.path, "fault")
    assert raynforce.evaluate(run.path, episodes=8, seed=1).returns.mean() > 0.9


def test_its_masks_are_those_of_its_places(masked: str) -> None:
    assert probe(masked).masked
    vector, rng = make_vector(masked, {}, 3, seed=1), np.random.default_rng(0)
    seen = vector.reset()
    for _ in range(60):
        for place, mask in zip(np.rint(seen["obs/place"][:, 0] * 8), seen[MASK], strict=True):
            assert mask.tolist() == [m > 0 and place + m <= 8 and (place + m) % 3 != 1 for m in range(4)]
        step = vector.step(random_actions(vector.spec.action, 3, rng, seen[MASK]))
        assert step.valid.all()
        assert not step.final_obs[MASK].any(), "nothing is allowed where an episode has ended"
        seen = step.obs
    vector.close()


@pytest.mark.slow
def test_it_passes_the_check(masked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "check", masked]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (ObsLeaf(MASK, "multibinary", (3,), "uint8"), "of shape (3,): expected (4,)"),
        (ObsLeaf(MASK, "box", (4,), "uint8"), "expected 'multibinary' and uint8 or int8"),
        (ObsLeaf(MASK, "multibinary", (4,), "int64"), "expected 'multibinary' and uint8 or int8"),
    ],
)
def test_a_leaf_that_does_not_fit_is_refused(leaf: ObsLeaf, said: str) -> None:
    with pytest.raises(UsageError) as error:
        require_leaves("./sim", (PLACE, leaf), CHOICE)
    assert said in str(error.value)
