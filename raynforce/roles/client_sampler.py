"""A sampler whose simulator chooses the actions: policy versions go out, fragments come in."""

from __future__ import annotations

import math
import time

import numpy as np

from raynforce.envs.gathering import ActingSimulator
from raynforce.envs.vector import EnvArgs, derive_seed
from raynforce.errors import UsageError
from raynforce.experience.builder import EndedEpisode, final_columns, finish
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.infos import NOTHING
from raynforce.memory import resident_bytes
from raynforce.policies.acting import ActingSpec, PolicyVersion, sampler_places
from raynforce.protocol.codec import BROKE, ENDED, FIRST, TERMINATED, TRUNCATED
from raynforce.protocol.handshake import Inference
from raynforce.protocol.policy_session import Gathered
from raynforce.protocol.spaces import Spaces
from raynforce.trees import Tree


class ClientSampler:
    """Has the interface of `Sampler`. With `ahead`, the simulator is never without a fragment to gather.

    Then a fragment may be of the version before, or of several: `version` `[T, B]` tells. Without it, every fragment
    is of the version that was asked for.
    """

    def __init__(
        self,
        acting: ActingSpec,
        envs: EnvArgs,
        length: int,
        index: int = 0,
        samplers: int = 1,
        hang_seconds: float = math.inf,
        ahead: bool = False,
    ) -> None:
        self.index, self._args, self._ahead = index, envs, ahead
        self._sequence = self._asked = self._attempt = 0
        self._memory, self._measured = 0, float("-inf")
        self._record, self._leaves = acting.record, acting.env.obs
        self._simulator = ActingSimulator(
            envs.env,
            envs.args,
            envs.num_envs,
            Inference(length, acting.for_host(sampler_places(envs.num_envs, index, samplers))),
            row_bytes=Spaces.of(acting.env).obs_bytes,
            seed=envs.seed,
            sampler=index,
            hang_seconds=hang_seconds,
            gateway=envs.gateway,
        )

    def note(self) -> str:
        return ""

    def sample(self, version: PolicyVersion) -> Fragment:
        return self.produce(version)[0]

    def produce(self, version: PolicyVersion) -> tuple[Fragment, Receipt]:
        began = time.perf_counter()
        simulator = self._simulator
        simulator.policy(version.number, version.arrays(), version.schedules)
        while simulator.asked < (2 if self._ahead else 1):
            simulator.ask(derive_seed(self._args.seed, self.index, 1, self._attempt, self._asked))
            self._asked += 1
        told = time.perf_counter()
        gathered = simulator.fragment()
        waited = time.perf_counter()
        columns, episodes = columns_of(gathered)
        for leaf in self._leaves:
            for path in (leaf.path, f"final/{leaf.path}"):
                columns[path] = columns[path].astype(leaf.dtype, copy=False)
        if "logp" not in self._record:
            del columns["logp"]
        oldest = int(gathered.version.min())
        if oldest != int(gathered.version.max()):
            columns["version"] = gathered.version.astype(np.int64)
        fragment = finish(columns, episodes, version=oldest, sampler=self.index, sequence=self._sequence)
        self._sequence += 1
        faults = [fault.facts() for fault in simulator.take_faults()]
        if began > self._measured + 0.1:
            self._memory, self._measured = resident_bytes(), began
        seconds = {"env": waited - told, "policy": told - began, "other": time.perf_counter() - waited}
        each = gathered.reward.size
        receipt = Receipt(
            fragment.record,
            seconds,
            faults,
            fragment.nbytes,
            self._memory,
            flying=each * simulator.asked,
            skipped=gathered.skipped,
            lost=each * simulator.take_lost(),
        )
        return fragment, receipt

    def state(self) -> Tree:
        return {"envs": {"kind": "client", "episodes": self._simulator.episodes.copy()}, "sequence": self._sequence}

    def load(self, tree: Tree) -> list[str]:
        self._sequence = self._asked = tree["sequence"]
        self._simulator.begin_at(np.asarray(tree["envs"]["episodes"]) + 1)
        count = self._args.num_envs
        return [
            f"{count} of {count} running episodes of env {self._args.env!r} start over: the simulator cannot save them"
        ]

    def start_fresh(self, sequence: int, attempt: int) -> None:
        """Go on at fragment `sequence` without a state: other episodes and another random stream, by `attempt`."""
        self._sequence, self._attempt = sequence, attempt
        self._simulator.begin_attempt(attempt)

    def close(self) -> None:
        self._simulator.close()


def require_readable(acting: ActingSpec) -> None:
    """Refuse, with one line, a policy that simulators cannot act with."""
    why = ""
    if acting.factory:
        why = f"network.factory = {acting.factory!r} is your own torch module"
    elif acting.network.states:
        why = "its network has memory, which simulators do not have yet"
    elif "priority" in acting.record:
        why = "priorities are computed by samplers on this side"
    elif acting.env.action.dtype not in ("float32", "int64"):
        why = f"its actions are {acting.env.action.dtype}, not float32 or int64"
    if why:
        raise UsageError(f"sampling.inference = 'client' is not possible: {why}; use --inference server")


def columns_of(gathered: Gathered) -> tuple[Arrays, list[EndedEpisode]]:
    """The columns of a fragment, and the episodes that ended in it."""
    status = gathered.status
    terminated, truncated = (status & TERMINATED).astype(np.bool_), (status & TRUNCATED).astype(np.bool_)
    valid = status != BROKE
    ends, finals = [np.flatnonzero(status & ENDED)], [gathered.final_obs]
    if not valid.all():
        # An env that broke: its episode ends in the row before, or if that is gone, in its own.
        row, lane = np.nonzero(~valid)
        before, whose = row[row > 0] - 1, lane[row > 0]
        truncated[before, whose] |= valid[before, whose] & ~terminated[before, whose]
        first = lane[row == 0]
        truncated[0, first] = True
        ends.append(first)
        finals.append({path: column[0, first] for path, column in gathered.obs.items()})
    columns: Arrays = {
        **gathered.obs,
        "action": gathered.action,
        "reward": gathered.reward,
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
        "first": (status & FIRST).astype(np.bool_) & valid,
        "logp": gathered.logp,
    }
    columns |= final_columns(dict(gathered.obs), ends, finals)
    told = zip(gathered.episode_return.tolist(), gathered.episode_length.tolist(), strict=True)
    episodes = [EndedEpisode(total, length, gathered.info.get(i, NOTHING)) for i, (total, length) in enumerate(told)]
    return columns, episodes
