"""The RLlib engine: an `Algorithm` of RLlib in a Ray that we start or join."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from raynforce import given
from raynforce.config import Config
from raynforce.engines.base import Engine, Round, Supervisor, Totals
from raynforce.engines.rllib.algorithms import known
from raynforce.engines.rllib.files import pack, unpack
from raynforce.engines.rllib.names import FATAL, quiet
from raynforce.engines.rllib.reporting import SAMPLED, TRAINED, News, Reader
from raynforce.engines.rllib.translation import Translation, translate
from raynforce.envs.addresses import is_remote
from raynforce.envs.launching import is_simulator
from raynforce.envs.patience import patience
from raynforce.envs.vector import probe
from raynforce.errors import CheckpointError, EnvError, RaynforceError, UsageError, summary
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Pending, Runtime
from raynforce.runtimes.open import open_runtime
from raynforce.runtimes.placing import Demands
from raynforce.runtimes.pool import Pool
from raynforce.runtimes.ray.state import silent
from raynforce.spaces import EnvSpec
from raynforce.threads import cap_threads
from raynforce.trees import Tree

if TYPE_CHECKING:
    from raynforce.engines.rllib.building import Built

RAY, GYMNASIUM = "2.60.", "1.2.2"  # what it was made for
PAUSE = 0.2  # seconds between two looks, while nobody samples
LOST = "taking actor"  # in what RLlib logs of an env runner that failed
RUNNERS = ("SingleAgentEnvRunner: ", "OfflineSingleAgentEnvRunner: ")  # in front of what their processes print
NOISE = ("_WrappedExecutable:", "__ray_tqdm_magic_token__")


class RLlibEngine(Engine):
    """Trains with RLlib, one call of `Algorithm.train` a round."""

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        require_rllib()
        cap_threads(config.learner.threads)
        from raynforce.engines.rllib.building import build  # imports RLlib

        quiet()
        self.translation = translate(config, env)
        self._built: Built = build(self.translation, config, env, given.pack((config.env,)))
        self.acting = self._built.conversion.acting
        self._runtime: Runtime | None = None
        self._algo: Any = None
        learns = self.translation.algorithm.learns
        self._reader = Reader(TRAINED if learns == "data" else SAMPLED)
        self._number = self._dropped = 0
        self._seconds = {"sampling": 0.0, "learning": 0.0}
        self._failures = _Failures(config.faults.restarts)

    @classmethod
    def settle(cls, config: Config) -> tuple[Config, EnvSpec, str]:
        """RLlib runs on Ray, and each of its algorithms has one way for env runners and learner to work together."""
        with patience(config.faults.start_seconds, f"making env {config.env!r}"):
            spec = probe(config.env, config.env_args)
        if spec.agents is not None or config.policies:
            what = f"env {config.env!r} has several agents, which engine rllib does not train here"
            raise UsageError(f"{what}: use --engine native")
        topology = known(config.algo).topology if config.topology == "auto" else config.topology
        runtime = "ray" if config.runtime == "auto" else config.runtime
        parallel = "no" if config.sampling.parallel == "auto" else config.sampling.parallel
        sampling = replace(config.sampling, parallel=parallel)
        return replace(config, runtime=runtime, topology=topology, sampling=sampling), spec, ""

    @classmethod
    def require_taken(cls, found: Translation, config: Config) -> None:
        """Refuse what RLlib does not take."""
        require_rllib()
        from raynforce.engines.rllib.building import algorithm_config

        quiet()
        algorithm_config(found, config, b"")

    # -- its life -----------------------------------------------------------------------------------------

    def open(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        config, built, self._supervisor = self.config, self._built, supervisor
        say = self._failures.listening(say)
        for note in [*self.translation.notes, *built.notes]:
            say(f"note: {note}")
        learners = int(built.config.num_learners or 0)
        own = max(1.0, learners * float(_number(built.config.num_cpus_per_learner, 1)))
        asked = replace(config, ray=replace(config.ray, learner_cpus=config.ray.learner_cpus or own))
        simulators = int(is_simulator(config.env) and not is_remote(config.env))
        runtime = self._runtime = open_runtime(asked, say, Demands(torch=True, simulators=simulators))
        self.pool = Pool(runtime, supervisor)
        say(f"starting {built.config.algo_class.__name__} of RLlib")
        logging.getLogger("ray.rllib").addHandler(self._failures)
        try:
            with silent():  # Ray's C++ side warns of how RLlib starts its actors
                self._algo = built.config.build_algo()
        except Exception as error:
            raise self._failed("RLlib could not start", error) from error
        shutil.rmtree(self._algo.logdir, ignore_errors=True)  # it is empty: our runs have directories of their own
        gc.collect()
        gc.freeze()  # half a million objects of imports, which each full collection would walk again

    def close(self, *, now: bool = False) -> None:
        logging.getLogger("ray.rllib").removeHandler(self._failures)
        gc.unfreeze()
        try:
            if self._algo is not None and not now:
                self._algo.stop()
        except Exception:  # its actors end with the runtime
            pass
        finally:
            if self._runtime is not None:
                self._runtime.close(now=now)

    # -- training -----------------------------------------------------------------------------------------

    def newest(self) -> tuple[Pending, int]:
        return self._share(), self._number

    def rounds(self, waiting: Callable[[str], None]) -> Iterator[Round]:
        stuck = 0.0  # seconds without a step
        while True:
            began = time.monotonic()
            try:
                result = self._algo.train()
            except Exception as error:
                raise self._failed("RLlib failed", error) from error
            news = self._reader.read(result, self._number)
            self._number += 1
            seconds = time.monotonic() - began
            share = 0.0 if news.sampling is None else news.sampling
            self._seconds["sampling"] += seconds * share
            self._seconds["learning"] += seconds * (1 - share)
            self._tell(news)
            if news.record.steps:
                stuck = 0.0
                self._failures.forget()
            else:
                stuck += max(seconds, PAUSE)
                time.sleep(PAUSE)
                self._failures.require_hope(stuck, self.config.faults.start_seconds)
            schedules = {**news.schedules, **self._schedules()}
            learned = Learned(self._number, schedules, news.metrics, news.updates, [news.record])
            times = {"time/sample": seconds * share, "time/learn": seconds * (1 - share)}
            yield Round(learned, self._share(), times)

    def _share(self) -> Pending:
        assert self._runtime is not None
        return self._runtime.share(self._version())

    def _version(self) -> PolicyVersion:
        params, shift, scale = self._built.read(self._algo)
        return PolicyVersion(self._number, params, shift, scale, self._schedules())

    def _schedules(self) -> dict[str, float]:
        """What our policies need to act as RLlib's do: the chance of a random action."""
        points = self.translation.calls["training"].get("epsilon")
        if not isinstance(points, list):
            return {}
        steps, values = zip(*points, strict=True)
        return {"epsilon": float(np.interp(self._reader.sampled, steps, values))}

    def _tell(self, news: News) -> None:
        """Faults of environments and of env runners, to the run's history."""
        for facts in news.faults:
            self._supervisor.env_faults(f"env runner {facts['runner']}", [facts])
            if FATAL in facts:
                raise EnvError(facts[FATAL])
        for runner, cause in self._failures.take():
            self.pool.restarts += 1
            self._supervisor.role_failed(f"env runner {runner}", cause, "restarted")
        self._dropped = max(self._dropped, news.dropped)

    def _failed(self, what: str, error: Exception) -> RaynforceError:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        line = next((line for line in reversed(str(cause).strip().splitlines()) if line.strip()), "")
        kind = UsageError if isinstance(error, TypeError | ValueError) else RaynforceError
        return kind(f"{what}: {type(cause).__name__}: {line.strip()}"[:1000])

    # -- what it remembers --------------------------------------------------------------------------------

    def begin_from(self, version: PolicyVersion, seen: int) -> None:
        self._built.write(self._algo, version, seen)

    def state(self, known: Callable[[str], Collection[str]]) -> dict[str, Tree]:
        with tempfile.TemporaryDirectory(prefix="rnf-") as folder:
            self._algo.save_to_path(folder)
            return {"rllib": pack(Path(folder))}

    def counts(self) -> Tree:
        reader = self._reader
        counted = {"sampled": reader.sampled, "trained": reader.trained, "dropped": self._dropped}
        return {"rllib": {"number": self._number, **counted}}

    def load(self, saved: Mapping[str, Tree]) -> list[str]:
        if "rllib" not in saved:
            raise CheckpointError("this checkpoint is of another engine: it has no files of RLlib")
        with tempfile.TemporaryDirectory(prefix="rnf-") as folder:
            unpack(saved["rllib"], Path(folder))
            with _somebody_to_sync(self._algo):
                try:
                    self._algo.restore_from_path(folder)
                except Exception as error:
                    raise CheckpointError(f"RLlib could not read its checkpoint: {summary(error)}") from error
        counts = saved["run"]["rllib"]
        self._number, self._dropped = counts["number"], counts["dropped"]
        self._reader.go_on(counts["sampled"], counts["trained"])
        told = ["RLlib begins new episodes: those under way are not in its checkpoints"]
        if self.translation.algorithm.learns == "replay":
            self._fill_again(counts["sampled"])
            told.append("RLlib does not save its replay buffer: it is filled again before learning goes on")
        return told

    def _fill_again(self, sampled: int) -> None:
        """Let it wait for as many steps as at the start: RLlib counts those of the whole run, and would not."""
        config = self._algo.config.copy(copy_frozen=False)
        config.num_steps_sampled_before_learning_starts += sampled
        self._algo.config = config

    # -- what is told -------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return {"health/dropped_env_runners": float(self._dropped)}

    def totals(self) -> Totals:
        sampling = self.config.sampling
        return Totals(lost_steps=self._dropped * sampling.envs * sampling.fragment)

    def where_the_time_went(self, run: Mapping[str, float], steps: int) -> str:
        total = sum(run.values())
        if total <= 0:
            return ""
        shares = {name: seconds for name, seconds in run.items() if name != "training"}
        shares |= {"training": run["training"]} if self.translation.algorithm.overlaps else self._seconds
        parts = ", ".join(
            f"{name} {seconds / total:.0%}" for name, seconds in shares.items() if seconds / total >= 0.005
        )
        lines = [f"where the time went: {parts}"]
        sampling, learning = self._seconds["sampling"], self._seconds["learning"]
        if not self.translation.algorithm.overlaps and sampling > 2 * learning:
            lines.append("  sampling bound it: more --samplers, each with a core of its own, or --engine native")
        elif not self.translation.algorithm.overlaps and learning > 2 * sampling:
            lines.append("  learning bound it: fewer epochs, larger minibatches, or --engine native")
        return "\n".join(lines)


class _Failures(logging.Handler):
    """Hears of env runners that failed: RLlib logs that one did, and its process prints why."""

    def __init__(self, restarts: int) -> None:
        super().__init__(logging.ERROR)
        self._restarts, self._in_a_row = restarts, 0
        self._said = self._last = ""
        self._found: list[tuple[str, str]] = []

    def listening(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say`, in our words."""

        def said(text: str) -> None:
            if text.startswith(RUNNERS):
                self._said = text.partition(": ")[2]
                text = f"env runner: {self._said}"
            if not any(noise in text for noise in NOISE):
                say(text)

        return said

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if LOST not in text:
            return
        before, _, after = text.rpartition(LOST)
        told = self._said or " ".join(before.split()).removeprefix("Ray error (").rstrip(", )")
        self._said, self._last = "", told[:500] or "it died"
        self._in_a_row += 1
        self._found.append((after.split()[0] if after.split() else "?", self._last))

    def take(self) -> list[tuple[str, str]]:
        found, self._found = self._found, []
        return found

    def forget(self) -> None:
        """There is progress."""
        self._in_a_row = 0

    def require_hope(self, seconds: float, most: float) -> None:
        """Give up on env runners that failed too often in a row, or have not come back for too long."""
        if self._in_a_row > self._restarts:
            often = f"env runners failed {self._in_a_row} times in a row without a step"
            raise RaynforceError(f"{often}: {self._last}")
        if seconds > most:
            raise RaynforceError(
                f"no env runner has sampled a step for {seconds:.0f} s{self._last and f': {self._last}'}"
            )


@contextmanager
def _somebody_to_sync(algo: Any) -> Iterator[None]:
    """RLlib hands weights to its env runners when it restores, though one that learns from recorded data has none."""
    if algo.env_runner_group is not None:
        yield
        return
    algo.env_runner_group = SimpleNamespace(sync_weights=lambda **_: None, num_remote_env_runners=lambda: 0)
    try:
        yield
    finally:
        algo.env_runner_group = None


def require_rllib() -> None:
    """Refuse to go on without RLlib, or with another than this engine was made for."""
    try:
        ray, gymnasium = (importlib.metadata.version(name) for name in ("ray", "gymnasium"))
        for needed in ("dm-tree", "pyarrow", "pandas", "scipy", "lz4"):
            importlib.metadata.version(needed)
    except importlib.metadata.PackageNotFoundError as error:
        missing = f"engine 'rllib' needs {error.name}, which is not installed"
        raise UsageError(f"{missing}: pip install 'raynforce[rllib]'") from None
    if not ray.startswith(RAY):
        raise UsageError(f"engine 'rllib' is made for Ray {RAY}x, and this is {ray}: pip install 'ray[rllib]==2.60.0'")
    if gymnasium != GYMNASIUM:
        wants = f"RLlib 2.60 takes gymnasium {GYMNASIUM} alone, and this is {gymnasium}"
        raise UsageError(f"{wants}: pip install gymnasium=={GYMNASIUM}")


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise
