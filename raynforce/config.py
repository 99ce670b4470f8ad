"""The experiment as data: what is trained, on what, for how long, and with which settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from raynforce import settings
from raynforce.errors import UsageError
from raynforce.settings import Range

CONFIG_VERSION = 1
REMOVED: dict[str, Any] = {"faults.absent_seconds": 20.0, "faults.backoff": 0.5, "eval.parallel": "auto"}
"""Settings that runs made before may have, which are constants now, and their values."""
Positive = Annotated[int, Range(1, 1e12)]

Anneal = Literal["no", "linear", "cosine"]
"""How a value falls to zero over a run; true is linear."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """What every algorithm has; each adds its own fields."""

    learning_rate: Annotated[float, Range(0, 10)] = 3e-4
    """Adam's step size."""
    anneal_learning_rate: Anneal = "no"
    """Let the step size fall to zero over the run: linear, or cosine, which is slower at both ends; no keeps it."""
    adam_epsilon: Annotated[float, Range(1e-12, 1)] = 1e-8
    """Adam's term against division by zero."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = 0.5
    """Gradients longer than this are scaled down to it; null switches that off."""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount of future rewards."""


@dataclass(frozen=True)
class SequenceConfig(AlgorithmConfig):
    """What algorithms have besides that can learn a network with memory."""

    sequence: Annotated[int, Range(1, 1_000_000)] | None = None
    """With network.memory: steps that gradients go back in time; null is sampling.fragment, or 32 if that is longer."""


@dataclass(frozen=True)
class SamplingConfig:
    """How experience is gathered."""

    samplers: Annotated[int, Range(1, 10_000)] = 1
    """Number of samplers, each with its own environments and random streams."""
    envs: Annotated[int, Range(1, 100_000)] = 8
    """Environments in each sampler, stepped together through one forward pass."""
    fragment: Annotated[int, Range(1, 1_000_000)] = 128
    """Steps of each environment that make one fragment."""
    parallel: Literal["auto", "no", "threads", "processes"] = "auto"
    """How the environments of one sampler are stepped: no, one after another; side by side in threads, for those that
    wait for something (a simulator, a network, a device); side by side in processes, for those that compute. auto is
    no, but in central threads, or processes if a trial shows that a step computes."""
    inference: Literal["server", "client"] = "server"
    """Who chooses the actions of a simulator: server, the sampler here, with a message for each step; client, the
    simulator itself, which is sent policy versions and answers with whole fragments."""
    agent_ids: bool = False
    """Of several agents: each sees which one it is, one-hot, under the key agent beside its observation."""
    exact_resume: bool = True
    """Use an environment's own vector implementation only if its episodes in flight can be restored exactly."""


@dataclass(frozen=True)
class NetworkConfig:
    """The network; an algorithm adds the outputs it needs."""

    conv: tuple[tuple[Annotated[int, Range(1, 65536)], ...], ...] | None = None
    """Convolutions of each image in the observation, as [[channels, kernel, stride], …], with a relu after each; null
    chooses by the image's size, [] takes its pixels as a plain vector."""
    hidden: tuple[Annotated[int, Range(1, 65536)], ...] = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Nonlinearity after each hidden layer."""
    normalize_obs: bool = False
    """Normalise observations by running mean and deviation, as the network's first layer."""
    memory: Literal["none", "lstm", "gru", "own"] = "none"
    """A recurrent layer after the hidden ones, which all outputs read; own is that of your own network.factory, whose
    forward(obs, state) returns its outputs and the next state."""
    memory_size: Annotated[int, Range(1, 65536)] = 64
    """Width of the recurrent layer; of your own module, of the state."""
    factory: str | None = None
    """Your own torch module as module:factory, called with the observation's leaves and the outputs wanted."""
    factory_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the factory, such as --set network.factory_args.width=128."""

    def __post_init__(self) -> None:
        shown = [list(layer) for layer in self.conv or ()]
        conv = f"network.conv = {shown}"
        if any(len(layer) != 3 for layer in shown):
            raise UsageError(f"{conv} must be a list of [channels, kernel, stride], such as [[32,8,4],[64,4,2]]")
        if self.factory_args and self.factory is None:
            raise UsageError(f"network.factory_args = {self.factory_args} needs network.factory: give both, or neither")
        memory = f"network.memory = {self.memory!r}"
        if self.memory == "own" and self.factory is None:
            raise UsageError(f"{memory} is that of your own module: give network.factory, or use lstm or gru")
        if self.memory in ("lstm", "gru") and self.factory is not None:
            what = f"{memory} is no part of your own network.factory = {self.factory!r}"
            raise UsageError(f"{what}: use network.memory=own if its forward takes a state, or leave one out")
        if shown and self.factory is not None:
            raise UsageError(f"{conv} is no part of your own network.factory = {self.factory!r}: leave one out")


@dataclass(frozen=True)
class LearnerConfig:
    """Where and how the network is trained."""

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, or cuda:N."""
    threads: Annotated[int, Range(1, 1024)] = 1
    """Torch threads; small networks are fastest with one. Part of the promise that equal seeds give equal runs."""
    scale_rewards: bool = False
    """Divide rewards by the running deviation of discounted returns."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise UsageError(f"learner.device = {self.device!r} is not one of: auto, cpu, cuda, cuda:N")


@dataclass(frozen=True)
class EvalConfig:
    """Greedy episodes on fresh seeds: what decides the best checkpoint and whether the target is met."""

    every: Annotated[int, Range(0, 1e12)] | None = None
    """Environment steps between evaluations; 0 evaluates only at the end. null evaluates 20 times in a run, 40 times
    with a target, or less often where that would take more than a tenth of an inline run."""
    episodes: Annotated[int, Range(1, 100_000)] = 20
    """Episodes of each evaluation during training."""
    final_episodes: Annotated[int, Range(0, 100_000)] | None = None
    """Episodes played with the best policy at the end of the run; 0 skips this. null plays 100, or fewer where that
    would take more than a tenth of an inline run, but never fewer than eval.episodes."""
    envs: Annotated[int, Range(1, 10_000)] = 20
    """Environments that evaluate, stepped as sampling.parallel says."""
    max_length: Annotated[int, Range(1, 1e12)] = 100_000
    """Longer episodes are cut off here and count with their return so far."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept on disk."""

    every: Annotated[int, Range(0, 1e12)] = 50_000
    """Environment steps between checkpoints; one is always written at the end."""
    seconds: Annotated[float, Range(0, 1e9)] = 600.0
    """Seconds between checkpoints, whichever comes first; 0 counts steps alone."""
    keep: Annotated[int, Range(1, 10_000)] = 2
    """How many of the newest to keep, beside the best policy."""
    keep_nth: Annotated[int, Range(0, 1_000_000)] = 0
    """Each checkpoint whose number is a multiple of this is kept for good; 0 keeps none."""


@dataclass(frozen=True)
class StreamConfig:
    """How batches are put together, and how old they may be."""

    batch: Annotated[int, Range(1, 100_000)] | None = None
    """Fragments that make one batch of async, from the samplers that are ready; null takes as many as there are
    samplers. In central, a batch has as many steps as so many fragments."""
    max_lag: Annotated[int, Range(0, 1e9)] = 32
    """In async, a fragment older than this many policy versions is dropped, and counted; in shared-agent, gradients."""


@dataclass(frozen=True)
class CentralConfig:
    """One policy for all environments that are ready: topology central."""

    batch_min: Annotated[int, Range(1, 1_000_000)] = 1
    """Environments that are waited for before the policy chooses their actions together."""
    batch_max: Annotated[int, Range(1, 1_000_000)] | None = None
    """At most so many at once; null takes all that are ready."""
    batch_wait: Annotated[float, Range(1e-6, 3600)] = 0.002
    """Seconds after which the policy chooses for those that are there, though they are fewer than batch_min."""
    one_core: bool = True
    """Keep the threads of an env host on one core, each host of the run on another, as long as they fit there: that
    wakes them sooner. They are let go if they compute more than that, and when one starts a process."""

    def __post_init__(self) -> None:
        if self.batch_max is not None and self.batch_min > self.batch_max:
            both = f"central.batch_min = {self.batch_min} is more than central.batch_max = {self.batch_max}"
            raise UsageError(f"{both}: lower batch_min, or raise batch_max")


@dataclass(frozen=True)
class SimsConfig:
    """Simulators as environments: how long a process lasts."""

    recycle_episodes: Annotated[int, Range(0, 1e12)] = 0
    """A simulator process that has played so many episodes is replaced by a new one, for those that leak. Envs move to
    it as they are if the simulator can save them, else when their episodes end; 0 is never."""
    recycle_hours: Annotated[float, Range(0, 1e6)] = 0.0
    """The same after so many hours."""
    recycle_bytes: Annotated[int, Range(0, 1e15)] = 0
    """The same once the process and its children have so many bytes in memory."""


@dataclass(frozen=True)
class ReplayConfig:
    """Where the replay buffer is, for algorithms that have one."""

    shards: Annotated[int, Range(0, 10_000)] = 0
    """Processes that topology replay divides the buffer among; 0 keeps all of it in the learner's."""
    compress: bool = False
    """Keep images compressed: those of games take a fifth of the memory or less. A batch of 32 stacks of 4, 84x84 each,
    then takes one to five milliseconds instead of 0.3, and an image that comes in up to a tenth of one."""


@dataclass(frozen=True)
class FaultsConfig:
    """What is done when an environment, a sampler or the learner fails."""

    restarts: Annotated[int, Range(0, 1_000_000)] = 5
    """How often in a row a role is restarted without having got any further; then it is given up."""
    backoff: ClassVar[float] = 0.5
    """Seconds before the second restart in a row, doubled for each further one; the first one is immediate."""
    quorum: Annotated[float, Range(0.001, 1)] = 0.5
    """Share of the samplers without which the run stops; the others may be given up, or away."""
    start_seconds: Annotated[float, Range(0.1, 1e9)] = 300.0
    """A role that has not started by then (environments made and reset) is killed and replaced."""
    sample_seconds: Annotated[float, Range(0.1, 1e9)] = 300.0
    """A sampler that takes longer for one fragment hangs: it is killed and replaced."""
    learn_seconds: Annotated[float, Range(0.1, 1e9)] = 1800.0
    """A learner that takes longer for one batch hangs: it is killed and replaced."""
    absent_seconds: ClassVar[float] = 20.0
    """How long sync and overlap wait for a sampler that is being replaced before they go on without it."""
    memory_mb: Annotated[float, Range(1, 1e9)] | None = None
    """A sampler's own process (not inline) that grows beyond this is replaced between two fragments, losing nothing;
    null is half of this machine's memory divided by the samplers, and no limit for workers of a shared agent. An env
    host's (topology central, without the processes of its environments) ends the episodes that are under way."""


@dataclass(frozen=True)
class RayConfig:
    """Which Ray cluster, and what each role asks of it."""

    address: str | None = None
    """auto, or host:port of a running cluster; local starts one here; null takes RAY_ADDRESS, or else is local."""
    sampler_cpus: Annotated[float, Range(0, 100_000)] | None = None
    """CPUs that each sampler asks for; null asks for one, and one for the simulator that it starts, or less where a
    single sampler would not fit."""
    learner_cpus: Annotated[float, Range(0, 100_000)] | None = None
    """CPUs that the learner asks for; null asks for one, or less where it would not fit."""
    learner_gpus: Annotated[float, Range(0, 10_000)] = 0.0
    """GPUs that the learner asks for."""
    sampler_resources: dict[str, float] = field(default_factory=dict)
    """Custom resources that each sampler asks for, such as {simulator: 1}."""
    learner_resources: dict[str, float] = field(default_factory=dict)
    """Custom resources that the learner asks for."""
    ship_code: Literal["auto", "always", "never"] = "auto"
    """Send your local modules and this package to the cluster; auto does where a node is another machine."""


@dataclass(frozen=True)
class PolicyConfig:
    """One of several policies: who is played by it, and how it learns; what is not said is as for all."""

    agents: tuple[str, ...] = ()
    """Names of agents that it plays, such as [adversary_*]; each agent is played by one policy."""
    frozen: str | None = None
    """A run or checkpoint whose policy it is; it does not learn then. policies.NAME of a run of several is RUN:NAME."""
    opponents: Annotated[int, Range(0, 10_000)] = 0
    """Self-play: how many older versions of itself are kept to play against; 0 plays all of its agents itself. In each
    environment one of its agents learns, each in turn, and one older version, drawn anew each round, plays the others.
    Evaluation plays them at random."""
    opponents_every: Annotated[int, Range(1, 1_000_000)] = 10
    """Policy versions from one that is kept to the next."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """Settings of the algorithm that are its own, such as {learning_rate: 1e-3}."""
    network: dict[str, Any] = field(default_factory=dict)
    """Settings of the network that are its own."""
    learner: dict[str, Any] = field(default_factory=dict)
    """Settings of the learner that are its own, such as {scale_rewards: false}."""

    def __post_init__(self) -> None:
        if self.frozen is not None and (self.algorithm or self.network or self.learner or self.opponents):
            raise UsageError(f"frozen = {self.frozen!r} does not learn: leave out what it is to learn by")


@dataclass(frozen=True)
class Config:
    """One experiment, complete: the same config and seed give the same run."""

    env: str
    """A gymnasium id, or module:factory."""
    algo: str = "ppo"
    """ppo, dqn, sac, td3, impala, a3c, bc, or your own module:Class; of rllib ppo, appo, impala, dqn, sac or others."""
    config_version: Literal[1] = 1
    """Version of this file's format."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Random seed: where every random stream of the run begins."""
    steps: Positive = 200_000
    """Environment steps to train for."""
    target: float | None = None
    """Stop once an evaluation's mean return reaches this."""
    engine: str = "native"
    """What trains: native, rllib (RLlib's algorithms), or your own module:Class."""
    runtime: Literal["auto", "inline", "process", "ray"] = "auto"
    """Where the roles live: inline in this process, process in processes of this machine, ray in Ray actors; auto
    chooses by what a step of the environment costs, and config.yaml has what it chose."""
    topology: str = "auto"
    """Who waits for whom: sync alternates sampling and learning; overlap learns from one batch while the next is
    sampled; async learns from the samplers that are ready; replay lets samplers and learner go their own pace, within
    the ratio of samples to inserts; in shared-agent, samplers compute gradients, which the learner applies as they
    come; central steps all environments side by side and lets one policy choose for those that are ready; auto is,
    where the algorithm allows it, central for slow environments and overlap where sampling costs about as much as
    learning, else sync. Your own is module:NAME."""
    kernels: Literal["portable", "native"] = "portable"
    """portable holds numpy and torch to AVX2, so that all x86-64 processors that have it give equal weights for equal
    seeds; native lets them use all that a processor has. Convolutions always do."""
    start_from: str | None = None
    """Weights to begin with: a run or checkpoint of the same network; null begins at random."""
    data: str | None = None
    """Recorded episodes to learn from, for bc: a Parquet file, a folder of them, or a Minari dataset."""
    preset: Literal["auto", "none"] = "auto"
    """auto starts from tuned settings for this algorithm and environment where there are some; none does not."""
    log_every: Positive = 2_000
    """Environment steps between lines of metrics; a run that is done writes one more."""
    metrics_port: Annotated[int, Range(0, 65_535)] = 0
    """Port on 127.0.0.1 where Prometheus may scrape the run; 0 is none. Of several seeds, each has the next one."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment, and env_args.wrappers, a list of what is put around it: Gymnasium's
    wrappers, FrameStack and SkipObservation by name, your own as module:Class, each alone or with its arguments."""
    policies: dict[str, Any] = field(default_factory=dict)
    """For environments of several agents, by name: {agents: [prey_*], algorithm: {…}, network: {…}, learner: {…}}, and
    frozen: RUN for one that does not learn, opponents: N for self-play. Without any, one policy plays all agents."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How experience is gathered."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The network."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The algorithm's own settings."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Where and how it is trained."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """How batches are put together, and how old they may be."""
    central: CentralConfig = field(default_factory=CentralConfig)
    """One policy for all environments that are ready."""
    sims: SimsConfig = field(default_factory=SimsConfig)
    """Simulators as environments."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Where the replay buffer is."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """What is done when something fails."""
    ray: RayConfig = field(default_factory=RayConfig)
    """Which Ray cluster, and what is asked of it."""
    rllib: dict[str, Any] = field(default_factory=dict)
    """With engine rllib: arguments for its config by method, such as --set rllib.training.vf_clip_param=10."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Greedy episodes on fresh seeds."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept on disk."""

    def to_dict(self) -> dict[str, Any]:
        return settings.to_dict(self)

    def to_yaml(self, *, explain: bool = False) -> str:
        """YAML text that `--config` reads back; with `explain`, every setting's sentence stands above it."""
        return settings.to_yaml(self, explain=explain)
