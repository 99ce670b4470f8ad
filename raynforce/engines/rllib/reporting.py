"""RLlib's results as what our reports are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce import infos
from raynforce.engines.rllib.names import EPISODES, FAULTS, MODULE
from raynforce.experience.counts import Record
from raynforce.settings import finite

LOSSES = {
    "policy_loss": ("policy_loss", "mean_pi_loss"),
    "value_loss": ("vf_loss_unclipped", "mean_vf_loss", "vf_loss"),
    "entropy": ("entropy",),
    "approx_kl": ("mean_kl_loss",),
    "td_loss": ("qf_loss",),
    "td_error": ("td_error_mean",),
    "q_values": ("qf_mean",),
    "alpha": ("alpha_value",),
    "total_loss": ("total_loss",),
}
"""Our names of what is reported under `losses/`, and RLlib's, the first that there is."""
RATES = ("default_optimizer_learning_rate", "policy_learning_rate", "actor_learning_rate")
SAMPLED, TRAINED = "num_env_steps_sampled_lifetime", "num_module_steps_trained_lifetime"
LEFT_OUT = ("config", "timers/connectors", "_throughput", EPISODES, FAULTS)


class News(NamedTuple):
    """What one call of `Algorithm.train` gave."""

    record: Record
    updates: int
    metrics: dict[str, float]
    schedules: dict[str, float]
    faults: Sequence[Mapping[str, Any]]
    sampling: float | None  # share of the time that was spent on sampling; None where both go on at once
    dropped: int  # env runners whose work was dropped so far


class Reader:
    """Reads results one after another: RLlib counts over the whole run, we by rounds."""

    def __init__(self, steps: str = SAMPLED) -> None:
        self._steps = steps  # what counts as a step of the run
        self.sampled = 0  # steps of the run, by RLlib's count
        self._trained = 0.0

    def read(self, result: Mapping[str, Any], sequence: int) -> News:
        runners, learner = result.get("env_runners") or {}, (result.get("learners") or {}).get(MODULE) or {}
        steps = learner.get(TRAINED) if self._steps == TRAINED else result.get(SAMPLED)
        before, self.sampled = self.sampled, int(_number(steps) or self.sampled)
        episodes = _items(runners.get(EPISODES))
        returns = np.array([total for total, _, _ in episodes], np.float32)
        lengths = np.array([length for _, length, _ in episodes], np.int64)
        told = infos.values([info for _, _, info in episodes])
        record = Record(0, sequence, max(0, self.sampled - before), returns, lengths, told)
        rate = next((found for name in RATES if (found := _number(learner.get(name))) is not None), None)
        health = result.get("fault_tolerance") or {}
        return News(
            record,
            self._updates(learner),
            dict(_metrics(result, learner)),
            {} if rate is None else {"learning_rate": rate},
            [json.loads(one) for one in _items(runners.get(FAULTS))],
            _sampling(result.get("timers") or {}),
            int(_number(health.get("num_env_runners_dropped_lifetime")) or 0),
        )

    def go_on(self, sampled: int, trained: float) -> None:
        """What RLlib had counted at the checkpoint that it goes on from."""
        self.sampled, self._trained = sampled, trained

    @property
    def trained(self) -> float:
        return self._trained

    def _updates(self, learner: Mapping[str, Any]) -> int:
        """Optimiser steps since the last result: samples learned from, divided by the size of a minibatch."""
        size = _number(learner.get("module_train_batch_size_mean"))
        before, trained = self._trained, _number(learner.get(TRAINED))
        if not size or trained is None:
            return 0
        self._trained = trained
        return round(max(0.0, trained - before) / size)


def _metrics(result: Mapping[str, Any], learner: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for ours, theirs in LOSSES.items():
        for name in theirs:
            if (value := _number(learner.get(name))) is not None:
                yield f"losses/{ours}", value
                break
    for section in ("env_runners", "learners", "timers", "fault_tolerance"):
        yield from _flat(result.get(section) or {}, f"rllib/{section}")


def _flat(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """All finite numbers, by RLlib's names; not the times of single connectors."""
    for key, value in tree.items():
        name = f"{path}/{key}"
        if any(part in name for part in LEFT_OUT):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        elif (number := _number(value)) is not None:
            yield name, number


def _items(value: Any) -> list[Any]:
    """What was logged as a series: of one item RLlib gives that alone, and NaN where nothing was."""
    several = value if isinstance(value, list) else [value]
    return [one for one in several if isinstance(one, tuple | str)]


def _number(value: Any) -> float | None:
    return None if isinstance(value, str | bytes) else finite(value)


def _sampling(timers: Mapping[str, Any]) -> float | None:
    step, sampling = _number(timers.get("training_step")), _number(timers.get("env_runner_sampling_timer"))
    return None if not step or sampling is None else min(1.0, sampling / step)
