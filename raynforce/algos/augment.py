"""Image augmentation: random shifts of what is learned from (DrQ, Kostrikov et al. 2020, arXiv 2004.13649)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from raynforce.errors import UsageError
from raynforce.lazy import LazyModule
from raynforce.policies.images import as_image
from raynforce.policies.spec import Input
from raynforce.spaces import ObsLeaf

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

Augment = Literal["no", "shift"]
SHARE = 21  # of the shorter side, by which images are shifted at most: 4 pixels of 84, as in the paper


def images_of(leaves: Sequence[ObsLeaf]) -> dict[str, Input]:
    """The images of an observation by path; refuses one that has none."""
    found = {leaf.path: image for leaf in leaves if (image := as_image(leaf)) is not None}
    if not found:
        seen = ", ".join(f"{leaf.path} is {leaf.dtype} {list(leaf.shape)}" for leaf in leaves)
        needs = "algorithm.augment = 'shift' needs an image in the observation (uint8 of HxW, HxWxC or CxHxW)"
        raise UsageError(f"{needs}, and {seen}: leave it out")
    return found


def shifted(obs: Mapping[str, Tensor], images: Mapping[str, Input]) -> dict[str, Tensor]:
    """Observations `[N, ...]` with every image moved by some pixels, edges repeated; all frames of a stack alike."""
    return {path: _shifted(x, images[path]) if path in images else x for path, x in obs.items()}


def _shifted(x: Tensor, image: Input) -> Tensor:
    planes = image.channels_first(x)  # [N, C, H, W]
    count, _, height, width = planes.shape
    most = max(1, min(height, width) // SHARE)
    down, right = torch.randint(-most, most + 1, (2, count, 1), device=x.device)
    rows = (torch.arange(height, device=x.device) + down).clamp(0, height - 1)  # [N, H]
    columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)  # [N, W]
    each = torch.arange(count, device=x.device)[:, None, None]
    moved = planes[each, :, rows[:, :, None], columns[:, None, :]]  # [N, H, W, C]
    if not image.channels_last:
        return moved.movedim(3, 1).reshape(x.shape)
    frames = moved.reshape(count, height, width, -1, x.shape[-1])  # those of a stack are in front
    return frames.movedim(3, 1).reshape(x.shape)
