"""`raynforce.tune`: a search for settings from its beginning, or its middle, to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raynforce import settings as config_settings
from raynforce.api import fresh_name, resolved, with_absolute_paths
from raynforce.config import Config
from raynforce.driver.signals import StopRequest
from raynforce.engines import engine_class
from raynforce.errors import RaynforceError, UsageError, nearest
from raynforce.experiment import resolve, settings_of
from raynforce.given import lending
from raynforce.given import pack as pack_given
from raynforce.imports import bare, is_given
from raynforce.memory import available_bytes
from raynforce.ops.tuning import space as spaces
from raynforce.ops.tuning.defaults import default_space
from raynforce.ops.tuning.importance import importance
from raynforce.ops.tuning.picture import draw
from raynforce.ops.tuning.searching import drawn, grid_size, gridded, require_optuna
from raynforce.ops.tuning.space import Space
from raynforce.ops.tuning.study import BASE, OBJECTIVES, PLAN, SCHEDULERS, TRIALS, Plan, Study, Trial, write
from raynforce.ops.tuning.view import TuneView, make_view
from raynforce.runs import disk, lock
from raynforce.runs.directory import RunDirectory
from raynforce.runs.fitting import differences
from raynforce.runs.mirrored import wait_until_free
from raynforce.runs.progress import Mode
from raynforce.runs.store import is_url
from raynforce.runtimes.placing import MEGABYTES, TORCH_MEGABYTES, cores
from raynforce.runtimes.placing import count as amount
from raynforce.runtimes.ray.private import gpus_here
from raynforce.seeds import cores_of, numbers

SEARCHED = ("algorithm.", "network.", "sampling.", "learner.", "stream.", "replay.", "env_args.")
USUAL, POPULATION, SEEDS = 20, 8, 3
LARGEST = 10_000  # trials
AHEAD = {
    "RAY_idle_worker_killing_time_threshold_ms": "600000",  # or they end once Tune has reserved their CPUs
    "RAY_preload_python_modules": "torch,raynforce.ops.tuning.trainable",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
}
"""For the processes that a Ray of our own starts ahead: what they import while Tune is imported here, and what Tune
would set in those of its trials."""
TUNE_NEEDED = "raynforce tune needs Ray Tune: pip install 'raynforce[tune]'"


@dataclass(frozen=True)
class Tuned:
    """A search that has ended."""

    path: Path
    plan: Plan
    trials: list[Trial]
    best: Trial | None
    """The trial whose settings are in `best.yaml`; None if none came far enough to be judged."""
    importance: dict[str, float]
    """How much of the differences between trials each setting explains; sums up to 1."""
    method: str
    """How that was found."""
    seconds: float
    picture: Path | None = None

    @property
    def config(self) -> Path:
        """Settings of the best trial, for `raynforce train --config`."""
        return self.path / "best.yaml"

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "failed"]

    def to_json(self) -> dict[str, Any]:
        plan = self.plan.to_json()
        facts = {name: plan[name] for name in ("algorithm", "env", "objective", "mode", "scheduler", "seeds")}
        return {
            "dir": str(self.path),
            **facts,
            "best": None if self.best is None else self.best.to_json(self.plan),
            "config": None if self.best is None else str(self.config),
            "trials": [trial.to_json(self.plan) for trial in self.trials],
            "importance": self.importance,
            "importance_by": self.method,
            "seconds": round(self.seconds, 3),
        }


class InterruptedTune(KeyboardInterrupt):
    """A signal ended the search, each run after a clean checkpoint; `tuned` is what there is of it."""

    def __init__(self, tuned: Tuned, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; to go on: raynforce tune --resume {tuned.path}")
        self.tuned = tuned
        self.number = number


def tune(
    env: str | Callable[..., Any] | None = None,
    algo: str | type[Any] = "ppo",
    *,
    search: Sequence[str] | Mapping[str, Any] = (),
    trials: int | None = None,
    scheduler: str = "asha",
    objective: str | None = None,
    seeds: int | str | Sequence[int] = SEEDS,
    steps: int | None = None,
    target: float | None = None,
    seed: int | None = None,
    runtime: str | None = None,
    topology: str | None = None,
    out: str | Path | None = None,
    resume: str | Path | bool | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    address: str | None = None,
    progress: Mode = "auto",
    stream: Any = None,
) -> Tuned:
    """Search for settings: train trials side by side on Ray Tune, and return the best.

    `search` says what is searched, as `{"algorithm.learning_rate": "log(1e-5,1e-2)"}`; without it, what matters most
    for the algorithm. `scheduler` is `asha` (drawn at random, and the worst stopped early), `optuna` (the same, but
    proposed by TPE), `pbt` (a population whose worst go on from the best), `random` or `grid`. A trial trains `seeds`
    seeds, and counts with their median. `objective` is `return`, or `steps` or `seconds` until the target is met, which
    is the default where there is one. A trial asks for `cpus` CPUs, which may be a fraction. Everything is in `out`;
    `resume` names it to go on after an interruption of any kind; with True, a search that is at `out` already goes on.
    The other arguments are those of `train`.
    """
    began = time.monotonic()
    view = make_view(progress, stream)
    if resume is not None and not isinstance(resume, bool):
        return _search(Study.open(resume), b"", address, view, began)
    if env is None:
        raise UsageError("tune needs an environment, such as CartPole-v1")
    with lending() as lender:
        given = {"steps": steps, "target": target, "seed": seed, "topology": topology, "runtime": runtime or "inline"}
        found, preset = resolved(env, algo, config, settings, lender, **given)
        how: dict[str, Any] = {"trials": trials, "scheduler": scheduler, "objective": objective, "seeds": seeds}
        how |= {"cpus": cpus, "gpus": gpus, "address": address, "go_on": bool(resume)}
        study = prepare(found, spaces.read(search), out, **how)
        packed = pack_given((found.env, found.algo, found.network.factory))
        if preset:
            view.message(f"preset: {', '.join(key for key in preset if key not in study.plan.search)}")
        try:
            return _search(study, packed, address, view, began)
        except UsageError:
            _forget(study)
            raise


def prepare(
    config: Config,
    search: Space,
    out: str | Path | None,
    *,
    trials: Any = None,
    scheduler: str = "asha",
    objective: str | None = None,
    seeds: Any = SEEDS,
    cpus: Any = None,
    gpus: Any = None,
    address: str | None = None,
    go_on: bool = False,
) -> Study:
    """Check everything that can be checked, then write the directory of a new search, or `go_on` with the same one."""
    space, count, objective = checked(config, search, trials=trials, scheduler=scheduler, objective=objective)
    if go_on and out is None:
        raise UsageError("resume goes on with the search at out, and none is given: name it")
    begun = Study.open(out) if go_on and out is not None and Path(out, PLAN).is_file() else None
    unsettled = with_absolute_paths(config)
    if begun is not None:
        had, _ = resolve({"preset": "none"}, settings_of(begun.path / BASE)[0])
        config = replace(had, seed=config.seed)
    else:
        config, _, _ = engine_class(config.engine).settle(unsettled)
    asked = cores_of(config) if cpus is None else _amount(cpus, "--cpus", 0.01)
    gpu = float(config.learner.device.startswith("cuda")) if gpus is None else _amount(gpus, "--gpus", 0.0)
    numbered = numbers(seeds, config.seed)
    plan = Plan(
        algorithm=config.algo,
        env=config.env,
        objective=objective,  # type: ignore[arg-type]
        search=space,
        scheduler=scheduler,  # type: ignore[arg-type]
        seeds=tuple(numbered),
        trials=count,
        seed=config.seed,
        steps=config.steps,
        target=config.target,
        cpus=float(asked),
        gpus=gpu,
        created=time.time(),
    )
    if begun is not None:
        _require_same(begun, plan, unsettled)
        return begun
    if _starts_own(address):
        require_room(plan, cores(), count)
        _require_own_gpus(plan)
    points: list[dict[str, Any]] = []
    if scheduler == "grid":
        points = gridded(space)
    elif scheduler != "optuna":  # which proposes one after the other
        points = drawn(space, count, config.seed, lambda values: _resolved(config, values))
    path = _new_folder(config, out, go_on)
    return Study.create(path, plan, config.to_yaml(), [Trial(id, values) for id, values in enumerate(points)])


def _forget(study: Study) -> None:
    """Leave nothing of a search that was refused before its first trial began."""
    if any(study.path.glob("trial_*")):
        return
    with contextlib.suppress(OSError):
        for name in (PLAN, TRIALS, BASE, "run.lock"):
            (study.path / name).unlink(missing_ok=True)
        study.path.rmdir()


def _require_same(begun: Study, plan: Plan, config: Config) -> None:
    """Refuse to go on with another search; what is left to `auto` may be anything."""
    own = {**plan.to_json(), "created": begun.plan.created}
    had, _ = resolve({"preset": "none"}, settings_of(begun.path / BASE)[0])
    rows = [*differences(begun.plan.to_json(), own), *differences(had.to_dict(), config.to_dict())]
    free = ["sampling.samplers", "sampling.envs"] if config.topology == "auto" else []
    differ = [row for row in rows if row.expected != "auto" and row.what not in ("preset", *free)]
    if differ:
        what = ", ".join(f"{row.what} is {row.found} and not {row.expected}" for row in differ[:3])
        raise UsageError(f"{begun.path} is another search ({what}): name a new directory")


def checked(
    config: Config, search: Space, *, trials: Any = None, scheduler: str = "asha", objective: str | None = None
) -> tuple[Space, int, str]:
    """What is searched, in how many trials, and for what; whatever cannot be is refused, without trying anything."""
    _require_one_of("scheduler", scheduler, SCHEDULERS)
    objective = objective or ("return" if config.target is None or scheduler == "pbt" else "steps")
    _require_one_of("objective", objective, OBJECTIVES)
    if objective != "return" and config.target is None:
        raise UsageError(f"--objective {objective} is until the target is met, and there is none: add --target R")
    if objective != "return" and scheduler == "pbt":
        raise UsageError(f"--objective {objective} is not for pbt, whose settings change on the way: use return")
    if config.runtime not in ("inline", "process"):
        raise UsageError(f"--runtime {config.runtime}: a trial is a Ray actor already; its runs are inline or process")
    require_in_a_process(config)
    if scheduler == "optuna":
        require_optuna()
    space = search or default_space(config.algo)
    if scheduler == "pbt" and not search:
        space = {key: domain for key, domain in space.items() if key.startswith("algorithm.")}
    require_valid(config, space, scheduler)
    return space, _count(space, trials, scheduler), objective


def require_in_a_process(config: Config) -> None:
    """Refuse an engine that has no runtime for a single process."""
    if config.engine == "rllib":
        fix = "leave it out, or search with RLlib's own Tuner (train --engine rllib --print-config has its config)"
        raise UsageError(f"engine = 'rllib' needs a Ray of its own, and a trial is one process: {fix}")


def require_valid(config: Config, space: Space, scheduler: str) -> None:
    """Refuse what names no setting, and values that it cannot have."""
    import numpy as np

    for key, domain in space.items():
        values = domain.grid() if domain.kind == "choice" else [domain.clip(domain.low), domain.clip(domain.high)]
        if domain.kind != "choice":
            values += [domain.sample(np.random.default_rng(0))]
        shown = f"--search {key}={domain}"
        for value in values:
            try:
                _resolved(config, {key: value})
            except UsageError as error:
                fix = ""
                if domain.kind in ("uniform", "log") and "whole number" in str(error):
                    kind = "int" if domain.kind == "uniform" else "logint"
                    fix = f": use {kind}({domain.low:g},{domain.high:g})"
                raise UsageError(f"{shown}: {error}{fix}") from None
        if not key.startswith(SEARCHED):
            raise UsageError(f"{shown}: trials that differ in {key} cannot be compared; search one of {_sections()}")
        if scheduler == "pbt" and not key.startswith("algorithm."):
            raise UsageError(f"{shown}: pbt changes settings on the way, and {key} is fixed: search algorithm.* alone")


def _sections() -> str:
    return ", ".join(f"{name}*" for name in SEARCHED)


def _resolved(config: Config, values: Mapping[str, Any]) -> Config:
    return resolve({"preset": "none"}, config.to_dict(), config_settings.nested(values))[0]


def _require_one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"--{what} {value!r} is not one of: {', '.join(allowed)}{nearest(value, allowed)}")


def _count(space: Space, trials: Any, scheduler: str) -> int:
    least = 4 if scheduler == "pbt" else 1
    usual = POPULATION if scheduler == "pbt" else USUAL
    kind = config_settings.Range(least, LARGEST)
    count = usual if trials is None else config_settings._scalar(trials, int, kind, "--trials")
    if scheduler != "grid":
        return int(count)
    for domain in space.values():
        if not domain.finite:
            gridded(space)
    size = grid_size(space)
    if size > LARGEST:
        raise UsageError(f"the grid has {size:,} points, and at most {LARGEST:,} are tried: fewer values, or random")
    if trials is not None and count != size:
        raise UsageError(f"--trials {count}, but the grid has {size} points: leave --trials out, or use random")
    return size


def _amount(value: Any, name: str, least: float) -> float:
    return float(config_settings._scalar(value, float, config_settings.Range(least, 1e6), name))


def require_room(plan: Plan, have: float, count: int, where: str = "this machine") -> None:
    """Refuse trials that would wait for ever."""
    if plan.cpus > have:
        asks = f"a trial asks for {amount(plan.cpus, 'CPU')}, and {where} has {have:g}"
        raise UsageError(f"{asks}: lower --cpus, or --samplers and --envs of --runtime process")
    at_once = min(count, int(have / plan.cpus + 1e-6))
    each, free = MEGABYTES["ray"] + TORCH_MEGABYTES, available_bytes()
    if where == "this machine" and free is not None and at_once * each > free / 1e6:
        fits = int(free / 1e6 / each)
        need = f"{at_once} trials at once need about {at_once * each / 1e3:.1f} GB, {free / 1e9:.1f} GB are free"
        fix = f"--cpus {have / fits:.2g} runs {fits} at once" if fits else "free some memory"
        raise UsageError(f"{need}: {fix}")


def require_gpus(plan: Plan, have: float, where: str = "this machine") -> None:
    if plan.gpus > have:
        asks = f"a trial asks for {amount(plan.gpus, 'GPU')}, and {where} has {have:g}"
        raise UsageError(f"{asks}: lower --gpus, or --set learner.device=cpu")


def _require_own_gpus(plan: Plan) -> None:
    """Before a Ray is started here; what cannot be known without it is asked of it later."""
    if plan.gpus and (have := gpus_here()) is not None:
        require_gpus(plan, have)


def _starts_own(address: str | None) -> bool:
    return (address or os.environ.get("RAY_ADDRESS") or "local") == "local" and not _in_use()


def _in_use() -> bool:
    ray: Any = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _new_folder(config: Config, out: str | Path | None, go_on: bool = False) -> Path:
    try:
        if out is None:
            path = Path(str(fresh_name(config)).replace("-seed", "-tune", 1))
            path.parent.mkdir(parents=True, exist_ok=True)
            return disk.numbered(path)
        if is_url(str(out)):
            raise UsageError(f"--out {out}: a search is kept in a folder that all its nodes see, not at a URL")
        path = Path(out).expanduser()
        if (path / "tune.json").exists():
            raise UsageError(f"{out} is a search already: go on with raynforce tune --resume {out}, or name another")
        if go_on and path.is_dir() and {name for name in os.listdir(path) if name[0] != "."} <= {BASE, TRIALS}:
            return path  # a kill came while it was begun
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{out} is there already: name a new directory")
        path.mkdir(parents=True, exist_ok=True)
        return path
    except OSError as error:
        raise UsageError(f"cannot write to output directory {out or 'runs'}: {error.strerror}") from None


# -- from the directory to its end --------------------------------------------------------------------------


def _search(study: Study, given: bytes, address: str | None, view: TuneView, began: float) -> Tuned:
    plan = study.plan
    if not given and any(is_given(name) for name in (plan.env, plan.algorithm)):
        name = bare(plan.env if is_given(plan.env) else plan.algorithm)
        raise UsageError(f"{name!r} was defined in a script, which a resume does not know: move it into a module")
    base, _ = settings_of(study.path / BASE)
    stop = StopRequest(lambda: view.message("stopping all trials, with checkpoints; press Ctrl-C again to end at once"))
    wait_until_free(RunDirectory(study.path))  # whoever had it may have gone with its machine
    with lock.locked(study.path), stop.watching():
        left = plan.trials - sum(trial.over for trial in study.trials)
        times = f"{plan.trials} trials" if left == plan.trials else f"{left} of {plan.trials} trials left"
        seeds = f"{len(plan.seeds)} seeds each" if len(plan.seeds) > 1 else "one seed each"
        view.message(f"{bare(plan.algorithm)} on {bare(plan.env)}: {times}, {seeds}, by {plan.scheduler}")
        view.message(f"search: {', '.join(f'{key}={domain}' for key, domain in plan.search.items())}")
        with _closing(view):
            tuned = _on_ray(study, base, given, address, view, stop, began) if left else finish(study, base, began)
    if stop.number is not None:
        raise InterruptedTune(tuned, stop.number)
    if tuned.trials and len(tuned.failed) == len(tuned.trials):
        raise RaynforceError(f"all trials failed; the first: {tuned.failed[0].cause}")
    return tuned


@contextlib.contextmanager
def _closing(view: TuneView) -> Iterator[None]:
    try:
        yield
    finally:
        view.stop()


def _on_ray(
    study: Study,
    base: Mapping[str, Any],
    given: bytes,
    address: str | None,
    view: TuneView,
    stop: StopRequest,
    began: float,
) -> Tuned:
    from raynforce.runtimes.ray.connecting import connect
    from raynforce.runtimes.ray.private import ray_module
    from raynforce.runtimes.ray.state import environment

    plan, own = study.plan, _starts_own(address)
    config, _ = resolve({"preset": "none"}, base)
    asks = replace(config.ray, address=address, sampler_cpus=float(cores()) if own else 0.0, learner_cpus=0.0)
    asks = replace(asks, sampler_resources={}, learner_resources={}, learner_gpus=0.0)
    plain = replace(
        config,
        runtime="ray",
        ray=asks,
        sampling=replace(config.sampling, samplers=1),
        learner=replace(config.learner, device="cpu"),
    )
    if own:
        _require_own_gpus(plan)
    with environment(AHEAD if own else {}):
        cluster = connect(plain, view.message)
    try:
        try:
            from raynforce.ops.tuning import running
            from raynforce.ops.tuning.trainable import Work, search_path
        except ImportError as error:
            raise UsageError(f"{TUNE_NEEDED} ({error})") from error
        left = plan.trials - sum(trial.over for trial in study.trials)
        nodes = [node["Resources"] for node in ray_module().nodes() if node["Alive"]]
        most = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        if not cluster.grows:
            require_room(plan, most, left, "this machine" if own else "the largest node of the cluster")
            most = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
            require_gpus(plan, most, "this machine" if own else "the largest node of the cluster")
        if len(nodes) > 1 and (blind := running.nodes_without(study.path.resolve() / PLAN)):
            fix = "a search is kept in a folder that all nodes see (NFS, a PVC): give one with --out"
            raise UsageError(f"{study.path.resolve()} is not seen by {_several(blind)}: {fix}")
        at_once = sum(int(node.get("CPU", 0.0) / plan.cpus + 1e-6) for node in nodes)
        view.message(f"{min(at_once, left)} trials at a time, {amount(plan.cpus, 'CPU')} each")
        path = () if cluster.shipped else search_path()
        work = Work(plan, base, str(study.path.resolve()), path, given)
        storage = study.path.resolve() / ".tune" if cluster.folder is None else cluster.folder / "tune"
        running.run(study, work, view, stop, storage, at_once, ready=own)
    except BaseException:
        cluster.close(now=True)
        raise
    with ThreadPoolExecutor(1) as beside:  # what was found is written while Ray ends
        written = beside.submit(finish, study, base, began)
        cluster.close()
    return written.result()


def _several(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    return f"node{'s' * (len(nodes) > 1)} {shown}"


def finish(study: Study, base: Mapping[str, Any], began: float) -> Tuned:
    """Write what was found: `best.yaml`, `importance.json` and `tune.png`."""
    import json

    plan, best = study.plan, study.best()
    shares, method = importance(plan, study.trials)
    picture = None
    if best is not None:
        head = f"# The best of {plan.trials} trials by {plan.scheduler}: trial {best.id}.\n"
        if best.history:
            head += "# PBT changed these settings on the way: its policy is in the trial's own run.\n"
        config = resolve({"preset": "none"}, base, config_settings.nested(best.config))[0]
        write(study.path / "best.yaml", head + config.to_yaml())
        write(study.path / "importance.json", json.dumps(shares, indent=1))
        picture = draw(study)
    return Tuned(study.path, plan, study.trials, best, shares, method, time.monotonic() - began, picture)
