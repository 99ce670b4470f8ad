"""Reads a checkpoint that RLlib wrote without us: it holds pickles, so this runs as a process of its own.

`python -m raynforce.engines.rllib.foreign DIR ENV ANSWER` writes `answer.json` and arrays into the folder ANSWER.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from raynforce import given, settings
from raynforce.config import Config
from raynforce.engines.rllib.algorithms import OTHERS, OURS, Known, described
from raynforce.engines.rllib.building import FILTER, arguments_of, build
from raynforce.engines.rllib.filters import normalizer_from
from raynforce.engines.rllib.modules import CannotConvert, Conversion, convert_or_keep, inputs_of
from raynforce.engines.rllib.names import MODULE, quiet
from raynforce.engines.rllib.translation import ROWS, Row, translate
from raynforce.envs.describe import describe
from raynforce.envs.vector import probe
from raynforce.errors import RaynforceError, UsageError, summary
from raynforce.runs.fitting import differences
from raynforce.spaces import EnvSpec

RL_MODULE = Path("learner_group/learner/rl_module")
CONNECTORS = ("env_to_module_connector", "module_to_env_connector")
PLAIN = {"AddObservationsFromEpisodesToBatch", "AddStatesFromEpisodesToBatch", "AddTimeDimToBatchAndZeroPad"}
PLAIN |= {"AgentToModuleMapping", "BatchIndividualItems", "NumpyToTensor", "FlattenObservations", FILTER}
PLAIN |= {"GetActions", "ListifyDataForVectorEnv", "ModuleToAgentUnmapping", "NormalizeAndClipActions"}
PLAIN |= {"RemoveSingleTsTimeRankFromBatch", "TensorToNumpy", "UnBatchToIndividualItems"}
"""Connectors that every algorithm has, or that are parts of our policies."""
MACHINE = {"model", "learner_class", "learner_connector", "learner_config_dict", "optimizer"}
"""Arguments of `training` that are code, or belong to the old API stack."""


class Trained(NamedTuple):
    """What RLlib had counted."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    samples: float = 0.0  # that were learned from
    episode_return: float | None = None


class Checkpoint:
    """A directory of RLlib's, read with pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        made = _unpickled(folder / "class_and_ctor_args.pkl")
        self.alone = issubclass(made["class"], RLModule)  # a module without its algorithm
        self._modules = folder if self.alone else folder / RL_MODULE
        self.config: Any = None
        if not self.alone:
            self.config = AlgorithmConfig.from_state(made["ctor_args_and_kwargs"][0][0])
            if not self.config.enable_rl_module_and_learner:
                raise UsageError(f"{folder} is of RLlib's old API stack, which Ray 2.60 trains no more")
        self.kind = self._kind(made["class"])

    def module(self) -> Any:
        """Its one module."""
        below = sorted(path.parent for path in self._modules.glob("*/class_and_ctor_args.pkl"))
        if len(below) > 1:
            names = ", ".join(path.name for path in below)
            raise UsageError(f"{self.folder} has {len(below)} modules ({names}); policies here are of one agent")
        if not self.alone and (not below or below[0].name != MODULE):
            raise UsageError(f"{self.folder} has no module {MODULE!r}: policies here are of one agent")
        return RLModule.from_checkpoint(below[0] if below else self._modules)

    def _kind(self, made: type) -> Known:
        every = [*OURS.values(), *OTHERS.values()]
        names = [one.__name__ for one in made.__mro__]
        if self.alone:  # `ray.rllib.algorithms.ppo.torch.…`
            names = [one.__module__.removeprefix("ray.rllib.algorithms.").partition(".")[0] for one in made.__mro__]
            every = [kind for kind in every if kind.module in names]
        found = next((kind for name in names for kind in every if name in (kind.name, kind.module)), None)
        if found is None:
            what = "module of your own without its algorithm: give" if self.alone else "algorithm of your own: give"
            raise UsageError(f"{made.__qualname__} is a {what} what Algorithm.save_to_path wrote of one of RLlib's")
        return found

    def pipelines(self) -> Iterator[Any]:
        for where in () if self.alone else (self.folder / "env_runner", self.folder):
            yield from (ConnectorPipelineV2.from_checkpoint(where / n) for n in CONNECTORS if (where / n).is_dir())

    def trained(self) -> Trained:
        if self.alone:
            return Trained()
        state = _state(self.folder / "algorithm_state")
        metrics = MetricsLogger(root=True)
        metrics.set_state(state["metrics_logger"])

        def counted(*path: str) -> float:
            try:
                value = float(metrics.peek(path, default=0))
            except (KeyError, TypeError, ValueError):
                return 0.0
            return value if math.isfinite(value) else 0.0

        steps, episodes = (
            int(counted("env_runners", f"num_{what}_lifetime")) for what in ("env_steps_sampled", "episodes")
        )
        samples = counted("learners", MODULE, "num_module_steps_trained_lifetime")
        mean = counted("env_runners", "episode_return_mean")
        return Trained(int(state["training_iteration"]), steps, episodes, samples, mean or None)


def read(folder: Path, env: str, answer: Path) -> dict[str, Any]:
    """The policy and the experiment as plain data; arrays go into files."""
    saved = Checkpoint(folder)
    name, args = _environment(saved, env)
    spec = probe(name, args)
    module, pipelines = saved.module(), list(saved.pipelines())
    connectors = [one for pipeline in pipelines for one in pipeline.connectors]
    _require_plain(saved, connectors, spec)
    _require_fit(module, spec, name)
    filters = [one for one in connectors if type(one).__name__ == FILTER]
    conversion = convert_or_keep(module, spec, normalize=bool(filters))
    arrays = {"params": conversion.params(module)}
    trained = saved.trained()
    if filters:
        width = conversion.acting.network.input_width
        arrays |= {"shift": np.zeros(width, np.float32), "scale": np.ones(width, np.float32)}
        if state := filters[0].get_state():
            arrays["shift"], arrays["scale"], _ = normalizer_from(state)
    for key, array in arrays.items():
        np.save(answer / f"{key}.npy", array)
    config, notes, unfit = _experiment(saved, name, args, spec, conversion, trained, normalize=bool(filters))
    if conversion.kept:
        notes.append(f"this policy needs torch and RLlib wherever it acts, because {conversion.kept}")
    schedules = {"epsilon": _epsilon(saved.config, trained.steps)} if saved.kind.name == "DQN" else {}
    return {
        "config": config.to_dict(),
        "acting": conversion.acting.to_json(),
        "arrays": list(arrays),
        "schedules": schedules,
        "trained": trained._asdict(),
        "notes": notes,
        "unfit": unfit,
    }


def _environment(saved: Checkpoint, env: str) -> tuple[str, dict[str, Any]]:
    """The environment's name and arguments, as we make it."""
    if env:
        return env, {}
    where = "name it: --env ENV (a gymnasium id, or module:factory)"
    if saved.alone:
        raise UsageError(f"{saved.folder} is a module, which does not say what it was trained on: {where}")
    theirs, args = saved.config.env, dict(saved.config.env_config or {})
    if isinstance(theirs, type) and theirs.__module__ == "raynforce.engines.rllib.runner":  # of our own engine
        return str(args["env"]), dict(args["args"])
    if not isinstance(theirs, str) or theirs not in gymnasium.registry:
        shown = repr(theirs) if isinstance(theirs, str) else f"the class {getattr(theirs, '__qualname__', theirs)}"
        raise UsageError(f"the checkpoint's environment is {shown}, which only its script knows: {where}")
    return theirs, args


def _require_plain(saved: Checkpoint, connectors: list[Any], spec: EnvSpec) -> None:
    """Refuse what stands between environment and module that our policies do not have."""
    for one in connectors:
        if (name := type(one).__name__) not in PLAIN:
            raise CannotConvert(f"observations or actions pass the connector {name}, which policies here do not have")
    if saved.alone or spec.action.kind != "box" or saved.config.normalize_actions:
        return
    bounds = np.asarray([spec.action.low, spec.action.high], np.float64)
    if np.isfinite(bounds).all() and not (bounds == [[-1.0], [1.0]]).all():
        raise CannotConvert("normalize_actions = False: policies here map -1 … 1 to the bounds of the actions")


def _require_fit(module: Any, spec: EnvSpec, env: str) -> None:
    """Refuse an environment that the module was not made for."""
    theirs = describe(env, gymnasium.spaces.Box(-1, 1, (1,)), module.action_space).action
    ours = spec.action
    if (theirs.kind, theirs.shape, theirs.sizes) != (ours.kind, ours.shape, ours.sizes):
        raise UsageError(
            f"env {env!r} does not fit: its actions are {_in_words(ours)}, the module's {_in_words(theirs)}"
        )
    seen = module.observation_space
    if not isinstance(seen, gymnasium.spaces.Box) or len(seen.shape) != 1:
        return  # a nested space or an image, of which the conversion tells
    width = sum(one.width for one in inputs_of(spec, module, convolves=False))
    if width != seen.shape[0]:
        has = f"its observation has {width} numbers, and the module reads {seen.shape[0]}"
        raise UsageError(f"env {env!r} does not fit: {has}; name the one it was trained on with --env")


def _in_words(action: Any) -> str:
    return f"{action.kind} {' x '.join(map(str, action.sizes)) or list(action.shape)}"


def _epsilon(config: Any, steps: int) -> float:
    points = getattr(config, "epsilon", 0.0)
    if not isinstance(points, list | tuple):
        return float(points)
    at, values = zip(*points, strict=True)
    return float(np.interp(steps, at, values))


# -- the experiment ---------------------------------------------------------------------------------------


def _experiment(
    saved: Checkpoint,
    env: str,
    args: dict[str, Any],
    spec: EnvSpec,
    conversion: Conversion,
    trained: Trained,
    *,
    normalize: bool,
) -> tuple[Config, list[str], str]:
    """Our config of it, what is to be told of that, and why RLlib could not go on from it, if it could not."""
    named = {"algo": saved.kind.key, "env": env, "env_args": args, "engine": "rllib", "preset": "none"}
    least: dict[str, Any] = {**named, "steps": max(1, trained.steps)}
    if saved.alone:
        return _config(least), [], "a module without its algorithm has no optimiser and no counters"
    data = least
    notes: list[str] = []
    for name, value in _counterparts(saved, conversion, normalize):
        tried = settings.merge(data, settings.nested({name: value}))
        try:
            translate(_config(tried), spec)
            data = tried
        except RaynforceError:
            continue  # `rllib.*` has it
    try:
        rest, lost = _differences(saved, _config(data), spec)
        config = _config({**data, "rllib": rest})
        built = build(translate(config, spec), config, spec, given.pack((env,)))
    except RaynforceError as error:
        return _config(least), notes, f"its config cannot be said here ({error})"
    if lost:
        notes.append(f"not taken over of RLlib's config: {', '.join(lost)}")
    now, then = (json.loads(json.dumps(one.facts())) for one in (built.conversion.acting, conversion.acting))
    if apart := next(differences(then, now), None):
        return config, notes, f"its network cannot be said here ({apart.what}: {apart.found}, here {apart.expected})"
    return config, notes, ""


def _config(data: dict[str, Any]) -> Config:
    kind = described(data["algo"])
    return settings.build(Config, settings.merge(settings.nested(kind.defaults), data), {"algorithm": kind.Settings})


def _counterparts(saved: Checkpoint, conversion: Conversion, normalize: bool) -> Iterator[tuple[str, Any]]:
    """Settings of ours by what RLlib's config has."""
    theirs, model = saved.config, _model(saved.config)
    yield "seed", int(theirs.seed or 0)
    yield "sampling.samplers", max(1, int(theirs.num_env_runners or 0))
    yield "sampling.envs", int(theirs.num_envs_per_env_runner)
    yield "sampling.fragment", int(theirs.get_rollout_fragment_length())
    conv = model["conv_filters"] if conversion.acting.network.images else None
    prefix = "head_fcnet" if conv else "fcnet"
    yield "network.hidden", list(model[f"{prefix}_hiddens"])
    yield "network.activation", model[f"{prefix}_activation"]
    yield "network.normalize_obs", normalize
    if conv:
        yield "network.conv", [layer[:3] for layer in conv]
    rate = theirs.actor_lr if saved.kind.key == "sac" else theirs.lr
    if isinstance(rate, float):
        yield "algorithm.learning_rate", rate
    if saved.kind.key == "ppo":
        yield "algorithm.value_coef", 2 * float(theirs.vf_loss_coeff)
    if isinstance(buffer := getattr(theirs, "replay_buffer_config", None), Mapping) and "capacity" in buffer:
        yield "algorithm.buffer_size", int(buffer["capacity"])
        yield "algorithm.prioritized", str(buffer.get("type")).startswith("Prioritized")
    for row in ROWS:
        as_it_is = row.how is Row._field_defaults["how"] and row.to.startswith("training.")
        if as_it_is and row.setting.startswith("algorithm.") and (not row.algos or saved.kind.key in row.algos):
            value = getattr(theirs, row.to.partition(".")[2], None)
            if value is None or isinstance(value, bool | int | float):
                yield row.setting, value


def _differences(saved: Checkpoint, config: Config, spec: EnvSpec) -> tuple[dict[str, Any], list[str]]:
    """What RLlib's config says otherwise than ours would, as `rllib.*`; and what no file can hold."""
    theirs, usual, found = saved.config, type(saved.config)(), translate(config, spec)
    given: dict[str, dict[str, Any]] = {"training": {}, "env_runners": {}}
    lost = []
    asked = [("training", name) for name in arguments_of(type(theirs), "training") if name not in MACHINE]
    for section, name in [*asked, ("env_runners", "batch_mode"), ("env_runners", "explore")]:
        if not hasattr(theirs, name) or not hasattr(usual, name):
            continue
        value = getattr(theirs, name)
        if value != found.calls.get(section, {}).get(name, getattr(usual, name)):
            if _is_plain(value):
                given[section][name] = value
            else:
                lost.append(name)
    model, ours = _model(theirs), _model_of(DefaultModelConfig(**found.model))
    apart = {name: value for name, value in model.items() if value != ours[name]}
    lost += [name for name, value in apart.items() if not _is_plain(value)]
    if plain := {name: value for name, value in apart.items() if _is_plain(value)}:
        given["rl_module"] = {"model_config": plain}
    own = ("_learner_connector", "learner_class", "callbacks_class")
    lost += [name.strip("_") for name in own if getattr(theirs, name, None) not in (None, getattr(usual, name, None))]
    return {section: kept for section, kept in given.items() if kept}, lost


def _model(config: Any) -> dict[str, Any]:
    given = config.model_config
    return _model_of(given if isinstance(given, DefaultModelConfig) else DefaultModelConfig(**_known(given)))


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in DefaultModelConfig.__dataclass_fields__}


def _model_of(model: DefaultModelConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in DefaultModelConfig.__dataclass_fields__}


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == _listed(value))
    except (TypeError, ValueError):
        return False


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(one) for one in value]
    return {name: _listed(one) for name, one in value.items()} if isinstance(value, dict) else value


# -- files ------------------------------------------------------------------------------------------------


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return cloudpickle.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ImportError as error:
        raise UsageError(f"{path} needs {error.name or error}: run this where its module can be imported") from None
    except Exception as error:
        raise UsageError(f"{path} is torn, or of another version: {summary(error)}") from None


def _state(path: Path) -> Any:
    if (packed := path.with_suffix(".msgpack")).is_file():
        from ray.rllib.utils.checkpoints import try_import_msgpack

        return try_import_msgpack(error=True).load(packed.open("rb"), strict_map_key=False)
    return _unpickled(path.with_suffix(".pkl"))


def main(folder: str, env: str, answer: str) -> None:
    quiet()
    try:
        found = read(Path(folder), env, Path(answer))
    except RaynforceError as error:
        found = {"refused": str(error), "use": isinstance(error, UsageError)}
    text = json.dumps(found, allow_nan=False)
    Path(answer, "answer.json").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
