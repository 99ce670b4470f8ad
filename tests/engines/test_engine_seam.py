"""A second engine is one file: the run directory, evaluation, checkpoints, resume and the result are the driver's."""

from __future__ import annotations

from pathlib import Path

import pytest

import raynforce
from raynforce.errors import UsageError

SETTINGS = {
    "engine": "toy_engine:RandomSearch",
    "network.hidden": [],
    "preset": "none",
    "eval.every": 300,
    "eval.episodes": 2,
    "eval.final_episodes": 2,
    "checkpoint.every": 200,
    "log_every": 100,
}


def search(out: Path, steps: int) -> raynforce.Run:
    return raynforce.train("CartPole-v1", "ppo", steps=steps, seed=3, settings=SETTINGS, out=out, progress="quiet")


def test_another_engine_trains_evaluates_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = search(tmp_path / "whole", 900)
    search(tmp_path / "parts", 400)
    parts = raynforce.resume(tmp_path / "parts", steps=900, progress="quiet")
    assert parts.result.weights_sha256 == whole.result.weights_sha256
    assert parts.result.steps == whole.result.steps >= 900
    assert whole.result.evaluations > 1
    assert (tmp_path / "whole" / "best").exists()
    assert '"losses/best"' in (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert raynforce.load(tmp_path / "whole").act([0.0, 0.0, 0.1, 0.0]) in (0, 1)
    assert raynforce.evaluate(tmp_path / "whole", episodes=2, seed=1).returns.shape == (2,)


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("natvie", "engine = 'natvie' is not one of: native, rllib, or your own module:Class (did you mean 'native'?)"),
        ("toy_engine:SEARCH", "module 'toy_engine' has no 'SEARCH'"),
        ("toy_engine:Record", "not a subclass of raynforce.engines.base.Engine"),
    ],
)
def test_an_engine_that_is_none_is_one_line_and_leaves_no_run(tmp_path: Path, engine: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        raynforce.train("CartPole-v1", settings={"engine": engine}, out=tmp_path / "run", progress="quiet")
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_weights_of_another_run_are_refused_by_an_engine_that_cannot_take_them(tmp_path: Path) -> None:
    search(tmp_path / "first", 200)
    with pytest.raises(raynforce.RaynforceError, match="cannot begin with the weights of another run"):
        raynforce.train(
            "CartPole-v1", settings=SETTINGS, start_from=tmp_path / "first", out=tmp_path / "second", progress="quiet"
        )
    assert not (tmp_path / "second").exists()
