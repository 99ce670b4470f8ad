"""The native engine: the loop of a topology over a pool of roles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from raynforce.algos import algorithm_class
from raynforce.algos.contract import declared
from raynforce.auto import side_by_side
from raynforce.config import Config
from raynforce.engines.base import Engine, Round, Supervisor, Totals
from raynforce.engines.native.role_set import RoleSet
from raynforce.engines.native.takeover import Takeover, require_same_buffers
from raynforce.engines.native.teams import plans, require_agents
from raynforce.engines.native.timing import TimeTree
from raynforce.errors import RaynforceError
from raynforce.experience.ledger import Ledger
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.team import Plan
from raynforce.runtimes.base import Runtime
from raynforce.runtimes.member import Job
from raynforce.runtimes.open import open_runtime
from raynforce.runtimes.placing import cores
from raynforce.spaces import EnvSpec
from raynforce.topologies import topology
from raynforce.topologies.declaration import Blueprint, Setup
from raynforce.topologies.loop import Loop, LoopRound, Start
from raynforce.trees import Tree


class NativeEngine(Engine):
    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        self._algorithm = algorithm_class(config.algo)
        self._topology = topology(config.topology)
        require_agents(config, self._algorithm, env)
        self._team: Mapping[str, Plan] = {}
        if config.policies:
            self.acting, self._team = plans(config, env, self._algorithm)
        else:
            self.acting = declared(config, env, self._algorithm)
        self._topology.check(config, self._algorithm, env)
        self._ledger = Ledger()
        self._times = TimeTree()
        self._batches = 0, 0  # forward passes of a policy that serves hosts, and actions, since the last report
        self._runtime: Runtime | None = None
        self._saved: Mapping[str, Tree] | None = None
        self._takeover: Takeover | None = None
        self._newest: tuple[Job, int] | None = None
        self._loop: Loop | None = None

    def require_resumable(self, before: Config, run: str) -> None:
        require_same_buffers(before, self.config, run)

    def open(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        demands = self._topology.demands(self.config, torch=self.acting.acts_with == "torch")
        self._runtime = open_runtime(self.config, say, demands)
        plan = Blueprint(self.config, self.env, self.acting, self._runtime, self._team)
        self._roles = RoleSet(plan, self._topology, self._ledger, supervisor, say)
        self.pool = self._roles.pool

    def begin_from(self, version: PolicyVersion, seen: int) -> None:
        given = self._roles.runtime.share(version)
        self._roles.wait_for([self.pool.submit(self._roles.learner, "begin_from", given, seen)])
        self._newest = None

    def load(self, saved: Mapping[str, Tree]) -> list[str]:
        self._saved, counts = saved, saved["run"]
        takeover = self._takeover = Takeover(saved, self.config)
        notes = self._roles.load(saved, takeover)
        self._ledger.load(counts["ledger"], [f.record for f in [*takeover.held, *takeover.dropped]])
        for fragment in takeover.dropped:
            self._ledger.drop(fragment.record)
        self._roles.lost_transitions = counts["lost_transitions"] + takeover.lost_transitions
        return [*notes, *takeover.notes()]

    def newest(self) -> tuple[Job, int]:
        if self._newest is None:
            job = self.pool.submit(self._roles.learner, "publish")
            self._newest = job, self._roles.wait_for([job])[0].number
        return self._newest

    def rounds(self, waiting: Callable[[str], None]) -> Iterator[Round]:
        version, number = self.newest()
        held = () if self._takeover is None else self._takeover.held
        lags = [self.config.stream.max_lag, *([] if self._algorithm.max_lag is None else [self._algorithm.max_lag])]
        start = Start(version, number, self._ledger, held, min(lags), waiting)
        setup = Setup(self.config, self.env, self._algorithm, self._roles, start, self._saved, self._roles.sizes)
        loop = self._loop = self._topology.loop(setup)
        return map(self._done, loop.rounds())

    def _done(self, turn: LoopRound) -> Round:
        for receipt, call in turn.receipts:
            self._roles.received(receipt)
            self._times.add("sampler", {**receipt.seconds, **call._asdict()})
            self._batches = self._batches[0] + receipt.passes, self._batches[1] + receipt.chosen
            if receipt.envs:
                self._times.add("env", receipt.envs)
        self._times.add("learner", {**turn.learned.seconds, **turn.learner._asdict()})
        seconds = {"time/sample": turn.sample_seconds, "time/learn": turn.learn_seconds}
        return Round(turn.learned, turn.version, seconds)

    def keeps_learning_after(self, error: RaynforceError) -> bool:
        return error.role in {member.name for member in (*self._roles.samplers, *self._roles.hosts)}

    def last_round(self) -> Round | None:
        turn = None if self._loop is None else self._loop.abandon()
        return None if turn is None else self._done(turn)

    def state(self, known: Callable[[str], Collection[str]]) -> dict[str, Tree]:
        loop = self._running
        fragments = loop.settle() if self._topology.exact else loop.complete()
        parts = self._roles.states(known)
        parts["learner"] = loop.with_counts(parts["learner"])
        if fragments:  # sampled, and to be learned from first
            parts["stream"] = {str(index): fragment.state() for index, fragment in enumerate(fragments)}
        return parts

    def counts(self) -> Tree:
        sampling, books = self.config.sampling, self._ledger.state()
        if not self._topology.exact:  # what is being sampled will not be there after a resume
            lanes = sampling.envs * self.env.lanes
            books["lost"] += self._roles.flying + self._running.coming * sampling.fragment * lanes
        layout = {name: getattr(sampling, name) for name in ("samplers", "envs", "inference", "exact_resume")}
        counted = {"ledger": books, "lost_transitions": self._roles.lost_transitions}
        return {"topology": self.config.topology, **layout, **counted}

    @property
    def _running(self) -> Loop:
        assert self._loop is not None, "rounds() comes first"
        return self._loop

    def metrics(self) -> dict[str, float]:
        self._ledger.check(self._running.held)
        lost = {"health/lost_transitions": float(self._roles.lost_transitions)}
        (passes, chosen), self._batches = self._batches, (0, 0)
        batch = {"inference/batch": chosen / passes} if passes else {}
        return {**self._times.metrics(), **self._ledger.metrics(), **self._running.metrics(), **batch, **lost}

    def totals(self) -> Totals:
        abandoned = 0 if self._takeover is None else self._takeover.abandoned
        return Totals(self._ledger.dropped, self._ledger.lost, abandoned)

    def where_the_time_went(self, run: Mapping[str, float], steps: int) -> str:
        return self._times.report(
            self.config,
            cores=cores(),
            tolerates_lag=self._algorithm.max_lag != 0,
            run=run,
            side_by_side=lambda seconds: side_by_side(self.config, seconds / steps) if steps else "",
        )

    def close(self, *, now: bool = False) -> None:
        if self._runtime is not None:
            self._runtime.close(now=now)
