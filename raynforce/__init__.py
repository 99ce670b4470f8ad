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
    from raynforce import sinks as sinks
    from raynforce.algos.base import Algorithm as Algorithm, Loss as Loss
    from raynforce.algos.off_policy import OffPolicy as OffPolicy, OffPolicyConfig as OffPolicyConfig
    from raynforce.api import Evaluated as Evaluated, Interrupted as Interrupted, Run as Run
    from raynforce.api import evaluate as evaluate, resume as resume, train as train
    from raynforce.config import AlgorithmConfig as AlgorithmConfig, Config as Config
    from raynforce.driver.status import Callback as Callback, Result as Result, Status as Status
    from raynforce.envs.simulator_envs import simulator as simulator
    from raynforce.envs.snapshots import Snapshot as Snapshot, register_snapshot as register_snapshot
    from raynforce.errors import RaynforceError as RaynforceError, UsageError as UsageError
    from raynforce.experience.replay_spec import ReplaySpec as ReplaySpec
    from raynforce.policies.groups import Group as Group
    from raynforce.policy import Policy as Policy, load as load
    from raynforce.runs.metrics import Sink as Sink
    from raynforce.seeds import InterruptedSeeds as InterruptedSeeds, Seeds as Seeds, train_seeds as train_seeds
    # isort: on

# Names are fetched at first use: importing raynforce costs nothing, and using a policy imports no torch.
_HOMES = {
    "raynforce.algos.base": ("Algorithm", "Loss"),
    "raynforce.algos.off_policy": ("OffPolicy", "OffPolicyConfig"),
    "raynforce.api": ("Evaluated", "Interrupted", "Run", "evaluate", "resume", "train"),
    "raynforce.seeds": ("InterruptedSeeds", "Seeds", "train_seeds"),
    "raynforce.config": ("AlgorithmConfig", "Config"),
    "raynforce.envs.simulator_envs": ("simulator",),
    "raynforce.envs.snapshots": ("Snapshot", "register_snapshot"),
    "raynforce.errors": ("RaynforceError", "UsageError"),
    "raynforce.experience.replay_spec": ("ReplaySpec",),
    "raynforce.policies.groups": ("Group",),
    "raynforce.policy": ("Policy", "load"),
    "raynforce.runs.metrics": ("Sink",),
    "raynforce.driver.status": ("Callback", "Result", "Status"),
}
_WHERE = {name: module for module, names in _HOMES.items() for name in names}
__all__ = ["__version__", "sinks", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name == "sinks":
        return importlib.import_module("raynforce.sinks")
    if name not in _WHERE:
        raise AttributeError(f"module 'raynforce' has no attribute {name!r}")
    if _WHERE[name] != "raynforce.policy":  # a deployed policy leaves the environment as it is
        importlib.import_module("raynforce.kernels").pin()  # before numpy is loaded, if nobody has done so
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
