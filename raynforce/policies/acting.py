"""What acting takes: a spec of plain data, the newest policy version, and the actor that joins them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raynforce.errors import UsageError
from raynforce.policies.distributions import (
    Distribution,
    EpsilonGreedy,
    MaskedEpsilonGreedy,
    SquashedGaussian,
    StateDependent,
    WideGaussian,
    masked,
    policy_distribution,
)
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.spec import NetworkSpec
from raynforce.spaces import MASK, ActionSpec, EnvSpec, float32_bounds, tuples
from raynforce.trees import Tree

if TYPE_CHECKING:
    from raynforce.policies.torch_net import TorchActor

Memory = dict[str, np.ndarray]  # the state of each recurrent layer, `[B, size]`

# Products in one observation's convolutions from which on torch acts faster than numpy (docs/performance.md). A figure
# and no clock: equal seeds must give equal runs.
TORCH_FROM = 5_000_000


@dataclass(frozen=True)
class ActingSpec:
    """All that a sampler needs to know of an algorithm, as data: no code and no torch."""

    env: EnvSpec
    network: NetworkSpec
    heads: Mapping[str, int]  # network outputs and their sizes, for a user's own module
    factory: str | None = None  # `module:factory` of a user's own torch module
    factory_args: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # `network.factory_args`
    exploration: Literal["policy", "epsilon"] = "policy"  # sample the distribution, or greedy but for `epsilon`
    values: str = "q"  # the output that `epsilon` exploration maximises
    record: tuple[str, ...] = ()  # extra columns for the fragments: `logp`, or of `epsilon` exploration `priority`
    state_value: str | None = None  # the output that action values take their mean from, if `values` are advantages
    gamma: float = 1.0  # the discount in `priority`
    ladder: float = 1.0  # lanes explore with `epsilon` to powers from 1 / `ladder` to `ladder`, geometrically
    gaussian: Literal["free", "wide", "squashed", "sde", "squashed-sde"] = "free"
    """Of a box: `log_std` is a free vector, or the second half of `policy`, or that and actions go through tanh. `sde`
    is noise that depends on the features `latent`, whose free `log_std` are those of a matrix."""
    sde_every: int = 0  # steps that `sde` keeps a matrix of noise for
    log_std_range: tuple[float, float] = (-20.0, 2.0)  # what `wide` and `squashed` clip it to
    sequence: int = 0  # of a network with memory: every so many steps of a fragment its state is recorded

    def __post_init__(self) -> None:
        if "priority" in self.record and self.exploration != "epsilon":
            what = f"exploration = {self.exploration!r} records no priorities, which are errors of action values"
            raise UsageError(f"{what}: leave 'priority' out of record, or explore with 'epsilon'")
        size = math.prod(self.env.action.shape) * (1 if self.is_sde else 2)
        if self.gaussian != "free" and (self.env.action.kind != "box" or self.heads.get("policy") != size):
            what = "means" if self.is_sde else "means and deviations"
            wanted = f"an output 'policy' of {size} numbers, {what}, for continuous actions"
            raise UsageError(f"gaussian = {self.gaussian!r} needs {wanted}; the outputs are {dict(self.heads)}")
        for name in (*self.distribution().outputs, *self.kept) if self.network.named else ():
            if needs := ", ".join(self.network.needs.get(name, ())):
                raise UsageError(f"samplers act by {name!r}, which reads {needs}: they have the observation alone")

    @property
    def acts_with(self) -> Literal["numpy", "torch"]:
        """What samplers act with: torch for a user's own module, else whichever is faster for this network."""
        return "torch" if self.factory or self.network.conv_products >= TORCH_FROM else "numpy"

    @property
    def is_sde(self) -> bool:
        return self.gaussian in ("sde", "squashed-sde")

    @property
    def kept(self) -> tuple[str, ...]:
        """The outputs `[B, n]` of every step that the columns in `record` are made of."""
        if "priority" in self.record:
            return (self.values,) if self.state_value is None else (self.values, self.state_value)
        return self.distribution().outputs[: 2 if self.is_sde else 1] if "logp" in self.record else ()

    def distribution(self, places: np.ndarray | None = None, *, masked: bool = False) -> Distribution:
        """How outputs become actions; `places` `[B]`, from 0 to 1, are where lanes stand on the ladder.

        `masked` if some actions may be forbidden though the environment forbids none.
        """
        if self.exploration != "epsilon":
            if self.gaussian == "free" or self.env.action.kind != "box":
                return policy_distribution(self.env.action)
            if self.is_sde:
                features = self.network.parts["log_std"].stop - self.network.parts["log_std"].start
                size = math.prod(self.env.action.shape)
                squashed = self.gaussian == "squashed-sde"
                return StateDependent(self.env.action.shape, features // size, self.sde_every, squashed=squashed)
            made = SquashedGaussian if self.gaussian == "squashed" else WideGaussian
            return made(self.env.action.shape, self.log_std_range)
        exponent = 1.0 if places is None or self.ladder == 1 else self.ladder ** (2 * places - 1)
        greedy = MaskedEpsilonGreedy if masked or self.env.masked else EpsilonGreedy
        return greedy(self.env.action.sizes, self.values, exponent)

    def action_values(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        """Action values `[n, ...]` from outputs `[..., n]`; numpy is several times as fast with actions first."""
        values = np.ascontiguousarray(np.moveaxis(out[self.values], -1, 0))
        return values if self.state_value is None else out[self.state_value][..., 0] + values - values.mean(0)

    def facts(self, *, weights_alone: bool = False) -> Tree:
        """All that a checkpoint has to have in common with this; `weights_alone` fit any env of the same shapes."""
        encoding = {i.path: i.encoding for i in self.network.inputs}
        leaves = {leaf.path: {**asdict(leaf), "encoding": encoding.get(leaf.path)} for leaf in self.env.obs}
        action = asdict(self.env.action)
        if weights_alone:
            leaves = {path: _only(leaf, "shape", "sizes", "encoding") for path, leaf in leaves.items()}
            action = _only(action, "kind", "shape", "sizes")
        world = {} if weights_alone else {"env": self.env.env, "env_args": self.env.args}
        outputs: Tree = {"heads": dict(self.heads), "network.factory": self.factory}
        if self.factory_args:
            outputs["network.factory_args"] = dict(self.factory_args)
        if self.gaussian != "free":
            outputs["gaussian"] = [self.gaussian, *self.log_std_range]
        return {**world, **leaves, "action": action, **outputs, **self.network.facts()}

    def to_json(self) -> Tree:
        plain: Tree = {"env": self.env.to_json(), "network": self.network.to_json(), "record": list(self.record)}
        plain |= {"heads": dict(self.heads), "factory_args": dict(self.factory_args)}
        plain |= {"log_std_range": list(self.log_std_range)}
        unused = set() if self.factory_args else {"factory_args"}
        unused |= {"gaussian", "log_std_range"} if self.gaussian == "free" else set()
        unused |= set() if self.is_sde else {"sde_every"}
        unused |= set() if self.sequence else {"sequence"}
        names = [f.name for f in fields(self) if f.name not in unused]
        return {name: plain.get(name, getattr(self, name)) for name in names}

    def for_host(self, places: np.ndarray | None = None) -> Tree:
        """What a simulator needs to act by itself, which knows its own spaces."""
        if self.is_sde:
            raise UsageError("algorithm.gsde = true is not for simulators that act by themselves: --inference server")
        plain = self.to_json()
        said = ("network", "exploration", "values", "gaussian", "log_std_range")
        told = {name: plain[name] for name in said if name in plain}
        exponent = getattr(self.distribution(places), "exponent", 1.0)
        return told | ({} if np.ndim(exponent) == 0 else {"exponents": np.asarray(exponent).tolist()})

    @staticmethod
    def from_json(data: Tree) -> ActingSpec:
        if "policies" in data:
            from raynforce.policies.team import TeamSpec

            return TeamSpec.of_json(data)
        env, network = EnvSpec.from_json(data["env"]), NetworkSpec.from_json(data["network"])
        known = tuples({name: data[name] for name in ("record", "log_std_range") if name in data})
        return ActingSpec(**(data | {"env": env, "network": network, **known}))


@dataclass(frozen=True)
class PolicyVersion:
    """One published state of the policy. Numbers only grow."""

    number: int
    params: np.ndarray  # all parameters, one float32 vector
    shift: np.ndarray | None = None
    scale: np.ndarray | None = None  # the observation normaliser as `(x - shift) * scale`, if the network has one
    schedules: Mapping[str, float] = field(default_factory=dict)  # values that follow the run, such as `epsilon`

    def state(self) -> Tree:
        tree: Tree = {"number": self.number, "params": self.params, "schedules": dict(self.schedules)}
        if self.shift is not None:
            tree |= {"shift": self.shift, "scale": self.scale}
        return tree

    def arrays(self) -> list[np.ndarray]:
        """What a simulator is sent of it."""
        return [self.params] if self.shift is None or self.scale is None else [self.params, self.shift, self.scale]

    @staticmethod
    def from_state(tree: Tree) -> PolicyVersion:
        if "policies" in tree:
            from raynforce.policies.team import TeamVersion

            return TeamVersion.of_state(tree)
        return PolicyVersion(tree["number"], tree["params"], tree.get("shift"), tree.get("scale"), tree["schedules"])


class Actor:
    """Chooses actions for batches of observations. Needs torch only where the spec says that it acts with it.

    `light` takes numpy for every network but a user's own: slower on large images, without torch's memory and start.
    `places` `[B]`, from 0 to 1, are a sampler's lanes on the exploration ladder; then recorded outputs are there too.
    """

    def __init__(self, spec: ActingSpec, *, light: bool = False, places: np.ndarray | None = None) -> None:
        self.spec = spec
        self.distribution = spec.distribution(places)
        outputs = self.distribution.outputs if places is None else (*self.distribution.outputs, *spec.kept)
        self._version: PolicyVersion | None = None
        self.schedules: Mapping[str, float] = {}
        self._net: NumpyNet | TorchActor
        if spec.acts_with == "numpy" or (light and not spec.factory):
            self._net = NumpyNet(spec.network, outputs)
        else:
            from raynforce.policies.torch_net import TorchActor  # imports torch: few networks need it

            self._net = TorchActor(spec)
        self.to_env = action_map(spec.env.action)
        self.outputs = self._net  # a function of `[B, ...]` raw observations
        self.step = self._net.step  # of a network with memory: of the state before, too; gives outputs and the next one

    @property
    def note(self) -> str:
        if self.spec.factory or isinstance(self._net, NumpyNet):
            return ""
        millions = self.spec.network.conv_products / 1e6
        return f"samplers import torch to act: {millions:.1f} million products per observation are faster there"

    def load(self, version: PolicyVersion) -> None:
        """Act with this version from now on; the same one again costs nothing."""
        if version is not self._version:
            self._net.load(version.params, version.shift, version.scale)
            self._version, self.schedules = version, version.schedules

    def masked(self, out: Mapping[str, np.ndarray], seen: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Outputs of which actions that are forbidden by the mask in `seen`, if there is one, are never chosen."""
        mask = seen.get(MASK)
        if mask is None:
            return out
        name = self.distribution.outputs[0]
        return {**out, name: masked(out[name], mask)}

    def sample(self, out: Mapping[str, np.ndarray], noise: Any) -> np.ndarray:
        """Actions of outputs that are `masked`."""
        return self.distribution.sample(out, noise, self.schedules)

    def greedy(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        return self.to_env(self.distribution.mode(self.masked(self._net(obs), obs)))

    def greedy_step(self, obs: Mapping[str, np.ndarray], memory: Memory) -> tuple[np.ndarray, Memory]:
        """The same with memory, and what is remembered then."""
        out, memory = self.step(obs, memory)
        return self.to_env(self.distribution.mode(self.masked(out, obs))), memory


def remembered(before: Memory, after: Memory, moved: np.ndarray, over: np.ndarray) -> Memory:
    """What lanes remember after a step: those that did not move what they did before, and nothing where an episode is
    over; `[B]` flags. `after` is written to."""
    (still,) = np.nonzero(~moved)
    for name, state in after.items():
        state[still] = before[name][still]
        state[over] = 0.0
    return after


def forget(memory: Memory, lanes: np.ndarray | Sequence[int] | slice) -> None:
    """New episodes begin in these lanes."""
    for state in memory.values():
        state[lanes] = 0.0


def sampler_places(envs: int, index: int, samplers: int) -> np.ndarray:
    """Where a sampler's lanes stand on the exploration ladder: each sampler has some of every kind."""
    return (np.arange(envs) * samplers + index + 0.5) / (envs * samplers)


def action_map(spec: ActionSpec) -> Callable[[np.ndarray], np.ndarray]:
    """Recorded actions to the environment's: choices from `start` on; -1 and 1 are a bounded box's bounds."""
    if spec.kind != "box":
        start = np.asarray(spec.start, np.int64).reshape(spec.shape)
        return (lambda a: a + start) if start.any() else (lambda a: a)
    low, high = (np.asarray(b, np.float64).reshape(spec.shape) for b in (spec.low, spec.high))
    least, most = float32_bounds(spec)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return lambda a: np.clip(a, least, most).astype(np.float32)
    middle, half = (high + low) / 2, (high - low) / 2
    return lambda a: np.clip(middle + half * a, least, most).astype(np.float32)


def _only(tree: Tree, *keys: str) -> Tree:
    return {key: tree[key] for key in keys}
