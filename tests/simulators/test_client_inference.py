"""Simulators that choose their own actions: fragments equal to ours, versions, faults, and runs that train on them."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raynforce
from raynforce.algos import algorithm_class
from raynforce.envs.vector import EnvArgs, make_vector, probe
from raynforce.errors import EnvError, UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion, sampler_places
from raynforce.roles.client_sampler import ClientSampler

SMALL: dict[str, Any] = {
    "sampling.inference": "client",
    "sampling.envs": 4,
    "sampling.fragment": 32,
    "eval.every": 500,
    "eval.episodes": 2,
    "eval.envs": 2,
    "eval.final_episodes": 2,
    "checkpoint.every": 400,
    "log_every": 200,
}
PPO = SMALL | {"algorithm.epochs": 2, "algorithm.minibatch_size": 64}


def acting_of(env: str, algo: str = "ppo", **network: Any) -> ActingSpec:
    config, _ = resolve({"env": env, "algo": algo, "network": {"normalize_obs": algo == "ppo", **network}})
    acting: ActingSpec = algorithm_class(algo)(config, probe(env)).acting()
    return acting


def version_of(acting: ActingSpec, number: int = 7, **schedules: float) -> PolicyVersion:
    """One with random numbers for parameters and normaliser."""
    rng, width = np.random.default_rng(number), acting.network.input_width
    params = rng.normal(0, 0.3, sum(p.size for p in acting.network.params())).astype(np.float32)
    shift, scale = rng.normal(0, 1, width).astype(np.float32), rng.uniform(0.1, 2, width).astype(np.float32)
    normaliser = (shift, scale) if acting.network.normalizes else ()
    return PolicyVersion(number, params, *normaliser, schedules=schedules)


@pytest.fixture
def samplers() -> Iterator[list[ClientSampler]]:
    made: list[ClientSampler] = []
    yield made
    for one in made:
        one.close()


def sampler(
    made: list[ClientSampler], env: str, envs: int = 3, length: int = 32, acting: ActingSpec | None = None, **more: Any
) -> ClientSampler:
    how = {"seed": 1, "hang_seconds": 30.0, "ahead": False} | more
    args = how.pop("args", {})
    one = ClientSampler(
        acting or acting_of(env),
        EnvArgs(env, envs, how["seed"], args),
        length,
        hang_seconds=how["hang_seconds"],
        ahead=how["ahead"],
    )
    made.append(one)
    return one


def numpy_logp(fragment: Fragment, acting: ActingSpec, version: PolicyVersion) -> tuple[np.ndarray, dict[str, Any]]:
    actor = Actor(acting, light=True)
    actor.load(version)
    out = actor.outputs({path: column[:-1].reshape(-1, *column.shape[2:]) for path, column in fragment.obs().items()})
    action = fragment["action"]
    return actor.distribution.logp(out, action.reshape(-1, *action.shape[2:])).reshape(action.shape[:2]), out


PROGRAMS = ("examples/cpp/cartpole.cpp", "tests/simulators/odd.cpp")
ALL = (*PROGRAMS, pytest.param("tests/simulators/choices.cpp", marks=pytest.mark.slow))


@pytest.mark.parametrize("source", ALL)
def test_log_probabilities_equal_numpys(
    source: str, compiled: Callable[[str], str], samplers: list[ClientSampler]
) -> None:
    env = compiled(source)
    acting = acting_of(env)
    version = version_of(acting)
    fragment = sampler(samplers, env, envs=5, length=200, acting=acting).sample(version)
    assert fragment.version == 7
    assert "version" not in fragment.columns
    expected, _ = numpy_logp(fragment, acting, version)
    np.testing.assert_allclose(fragment["logp"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("source", [*ALL, "tests/simulators/own_loop.cpp"])
def test_fragments_are_what_the_env_does_with_these_actions(
    source: str, compiled: Callable[[str], str], samplers: list[ClientSampler]
) -> None:
    """The same seeds and actions, a step at a time: the same observations, rewards and ends."""
    env = compiled(source)
    acting, lanes = acting_of(env), 3
    client, to_env = sampler(samplers, env, lanes, 40, acting), Actor(acting, light=True).to_env
    steps = make_vector(env, {}, lanes, seed=1)
    try:
        now, totals = steps.reset(), np.zeros(lanes)
        for number in range(2):
            fragment = client.sample(version_of(acting, number))
            assert (fragment.sequence, fragment.version) == (number, number)
            assert fragment["valid"].all()
            ends, returns = iter(range(len(fragment["final/index"]))), []
            for t in range(40):
                for path, column in now.items():
                    np.testing.assert_array_equal(fragment[path][t], column)
                step = steps.step(to_env(fragment["action"][t]))
                np.testing.assert_array_equal(fragment["reward"][t], step.reward)
                np.testing.assert_array_equal(fragment["terminated"][t], step.terminated)
                np.testing.assert_array_equal(fragment["truncated"][t], step.truncated)
                totals += step.reward
                for k, lane in enumerate(step.final_lanes.tolist()):
                    place = next(ends)
                    assert fragment["final/index"][place] == t * lanes + lane
                    for path, column in step.final_obs.items():
                        np.testing.assert_array_equal(fragment[f"final/{path}"][place], column[k])
                    returns.append(totals[lane])
                    totals[lane] = 0
                over = step.terminated | step.truncated
                if t < 39:
                    np.testing.assert_array_equal(fragment["first"][t + 1], over)
                now = step.obs
            for path, column in now.items():
                np.testing.assert_array_equal(fragment[path][40], column)
            assert next(ends, None) is None
            np.testing.assert_allclose(fragment["episode/return"], returns, rtol=1e-6)
            assert "odd" not in source or (fragment.info()["laps"] == 2.5).all()
    finally:
        steps.close()


def test_actions_are_drawn_from_the_policy(cartpole: str, samplers: list[ClientSampler]) -> None:
    acting = acting_of(cartpole)
    version = version_of(acting)
    fragment = sampler(samplers, cartpole, envs=16, length=500, acting=acting).sample(version)
    _, out = numpy_logp(fragment, acting, version)
    logits = out["policy"].astype(np.float64)
    chance = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    assert chance.std() > 0.05
    surprise = (fragment["action"].reshape(-1) - chance).sum() / np.sqrt((chance * (1 - chance)).sum())
    assert abs(surprise) < 4


def test_gaussian_actions_are_drawn_from_the_policy(odd: str, samplers: list[ClientSampler]) -> None:
    acting = acting_of(odd)
    version = version_of(acting)
    fragment = sampler(samplers, odd, envs=16, length=250, acting=acting).sample(version)
    _, out = numpy_logp(fragment, acting, version)
    z = (fragment["action"].reshape(-1, 2) - out["policy"]) * np.exp(-out["log_std"])
    assert abs(z.mean()) < 0.05
    assert abs(z.std() - 1) < 0.05
    assert abs(np.corrcoef(z.T)[0, 1]) < 0.06


def test_dqn_explores_with_epsilon(cartpole: str, samplers: list[ClientSampler]) -> None:
    acting = acting_of(cartpole, "dqn")
    client = sampler(samplers, cartpole, envs=8, length=250, acting=acting)
    for number, epsilon in enumerate((0.0, 0.5, 1.0)):
        version = version_of(acting, number, epsilon=epsilon)
        fragment = client.sample(version)
        actor = Actor(acting, light=True)
        actor.load(version)
        best = actor.distribution.mode(actor.outputs({"obs": fragment["obs"][:-1].reshape(-1, 4)}))
        greedy = (fragment["action"].reshape(-1) == best).mean()
        assert abs(greedy - (1 - epsilon / 2)) < 0.06
        assert "logp" not in fragment.columns


def test_each_env_explores_at_its_own_rate(cartpole: str, samplers: list[ClientSampler]) -> None:
    acting = replace(acting_of(cartpole, "dqn"), ladder=4.0)
    client, version = sampler(samplers, cartpole, envs=4, length=800, acting=acting), version_of(acting, epsilon=0.5)
    fragment = client.sample(version)
    actor = Actor(acting, light=True)
    actor.load(version)
    best = actor.distribution.mode(actor.outputs({"obs": fragment["obs"][:-1].reshape(-1, 4)})).reshape(800, 4)
    epsilon = 0.5 ** (4.0 ** (2 * sampler_places(4, 0, 1) - 1))
    assert np.ptp(epsilon) > 0.4
    np.testing.assert_allclose((fragment["action"] == best).mean(axis=0), 1 - epsilon / 2, atol=0.07)


def test_equal_seeds_give_equal_fragments(odd: str, samplers: list[ClientSampler]) -> None:
    acting = acting_of(odd)

    def fragments(env: str, seed: int = 1) -> list[Fragment]:
        client = sampler(samplers, env, acting=acting, seed=seed)
        return [client.sample(version_of(acting)) for _ in range(2)]

    one, same, threads, other = fragments(odd), fragments(odd), fragments(f"{odd} --threads 3"), fragments(odd, 2)
    for again in (same, threads):
        for a, b in zip(one, again, strict=True):
            for name, column in a.columns.items():
                np.testing.assert_array_equal(column, b[name])
    assert (one[0]["action"] != other[0]["action"]).any()
    assert (one[0]["action"] != one[1]["action"]).any()
    assert len(np.unique(one[0]["action"][0, :, 0])) == 3, "each env has a random stream of its own"


def test_ahead_it_gathers_while_nobody_waits(cartpole: str, samplers: list[ClientSampler]) -> None:
    """The fragment after the next is asked for at once, so it may be of an older version, and says so."""
    acting = acting_of(cartpole)
    client, versions = sampler(samplers, cartpole, ahead=True), [version_of(acting, number) for number in range(5)]
    seen = []
    for version in versions:
        fragment, receipt = client.produce(version)
        assert receipt.flying == 96
        each = fragment.columns.get("version", np.full((32, 3), fragment.version))
        assert fragment.version == each.min() >= version.number - 2
        assert each.max() <= version.number
        seen.append(fragment.version)
        assert client._simulator._simulator is not None
        select.select([client._simulator._simulator.fileno()], [], [], 10)  # the learner learns
        for number in np.unique(each):
            expected, _ = numpy_logp(fragment, acting, versions[number])
            np.testing.assert_allclose(fragment["logp"][each == number], expected[each == number], rtol=1e-5, atol=1e-5)
    assert seen == sorted(seen)
    assert seen[-1] < 4, "the last one was being gathered before the newest version came"


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"), [("throw", "motor jammed"), ("nan", "obs/speed has a value"), ("range", "obs/gear has a value")]
)
def test_an_env_that_breaks_cuts_its_episode_alone(
    odd: str, samplers: list[ClientSampler], fault: str, words: str
) -> None:
    client = sampler(samplers, odd, 2, 32, args={"fault": fault, "at": 14, "length": 20})
    version = version_of(acting_of(odd))
    for number in range(3):
        fragment, receipt = client.produce(version)
        broke = ~fragment["valid"]
        rows = np.arange(number * 32, number * 32 + 32)
        np.testing.assert_array_equal(broke, np.stack([rows % 14 == 13] * 2, axis=1))
        assert {one["kind"] for one in receipt.faults} == {"raised" if fault == "throw" else "garbage"}
        assert len(receipt.faults) == broke.sum()
        assert all(words in one["cause"] for one in receipt.faults)
        assert receipt.record.steps == fragment.steps == 64 - broke.sum()
        assert not len(fragment["episode/return"]), "all were cut"
        for t, lane in zip(*np.nonzero(broke), strict=True):
            if t:
                assert fragment["truncated"][t - 1, lane]
                assert fragment["obs/speed"][t, lane, 0] == 13
            else:
                assert fragment["truncated"][0, lane]
                assert t * 2 + lane in fragment["final/index"]
            assert fragment["obs/speed"][t + 1, lane, 0] == 0
        assert fragment["truncated"].sum() == broke.sum()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("exit", "died", "has exited with code 7; it said: out of fuel"),
        ("abort", "died", "was ended by SIGSEGV"),
        ("hang", "hung", "no fragment came within 1 s; the simulator was ended by SIGKILL"),
    ],
)
def test_a_process_that_ends_is_started_again(
    odd: str, samplers: list[ClientSampler], fault: str, kind: str, words: str
) -> None:
    """It breaks in the second fragment of 10 steps, after which the episodes have changed."""
    how = {"args": {"fault": fault, "at": 14, "length": 20}, "hang_seconds": 1.0}
    client, version = sampler(samplers, odd, 2, 10, **how), version_of(acting_of(odd))
    fragment, receipt = client.produce(version)
    assert not receipt.faults
    fragment, receipt = client.produce(version)
    ((found),) = receipt.faults
    assert (found["kind"], receipt.lost) == (kind, 20)
    assert words in found["cause"]
    assert fragment["first"][0].all()
    assert fragment["valid"].all()
    assert fragment.sequence == 1


def test_a_fragment_that_cannot_be_is_not_taken(cartpole: str, samplers: list[ClientSampler]) -> None:
    script = Path(__file__).parent / "broken_acting.py"
    env = f"sim:{sys.executable} {script} value {cartpole}"
    client = sampler(samplers, env, 2, 16, acting=acting_of(cartpole))
    with pytest.raises(EnvError, match=r"4 times in a row .*: FRAGMENT: obs has a value that cannot be"):
        client.sample(version_of(acting_of(cartpole)))


def test_one_that_ends_again_and_again_is_given_up(odd: str, samplers: list[ClientSampler]) -> None:
    client = sampler(samplers, odd, 2, args={"fault": "exit", "at": 1})
    with pytest.raises(EnvError, match=r"4 times in a row within 10 steps .*: the simulator has exited with code 7"):
        client.sample(version_of(acting_of(odd)))


def test_an_env_that_always_throws_is_given_up(odd: str, samplers: list[ClientSampler]) -> None:
    client = sampler(samplers, odd, 2, args={"fault": "throw", "at": 1})
    with pytest.raises(EnvError, match=r"4 times in a row within 10 steps .*motor jammed"):
        client.sample(version_of(acting_of(odd)))


def test_a_saved_state_goes_on_in_new_episodes(odd: str, samplers: list[ClientSampler]) -> None:
    version = version_of(acting_of(odd))
    before = sampler(samplers, odd)
    one = before.sample(version)
    state = before.state()
    other = sampler(samplers, odd)
    (told,) = other.load(state)
    assert "3 of 3 running episodes" in told
    two = other.sample(version)
    assert two.sequence == 1
    assert two["first"][0].all()
    assert (one["obs/camera"][0] != two["obs/camera"][0]).any()
    before.load(state)  # in the middle of a run, too
    again = before.sample(version)
    np.testing.assert_array_equal(again["obs/camera"], two["obs/camera"])


# -- engines that cannot wait -----------------------------------------------------------------------------


def test_a_realtime_loop_goes_on_and_counts(
    compiled: Callable[[str], str], samplers: list[ClientSampler], tmp_path: Path
) -> None:
    env = compiled("tests/simulators/own_loop.cpp") + " --realtime"
    client, version = sampler(samplers, env, 1, 16), version_of(acting_of(env))
    client.produce(version)
    time.sleep(0.3)  # the trainer learns
    fragment, receipt = client.produce(version)
    assert receipt.skipped > 20
    assert fragment["valid"].all()
    assert (fragment["episode/length"] == 4).all(), "episodes are counted as they are, recorded or not"


def test_their_books_balance(compiled: Callable[[str], str], tmp_path: Path) -> None:
    env = compiled("tests/simulators/own_loop.cpp") + " --realtime"
    run = raynforce.train(env, steps=600, runtime="inline", settings=PPO, out=tmp_path / "run", progress="quiet")
    assert run.result.dropped_steps > 0
    balanced(run.path)


# -- runs -------------------------------------------------------------------------------------------------


def balanced(path: Path) -> None:
    reports = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    reports = [line for line in reports if "health/produced_steps" in line]
    assert reports
    for line in reports:
        used = line["step"] + line["health/dropped_steps"] + line["health/in_flight_steps"]
        assert line["health/produced_steps"] == used, line


def test_it_trains_alike_on_every_runtime(cartpole: str, tmp_path: Path) -> None:
    found = {}
    for runtime in ("inline", "process"):
        where = {"runtime": runtime, "topology": "sync", "out": tmp_path / runtime}
        run = raynforce.train(cartpole, steps=1024, settings=PPO, progress="quiet", **where)
        assert run.result.steps >= 1024
        assert run.result.eval_return is not None
        found[runtime] = run.result.weights_sha256
        balanced(run.path)
    assert found["inline"] == found["process"]
    for steps, inference in ((1500, "client"), (2000, "server"), (2500, "client")):
        resumed = raynforce.resume(
            tmp_path / "process", steps=steps, settings={"sampling.inference": inference}, progress="quiet"
        )
        assert resumed.result.steps >= steps


@pytest.mark.parametrize(("algo", "topology"), [("impala", "async"), ("dqn", "sync")])
def test_other_algorithms_and_topologies(cartpole: str, tmp_path: Path, algo: str, topology: str) -> None:
    where = {"runtime": "process", "topology": topology, "out": tmp_path / "run"}
    settings = SMALL | ({"sampling.samplers": 2} if topology == "async" else {})
    run = raynforce.train(cartpole, algo, steps=2000, settings=settings, progress="quiet", **where)
    assert run.result.steps >= 2000
    balanced(run.path)


def test_one_that_is_killed_costs_its_fragment(odd: str, tmp_path: Path) -> None:
    settings = PPO | {"env_args.fault": "exit", "env_args.at": 40, "env_args.length": 50, "sampling.envs": 2}
    run = raynforce.train(odd, steps=600, runtime="process", settings=settings, out=tmp_path / "run", progress="quiet")
    assert run.result.steps >= 600
    assert run.result.env_restarts > 3
    assert run.result.lost_steps > 0
    balanced(run.path)


@pytest.mark.parametrize(
    ("env", "settings", "words"),
    [
        ("CartPole-v1", {}, "is for simulators, which choose their own actions, and env 'CartPole-v1' is none"),
        ("", {"topology": "central"}, "goes with topology sync, overlap, async or replay, not 'central'"),
        ("", {"topology": "sync", "network.factory": "my_nets:make"}, "is your own torch module; use --inference"),
        (f"sim:{sys.executable} {Path(__file__).parent / 'broken_sim.py'} none", {}, "does not offer `inference`"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    cartpole: str, tmp_path: Path, env: str, settings: dict[str, Any], words: str
) -> None:
    everything = SMALL | {"runtime": "inline", "topology": "sync"} | settings
    with pytest.raises(UsageError) as error:
        raynforce.train(env or cartpole, settings=everything, out=tmp_path / "run", progress="quiet")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def learns(cartpole: str, folder: Path, algo: str, topology: str, runtime: str) -> None:
    where = {"runtime": runtime, "topology": topology, "out": folder}
    settings = {"sampling.inference": "client", "eval.every": 5000}
    run = raynforce.train(cartpole, algo, steps=200_000, target=450, settings=settings, progress="quiet", **where)
    assert run.result.stopped == "target met"
    balanced(run.path)


def test_cartpole_is_solved(cartpole: str, tmp_path: Path) -> None:
    learns(cartpole, tmp_path / "run", "ppo", "sync", "inline")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "topology", "runtime"),
    [
        ("ppo", "sync", "process"),
        ("ppo", "overlap", "process"),
        ("ppo", "async", "process"),
        ("impala", "async", "inline"),
        ("impala", "async", "process"),
        ("dqn", "sync", "inline"),
    ],
)
def test_cartpole_is_solved_everywhere(cartpole: str, tmp_path: Path, algo: str, topology: str, runtime: str) -> None:
    learns(cartpole, tmp_path / "run", algo, topology, runtime)
