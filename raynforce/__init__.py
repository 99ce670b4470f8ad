"""Raynforce: reinforcement learning that is fast on a laptop and reads like a textbook.

run = raynforce.train("CartPole-v1", algo="ppo", target=475)
action = raynforce.load(run.path).act(observation)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # as themselves, so that they are exported
    # isort: off
    from raynforce import sinks as sinks, statistics as statistics
    from raynforce.algos.base import Algorithm as Algorithm, Loss as Loss
    from raynforce.algos.off_policy import OffPolicy as OffPolicy, OffPolicyConfig as OffPolicyConfig
    from raynforce.api import Evaluated as Evaluated, Imported as Imported, Interrupted as Interrupted, Run as Run
    from raynforce.api import evaluate as evaluate, import_rllib as import_rllib, resume as resume, train as train
    from raynforce.charts.plotting import plot as plot
    from raynforce.charts.report import report as report
    from raynforce.charts.table import export_metrics as export_metrics
    from raynforce.client import Client as Client
    from raynforce.config import AlgorithmConfig as AlgorithmConfig, Config as Config
    from raynforce.demonstrations import Recorded as Recorded, record as record
    from raynforce.driver.status import Callback as Callback, Result as Result, Status as Status
    from raynforce.engines.rllib.exporting import export_rllib as export_rllib
    from raynforce.envs.simulator_envs import simulator as simulator
    from raynforce.envs.snapshots import Snapshot as Snapshot, register_snapshot as register_snapshot
    from raynforce.errors import RaynforceError as RaynforceError, UsageError as UsageError
    from raynforce.experience.replay_spec import ReplaySpec as ReplaySpec
    from raynforce.ops.jobs import Job as Job, jobs as jobs, submit as submit
    from raynforce.ops.serving.service import Service as Service, serve as serve
    from raynforce.ops import cluster as cluster
    from raynforce.ops.exporting import Exported as Exported, export as export
    from raynforce.ops.pipeline import Pipelined as Pipelined, pipeline as pipeline
    from raynforce.ops.registry import (
        Registry as Registry,
        promote as promote,
        registry as registry,
        rollback as rollback,
    )
    from raynforce.ops.tuning.own import trainable as trainable
    from raynforce.ops.tuning.tuner import InterruptedTune as InterruptedTune, Tuned as Tuned, tune as tune
    from raynforce.policies.groups import Group as Group
    from raynforce.policy import Policy as Policy, load as load
    from raynforce.runs.metrics import Sink as Sink
    from raynforce.seeds import InterruptedSeeds as InterruptedSeeds, Seeds as Seeds, train_seeds as train_seeds
    from raynforce.web.watching import watch as watch
    # isort: on

# Names are fetched at first use: importing raynforce costs nothing, and using a policy imports no torch.
_HOMES = {
    "raynforce.algos.base": ("Algorithm", "Loss"),
    "raynforce.algos.off_policy": ("OffPolicy", "OffPolicyConfig"),
    "raynforce.api": ("Evaluated", "Imported", "Interrupted", "Run", "evaluate", "import_rllib", "resume", "train"),
    "raynforce.seeds": ("InterruptedSeeds", "Seeds", "train_seeds"),
    "raynforce.charts.plotting": ("plot",),
    "raynforce.charts.report": ("report",),
    "raynforce.charts.table": ("export_metrics",),
    "raynforce.client": ("Client",),
    "raynforce.config": ("AlgorithmConfig", "Config"),
    "raynforce.demonstrations": ("Recorded", "record"),
    "raynforce.engines.rllib.exporting": ("export_rllib",),
    "raynforce.envs.simulator_envs": ("simulator",),
    "raynforce.envs.snapshots": ("Snapshot", "register_snapshot"),
    "raynforce.errors": ("RaynforceError", "UsageError"),
    "raynforce.experience.replay_spec": ("ReplaySpec",),
    "raynforce.ops.exporting": ("Exported", "export"),
    "raynforce.ops.jobs": ("Job", "jobs", "submit"),
    "raynforce.ops.pipeline": ("Pipelined", "pipeline"),
    "raynforce.ops.registry": ("Registry", "promote", "registry", "rollback"),
    "raynforce.ops.tuning.own": ("trainable",),
    "raynforce.ops.tuning.tuner": ("InterruptedTune", "Tuned", "tune"),
    "raynforce.ops.serving.service": ("Service", "serve"),
    "raynforce.policies.groups": ("Group",),
    "raynforce.policy": ("Policy", "load"),
    "raynforce.runs.metrics": ("Sink",),
    "raynforce.driver.status": ("Callback", "Result", "Status"),
    "raynforce.web.watching": ("watch",),
}
_WHERE = {name: module for module, names in _HOMES.items() for name in names}
_DEPLOYED = ("raynforce.policy", "raynforce.client")  # they leave the environment as it is
_MODULES = {"cluster": "raynforce.ops.cluster", "sinks": "raynforce.sinks", "statistics": "raynforce.statistics"}
__all__ = ["__version__", *_MODULES, *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _WHERE:
        raise AttributeError(f"module 'raynforce' has no attribute {name!r}")
    if _WHERE[name] not in _DEPLOYED:
        importlib.import_module("raynforce.kernels").pin()  # before numpy is loaded, if nobody has done so
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
