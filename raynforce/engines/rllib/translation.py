"""From our settings to RLlib's: one table, which the engine trains by, `explain` prints, and `--print-config` writes.

Nothing here needs RLlib.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from raynforce import settings
from raynforce.algos.base import annealed
from raynforce.algos.presets import preset_for
from raynforce.config import Config
from raynforce.engines.rllib.algorithms import OTHERS, OURS, Known, described, known
from raynforce.envs.launching import is_simulator
from raynforce.errors import UsageError, nearest
from raynforce.policies.images import as_image, default_convolutions
from raynforce.policies.spec import Input
from raynforce.spaces import EnvSpec

SECTIONS: tuple[str, ...] = ("training", "environment", "env_runners", "learners", "rl_module", "fault_tolerance")
SECTIONS += ("reporting", "debugging", "offline_data", "resources", "checkpointing", "experimental")
"""The methods of RLlib's `AlgorithmConfig` that `rllib.*` passes arguments to."""
MODEL = "rl_module.model_config."
POLICY_GRADIENT, REPLAY, ASYNC = ("ppo", "impala", "appo"), ("dqn", "sac"), ("impala", "appo")


class Row(NamedTuple):
    """What becomes of one setting."""

    setting: str  # ours, dotted; one that ends with a dot is the whole section
    to: str = ""  # RLlib's `section.argument`; empty if it has none
    how: Callable[[Any, Config], Any] = lambda value, config: value
    algos: Sequence[str] = ()  # for which of them; empty is all
    note: str = ""  # what is different about it, or why there is none
    ours: bool = False  # heeded by us, whatever trains
    neutral: Sequence[Any] = ()  # values that say what RLlib does anyway


def _lr(rate: float, config: Config) -> Any:
    how = config.algorithm.anneal_learning_rate
    if how == "cosine":  # RLlib's schedules are straight lines from point to point
        return [[config.steps * i // 20, rate * annealed(how, i / 20)] for i in range(21)]
    return [[0, rate], [config.steps, 0.0]] if how == "linear" else rate


def _steps_of(updates: int, config: Config) -> int:
    """The environment steps in which an algorithm of replay makes so many updates."""
    hp: Any = config.algorithm
    return max(1, round(updates * hp.batch_size / hp.samples_per_insert))


def _intensity(samples_per_insert: float, config: Config) -> float:
    runners = config.sampling.samplers
    return samples_per_insert * runners / (runners + 1)  # RLlib counts one runner more than there are


def _epsilon(_: Any, config: Config) -> list[list[float]]:
    hp: Any = config.algorithm
    return [[0, hp.epsilon_start], [max(1, round(hp.epsilon_fraction * config.steps)), hp.epsilon_end]]


def _buffer(_: Any, config: Config) -> dict[str, Any]:
    hp: Any = config.algorithm
    if not hp.prioritized:
        return {"type": "EpisodeReplayBuffer", "capacity": hp.buffer_size}
    how = {"alpha": hp.priority_alpha, "beta": hp.priority_beta}
    return {"type": "PrioritizedEpisodeReplayBuffer", "capacity": hp.buffer_size, **how}


def _tau(_: Any, config: Config) -> float:
    hp: Any = config.algorithm
    soft = getattr(hp, "target_update", "soft") == "soft"
    return float(hp.target_tau) if soft else 1.0


def _target_steps(every: int, config: Config) -> int:
    hp: Any = config.algorithm
    return _steps_of(every if hp.target_update == "hard" else 1, config)


def _batch(_: Any, config: Config) -> int:
    sampling = config.sampling
    fragments = config.stream.batch or sampling.samplers if known(config.algo).overlaps else sampling.samplers
    return fragments * sampling.envs * sampling.fragment


def _vectorize(parallel: str, _: Config) -> str:
    return "async" if parallel == "processes" else "sync"


ROWS: tuple[Row, ...] = (
    Row("env", "environment.env"),
    Row("env_args", "environment.env_config"),
    Row("seed", "debugging.seed"),
    Row("sampling.samplers", "env_runners.num_env_runners"),
    Row("sampling.envs", "env_runners.num_envs_per_env_runner"),
    Row("sampling.fragment", "env_runners.rollout_fragment_length"),
    Row("sampling.fragment", "training.train_batch_size_per_learner", _batch, POLICY_GRADIENT, "× envs × samplers"),
    Row("sampling.parallel", "env_runners.gym_env_vectorize_mode", _vectorize, note="no: sync, processes: async"),
    Row("sampling.inference", note="RLlib's own way for that is RLlink: docs/rllib.md", neutral=("server",)),
    Row("sampling.exact_resume", note="RLlib begins new episodes at resume", neutral=(True,)),
    Row("stream.batch", "training.train_batch_size_per_learner", _batch, ASYNC, "× envs × fragment"),
    Row("stream.batch", note="is for impala and appo", neutral=(None,)),
    Row("stream.max_lag", "training.learner_queue_size", lambda lag, _: max(1, min(3, lag)), ("impala",), "up to 3"),
    Row("stream.max_lag", "training.simple_queue_size", lambda lag, _: max(1, lag), ("appo",)),
    Row("stream.max_lag", note="only impala and appo learn from older versions", neutral=(32,)),
    Row("algorithm.learning_rate", "training.lr", _lr, ("ppo", "impala", "appo", "dqn", *OTHERS)),
    Row("algorithm.learning_rate", "training.actor_lr", _lr, ("sac",)),
    Row("algorithm.learning_rate", "training.critic_lr", _lr, ("sac",)),
    Row("algorithm.learning_rate", "training.alpha_lr", _lr, ("sac",)),
    Row("algorithm.anneal_learning_rate", "training.lr", lambda _, config: _lr(config.algorithm.learning_rate, config),
        ("ppo", "impala", "appo", "dqn"), "a schedule over `steps`"),
    Row("algorithm.anneal_learning_rate", note="is for ppo, impala, appo and dqn", neutral=("no",)),
    Row("algorithm.adam_epsilon", "training.adam_epsilon", algos=("dqn",)),
    Row("algorithm.adam_epsilon", note="RLlib's Adam has 1e-8", neutral=(1e-8,)),
    Row("algorithm.max_grad_norm", "training.grad_clip"),
    Row("algorithm.gamma", "training.gamma"),
    Row("algorithm.gae_lambda", "training.lambda_", algos=("ppo",)),
    Row("algorithm.epochs", "training.num_epochs", algos=("ppo",)),
    Row("algorithm.minibatch_size", "training.minibatch_size", algos=("ppo", "impala")),
    Row("algorithm.clip", "training.clip_param", algos=("ppo", "appo")),
    Row("algorithm.anneal_clip", note="RLlib's clip stays", neutral=("no",)),
    Row("algorithm.gsde", note="RLlib has none", neutral=(False,)),
    Row("algorithm.gsde_every", note="is for gsde", neutral=(64,)),
    Row("algorithm.rnd_coef", note="RLlib has none", neutral=(0.0,)),
    Row("algorithm.augment", note="RLlib has none", neutral=("no",)),
    Row("algorithm.value_coef", "training.vf_loss_coeff", lambda coef, _: coef / 2, ("ppo",),
        "RLlib does not halve the squared error"),
    Row("algorithm.value_coef", "training.vf_loss_coeff", algos=ASYNC),
    Row("algorithm.entropy_coef", "training.entropy_coeff", algos=POLICY_GRADIENT),
    Row("algorithm.clip_value", note="vf_clip_param clips the error, not the change", neutral=(None,)),
    Row("algorithm.normalize_advantage", note="RLlib always does", neutral=(True,)),
    Row("algorithm.target_kl", note="RLlib has a penalty: rllib.training.use_kl_loss", neutral=(None,)),
    Row("algorithm.log_std_init", note="RLlib's begins at 0", neutral=(0.0,)),
    Row("algorithm.rho_clip", "training.vtrace_clip_rho_threshold", algos=("impala",)),
    Row("algorithm.c_clip", note="RLlib's is 1", neutral=(1.0,)),
    Row("algorithm.vtrace_lambda", note="RLlib's is 1", neutral=(1.0,)),
    Row("algorithm.buffer_size", "training.replay_buffer_config", _buffer, REPLAY),
    Row("algorithm.prioritized", "training.replay_buffer_config", _buffer, REPLAY),
    Row("algorithm.priority_alpha", "training.replay_buffer_config", _buffer, REPLAY),
    Row("algorithm.priority_beta", "training.replay_buffer_config", _buffer, REPLAY, "stays as it is"),
    Row("algorithm.learning_starts", "training.num_steps_sampled_before_learning_starts", algos=REPLAY),
    Row("algorithm.batch_size", "training.train_batch_size_per_learner", algos=REPLAY),
    Row("algorithm.samples_per_insert", "training.training_intensity", _intensity, REPLAY,
        "× samplers / (samplers + 1)"),
    Row("algorithm.n_step", "training.n_step", algos=REPLAY),
    Row("algorithm.double", "training.double_q", algos=("dqn",)),
    Row("algorithm.dueling", "training.dueling", algos=("dqn",)),
    Row("algorithm.target_update", "training.tau", _tau, ("dqn",)),
    Row("algorithm.target_every", "training.target_network_update_freq", _target_steps, ("dqn",), "in steps"),
    Row("algorithm.target_tau", "training.tau", _tau, REPLAY),
    Row("algorithm.epsilon_start", "training.epsilon", _epsilon, ("dqn",)),
    Row("algorithm.epsilon_end", "training.epsilon", _epsilon, ("dqn",)),
    Row("algorithm.epsilon_fraction", "training.epsilon", _epsilon, ("dqn",), "in environment steps"),
    Row("algorithm.epsilon_ladder", note="all environments of RLlib explore alike", neutral=(None, 1.0)),
    Row("algorithm.huber_delta", note="RLlib's is 1", neutral=(1.0,)),
    Row("algorithm.initial_alpha", "training.initial_alpha", algos=("sac",)),
    Row("algorithm.target_entropy", "training.target_entropy", lambda h, _: "auto" if h is None else h, ("sac",)),
    Row("network.hidden", MODEL + "fcnet_hiddens", lambda sizes, _: list(sizes),
        note="head_fcnet_hiddens after images"),
    Row("network.activation", MODEL + "fcnet_activation", note="head_fcnet_activation after images"),
    Row("network.conv", MODEL + "conv_filters", note="with padding valid"),
    Row("network.normalize_obs", "env_runners.env_to_module_connector", note="MeanStdFilter"),
    Row("policies", note="several agents are trained by the native engine alone", neutral=({},)),
    Row("sampling.agent_ids", note="is for several agents", neutral=(False,)),
    Row("algorithm.central_critic", note="is for several agents", neutral=(False,)),
    Row("network.memory", note="networks with memory are trained by the native engine alone", neutral=("none",)),
    Row("network.memory_size", note="is for network.memory", neutral=(64,)),
    Row("algorithm.sequence", note="is for network.memory", neutral=(None,)),
    Row("algorithm.burn_in", note="is for network.memory", neutral=(0,)),
    Row("network.factory", note="RLlib takes its own RLModules: rllib.rl_module", neutral=(None,)),
    Row("network.factory_args", note="is for network.factory", neutral=({},)),
    Row("learner.device", "learners.num_gpus_per_learner", note="cuda: 1"),
    Row("learner.threads", ours=True, note="torch's threads in the driver, where RLlib's learner is"),
    Row("learner.scale_rewards", note="RLlib learns from rewards as they are", neutral=(False,)),
    Row("replay.", note="RLlib keeps one buffer in the driver", neutral=(0, False)),
    Row("central.", note="RLlib has no such topology"),
    Row("sims.", ours=True),
    Row("faults.restarts", ours=True, note="of env runners, without a step in between"),
    Row("faults.sample_seconds", "env_runners.sample_timeout_s", note="late fragments are dropped, not redone"),
    Row("faults.", note="RLlib has its own ways", neutral=(0.5, 300.0, 1800.0, None)),
    Row("ray.sampler_cpus", "env_runners.num_cpus_per_env_runner", lambda cpus, _: 1 if cpus is None else cpus),
    Row("ray.sampler_resources", "env_runners.custom_resources_per_env_runner"),
    Row("ray.learner_cpus", "learners.num_cpus_per_learner", note="of learners in actors of their own"),
    Row("ray.learner_gpus", "learners.num_gpus_per_learner"),
    Row("ray.learner_resources", note="use rllib.learners.custom_resources_per_learner", neutral=({},)),
    Row("ray.", ours=True),
    Row("rllib.", ours=True, note="passed on as it is, over all of these"),
    *(Row(name, ours=True) for name in ("algo", "config_version", "steps", "target", "engine", "runtime", "topology")),
    *(Row(name, ours=True) for name in ("kernels", "start_from", "preset", "log_every", "eval.", "checkpoint.")),
    Row("metrics_port", ours=True),
    Row("data", "offline_data.input_", algos=tuple(OTHERS), note="Parquet alone"),
    Row("data", note="is for BC and others that learn from it", neutral=(None,)),
)  # fmt: skip


@dataclass
class Translation:
    """An experiment in RLlib's terms: plain data."""

    algorithm: Known
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments by method of `AlgorithmConfig`."""
    connectors: list[str] = field(default_factory=list)
    """What observations pass on their way to the module: classes of `ray.rllib.connectors.env_to_module`."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""
    image: Input | None = None
    """The observation, if it is an image that is convolved."""

    @property
    def model(self) -> dict[str, Any]:
        """Arguments of `DefaultModelConfig`."""
        found: dict[str, Any] = self.calls["rl_module"]["model_config"]
        return found


def translate(config: Config, env: EnvSpec | None) -> Translation:
    """The experiment as RLlib runs it.

    A setting without a counterpart is refused if somebody has given it, and told to be without effect if the algorithm
    or a preset has.
    """
    kind, ignored = known(config.algo), []
    _require_possible(config, kind)
    if env is not None:
        _require_actions(kind, env)
        if env.masked:
            masks = f"env {env.env!r} has action masks, which engine rllib has no networks for"
            raise UsageError(f"{masks}: leave --engine out, our own engine has")
    arguments: dict[str, Any] = {}
    before = dict(_values(_defaults(config)))
    for name, value in _values(config):
        rows = rows_of(name, kind.key)
        row = rows[0]
        if not (value is None and kind.name in OTHERS):  # which leaves it to RLlib
            arguments |= {row.to: made for row in rows if row.to and (made := row.how(value, config)) != {}}
        if row.to or row.ours or value in row.neutral or _is_empty(value):
            continue
        if value != before.get(name):
            reason = row.note or "RLlib has none"
            raise UsageError(f"{name} = {value!r} has no counterpart in RLlib ({reason}): leave it out")
        if row.neutral:
            ignored.append(f"{name} ({row.note})")
    found = Translation(kind, settings.nested(arguments))
    if ignored:
        found.notes.append(f"without effect in RLlib: {', '.join(ignored)}")
    _complete(found, config, env)
    _pass_through(found, config)
    return found


def _defaults(config: Config) -> Config:
    """The config with nothing given but what is trained, and on what."""
    kind = described(config.algo)
    preset = preset_for(config.algo, config.env, config.topology) if config.preset == "auto" else {}
    named = {"env": config.env, "algo": config.algo}
    data = reduce(settings.merge, (settings.nested(kind.defaults), settings.nested(preset), named))
    return settings.build(Config, data, {"algorithm": kind.Settings})


def rows_of(name: str, algo: str) -> list[Row]:
    """The rows that hold for a setting and an algorithm; where RLlib has a counterpart, those that say so."""
    found = [
        row for row in ROWS if row.setting == name or (row.setting.endswith(".") and f"{name}.".startswith(row.setting))
    ]
    exact = [row for row in found if row.setting == name] or found
    own, general = [row for row in exact if algo in row.algos], [row for row in exact if not row.algos]
    return [*own, *(row for row in general if row.to)] or general or [Row(name)]


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting, dotted, with its value; those that are mappings as a whole."""
    for each in dataclasses.fields(section):
        value = getattr(section, each.name)
        below = _values(value, f"{prefix}{each.name}.") if dataclasses.is_dataclass(value) else None
        yield from below or [(f"{prefix}{each.name}", value)]


def _is_empty(value: Any) -> bool:
    return value is None or value in ({}, (), [])


def _require_possible(config: Config, kind: Known) -> None:
    if config.runtime not in ("auto", "ray"):
        raise UsageError(f"runtime = {config.runtime!r}: RLlib runs on Ray; use --runtime ray, or leave it out")
    if config.topology not in ("auto", kind.topology):
        only = f"{kind.name} of RLlib is {kind.topology}"
        raise UsageError(f"topology = {config.topology!r} has no counterpart: {only}; leave it out")
    given = config.rllib.get("offline_data")
    if kind.learns == "data" and not (config.data or (isinstance(given, Mapping) and given.get("input_"))):
        raise UsageError(f"{kind.name} learns from recorded data: give --data PATH, or rllib.offline_data.input_")
    if config.data is not None and kind.learns != "data":
        raise UsageError(f"data = {config.data!r} is for BC and others that learn from it: leave it out of {kind.key}")
    if config.sampling.parallel == "threads":
        raise UsageError("sampling.parallel = 'threads' has no counterpart in RLlib: use processes, or leave it out")


def _require_actions(kind: Known, env: EnvSpec) -> None:
    allowed = {"DQN": ("discrete",), "SAC": ("box", "discrete"), "CQL": ("box",), "IQL": ("box",), "TQC": ("box",)}
    words = {"box": "continuous", "discrete": "discrete", "multidiscrete": "several at once"}
    able = allowed.get(kind.name, (env.action.kind,))
    if env.action.kind not in able:
        needs = " or ".join(words[one] for one in able)
        has = f"those of {env.env} are {words[env.action.kind]}"
        raise UsageError(f"{kind.key} of RLlib needs {needs} actions, and {has}: use ppo")


def _complete(found: Translation, config: Config, env: EnvSpec | None) -> None:
    """What no single setting says: the form of the network, actions, and how faults and reports are handled."""
    calls, name = found.calls, found.algorithm.name.lower()
    training, runners = calls.setdefault("training", {}), calls["env_runners"]
    learners = calls.setdefault("learners", {})
    if config.ray.learner_cpus is None:
        learners.pop("num_cpus_per_learner", None)
    learners["num_gpus_per_learner"] = config.ray.learner_gpus or float(config.learner.device.startswith("cuda"))
    if name == "ppo":
        training |= {"use_kl_loss": False, "vf_clip_param": math.inf}
    if name == "sac":
        training |= {"lr": None, "target_network_update_freq": 1}
    calls["fault_tolerance"] = {"restart_failed_env_runners": True, "delay_between_env_runner_restarts_s": 0.0}
    calls["reporting"] = {"min_time_s_per_iteration": int(found.algorithm.overlaps)}
    if found.algorithm.learns == "replay":
        calls["reporting"]["min_sample_timesteps_per_iteration"] = 1000
    runners.pop("env_to_module_connector", None)
    if found.algorithm.learns == "data":
        runners["num_env_runners"] = 0  # nobody samples
        ray_data = {"concurrency": 1}  # actors that prepare batches: a second would leave none of two CPUs to read with
        reading = {"dataset_num_iters_per_learner": 10, "map_batches_kwargs": ray_data}
        calls["offline_data"] = calls.get("offline_data", {}) | reading
    if is_simulator(config.env):
        runners["gym_env_vectorize_mode"] = "vector_entry_point"
    _network(found, config, env)


def _network(found: Translation, config: Config, env: EnvSpec | None) -> None:
    model, network = found.model, config.network
    images = [] if env is None else [leaf for leaf in env.obs if as_image(leaf, any_box=bool(network.conv))]
    conv = network.conv
    if images and conv is None and (image := as_image(images[0])) is not None:
        conv = default_convolutions(image)
    model.pop("conv_filters", None)
    if found.algorithm.name in ("PPO", "IMPALA", "APPO", "BC", "MARWIL"):
        model |= {"vf_share_layers": False, "free_log_std": env is not None and env.action.kind == "box"}
    if images and conv:
        if env is not None and len(env.obs) > 1:
            has = f"{config.env} has {', '.join(leaf.path for leaf in env.obs)}"
            raise UsageError(f"RLlib's networks read one image, or numbers alone, and {has}: use --engine native")
        sizes, activation = model.pop("fcnet_hiddens"), model.pop("fcnet_activation")
        model |= {"conv_filters": [[*layer, "valid"] for layer in conv], "head_fcnet_hiddens": sizes}
        model |= {"head_fcnet_activation": activation}
        found.image = as_image(images[0], any_box=True)
        if "vf_share_layers" in model:
            model["vf_share_layers"] = True
    elif env is not None and not (len(env.obs) == 1 and env.obs[0].kind == "box" and len(env.obs[0].shape) == 1):
        found.connectors.append("FlattenObservations")
    if network.normalize_obs and not images:
        found.connectors.append("MeanStdFilter")


def _pass_through(found: Translation, config: Config) -> None:
    for section, given in config.rllib.items():
        if section not in SECTIONS:
            hint = nearest(str(section), SECTIONS)
            raise UsageError(f"rllib.{section} is no section of RLlib's config{hint}: it has {', '.join(SECTIONS)}")
        if not isinstance(given, Mapping):
            raise UsageError(f"rllib.{section} = {given!r} is not a section: write rllib.{section}.ARGUMENT=VALUE")
        if section == "environment" and "env" in given:
            raise UsageError(f"rllib.environment.env = {given['env']!r}: name the environment as ENV")
        found.calls[section] = settings.merge(found.calls.get(section, {}), given)


def table() -> Iterator[tuple[str, str, str]]:
    """Every row as text: our setting, RLlib's, and a note with the algorithms it is for."""
    for row in ROWS:
        where = row.to or ("heeded by us" if row.ours else "none")
        notes = [note for note in (row.note, f"for {', '.join(row.algos)}" if row.algos else "") if note]
        yield row.setting + "*" * row.setting.endswith("."), where, "; ".join(notes)


def names() -> Iterator[tuple[str, str]]:
    """Algorithms by what to type, and RLlib's name."""
    yield from ((name, found.name) for name, found in (OURS | OTHERS).items())
