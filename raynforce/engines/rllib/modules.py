"""RLlib's default modules as networks of ours and back: the same outputs to 1e-5, the same numbers in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.policies.acting import ActingSpec
from raynforce.policies.spec import Activation, Conv, Free, Input, Layer, LayerNorm, Linear, NetworkSpec, Param, Tower
from raynforce.spaces import EnvSpec, ObsLeaf

if TYPE_CHECKING:
    from ray.rllib.core.rl_module.torch import TorchRLModule
    from torch import Tensor

SQUASHED_RANGE = (-5.0, 2.0)  # RLlib's MIN_LOG_NN_OUTPUT and MAX_LOG_NN_OUTPUT
WIDEST = 1e30  # in place of infinity, which JSON does not have


class CannotConvert(UsageError):
    """Our network spec has no layer for a part of the module; it can be kept as torch (`kept.keep`)."""


class Move(NamedTuple):
    """One parameter of ours, and where it is in RLlib's module."""

    ours: Param
    theirs: str
    """The name of its parameter; empty for a bias that it does not have."""
    image: tuple[int, ...] = ()
    """`[C, H, W]` of the image that a linear layer reads: RLlib has made it flat with its channels last."""
    clip: float = math.inf
    """What RLlib clips a free log standard deviation to, wherever it is used."""
    flat: bool = False
    """Whether it is in RLlib's own order."""

    def take(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Our numbers, of its tensors by name."""
        if not self.theirs:
            return np.zeros(self.ours.size, np.float32)
        array = tensors[self.theirs].detach().cpu().float().numpy()
        if array.ndim == 2 and not self.flat:
            if self.image:
                channels, height, width = self.image
                array = array.reshape(-1, height, width, channels).transpose(0, 3, 1, 2).reshape(len(array), -1)
            array = array.T
        return np.clip(array, -self.clip, self.clip).reshape(-1)

    def give(self, params: np.ndarray, tensors: Mapping[str, Tensor]) -> None:
        """Write our numbers to its tensors."""
        import torch

        array = self.ours.view(params)
        if array.ndim == 2:
            array = array.T
            if self.image:
                array = array.reshape(-1, *self.image).transpose(0, 2, 3, 1).reshape(len(array), -1)
        theirs = tensors[self.theirs]
        with torch.no_grad():
            theirs.copy_(torch.from_numpy(np.ascontiguousarray(array, np.float32)).reshape(theirs.shape))


@dataclass(frozen=True)
class Conversion:
    """How a module acts as a policy of ours, and where its parameters go."""

    acting: ActingSpec
    moves: tuple[Move, ...]
    kept: str = ""
    """Why it is kept as torch; empty if it is a network of ours."""

    def params(self, module: TorchRLModule) -> np.ndarray:
        """All parameters as one float32 vector in our order."""
        tensors = self._tensors(module)
        return np.concatenate([move.take(tensors) for move in self.moves])

    def load(self, module: TorchRLModule, params: np.ndarray) -> None:
        """Write parameters of ours into a module; target networks, if it has some, become copies."""
        wanted = sum(move.ours.size for move in self.moves)
        if params.shape != (wanted,):
            raise CannotConvert(f"{list(params.shape)} parameters do not fit RLlib's module, which has {[wanted]}")
        tensors = self._tensors(module)
        for move in self.moves:
            if not move.theirs and move.ours.view(params).any():
                raise CannotConvert(f"{move.ours.name} is not 0, and RLlib's module has no bias there: give it one")
        for move in self.moves:
            if move.theirs:
                move.give(params, tensors)
        for online, target in _targets(module.unwrapped()):
            target.load_state_dict(online.state_dict())

    def _tensors(self, module: TorchRLModule) -> dict[str, Tensor]:
        found = tensors_of(module.unwrapped())
        for move in self.moves:
            shape = tuple(found[move.theirs].shape) if move.theirs in found else ()
            if move.theirs and math.prod(shape) != move.ours.size:
                has = f"{move.theirs} of {list(shape)}" if move.theirs in found else f"no {move.theirs}"
                raise CannotConvert(f"this module has {has}; wanted are {move.ours.size} numbers: give a learner's")
        return found


def tensors_of(module: Any) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _targets(module: Any) -> list[tuple[Any, Any]]:
    from ray.rllib.core.rl_module.apis import TargetNetworkAPI

    try:
        return module.get_target_network_pairs() if isinstance(module, TargetNetworkAPI) else []
    except AttributeError:  # only a learner makes them
        return []


def convert_or_keep(module: TorchRLModule, env: EnvSpec, *, normalize: bool) -> Conversion:
    """A network of ours where it can be, else RLlib's module itself, which needs torch and RLlib to act."""
    from raynforce.engines.rllib.kept import keep

    try:
        return convert(module, env, normalize=normalize)
    except CannotConvert as error:
        return keep(module, env, normalize=normalize, why=str(error))


def convert(module: TorchRLModule, env: EnvSpec, *, normalize: bool) -> Conversion:
    """A learner's module of one of RLlib's default kinds as a network of ours; `normalize`: its env runners filter."""
    from ray.rllib.algorithms.bc.torch.default_bc_torch_rl_module import DefaultBCTorchRLModule
    from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
    from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
    from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
    from ray.rllib.algorithms.tqc.torch.default_tqc_torch_rl_module import DefaultTQCTorchRLModule

    kinds = {
        DefaultPPOTorchRLModule: _actor_critic,
        DefaultBCTorchRLModule: _cloned,
        DefaultDQNTorchRLModule: _q_values,
        DefaultSACTorchRLModule: _soft_actor,
        DefaultTQCTorchRLModule: _soft_actor,
    }
    plain: Any = module.unwrapped()
    require_stateless(plain)
    if plain.inference_only:
        raise CannotConvert("this module is for inference and has no critics: give the learner's")
    kind = next((make for known, make in kinds.items() if isinstance(plain, known)), None)
    if kind is None or not type(plain).__module__.startswith("ray.rllib.algorithms."):
        raise CannotConvert(f"{type(plain).__qualname__} is a module of your own, which is kept as torch")
    return kind(plain, _Reading(plain, env, normalize))


def require_stateless(module: Any) -> None:
    if module.is_stateful():
        raise CannotConvert(
            f"{type(module).__qualname__} keeps a state between steps (an LSTM or such), and policies here have none"
            " yet: set use_lstm to false"
        )


def distribution_of(module: Any, env: EnvSpec) -> Literal["choices", "wide", "squashed"]:
    """What a module's `action_dist_inputs` are of; `wide`: means and log standard deviations of normals."""
    from ray.rllib.core.distribution.torch import torch_distribution as known

    acts_by = module.get_inference_action_dist_cls()
    made = acts_by if isinstance(acts_by, type) else type(acts_by)
    if env.action.kind != "box" and issubclass(made, known.TorchCategorical | known.TorchMultiCategorical):
        return "choices"
    if env.action.kind == "box" and issubclass(made, known.TorchDiagGaussian):
        return "wide"
    if env.action.kind == "box" and issubclass(made, known.TorchSquashedGaussian):
        return "squashed"
    what = f"{type(module).__qualname__} acts by {made.__qualname__}"
    raise CannotConvert(f"{what}, which policies here do not have for {env.action.kind} actions")


class _Chain(NamedTuple):
    """Layers of ours, each with the name of the torch layer that it is."""

    layers: tuple[tuple[Layer, str], ...] = ()

    def plus(self, other: _Chain) -> _Chain:
        return _Chain(self.layers + other.layers)

    @property
    def convolves(self) -> bool:
        return any(isinstance(layer, Conv) for layer, _ in self.layers)


class _Reading:
    """Reads the parts of a module into towers."""

    def __init__(self, module: TorchRLModule, env: EnvSpec, normalize: bool) -> None:
        self.env, self.normalize = env, normalize
        self.module: Any = module
        self._names = {id(part): name for name, part in module.named_modules()}
        self._named = tensors_of(module)
        self.towers: list[tuple[Tower, _Chain]] = []
        self.free: list[tuple[Free, str, float]] = []

    def add(self, name: str, chain: _Chain, source: str = "input") -> None:
        if chain.convolves:
            source = self.env.obs[0].path
        self.towers.append((Tower(name, tuple(layer for layer, _ in chain.layers), source), chain))

    def chain(self, part: Any) -> _Chain:
        """The layers of an encoder or a head of RLlib's."""
        from ray.rllib.core.models.torch.encoder import TorchCNNEncoder, TorchMLPEncoder
        from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead, TorchMLPHead

        known = (TorchMLPEncoder, TorchCNNEncoder, TorchMLPHead, TorchFreeLogStdMLPHead)
        if type(part) not in known:
            raise CannotConvert(
                f"{self._names[id(part)]} is a {type(part).__qualname__}, which networks here do not have"
            )
        return _Chain(tuple(self._layers(part.net)))

    def _layers(self, part: Any) -> Iterator[tuple[Layer, str]]:
        from torch import nn

        padding: tuple[int, ...] | None = None
        conv = False
        shape = tuple(self.module.observation_space.shape)[-3:]
        shape = (shape[-1], *shape[:-1])  # channels first
        for layer in _leaves(part):
            name = self._names[id(layer)]
            if isinstance(layer, nn.ZeroPad2d):
                padding = tuple(layer.padding)
            elif isinstance(layer, nn.Conv2d):
                conv = True
                made = self._conv(layer, name, padding, shape)
                shape, padding = made.output(shape), None
                yield made, name
            elif type(layer) is nn.Linear:
                yield Linear(layer.out_features), name
            elif type(layer) is nn.LayerNorm and layer.elementwise_affine and not conv:
                yield LayerNorm(layer.eps), name
            elif not isinstance(layer, nn.Flatten | nn.Identity):
                yield self._activation(layer, name), name

    def _activation(self, layer: Any, name: str) -> Activation:
        from torch import nn

        known = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.ELU: "elu", nn.SiLU: "silu"}
        found: Any = known.get(type(layer))
        if found is None or getattr(layer, "alpha", 1.0) != 1.0:
            raise CannotConvert(f"{name} is {layer}; networks here have {', '.join(known.values())}")
        return Activation(found)

    def _conv(self, layer: Any, name: str, padding: tuple[int, ...] | None, shape: tuple[int, ...]) -> Conv:
        plain = layer.padding == (0, 0) and layer.dilation == (1, 1) and layer.groups == 1
        (kernel, across), (stride, step) = layer.kernel_size, layer.stride
        if not plain or kernel != across or stride != step:
            raise CannotConvert(f"{name} is {layer}; convolutions here have square kernels and strides")
        made = Conv(layer.out_channels, kernel, stride, padding="valid" if padding is None else "same")
        if padding is not None and padding != tuple(n for pads in reversed(made.pads(shape)) for n in pads):
            raise CannotConvert(
                f"{name} pads by {list(padding)}: its stride of {stride} is above its kernel of {kernel}"
            )
        return made

    def inputs(self) -> tuple[Input, ...]:
        """The observation as RLlib's connectors hand it to the module: an image, or all leaves flat and joined."""
        return inputs_of(self.env, self.module, convolves=any(chain.convolves for _, chain in self.towers))

    def conversion(self, heads: dict[str, int], **acting: Any) -> Conversion:
        network = NetworkSpec(
            self.inputs(), tuple(t for t, _ in self.towers), tuple(f for f, *_ in self.free), self.normalize
        )
        if self.normalize and network.images:
            raise CannotConvert("the filter normalises an image, which networks here get as it is: filter without it")
        wanted, expects = network.input_width, math.prod(self.module.observation_space.shape)
        if network.flat and wanted != expects:
            seen = ", ".join(f"{i.path} {i.width}" for i in network.flat)
            raise CannotConvert(f"the module reads {expects} numbers, and the observation has {wanted}: {seen}")
        return Conversion(ActingSpec(self.env, network, heads, **acting), tuple(self._moves(network)))

    def _moves(self, network: NetworkSpec) -> Iterator[Move]:
        params = {p.name: p for p in network.params()}
        images = {f"{t.name}.{i}": s for t, i, layer, s in _before_flattening(network) if isinstance(layer, Linear)}
        for tower, chain in self.towers:
            for index, (layer, theirs) in enumerate(chain.layers):
                name = f"{tower.name}.{index}"
                if isinstance(layer, Activation):
                    continue
                bias = f"{theirs}.bias" if f"{theirs}.bias" in self._named else ""
                weight_is, bias_is = ("scale", "shift") if isinstance(layer, LayerNorm) else ("weight", "bias")
                yield Move(params[f"{name}.{weight_is}"], f"{theirs}.weight", images.get(name, ()))
                yield Move(params[f"{name}.{bias_is}"], bias)
        for free, theirs, clip in self.free:
            yield Move(params[free.name], theirs, clip=clip)

    def gaussian(self, head: Any) -> dict[str, Any]:
        """How a continuous policy's head gives its standard deviations, for the acting spec."""
        from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead

        kind = distribution_of(self.module, self.env)
        if kind == "choices":
            return {}
        if kind == "squashed":
            return {"gaussian": "squashed", "log_std_range": SQUASHED_RANGE}
        clip = min(float(head.log_std_clip_param_const), WIDEST) if head.clip_log_std else WIDEST
        if isinstance(head, TorchFreeLogStdMLPHead):
            size = math.prod(self.env.action.shape)
            self.free.append((Free("log_std", size), f"{self._names[id(head)]}.log_std", clip))
            return {}
        return {"gaussian": "wide", "log_std_range": (-clip, clip)}


def _actor_critic(module: Any, reading: _Reading) -> Conversion:
    pi, vf = reading.chain(module.pi), reading.chain(module.vf)
    if hasattr(module.encoder, "encoder"):  # shared by policy and value
        encoder = reading.chain(module.encoder.encoder)
        torso = "conv" if encoder.convolves else "torso"
        reading.add(torso, encoder)
        reading.add("policy", pi, torso)
        reading.add("value", vf, torso)
    else:
        reading.add("policy", reading.chain(module.encoder.actor_encoder).plus(pi))
        reading.add("value", reading.chain(module.encoder.critic_encoder).plus(vf))
    return reading.conversion({"policy": _width(pi), "value": 1}, **reading.gaussian(module.pi))


def _cloned(module: Any, reading: _Reading) -> Conversion:
    pi = reading.chain(module._pi_head)
    reading.add("policy", reading.chain(module._encoder).plus(pi))
    return reading.conversion({"policy": _width(pi)}, **reading.gaussian(module._pi_head))


def _soft_actor(module: Any, reading: _Reading) -> Conversion:
    """The actor alone: critics read actions, which nothing that acts has. A run that begins from it makes new ones."""
    pi = reading.chain(module.pi)
    reading.add("policy", reading.chain(module.pi_encoder).plus(pi))
    return reading.conversion({"policy": _width(pi)}, **reading.gaussian(module.pi))


def _q_values(module: Any, reading: _Reading) -> Conversion:
    if module.num_atoms > 1:
        raise CannotConvert(f"num_atoms = {module.num_atoms} learns distributions of returns; here are action values")
    encoder, af = reading.chain(module.encoder), reading.chain(module.af)
    front = "conv" if encoder.convolves else "input"
    if encoder.convolves:
        reading.add("conv", encoder)
        encoder = _Chain()
    epsilon: dict[str, Any] = {"exploration": "epsilon"}
    if not module.uses_dueling:
        reading.add("torso", encoder.plus(_Chain(af.layers[:-1])), front)
        reading.add("q", _Chain(af.layers[-1:]), "torso")
        return reading.conversion({"q": _width(af)}, **epsilon)
    reading.add("torso", encoder, front)
    reading.add("value", reading.chain(module.vf), "torso")
    reading.add("advantage", af, "torso")
    heads = {"value": 1, "advantage": _width(af)}
    return reading.conversion(heads, values="advantage", state_value="value", **epsilon)


def _width(chain: _Chain) -> int:
    last, name = chain.layers[-1]
    if not isinstance(last, Linear):
        raise CannotConvert(f"{name} is {last}; networks here end with a linear layer")
    return last.size


def _leaves(part: Any) -> Iterator[Any]:
    below = list(part.children())
    if not below:
        yield part
    for child in below:
        yield from _leaves(child)


def _before_flattening(network: NetworkSpec) -> Iterator[tuple[Tower, int, Layer, tuple[int, ...]]]:
    """Linear layers that read an image, with its shape `[C, H, W]`."""
    shapes: dict[str, tuple[int, ...]] = {i.path: i.image_shape for i in network.images}
    for tower in network.towers:
        shape = shapes.get(network.reads[tower.name][0], ())
        for index, layer in enumerate(tower.layers):
            if isinstance(layer, Conv):
                shape = layer.output(shape)
            elif isinstance(layer, Linear):
                if len(shape) == 3:
                    yield tower, index, layer, shape
                shape = ()
        shapes[tower.name] = shape


def inputs_of(env: EnvSpec, module: Any, *, convolves: bool) -> tuple[Input, ...]:
    """The leaves as RLlib reads them: one image, or all flat in the order of their sorted keys."""
    if convolves:
        return (_image(env, module.observation_space),)
    for leaf in env.obs:
        if any(leaf.start):
            raise CannotConvert(f"{leaf.path} begins at {list(leaf.start)}: RLlib's one-hot codes begin at 0")
    return tuple(_flat(leaf) for leaf in rllib_order(env.obs))


def _image(env: EnvSpec, space: Any) -> Input:
    """The image `[height, width, channels]`, which may have been bytes, or have had its channels in front."""
    leaf = env.obs[0]
    image = Input(leaf.path, "image" if scales(leaf, space) else "planes", leaf.shape, stack=leaf.stack)
    if len(env.obs) != 1 or not image.is_image:
        raise CannotConvert(f"the module reads one image, and the observation is {', '.join(x.path for x in env.obs)}")
    height, width, channels = space.shape
    if image.image_shape != (channels, height, width):
        found = f"{leaf.path} is an image of {' x '.join(map(str, image.image_shape))} (channels, height, width)"
        raise CannotConvert(f"{found}, and RLlib's module reads {list(space.shape)} as height, width, channels")
    return image


def scales(leaf: ObsLeaf, space: Any) -> bool:
    """Whether the module gets an image of bytes as 0 … 1, as its space says."""
    return leaf.dtype == "uint8" and space.dtype.kind == "f" and float(space.high.max()) <= 1.0


def _flat(leaf: ObsLeaf) -> Input:
    if leaf.kind in ("discrete", "multidiscrete"):
        return Input(leaf.path, "onehot", leaf.shape, leaf.sizes, leaf.start)
    return Input(leaf.path, "vector", leaf.shape)


def rllib_order(leaves: Sequence[ObsLeaf]) -> list[ObsLeaf]:
    """As `FlattenObservations` joins them: keys of a Dict are sorted, members of a Tuple are as they are."""

    def place(leaf: ObsLeaf) -> list[tuple[int, str]]:
        return [(int(key) if key.isdecimal() else 0, key) for key in leaf.path.split("/")]

    return sorted(leaves, key=place)
