"""Whole runs with one policy for all environments: uneven, stopped, resumed; what is learned, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from centrally import FRAGMENT, STEPS, is_whole, nothing_is_left, train
from commands import Start, starting
from failing import is_sound
from marks import slowly
from rays import needs
from running import events, metrics, solve

import raynforce
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    with nothing_is_left():
        yield


# -- quiet runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", *slowly("impala")])
def test_inline_the_same_seed_gives_the_same_run(algo: str, tmp_path: Path) -> None:
    one, two = (train(tmp_path / name, algo=algo) for name in "ab")
    is_whole(one)
    for count in ("weights_sha256", "steps", "episodes", "updates", "return_mean"):
        assert getattr(one.result, count) == getattr(two.result, count), count
    other = train(tmp_path / "c", algo=algo, seed=8)
    assert other.result.weights_sha256 != one.result.weights_sha256


@pytest.mark.parametrize(
    ("runtime", "algo", "parallel"),
    [
        ("process", "ppo", "threads"),
        *slowly(
            ("process", "impala", "threads"),
            ("process", "ppo", "no"),
            ("process", "ppo", "processes"),
            ("ray", "ppo", "threads"),
            ("ray", "impala", "processes"),
        ),
    ],
)
def test_apart(runtime: str, algo: str, parallel: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    settings = {"sampling.parallel": parallel}
    run = train(tmp_path / "run", algo=algo, runtime=runtime, settings=settings)
    is_whole(run)
    assert run.result.episodes > 20
    told = [line for line in metrics(run.path) if "lag/mean" in line]
    assert told
    for line in told:
        bins = [value for name, value in line.items() if name.startswith(("lag/is_", "lag/from_"))]
        assert not bins or sum(bins) == pytest.approx(1)
        assert 0 <= line["lag/mean"] <= line["lag/max"] <= run.config.stream.max_lag
        shares = {name: value for name, value in line.items() if name.startswith("time/env/")}
        assert set(shares) == {f"time/env/{what}" for what in ("busy", "policy", "wire", "learner", "restart")}
        assert sum(shares.values()) == pytest.approx(1, abs=0.02) or sum(shares.values()) == pytest.approx(100, abs=2)
    assert any(line["lag/max"] > 0 for line in told)


@pytest.mark.parametrize("runtime", ["inline", *slowly("process", "ray")])
@pytest.mark.parametrize("env", ["Pendulum-v1", *slowly("raynforce.envs.tiny:DictIdentity")])
def test_other_spaces_with_everything_scaled(
    runtime: str, env: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Continuous actions, several observations; normalised, with scaled rewards."""
    needs(runtime, request)
    settings = {"network.normalize_obs": True, "learner.scale_rewards": True}
    is_whole(train(tmp_path / "run", env, runtime=runtime, settings=settings))


@pytest.mark.parametrize(("runtime", "samplers"), [("process", 1), *slowly(("process", 2), ("ray", 2))])
def test_one_slow_environment_holds_nobody_up(
    runtime: str, samplers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ten times as slow as the five others."""
    needs(runtime, request)
    args = {
        "env_args.seconds": 0.004,
        "env_args.slow": 2,
        "sampling.samplers": samplers,
        "sampling.envs": 6 // samplers,
    }
    settings = args | {"env_args.log": str(tmp_path / "seeds"), "env_args.length": 20, "stream.max_lag": 8}
    run = train(tmp_path / "run", "central_envs:Steps", runtime=runtime, steps=2000, settings=settings)
    is_whole(run)
    assert run.result.steps_per_second is not None
    assert run.result.steps_per_second > 300, "five at full speed make 1250 a second, all at its pace 150"
    told = [line["lag/max"] for line in metrics(run.path) if "lag/max" in line]
    assert max(told) <= 8
    seeds = Counter((tmp_path / "seeds").read_text().split())
    assert max(seeds.values()) == 1, "an episode was played twice"


# -- stopped and resumed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("process", "inline"), *slowly(("inline", "process"), ("ray", "ray"))])
def test_a_resumed_run_counts_on(before: str, after: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for runtime in (before, after):
        needs(runtime, request)
    log = tmp_path / "seeds"
    settings = {"env_args.log": str(log), "env_args.length": 20, "checkpoint.every": 500}
    run = train(tmp_path / "run", "central_envs:Steps", runtime=before, settings=settings)
    is_sound(run)
    counts = checkpoint.load(RunDirectory(run.path).last)["run"]
    lost = counts["ledger"]["lost"]
    assert 0 <= lost <= 12 * FRAGMENT
    resumed = raynforce.resume(run.path, steps=2 * STEPS, runtime=after, progress="quiet")
    is_sound(resumed)
    result = resumed.result
    assert result.steps >= 2 * STEPS
    assert result.episodes > run.result.episodes
    assert result.updates > run.result.updates
    assert result.lost_steps == lost
    assert result.dropped_steps == 0
    assert result.abandoned_episodes == 6
    seeds = Counter(log.read_text().split())
    assert max(seeds.values()) == 1, "an episode was played twice"


@pytest.mark.parametrize(
    ("before", "after", "runtime"),
    [
        ("sync", "central", "inline"),
        ("central", "sync", "inline"),
        *slowly(
            ("central", "sync", "process"),
            ("overlap", "central", "process"),
            ("async", "central", "process"),
            ("central", "async", "process"),
            ("central", "overlap", "process"),
            ("sync", "central", "process"),
        ),
    ],
)
def test_another_topology_at_resume(before: str, after: str, runtime: str, tmp_path: Path) -> None:
    log = tmp_path / "seeds"
    settings = {"env_args.log": str(log), "env_args.length": 20, "learner.scale_rewards": True}
    train(tmp_path / "run", "central_envs:Steps", topology=before, runtime=runtime, settings=settings)
    resumed = raynforce.resume(
        tmp_path / "run", steps=2 * STEPS, runtime=runtime, settings={"topology": after}, progress="quiet"
    )
    is_sound(resumed)
    assert resumed.result.topology == after
    assert resumed.result.steps >= 2 * STEPS
    assert resumed.result.abandoned_episodes == 6
    assert max(Counter(log.read_text().split()).values()) == 1, "an episode was played twice"


@pytest.mark.parametrize("now", slowly(1, 3))
def test_another_number_of_hosts_at_resume(now: int, tmp_path: Path) -> None:
    train(tmp_path / "run", runtime="process")
    how = {"runtime": "process", "settings": {"sampling.samplers": now}}
    resumed = raynforce.resume(tmp_path / "run", steps=2 * STEPS, progress="quiet", **how)  # type: ignore[arg-type]
    is_sound(resumed)
    assert resumed.result.steps >= 2 * STEPS


# -- stopped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["terminal", *slowly("SIGTERM", "SIGINT")])
@pytest.mark.parametrize("parallel", ["threads", *slowly("processes")])
def test_a_signal_ends_it_with_a_checkpoint_and_leaves_nothing(how: str, parallel: str, tmp_path: Path) -> None:
    words = ["train", "ppo", "CartPole-v1", "--runtime", "process", "--topology", "central", "--steps", "1e9"]
    words += ["--samplers", "2", "--envs", "3", "--out", "run", "--no-preset"]
    for setting in ("sampling.fragment=16", "log_every=1", "eval.every=0", "eval.final_episodes=0"):
        words += ["--set", setting]
    words += ["--set", f"sampling.parallel={parallel}"]
    with starting(tmp_path) as start:
        _signal(start, tmp_path / "run", how, words)


def _signal(start: Start, run: Path, how: str, words: list[str]) -> None:
    command = start(*words, terminal=how == "terminal")
    command.until(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    command.send(how)
    assert command.ended() == (143 if how == "SIGTERM" else 130), command.said
    assert "Traceback" not in command.said
    command.nothing_left(5)
    assert [line["event"] for line in events(run)] == ["started", "stopped", "result"]
    step = checkpoint.manifest(run / "last")["step"]
    assert step == events(run)[-1]["steps"] > 0
    assert raynforce.resume(run, steps=step + 200, runtime="inline", progress="quiet").result.steps >= step + 200


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "settings", "told"),
    [
        ("dqn", {}, "learns from replay: use --topology replay"),
        ("a3c", {}, "use --topology"),
        ("ppo", {"central.batch_min": 4, "central.batch_max": 2}, "batch_min = 4 is more than central.batch_max = 2"),
        ("ppo", {"central.batch_wait": 0}, "central.batch_wait"),
        ("ppo", {"central.batch_wait": -1}, "central.batch_wait"),
        ("ppo", {"central.batch_wait": float("nan")}, "central.batch_wait"),
        ("ppo", {"central.batch_max": 0}, "central.batch_max"),
        ("ppo", {"central.batch_min": 7}, "batch_min = 7 is more than there are environments (6)"),
        ("ppo", {"sampling.parallel": "both"}, "sampling.parallel"),
        ("ppo", {"sampling.envs": 100_000, "sampling.fragment": 1_000_000}, "lower --envs or sampling.fragment"),
        ("ppo", {"replay.shards": 2}, "replay.shards"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(algo: str, settings: Any, told: str, tmp_path: Path) -> None:
    given = {"sampling.samplers": 2, "sampling.envs": 3, "preset": "none"} | settings
    with pytest.raises(UsageError) as error:
        raynforce.train(
            "CartPole-v1", algo, topology="central", runtime="process", out=tmp_path / "run", settings=given, steps=1000
        )
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("where", "free", "settings"),
    [
        ("raynforce.memory", 1_000, {}),
        ("raynforce.runtimes.placing", 2e9, {"sampling.parallel": "processes", "sampling.envs": 300}),
    ],
)
def test_what_the_memory_cannot_hold_is_refused(
    where: str, free: float, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{where}.available_bytes", lambda: free)
    with pytest.raises(UsageError) as error:
        train(tmp_path / "run", runtime="process", settings=settings)
    assert "GB" in str(error.value)
    assert ("sampling.parallel" in settings) == ("they would fit" in str(error.value))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["make", *slowly("reset", "step")])
def test_an_environment_that_cannot_be_in_a_thread_is_refused(place: str, tmp_path: Path) -> None:
    settings = {"env_args.place": place, "sampling.parallel": "threads"}
    with pytest.raises(UsageError, match=r"--set sampling\.parallel=processes") as error:
        train(tmp_path / "run", "central_envs:MainThread", runtime="process", settings=settings)
    assert "\n" not in str(error.value)
    assert place == "step" or not (tmp_path / "run").exists()


LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), int(sys.argv[2])))
from raynforce.cli import main
sys.exit(main(sys.argv[3:]))
"""


def test_more_files_than_may_be_open_are_refused(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", "200", "train", "ppo", "CartPole-v1", "--runtime"]
    words += ["process", "--topology", "central", "--envs", "200", "--set", "sampling.parallel=processes"]
    ended = subprocess.run([*words, "--out", "run", "--no-preset"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "open files" in ended.stderr.splitlines()[-1]
    assert "ulimit -n" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


# -- learning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runtime", "seed"), slowly(("inline", 0), ("process", 0), ("process", 1), ("process", 2), ("ray", 0))
)
def test_ppo_solves_cartpole(runtime: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    settings = {"eval.final_episodes": 0}
    how: dict[str, Any] = {"runtime": runtime, "topology": "central", "seed": seed, "settings": settings}
    run = solve("CartPole-v1", "ppo", tmp_path / "run", steps=100_000, target=475, **how)
    assert isinstance(run.config, Config)
    assert run.result.lost_steps == 0
