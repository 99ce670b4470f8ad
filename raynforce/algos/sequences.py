"""What is learned from where a network has memory: rows stay rows, and minibatches are whole sequences of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.builder import SEQUENCE, STATE
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.lazy import LazyModule
from raynforce.spaces import MASK

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network
else:
    torch = LazyModule("torch")

LONGEST = 32  # steps of a sequence, unless the user says otherwise: minibatches of few long ones are slow, and vary


def has_memory(config: Config) -> bool:
    return config.network.memory != "none"


def sequence_length(config: Config) -> int:
    """Steps that gradients go back in time; refuses what does not fit."""
    given, fragment = getattr(config.algorithm, "sequence", None), config.sampling.fragment
    if given is None:
        return min(LONGEST, fragment)
    if given > fragment:
        longer = f"algorithm.sequence = {given} is longer than a fragment (sampling.fragment = {fragment})"
        raise UsageError(f"{longer}: lower it, or raise sampling.fragment")
    return int(given)


def sequenced(fragment: Fragment, columns: Mapping[str, np.ndarray]) -> Arrays:
    """Valid rows of `[T, B, ...]` columns, sequence by sequence and in the order of time, with the columns `sequence`
    `[N]`, which of them a row is of, `first` `[N]`, and `state0/NAME` `[S, ...]`, what each began with."""
    length, lanes = fragment.length, fragment.lanes
    piece = fragment[SEQUENCE].searchsorted(np.arange(length), side="right") - 1  # [T]
    number = (piece[:, None] * lanes + np.arange(lanes)).reshape(-1)
    order = number.argsort(kind="stable")
    order = order[fragment["valid"].reshape(-1)[order]]
    used, sequence = np.unique(number[order], return_inverse=True)
    found = {k: v.reshape(length * lanes, *v.shape[2:])[order] for k, v in columns.items()}
    found |= {"first": fragment["first"].reshape(-1)[order], SEQUENCE: sequence.astype(np.int64)}
    states = {k: v for k, v in fragment.columns.items() if k.startswith(STATE)}  # [P, B, ...] each
    return found | {k: v.reshape(-1, *v.shape[2:])[used] for k, v in states.items()}


def concatenated(parts: list[Arrays]) -> Arrays:
    """Join the rows of several fragments; their sequences are numbered on."""
    name = next(k for k in parts[0] if k.startswith(STATE))
    begin = np.cumsum([0, *(len(part[name]) for part in parts)])
    joined = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    numbered = [part[SEQUENCE] + at for part, at in zip(parts, begin, strict=False)]
    return joined | {SEQUENCE: np.concatenate(numbered)}


def shuffled_sequences(batch: Mapping[str, Tensor], size: int | None, rng: np.random.Generator) -> Iterator[Batch]:
    """One epoch of minibatches of whole sequences, close to `size` rows each; None: all of them in one, in order."""
    counts = np.bincount(batch[SEQUENCE].cpu().numpy())  # [S] rows of each
    if not len(counts):
        return
    starts, order = counts.cumsum() - counts, np.arange(len(counts))
    minibatches = 1
    if size is not None:
        order = rng.permutation(len(counts))
        minibatches = max(1, min(len(counts), round(int(counts.sum()) / size)))
    for start, stop in pairwise(np.linspace(0, len(counts), minibatches + 1).astype(int)):
        some = order[start:stop]
        yield _laid_out(batch, some, starts[some], counts[some])


Batch = dict[str, "Tensor"]


def _laid_out(batch: Mapping[str, Tensor], some: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> Batch:
    """A minibatch of these sequences: what a network is called with is `[L * S, ...]`, in the order of time, shorter
    ones padded; `rows` `[N]`, if there, are those that are none of the padding, as which all other columns come."""
    step = np.arange(counts.max())[:, None]  # [L, 1]
    there = step < counts  # [L, S]
    index, ragged = starts + np.minimum(step, counts - 1), not there.all()
    device = next(iter(batch.values())).device

    def on_device(places: np.ndarray) -> Tensor:
        return torch.from_numpy(places.reshape(-1)).to(device)

    every = on_device(index)
    rows, which = on_device(index[there]) if ragged else every, on_device(some)
    found: Batch = {}
    for name, column in batch.items():
        if name.startswith(STATE):
            found[name] = column.index_select(0, which)
        elif name == "first":
            found[name] = column.index_select(0, every).view(there.shape)
        elif name != SEQUENCE:
            seen = (name in ("obs", "global_state") or name.startswith("obs/")) and name != MASK
            found[name] = column.index_select(0, every if seen else rows)
    if ragged:
        found["rows"] = on_device(np.flatnonzero(there))
    return found


def unrolled(net: Network, fragment: Fragment, only: tuple[str, ...]) -> tuple[Arrays, np.ndarray]:
    """A network's outputs `[(T+1) * B, ...]` on a fragment, and the values `[K]` of true last observations."""
    obs = {k: v.reshape(-1, *v.shape[2:]) for k, v in fragment.obs().items()}
    known = {k: v.reshape(-1, *v.shape[2:]) for k, v in fragment.state_columns().items()}
    states = {name: STATE + name for name in net.spec.states}
    # The last row begins no episode: either this one goes on, or it shows the last observation of one that has ended.
    first = np.concatenate([fragment["first"], np.zeros((1, fragment.lanes), np.bool_)])
    begun = {path: fragment[path][0] for path in states.values()}
    out = net.predict({**obs, **begun, "first": first}, only, **known)
    ends = np.divmod(fragment["final/index"], fragment.lanes)
    if not len(ends[0]):
        return out, np.zeros(0, np.float32)
    before = {path: net.after[name].cpu().numpy()[ends] for name, path in states.items()}  # [K, size]
    last = {k: fragment[f"final/{k}"] for k in known}
    return out, net.predict({**fragment.final_obs(), **before}, ("value",), **last)["value"][:, 0]
