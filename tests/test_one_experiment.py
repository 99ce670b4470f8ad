"""One experiment, three runtimes: where the roles live changes nothing of what is learned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from marks import slowly
from rays import needs
from running import metrics, solve, without

import raynforce

SMALL: dict[str, Any] = {"eval.episodes": 2, "eval.final_episodes": 0, "checkpoint.every": 0, "eval.every": 700}
SMALL |= {"log_every": 100, "sampling.samplers": 2, "sampling.envs": 3, "preset": "none"}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {"sampling.fragment": 16, "algorithm.minibatch_size": 32, "network.normalize_obs": True},
    "dqn": {"sampling.fragment": 8, "algorithm.learning_starts": 50, "algorithm.prioritized": True},
    "examples.own_algorithm:Reinforce": {"sampling.fragment": 16, "learner.scale_rewards": True},
}
RUNTIMES = ["process", "ray"]  # those that are not this process
ENV, STEPS = "raynforce.envs.tiny:Identity", 900


def train(path: Path, algo: str, steps: int = STEPS, env: str = ENV, **more: Any) -> raynforce.Run:
    settings = SMALL | ALGOS[algo]
    return raynforce.train(env, algo, steps=steps, seed=7, out=path, settings=settings, progress="quiet", **more)


def measured(run: raynforce.Run) -> list[dict[str, float]]:
    """All that was measured, but for times and the runtime's own health."""
    skipped = ("time", "health", "charts/SPS", "replay/mb", "disk")  # a restored replay is as large as it needs to be
    return without(metrics(run.path), *skipped)


def trained(run: raynforce.Run) -> list[dict[str, float]]:
    return [line for line in measured(run) if "eval/return" not in line]


def evaluations(run: raynforce.Run) -> list[dict[str, float]]:
    return [line for line in measured(run) if "eval/return" in line]


@cache
def reference(base: Path, algo: str, topology: str) -> raynforce.Run:
    return train(base / f"{algo.replace(':', '-')}-{topology}", algo, runtime="inline", topology=topology)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inline")


CELLS = [(algo, topology, runtime) for algo in ALGOS for topology in ("sync", "overlap") for runtime in RUNTIMES]
QUICK = [("ppo", "overlap", "process"), ("dqn", "sync", "process"), ("ppo", "sync", "ray"), ("dqn", "overlap", "ray")]


@pytest.mark.parametrize(
    ("algo", "topology", "runtime"), [*QUICK, *slowly(*(cell for cell in CELLS if cell not in QUICK))]
)
def test_every_runtime_gives_the_same_run(
    algo: str, topology: str, runtime: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    expected = reference(base, algo, topology)
    run = train(tmp_path / "run", algo, runtime=runtime, topology=topology)
    assert run.result.weights_sha256 == expected.result.weights_sha256
    assert run.result.runtime == runtime
    assert trained(run) == trained(expected)
    evaluated, wanted = evaluations(run), evaluations(expected)
    assert evaluated[-1] == wanted[-1]  # of the last version; in between, those that were due while another was played
    assert all(line in wanted for line in evaluated)


def test_threads_do_not_change_what_is_learned(tmp_path: Path) -> None:
    """A wide product rounds otherwise on two threads, and a script's own process may have been given many."""
    script = (
        "import raynforce\n"
        "settings = {'preset': 'none', 'sampling.envs': 7, 'sampling.fragment': 8, 'network.hidden': [500, 64]}\n"
        "settings |= {'eval.episodes': 1, 'eval.final_episodes': 0}\n"
        "for runtime in ('inline', 'process'):\n"
        "    run = raynforce.train('wide:Wide', steps=112, runtime=runtime, settings=settings, progress='quiet')\n"
        "    print(run.result.weights_sha256)\n"
    )
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "wide.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Wide(gymnasium.Env):\n"
        "    observation_space, action_space = gymnasium.spaces.Box(-5, 5, (1000,)), gymnasium.spaces.Discrete(3)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return self.np_random.normal(size=1000).astype(np.float32), {}\n"
        "    def step(self, action):\n"
        "        over = self.np_random.random() < 0.1\n"
        "        return self.np_random.normal(size=1000).astype(np.float32), float(action), over, False, {}\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    environ |= {"OPENBLAS_NUM_THREADS": "2", "PYTHONPATH": str(Path(raynforce.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    inline, process = done.stdout.split()
    assert inline == process


def test_resuming_elsewhere_says_nothing_strange(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", "dqn", steps=200)
    capfd.readouterr()
    raynforce.resume(tmp_path / "run", steps=400, runtime="process", progress="plain")
    out, err = capfd.readouterr()
    assert [line for line in (out + err).splitlines() if line.startswith(("learner", "sampler"))] == []


def test_overlap_is_another_run_than_sync_and_one_version_behind(base: Path) -> None:
    sync, overlap = reference(base, "ppo", "sync"), reference(base, "ppo", "overlap")
    assert sync.result.weights_sha256 != overlap.result.weights_sha256
    assert {line["lag/max"] for line in measured(sync) if "lag/max" in line} == {0.0}
    lags = {(line["lag/mean"], line["lag/max"]) for line in measured(overlap) if "lag/max" in line}
    assert lags == {(1.0, 1.0)}  # the first round, whose lag is 0, is before the first line


@pytest.mark.parametrize(
    ("algo", "topology"),
    [("ppo", "overlap"), *slowly(("ppo", "sync"), ("dqn", "sync"), ("dqn", "overlap"))],
)
def test_a_run_goes_from_processes_to_ray_and_on_and_ends_as_one_that_never_moved(
    algo: str, topology: str, base: Path, tmp_path: Path, shared_ray: None
) -> None:
    expected = reference(base, algo, topology)
    train(tmp_path / "run", algo, runtime="process", topology=topology, callbacks=[stop_at(300)])
    for steps, runtime in ((500, "ray"), (700, "inline"), (STEPS, "process")):
        run = raynforce.resume(tmp_path / "run", runtime=runtime, progress="quiet", callbacks=[stop_at(steps)])
    assert run.result.weights_sha256 == expected.result.weights_sha256
    assert trained(run) == trained(expected)  # of evaluations there is one more at every stop


def stop_at(steps: int) -> Callable[[raynforce.Status], None]:
    return lambda status: status.stop() if status.steps >= steps else None


@pytest.mark.parametrize(
    ("algo", "runtime"), [("ppo", "process"), *slowly(("ppo", "ray"), ("dqn", "process"), ("dqn", "ray"))]
)
def test_async_learns_on_every_runtime(algo: str, runtime: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    run = train(tmp_path / "run", algo, runtime=runtime, topology="async")
    assert run.result.steps >= STEPS
    assert run.result.dropped_steps == 0
    lags = [line["lag/max"] for line in measured(run) if "lag/max" in line]
    assert max(lags) >= 1  # somebody sampled while the learner learned


@pytest.mark.parametrize(
    ("algo", "runtime", "topology", "samplers"),
    [
        ("ppo", "process", "overlap", 2),
        *slowly(
            ("ppo", "ray", "sync", 2),
            ("ppo", "process", "sync", 2),
            ("ppo", "process", "async", 2),
            ("ppo", "ray", "overlap", 2),
            ("ppo", "ray", "async", 2),
            ("ppo", "inline", "overlap", 2),
            ("dqn", "process", "sync", 1),
            ("dqn", "process", "overlap", 1),
            ("dqn", "process", "async", 2),
            ("dqn", "ray", "sync", 1),
            ("dqn", "ray", "overlap", 1),
            ("dqn", "inline", "overlap", 1),
            ("impala", "inline", "sync", 1),
            ("impala", "process", "overlap", 2),
            ("impala", "process", "async", 4),
            ("impala", "ray", "async", 2),
            ("examples.own_algorithm:Reinforce", "process", "overlap", 1),
            ("examples.own_algorithm:Reinforce", "ray", "sync", 1),
        ),
    ],
)
def test_cartpole_is_solved(
    algo: str, runtime: str, topology: str, samplers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    how: dict[str, Any] = {"runtime": runtime, "topology": topology, "settings": {"sampling.samplers": samplers}}
    run = solve("CartPole-v1", algo, tmp_path / "run", steps=200_000, target=475, **how)
    assert run.result.eval_return is not None
    assert run.result.eval_return >= 380
