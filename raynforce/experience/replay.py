"""The replay buffer: which transitions can be sampled, how likely each is, and what a sample of them looks like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from raynforce.errors import UsageError
from raynforce.experience.builder import STATE
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.experience.restoring import restore
from raynforce.experience.ring import Ring
from raynforce.experience.saved_replay import SavedReplay
from raynforce.experience.storage import Layout, estimate_bytes, has_images, require_images
from raynforce.experience.sumtree import SumTree, importance_weights
from raynforce.infos import NOTHING
from raynforce.memory import require_memory
from raynforce.spaces import ActionSpec, ObsLeaf
from raynforce.trees import Tree

EPSILON = 1e-6  # added to every absolute TD error, so that no transition is out of reach
REDRAWS = 8


class Replay:
    """Transitions of `samplers` x `lanes` lanes, at most about `capacity` of them, sampled with n-step returns.

    Time runs down the rows, a column is a lane; every sampler has its own write head. The row at a head holds the
    newest observation alone, so `capacity - samplers * lanes` transitions fit. A transition can be sampled once its
    n-step window is complete, or its episode ended: `len(replay)` counts those. Of a stack of frames a row holds the
    newest; samples have the whole stack. With `compress` images are kept compressed.

    With `sequence`, for networks with memory, what is sampled are sequences of so many steps, after `burn_in` others,
    from where fragments have recurrent states (of these sizes) on. `len(replay)` counts those then.
    """

    def __init__(
        self,
        obs: Sequence[ObsLeaf],
        action: ActionSpec,
        *,
        capacity: int,
        lanes: int,
        samplers: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritized: bool = False,
        alpha: float = 0.6,
        memory_fraction: float = 0.8,
        compress: bool = False,
        sequence: int = 0,
        burn_in: int = 0,
        states: Mapping[str, int] = NOTHING,
    ):
        self.lanes, self.samplers, self.n_step = lanes, samplers, n_step
        self.gamma, self.alpha = gamma, alpha
        self._sequence, self._burn_in = sequence, burn_in
        self._window = burn_in + sequence + n_step - 1 if sequence else n_step  # rows that a sample is made of
        layout = Layout.of(capacity, lanes, samplers)
        if n_step < 1:
            raise UsageError(f"replay: n_step {n_step} is not allowed; it is at least 1")
        if layout.rows < self._window + 2:
            gives = f"a capacity of {capacity} gives each of {layout.width} lanes {layout.rows} rows"
            fix = f"raise algorithm.buffer_size to at least {(self._window + 2) * layout.width} or lower --envs"
            what = f"{n_step}-step returns" + (f" of sequences of {burn_in} + {sequence} steps" if sequence else "")
            raise UsageError(f"replay: {gives}, {what} need {self._window + 2}; {fix}")
        if compress:
            require_images(obs)
        needed = estimate_bytes(obs, action, layout, prioritized=prioritized, compress=compress)
        hint = ", or set replay.compress=true" if has_images(obs) and not compress else ""
        require_memory(needed, memory_fraction, f"replay: a buffer of {capacity} transitions", hint)

        self.capacity = layout.capacity
        self._ring = Ring(obs, action, layout, memory_fraction, compress, states, burn_in)
        self._ready = self._ring.flat["ready"]
        self._tree = SumTree(self.capacity) if prioritized else None
        self._max_priority = 1.0
        # Priorities that the rows before a head have come with; 0: none. They are due when a window is complete.
        self._waiting = np.zeros((samplers, self._window - 1, lanes))

        self._num_ready = 0
        self._drawn = 0  # transitions, since `metrics` was asked
        self._drawn_age = 0  # their ages together
        self.late = 0  # priorities that came for transitions which were overwritten by then, and were left out
        self.missing = 0  # places of the ring that the checkpoint it was loaded from had lost
        self._gammas = gamma ** np.arange(n_step + 1)

    def __len__(self) -> int:
        return self._num_ready

    @property
    def resident(self) -> int:
        """Valid transitions stored, those included whose n-step window is not complete yet."""
        return self._ring.num_valid

    @property
    def nbytes(self) -> int:
        """Bytes reserved, which the operating system hands out as rows fill; of compressed images, bytes taken."""
        return self._ring.nbytes + (self._tree.nbytes if self._tree else 0)

    def metrics(self) -> dict[str, float]:
        """Its size, and the mean age of what was sampled since the last call, in steps of the same sampler."""
        size = len(self) * max(1, self._sequence)
        found = {"replay/size": float(size), "replay/capacity": float(self.capacity)}
        found |= {"replay/fill": size / self.capacity, "replay/mb": self.nbytes / 1e6}
        if self._drawn:
            found["replay/age"] = self._drawn_age / self._drawn
            self._drawn = self._drawn_age = 0
        if self._tree:
            found["replay/late"] = float(self.late)
        return found

    def insert(self, fragment: Fragment) -> int:
        """Copy a fragment in, with its TD errors `priority` if it has them; returns how many transitions it added."""
        ring, sampler = self._ring, fragment.sampler
        before, first, head, steps = ring.append(fragment)
        oldest = max(0, before - self._window + 1, head - ring.rows + 1)  # whose window may have been open
        slots = ring.slots(sampler, oldest, head + 1)
        begin = self._begin(fragment, first > before)[-len(slots) :] if self._tree else None
        self._settle(slots, first - oldest, begin)
        return steps

    def _begin(self, fragment: Fragment, gap: bool) -> np.ndarray:
        """Priorities of rows when they become sampleable, from the first that waits on to the head; 0: the largest."""
        new = np.zeros((gap + fragment.length + 1, self.lanes))
        if "priority" in fragment.columns:
            error = fragment["priority"]
            known = np.isfinite(error) & fragment["valid"]
            new[gap:-1][known] = self._raised(error[known])
            self._max_priority = max(self._max_priority, float(new.max()))
        rows = np.concatenate([self._waiting[fragment.sampler], new])
        self._waiting[fragment.sampler] = rows[len(rows) - self._window : -1]
        return rows

    def _raised(self, error: np.ndarray) -> np.ndarray:
        raised = (np.abs(np.asarray(error, np.float64)) + EPSILON) ** self.alpha
        with np.errstate(over="ignore"):  # infinity is refused by the tree
            return raised.astype(np.float32).astype(np.float64)  # as it is saved

    def _settle(self, slots: np.ndarray, written: int, begin: np.ndarray | None) -> None:
        """Make sampleable what has become so in a sampler's newest rows, of which those from `written` on are new."""
        before = self._ready.take(slots)
        ready = self._complete(slots)
        self._ready[slots] = ready
        self._num_ready += int(np.count_nonzero(ready)) - int(np.count_nonzero(before))
        if self._tree and begin is not None:
            priority = ready * np.where(begin > 0.0, begin, self._max_priority)  # [n, B]
            kept = before[:written]
            priority[:written][kept] = self._tree.leaves.take(slots[:written][kept])
            self._tree.set(slots.reshape(-1), priority.reshape(-1))

    def _complete(self, slots: np.ndarray) -> np.ndarray:
        """Which of a sampler's newest rows `[n, B]`, up to the head, have `n_step` steps or an end before the head; or
        begin a sequence all of whose rows are there."""
        if self._ring.states:
            begins: np.ndarray = self._ring.states.slot.take(slots) >= 0
            begins[max(0, len(slots) - self._window) :] = False
            return begins
        complete: np.ndarray = np.logical_or.accumulate(self._ring.end.take(slots)[::-1])[::-1]
        complete[: max(0, len(slots) - self.n_step)] = True
        complete &= self._ring.valid.take(slots)
        return complete

    @property
    def mass(self) -> float:
        """What its transitions count together in a draw: the sum of their priorities, or their number if uniform."""
        return self._tree.total if self._tree else float(self._num_ready)

    def sample(self, batch_size: int, rng: np.random.Generator, beta: float = 0.4, batches: int = 1) -> Arrays:
        """Draw transitions with replacement: uniformly, or in proportion to their priorities.

        Several `batches` come one after the other: of a uniform buffer the same as with a call for each.

        | column | shape, dtype | meaning |
        |---|---|---|
        | `obs`, or `obs/NAME` per leaf | `[n, ...]` | where the action was taken |
        | `action` | `[n, ...]` | |
        | `reward` | `[n]` float32 | discounted sum over the n-step window |
        | `next_obs`, or `next_obs/NAME` | `[n, ...]` | the true observation after the window |
        | `discount` | `[n]` float32 | what the value of `next_obs` counts: gamma ** steps, 0 if terminated |
        | `weight` | `[n]` float32 | importance weight, at most 1; all 1 when uniform |
        | `index` | `[n]` int64 | the transitions' names, for `update_priorities` |

        Of sequences see `_gather_sequences`.
        """
        batch = self.draw(np.full(batches, batch_size), rng)
        return batch | {"weight": importance_weights(batch.pop("priority"), beta)}

    def draw(self, counts: np.ndarray, rng: np.random.Generator) -> Arrays:
        """Draw `counts[k]` transitions for the k-th minibatch: as `sample`, but `priority` `[n]` for `weight`."""
        n = int(counts.sum())
        if n and not self._num_ready:
            none = f"replay: none of the {self._ring.num_valid} transitions stored can be sampled yet"
            raise UsageError(f"{none}; insert at least {self.n_step} steps first (algorithm.learning_starts)")
        if not n:
            slots = np.zeros(0, np.int64)
        elif self._tree:
            slots = self._draw_prioritized(self._tree, counts, rng)
        else:
            slots = np.concatenate([self._draw_uniform(count, rng) for count in counts.tolist() if count])
        priority = self._tree.leaves.take(slots) if self._tree else np.ones(len(slots))
        index, age = self._ring.names(slots)
        self._drawn += n
        self._drawn_age += int(age.sum()) * self.lanes
        gathered = self._gather_sequences(slots) if self._ring.states else self._gather(slots)
        return gathered | {"priority": priority, "index": index}

    def _gather(self, slots: np.ndarray) -> Arrays:
        ring = self._ring
        reward, last, steps = self._returns(slots)
        following = (last + ring.width) % self.capacity
        discount = self._gammas[steps] * ~ring.terminated.take(last)
        seen = {path: ring.observed_both(path, slots, following) for path in ring.obs_paths}
        batch = {path: here for path, (here, _) in seen.items()} | {"action": ring.flat["action"].take(slots, axis=0)}
        batch |= {"reward": reward, "discount": discount.astype(np.float32)}
        batch |= {f"next_{path}": there for path, (_, there) in seen.items()}
        if ring.finals.used:
            final_slot = ring.finals.slot.take(last)
            (ends,) = (final_slot >= 0).nonzero()
            if len(ends):
                for path, final in ring.finals.arrays.items():
                    batch[f"next_{path}"][ends] = final[final_slot[ends]]
        return batch

    def _gather_sequences(self, slots: np.ndarray) -> Arrays:
        """Sequences `[n, …]` from these positions on: R rows with `obs`, `next_obs`, the true observation after each,
        and `first`, where an episode begins; of the L steps after the burn-in `action`, `reward` and `discount` as of
        transitions, `last`, in which of the rows their windows end, and `valid`, where they count; and `state0/NAME`.

        Where a lane had fewer steps than others, the rest of its rows in a fragment is empty, and an episode may go on
        after them. What is remembered there is another sequence's beginning: this one is not valid from there on.
        """
        ring, sequence = self._ring, slice(self._burn_in, self._burn_in + self._sequence)
        assert ring.states is not None
        count, rows = len(slots), np.arange(self._window + 1)
        index = (slots[:, None] + rows * ring.width) % self.capacity  # [n, R+1]
        steps = index[:, :-1]
        final_slot = ring.finals.slot.take(steps)
        ends = np.nonzero(final_slot >= 0)
        batch: Arrays = {}
        for path in ring.obs_paths:
            seen = ring.observed(path, index.reshape(-1))
            seen = seen.reshape(count, len(rows), *seen.shape[1:])
            batch[path], batch[f"next_{path}"] = seen[:, :-1], seen[:, 1:].copy()
            batch[f"next_{path}"][ends] = ring.finals.arrays[path][final_slot[ends]]
        valid, learned = ring.valid.take(steps), steps[:, sequence]
        first = np.zeros(steps.shape, np.bool_)  # not in the first row, whose state is known
        first[:, 1:] = (ring.end.take(steps[:, :-1]) | ~valid[:, :-1]) & valid[:, 1:]
        valid &= ~np.logical_or.accumulate(self._goes_on(steps, first), axis=1)
        reward, last, taken = self._returns(learned.reshape(-1))
        discount = self._gammas[taken] * ~ring.terminated.take(last)
        where = rows[sequence] + np.broadcast_to(taken, reward.shape).reshape(learned.shape) - 1
        batch |= {"first": first, "valid": valid[:, sequence], "last": where.astype(np.int64)}
        batch |= {"action": ring.flat["action"].take(learned, axis=0), "reward": reward.reshape(learned.shape)}
        batch["discount"] = discount.astype(np.float32).reshape(learned.shape)
        at = ring.states.slot.take(slots)
        return batch | {STATE + name: array[at] for name, array in ring.states.arrays.items()}

    def _goes_on(self, steps: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Which of the rows `[n, R]` that seem to begin an episode go on with one: those with something remembered."""
        assert self._ring.states is not None
        goes_on = np.zeros_like(first)
        slot = self._ring.states.slot.take(steps[first])
        something = [array[slot].any(axis=1) for array in self._ring.states.arrays.values()]
        goes_on[first] = (slot >= 0) & np.logical_or.reduce(something)
        return goes_on

    def _draw_uniform(self, n: int, rng: np.random.Generator) -> np.ndarray:
        filled = min(self._ring.rows, max(self._ring.head)) * self._ring.width
        index = rng.integers(filled, size=n)
        for _ in range(REDRAWS):  # rejection: exactly uniform over what is ready
            (redraw,) = (~self._ready.take(index)).nonzero()
            if not len(redraw):
                return index
            index[redraw] = rng.integers(filled, size=len(redraw))
        (redraw,) = (~self._ready.take(index)).nonzero()
        if len(redraw):  # few are ready: choose among them by name
            (ready,) = self._ready[:filled].nonzero()
            index[redraw] = ready[rng.integers(len(ready), size=len(redraw))]
        return index

    @staticmethod
    def _draw_prioritized(tree: SumTree, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Proportional: a minibatch of n has one from each of n equal slices of the total (Schaul et al. 2016)."""
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        slices = np.repeat(tree.total / np.maximum(counts, 1), counts)
        return tree.sample((within + rng.random(len(within))) * slices)

    def _returns(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
        """n-step rewards `[n]` of transitions, the position of each one's last step, and how many steps it has."""
        ring, rewards = self._ring, self._ring.flat["reward"]
        if self.n_step == 1:
            return rewards.take(slots), slots, 1
        total, last, steps = rewards.take(slots).astype(np.float64), slots, np.ones(len(slots), np.int64)
        for gamma in self._gammas[1:-1].tolist():
            goes_on = ~ring.end.take(last)  # where it does not, `last` stays where it is
            following = (last + ring.width) % self.capacity
            more = np.where(goes_on, rewards.take(following), 0.0)  # no product: behind an end may be infinity
            total += np.multiply(gamma, more, dtype=np.float64)
            last = np.where(goes_on, following, last)
            steps += goes_on
        return total.astype(np.float32), last, steps

    def update_priorities(self, index: np.ndarray, priority: np.ndarray) -> None:
        """Set priorities from TD errors, if the buffer has any; those of overwritten transitions count as `late`."""
        if not self._tree:
            return
        raised, (slots, there) = self._raised(priority), self._ring.named(index)
        there &= self._ready.take(slots)
        if not there.all():
            slots, raised = slots[there], raised[there]
            self.late += len(index) - len(slots)
        if len(slots):
            self._tree.set(slots, raised)
            self._max_priority = max(self._max_priority, float(raised.max()))

    def state(self, known: Collection[str] = ()) -> Tree:
        """Filled rows in segments, empty if known, and priorities; mostly views, to be copied before the next call."""
        counts = {"late": self.late, "drawn": [self._drawn, self._drawn_age]}
        tree = {**self._ring.state(known), "max_priority": self._max_priority, **counts}
        if self._tree:
            tree["priority"] = self._tree.leaves[: self._ring.filled * self._ring.width].astype(np.float32)
            for sampler, waiting in enumerate(self._waiting):
                near = self._near(sampler)[:-1]
                tree["priority"][near] += waiting[len(waiting) - len(near) :] * ~self._ready[near]
        return tree

    def start_fresh(self, attempt: int) -> None:
        """Let an empty buffer name its segments otherwise than one before it, which checkpoints may have."""
        self._ring.stamp = attempt << 32
        self._ring.stamps[:] = self._ring.stamp

    def load(self, tree: Tree) -> None:
        """Become the buffer that `state` was taken from. `n_step`, `gamma` and priorities may differ.

        Rows whose segment is missing are not valid; `missing` counts them. With another capacity, samplers or lanes,
        the newest transitions that fit are kept; streams that are cut end as by truncation.
        """
        ring = self._ring
        saved = SavedReplay(tree, ring.columns, ring.obs, ring.stacked, ring.state_columns)
        priority = restore(ring, saved)
        self.missing, self._max_priority = saved.missing, saved.max_priority
        self.late, (self._drawn, self._drawn_age) = saved.late, saved.drawn
        self._ready[:] = ring.states.slot >= 0 if ring.states else ring.valid
        self._waiting[:] = 0.0
        for sampler in range(self.samplers):  # all windows are complete but those near the heads
            near = self._near(sampler)
            self._ready[near] = self._complete(near)
            self._waiting[sampler, self._window - len(near) :] = priority[near[:-1]]
        self._num_ready = int(np.count_nonzero(self._ready))
        if self._tree:
            priority[priority == 0.0] = self._max_priority  # what comes without a priority is as good as new
            self._tree.rebuild(priority * self._ready)

    def _near(self, sampler: int) -> np.ndarray:
        head = self._ring.head[sampler]
        return self._ring.slots(sampler, max(0, head - self._window + 1), head + 1)
