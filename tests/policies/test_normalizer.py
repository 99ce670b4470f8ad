"""Running statistics: batch by batch, they are the mean and variance of everything seen."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raynforce.policies.normalizer import ObservationNormalizer, RunningStats
from raynforce.policies.numpy_net import flat_input
from raynforce.policies.spec import NetworkSpec, inputs_of
from raynforce.spaces import ObsLeaf
from raynforce.trees import join, split

LEAVES = (
    ObsLeaf("obs/a", "box", (2,), "float32"),
    ObsLeaf("obs/b", "discrete", (), "int64", sizes=(3,), start=(1,)),
    ObsLeaf("obs/c", "box", (), "float32"),
)
SPEC = NetworkSpec(inputs_of(LEAVES), (), normalize=True)


def batch(rng: np.random.Generator, count: int, mean: float = 5.0, deviation: float = 3.0) -> dict[str, np.ndarray]:
    return {
        "obs/a": (mean + deviation * rng.standard_normal((count, 2))).astype(np.float32),
        "obs/b": rng.integers(1, 4, size=count),
        "obs/c": (0.5 * rng.standard_normal(count)).astype(np.float32),
    }


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 2**32),
    mean=st.sampled_from([0.0, 1e4]),
)
def test_merged_batches_are_all_the_data(sizes: list[int], seed: int, mean: float) -> None:
    rng = np.random.default_rng(seed)
    parts = [(mean + rng.standard_normal((n, 3)) * [1, 10, 0.1]).astype(np.float32) for n in sizes]
    stats = RunningStats(3)
    for part in parts:
        stats.update(part)
    everything = np.concatenate(parts).astype(np.float64)
    assert stats.count == len(everything)
    np.testing.assert_allclose(stats.mean, everything.mean(0), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(stats.variance, everything.var(0), rtol=1e-9, atol=1e-9)


def test_known_answer() -> None:
    stats = RunningStats(1)
    stats.update(np.array([[1.0], [3.0]]))
    stats.update(np.array([[5.0]]))
    assert (stats.count, stats.mean.tolist()) == (3, [3.0])
    np.testing.assert_allclose(stats.variance, 8 / 3)


def test_before_the_first_update() -> None:
    assert RunningStats(2).variance.tolist() == [1, 1]
    stats = RunningStats(2)
    stats.update(np.zeros((0, 2)))
    assert (stats.count, stats.variance.tolist()) == (0, [1, 1])
    shift, scale = ObservationNormalizer(SPEC).affine()
    assert shift.tolist() == [0] * 6
    assert scale.tolist() == [1] * 6


def test_observations_come_out_standard_and_one_hots_as_they_were() -> None:
    rng = np.random.default_rng(0)
    normalizer = ObservationNormalizer(SPEC)
    batches = [batch(rng, n) for n in (50, 7, 200)]
    for one in batches:
        normalizer.update(one)
    shift, scale = normalizer.affine()
    assert shift.dtype == scale.dtype == np.float32
    x = (np.concatenate([flat_input(SPEC, b) for b in batches]) - shift) * scale  # [N, a0 a1 b0 b1 b2 c]
    np.testing.assert_allclose(x[:, [0, 1, 5]].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x[:, [0, 1, 5]].std(0), 1, atol=1e-5)
    assert shift[2:5].tolist() == [0, 0, 0]
    assert scale[2:5].tolist() == [1, 1, 1]


def test_images_are_left_as_they_are() -> None:
    spec = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (2, 2), "uint8")]), (), normalize=True)
    normalizer = ObservationNormalizer(spec)
    normalizer.update({"obs": np.random.default_rng(0).integers(256, size=(9, 2, 2)).astype(np.uint8)})
    shift, scale = normalizer.affine()
    assert shift.tolist() == [0] * 4
    assert scale.tolist() == [1] * 4


def test_constants_are_only_centred() -> None:
    spec = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (3,), "float32")]), (), normalize=True)
    normalizer = ObservationNormalizer(spec)
    wobble = np.where(np.arange(10) % 2, 1e-5, -1e-5)  # a deviation of 1e-5 counts as none
    obs = np.stack([np.full(10, 7.0), wobble, 1e3 * wobble], axis=1).astype(np.float32)
    normalizer.update({"obs": obs})
    shift, scale = normalizer.affine()
    np.testing.assert_allclose(shift, [7, 0, 0], atol=1e-7)
    np.testing.assert_allclose(scale, [1, 1, 100], rtol=1e-5)


def test_state_and_load_go_on_exactly() -> None:
    rng = np.random.default_rng(0)
    whole, saved = ObservationNormalizer(SPEC), ObservationNormalizer(SPEC)
    early, late = batch(rng, 30), batch(rng, 11, mean=-2.0)
    whole.update(early)
    saved.update(early)
    arrays, rest = split(saved.stats.state())
    saved.update(late)  # the state is a copy, not a view
    resumed = ObservationNormalizer(SPEC)
    resumed.stats.load(join(arrays, json.loads(json.dumps(rest))))
    resumed.update(late)
    whole.update(late)
    for one, other in zip(whole.affine(), resumed.affine(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(whole.stats.m2, resumed.stats.m2)
    assert whole.stats.count == resumed.stats.count == 41
