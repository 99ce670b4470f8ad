"""Acting: specs and versions survive JSON and checkpoints, and a policy acts on whatever form an observation has."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raynforce import Policy
from raynforce.errors import UsageError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion, action_map
from raynforce.policies.distributions import EpsilonGreedy, head_size
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.spec import Conv, Free, Linear, NetworkSpec, Tower, inputs_of, mlp
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf
from raynforce.trees import join, split

BOX = (ObsLeaf("obs", "box", (3,), "float32"),)
DICT = (
    ObsLeaf("obs/place", "discrete", (), "int64", sizes=(4,), start=(1,)),
    ObsLeaf("obs/body/arm", "box", (2, 2), "float32"),
    ObsLeaf("obs/body/legs/1", "box", (3,), "float32"),  # a tuple inside a dict
)
IMAGE = (ObsLeaf("obs", "box", (8, 8, 3), "uint8"),)
DISCRETE = ActionSpec("discrete", (), "int64", sizes=(4,), start=(0,))
SHIFTED = ActionSpec("discrete", (), "int64", sizes=(4,), start=(-1,))
MULTI = ActionSpec("multidiscrete", (2,), "int64", sizes=(2, 3), start=(0, 10))
BOUNDED = ActionSpec("box", (2,), "float32", low=(-2.0, 0.0), high=(2.0, 10.0))
UNBOUNDED = ActionSpec("box", (2,), "float32", low=(-math.inf, -1.0), high=(math.inf, 1.0))


def acting_spec(obs: tuple[ObsLeaf, ...] = BOX, action: ActionSpec = DISCRETE, **more: Any) -> ActingSpec:
    output = more.get("values", "q") if more.get("exploration") == "epsilon" else "policy"
    size = head_size(action)
    first = (Conv(3, 4, 2),) if obs is IMAGE else ()
    towers = (Tower(output, (*first, *mlp((8,), "tanh"), Linear(size))), Tower("value", (*first, Linear(1))))
    free = (Free("log_std", size, -0.5),) if action.kind == "box" else ()
    network = NetworkSpec(inputs_of(obs), towers, free, normalize=obs is BOX)
    return ActingSpec(EnvSpec("Test-v0", obs, action), network, {output: size, "value": 1}, **more)


def version_of(spec: ActingSpec, seed: int = 0, epsilon: float = 0.5) -> PolicyVersion:
    params = spec.network.initial(np.random.default_rng(seed))
    if not spec.network.normalize:
        return PolicyVersion(7, params, schedules={"epsilon": epsilon})
    shift, scale = (np.full(spec.network.input_width, x, np.float32) for x in (0.25, 2))
    return PolicyVersion(7, params, shift, scale, {"epsilon": epsilon})


def policy(obs: tuple[ObsLeaf, ...] = BOX, action: ActionSpec = DISCRETE, *, seed: int = 0, **more: Any) -> Policy:
    spec = acting_spec(obs, action, **more)
    return Policy(spec, version_of(spec), seed)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3), dtype=np.float32)


def dict_rows(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    legs = (None, rng.standard_normal((count, 3), dtype=np.float32))
    return {"place": rng.integers(1, 5, count), "body": {"arm": rng.standard_normal((count, 2, 2)), "legs": legs}}


def one_of(obs: dict[str, Any], index: int) -> dict[str, Any]:
    body = obs["body"]
    return {"place": obs["place"][index], "body": {"arm": body["arm"][index], "legs": (None, body["legs"][1][index])}}


# -- data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        acting_spec(record=("logp",)),
        acting_spec(DICT, MULTI),
        acting_spec(IMAGE, BOUNDED),
        acting_spec(BOX, UNBOUNDED, factory="my_networks:make"),
        acting_spec(exploration="epsilon", values="advantage"),
        acting_spec(exploration="epsilon", record=("priority",), state_value="value", gamma=0.9, ladder=3.0),
    ],
    ids=["discrete", "dict", "image", "unbounded", "epsilon", "ladder"],
)
def test_spec_round_trip(spec: ActingSpec) -> None:
    assert ActingSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_spec_saved_before_there_were_ladders_and_priorities() -> None:
    spec = acting_spec(exploration="epsilon")
    saved = {k: v for k, v in spec.to_json().items() if k not in ("state_value", "gamma", "ladder")}
    assert ActingSpec.from_json(saved) == spec
    now = replace(spec, record=("priority",), state_value="value", gamma=0.9, ladder=3.0)
    assert now.facts() == spec.facts()  # a run goes on without them, or with them


def test_priorities_are_of_action_values() -> None:
    with pytest.raises(UsageError, match=r"exploration = 'policy' records no priorities.*leave 'priority' out"):
        acting_spec(record=("priority",))


@pytest.mark.parametrize("obs", [BOX, DICT], ids=["normalised", "plain"])
def test_version_round_trip(obs: tuple[ObsLeaf, ...]) -> None:
    version = version_of(acting_spec(obs))
    arrays, rest = split(version.state())
    again = PolicyVersion.from_state(join(arrays, json.loads(json.dumps(rest))))
    assert (again.number, again.schedules) == (7, {"epsilon": 0.5})
    np.testing.assert_array_equal(again.params, version.params)
    if obs is BOX:
        np.testing.assert_array_equal(again.shift, [0.25] * 3)
        np.testing.assert_array_equal(again.scale, [2] * 3)
    else:
        assert again.shift is again.scale is None


def test_actor_acts_with_the_version_it_was_given_last() -> None:
    spec = acting_spec()
    actor, obs = Actor(spec), {"obs": rows(4)}
    actor.load(version_of(spec))
    first = actor.outputs(obs)["policy"]
    actor.load(PolicyVersion(7, version_of(spec, seed=1).params))  # the same number again, after going back
    assert not np.array_equal(actor.outputs(obs)["policy"], first)
    actor.load(version_of(spec))
    np.testing.assert_array_equal(actor.outputs(obs)["policy"], first)


# -- acting ---------------------------------------------------------------------------------------------------


def outputs(chosen: Policy, obs: dict[str, np.ndarray]) -> np.ndarray:
    """The first output of the policy's network, asked directly."""
    version = version_of(chosen.spec)
    net = NumpyNet(chosen.spec.network)
    net.load(version.params, version.shift, version.scale)
    return net(obs)["policy"]


def test_greedy_is_the_network_s_best_shifted_by_the_start() -> None:
    plain, shifted = policy(), policy(action=SHIFTED)
    obs = rows(20)
    best = outputs(plain, {"obs": obs}).argmax(1)
    assert len(set(best.tolist())) > 1
    assert plain.act(obs).tolist() == best.tolist()
    assert shifted.act(obs).tolist() == (best - 1).tolist()


@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOUNDED, UNBOUNDED], ids=lambda a: a.kind)
def test_single_and_batched(action: ActionSpec) -> None:
    chosen, obs = policy(action=action), rows(5)
    batched = chosen.act(obs)
    assert batched.shape == (5, *action.shape)
    for i in range(5):
        single = chosen.act(obs[i])
        assert np.shape(single) == action.shape
        np.testing.assert_allclose(single, batched[i], atol=1e-6)
    np.testing.assert_allclose(chosen.act(obs[:1]), batched[:1], atol=1e-6)
    np.testing.assert_allclose(chosen.act(obs.tolist()), batched, atol=1e-6)  # lists will do


def test_continuous_actions_stay_within_bounds() -> None:
    chosen, obs = policy(action=BOUNDED), rows(200)
    expected = np.clip(outputs(chosen, {"obs": obs}) * [2, 5] + [0, 5], [-2, 0], [2, 10])
    np.testing.assert_allclose(chosen.act(obs), expected, atol=1e-6)
    sampled = chosen.act(obs, greedy=False)
    assert (sampled >= [-2, 0]).all()
    assert (sampled <= [2, 10]).all()
    assert not np.allclose(sampled, expected)


def test_dict_observations() -> None:
    chosen, obs = policy(DICT), dict_rows(6)
    flat = {"obs/place": obs["place"], "obs/body/arm": obs["body"]["arm"], "obs/body/legs/1": obs["body"]["legs"][1]}
    expected = outputs(chosen, flat).argmax(1)
    assert chosen.act(obs).tolist() == expected.tolist()
    assert [int(chosen.act(one_of(obs, i))) for i in range(6)] == expected.tolist()


def test_image_observations() -> None:
    image = np.random.default_rng(0).integers(256, size=(2, 8, 8, 3)).astype(np.uint8)
    chosen = policy(IMAGE)
    assert chosen.act(image).tolist() == outputs(chosen, {"obs": image}).argmax(1).tolist()
    assert chosen.act(image[0]) == chosen.act(image)[0]


@pytest.mark.parametrize("more", [{}, {"exploration": "epsilon"}], ids=["policy", "epsilon"])
def test_sampling_is_seeded(more: dict[str, Any]) -> None:
    obs = rows(50)
    first, again, other = (policy(seed=seed, **more).act(obs, greedy=False).tolist() for seed in (1, 1, 2))
    assert first == again != other
    chosen = policy(seed=1, **more)
    assert chosen.act(obs, greedy=False).tolist() != chosen.act(obs, greedy=False).tolist()
    assert policy(seed=1, **more).act(obs).tolist() == policy(seed=2, **more).act(obs).tolist()  # greedy


def test_epsilon_decides_how_often_sampling_is_greedy() -> None:
    spec, obs = acting_spec(exploration="epsilon"), rows(4000)
    greedy = Policy(spec, version_of(spec)).act(obs)
    for epsilon in (0.0, 0.4):
        sampled = Policy(spec, version_of(spec, epsilon=epsilon), 0).act(obs, greedy=False)
        assert abs((sampled == greedy).mean() - (1 - epsilon * 3 / 4)) <= 5 * math.sqrt(epsilon / 4000)


def test_the_ladder_by_hand() -> None:
    spec = acting_spec(exploration="epsilon", ladder=4.0)
    found = spec.distribution((np.arange(4) + 0.5) / 4)
    assert isinstance(found, EpsilonGreedy)
    np.testing.assert_allclose(found.exponent, [4**-0.75, 4**-0.25, 4**0.25, 4**0.75])
    level = replace(spec, ladder=1.0).distribution((np.arange(4) + 0.5) / 4)
    assert isinstance(level, EpsilonGreedy)
    assert level.exponent == 1.0


def test_a_policy_that_samples_is_on_no_ladder() -> None:
    spec, obs = acting_spec(exploration="epsilon"), rows(500)
    level, steep = (Policy(replace(spec, ladder=x), version_of(spec), 0) for x in (1.0, 100.0))
    np.testing.assert_array_equal(level.act(obs, greedy=False), steep.act(obs, greedy=False))


def test_outputs_that_are_only_recorded_are_computed_for_samplers_alone() -> None:
    plain = acting_spec(exploration="epsilon", state_value="value")
    recording, places = replace(plain, record=("priority",)), np.full(4, 0.5)
    for spec, where, expected in (
        (recording, places, {"q", "value"}),
        (recording, None, {"q"}),
        (plain, places, {"q"}),
        (replace(recording, state_value=None), places, {"q"}),
    ):
        actor = Actor(spec, places=where)
        actor.load(version_of(spec))
        assert set(actor.outputs({"obs": rows(4)})) == expected


# -- masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("more", [{}, {"exploration": "epsilon"}], ids=["policy", "epsilon"])
@pytest.mark.parametrize("action", [DISCRETE, SHIFTED], ids=["plain", "shifted"])
def test_masked_choices(greedy: bool, more: dict[str, Any], action: ActionSpec) -> None:
    chosen, obs = policy(action=action, **more), rows(400)
    allowed = [1, 3]
    mask = np.isin(np.arange(4), allowed)
    start = action.start[0]
    batched = chosen.act(obs, mask=np.tile(mask, (400, 1)), greedy=greedy) - start
    assert set(batched.tolist()) == set(allowed)
    assert set((chosen.act(obs, mask=mask, greedy=greedy) - start).tolist()) == set(allowed)  # one mask for all
    singles = {int(chosen.act(x, mask=mask, greedy=greedy)) - start for x in obs[:40]}
    assert singles <= set(allowed)
    only = np.random.default_rng(0).integers(4, size=400)  # a different single choice in every row
    found = chosen.act(obs, mask=np.eye(4)[only], greedy=greedy) - start
    np.testing.assert_array_equal(found, only)


def test_masked_epsilon_greedy_is_uniform_over_what_is_allowed() -> None:
    spec = acting_spec(exploration="epsilon")
    chosen = Policy(spec, version_of(spec, epsilon=1.0), 0)
    action = chosen.act(rows(6000), mask=np.array([True, False, True, True]), greedy=False)
    share = np.bincount(action, minlength=4) / 6000
    np.testing.assert_allclose(share, [1 / 3, 0, 1 / 3, 1 / 3], atol=5 * math.sqrt(2 / 9 / 6000))


def test_a_full_mask_changes_nothing() -> None:
    obs, mask = rows(50), np.ones(4, bool)
    for greedy in (True, False):
        np.testing.assert_array_equal(policy().act(obs, mask=mask, greedy=greedy), policy().act(obs, greedy=greedy))


def test_masks_of_several_choices_stand_side_by_side() -> None:
    chosen, obs = policy(action=MULTI), rows(100)
    mask = np.array([False, True, True, False, True])  # of the first choice 1; of the second 0 or 2
    for greedy in (True, False):
        found = chosen.act(obs, mask=mask, greedy=greedy)
        assert set(found[:, 0].tolist()) == {1}
        assert set(found[:, 1].tolist()) <= {10, 12}


def test_wrong_masks() -> None:
    with pytest.raises(UsageError, match=r"mask has shape \[3\]; allowed are \[4\] or"):
        policy().act(rows(2), mask=np.ones(3))
    with pytest.raises(UsageError, match="discrete"):
        policy(action=BOUNDED).act(rows(2), mask=np.ones(2))


@pytest.mark.parametrize(("count", "masks"), [(1, 3), (2, 3), (3, 2)])
def test_more_or_fewer_masks_than_observations(count: int, masks: int) -> None:
    with pytest.raises(UsageError):
        policy().act(rows(count), mask=np.ones((masks, 4)))


@pytest.mark.parametrize("more", [{}, {"exploration": "epsilon"}], ids=["policy", "epsilon"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_mask_that_allows_nothing(greedy: bool, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        policy(**more).act(rows(20), mask=np.zeros(4), greedy=greedy)


# -- wrong use ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (2,), (4,), (2, 4), (2, 2, 3), (0,)])
def test_wrong_shapes_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError) as error:
        policy().act(np.zeros(shape))
    text = str(error.value)
    assert str(list(shape)) in text
    assert "[3]" in text
    assert "[N, 3]" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("obs", "missing"),
    [
        ({"place": 1}, "body/arm"),
        ({"place": 1, "body": {"arm": np.zeros((2, 2))}}, "body/legs/1"),
        ({"place": 1, "body": {"arm": np.zeros((2, 2)), "legs": (None,)}}, "body/legs/1"),
        (5, "place"),
        (np.zeros(3), "place"),
    ],
)
def test_missing_parts_are_named(obs: Any, missing: str) -> None:
    with pytest.raises(UsageError, match=f"no '{missing}'"):
        policy(DICT).act(obs)


def test_leaves_that_disagree_about_the_batch() -> None:
    obs = dict_rows(3)
    mixed = {"place": obs["place"], "body": one_of(obs, 0)["body"]}
    with pytest.raises(UsageError):
        policy(DICT).act(mixed)


@pytest.mark.parametrize("obs", [[[1.0, 2.0, 3.0], [1.0]], "three", [None, "a", 1.0]])
def test_observations_that_are_no_array(obs: Any) -> None:
    with pytest.raises(UsageError):
        policy().act(obs)


@pytest.mark.parametrize("place", [0, 5])
def test_discrete_observations_out_of_range(place: int) -> None:
    with pytest.raises(UsageError):
        policy(DICT).act({**one_of(dict_rows(1), 0), "place": place})


def test_state_is_for_recurrent_policies() -> None:
    with pytest.raises(UsageError, match="has no memory"):
        policy().act(rows(1), state=np.zeros(1))


@pytest.mark.parametrize("gaussian", ["wide", "squashed"])
def test_a_gaussian_of_the_observation_goes_through_json_and_is_told_to_hosts(gaussian: Any) -> None:
    env = EnvSpec("env", BOX, BOUNDED)
    network = NetworkSpec(inputs_of(env.obs), (Tower("policy", (Linear(4),)),))
    spec = ActingSpec(env, network, {"policy": 4}, record=("logp",), gaussian=gaussian, log_std_range=(-1.0, 0.5))
    assert ActingSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.kept == ("policy",)
    assert spec.for_host()["gaussian"] == gaussian
    assert spec.for_host()["log_std_range"] == [-1.0, 0.5]
    assert spec.facts()["gaussian"] == [gaussian, -1.0, 0.5]
    actor = Actor(spec)
    actor.load(PolicyVersion(1, np.random.default_rng(0).normal(0, 3, 16).astype(np.float32)))
    chosen = actor.greedy({"obs": np.random.default_rng(1).normal(0, 3, (50, 3)).astype(np.float32)})
    assert (chosen >= [-2, 0]).all()
    assert (chosen <= [2, 10]).all()
    mean = actor.outputs({"obs": np.zeros((1, 3), np.float32)})["policy"][:, :2]
    expected = np.tanh(mean) if gaussian == "squashed" else mean.clip(-1, 1)
    np.testing.assert_allclose(
        actor.greedy({"obs": np.zeros((1, 3), np.float32)}), expected * [2, 5] + [0, 5], rtol=1e-5
    )
    with pytest.raises(UsageError, match="needs an output 'policy' of 4 numbers"):
        replace(spec, heads={"policy": 2})


def test_a_free_gaussian_is_written_as_it_always_was() -> None:
    env = EnvSpec("env", BOX, BOUNDED)
    network = NetworkSpec(inputs_of(env.obs), (Tower("policy", (Linear(2),)),), (Free("log_std", 2),))
    spec = ActingSpec(env, network, {"policy": 2})
    assert not {"gaussian", "log_std_range"}.intersection(spec.to_json(), spec.for_host(), spec.facts())


def test_actions_are_within_bounds_that_no_float32_is() -> None:
    """0.1 of a float64 space is 0.10000000149 as float32: environments that check their space would break."""
    high = (0.1, 0.3, 1.1, 2.7, np.inf)
    for bounds in (high, high[:-1]):
        spec = ActionSpec("box", (len(bounds),), "float64", low=tuple(-x for x in bounds), high=bounds)
        for sign in (-1, 1):
            action = action_map(spec)(np.full(len(bounds), 9.0 * sign, np.float32))
            assert action.dtype == np.float32
            assert (np.abs(action.astype(np.float64)) <= bounds).all()
            np.testing.assert_allclose(action[:4], sign * np.array(bounds[:4]), rtol=1e-6)
