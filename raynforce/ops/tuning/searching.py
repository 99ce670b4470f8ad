"""Who says what is tried next: drawn at random, all of a grid, or proposed by Optuna's TPE (Bergstra et al. 2011)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raynforce.errors import UsageError
from raynforce.ops.tuning.space import Domain, Space
from raynforce.ops.tuning.study import Plan, Trial

TRIES = 100  # drawings until one makes sense


def drawn(space: Space, count: int, seed: int, allowed: Callable[[Mapping[str, Any]], object]) -> list[dict[str, Any]]:
    """So many settings, each drawn from the whole space; those that do not go together are drawn again."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        for attempt in range(TRIES):
            values = {key: domain.sample(rng) for key, domain in space.items()}
            try:
                allowed(values)
            except UsageError:
                if attempt == TRIES - 1:
                    raise
                continue
            found.append(values)
            break
    return found


def gridded(space: Space) -> list[dict[str, Any]]:
    """Every combination."""
    for key, domain in space.items():
        if not domain.finite:
            fix = f"{domain.kind}({domain.low:g},{domain.high:g},STEP)" if domain.kind == "uniform" else "choice(...)"
            raise UsageError(f"--search {key}={domain}: a grid needs single values; write {fix}")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*(d.grid() for d in space.values()))]


def grid_size(space: Space) -> int:
    return math.prod(domain.size() for domain in space.values())


def require_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("--scheduler optuna needs Optuna: pip install 'raynforce[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distribution(domain: Domain) -> Any:
    """As Optuna has it; choices by their place, as it knows plain values alone."""
    kinds = require_optuna().distributions
    if domain.kind == "choice":
        return kinds.CategoricalDistribution(range(domain.size()))
    if domain.whole:
        return kinds.IntDistribution(
            int(domain.low), int(domain.high), log=domain.logarithmic, step=int(domain.step or 1)
        )
    return kinds.FloatDistribution(domain.low, domain.high, log=domain.logarithmic, step=domain.step)


def to_optuna(space: Space, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, domain in space.items():
        value = config[key]
        if domain.kind == "choice":
            value = domain.grid().index(list(value) if isinstance(value, tuple) else value)
        found[key] = value
    return found


def frozen(plan: Plan, trial: Trial) -> Any:
    """A trial that is over, as Optuna remembers it; None if it has no figure."""
    optuna = require_optuna()
    merit = trial.merit(plan)
    if merit is None or trial.status == "failed":
        return None
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        params=to_optuna(plan.search, trial.config),
        distributions={key: distribution(domain) for key, domain in plan.search.items()},
        value=merit,
        state=states.PRUNED if trial.status == "stopped" else states.COMPLETE,
        intermediate_values=dict(trial.merits),
    )


class TPE:
    """Proposes what is tried next by what was found so far."""

    def __init__(self, plan: Plan, known: list[Trial]) -> None:
        optuna = require_optuna()
        self._plan = plan
        self._space = {key: distribution(domain) for key, domain in plan.search.items()}
        sampler = optuna.samplers.TPESampler(seed=plan.seed + len(known))
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in known:
            self.learn(trial)

    def propose(self) -> dict[str, Any]:
        params = self._study.ask(self._space).params
        found = {}
        for key, domain in self._plan.search.items():
            found[key] = domain.grid()[params[key]] if domain.kind == "choice" else domain.clip(params[key])
        return found

    def learn(self, trial: Trial) -> None:
        if trial.over and (past := frozen(self._plan, trial)) is not None:
            self._study.add_trial(past)
