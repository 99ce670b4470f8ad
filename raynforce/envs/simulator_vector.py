"""Simulators as one vector environment, as the lanes of an env host, and what a step of theirs costs."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from raynforce.envs.addresses import is_remote
from raynforce.envs.cost import PASSES, STEPS, TRIAL_SECONDS, Cost
from raynforce.envs.describe import bits
from raynforce.envs.lanes import Lanes, ParallelVector
from raynforce.envs.launching import is_simulator
from raynforce.envs.masks import random_of
from raynforce.envs.simulators import Simulators
from raynforce.envs.vector import NOT_AT_ALL, EnvArgs
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree


class SimulatorVector(ParallelVector):
    """The envs of a simulator as one vector environment. Episodes in flight start over if it cannot save them."""

    _lanes: Simulators  # type: ignore[assignment]

    def __init__(self, lanes: Simulators, record: bool = True) -> None:
        super().__init__(lanes)  # type: ignore[arg-type]
        self._record = record and lanes.saves
        if not record:
            self.way_back = NOT_AT_ALL

    def state(self) -> Tree:
        obs = {str(i): column.copy() for i, column in enumerate(self.current().values())}
        lanes = self._lanes
        tree = {"kind": "simulator", "obs": obs, "episodes": lanes.episodes.copy()}
        if self._record:
            states = lanes.states()
            tree["sizes"] = np.array([-1 if state is None else len(state) for state in states], np.int64)
            tree["states"] = np.frombuffer(b"".join(filter(None, states)), np.uint8)
            tree |= {"steps": lanes.rows.steps.copy(), **lanes.breaks()}
        return tree

    def load(self, tree: Tree) -> list[str]:
        saved = self._saved_obs(tree, "simulator")
        self.take_faults()
        lanes, episodes = self._lanes, np.asarray(tree["episodes"])
        if "sizes" in tree and lanes.saves:
            reasons = lanes.load_states(_split(tree), episodes, np.asarray(tree["steps"]))
            lanes.load_breaks(tree)
            columns = list(zip(lanes.rows.obs.values(), saved, strict=True))
            whole = [lane for lane in range(self.num_envs) if lane not in reasons]
            others = [i for i in whole if any(bits(now[i]) != bits(before[i]) for now, before in columns)]
            reasons |= dict.fromkeys(others, "the simulator gave another observation for it than before")
            lanes.begin_anew(others)
        else:
            lanes.begin_at(episodes + 1)
            cannot = "they were not saved" if lanes.saves else "the simulator cannot save them"
            reasons = dict.fromkeys(range(self.num_envs), cannot)
        self.restarted = sorted(reasons)
        self._show()
        counts = Counter(reasons.values())
        start_over = f"of {self.num_envs} running episodes of env {self.spec.env!r} start over"
        return [f"{count} {start_over}: {reason}" for reason, count in counts.items()]


def _split(tree: Tree) -> list[bytes | None]:
    sizes, states = np.asarray(tree["sizes"]).tolist(), np.asarray(tree["states"], np.uint8)
    ends = np.cumsum([max(0, size) for size in sizes]).tolist()
    return [None if size < 0 else states[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]


def make_lanes(args: EnvArgs, host: int, attempt: int, hang_seconds: float) -> Lanes | Simulators:
    """The environments of an env host, which are stepped side by side."""
    first = host * args.num_envs
    if is_remote(args.env):
        from raynforce.envs.remote import remote_lanes

        how: dict[str, Any] = {"first": first, "attempt": attempt, "hang_seconds": hang_seconds}
        return remote_lanes(args.env, args.args, args.num_envs, seed=args.seed, gateway=args.gateway, **how)
    if is_simulator(args.env):
        where: dict[str, Any] = {"first": first, "attempt": attempt, "hang_seconds": hang_seconds}
        where["recycle"] = args.recycle
        return Simulators(args.env, args.args, args.num_envs, seed=args.seed, **where)
    return Lanes(
        args.env,
        args.given,
        args.num_envs,
        seed=args.seed,
        first=first,
        parallel=args.parallel,
        attempt=attempt,
        hang_seconds=hang_seconds,
        masked=args.masked,
    )


def cost_of_simulator(env: str, args: Mapping[str, Any] | None, envs: int = 8) -> tuple[EnvSpec, Cost]:
    """What a simulator takes and gives, and what a step costs with so many envs in a process."""
    if is_remote(env):
        from raynforce.envs.remote import remote_lanes

        lanes: Simulators = remote_lanes(env, args, envs, seed=0, gateway=None, at_most=True)
        envs = lanes.count
    else:
        lanes = Simulators(env, args, envs, seed=0)
    rng, took = np.random.default_rng(0), array("d")
    try:
        until = time.monotonic() + TRIAL_SECONDS
        while len(took) < STEPS * PASSES and (not took or time.monotonic() < until):
            actions = random_of(lanes.spec, lanes.obs, rng)
            began = time.perf_counter()
            lanes.step_all(actions)
            took.append((time.perf_counter() - began) / envs)
    finally:
        lanes.close()
    low, high = (float(x) for x in np.percentile(took, [10, 90]))
    return lanes.spec, Cost(min(took), sum(took) / len(took), (low, high), 0.0, envs * len(took))
