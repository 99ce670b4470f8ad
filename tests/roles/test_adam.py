"""Adam over one flat vector is torch's Adam with torch's clipping."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from raynforce.roles.adam import Adam, Place
from raynforce.trees import join, split

STEPS = 50


def gradients(seed: int = 0, size: int = 37) -> list[torch.Tensor]:
    """Gradients of very different lengths, so that some are clipped and some are not."""
    rng = np.random.default_rng(seed)
    lengths = 10.0 ** rng.uniform(-3, 2, STEPS)
    found = [torch.from_numpy(rng.standard_normal(size).astype(np.float32)) for _ in range(STEPS)]
    return [g / g.norm() * float(length) for g, length in zip(found, lengths, strict=True)]


def start() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(37).astype(np.float32))


def rate(step: int) -> float:
    return 0.01 * (1 - step / STEPS)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-5])
def test_equals_torch(max_norm: float | None, epsilon: float) -> None:
    flat, parameter = start(), torch.nn.Parameter(start())
    ours, theirs = Adam(flat, epsilon), torch.optim.Adam([parameter], eps=epsilon)
    for step, gradient in enumerate(gradients()):
        length = ours.step(gradient.clone(), rate(step), max_norm)
        torch.testing.assert_close(length, gradient.norm())
        parameter.grad = gradient.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        theirs.param_groups[0]["lr"] = rate(step)
        theirs.step()
        torch.testing.assert_close(flat, parameter.detach(), rtol=1e-5, atol=2e-6)
    assert (flat - start()).abs().max() > 0.05


def test_clipping_matters_here() -> None:
    """The lengths above are clipped in part: with and without are different runs."""
    flats = [start(), start()]
    for flat, max_norm in zip(flats, (None, 0.5), strict=True):
        adam = Adam(flat, 1e-8)
        for gradient in gradients():
            adam.step(gradient.clone(), 0.01, max_norm)
    assert (flats[0] - flats[1]).abs().max() > 1e-3


def test_first_step_is_the_learning_rate() -> None:
    flat = torch.zeros(3)
    length = Adam(flat, 1e-8).step(torch.tensor([3.0, -4.0, 0.0]), 0.1, None)
    assert float(length) == 5.0
    torch.testing.assert_close(flat, torch.tensor([-0.1, 0.1, 0.0]))


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_state_and_load_go_on_exactly(max_norm: float | None) -> None:
    flat = start()
    adam = Adam(flat, 1e-5)
    for gradient in gradients()[:20]:
        adam.step(gradient.clone(), 0.01, max_norm)
    arrays, rest = split(adam.state())
    arrays = {k: v.copy() for k, v in arrays.items()}
    resumed_flat = flat.clone()
    resumed = Adam(resumed_flat, 1e-5)
    resumed.load(join(arrays, json.loads(json.dumps(rest))))
    for gradient in gradients()[20:]:
        adam.step(gradient.clone(), 0.01, max_norm)
        resumed.step(gradient.clone(), 0.01, max_norm)
    assert torch.equal(flat, resumed_flat)
    for key, array in adam.state().items():
        np.testing.assert_array_equal(array, resumed.state()[key])


def test_state_is_a_copy() -> None:
    adam = Adam(start(), 1e-8)
    before = adam.state()
    adam.step(gradients()[0].clone(), 0.01, None)
    assert not before["first"].any()
    assert before["count"] == 0
    assert adam.state()["count"] == 1


# -- groups -----------------------------------------------------------------------------------------------------------

GROUPS = [[slice(0, 5), slice(20, 30)], [slice(5, 20)], [slice(30, 37)]]
HOW: list[tuple[float, float | None]] = [(0.01, 0.5), (0.002, None), (0.1, 1e6)]


def named(groups: list[Place]) -> dict[str, Place]:
    return {str(index): group for index, group in enumerate(groups)}


def test_a_frozen_group_is_an_optimiser_that_was_not_asked() -> None:
    flat, groups = start(), named([(group, 0.01, None) for group in GROUPS])
    ours, (alone,) = Adam(flat, 1e-8), [start()[part] for part in GROUPS[1]]
    theirs = Adam(alone, 1e-8)
    for index, gradient in enumerate(gradients()[:20]):
        if index == 10:
            saved, ours = ours.state(), Adam(flat, 1e-8)
            ours.load(saved)
        before = flat[GROUPS[1][0]].clone()
        ours.step_groups(gradient.clone(), groups, ["1"] if index % 3 else [])
        if index % 3:
            assert torch.equal(flat[GROUPS[1][0]], before)
        else:
            theirs.step(gradient[GROUPS[1][0]].clone(), 0.01, None)
    torch.testing.assert_close(flat[GROUPS[1][0]], alone, rtol=1e-5, atol=1e-6)


def test_groups_are_optimisers_of_their_own() -> None:
    flat = start()
    ours = Adam(flat, 1e-8)
    alone = [torch.cat([start()[part] for part in group]) for group in GROUPS]
    theirs = [Adam(part, 1e-8) for part in alone]
    for gradient in gradients():
        length = ours.step_groups(gradient.clone(), named([(g, *how) for g, how in zip(GROUPS, HOW, strict=True)]))
        torch.testing.assert_close(length, gradient.norm())
        for adam, group, how in zip(theirs, GROUPS, HOW, strict=True):
            adam.step(torch.cat([gradient[part] for part in group]), *how)
        for part, group in zip(alone, GROUPS, strict=True):
            torch.testing.assert_close(torch.cat([flat[place] for place in group]), part, rtol=1e-5, atol=1e-6)


def test_groups_save_what_one_group_saves() -> None:
    """So a resumed run may have other groups."""
    flat, other = start(), start()
    one, several = Adam(flat, 1e-8), Adam(other, 1e-8)
    for gradient in gradients()[:20]:
        one.step(gradient.clone(), 0.01, None)
        several.step_groups(gradient.clone(), named([(group, 0.01, None) for group in GROUPS]))
    torch.testing.assert_close(flat, other)
    resumed = Adam(other.clone(), 1e-8)
    resumed.load(several.state())
    for key, array in one.state().items():
        np.testing.assert_allclose(array, resumed.state()[key], rtol=1e-5, atol=1e-7)
