"""What roles ask for, and whether it fits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raynforce
from raynforce.config import Config, FaultsConfig, LearnerConfig, NetworkConfig, RayConfig, SamplingConfig
from raynforce.errors import UsageError
from raynforce.runtimes import placing
from raynforce.runtimes.placing import Demands, needs, place_roles, require_room, total_needs
from raynforce.runtimes.ray.shipping import code_roots
from raynforce.topologies.sync import SYNC


def config(samplers: int = 1, learner: LearnerConfig | None = None, runtime: Any = "ray", **ray: Any) -> Config:
    return Config(
        env="CartPole-v1",
        runtime=runtime,
        sampling=SamplingConfig(samplers=samplers),
        learner=learner or LearnerConfig(),
        ray=RayConfig(**ray),
    )


def test_defaults_without_limits() -> None:
    places, notes = place_roles(config(8, LearnerConfig(threads=4)), None)
    assert notes == []
    assert [places[role].cpus for role in ("sampler", "learner", "evaluator")] == [1, 1, 0]
    assert [places[role].nice for role in ("sampler", "learner", "evaluator")] == [5, 0, 15]
    assert [places[role].threads for role in ("sampler", "learner", "evaluator")] == [1, 4, 1]
    assert total_needs(places, 8) == {"CPU": 9}


@pytest.mark.parametrize(("env", "cpus"), [("./my_sim", 2), ("listen:unix:/s", 1), ("CartPole-v1", 1)])
def test_a_simulator_that_a_sampler_starts_is_counted(env: str, cpus: int) -> None:
    asked = replace(config(3), env=env, topology="sync")
    places, _ = place_roles(asked, None, SYNC.demands(asked, torch=False))
    assert total_needs(places, 3) == {"CPU": 3 * cpus + 1}
    places, _ = place_roles(replace(asked, ray=RayConfig(sampler_cpus=0.5)), None, SYNC.demands(asked, torch=False))
    assert places["sampler"].cpus == 0.5


def test_what_is_asked_for_is_asked_of_ray() -> None:
    asked = config(
        2, sampler_cpus=0.5, learner_gpus=1, sampler_resources={"simulator": 1}, learner_resources={"big": 2}
    )
    places, _ = place_roles(asked, [{"CPU": 2, "GPU": 1, "simulator": 2, "big": 2}])
    assert needs(places["sampler"]) == {"CPU": 0.5, "simulator": 1}
    assert needs(places["learner"]) == {"CPU": 1, "GPU": 1, "big": 2}


def test_a_learner_on_cuda_asks_for_a_gpu() -> None:
    places, _ = place_roles(config(learner=LearnerConfig(device="cuda:0")), None)
    assert places["learner"].gpus == 1


def test_defaults_shrink_on_a_small_cluster_and_say_so() -> None:
    places, notes = place_roles(config(), [{"CPU": 1.0}])
    assert (places["sampler"].cpus, places["learner"].cpus) == (0.5, 0.5)
    assert notes == ["the cluster has 1 CPU: sampler and learner ask for 0.5 each"]


def test_only_what_was_left_open_shrinks() -> None:
    places, notes = place_roles(config(learner_cpus=0.75), [{"CPU": 1.0}])
    assert (places["sampler"].cpus, places["learner"].cpus) == (0.25, 0.75)
    assert notes == ["the cluster has 1 CPU: sampler asks for 0.25"]


@pytest.mark.parametrize(
    ("asked", "nodes", "words"),
    [
        # Numbers that were given are kept, and the shortfall is told in numbers with ways out that do fit.
        (config(4), [{"CPU": 4.0}], ["ask for 5 CPUs", "has 4, 1 short", "--samplers 3", "--sampler-cpus 0.5"]),
        (config(1, sampler_cpus=1.0, learner_cpus=1.0), [{"CPU": 1.0}], ["2 CPUs", "1 short", "--sampler-cpus"]),
        # As many in all as asked for, but in pieces.
        (config(1, learner_cpus=3.0), [{"CPU": 2.0}] * 2, ["has 4 in all", "its largest node has 2"]),
        (config(2, sampler_resources={"simulator": 1}), [{"CPU": 8.0, "simulator": 1.0}], ["2 simulator", "1 short"]),
        # Names that nobody has.
        (
            config(1, sampler_resources={"simulator": 1}),
            [{"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0, "big": 1.0}],
            ['has no "simulator"', "it has CPU, big:"],
        ),
        (config(1, learner_gpus=1), [{"CPU": 4.0}], ['has no "GPU"', "learner.device=cpu"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    asked: Config, nodes: list[dict[str, float]], words: list[str]
) -> None:
    with pytest.raises(UsageError) as raised:
        place_roles(asked, nodes)
    line = str(raised.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == [], line


def test_where_nodes_may_join_a_quorum_is_enough() -> None:
    asked = config(6)
    places, notes = place_roles(asked, [{"CPU": 2.0}] * 2, may_grow=True)
    assert notes == ["the cluster has room for 3 of 6 samplers; the others join when there is room"]
    assert places["sampler"].cpus == places["learner"].cpus == 1, "what was asked for stays"
    for nodes, grows in ([{"CPU": 2.0}] * 2, False), ([{"CPU": 3.0}], True):
        with pytest.raises(UsageError, match=r"ask for 7 CPUs"):
            place_roles(asked, nodes, may_grow=grows)
    stricter = replace(asked, faults=FaultsConfig(quorum=0.51))  # four of six
    with pytest.raises(UsageError, match=r"3 short"):
        place_roles(stricter, [{"CPU": 2.0}] * 2, may_grow=True)
    with pytest.raises(UsageError, match=r"the learner asks for .GPU."):  # no node that joins is a promise
        place_roles(config(6, learner_gpus=1), [{"CPU": 4.0}], may_grow=True)


def test_roles_have_the_limits_of_the_config() -> None:
    faults = FaultsConfig(start_seconds=1, sample_seconds=2, learn_seconds=3)
    places, _ = place_roles(replace(config(), faults=faults), None)
    limits = {role: (place.start_seconds, place.call_seconds) for role, place in places.items()}
    others = {"shard": (1, 3), "evaluator": (1, 2), "policy": (1, 0)}  # 0: it is the pool's to notice
    assert limits == {"sampler": (1, 2), "learner": (1, 3), **others}
    assert [role for role, place in places.items() if place.home] == ["learner"]


def test_large_roles_are_placed_first() -> None:
    asked = config(2, sampler_cpus=1.0, learner_cpus=3.0)
    assert place_roles(asked, [{"CPU": 3.0}, {"CPU": 2.0}])[1] == []  # samplers first would leave no room for three


@pytest.mark.parametrize(("runtime", "each"), [("process", 45), ("ray", 130)])
def test_more_samplers_than_memory_can_hold(runtime: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "available_bytes", lambda: (10 * each + 300) * 1_000_000)
    require_room(config(10, runtime=runtime))
    with pytest.raises(UsageError, match=r"11 samplers .* at most 10 fit here: lower --samplers"):
        require_room(config(11, runtime=runtime))


def test_samplers_that_act_with_torch_need_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placing, "available_bytes", lambda: (10 * 345 + 300) * 1_000_000)
    require_room(config(10, runtime="process"), Demands(torch=True))
    with pytest.raises(UsageError, match=r"11 samplers .*345 MB each.* at most 10 fit here"):
        require_room(config(11, runtime="process"), Demands(torch=True))
    large = {"sampling.samplers": 11, "env_args": {"length": 83, "width": 84}}
    with pytest.raises(UsageError, match=r"11 samplers .*345 MB each.* at most 10 fit here"):
        raynforce.train("raynforce.envs.tiny:Catch", runtime="process", settings=large, out=tmp_path, progress="quiet")


def test_inline_has_one_sampler_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "available_bytes", lambda: 0)
    require_room(config(1000, runtime="inline"))


def test_roots_of_the_users_modules_are_found_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "root_envs.py").write_text("raise SystemExit")
    (tmp_path / "there" / "root_nets" / "deep").mkdir(parents=True)
    (tmp_path / "there" / "root_nets" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "there")])
    asked = Config(
        env="root_envs:make", algo="gymnasium.envs:Mine", network=NetworkConfig(factory="root_nets.deep.mlp:make")
    )
    assert code_roots(asked) == [tmp_path / "here", tmp_path / "there"]
    assert code_roots(Config(env="CartPole-v1", algo="raynforce.algos.ppo:PPO")) == []
    assert code_roots(Config(env="root_nowhere:make")) == []


def test_where_an_autoscaler_adds_nodes_nothing_is_refused() -> None:
    small: list[dict[str, float]] = [{"CPU": 2}]
    with pytest.raises(UsageError, match="use --samplers 1"):
        place_roles(config(5), small, may_grow=True)
    places, notes = place_roles(config(5), small, may_grow=True, grows=True)
    assert places["sampler"].cpus == 1
    assert notes == ["the cluster has room for 1 of 5 samplers: its autoscaler is asked for more"]
    unknown = config(5, sampler_resources={"simulator": 1})
    with pytest.raises(UsageError, match='the cluster has no "simulator"'):
        place_roles(unknown, small, may_grow=True)
    _, notes = place_roles(unknown, small, may_grow=True, grows=True)
    assert notes == ["the cluster has no room for a learner and a sampler yet: its autoscaler is asked for more"]
