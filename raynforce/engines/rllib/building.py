"""RLlib's objects from a translated experiment, and the way between its module and our policy versions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from ray.rllib.connectors import env_to_module
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES

from raynforce.config import Config
from raynforce.engines.rllib.filters import normalizer_from, normalizer_to
from raynforce.engines.rllib.modules import Conversion, convert_or_keep
from raynforce.engines.rllib.names import MODULE
from raynforce.engines.rllib.runner import News, RunnerEnv, RunnerSimulators, context, image_space
from raynforce.engines.rllib.translation import Translation
from raynforce.envs.launching import is_simulator
from raynforce.envs.make import close_env
from raynforce.envs.simulator_envs import gym_spaces
from raynforce.errors import UsageError, nearest, summary
from raynforce.policies.acting import PolicyVersion
from raynforce.spaces import EnvSpec

FILTER = "MeanStdFilter"


@dataclass
class Built:
    """RLlib's config, a module of its kind, and how that is a policy of ours."""

    config: Any
    module: Any
    conversion: Conversion
    notes: list[str]

    def read(self, algo: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Parameters, and shift and scale of the normaliser if there is one."""
        module = self._learners(algo)
        if module is None:
            module = self.module
            module.set_state(algo.learner_group.get_weights()[MODULE])
        params = self.conversion.params(module)
        if not self.conversion.acting.network.normalizes:
            return params, None, None
        state = _filter_state(algo.env_runner)
        if not state:
            width = self.conversion.acting.network.input_width
            return params, np.zeros(width, np.float32), np.ones(width, np.float32)
        shift, scale, _ = normalizer_from(state)
        return params, shift, scale

    def write(self, algo: Any, version: PolicyVersion, seen: int) -> None:
        """Let RLlib go on with weights and normaliser of ours, in learner, target networks and env runners."""
        module = self._learners(algo)
        if module is not None:
            self.conversion.load(module, version.params)
        else:
            self.conversion.load(self.module, version.params)
            algo.learner_group.set_state({"learner": {"rl_module": {MODULE: self.module.get_state()}}})
        algo.env_runner_group.sync_weights(from_worker_or_learner_group=algo.learner_group, inference_only=True)
        if version.shift is not None and version.scale is not None:
            shape = self.module.observation_space.shape
            state = normalizer_to(version.shift, version.scale, seen, shape)
            algo.env_runner_group.foreach_env_runner(partial(_set_filter, state=state), local_env_runner=True)

    def _learners(self, algo: Any) -> Any:
        """The learner's own module, if that is in this process."""
        group = algo.learner_group
        return group._learner.module[MODULE] if group.is_local else None


def build(found: Translation, config: Config, env: EnvSpec, packed: bytes) -> Built:
    """RLlib's config and module, without starting anything."""
    seen, act = _env_spaces(config, env, packed, found)
    if found.algorithm.learns == "data":  # no env runner tells it
        spaces = {"observation_space": seen, "action_space": act}
        found.calls["environment"] = {**spaces, **found.calls["environment"]}
    made = algorithm_config(found, config, packed)
    single = {INPUT_ENV_SINGLE_SPACES: (seen, act), INPUT_ENV_SPACES: (seen, act)}
    try:
        pipeline = made.build_env_to_module_connector(spaces=single)
        spec = made.get_rl_module_spec(
            spaces={**single, MODULE: (pipeline.observation_space, act)}, inference_only=False
        )
        module = spec.build()
    except Exception as error:
        raise UsageError(f"RLlib cannot make a network for env {config.env!r}: {summary(error)}") from error
    conversion = convert_or_keep(module, env, normalize=FILTER in found.connectors)
    notes = []
    if conversion.kept:
        notes.append(f"this policy needs torch and RLlib wherever it acts, because {conversion.kept}")
    return Built(made, module, conversion, notes)


def algorithm_config(found: Translation, config: Config, packed: bytes) -> Any:
    """The translated experiment as an `AlgorithmConfig`."""
    kind = found.algorithm
    made = getattr(import_module(f"ray.rllib.algorithms.{kind.module}"), kind.config_class)()
    calls = {section: dict(arguments) for section, arguments in found.calls.items()}
    calls["environment"]["env"] = RunnerSimulators if is_simulator(config.env) else RunnerEnv
    images = bool(found.model.get("conv_filters"))
    calls["environment"]["env_config"] = context(config, packed, images)
    runners = calls["env_runners"]
    if found.connectors:
        runners["env_to_module_connector"] = partial(_connectors, tuple(found.connectors))
    model = calls["rl_module"]["model_config"]
    unknown = [name for name in model if name not in DefaultModelConfig.__dataclass_fields__]
    if unknown:
        hint = nearest(unknown[0], DefaultModelConfig.__dataclass_fields__)
        raise UsageError(f"rllib.rl_module.model_config.{unknown[0]} is unknown to RLlib{hint}")
    calls["rl_module"]["model_config"] = DefaultModelConfig(**model)
    calls["debugging"]["log_level"] = "ERROR"
    for section, arguments in calls.items():
        allowed = arguments_of(type(made), section)
        for name in arguments:
            if name not in allowed:
                hint = nearest(name, allowed)
                raise UsageError(f"rllib.{section}.{name}: {kind.config_class}.{section} has no such argument{hint}")
        try:
            getattr(made, section)(**arguments)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UsageError(f"RLlib refuses rllib.{section}: {_reason(error)}") from error
    made.callbacks(News)
    try:
        made.validate()
    except Exception as error:
        raise UsageError(f"RLlib refuses this config: {_reason(error)}") from error
    return made


def arguments_of(kind: type, section: str) -> list[str]:
    """What a method of RLlib's config takes; each class passes what it does not know on to the one above it."""
    methods = [vars(one)[section] for one in kind.__mro__ if section in vars(one)]
    every = [one for method in methods for one in inspect.signature(method).parameters.values()]
    return list(dict.fromkeys(one.name for one in every if one.kind is not one.VAR_KEYWORD and one.name != "self"))


def _reason(error: BaseException) -> str:
    """What RLlib says, without its advice on how to silence it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__


def _connectors(names: tuple[str, ...], env: Any = None, spaces: Any = None, device: Any = None) -> list[Any]:
    return [getattr(env_to_module, name)() for name in names]


def _env_spaces(config: Config, env: EnvSpec, packed: bytes, found: Translation) -> tuple[Any, Any]:
    if is_simulator(config.env):
        seen, act = gym_spaces(env)
        return (seen if found.image is None else image_space(found.image)), act
    made = RunnerEnv(context(config, packed, bool(found.model.get("conv_filters"))))
    seen, act = made.observation_space, made.action_space
    close_env(made)
    return seen, act


def _filter_of(runner: Any) -> Any:
    pipeline = None if runner is None else runner._env_to_module
    return next((one for one in getattr(pipeline, "connectors", ()) if type(one).__name__ == FILTER), None)


def _filter_state(runner: Any) -> Mapping[Any, Any] | None:
    found = _filter_of(runner)
    state: Mapping[Any, Any] | None = None if found is None else found.get_state()
    return state


def _set_filter(runner: Any, state: Mapping[Any, Any]) -> None:
    if (found := _filter_of(runner)) is not None:
        found.set_state(state)
