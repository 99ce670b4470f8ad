"""One replay buffer in several shards: how a minibatch is drawn from all of them as if they were one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raynforce.errors import UsageError
from raynforce.experience.fragment import Arrays
from raynforce.experience.sumtree import importance_weights


def portions(masses: Sequence[float] | np.ndarray, batch: int, updates: int, rng: np.random.Generator) -> np.ndarray:
    """How many transitions each shard draws for each minibatch, `[updates, shards]`, at random by `Replay.mass`."""
    mass = np.asarray(masses, np.float64)
    (filled,) = (mass > 0.0).nonzero()  # rounding could give a shard of none what is left of the others
    if not len(filled):
        fix = "wait for more steps (algorithm.learning_starts)"
        raise UsageError(f"replay: none of the {len(mass)} shards has a transition to sample yet; {fix}")
    counts = np.zeros((updates, len(mass)), np.int64)
    counts[:, filled] = rng.multinomial(batch, mass[filled] / mass.sum(), size=updates)
    return counts


def minibatches(draws: Sequence[Arrays | None], counts: np.ndarray, beta: float) -> Iterator[Arrays]:
    """Join the draws of all shards (None: lost) to minibatches as of `Replay.sample`, with a column `shard` `[n]`."""
    stops = counts.cumsum(axis=0)
    for start, stop in zip(stops - counts, stops, strict=True):
        pieces = {
            shard: {path: column[start[shard] : stop[shard]] for path, column in draw.items()}
            for shard, draw in enumerate(draws)
            if draw is not None and start[shard] < stop[shard]
        }
        if pieces:
            first, *others = pieces.values()
            joined = {path: np.concatenate([column, *(o[path] for o in others)]) for path, column in first.items()}
            joined["shard"] = np.repeat([*pieces], [len(piece["index"]) for piece in pieces.values()])
            yield joined | {"weight": importance_weights(joined.pop("priority"), beta)}


def split_errors(
    shard: np.ndarray, index: np.ndarray, error: np.ndarray, shards: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each shard the names of its own transitions and their errors, for `Replay.update_priorities`."""
    order = shard.argsort(kind="stable")  # of a name given twice the last error counts
    borders = shard[order].searchsorted(np.arange(1, shards))
    return list(zip(np.split(index[order], borders), np.split(error[order], borders), strict=True))


def joint_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What shards tell of themselves (`Replay.metrics`), as if they were one buffer."""
    names = {name for each in metrics for name in each}
    found = {name: [each[name] for each in metrics if name in each] for name in sorted(names)}
    joint = {name: sum(values) for name, values in found.items()}
    if "replay/age" in joint:
        joint["replay/age"] /= len(found["replay/age"])
    if joint.get("replay/capacity"):
        joint["replay/fill"] = joint["replay/size"] / joint["replay/capacity"]
    return joint
