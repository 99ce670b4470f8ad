"""The reader: recorded episodes in, fragments out, as a sampler's whose environments play them again."""

from __future__ import annotations

import time

import numpy as np

from raynforce.data.episodes import to_recorded
from raynforce.data.files import read
from raynforce.errors import UsageError
from raynforce.experience.builder import InFlight, allocate, final_columns, finish
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Fragment
from raynforce.infos import NOTHING
from raynforce.memory import resident_bytes
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree, load_rng, rng_state

STREAM = 5  # its random stream, beside those of samplers and learner


class Reader:
    """Each lane reads one episode after another, from an order of all that is shuffled again for each pass.

    Lanes begin somewhere in an episode, so that a fragment has steps of all phases.
    """

    def __init__(self, data: str, env: EnvSpec, lanes: int, length: int, seed: int) -> None:
        self.index = 0
        self._data, self._env, self._length, self._seed = data, env, length, seed
        self._episodes = read(data, env)
        self._action = to_recorded(env.action, self._episodes.action)
        self._starts = self._episodes.starts
        self._fingerprint = self._episodes.fingerprint()
        self._flying = InFlight(lanes)
        self._sequence = 0
        self._begin(np.random.default_rng([seed, STREAM]), lanes)

    def _begin(self, rng: np.random.Generator, lanes: int) -> None:
        self._rng, episodes = rng, self._episodes
        self._order, self._at = rng.permutation(episodes.count), 0
        self._episode = np.array([self._next() for _ in range(lanes)])  # [B] that each lane is in
        self._row = rng.integers(episodes.length[self._episode])  # [B] its next step there
        self._flying.lengths[:] = self._row
        for lane, (episode, row) in enumerate(zip(self._episode, self._row, strict=True)):
            start = self._starts[episode]
            self._flying.returns[lane] = episodes.reward[start : start + row].sum(dtype=np.float64)

    def _next(self) -> int:
        """The episode that is read next."""
        if self._at == len(self._order):
            self._order, self._at = self._rng.permutation(self._episodes.count), 0
        self._at += 1
        return int(self._order[self._at - 1])

    def note(self) -> str:
        """What it has read."""
        episodes, returns = self._episodes, self._episodes.returns()
        counts = f"{episodes.steps:,} steps of {episodes.count:,} episodes"
        return f"data {self._data} has {counts}, mean return {returns.mean():.1f}"

    def produce(self, number: int) -> tuple[Fragment, Receipt]:
        """The next fragment, as one of policy version `number`."""
        began = time.perf_counter()
        episodes, lanes, steps = self._episodes, len(self._row), self._length
        seen, rest = allocate(self._env.obs, self._env.action, steps, lanes)
        ends: list[tuple[int, int, int]] = []  # row, lane, and the episode's last observation
        for lane in range(lanes):
            t = 0
            while t < steps:
                episode, row = int(self._episode[lane]), int(self._row[lane])
                count = min(steps - t, int(episodes.length[episode]) - row)
                start = int(self._starts[episode]) + row
                for path, column in seen.items():
                    column[t : t + count, lane] = episodes.obs[path][start + episode : start + episode + count]
                rest["action"][t : t + count, lane] = self._action[start : start + count]
                rest["reward"][t : t + count, lane] = episodes.reward[start : start + count]
                t += count
                self._row[lane] += count
                if self._row[lane] == episodes.length[episode]:
                    rest["terminated"][t - 1, lane] = episodes.terminated[episode]
                    rest["truncated"][t - 1, lane] = episodes.truncated[episode]
                    ends.append((t - 1, lane, start + episode + count))
                    self._episode[lane], self._row[lane] = self._next(), 0
            now = int(self._starts[self._episode[lane]]) + int(self._episode[lane]) + int(self._row[lane])
            for path, column in seen.items():
                column[steps, lane] = episodes.obs[path][now]
        ends.sort()
        last = {path: episodes.obs[path][[at for *_, at in ends]] for path in seen}
        index = np.array([t * lanes + lane for t, lane, _ in ends], np.int64)
        columns = {**seen, **rest, "valid": np.ones((steps, lanes), np.bool_)}
        columns |= final_columns(seen, [index], [last])
        ended = self._flying.add(columns, ((t, lane, NOTHING) for t, lane, _ in ends))
        fragment = finish(columns, ended, version=number, sampler=self.index, sequence=self._sequence)
        self._sequence += 1
        seconds = {"env": 0.0, "policy": 0.0, "other": time.perf_counter() - began}
        return fragment, Receipt(fragment.record, seconds, size=fragment.nbytes, memory=resident_bytes())

    def state(self) -> Tree:
        """Where each lane is, and the order in which it goes on."""
        places = {"order": self._order.copy(), "at": self._at, "episode": self._episode.copy(), "row": self._row.copy()}
        flying = {"returns": self._flying.returns.copy(), "lengths": self._flying.lengths.copy()}
        own = {"data": self._fingerprint, "rng": rng_state(self._rng), "sequence": self._sequence}
        return {**own, **places, **flying}

    def load(self, tree: Tree) -> list[str]:
        """Undo `state`."""
        if tree["data"] != self._fingerprint:
            problem = f"data {self._data!r} is not what this run has learned from so far"
            raise UsageError(f"{problem}: bring that back, or begin a new run with --from")
        load_rng(self._rng, tree["rng"])
        self._order, self._at, self._sequence = tree["order"].copy(), int(tree["at"]), int(tree["sequence"])
        self._episode, self._row = tree["episode"].copy(), tree["row"].copy()
        self._flying.returns, self._flying.lengths = tree["returns"].copy(), tree["lengths"].copy()
        return []

    def start_fresh(self, sequence: int, attempt: int) -> None:
        """Go on at fragment `sequence` without a state, in another order."""
        self._begin(np.random.default_rng([self._seed, STREAM, attempt]), len(self._row))
        self._sequence = sequence

    def close(self) -> None:
        pass
