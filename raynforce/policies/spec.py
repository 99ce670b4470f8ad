"""Networks as data: what torch learns with and numpy acts with are two readings of one spec."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from raynforce.errors import UsageError, nearest
from raynforce.spaces import MASK, ActionSpec, ObsLeaf, channels_last, tuples

SQRT2 = math.sqrt(2.0)


@dataclass(frozen=True)
class Linear:
    """`y = x W + b` with `W` stored `[in, out]`, initialised orthogonally times `gain`."""

    size: int
    gain: float = SQRT2
    uniform: bool = False
    """Initialise weights and biases uniformly between -1 and 1 over the root of the inputs' number, as torch does."""


@dataclass(frozen=True)
class Conv:
    """2-D convolution over `[channels, height, width]` with a square kernel."""

    channels: int
    kernel: int
    stride: int = 1
    gain: float = SQRT2
    padding: Literal["valid", "same"] = "valid"
    """`same` adds zeros so that only the stride makes the image smaller, one more behind than in front if it is odd."""

    def pads(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The zeros in front of and behind the height and the width of an image of a shape."""
        if self.padding == "valid":
            return (0, 0), (0, 0)
        missing = [max(0, (-(-n // self.stride) - 1) * self.stride + self.kernel - n) for n in shape[1:]]
        return tuple((zeros // 2, zeros - zeros // 2) for zeros in missing)

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sides = shape[1:]
        if self.padding != "valid":
            sides = tuple(n + sum(zeros) for n, zeros in zip(sides, self.pads(shape), strict=True))
        return (self.channels, *((n - self.kernel) // self.stride + 1 for n in sides))


@dataclass(frozen=True)
class Activation:
    name: Literal["tanh", "relu", "elu", "silu"]


@dataclass(frozen=True)
class LayerNorm:
    """Normalise over all features of one sample, then scale and shift."""

    eps: float = 1e-5
    """What is added to the variance."""


@dataclass(frozen=True)
class LSTM:
    """Long short-term memory (Hochreiter and Schmidhuber 1997). Its state is its output, then its cells: `2 * size`."""

    size: int

    @property
    def state_size(self) -> int:
        return 2 * self.size

    @property
    def gates(self) -> int:
        return 4  # in this order: input, forget, output, candidate


@dataclass(frozen=True)
class GRU:
    """Gated recurrent unit (Cho et al. 2014), as torch has it: the reset gate acts on the product of the state."""

    size: int

    @property
    def state_size(self) -> int:
        return self.size

    @property
    def gates(self) -> int:
        return 3  # in this order: reset, update, candidate


Layer = Linear | Conv | Activation | LayerNorm | LSTM | GRU
LAYERS: dict[str, type[Any]] = {c.__name__: c for c in (Linear, Conv, Activation, LayerNorm, LSTM, GRU)}
RESERVED = frozenset({"self", "obs", "only", "params", "state"})
OWN_STATE = "own"  # the name of the state that a user's own module has


@dataclass(frozen=True)
class Tower:
    """A chain of layers that reads the input, an image, a named input, an earlier tower, or several of these joined."""

    name: str
    layers: tuple[Layer, ...]
    source: str | tuple[str, ...] = "input"
    """`input`, an image's path, a named input such as `action`, or an earlier tower; several are joined flat."""
    learns_alone: bool = False
    """Whether its gradient ends in its own layers and does not go on into the towers it reads."""


@dataclass(frozen=True)
class Free:
    """A learned vector that does not depend on the observation (a Gaussian policy's log standard deviation)."""

    name: str
    size: int
    init: float = 0.0


@dataclass(frozen=True)
class Input:
    """How one leaf of the observation enters the network: flat floats, an image, or one-hot codes."""

    path: str
    encoding: Literal["vector", "image", "planes", "onehot"]  # image: bytes as 0 … 1; planes: numbers as they are
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    stack: int = 1  # how many frames it is made of, joined along the first axis

    @property
    def width(self) -> int:
        return sum(self.sizes) if self.encoding == "onehot" else math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        return self.encoding in ("image", "planes") and len(self.shape) in (2, 3, 4)

    @property
    def channels_last(self) -> bool:
        """Whether an image is `[height, width, channels]`; a stack of three dimensions has its channels in front."""
        return len(self.shape) - (self.stack > 1) >= 3 and channels_last(self.shape[-3:])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` as convolutions see it; frames stacked in front, `[frames, …]`, are more channels."""
        *frames, first, middle, last = self.shape if len(self.shape) > 2 else (1, *self.shape)
        channels, height, width = (last, first, middle) if self.channels_last else (first, middle, last)
        return (math.prod(frames) * channels, height, width)

    def require_rows(self, batch: Any) -> None:
        """Refuse a numpy or torch batch that is not `[N, …]` of this input."""
        if math.prod(batch.shape[1:]) != math.prod(self.shape) or not batch.ndim:
            wanted = ", ".join(map(str, ("N", *self.shape)))
            raise UsageError(f"{self.path} has the shape {list(batch.shape)}; wanted is [{wanted}]")

    def channels_first(self, batch: Any) -> Any:
        """A numpy or torch batch `[N, …]` of this leaf as `[N, C, H, W]`, without a copy where none is needed."""
        if self.channels_last:
            batch = batch.swapaxes(-1, -2).swapaxes(-2, -3)  # H W C, H C W, C H W
        return batch.reshape(len(batch), *self.image_shape)


class Param(NamedTuple):
    name: str
    shape: tuple[int, ...]
    offset: int
    init: float  # orthogonal gain of a weight, constant of anything else; if uniform, the bound
    uniform: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Any) -> Any:
        return flat[self.offset : self.offset + self.size].reshape(self.shape)


@dataclass(frozen=True)
class NetworkSpec:
    """A network. Towers that no other tower reads, and free vectors, are its outputs."""

    inputs: tuple[Input, ...]
    towers: tuple[Tower, ...]
    free: tuple[Free, ...] = ()
    normalize: bool = False  # whether vector inputs, not images, are normalised by their running statistics
    named: tuple[Input, ...] = ()  # inputs beside the observation, such as `action`: flat and never normalised
    own_state: int = 0  # numbers that a user's own module remembers from one step to the next
    asked: tuple[str, ...] = ()  # named inputs that a user's own module has to take

    def __post_init__(self) -> None:
        known = ["input", *(i.path for i in self.inputs if i.is_image), *(i.path for i in self.named)]
        for name in RESERVED.intersection(i.path for i in self.named):
            raise UsageError(f"a named input is called {name!r}, as an argument of every call is: take another name")
        for tower in self.towers:
            for source in several(tower.source):
                if source not in known:
                    raise UsageError(f"tower {tower.name!r} reads {source!r}, which is not one of {known}")
            known.append(tower.name)
        known += [free.name for free in self.free]
        for name in known:
            if known.count(name) > 1:
                raise UsageError(f"two parts of a network are called {name!r}: names must differ (input is taken)")

    @cached_property
    def reads(self) -> dict[str, tuple[str, ...]]:
        """What each tower reads. With one image and nothing else, a convolution of `input` is one of the image."""
        found = {t.name: several(t.source) for t in self.towers}
        if any(isinstance(layer, Conv) for t in self.towers if t.source == "input" for layer in t.layers):
            if len(self.inputs) != 1 or not self.inputs[0].is_image:
                needs = "an observation that is one image (a Box of shape HxWxC or CxHxW)"
                raise UsageError(f"convolutions need {needs}, or the path of an image as the tower's source")
            path = self.inputs[0].path
            found = {name: tuple(path if s == "input" else s for s in read) for name, read in found.items()}
        read = {source for sources in found.values() for source in sources}
        if "input" in read and all(i.path in read for i in self.inputs):
            raise UsageError("a tower reads 'input', and all of the observation is read as images: leave it out")
        return found

    @cached_property
    def images(self) -> tuple[Input, ...]:
        read = {source for sources in self.reads.values() for source in sources}
        return tuple(i for i in self.inputs if i.path in read)

    @cached_property
    def flat(self) -> tuple[Input, ...]:
        """The other leaves: made flat and joined, they are `input`."""
        return tuple(i for i in self.inputs if i not in self.images)

    @cached_property
    def needs(self) -> dict[str, frozenset[str]]:
        """The named inputs that each tower reads, itself or through other towers."""
        names = {i.path for i in self.named}
        found: dict[str, frozenset[str]] = {}
        for tower in self.towers:
            read = self.reads[tower.name]
            found[tower.name] = frozenset(names.intersection(read)).union(*(found.get(s, ()) for s in read))
        return found

    def given(self, named: Mapping[str, Any]) -> list[Input]:
        """The named inputs that a call was given, numpy or torch batches; refuses what does not fit."""
        require_named(named, [leaf.path for leaf in self.named], "this network")
        leaves = [leaf for leaf in self.named if leaf.path in named]
        for leaf in leaves:
            leaf.require_rows(named[leaf.path])
        return leaves

    def lacks(self, output: str, given: Collection[str]) -> str:
        """How to say that an output reads inputs that were not given; empty if it does not."""
        lacking = sorted(name for name in self.needs.get(output, ()) if name not in given)
        call = ", ".join(f"{name}=…" for name in lacking)
        return f"reads {', '.join(lacking)}, which this call was not given: add {call}" if lacking else ""

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        read = {source for sources in self.reads.values() for source in sources}
        return tuple(t.name for t in self.towers if t.name not in read) + tuple(f.name for f in self.free)

    def sources(self, names: Collection[str]) -> set[str]:
        """These towers, and all that they read, directly or through other towers."""
        found = set(names)
        for tower in reversed(self.towers):
            if tower.name in found:
                found.update(self.reads[tower.name])
        return found

    @cached_property
    def input_width(self) -> int:
        return sum(i.width for i in self.flat)

    @cached_property
    def normalizes(self) -> bool:
        """Whether there is anything to normalise: images that are read as such are left as they are."""
        return self.normalize and bool(self.flat)

    @cached_property
    def states(self) -> dict[str, int]:
        """The size of what each recurrent layer remembers from one step to the next; empty without memory."""
        layers = ((f"{tower.name}.{index}", layer) for tower, index, layer, _ in self.walk())
        found = {name: layer.state_size for name, layer in layers if isinstance(layer, LSTM | GRU)}
        return found | ({OWN_STATE: self.own_state} if self.own_state else {})

    def initial_state(self, lanes: int) -> dict[str, np.ndarray]:
        """What is remembered where an episode begins, `[B, size]` each: zeros."""
        return {name: np.zeros((lanes, size), np.float32) for name, size in self.states.items()}

    @cached_property
    def conv_products(self) -> int:
        """Multiplications in the convolutions of one observation: what acting on images costs."""
        convs = [(layer, shape) for _, _, layer, shape in self.walk() if isinstance(layer, Conv)]
        return sum(math.prod(layer.output(shape)) * shape[0] * layer.kernel**2 for layer, shape in convs)

    def walk(self) -> Iterator[tuple[Tower, int, Layer, tuple[int, ...]]]:
        """Yield every layer with its tower, index and input shape (a Linear after a Conv sees it flat)."""
        shapes: dict[str, tuple[int, ...]] = {"input": (self.input_width,)}
        shapes |= {i.path: i.image_shape for i in self.images}
        shapes |= {i.path: (i.width,) for i in self.named}
        for tower in self.towers:
            sources = [shapes[source] for source in self.reads[tower.name]]
            shape = sources[0] if len(sources) == 1 else (sum(map(math.prod, sources)),)
            for index, layer in enumerate(tower.layers):
                if isinstance(layer, Linear | LSTM | GRU):
                    shape = (math.prod(shape),)
                yield tower, index, layer, shape
                if isinstance(layer, Linear | LSTM | GRU):
                    shape = (layer.size,)
                elif isinstance(layer, Conv):
                    if len(shape) != 3:
                        raise UsageError(f"{layer} of tower {tower.name!r} comes after a flat layer: put it before")
                    if min(layer.output(shape)) < 1:
                        raise UsageError(f"{layer} does not fit an input of shape {shape}: use a smaller kernel")
                    shape = layer.output(shape)
            shapes[tower.name] = shape

    def params(self) -> list[Param]:
        wanted: list[tuple[str, tuple[int, ...], float]] = []
        bounds: dict[str, float] = {}
        for tower, index, layer, shape in self.walk():
            name = f"{tower.name}.{index}"
            if isinstance(layer, Linear):
                wanted += [(f"{name}.weight", (shape[0], layer.size), layer.gain), (f"{name}.bias", (layer.size,), 0.0)]
                if layer.uniform:
                    bounds |= dict.fromkeys((f"{name}.weight", f"{name}.bias"), 1 / math.sqrt(shape[0]))
            elif isinstance(layer, Conv):
                kernel = (layer.channels, shape[0], layer.kernel, layer.kernel)
                wanted += [(f"{name}.weight", kernel, layer.gain), (f"{name}.bias", (layer.channels,), 0.0)]
            elif isinstance(layer, LayerNorm):
                wanted += [(f"{name}.scale", shape, 1.0), (f"{name}.shift", shape, 0.0)]
            elif isinstance(layer, LSTM | GRU):
                width = layer.gates * layer.size
                wanted += [(f"{name}.x.weight", (shape[0], width), 1.0), (f"{name}.h.weight", (layer.size, width), 1.0)]
                wanted += [(f"{name}.bias", (width,), 0.0)]
                if isinstance(layer, GRU):  # the candidate's, inside of the reset gate
                    wanted += [(f"{name}.h.bias", (layer.size,), 0.0)]
        wanted += [(free.name, (free.size,), free.init) for free in self.free]
        offsets = accumulate((math.prod(shape) for _, shape, _ in wanted), initial=0)
        return [
            Param(name, shape, at, bounds.get(name, init), name in bounds)
            for (name, shape, init), at in zip(wanted, offsets, strict=False)
        ]

    @cached_property
    def parts(self) -> dict[str, slice]:
        return {p.name: slice(p.offset, p.offset + p.size) for p in self.params()}

    def initial(self, rng: np.random.Generator) -> np.ndarray:
        """Fresh parameters as one float32 vector: orthogonal or uniform weights, constant everything else."""
        params = self.params()
        flat = np.empty(sum(p.size for p in params), np.float32)
        for p in params:
            if p.uniform:
                p.view(flat)[...] = rng.uniform(-p.init, p.init, p.shape)
            else:
                p.view(flat)[...] = _orthogonal(p.shape, p.init, rng) if p.name.endswith(".weight") else p.init
        biases = {p.name: p.view(flat) for p in params if p.name.endswith(".bias")}
        for tower, index, layer, _ in self.walk():
            if isinstance(layer, LSTM):  # at first it forgets little (Jozefowicz et al. 2015)
                biases[f"{tower.name}.{index}.bias"][layer.size : 2 * layer.size] = 1.0
        return flat

    def facts(self) -> dict[str, Any]:
        """All that parameters have to fit, by name; what they are initialised with is no part of it."""
        found: dict[str, Any] = {"network.normalize_obs": self.normalize}
        found |= {f"network.named.{i.path}": dataclasses.asdict(i) for i in self.named}
        if self.own_state:
            found["network.memory_size"] = self.own_state
        found["network.towers"] = [t.name for t in self.towers] + [f.name for f in self.free]  # in their order
        shapes = {p.name: str(list(p.shape)) for p in self.params()}
        for tower, index, layer, _ in self.walk():
            name = f"{tower.name}.{index}"
            if index == 0 and tower.source != "input":
                found[f"{tower.name}.source"] = tower.source if isinstance(tower.source, str) else list(tower.source)
            if isinstance(layer, Activation):
                found[name] = layer.name
            elif isinstance(layer, LSTM | GRU):
                found[name] = type(layer).__name__
            elif isinstance(layer, Conv):
                found[f"{name}.stride"] = layer.stride
                if layer.padding != "valid":
                    found[f"{name}.padding"] = layer.padding
            elif layer != LayerNorm() and isinstance(layer, LayerNorm):
                found[f"{name}.eps"] = layer.eps
            found |= {k: shape for k, shape in shapes.items() if k.rpartition(".")[0] == name}
        return found | shapes

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        del data["asked"]
        for tower, plain in zip(self.towers, data["towers"], strict=True):
            plain["layers"] = [{"type": type(x).__name__, **dataclasses.asdict(x)} for x in tower.layers]
        if not self.named:
            del data["named"]
        if not self.own_state:
            del data["own_state"]
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> NetworkSpec:
        def layer(d: dict[str, Any]) -> Layer:
            made: Layer = LAYERS[d["type"]](**{k: v for k, v in d.items() if k != "type"})
            return made

        return NetworkSpec(
            inputs=tuple(Input(**tuples(d)) for d in data["inputs"]),
            towers=tuple(Tower(layers=tuple(map(layer, d.pop("layers"))), **d) for d in map(tuples, data["towers"])),
            free=tuple(Free(**d) for d in data["free"]),
            normalize=data["normalize"],
            named=tuple(Input(**tuples(d)) for d in data.get("named", ())),
            own_state=data.get("own_state", 0),
        )


def several(source: str | tuple[str, ...]) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source


def require_named(given: Collection[str], known: Sequence[str], who: str) -> None:
    for name in given:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise UsageError(
                f"{name!r} is no input of {who}{nearest(name, known)}: beside the observation it takes {takes}"
            )


def _orthogonal(shape: tuple[int, ...], gain: float, rng: np.random.Generator) -> np.ndarray:
    """Saxe et al. 2014. Columns (of `[in, out]`) or output channels (of a convolution) are orthonormal."""
    rows, cols = (shape[0], shape[1]) if len(shape) == 2 else (math.prod(shape[1:]), shape[0])
    q, r = np.linalg.qr(rng.standard_normal((max(rows, cols), min(rows, cols))))
    q = q * np.sign(np.diag(r))
    q = gain * (q if rows >= cols else q.T)  # [rows, cols]
    return q.astype(np.float32) if len(shape) == 2 else q.T.reshape(shape).astype(np.float32)


def inputs_of(leaves: Sequence[ObsLeaf]) -> tuple[Input, ...]:
    """What a network reads of an observation: all but the mask of allowed actions."""
    found = []
    for leaf in leaves:
        if leaf.path == MASK:
            continue
        if leaf.kind in ("discrete", "multidiscrete"):
            found.append(Input(leaf.path, "onehot", leaf.shape, leaf.sizes, leaf.start))
        elif leaf.kind == "box" and leaf.dtype == "uint8" and 2 <= len(leaf.shape) <= 4:
            found.append(Input(leaf.path, "image", leaf.shape, stack=leaf.stack))
        else:
            found.append(Input(leaf.path, "vector", leaf.shape))
    return tuple(found)


def action_input(action: ActionSpec) -> Input:
    """Recorded actions as an input called `action`: the numbers of a box, one-hot codes of choices."""
    if action.kind == "box":
        return Input("action", "vector", action.shape)
    return Input("action", "onehot", action.shape, action.sizes, (0,) * len(action.sizes))


def mlp(hidden: Sequence[int], activation: Any, *, uniform: bool = False) -> tuple[Layer, ...]:
    """Hidden layers of a multi-layer perceptron."""
    return tuple(x for size in hidden for x in (Linear(size, uniform=uniform), Activation(activation)))
