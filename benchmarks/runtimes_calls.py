"""What a call costs on each runtime: an empty one, and one that carries a fragment of 1 MB from sampler to learner.

The empty call is waited for, one after the other. The second is what a topology does: a sampler's answer is given to a
call of the learner, which reads every page of it, and the driver waits for that. Making the fragment is not in it:
the sampler has it ready. Inline there is nothing to carry. Each turn is a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from benchmarks.measure import Table, command, row, take_turns
from benchmarks.runs import RUNTIMES, apart, watched
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.runtimes.open import open_runtime

CALLS = 200
PAGE = 4096
CHILD = "from benchmarks.runtimes_calls import print_times; print_times({!r})"
Times = dict[str, float]


class Echo:
    """A role that has a fragment ready, and takes one."""

    def __init__(self) -> None:
        steps, lanes = 128, 64
        obs = np.ones((steps + 1, lanes, 32), np.float32)
        columns = {"obs": obs, "reward": obs[1:, :, 0].copy(), "valid": np.ones((steps, lanes), np.bool_)}
        self._fragment = Fragment(columns, version=0, sampler=0, sequence=0)

    def nothing(self) -> None:
        """An empty call."""

    def give(self) -> Fragment:
        return self._fragment

    def take(self, fragment: Fragment) -> int:
        """Read something of every page."""
        return sum(int(column.ravel().view(np.uint8)[::PAGE].sum()) for column in fragment.columns.values())


def measure(repeats: int = 3) -> list[Table]:
    """Time the calls on each runtime in turn."""
    found = take_turns(repeats, *(partial(times, runtime) for runtime in RUNTIMES), label="calls")
    rows = []
    for name in ("empty call", "1 MB from sampler to learner"):
        for runtime, turns in zip(RUNTIMES, found, strict=True):
            rows.append(row(f"{name}, {runtime}", "ms", [turn[name] for turn in turns]))
    return [Table(f"Calls, {repeats} turns of {CALLS} each", rows)]


def times(runtime: str) -> Times:
    """Milliseconds of each kind of call, by name."""
    with apart() as environment:
        printed = watched([sys.executable, "-c", CHILD.format(runtime)], environment)
    found: Times = json.loads(printed.splitlines()[-1])
    return found


def print_times(runtime: str) -> None:
    """What the process of a turn does."""
    config, _ = resolve({"env": "CartPole-v1", "runtime": runtime})
    role = f"{__name__}:{Echo.__name__}"
    with open_runtime(config, lambda text: print(text, file=sys.stderr)) as opened:
        sampler, learner = (opened.spawn(role, name=n, place=opened.places[n]) for n in ("sampler", "learner"))
        found = {
            "empty call": _milliseconds(lambda: learner.call("nothing").result()),
            "1 MB from sampler to learner": _milliseconds(lambda: learner.call("take", sampler.call("give")).result()),
        }
    print(json.dumps(found))


def _milliseconds(call: Callable[[], object]) -> float:
    """The median of many, after some that are not counted."""
    taken = []
    for _ in range(CALLS + CALLS // 10):
        began = time.monotonic()
        call()
        taken.append(time.monotonic() - began)
    return 1e3 * median(taken[-CALLS:])


if __name__ == "__main__":
    command(measure, __doc__ or "")
