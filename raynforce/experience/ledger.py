"""The ledger: where every environment step went that was sampled, fragment by fragment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raynforce.errors import RaynforceError
from raynforce.experience.counts import Key, Record
from raynforce.trees import Tree


class LedgerError(RaynforceError):
    """The books do not balance: experience was lost, or learned from twice, without being counted."""


class Ledger:
    """Environment steps of completed fragments: produced = trained + dropped + in flight, at every report."""

    def __init__(self) -> None:
        self.produced = 0
        self.trained = 0
        self.dropped = 0  # sampled, and given up because it had become too old, or nobody had asked for it
        self.skipped = 0  # of those, what nobody had asked for
        self.lost = 0  # at most, of fragments that were never completed and not redone
        self._flying: dict[Key, int] = {}

    @property
    def in_flight(self) -> int:
        return sum(self._flying.values())

    @property
    def flying(self) -> list[Key]:
        return list(self._flying)

    def produce(self, record: Record) -> None:
        if record.key in self._flying:
            raise LedgerError(f"the ledger has fragment {_name(record.key)} twice")
        self._flying[record.key] = record.steps
        self.produced += record.steps

    def train(self, records: Sequence[Record]) -> None:
        for record in records:
            self._land(record)
            self.trained += record.steps

    def drop(self, record: Record) -> None:
        self._land(record)
        self.dropped += record.steps

    def skip(self, steps: int) -> None:
        """A simulator that cannot wait took steps that nobody had asked for."""
        self.produced += steps
        self.dropped += steps
        self.skipped += steps

    def lose(self, steps: int, keys: Iterable[Key] = ()) -> None:
        """What a sampler was at is gone, and so are these complete fragments."""
        for key in keys:
            known = self._flying.pop(key, 0)
            self.produced -= known
            steps += known
        self.lost += steps

    def check(self, held: Iterable[Key]) -> None:
        """Raise unless everything balances; `held` are the fragments that the topology has."""
        there = sorted(held)
        if there != sorted(self._flying):
            extra = ", ".join(map(_name, sorted(set(there) ^ set(self._flying)))) or "some twice"
            raise LedgerError(f"the ledger and the run hold different fragments: {extra}")
        if self.produced != self.trained + self.dropped + self.in_flight:
            used = f"{self.trained} trained, {self.dropped} dropped, {self.in_flight} in flight"
            raise LedgerError(f"the ledger does not balance: {self.produced} steps produced, {used}")

    def _land(self, record: Record) -> None:
        key, steps = record.key, record.steps
        expected = self._flying.pop(key, None)
        if expected != steps:
            why = "which no sampler has produced" if expected is None else f"of which a sampler produced {expected}"
            raise LedgerError(f"{steps} steps of fragment {_name(key)} were used, {why}")

    def metrics(self) -> dict[str, float]:
        steps = ("produced", "dropped", *(("skipped",) if self.skipped else ()), "lost", "in_flight")
        return {f"health/{name}_steps": float(getattr(self, name)) for name in steps}

    def state(self) -> Tree:
        """What is in flight is saved with the fragments themselves."""
        return {name: getattr(self, name) for name in ("produced", "trained", "dropped", "skipped", "lost")}

    def load(self, tree: Tree, held: Iterable[Record]) -> None:
        """Undo `state`, with the records of the fragments that were saved beside it."""
        self.produced, self.trained = int(tree["produced"]), int(tree["trained"])
        self.dropped, self.lost = int(tree["dropped"]), int(tree["lost"])
        self.skipped = int(tree.get("skipped", 0))
        self._flying = {record.key: record.steps for record in held}


def _name(key: Key) -> str:
    return f"{key[1]} of sampler {key[0]}"
