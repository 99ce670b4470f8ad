"""Images in an observation: which leaves are convolved, by which layers, and how towers come to read the result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from raynforce.errors import UsageError
from raynforce.policies.spec import Activation, Conv, Input, Layer, Tower, inputs_of, several
from raynforce.spaces import MASK, ObsLeaf

Convolutions = tuple[tuple[int, ...], ...]  # channels, kernel and stride of each convolution

# By the shorter side of the image, longest first: below 64, strides leave 1,568 features of it at most,
# which are what the hidden layers' parameters, and most of an update's time, depend on.
DEFAULTS: tuple[tuple[int, Convolutions], ...] = (
    (64, ((32, 8, 4), (64, 4, 2), (64, 3, 1))),  # Mnih et al. 2015
    (32, ((16, 4, 2), (32, 3, 2), (32, 3, 2))),
    (16, ((16, 3, 2), (32, 3, 2))),
    (10, ((16, 3, 1), (32, 3, 2))),
    (5, ((16, 3, 1), (32, 3, 1))),
)


def with_images(
    leaves: Sequence[ObsLeaf], towers: Sequence[Tower], conv: Convolutions | None, named: Collection[str] = ()
) -> tuple[tuple[Input, ...], tuple[Tower, ...]]:
    """The inputs and towers of a network in which every image has convolutions of its own in front.

    Towers that read the whole input, alone or beside a `named` one, then read what the convolutions give, flat and
    joined with the rest. `conv` holds for every image; None chooses by size and leaves those below 5 pixels flat; empty
    leaves all flat.
    """
    leaves = [leaf for leaf in leaves if leaf.path != MASK]
    inputs = inputs_of(leaves)
    if any(isinstance(layer, Conv) for tower in towers for layer in tower.layers):  # the algorithm has its own
        if conv:
            raise UsageError(f"network.conv = {_shown(conv)}, but this algorithm has convolutions of its own: leave it")
        return inputs, tuple(towers)
    found: list[Input] = []
    eyes: list[Tower] = []
    for leaf, flat in zip(leaves, inputs, strict=True):
        image = as_image(leaf, any_box=bool(conv))
        chosen = default_convolutions(image) if image is not None and conv is None else conv
        if image is None or not chosen:
            found.append(flat)
            continue
        found.append(image)
        eyes.append(Tower(f"conv{leaf.path.removeprefix('obs')}", _layers(image, chosen), leaf.path))
    if conv and not eyes:
        seen = ", ".join(f"{leaf.path} is {leaf.dtype} {list(leaf.shape)}" for leaf in leaves)
        needs = "an image in the observation (a Box of HxWxC or CxHxW, or HxW bytes)"
        raise UsageError(f"network.conv = {_shown(conv)} needs {needs}, and {seen}: leave it out")
    if not eyes:
        return inputs, tuple(towers)
    source = [eye.name for eye in eyes] + (["input"] if len(eyes) < len(found) else [])

    def seeing(tower: Tower) -> Tower:
        read = several(tower.source)
        if "input" not in read or (len(read) > 1 and not set(read).intersection(named)):
            return tower
        joined = tuple(part for each in read for part in (source if each == "input" else (each,)))
        return replace(tower, source=joined if len(joined) > 1 else joined[0])

    return tuple(found), (*eyes, *map(seeing, towers))


def as_image(leaf: ObsLeaf, *, any_box: bool = False) -> Input | None:
    """The leaf as an image: bytes of 2 to 4 dimensions (a stack: 3 or 4), flags of 3, or any numbers of 3 if asked."""
    dimensions = len(leaf.shape)
    if leaf.kind == "box" and leaf.dtype == "uint8" and 2 + (leaf.stack > 1) <= dimensions <= 4:
        return Input(leaf.path, "image", leaf.shape, stack=leaf.stack)
    if dimensions == 3 and (leaf.kind == "multibinary" or (leaf.kind == "box" and any_box)):
        return Input(leaf.path, "planes", leaf.shape, stack=leaf.stack)
    return None


def default_convolutions(image: Input) -> Convolutions:
    return next((chosen for least, chosen in DEFAULTS if min(image.image_shape[1:]) >= least), ())


def _layers(image: Input, conv: Convolutions) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    shape: tuple[int, ...] = image.image_shape
    for index, (channels, kernel, stride) in enumerate(conv):
        layer = Conv(channels, kernel, stride)
        if min(layer.output(shape)) < 1:
            whole = "" if index == 0 else f" that are left of {image.image_shape[1]}x{image.image_shape[2]}"
            large = f"a kernel of {kernel} is larger than the {shape[1]}x{shape[2]} pixels of {image.path}{whole}"
            fix = "use smaller kernels and strides, or leave network.conv out"
            raise UsageError(f"network.conv[{index}] = {[channels, kernel, stride]}: {large}; {fix}")
        layers += [layer, Activation("relu")]
        shape = layer.output(shape)
    return tuple(layers)


def _shown(conv: Convolutions) -> str:
    return str([list(layer) for layer in conv])
