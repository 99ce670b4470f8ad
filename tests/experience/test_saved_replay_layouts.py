"""A saved replay buffer that comes back with rows lost, laid out anew, or so wrong that it is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from replay_sources import ACTION, DISCRETE, GAMMA, OBS, Reference, Source, fill
from saved_replays import assert_same, feed, make, recut, written

from raynforce.errors import CheckpointError
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.trees import Tree

pytestmark = pytest.mark.usefixtures("small_segments")


# Streams that are cut


class Allowed:
    """All transitions that a buffer may give when streams were cut: windows of every length, up to an end."""

    def __init__(self, n_step: int):
        self.history = Reference(10**9, n_step)
        self.n_step = n_step

    def insert(self, fragment: Fragment, steps: Any) -> None:
        self.history.insert(fragment, steps)

    def windows(self) -> dict[tuple[int, int], tuple[float, float, float]]:
        """(observation, next observation) -> action, reward, discount."""
        found = {}
        for lane in self.history.lanes.values():
            for i, start in enumerate(lane):
                if start is None or not start.valid:
                    continue
                total = 0.0
                for k, step in enumerate(lane[i : i + self.n_step]):
                    if step is None:
                        break
                    total += GAMMA**k * step.reward
                    discount = 0.0 if step.terminated else GAMMA ** (k + 1)
                    found[int(start.obs), int(step.next_obs)] = (start.action, total, discount)
                    if step.end:
                        break
        return found

    def check(self, replay: Replay, rng: np.random.Generator) -> dict[str, np.ndarray]:
        windows = self.windows()
        tree, replay._tree = replay._tree, None
        batch = replay.sample(25 * len(replay), rng)  # uniformly: a transition is missed with probability e^-25
        replay._tree = tree
        pairs = zip(batch["obs/id"].tolist(), batch["next_obs/id"].tolist(), strict=True)
        want = np.array([windows[pair] for pair in pairs])  # a KeyError here: it never happened
        np.testing.assert_array_equal(batch["action"][:, 0], want[:, 0].astype(np.float32))
        np.testing.assert_allclose(batch["reward"], want[:, 1], atol=1e-5)
        np.testing.assert_allclose(batch["discount"], want[:, 2], atol=1e-6)
        np.testing.assert_array_equal(batch["next_obs/pair"][:, 1], -batch["next_obs/id"].astype(np.float32))
        assert len(np.unique(batch["obs/id"])) == len(replay)
        return batch


def random_run(
    rng: np.random.Generator, n_step: int, inserts: int, prioritized: bool = False
) -> tuple[Replay, Allowed, list[Source]]:
    samplers, lanes, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(10, 40))
    replay, allowed = make(rows, samplers, lanes, n_step=n_step, prioritized=prioritized), Allowed(n_step)
    sources = [Source(lanes, int(rng.integers(99)), sampler) for sampler in range(samplers)]
    feed_all(replay, allowed, sources, rng, inserts)
    return replay, allowed, sources


def feed_all(replay: Replay, allowed: Allowed, sources: list[Source], rng: np.random.Generator, times: int) -> None:
    for _ in range(times):
        source = sources[rng.integers(len(sources))]
        if rng.random() < 0.2:
            source.sample(2)  # never arrives
        fragment, steps = source.sample(int(rng.integers(1, 8)))
        replay.insert(fragment)
        allowed.insert(fragment, steps)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_missing_are_never_seen(seed: int, n_step: int) -> None:
    rng = np.random.default_rng(seed)
    replay, allowed, sources = random_run(rng, n_step, inserts=int(rng.choice([8, 60])))
    tree = written(replay)
    cuts = [0, *sorted(rng.choice(np.arange(1, min(10, max(tree["head"]))), 4, replace=False).tolist())]
    tree = recut(tree, cuts)
    rows, width, filled = (
        replay._ring.rows,
        replay._ring.width,
        sum(len(p["reward"]) for p in tree["segments"].values()),
    )
    there = np.zeros(rows, bool)
    for first, name in zip(cuts, list(tree["segments"]), strict=True):
        piece = tree["segments"][name]
        if rng.random() < 0.4:
            del tree["segments"][name]
        else:
            there[first : first + len(piece["reward"])] = True
    ring = replay._ring
    whole = np.roll(there, -1)[:, None] | (ring["final_slot"] >= 0)
    expected = ring["obs/id"][ring["valid"] & there[:, None] & whole]

    other = make(rows, replay.samplers, replay.lanes, n_step=n_step)
    other.load(tree)
    assert other.missing == (filled - np.count_nonzero(there)) * width
    assert other.resident == len(expected)
    if len(other):
        batch = allowed.check(other, rng)
        assert set(batch["obs/id"].tolist()) <= set(expected.tolist())
    moved = make(30, 2, 3, n_step=n_step)
    moved.load(tree)
    if len(moved):
        assert moved.resident == min(len(expected), 29 * 6)
        allowed.check(moved, rng)
    again = make(rows, replay.samplers, replay.lanes, n_step=n_step)
    again.load(written(other))  # what was lost stays lost, and is not lost twice
    assert again.resident == other.resident
    if len(other):
        assert_same(other, again)
    for _ in range(5):
        feed_all(other, allowed, sources, rng, 4)
        allowed.check(other, rng)


def test_what_a_loss_changes_gets_another_name() -> None:
    replay, other = make(rows=40, n_step=3), make(rows=40, n_step=3)
    fill(replay, 9)
    tree = written(replay)
    names = list(tree["segments"])
    del tree["segments"][names[5]]
    other.load(tree)
    segments = written(other)["segments"]
    assert len(segments) == len(names)
    assert [old for old, new in zip(names, segments, strict=True) if old != new] == names[4:6]
    for name in segments.keys() & set(names):
        np.testing.assert_equal(segments[name], tree["segments"][name])
    assert len(set(names) & {f"{first}-{other.state()['stamp']}" for first in range(40)}) == 0


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_another_layout_keeps_the_newest_that_fit_and_never_crosses_a_cut(
    seed: int, n_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raynforce.experience.restoring.PIECE", int(np.random.default_rng(seed).choice([2, 5, 128])))
    rng = np.random.default_rng(100 + seed)
    replay, allowed, _ = random_run(rng, n_step, int(rng.choice([3, 10, 60])), prioritized=True)
    everything = np.unique(replay.sample(30 * len(replay), rng)["index"])
    replay.update_priorities(everything, rng.random(len(everything)) * 5)
    samplers, lanes, rows = int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(10, 60))
    other = make(rows, samplers, lanes, n_step=n_step, prioritized=True)
    other.load(written(replay))
    same = other._ring.layout == replay._ring.layout
    room = (rows - 1) * samplers * lanes
    assert other.resident == min(replay.resident, room)
    if not same:
        assert len(other) == other.resident  # every lane ends with an end: no window is open
    batch = allowed.check(other, rng)

    # The newest are kept, by the age of a row within its sampler.
    row, lane = np.divmod(np.flatnonzero(replay._ring.valid), replay._ring.width)
    age = (np.array(replay._ring.head)[lane // replay.lanes] - 1 - row) % replay._ring.rows
    oldest = np.sort(age)[: other.resident].max()
    ids = replay._ring["obs/id"].reshape(-1)[np.flatnonzero(replay._ring.valid)]
    kept = set(other._ring.flat["obs/id"][other._ring.valid].tolist())
    assert set(ids[age < oldest].tolist()) <= kept <= set(ids[age <= oldest].tolist())

    # Priorities came along.
    assert replay._tree is not None
    assert other._tree is not None
    priorities = dict(zip(replay._ring.flat["obs/id"].tolist(), replay._tree.leaves.tolist(), strict=True))
    for name, index in zip(batch["obs/id"].tolist(), batch["index"].tolist(), strict=True):
        assert other._tree.leaves[index % other.capacity] == (priorities[name] or replay._max_priority)

    sources = [Source(lanes, 0, 50 + sampler) for sampler in range(samplers)]
    for sampler, source in enumerate(sources):
        source.sampler = sampler
    allowed.history.sequence.clear()  # the new lanes are others than the old ones
    allowed.history.lanes = {(sampler + 1000, b): lane for (sampler, b), lane in allowed.history.lanes.items()}
    for _ in range(6):
        feed_all(other, allowed, sources, rng, 5)
        allowed.check(other, rng)
    third = make(rows, samplers, lanes, n_step=n_step, prioritized=True)
    third.load(written(other))
    assert_same(other, third)


def test_a_new_layout_cuts_little_and_lets_the_oldest_go_first() -> None:
    replay = make(rows=2001, samplers=1, n_step=3)
    fill(replay, 500, p_end=0.0)  # names rise with time in each lane
    other = make(rows=1500, samplers=3, lanes=1, n_step=3)
    other.load(written(replay))
    assert other.resident == replay.resident == 2000 * 2
    batch = other.sample(20_000, np.random.default_rng(0))
    assert np.mean(batch["discount"] > GAMMA**2.5) < 0.02  # windows shorter than three steps
    row = {int(name): slot // 2 for slot, name in enumerate(replay._ring.flat["obs/id"])}
    oldest = replay._ring.head[0] + 1
    time = [(row[name] - oldest) % 2001 for name in other._ring.flat["obs/id"][other._ring.valid].tolist()]
    dealt = np.flatnonzero(other._ring.valid) // 3 * 3 / 2
    assert np.abs(np.array(time) - dealt).max() <= 2 * 128 + 2  # as if dealt out row by row, but for a block


def test_streams_go_on_after_a_new_layout_without_a_hole() -> None:
    replay = make(rows=20, samplers=1, n_step=2)
    (source,) = fill(replay, 2)
    other = make(rows=40, samplers=1, n_step=2)
    other.load(written(replay))
    before = other._ring.head[0]
    fragment, _ = source.sample(3)
    assert other.insert(fragment) == fragment.steps
    assert other._ring.head[0] == before + 3


def test_an_empty_buffer_fits_every_layout() -> None:
    other = make(rows=30, lanes=3)
    other.load(written(make()))
    assert (len(other), other.missing, other.state()["segments"]) == (0, 0, {})
    fill(other, 2)
    assert len(other) > 0


# Refused


def put(path: str, value: Any) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        *parents, leaf = path.split(".")
        for parent in parents:
            tree = tree[parent] if parent != "*" else next(iter(tree.values()))
        if value is KeyError:
            del tree[leaf]
        else:
            tree[leaf] = value(tree.get(leaf)) if callable(value) else value

    return change


def rename(new: str) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        segments = tree["segments"]
        segments[new] = segments.pop(next(iter(segments)))

    return change


def doubled(tree: Tree) -> None:
    tree["segments"]["0-0"] = next(iter(tree["segments"].values()))


@pytest.mark.parametrize(
    "change",
    [
        *(put(key, KeyError) for key in ("layout", "head", "sequence", "stamp", "max_priority", "segments")),
        *(put(key, None) for key in ("layout", "head", "sequence", "stamp", "max_priority", "segments", "priority")),
        *(put(key, "a\nb") for key in ("layout", "head", "stamp", "max_priority", "segments", "segments.*")),
        *(put(f"layout.{key}", x) for key in ("rows", "lanes") for x in (0, -1, 1.5, True, 10**400, 2**52, "1", [1])),
        put("layout.lanes", 2**40),
        put("layout.samplers", 3),
        put("layout.samplers", 2**52),
        *(put("head", x) for x in ([-1, 3], [10**30, 3], [True, 3], [1.0, 3], [13], [], {}, [[], []])),
        put("head", [2, 3]),  # fewer rows than there are
        put("sequence", [-2, 0]),
        *(put("late", x) for x in (-1, 0.5, None, "1", 2**53)),
        *(put("drawn", x) for x in ([1], [1, -1], None, 3, [0.5, 1])),
        *(put("stamp", x) for x in (-1, 0, 2**53, 1.0)),  # 0: below those of the segments
        *(put("max_priority", x) for x in (0, -1.0, float("nan"), float("inf"), 1e300, 10**400, 1e-60, True)),
        put("priority", lambda a: a[1:]),
        put("priority", lambda a: a.astype(np.int64)),
        put("priority", lambda a: a * np.nan),
        put("priority", lambda a: a - 5),
        put("priority", lambda a: a.tolist()),
        *(rename(x) for x in ("", "x", "0", "-1-0", "0-1-2", "999-1", "1-1", "0-99", "9" * 30 + "-1", "٣-1", "../0-1")),
        doubled,
        put("segments.*", {}),
        put("segments.*.valid", KeyError),
        put("segments.*.valid", lambda a: a[:0]),
        put("segments.*.valid", lambda a: a[:1]),
        put("segments.*.valid", lambda a: a.astype(np.uint8)),
        put("segments.*.valid", np.zeros((), bool)),
        put("segments.*.reward", lambda a: a[:, :1]),
        put("segments.*.reward", lambda a: a.tolist()),
        put("segments.*.action", lambda a: a.astype(np.float64)),
        put("segments.*.obs", lambda a: a["id"]),
        put("segments.*.obs.id", KeyError),
        put("segments.*.final", KeyError),
        put("segments.*.final.obs.id", lambda a: a[:0]),
        *(put("segments.*.final_index", x) for x in (KeyError, None, 3, [1])),
        *(put("segments.*.final_index", lambda a, n=n: a + n) for n in (-1000, 10**9)),
        put("segments.*.final_index", lambda a: a[::-1].copy()),
        put("segments.*.final_index", lambda a: a * 0),
        put("segments.*.final_index", lambda a: a.astype(np.float64)),
        put("segments.*.final_index", lambda a: a[None]),
    ],
)
@pytest.mark.parametrize("rows", [20, 33])
def test_a_wrong_tree_is_refused_in_one_line(change: Callable[[Tree], None], rows: int) -> None:
    replay = make(prioritized=True)
    fill(replay, 2, p_end=0.5)
    tree = written(replay)
    change(tree)
    other = make(rows, prioritized=True)
    fill(other, 1)
    before = deepcopy(other.state())
    with pytest.raises(CheckpointError, match=r"^replay: ") as error:
        other.load(tree)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    np.testing.assert_equal(other.state(), before)  # nothing was changed


@pytest.mark.parametrize("tree", [None, {}, [], "x", 3])
def test_what_is_no_tree_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^replay: "):
        make().load(tree)


@pytest.mark.parametrize("rows", [20, 33])
@pytest.mark.parametrize("seed", range(4))
def test_flags_that_cannot_be_are_survived(seed: int, rows: int) -> None:
    replay, rng = make(prioritized=True, n_step=3), np.random.default_rng(seed)
    fill(replay, 2 + 5 * (seed % 2))
    tree = written(replay)
    for piece in tree["segments"].values():
        for path in ("valid", "end", "terminated"):
            piece[path] = rng.integers(0, 256, piece[path].shape, np.uint8).view(bool)
    other = make(rows, prioritized=True, n_step=3)
    other.load(tree)
    assert all(other._ring.flat[path].view(np.uint8).max() <= 1 for path in ("valid", "end", "terminated", "ready"))
    sources = [Source(2, 1, sampler) for sampler in range(2)]
    for _ in range(10):
        assert 0 < len(other) <= other.resident <= other.capacity - 4
        batch = other.sample(50, rng)
        other.update_priorities(batch["index"], rng.random(50))
        feed(other, sources, rng, 3)


def test_a_layout_that_says_more_than_there_is_costs_nothing() -> None:
    replay = make()
    fill(replay, 2)
    tree = written(replay)
    tree["layout"]["rows"] = 2**40
    tree["head"] = [2**50, 13]
    other = make()
    other.load(tree)
    assert 0 < other.resident <= replay.resident
    assert other.missing == (2**40 - 13) * 4


def test_another_environment_is_refused() -> None:
    replay = make(20, 1)
    fill(replay, 2)
    tree = written(replay)
    with pytest.raises(CheckpointError, match=r"/action' of \(6, 2\) int64, found \(6, 2, 2\) float32"):
        Replay(OBS, DISCRETE, capacity=40, lanes=2).load(tree)
    named = Replay((replace(OBS[0], path="obs/name"), OBS[1]), ACTION, capacity=60, lanes=2)
    with pytest.raises(CheckpointError, match=r"/obs/name'.*found nothing"):
        named.load(tree)
