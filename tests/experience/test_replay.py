"""The replay buffer against a plain list of transitions, and its promises: uniform, refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from replay_sources import ACTION, DISCRETE, GAMMA, OBS, Reference, Source, check, fill

from raynforce import memory as memory_module
from raynforce.errors import UsageError
from raynforce.experience.replay import Replay
from raynforce.experience.storage import Layout, estimate_bytes
from raynforce.spaces import ObsLeaf


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_list_of_transitions(seed: int, n_step: int, prioritized: bool) -> None:
    rng = np.random.default_rng(seed)
    samplers, lanes, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(9, 24))
    capacity = rows * samplers * lanes + samplers * lanes - 1  # what does not fill a row is left
    replay = Replay(
        OBS,
        ACTION,
        capacity=capacity,
        lanes=lanes,
        samplers=samplers,
        n_step=n_step,
        gamma=GAMMA,
        prioritized=prioritized,
    )
    reference = Reference(rows - 1, n_step)
    sources = [Source(lanes, seed, sampler) for sampler in range(samplers)]
    check(replay, reference, rng)
    for _ in range(30):
        source = sources[rng.integers(samplers)]  # heads drift apart
        if rng.random() < 0.2:
            source.sample(3)  # lost on its way: a gap in the sequence
        fragment, steps = source.sample(int(rng.integers(1, 9)))
        assert replay.insert(fragment) == fragment.steps
        reference.insert(fragment, steps)
        check(replay, reference, rng)


def test_a_fragment_may_fill_all_rows_but_one() -> None:
    replay, reference = Replay(OBS, ACTION, capacity=20, lanes=2, gamma=GAMMA, n_step=3), Reference(9, 3)
    source = Source(2, seed=0)
    for gap in (False, False, True, False):
        if gap:
            source.sample(1)
        fragment, steps = source.sample(9)
        replay.insert(fragment)
        reference.insert(fragment, steps)
        check(replay, reference, np.random.default_rng(0))


def test_a_gap_ends_the_window_and_bootstraps_from_what_was_seen() -> None:
    replay = Replay(OBS, ACTION, capacity=30, lanes=1, n_step=3, gamma=GAMMA)
    source = Source(1, seed=0, p_end=0.0)
    first, _ = source.sample(4)
    replay.insert(first)
    assert len(replay) == 2  # the windows of the two newest steps are open
    source.sample(4)  # never arrives
    replay.insert(source.sample(1)[0])
    assert (len(replay), replay.resident) == (4, 5)
    batch = replay.sample(200, np.random.default_rng(0))
    (last,) = np.unique(batch["next_obs/id"][batch["obs/id"] == first["obs/id"][3, 0]])
    assert last == first["obs/id"][4, 0]
    np.testing.assert_allclose(np.unique(batch["discount"]), [GAMMA**3, GAMMA**2, GAMMA], rtol=1e-6)


def test_returns_are_summed_in_double_precision() -> None:
    replay = Replay(OBS, ACTION, capacity=2000, lanes=1, n_step=3, gamma=0.97)
    fragment, _ = Source(1, seed=0, p_end=0.0).sample(1000)
    replay.insert(fragment)
    batch = replay.sample(2000, np.random.default_rng(0))
    reward = fragment["reward"][:, 0].astype(np.float64)
    total = reward[:-2] + 0.97 * reward[1:-1] + 0.97**2 * reward[2:]
    np.testing.assert_array_equal(batch["reward"], total.astype(np.float32)[batch["index"]])


def test_what_lies_behind_an_episode_end_does_not_leak() -> None:
    replay = Replay(OBS, ACTION, capacity=30, lanes=1, n_step=3, gamma=GAMMA)
    fragment, _ = Source(1, seed=0, p_end=0.0).sample(6)
    reward, terminated = fragment["reward"].copy(), fragment["terminated"].copy()
    terminated[2], reward[3:] = True, np.inf
    replay.insert(replace(fragment, columns={**fragment.columns, "reward": reward, "terminated": terminated}))
    batch = replay.sample(200, np.random.default_rng(0))
    before_end = np.isin(batch["obs/id"], fragment["obs/id"][:3])
    assert np.isfinite(batch["reward"][before_end]).all()
    assert (batch["discount"][before_end] == 0).all()


@pytest.mark.parametrize("p_end", [0.1, 0.95])  # nearly every other row a reset: many redraws
def test_uniform(p_end: float) -> None:
    replay = Replay(OBS, ACTION, capacity=2 * 3 * 20, lanes=3, samplers=2, n_step=2)
    sources = fill(replay, 2, p_end=p_end)
    for _ in range(4):
        replay.insert(sources[0].sample(6)[0])  # one ring has come around, the other is half full
    draws = 400 * len(replay)
    counts = np.unique(replay.sample(draws, np.random.default_rng(0))["index"], return_counts=True)[1]
    assert len(counts) == len(replay)
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < len(replay) + 5 * np.sqrt(2 * len(replay))


def test_uniform_when_almost_nothing_is_ready() -> None:
    replay = Replay(OBS, ACTION, capacity=40 * 20, lanes=1, samplers=40)
    replay.insert(Source(1, seed=0, sampler=39, p_end=0.0).sample(4)[0])
    index, counts = np.unique(replay.sample(4000, np.random.default_rng(0))["index"], return_counts=True)
    assert index.tolist() == [39, 79, 119, 159]
    np.testing.assert_allclose(counts, 1000, atol=150)


def test_uniform_columns() -> None:
    replay = Replay(OBS, DISCRETE, capacity=100, lanes=1)
    fragment, _ = Source(1, seed=0).sample(5)
    replay.insert(replace(fragment, columns={**fragment.columns, "action": np.arange(5).reshape(5, 1)}))
    batch = replay.sample(7, np.random.default_rng(0))
    assert {path: (array.shape, array.dtype.name) for path, array in batch.items()} == {
        "obs/id": ((7,), "int64"),
        "obs/pair": ((7, 2), "float32"),
        "next_obs/id": ((7,), "int64"),
        "next_obs/pair": ((7, 2), "float32"),
        "action": ((7,), "int64"),
        "reward": ((7,), "float32"),
        "discount": ((7,), "float32"),
        "weight": ((7,), "float32"),
        "index": ((7,), "int64"),
    }
    assert (batch["weight"] == 1).all()
    replay.update_priorities(batch["index"], np.ones(7))  # a uniform buffer has none: no effect, no error
    assert len(replay) == np.count_nonzero(fragment["valid"])


def test_final_slots_are_used_again() -> None:
    replay = Replay(OBS, ACTION, capacity=400, lanes=4)
    source = Source(4, seed=0, p_end=0.5)
    sizes = []
    for _ in range(200):
        replay.insert(source.sample(20)[0])
        sizes.append(replay.nbytes)
    assert sizes[-1] == sizes[20]  # 40 000 episodes later the pool is as large as the ring needs it


@pytest.mark.parametrize("prioritized", [False, True])
def test_metrics(prioritized: bool) -> None:
    replay = Replay(OBS, ACTION, capacity=2 * 3 * 20, lanes=3, samplers=2, n_step=2, prioritized=prioritized)
    sources = [Source(3, 0, sampler, p_end=0.0) for sampler in range(2)]
    for _ in range(10):  # twice around
        replay.insert(sources[0].sample(4)[0])
    found = replay.metrics()
    assert found == {
        "replay/size": 54.0,
        "replay/capacity": 120.0,
        "replay/fill": 0.45,
        "replay/mb": replay.nbytes / 1e6,
        **({"replay/late": 0.0} if prioritized else {}),
    }
    replay.sample(54 * 400, np.random.default_rng(0))
    # Rows 1 to 18 before the newest, each three steps younger than the next: 28.5 on average.
    assert replay.metrics()["replay/age"] == pytest.approx(28.5, abs=0.5)
    assert "replay/age" not in replay.metrics()
    replay.insert(sources[1].sample(19)[0])  # another sampler's steps make nothing older
    batch = replay.sample(108 * 400, np.random.default_rng(0))
    assert replay.metrics()["replay/age"] == pytest.approx(28.5, abs=0.5)
    for path in ("replay/size", "replay/fill"):
        assert replay.metrics()[path] == pytest.approx(found[path] * 2)
    if prioritized:
        replay.update_priorities(batch["index"][:3] - replay.capacity, np.ones(3))
        assert replay.metrics()["replay/late"] == 3.0


def test_memory_is_estimated_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = (ObsLeaf("obs", "box", (4, 84, 84), "uint8"),)
    sizes = {"lanes": 8, "samplers": 2}
    needed = estimate_bytes(frames, DISCRETE, Layout.of(1_000_000, **sizes), prioritized=True)
    assert needed == pytest.approx(1_000_000 * (4 * 84 * 84 + 28), rel=0.001)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 20_000_000_000)
    with pytest.raises(UsageError, match=r"28\.\d\d GB.*16\.00 GB.*lower algorithm\.buffer_size"):
        Replay(frames, DISCRETE, capacity=1_000_000, **sizes, prioritized=True)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: None)  # not known: not refused
    small = Replay(frames, DISCRETE, capacity=1000, **sizes, prioritized=True)
    assert small.nbytes == estimate_bytes(frames, DISCRETE, Layout.of(1000, **sizes), prioritized=True)


def test_available_bytes_is_read() -> None:
    available = memory_module.available_bytes()
    assert available is None or 1e6 < available < 1e15


def test_refusals_say_what_to_change() -> None:
    with pytest.raises(UsageError, match=r"at least 40 or lower --envs"):
        Replay(OBS, ACTION, capacity=39, lanes=8, n_step=3)
    with pytest.raises(UsageError, match="n_step 0"):
        Replay(OBS, ACTION, capacity=39, lanes=8, n_step=0)
    replay = Replay(OBS, ACTION, capacity=20, lanes=2)
    with pytest.raises(UsageError, match=r"10 steps does not fit into 10 rows.*at least 22"):
        replay.insert(Source(2, seed=0).sample(10)[0])
    with pytest.raises(UsageError, match="sampler 1 with 2 lanes"):
        replay.insert(Source(2, seed=0, sampler=1).sample(3)[0])
    with pytest.raises(UsageError, match="sampler 0 with 3 lanes"):
        replay.insert(Source(3, seed=0).sample(3)[0])
    fragment, _ = Source(2, seed=0).sample(3)
    with pytest.raises(UsageError, match=r"'action' has shape \(3, 2\), expected \(3, 2, 2\)"):
        replay.insert(replace(fragment, columns={**fragment.columns, "action": np.zeros((3, 2))}))
    with pytest.raises(UsageError, match="none of the 0 transitions"):
        replay.sample(1, np.random.default_rng(0))
