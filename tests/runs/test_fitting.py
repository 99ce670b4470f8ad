"""The table of what does not fit: every difference once, aligned, and not too many."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from raynforce.algos import algorithm_class
from raynforce.errors import CheckpointError
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec
from raynforce.runs.fitting import MOST_ROWS, Difference, differences, require_fit
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

ENV = EnvSpec("Arm-v0", (ObsLeaf("obs", "box", (4,), "float32"),), ActionSpec("discrete", (), "int64", (2,), (0,)))
BOX = replace(ENV, action=ActionSpec("box", (1,), "float32", low=(-2.0,), high=(2.0,)))


def acting(algo: str = "ppo", env: EnvSpec = ENV, **network: Any) -> ActingSpec:
    config, _ = resolve({"env": env.env, "algo": algo, "preset": "none", "network": network})
    return algorithm_class(algo)(config, env).acting()


def differing(old: ActingSpec, new: ActingSpec, **how: bool) -> dict[str, tuple[str, str]]:
    facts = (json.loads(json.dumps(spec.facts(**how))) for spec in (old, new))
    return {row.what: (row.found, row.expected) for row in differences(*facts)}


def test_the_table_is_aligned_and_has_only_what_differs() -> None:
    found = {"env": "Arm-v0", "heads": {"policy": 2, "value": 1}, "sizes": (3, 4)}
    expected = {"env": "Arm-v0", "heads": {"policy": 5, "value": 1}, "sizes": (3, 40)}
    with pytest.raises(CheckpointError) as caught:
        require_fit(found, expected, "runs/x", settings=({"hidden": [64]}, {"hidden": [32]}), hint="do this")
    assert str(caught.value).splitlines() == [
        "the checkpoint in runs/x does not fit this config:",
        "  what          found in the checkpoint  expected here",
        "  hidden[0]     64                       32",
        "  heads.policy  2                        5",
        "  sizes[1]      4                        40",
        "do this",
    ]
    assert caught.value.exit_code == 2


def test_settings_alone_refuse_nothing() -> None:
    require_fit({"a": (1, 2)}, {"a": [1, 2]}, "x", settings=({"hidden": 1}, {"hidden": 2}))


def test_a_long_table_is_cut_and_says_so() -> None:
    found, expected = ({str(k): n for k in range(50)} for n in (0, 1))
    with pytest.raises(CheckpointError) as caught:
        require_fit(found, expected, "x")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 + MOST_ROWS + 1
    assert lines[-1] == "  … and 30 more"


def test_what_is_missing_and_what_is_long() -> None:
    (row,) = differences({"a": "x" * 200}, {})
    assert (row.what, row.expected, len(row.found)) == ("a", "–", 48)
    assert list(differences({"a": [1]}, {"a": [1, 2]})) == [Difference("a", "[1]", "[1, 2]")]


def test_another_width_changes_shapes_by_name() -> None:
    assert differing(acting(hidden=[8]), acting(hidden=[6])) == {
        "policy.0.weight": ("[4, 8]", "[4, 6]"),
        "policy.0.bias": ("[8]", "[6]"),
        "policy.2.weight": ("[8, 2]", "[6, 2]"),
        "value.0.weight": ("[4, 8]", "[4, 6]"),
        "value.0.bias": ("[8]", "[6]"),
        "value.2.weight": ("[8, 1]", "[6, 1]"),
    }


def test_what_has_no_parameters_counts_too() -> None:
    assert differing(acting(hidden=[8]), acting(hidden=[8], activation="relu")) == {
        "policy.1": ("tanh", "relu"),
        "value.1": ("tanh", "relu"),
    }
    plain, normalised = acting(normalize_obs=False), acting(normalize_obs=True)
    assert differing(plain, normalised) == {"network.normalize_obs": ("false", "true")}


def test_the_order_of_towers_counts() -> None:
    spec = acting()
    turned = replace(spec, network=replace(spec.network, towers=spec.network.towers[::-1]))
    assert set(differing(spec, turned)) == {"network.towers[0]", "network.towers[1]"}


def test_ppo_and_impala_have_the_same_network_and_dqn_another() -> None:
    assert differing(acting("ppo", normalize_obs=False), acting("impala")) == {}
    rows = differing(acting("ppo"), acting("dqn"))
    assert rows["heads.q"] == ("–", "2")
    assert rows["heads.policy"] == ("2", "–")


def test_weights_alone_fit_another_environment_of_the_same_shapes() -> None:
    wider = replace(BOX, env="Arm-v1", args={"load": 3}, action=replace(BOX.action, high=(5.0,)))
    assert differing(acting(env=BOX), acting(env=wider)) == {
        "env": ("Arm-v0", "Arm-v1"),
        "env_args.load": ("–", "3"),
        "action.high[0]": ("2.0", "5.0"),
    }
    assert differing(acting(env=BOX), acting(env=wider), weights_alone=True) == {}
    longer = replace(ENV, obs=(ObsLeaf("obs", "box", (6,), "float32"),))
    assert differing(acting(), acting(env=longer), weights_alone=True)["obs.shape[0]"] == ("4", "6")


def test_a_spec_that_was_written_and_read_is_the_same() -> None:
    spec = acting(env=BOX)
    assert differing(ActingSpec.from_json(spec.to_json()), spec) == {}
