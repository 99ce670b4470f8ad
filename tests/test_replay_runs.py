"""Whole runs of topology replay: equal and resumed ones, with the buffer in the learner's process and in shards."""

from __future__ import annotations

import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import rays
from failing import is_sound
from marks import slow, slowly
from pools import kill
from running import metrics

import raynforce
from raynforce.driver.status import Callback, Status
from raynforce.engines.native.role_set import RoleSet
from raynforce.errors import UsageError
from raynforce.runtimes import pool

SMALL: dict[str, Any] = {
    "eval.every": 0,
    "eval.episodes": 2,
    "eval.final_episodes": 0,
    "log_every": 200,
    "checkpoint.every": 0,
    "sampling.envs": 4,
    "sampling.fragment": 8,
    "algorithm.learning_starts": 100,
    "algorithm.buffer_size": 1200,  # smaller than the run: the ring goes round
    "algorithm.samples_per_insert": 4.0,
    "algorithm.target_every": 10,
}
CASES: dict[str, dict[str, Any]] = {
    "in the learner": {"sampling.samplers": 2},
    "two shards": {"sampling.samplers": 3, "replay.shards": 2},
    "prioritised": {"sampling.samplers": 2, "algorithm.prioritized": True},
    "prioritised shards": {"sampling.samplers": 2, "replay.shards": 2, "algorithm.prioritized": True},
}


def train(
    out: Path, settings: dict[str, Any], steps: int = 3000, runtime: str = "inline", **more: Any
) -> raynforce.Run:
    return raynforce.train(
        "CartPole-v1",
        "dqn",
        steps=steps,
        seed=1,
        runtime=runtime,
        topology="replay",
        out=out,
        settings=SMALL | settings,
        progress="quiet",
        **more,
    )


class StopAt(Callback):
    """Stops a run as Ctrl-C would, once."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_round(self, status: Status) -> None:
        if status.steps >= self.steps and status.stop_reason is None:
            os.kill(os.getpid(), signal.SIGINT)


def ratio(run: raynforce.Run) -> float:
    (last,) = [line for line in metrics(run.path) if "replay/samples_per_insert" in line][-1:]
    return float(last["replay/samples_per_insert"])


@pytest.mark.parametrize("case", ["in the learner", "prioritised shards", *slowly("two shards", "prioritised")])
def test_same_seed_same_run_and_a_resumed_one_equals_it(case: str, tmp_path: Path) -> None:
    every = {"checkpoint.every": 500}  # at the same steps in both: a checkpoint brings all samplers to a border
    whole = train(tmp_path / "whole", CASES[case] | every)
    again = train(tmp_path / "again", CASES[case] | every)
    assert whole.result.weights_sha256 == again.result.weights_sha256
    assert whole.result.updates == pytest.approx((whole.result.steps - 100) * 4 / 64, rel=0.1)
    killed = tmp_path / "killed"
    pid = os.fork()
    if pid == 0:
        train(killed, CASES[case] | every, callbacks=[lambda s: s.steps < 1700 or os.kill(os.getpid(), signal.SIGKILL)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    resumed = raynforce.resume(killed, progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert (resumed.result.steps, resumed.result.episodes, resumed.result.updates) == (
        whole.result.steps,
        whole.result.episodes,
        whole.result.updates,
    )


@pytest.mark.parametrize("runtime", slowly("process", "ray"))
def test_it_runs_in_processes_and_on_ray(runtime: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    rays.needs(runtime, request)
    run = train(tmp_path / "run", CASES["prioritised shards"], runtime=runtime)
    is_sound(run)
    assert 3.6 <= ratio(run) <= 4.0
    last = [line for line in metrics(run.path) if "replay/age" in line][-1]
    assert last["replay/size"] <= last["replay/capacity"] == 1200
    assert last["replay/age"] > 0
    assert last["health/lost_transitions"] == 0


class Kill(Callback):
    """Kills members of the run's crew, each after so many rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, which: dict[int, str]) -> None:
        self.which, self.round, self.done = which, 0, 0
        build = RoleSet.__init__

        def keep(crew: RoleSet, *args: Any) -> None:
            build(crew, *args)
            self.crew = crew

        monkeypatch.setattr(RoleSet, "__init__", keep)

    def on_round(self, status: Status) -> None:
        self.round += 1
        if self.round in self.which:
            kind = self.which[self.round]
            kill(next(member for member in self.crew.pool.members if member.kind == kind))
            self.done += 1


class KillTooLarge(Kill):
    """Kills a shard, once it is known that its state is too large to be kept."""

    def on_round(self, status: Status) -> None:
        shard = self.crew.shards[0]
        if not self.done and math.isinf(shard.recovery_every) and status.steps > 2000:
            kill(shard)
            self.done += 1


@pytest.mark.parametrize("shards", [2, *slowly(0)])
def test_whoever_is_killed_nothing_is_lost(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "RECOVERY_SECONDS", 0.1)
    kills = {8: "learner", 16: "sampler", 24: "shard" if shards else "learner"}
    killing = Kill(monkeypatch, kills)
    settings = CASES["prioritised"] | {"replay.shards": shards}
    run = train(tmp_path / "run", settings, steps=4000, runtime="process", callbacks=[killing])
    is_sound(run)
    assert run.result.restarts == killing.done == 3
    assert run.result.lost_steps == 0
    assert 3.5 <= ratio(run) <= 4.0
    assert metrics(run.path)[-2]["health/lost_transitions"] == 0


@slow
def test_a_shard_too_large_to_be_kept_begins_empty_and_that_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RECOVERY_SECONDS", 0.02)
    monkeypatch.setattr(pool, "RECOVERY_COST", 0.0)  # on a busy machine the first one takes so long that none follows
    monkeypatch.setattr(pool, "STATE_BYTES", 20_000)
    killing = KillTooLarge(monkeypatch, {})
    settings = CASES["two shards"] | {"sampling.samplers": 2, "algorithm.buffer_size": 4000, "log_every": 50}
    run = train(tmp_path / "run", settings, steps=9000, runtime="process", callbacks=[killing])
    assert killing.done == 1
    is_sound(run)
    reports = [line for line in metrics(run.path) if "health/lost_transitions" in line]
    assert reports[-1]["health/lost_transitions"] > 0
    assert 3.5 <= ratio(run) <= 4.0, "the others go on, and so does the ratio"
    sizes = [line["replay/size"] for line in reports if "replay/size" in line]
    assert any(after < before for before, after in itertools.pairwise(sizes))


def test_stopped_and_resumed_with_other_samplers_it_keeps_its_buffer(tmp_path: Path) -> None:
    settings = CASES["two shards"]
    with pytest.raises(raynforce.Interrupted):
        train(tmp_path / "run", settings, callbacks=[StopAt(1500)])
    run = raynforce.resume(tmp_path / "run", settings={"sampling.samplers": 4}, progress="quiet")
    is_sound(run)
    assert run.result.updates == pytest.approx((run.result.steps - 100) * 4 / 64, rel=0.1)


def test_from_sync_to_replay_and_back_the_ratio_goes_on(tmp_path: Path) -> None:
    settings = SMALL | {"sampling.samplers": 2}
    common: dict[str, Any] = {"out": tmp_path / "run", "settings": settings, "progress": "quiet"}
    raynforce.train("CartPole-v1", "dqn", steps=1500, runtime="inline", topology="sync", **common)
    for steps, topology in ((3000, "replay"), (4500, "sync")):
        run = raynforce.resume(tmp_path / "run", steps=steps, topology=topology, progress="quiet")
        assert run.result.updates == pytest.approx((run.result.steps - 100) * 4 / 64, rel=0.1)


def test_shards_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(raynforce.Interrupted):
        train(tmp_path / "run", CASES["two shards"], callbacks=[StopAt(500)])
    with pytest.raises(UsageError, match=r"replay\.shards of .* is 2 and cannot become 1"):
        raynforce.resume(tmp_path / "run", settings={"replay.shards": 1}, progress="quiet")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"replay.shards": 2}, "replay.shards = 2 is more than there are samplers"),
        ({"algorithm.batch_size": 2000}, "algorithm.buffer_size = 1200 cannot hold a fragment and a batch"),
        ({"algorithm.learning_starts": 10_000}, "algorithm.samples_per_insert = 4 cannot be met"),
        ({"sampling.samplers": 2, "replay.shards": 2, "algorithm.buffer_size": 10**11}, "in 2 shards needs .* GB"),
        ({"sampling.samplers": 2, "replay.shards": 2, "network.normalize_obs": True}, "network.normalize_obs = true"),
        ({"topology": "sync", "replay.shards": 1}, "replay.shards = 1 divides the buffer of topology replay"),
        ({"replay.compress": True}, r"compresses images.* and 'obs' is \(4,\) float32: leave it out"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=line) as caught:
        raynforce.train(
            "CartPole-v1",
            "dqn",
            runtime="inline",
            out=tmp_path / "run",
            settings={"topology": "replay", "steps": 3000} | SMALL | settings,
            progress="quiet",
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_ppo_has_no_replay(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"learns from replay, such as dqn, sac or td3, and ppo learns"):
        raynforce.train("CartPole-v1", "ppo", topology="replay", runtime="inline", out=tmp_path / "run")
