"""Sequences: values across episode ends, whole sequences in minibatches, and the loss of DQN, beside plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raynforce.algos import algorithm_class
from raynforce.algos.base import _predicted, concatenate, observations, rows, shuffled
from raynforce.algos.contract import declared
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.fragment import Fragment
from raynforce.experience.trajectories import Trajectories
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.torch_net import SpecNet
from raynforce.roles.sampler import Sampler
from raynforce.settings import nested

ENVS: Any = pytest.mark.parametrize(
    "env", ["CartPole-v1", "raynforce.envs.tiny:Endless"], ids=["next_step", "same_step"]
)
LANES, LENGTH = 3, 40


def setting(algo: str, env: str, **more: Any) -> tuple[Any, ActingSpec, SpecNet, PolicyVersion]:
    given = {"network.memory": "lstm", "network.memory_size": 5, "network.hidden": [6], "sampling.fragment": LENGTH}
    config, _ = resolve({"env": env, "algo": algo, "topology": "sync"}, nested(given | more))
    kind, spec = algorithm_class(algo), probe(env, {})
    acting = declared(config, spec, kind)
    flat = acting.network.initial(np.random.default_rng(0)) * 2
    net = SpecNet(acting.network, flat, torch.device("cpu"))
    shift = np.zeros(acting.network.input_width, np.float32)
    if acting.network.normalizes:
        net.normalize_with(shift, shift + 1)
    schedules = {"epsilon": 0.5}
    version = PolicyVersion(0, flat, shift, shift + 1, schedules)
    return kind(config, spec), acting, net, version


def sampled(env: str, acting: ActingSpec, version: PolicyVersion, count: int = 2) -> list[Fragment]:
    sampler = Sampler(acting, EnvArgs(env, LANES, 1), LENGTH)
    try:
        return [sampler.sample(version) for _ in range(count)]
    finally:
        sampler.close()


def value(acting: ActingSpec, version: PolicyVersion, path: list[np.ndarray]) -> float:
    """Of the last of these observations, all of one episode."""
    actor = Actor(acting, places=np.zeros(1))
    actor._net.outputs = ("value",)  # type: ignore[union-attr]
    actor.load(version)
    state = acting.network.initial_state(1)
    for obs in path:
        out, state = actor.step({"obs": obs[None]}, state)
    return float(out["value"][0, 0])


@ENVS
def test_values_are_those_of_each_episode_alone(env: str) -> None:
    _, acting, net, version = setting("ppo", env)
    fragments = sampled(env, acting, version)
    seen: list[list[np.ndarray]] = [[] for _ in range(LANES)]  # of the episode in flight, across the border
    ends = 0
    for fragment in fragments:
        out, steps = _predicted(net, fragment, 1.0)
        values = out["value"].reshape(LENGTH + 1, LANES)
        final = {int(at): obs for at, obs in zip(fragment["final/index"], fragment["final/obs"], strict=True)}
        for t, b in np.ndindex(LENGTH, LANES):
            if not fragment["valid"][t, b]:
                continue
            seen[b].append(fragment["obs"][t, b])
            assert values[t, b] == pytest.approx(value(acting, version, seen[b]), abs=1e-4)
            if fragment["terminated"][t, b] or fragment["truncated"][t, b]:
                last = final.get(t * LANES + b, fragment["obs"][t + 1, b])
                found = steps.final_value[t, b]
                assert found == pytest.approx(value(acting, version, [*seen[b], last]), abs=1e-4)
                seen[b], ends = [], ends + 1
    assert ends > 4


@ENVS
def test_minibatches_are_whole_sequences(env: str) -> None:
    _, acting, net, version = setting("ppo", env, **{"algorithm.sequence": 16})
    fragments = sampled(env, acting, version)
    number = {id(f): np.arange(LENGTH * LANES).reshape(LENGTH, LANES) + 1000 * i for i, f in enumerate(fragments)}
    logits = {id(f): net.predict(whole(f, net))["policy"].reshape(LENGTH, LANES, -1) for f in fragments}
    parts = [rows(f, {"number": number[id(f)], "logits": logits[id(f)]}) for f in fragments]
    batch = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in concatenate(parts).items()}
    assert len(batch["state0/torso.2"]) <= 2 * 3 * LANES  # 16, 16 and 8 steps
    found: list[int] = []
    for minibatch in shuffled(batch, 32, np.random.default_rng(0)):
        out = net.record(observations(minibatch))
        # States are those of the sampler, so each row is what one pass over the whole fragment gives.
        torch.testing.assert_close(out["policy"], minibatch["logits"], atol=1e-4, rtol=1e-4)
        found += minibatch["number"].tolist()
    assert sorted(found) == sorted(n for f in fragments for n in number[id(f)][f["valid"]])


def whole(fragment: Fragment, net: SpecNet) -> dict[str, np.ndarray]:
    states = {f"state0/{name}": fragment[f"state0/{name}"][0] for name in net.spec.states}
    obs = fragment["obs"][:-1]
    return {"obs": obs.reshape(-1, *obs.shape[2:]), "first": fragment["first"], **states}


@ENVS
@pytest.mark.parametrize("burn_in", [0, 3])
def test_dqn_learns_from_sequences_as_a_loop_over_them_says(env: str, burn_in: int) -> None:
    more = {"algorithm.sequence": 8, "algorithm.batch_size": 32, "algorithm.n_step": 2, "algorithm.burn_in": burn_in}
    algo, acting, net, version = setting("dqn", env, **more, **{"sampling.envs": LANES, "algorithm.double": False})
    algo.begin(net)
    algo.target = net.flat * 0.9
    for fragment in sampled(env, acting, version, 3):
        algo.replay.insert(fragment)
    batch = {k: torch.from_numpy(v) for k, v in algo.replay.sample(4, np.random.default_rng(0)).items()}
    loss = algo.loss(net, batch)

    target, own = (Actor(acting, places=np.zeros(1)) for _ in range(2))
    target.load(PolicyVersion(0, algo.target.numpy()))
    own.load(version)
    errors, sizes = [], []
    for s in range(4):
        b = {k: v[s].numpy() for k, v in batch.items()}
        states = {n: {"torso.2": b["state0/torso.2"][None]} for n in ("own", "target")}
        q, judged = [], []
        for t in range(len(b["first"])):
            for name, actor, into in (("own", own, q), ("target", target, judged)):
                if b["first"][t]:
                    states[name] = acting.network.initial_state(1)
                out, states[name] = actor.step({"obs": b["obs"][t][None]}, states[name])
                if name == "target":
                    out = actor.step({"obs": b["next_obs"][t][None]}, states[name])[0]
                into.append(out["q"][0])
        mine = []
        for k in range(8):
            goal = b["reward"][k] + b["discount"][k] * judged[b["last"][k]].max()
            mine.append((q[burn_in + k][b["action"][k]] - goal) * b["valid"][k])
        errors += mine
        sizes.append(0.9 * np.abs(mine).max() + 0.1 * np.abs(mine).mean())
    huber = [0.5 * e * e if abs(e) < 1 else abs(e) - 0.5 for e in errors]
    assert loss.total.item() == pytest.approx(np.mean(huber), rel=1e-3)
    assert loss.per_sample is not None
    np.testing.assert_allclose(loss.per_sample, sizes, rtol=1e-3)
    assert torch.isfinite(net.backward(loss.gradients or {})).all()


def test_a_saved_buffer_of_sequences_draws_on_alike() -> None:
    env, more = "CartPole-v1", {"algorithm.sequence": 8, "algorithm.batch_size": 32, "algorithm.buffer_size": 300}
    more |= {"sampling.envs": LANES}
    algo, acting, net, version = setting("dqn", env, **more)
    other = setting("dqn", env, **more)[0]
    algo.begin(net), other.begin(net)
    sampler = Sampler(acting, EnvArgs(env, LANES, 1), LENGTH)
    for _ in range(4):  # the ring goes round
        algo.replay.insert(sampler.sample(version))
    other.replay.load(algo.replay.state())
    fragment = sampler.sample(version)
    sampler.close()
    for replay in (algo.replay, other.replay):
        replay.insert(fragment)
    first, second = (r.sample(4, np.random.default_rng(0)) for r in (algo.replay, other.replay))
    assert len(algo.replay) == len(other.replay) > 0
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_lanes_that_go_their_own_pace_keep_the_state_each_row_was_chosen_with() -> None:
    spec = probe("CartPole-v1", {})
    made = Trajectories(spec.obs, spec.action, 5, 2, states={"h": 1}, every=2)
    no, none = np.zeros(1, bool), np.zeros(0, np.int64)
    chosen = {0: 0.0, 1: 100.0}

    def act(lane: int) -> None:
        state = {"h": np.array([[chosen[lane]]], np.float32)}
        made.act(np.array([lane]), np.zeros(1, np.int64), np.zeros(1, np.float32), 0, state)
        chosen[lane] += 1

    def step(lane: int) -> None:
        obs = {"obs": np.zeros((1, 4), np.float32)}
        made.step(np.array([lane]), obs, np.ones(1, np.float32), no, no, none, {"obs": np.zeros((0, 4))})

    for lane, count in ((0, 7), (1, 3)):  # lane 0 fills its rows once
        made.begin(np.array([lane]), {"obs": np.zeros((1, 4), np.float32)})
        for _ in range(count):
            act(lane), step(lane)
    act(1)  # under way when the fragment is cut
    fragment = made.fragment(1)
    assert fragment is not None
    assert fragment["lane"].tolist() == [0, 0, 1]
    assert fragment["sequence"].tolist() == [0, 2, 4]
    assert fragment["state0/h"][:, 0, 0].tolist() == [0, 2, 4]
    assert fragment["state0/h"][0, 1, 0] == 5
    assert fragment["state0/h"][:2, 2, 0].tolist() == [100, 102]
    step(1)
    following = made.fragment(1)
    assert following is not None
    assert following["state0/h"][0, 0, 0] == 103  # its action was chosen before the cut
