"""Groups of parameters: where they are in the flat vector, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raynforce.errors import UsageError
from raynforce.policies.groups import REST, Group, stretches
from raynforce.policies.spec import Free, NetworkSpec, inputs_of
from raynforce.policies.torch_net import ModuleNet
from raynforce.spaces import ObsLeaf

PARTS = {
    "policy.0.weight": slice(0, 6),
    "policy.0.bias": slice(6, 8),
    "q1.0.weight": slice(8, 12),
    "q1.0.bias": slice(12, 13),
    "q10.0.weight": slice(13, 15),
    "q2.0.weight": slice(15, 19),
    "log_alpha": slice(19, 20),
}


def test_places_that_touch_are_one() -> None:
    found = stretches({"critics": Group(("q1", "q2"), 1e-3), "alpha": Group("log_alpha", 1e-4)}, PARTS)
    assert found == {
        REST: [slice(0, 8), slice(13, 15)],
        "critics": [slice(8, 13), slice(15, 19)],
        "alpha": [slice(19, 20)],
    }


def test_single_parameters_and_a_member_twice() -> None:
    found = stretches({"one": Group(("policy.0.bias", "q1", "q1.0"), 1e-3)}, PARTS)
    assert found["one"] == [slice(6, 13)]


def test_without_groups_all_is_the_rest() -> None:
    assert stretches({}, PARTS) == {REST: [slice(0, 20)]}
    everything = Group(("policy", "q1", "q10", "q2", "log_alpha"), 1e-3)
    assert stretches({"all": everything}, PARTS) == {"all": [slice(0, 20)]}


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            {"critics": Group(("q1", "q3"), 1e-3)},
            "group 'critics' has 'q3', which is no parameter: the network has policy, q1, q10, q2, log_alpha",
        ),
        ({"none": Group((), 1e-3)}, "group 'none' has no parameters: name some, or leave it out"),
        (
            {"a": Group("q1", 1e-3), "b": Group(("q1.0.bias",), 1e-3)},
            "parameter 'q1.0.bias' is in two groups, 'a' and 'b': leave it to one",
        ),
    ],
)
def test_what_cannot_be(groups: dict[str, Group], text: str) -> None:
    with pytest.raises(UsageError) as error:
        stretches(groups, PARTS)
    assert str(error.value) == text


@pytest.mark.parametrize("wrong", [{"learning_rate": -1.0}, {"learning_rate": float("nan")}, {"max_grad_norm": 0.0}])
def test_rates_and_lengths_that_cannot_be(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"a Group has {name} = "):
        Group("q", **({"learning_rate": 1e-3} | wrong))


def test_groups_of_a_module_of_one_s_own() -> None:
    module = nn.ModuleDict({"actor": nn.Linear(2, 1), "critics": nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])})
    spec = NetworkSpec(inputs_of([ObsLeaf("obs", "box", (2,), "float32")]), (), (Free("log_alpha", 1),))
    net = ModuleNet(spec, module, {"policy": 1}, torch.device("cpu"))
    found = stretches({"critics": Group("critics", 1e-3), "second": Group("log_alpha", 1e-3)}, net.parts)
    assert found == {REST: [slice(0, 3)], "critics": [slice(3, 9)], "second": [slice(9, 10)]}
