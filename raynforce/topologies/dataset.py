"""Dataset: a reader gives fragments of recorded episodes, and the learner trains on them; nothing is sampled."""

from __future__ import annotations

from typing import Any

from raynforce.algos.base import Algorithm
from raynforce.config import Config
from raynforce.data.files import require_data
from raynforce.errors import UsageError
from raynforce.experience.storage import observation_bytes
from raynforce.memory import require_memory
from raynforce.runtimes.member import Member
from raynforce.spaces import EnvSpec
from raynforce.topologies import declaration
from raynforce.topologies.declaration import MEMORY, ROW_BYTES, Blueprint, Kind, Topology
from raynforce.topologies.loop import Asked
from raynforce.topologies.sync import Sync

COPIES = 3  # of all observations while they are read: Arrow's, those after each step, and ours


class Dataset(Sync):
    def _sample(self, member: Member) -> Asked:
        """What is read does not depend on the policy: the reader is told its number alone."""
        return Asked(self._pool.submit(member, self.work, self._number, parts=2), self._number)


def _kinds(plan: Blueprint) -> list[Kind]:
    return [declaration.learner(plan), declaration.reader(plan)]


def _require(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    if algorithm.consumes != "data":
        able = declaration.algorithms_that(lambda found: found.consumes == "data")
        problem = f"topology = 'dataset' reads recorded episodes, and {config.algo} samples its own"
        raise UsageError(f"{problem}: leave it out, or train {able}")
    if config.data is None:
        how = "add --data PATH, which `raynforce record RUN` writes"
        raise UsageError(f"{config.algo} learns from recorded episodes, and data is not given: {how}")
    if config.sampling.samplers != 1:
        raise UsageError(f"sampling.samplers = {config.sampling.samplers}: one reader reads all data; leave it out")
    steps = require_data(config.data)
    if declaration.all_here(config):
        needed = COPIES * steps * (observation_bytes(env.obs) + ROW_BYTES)
        require_memory(needed, MEMORY, f"data: {steps:,} recorded steps", fix="give fewer files")


DATASET = Topology(
    "dataset",
    _kinds,
    lambda setup: Dataset(setup.roles, setup.start),
    _require,
    overlaps=False,
    lags=False,
    reads_data=True,
)
