"""The algorithm contract: what an algorithm declares as data, and the four steps in which it learns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np

from raynforce.algos.augment import images_of, shifted
from raynforce.algos.sequences import concatenated, sequenced, shuffled_sequences, unrolled
from raynforce.config import AlgorithmConfig, Anneal, Config
from raynforce.errors import AlgorithmError
from raynforce.experience.advantages import Steps, final_values, gae, vtrace
from raynforce.experience.builder import SEQUENCE, STATE
from raynforce.experience.fragment import Fragment
from raynforce.experience.limiter import Limiter
from raynforce.experience.replay_spec import ReplaySpec
from raynforce.lazy import LazyModule
from raynforce.policies.acting import ActingSpec
from raynforce.policies.distributions import Gaussian, masked, policy_distribution
from raynforce.policies.groups import Group, rate_of
from raynforce.policies.images import with_images
from raynforce.policies.spec import (
    GRU,
    LSTM,
    Free,
    Input,
    Layer,
    Linear,
    NetworkSpec,
    Tower,
    action_input,
    inputs_of,
    mlp,
    several,
)
from raynforce.spaces import MASK, ActionSpec, EnvSpec
from raynforce.trees import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network
else:
    torch = LazyModule("torch")

Arrays = dict[str, np.ndarray]
Batch = Mapping[str, "Tensor"]
H = TypeVar("H", bound=AlgorithmConfig)


class Loss(NamedTuple):
    """What one minibatch gave."""

    total: Tensor
    """The scalar to minimise."""
    metrics: Mapping[str, Tensor]
    """To report under `losses/`: scalars, or one value of each sample. Averaged and read once per `learn`, not once
    per minibatch."""
    per_sample: Tensor | None = None
    """`[N]` errors, for algorithms that feed them back into replay."""
    gradients: Mapping[str, Tensor] | None = None
    """The derivative of `total` by each output of `net.record(obs)`, if you have worked it out; None asks autograd."""
    frozen: Collection[str] = ()
    """Names of `groups` that this step leaves as they are."""


@dataclass(slots=True)
class LearningRound:
    """What the learner tells an algorithm of the round of learning that is under way."""

    version: int = 0  # number of the policy version it starts from
    updates: int = 0  # optimiser steps taken so far
    scheduled: Mapping[str, float] = field(default_factory=dict)  # the values of `schedules`
    reward_scale: float = 1.0  # what to multiply rewards by; 1 unless `learner.scale_rewards` is on
    due: int | None = None  # updates to make from replay; None: the algorithm holds the ratio of samples to inserts
    known: Collection[str] = ()  # names of segments that are saved already, whose content `state` may leave out


class Algorithm(Generic[H]):
    """Base of every algorithm, built in or yours.

    The learner calls, for each round of fragments: `prepare` once, then for each of its `minibatches` `loss`, an
    optimiser step of its own, and `after_update`. Nothing here knows of processes, devices or optimisers.
    Subclass `Algorithm[YourSettings]`; the settings of the run are `self.hp`.
    """

    Settings: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """The algorithm's own settings, a frozen dataclass."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults for settings outside its own section, dotted: `{"sampling.fragment": 16}`."""
    topology_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The same for one topology, over those of all: `{"shared-agent": {"sampling.fragment": 1}}`."""
    memory_defaults: ClassVar[Mapping[str, Any]] = {}
    """The same for networks with memory, over those of all and over presets, but not over those of a topology."""
    consumes: ClassVar[Literal["stream", "replay", "data"]] = "stream"
    """Whether each fragment is learned from once, is kept in a buffer and sampled again, or is of recorded episodes."""
    max_lag: ClassVar[int | None] = 0
    """How many policy versions old a fragment may be when it is learned from; None: any, it corrects for that."""
    shares_gradients: ClassVar[bool] = False
    """Whether several workers may each compute gradients with a copy of the network that is a little old, and have them
    applied one after another: topology `shared-agent`. It takes one pass over what was sampled."""
    recurrent: ClassVar[bool] = False
    """Whether it can learn a network with memory: its arrays come from `rows`, its minibatches from `shuffled` (or are
    all rows), and its loss calls the network on `observations(minibatch)`."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that later updates depend on, made in `__init__` or `begin`: torch modules, optimisers,
    tensors, arrays, random generators, replay buffers, numbers, and lists or dicts of these. They are put on the
    learner's device, saved with every checkpoint and loaded again. Those of base classes count too."""
    forgets: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that change in training and that nothing depends on: a resume begins them afresh, and
    nothing is said of it. Those of base classes count too."""

    def __init__(self, config: Config, env: EnvSpec) -> None:
        self.config = config
        self.hp = cast(H, config.algorithm)
        self.env = env
        self.has_buffer = True
        """Whether its replay buffer, if it has one, is here; else shards or workers have it."""
        self.round = LearningRound()
        """What the learner tells; a new one for each round."""
        self._augmented = images_of(env.obs) if getattr(self.hp, "augment", "no") == "shift" else {}

    @property
    def version(self) -> int:
        """Number of the policy version that this round starts from."""
        return self.round.version

    @property
    def updates(self) -> int:
        """Optimiser steps taken so far."""
        return self.round.updates

    @property
    def scheduled(self) -> Mapping[str, float]:
        """The values of `schedules` in this round."""
        return self.round.scheduled

    @property
    def reward_scale(self) -> float:
        """What to multiply rewards by; 1 unless `learner.scale_rewards` is on."""
        return self.round.reward_scale

    limiter: Limiter | None = None
    """What counts its samples and inserts where it learns from replay, if it has one."""

    # -- what it declares, as data ------------------------------------------------------------------------

    def heads(self) -> dict[str, int]:
        """Network outputs and their sizes."""
        raise NotImplementedError

    def network(self) -> NetworkSpec:
        """The network; by default a multi-layer perceptron for each head, sharing nothing but what is remembered."""
        if torso := self.remembering():
            heads = (Tower(n, (Linear(size, gain=1.0),), source="torso") for n, size in self.heads().items())
            return self.spec(Tower("torso", torso), *heads)
        hidden = mlp(self.config.network.hidden, self.config.network.activation)
        return self.spec(*(Tower(n, (*hidden, Linear(size, gain=1.0))) for n, size in self.heads().items()))

    def actor_critic(self, log_std_init: float = 0.0, *, sde: bool = False, central: bool = False) -> NetworkSpec:
        """A network for the heads `policy` and `value`, with a free `log_std` if actions are continuous; with `sde`, of
        the noise that depends on `latent`, the policy's last hidden layer; with `central`, `value` also reads the
        global state of several agents."""
        hidden = mlp(self.config.network.hidden, self.config.network.activation)
        value = Tower("value", (*hidden, Linear(1, gain=1.0)))
        named: tuple[Input, ...] = ()
        if central and self.env.agents is not None:
            value = replace(value, source=("input", "global_state"))
            named = (Input("global_state", "vector", (self.env.agents.state_width,)),)
        if sde:
            size = self.heads()["policy"]
            features = Free("log_std", self.config.network.hidden[-1] * size, log_std_init)
            policy = Tower("policy", (Linear(size, gain=0.01),), source="latent")
            return self.spec(Tower("latent", hidden), policy, value, free=[features], named=named)
        towers = [Tower("policy", (*hidden, Linear(self.heads()["policy"], gain=0.01))), value]  # near-uniform at first
        if torso := self.remembering():
            policy, value = (replace(tower, layers=tower.layers[-1:], source="torso") for tower in towers)
            if named:  # the state of the world needs no memory, and layers of its own
                value = replace(towers[1], source=("torso", "global_state"))
            # The error of a critic of returns in the hundreds would be all that the memory learns from.
            value = replace(value, learns_alone=not self.config.learner.scale_rewards)
            towers = [Tower("torso", torso), policy, value]
        log_std = [Free("log_std", self.heads()["policy"], log_std_init)] if self.env.action.kind == "box" else []
        return self.spec(*towers, free=log_std, named=named)

    def remembering(self) -> tuple[Layer, ...]:
        """The hidden layers and the recurrent one that `network.memory` asks for; none if it does not."""
        config = self.config.network
        if config.memory not in ("lstm", "gru"):
            return ()
        layer = LSTM if config.memory == "lstm" else GRU
        return *mlp(config.hidden, config.activation), layer(config.memory_size)

    def spec(self, *towers: Tower, free: Sequence[Free] = (), named: Sequence[Input] = ()) -> NetworkSpec:
        """A network spec for this observation space, with convolutions in front of towers that read images.

        Towers may read `action`, and what else is `named`, beside the observation: `net(obs, action=…)`. A user's own
        module takes the place of all towers.
        """
        config = self.config.network
        if config.factory:
            state = config.memory_size if config.memory == "own" else 0
            asked = {"action", *(i.path for i in named)}.intersection(s for t in towers for s in several(t.source))
            more: dict[str, Any] = {"own_state": state, "asked": tuple(sorted(asked))}
            return NetworkSpec(inputs_of(self.env.obs), (), tuple(free), config.normalize_obs, **more)
        names = {*(i.path for i in named), *(t.name for t in towers)}
        if "action" not in names and any("action" in several(t.source) for t in towers):
            named = (*named, action_input(self.env.action))
        inputs, seeing = with_images(self.env.obs, towers, config.conv, [i.path for i in named])
        return NetworkSpec(inputs, seeing, tuple(free), config.normalize_obs, tuple(named))

    def groups(self) -> Mapping[str, Group]:
        """Parameters with a learning rate and a gradient clipping of their own; all others have the algorithm's."""
        return {}

    def acting(self) -> ActingSpec:
        """What samplers need to know."""
        return ActingSpec(self.env, self.network(), self.heads(), self.config.network.factory, record=("logp",))

    def schedules(self, progress: float) -> dict[str, float]:
        """Values that follow the progress from 0 to 1; `learning_rate`, or `learning_rate/NAME` of a group."""
        left = annealed(self.hp.anneal_learning_rate, progress)
        rates = {"learning_rate": self.hp.learning_rate * left}
        return rates | {rate_of(name): group.learning_rate * left for name, group in self.groups().items()}

    @classmethod
    def replay_spec(cls, config: Config) -> ReplaySpec | None:
        """How it learns from replay; topology `replay` goes by this."""
        return None

    @classmethod
    def per_worker_config(cls, config: Config) -> Config:
        """What the algorithm of one worker of a shared agent goes by."""
        return replace(config, topology="sync", sampling=replace(config.sampling, samplers=1))

    # -- how it learns ------------------------------------------------------------------------------------

    def begin(self, net: Network) -> None:
        """Called where learning happens, before the first update: make target networks, modules and buffers here.

        Torch draws by the run's seed in here. Name what you make in `keeps`, and it is saved and loaded for you. With
        weights of another run it is called again, once these are in place.
        """

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        """Turn the newest fragments into what is learned from; arrays reach `minibatches` as tensors."""
        raise NotImplementedError

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        """Yield the minibatches of one round; one optimiser step follows each. By default all rows are one."""
        if not batch:
            who = type(self).__name__
            raise AlgorithmError(f"{who}.prepare returned no arrays: return some, or define {who}.minibatches")
        if SEQUENCE in batch:
            yield from shuffled_sequences(batch, None, rng)
        elif len(next(iter(batch.values()))):
            yield batch

    def seen(self, minibatch: Batch, prefix: str = "") -> dict[str, Tensor]:
        """The observations of a minibatch (`prefix="next_"` for the next ones), augmented if the settings say so."""
        obs = observations(minibatch, prefix)
        return shifted(obs, self._augmented) if self._augmented else obs

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """The objective on one minibatch."""
        raise NotImplementedError

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        """Called after each optimiser step; in a worker of a shared agent, after each gradient that it computes."""

    def start_fresh(self, attempt: int) -> None:
        """Called after `begin` in place of a worker whose state is gone; `attempt`, 1 or more, tells them apart."""

    def stored(self) -> int:
        """Transitions in a replay buffer of its own, to be told if they are lost."""
        return 0

    def metrics(self) -> dict[str, float]:
        """More to report after each round, by full name."""
        return {}

    # -- what it remembers --------------------------------------------------------------------------------

    def state(self) -> Tree:
        """All that later updates depend on beside network, optimiser and `keeps`; written before the next round."""
        return {}

    def load(self, tree: Tree) -> None:
        """Undo `state`."""


def annealed(how: Anneal | bool, progress: float) -> float:
    """What is left of a value at a progress from 0 to 1."""
    if how == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * progress)
    return 1.0 - progress if how in ("linear", True) else 1.0


def observations(batch: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The observation columns of a batch under their own paths (`prefix="next_"` for the next ones).

    With those come, for a network with memory, how they are laid out in sequences and what these began with.
    """
    start = f"{prefix}obs"
    if not prefix and any(k.startswith(STATE) for k in batch):
        return {k: v for k, v in batch.items() if k.startswith(("obs/", STATE)) or k in ("obs", "first", "rows")}
    return {k[len(prefix) :]: v for k, v in batch.items() if k == start or k.startswith(start + "/")}


def rows(fragment: Fragment, columns: Mapping[str, np.ndarray]) -> Arrays:
    """Flatten `[T, B, ...]` columns, and the fragment's observations and actions, to the `[N, ...]` valid steps."""
    steps = fragment.length * fragment.lanes
    keep = fragment["valid"].reshape(-1)
    seen = fragment.obs() | fragment.state_columns()
    everything = {k: v[:-1] for k, v in seen.items()} | {"action": fragment["action"]} | dict(columns)
    if SEQUENCE in fragment.columns:
        return sequenced(fragment, everything)
    flat = {k: v.reshape(steps, *v.shape[2:]) for k, v in everything.items()}
    return flat if keep.all() else {k: v[keep] for k, v in flat.items()}


def advantages(
    net: Network, fragment: Fragment, *, reward_scale: float, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Advantage, return and value `[T, B]` of each step, by GAE with the network's `value` output."""
    _, steps = _predicted(net, fragment, reward_scale, only=("value",))
    advantage, returns = gae(steps, gamma, gae_lambda)
    return advantage, returns, steps.value[:-1]


def corrected(
    net: Network,
    fragment: Fragment,
    action: ActionSpec,
    *,
    reward_scale: float,
    gamma: float,
    vtrace_lambda: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    distribution: Gaussian | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `advantages` gives, for a fragment of any age: V-trace, by the recorded `logp` and the network's own, which
    is of another `distribution` than is usual for this action if one is given."""
    out, steps = _predicted(net, fragment, reward_scale, (*distribution.outputs, "value") if distribution else ())
    policy, count = distribution or policy_distribution(action), fragment.length * fragment.lanes
    acted = {k: out[k][:count] if out[k].ndim > 1 else out[k] for k in policy.outputs}  # without the next one's first
    if MASK in fragment.columns:
        first = policy.outputs[0]
        mask = fragment[MASK][:-1] | ~fragment["valid"][..., None]  # where nothing was chosen, anything may have been
        acted[first] = masked(acted[first], mask.reshape(count, -1))
    logp = policy.logp(acted, fragment["action"].reshape(count, *action.shape))
    log_ratio = logp.reshape(fragment.length, fragment.lanes) - fragment["logp"]
    advantage, targets = vtrace(steps, log_ratio, gamma, vtrace_lambda, rho_clip, c_clip)
    return advantage, targets, steps.value[:-1]


def _predicted(net: Network, fragment: Fragment, reward_scale: float, only: Sequence[str] = ()) -> tuple[Arrays, Steps]:
    """The network's outputs `[(T+1) * B, ...]` on a fragment's observations, all if not `only` some, and its steps."""
    if SEQUENCE in fragment.columns:
        out, final = unrolled(net, fragment, tuple(only))
    else:
        states = {k: v.reshape(-1, v.shape[2]) for k, v in fragment.state_columns().items()}
        out = net.predict({k: v.reshape(-1, *v.shape[2:]) for k, v in fragment.obs().items()}, only, **states)
        final = np.zeros(0, np.float32)  # [K]
        if len(fragment["final/index"]):
            last = {k: fragment[f"final/{k}"] for k in states}
            final = net.predict(fragment.final_obs(), ("value",), **last)["value"][:, 0]
    value = out["value"].reshape(fragment.length + 1, fragment.lanes)  # [T+1, B]
    ends = (fragment["terminated"], fragment["truncated"], final_values(fragment, value, final))
    return out, Steps(fragment["reward"] * np.float32(reward_scale), value, *ends)


def concatenate(parts: Sequence[Arrays]) -> Arrays:
    """Join the rows of several fragments."""
    if len(parts) > 1 and SEQUENCE in parts[0]:
        return concatenated(list(parts))
    return parts[0] if len(parts) == 1 else {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


def shuffled(batch: Batch, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """One epoch: permute all rows once, then cut views of nearly equal length close to `size`; or whole sequences."""
    if SEQUENCE in batch:
        yield from shuffled_sequences(batch, size, rng)
        return
    first = next(iter(batch.values()))
    if not len(first):  # every row of the round was only a reset
        return
    order = torch.from_numpy(rng.permutation(len(first))).to(first.device)
    permuted = {k: v.index_select(0, order) for k, v in batch.items()}
    cuts = np.linspace(0, len(first), max(1, round(len(first) / size)) + 1).astype(int)
    for start, stop in pairwise(cuts):
        yield {k: v[start:stop] for k, v in permuted.items()}
