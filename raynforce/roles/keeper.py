"""Looks after what an algorithm has of its own: has it made, placed, saved and loaded, and tells what would be lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raynforce.algos import algorithm_class
from raynforce.algos.base import Algorithm
from raynforce.algos.contract import blamed, is_own, make_algorithm, require_savable
from raynforce.config import Config
from raynforce.policies.torch_net import Network
from raynforce.roles.kept import Kept
from raynforce.roles.unsaved import Unsaved
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree


class Keeper:
    def __init__(self, config: Config, env: EnvSpec, device: torch.device, *, buffers: bool = True) -> None:
        """`buffers` if the algorithm's replay buffer is here, not with shards or workers."""
        self._name, self.device = config.algo, device
        # Modules are initialised by the run's seed alone, so that every worker of a shared agent begins with the same.
        seed = int(np.random.SeedSequence([config.seed, 8]).generate_state(1)[0])
        self._stream = TorchStream(seed, device)
        with self._stream.in_use():
            self.algo: Algorithm[Any] = make_algorithm(config, env, algorithm_class(config.algo))
        self.algo.has_buffer = buffers
        self._kept = Kept(self.algo)
        self._unsaved: Unsaved | None = None
        self._looked = False
        self._notes: list[str] = []

    def begin(self, net: Network) -> None:
        """Let the algorithm make what it needs beside the network."""
        with blamed(self._name, self.algo), self._stream.in_use():
            self.algo.begin(net)
        self._kept.begin(self.device)
        self._unsaved = Unsaved(self.algo, net) if is_own(self.algo) else None

    def look(self) -> None:
        """After an update: once, see whether anything has changed that is not saved."""
        if not self._looked:
            self._looked = True
            self._look(None)

    def _look(self, saved: Tree | None) -> None:
        if self._unsaved is not None and (new := self._unsaved.look(saved)):
            self._notes.append(self._unsaved.note(new))

    @property
    def unsaved(self) -> dict[str, str]:
        """What has changed and is not saved, as far as is known: names, and what they are."""
        return {} if self._unsaved is None else self._unsaved.found

    def new_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def state(self, known: Collection[str] = ()) -> Tree:
        """The algorithm's state without the content of `known` segments, what it keeps, names of what it does not."""
        self.algo.round.known = known
        with blamed(self._name, self.algo):
            tree: Tree = {"algo": self.algo.state()}
        if self._unsaved is not None:
            require_savable(self.algo, tree["algo"])
            if self.algo.updates:
                self._look(tree["algo"])
            tree |= {"unsaved": self._unsaved.found} if self._unsaved.found else {}
        return tree | ({"keeps": self._kept.state()} if self._kept.names else {})

    def load(self, tree: Tree) -> list[str]:
        """Undo `state`; returns a sentence on what begins at its initial value."""
        with torch.no_grad(), blamed(self._name, self.algo):
            self.algo.load(tree["algo"])
        saved: Tree = tree.get("keeps", {})
        notes = self._kept.load(saved)
        before: dict[str, str] = tree.get("unsaved", {})
        lost = list(dict.fromkeys([*before, *(name for name in self._kept.names if name not in saved)]))
        if self._unsaved is not None:
            self._unsaved.found |= {name: what for name, what in before.items() if self._unsaved.is_candidate(name)}
        if lost:
            were = "was not saved: it begins at its initial value"
            were = were if len(lost) == 1 else "were not saved: they begin at their initial values"
            notes.append(f"{', '.join(lost)} of {type(self.algo).__name__} {were}")
        return notes


class TorchStream:
    """What dropout and the like draw from: the role's own, apart from torch's global ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(seed)
            self._states = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._states = self._read()

    def state(self) -> Tree:
        return {str(i): s.cpu().numpy().copy() for i, s in enumerate(self._states)}

    def load(self, tree: Tree) -> None:
        self._states = [torch.from_numpy(tree[str(i)].copy()) for i in range(len(self._states))]
