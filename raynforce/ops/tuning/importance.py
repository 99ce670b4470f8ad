"""How much each setting matters, by what the trials have shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raynforce.ops.tuning.searching import frozen, require_optuna
from raynforce.ops.tuning.study import Plan, Trial

FEWEST = 4  # trials, below which nothing can be said


def importance(plan: Plan, trials: Sequence[Trial]) -> tuple[dict[str, float], str]:
    """The share of each setting, the largest first, and how it was found.

    By Optuna's PED-ANOVA (2304.10255), which asks how different the settings of good trials are from all; without
    Optuna by the squares of rank correlations, which see trends that go one way alone.
    """
    known = [trial for trial in trials if trial.status in ("done", "stopped") and trial.merit(plan) is not None]
    keys = [key for key in plan.search if len({str(trial.config[key]) for trial in known}) > 1]
    if len(known) < FEWEST or len({trial.merit(plan) for trial in known}) < 2 or not keys:
        return {}, "too few trials to tell"
    try:
        found, method = _ped_anova(plan, known, keys), "PED-ANOVA"
    except Exception:  # Optuna is not there, or has too little to work with
        found, method = _correlations(plan, known, keys), "rank correlation"
    total = sum(found.values())
    if not total > 0:
        found, method = _correlations(plan, known, keys), "rank correlation"
        total = sum(found.values()) or 1.0
    ranked = sorted(found.items(), key=lambda item: -item[1])
    return {key: round(value / total, 4) for key, value in ranked}, method


def _ped_anova(plan: Plan, known: Sequence[Trial], keys: Sequence[str]) -> dict[str, float]:
    import warnings
    from dataclasses import replace

    optuna = require_optuna()
    study = optuna.create_study(direction="maximize")
    for trial in known:
        study.add_trial(frozen(plan, replace(trial, status="done")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called experimental
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, params=list(keys), normalize=False)
    return {key: float(value) for key, value in found.items()}


def _correlations(plan: Plan, known: Sequence[Trial], keys: Sequence[str]) -> dict[str, float]:
    merits = _ranks([trial.merit(plan) or 0.0 for trial in known])
    found = {}
    for key in keys:
        places = _ranks([plan.search[key].position(trial.config[key]) for trial in known])
        found[key] = float(np.corrcoef(places, merits)[0, 1]) ** 2 if places.std() and merits.std() else 0.0
    return found


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Places in order, equal values sharing theirs."""
    array = np.asarray(values, float)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])
