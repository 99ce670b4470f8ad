"""Runs with one policy for all environments in which roles are killed and environments fail: the others go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pools
import pytest
from centrally import FRAGMENT, STEPS, nothing_is_left, train
from failing import is_sound
from marks import slow, slowly
from rays import needs
from running import events

import raynforce
from raynforce.engines.native import engine
from raynforce.engines.native.role_set import RoleSet
from raynforce.errors import RaynforceError


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    with nothing_is_left():
        yield


# -- killing ------------------------------------------------------------------------------------------------


class Kills(raynforce.Callback):
    """Kills a role, or several at once, after each of some rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *who: str, rounds: tuple[int, ...] = (8,)) -> None:
        self.who, self.rounds, self.round = who, rounds, 0
        made: list[RoleSet] = []
        self.role_sets = made

        class Seen(RoleSet):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                made.append(self)

        monkeypatch.setattr(engine, "RoleSet", Seen)

    def on_round(self, status: raynforce.Status) -> None:
        self.round += 1
        if self.round in self.rounds:
            (found,) = self.role_sets
            members = {m.name: m for m in (*found.hosts, *found.samplers, found.learner)}
            for name in self.who:
                if members[name].handle is not None:
                    pools.kill(members[name])


SLOWLY = {"env_args.slow": 0.002, "sampling.samplers": 2}


@pytest.mark.parametrize("who", ["policy", *slowly("host 0", "host 1", "learner")])
def test_killing(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = Kills(monkeypatch, who)
    run = train(tmp_path / "run", runtime="process", steps=3 * STEPS, settings=SLOWLY, callbacks=[kills])
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["role"], fault["kind"], fault["action"]) == (who, "died", "restarted")
    assert [event["role"] for event in events(run.path, "recovered")] == [who]
    assert run.result.restarts == 1
    if who == "policy":
        assert 0 < run.result.lost_steps <= 12 * FRAGMENT
    else:
        assert run.result.lost_steps == 0
    assert run.result.dropped_steps == 0


@slow
def test_the_others_go_on_while_a_host_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed again and again, it is given up."""
    rounds = tuple(range(5, 400, 2))
    kills = Kills(monkeypatch, "host 1", rounds=rounds)
    settings = SLOWLY | {"faults.restarts": 1}
    run = train(tmp_path / "run", runtime="process", steps=3 * STEPS, settings=settings, callbacks=[kills])
    assert events(run.path, "fault")[-1]["action"] == "given up"
    assert run.result.steps >= 3 * STEPS


@pytest.mark.parametrize("whom", slowly("host 0, policy", "host 0, host 1", "host 1, policy, learner"))
def test_killing_several_at_once(whom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who = whom.split(", ")
    kills = Kills(monkeypatch, *who)
    began = time.monotonic()
    run = train(tmp_path / "run", runtime="process", steps=2 * STEPS, settings=SLOWLY, callbacks=[kills])
    assert time.monotonic() - began < 30, "nobody looked for one that is gone"
    is_sound(run)
    assert run.result.restarts == len(who)
    assert {event["role"] for event in events(run.path, "recovered")} == set(who)


# -- environments that fail ---------------------------------------------------------------------------------


def failing(
    tmp_path: Path, what: str, parallel: str = "threads", runtime: str = "process", **more: Any
) -> raynforce.Run:
    settings = {"env_args.what": what, "env_args.at": 40, "env_args.once": str(tmp_path / "once")}
    settings |= {"env_args.spared": os.getpid(), "sampling.parallel": parallel, **more}
    return train(tmp_path / "run", "fault_envs:Sudden", runtime=runtime, settings=settings)


@pytest.mark.parametrize("runtime", ["process", *slowly("ray", "inline")])
@pytest.mark.parametrize("parallel", ["threads", *slowly("processes", "no")])
def test_an_environment_that_raises(
    runtime: str, parallel: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    more = {} if runtime != "inline" else {"env_args.spared": 0}
    run = failing(tmp_path, "raise", parallel, runtime, **more)
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["kind"], fault["action"]) == ("raised", "environment restarted")
    assert "no licence" in fault["cause"]
    assert (run.result.env_restarts, run.result.restarts, run.result.lost_steps) == (1, 0, 0)


@slow
def test_environments_that_raise_often(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "fault_envs:Raising", runtime="process", settings={"env_args.p": 0.005})
    is_sound(run)
    assert run.result.env_restarts > 4
    assert (run.result.restarts, run.result.lost_steps) == (0, 0)


@pytest.mark.parametrize("parallel", slowly("threads", "processes"))
def test_an_environment_that_hangs(parallel: str, tmp_path: Path) -> None:
    run = failing(tmp_path, "sleep", parallel, **{"faults.sample_seconds": 1.5, "env_args.slow": 0.008})
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["kind"], fault["action"]) == ("hung", "environment restarted")
    assert (run.result.env_restarts, run.result.restarts, run.result.lost_steps) == (1, 0, 0)


@pytest.mark.parametrize("what", slowly("kill", "segfault", "exit"))
def test_an_environment_that_dies_in_a_process_of_its_own(what: str, tmp_path: Path) -> None:
    run = failing(tmp_path, what, "processes")
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["kind"], fault["action"]) == ("died", "environment restarted")
    assert (run.result.env_restarts, run.result.restarts, run.result.lost_steps) == (1, 0, 0)


@pytest.mark.parametrize("what", slowly("segfault", "exit", "kill"))
def test_an_environment_that_takes_its_host_along(what: str, tmp_path: Path) -> None:
    run = failing(tmp_path, what, "threads", **{"sampling.samplers": 2})
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["kind"], fault["action"]) == ("died", "restarted")
    assert fault["role"].startswith("host")
    assert run.result.restarts == 1


@pytest.mark.parametrize(
    ("samplers", "parallel", "what"),
    [(1, "threads", "hold the lock"), *slowly((2, "threads", "hold the lock"), (1, "no", "sleep"))],
)
def test_an_environment_that_lets_nobody_else_in_its_process_run(
    samplers: int, parallel: str, what: str, tmp_path: Path
) -> None:
    """C code that keeps Python's lock, or a host with one thread: it cannot even say so."""
    settings = {"env_args.what": what, "env_args.lane": 1, "env_args.at": 20, "env_args.seconds": 0.002}
    settings |= {"env_args.once": str(tmp_path / "once"), "faults.sample_seconds": 1}
    settings |= {"sampling.samplers": samplers, "sampling.parallel": parallel}
    run = train(tmp_path / "run", "central_envs:Steps", runtime="process", steps=1000, settings=settings)
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["role"], fault["kind"], fault["action"]) == ("host 0", "hung", "restarted")
    assert "fault_envs.py" in fault["said"]
    assert "faults.sample_seconds" in fault["cause"]
    assert run.result.restarts == 1


@pytest.mark.parametrize("runtime", slowly("process", "ray"))
def test_a_host_that_grows_is_replaced(runtime: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    limit = 150 if runtime == "process" else 250
    settings = {"env_args.megabytes": 4, "env_args.slow": 0.005, "faults.memory_mb": limit}
    run = train(tmp_path / "run", "fault_envs:Leaking", runtime=runtime, settings=settings)
    is_sound(run)
    faults = events(run.path, "fault")
    assert faults
    assert {(fault["role"][:4], fault["kind"], fault["action"]) for fault in faults} == {
        ("host", "memory", "restarted")
    }
    assert all("has grown to" in fault["cause"] and "faults.memory_mb" in fault["cause"] for fault in faults)
    assert run.result.lost_steps == 0


@pytest.mark.parametrize(("who", "place"), slowly(("policy", "reset"), ("host 0", "make")))
def test_an_environment_that_hangs_when_a_role_is_replaced(
    who: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap, kills = tmp_path / "trap", Kills(monkeypatch, who)

    class Lays(raynforce.Callback):
        def on_round(self, status: raynforce.Status) -> None:
            if kills.round == 7:
                trap.touch()

    settings = {"env_args.trap": str(trap), "env_args.place": place, "eval.max_length": 10, "sampling.samplers": 1}
    settings |= {"faults.sample_seconds": 2, "faults.start_seconds": 6}
    run = train(
        tmp_path / "run",
        "fault_envs:Trapped",
        runtime="process",
        steps=3 * STEPS,
        settings=settings,
        callbacks=[kills, Lays()],
    )
    is_sound(run)
    assert not trap.exists()
    assert ("host", "hung") in {(fault["role"][:4], fault["kind"]) for fault in events(run.path, "fault")}


@pytest.mark.parametrize("runtime", ["inline", *slowly("process", "ray")])
def test_an_environment_that_never_works(runtime: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    settings = {"env_args.what": "raise", "env_args.spared": os.getpid() if runtime != "inline" else 0}
    began = time.monotonic()
    with pytest.raises(RaynforceError, match="no licence") as told:
        train(tmp_path / "run", "fault_envs:Sudden", runtime=runtime, settings=settings)
    assert "\n" not in str(told.value)
    assert time.monotonic() - began < 30


def test_one_lane_that_is_broken_for_good(tmp_path: Path) -> None:
    """Its host is given up after some restarts; with the other there is a quorum."""
    settings = {"env_args.what": "raise", "env_args.lane": 4, "env_args.at": 40, "env_args.for_ever": True}
    settings |= {"env_args.once": str(tmp_path / "once"), "faults.restarts": 1, "env_args.seconds": 0.001}
    run = train(tmp_path / "run", "central_envs:Steps", runtime="process", steps=2 * STEPS, settings=settings)
    faults = events(run.path, "fault")
    given_up = [fault for fault in faults if fault["action"] == "given up"]
    assert [fault["role"] for fault in given_up] == ["host 1"]
    assert "no licence" in given_up[0]["cause"]
