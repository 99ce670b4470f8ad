"""Runs of environments with action masks: solved, forbidden actions never taken, equal everywhere, exactly resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import masked_envs
import numpy as np
import pytest
import rays
from failing import is_sound
from marks import slowly
from masked_envs import Locks
from running import events, solve

import raynforce
from raynforce import settings
from raynforce.algos import algorithm_class
from raynforce.cli import main
from raynforce.engines.rllib.translation import translate
from raynforce.envs.describe import describe
from raynforce.envs.doctor import check_env
from raynforce.envs.native import NativeVector
from raynforce.envs.tiny import MaskedGrid
from raynforce.envs.vector import EnvArgs, make_vector, probe
from raynforce.errors import EnvError, UsageError
from raynforce.experience.replay import Replay
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.roles.sampler import Sampler
from raynforce.spaces import MASK

GRID, LOCKS = "raynforce.envs.tiny:MaskedGrid", "masked_envs:Locks"
QUICK = {"algorithm.learning_starts": 200, "algorithm.batch_size": 32}
BASE = {"sampling.envs": 4, "preset": "none", "eval.every": 0, "eval.final_episodes": 2, "log_every": 96}
SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"sampling.fragment": 32},
    "impala": {},
    "a3c": {},
    "dqn": QUICK | {"algorithm.prioritized": True, "algorithm.dueling": True},
    "sac": QUICK | {"algorithm.discrete": True, "network.hidden": [16]},
}


def train(algo: str, out: Path, given: Any = None, *, env: str = GRID, **more: Any) -> raynforce.Run:
    all_of_them = BASE | SMALL[algo] | (given or {})
    how = {"steps": 600, "runtime": "inline", "topology": "sync", "seed": 3, "progress": "quiet"} | more
    return raynforce.train(env, algo, out=out, settings=all_of_them, **how)


# -- learned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "steps", "more"),
    [
        ("ppo", 12_000, {"env_args.n": 3, "eval.every": 2_048}),
        ("dqn", 16_000, {"env_args.masks": "obs", "eval.every": 2_000}),
    ],
)
def test_a_masked_grid_is_solved(algo: str, steps: int, more: Any, tmp_path: Path) -> None:
    """The env raises on a forbidden action, which would be a fault."""
    how: Any = {"seed": 1, "runtime": "inline", "topology": "sync", "settings": more}
    run = solve(GRID, algo, tmp_path / "run", steps=steps, target=0.9, **how)
    is_sound(run)
    assert not events(run.path, "fault")
    assert raynforce.evaluate(run.path, episodes=20, seed=0).returns.mean() > 0.85


@pytest.mark.slow
def test_several_choices_at_once_are_learned(tmp_path: Path) -> None:
    run = solve(LOCKS, "ppo", tmp_path / "run", steps=60_000, target=7.5, seed=1, runtime="inline", topology="sync")
    is_sound(run)


# -- everywhere the same ----------------------------------------------------------------------------------

CELLS = [("ppo", "sync"), ("ppo", "overlap"), ("impala", "async"), ("a3c", "shared-agent"), ("dqn", "replay")]
CELLS += [("dqn", "sync"), ("sac", "sync"), ("ppo", "central"), ("impala", "central")]
RUNTIMES = ("process", "ray")
FIRST = [("dqn", "sync", "process"), ("impala", "central", "process")]
REST = [(a, t, r) for a, t in CELLS for r in RUNTIMES if (a, t, r) not in FIRST]
EXACT = ("sync", "overlap")


@pytest.mark.parametrize(("algo", "topology", "runtime"), [*FIRST, *slowly(*REST)])
def test_every_topology_and_runtime_takes_allowed_actions_alone(
    algo: str, topology: str, runtime: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rays.needs(runtime, request)
    there = train(algo, tmp_path / "there", runtime=runtime, topology=topology)
    is_sound(there)
    assert not events(there.path, "fault"), "the env raises on a forbidden action"
    if topology in EXACT:
        here = train(algo, tmp_path / "here", topology=topology)
        assert here.result.weights_sha256 == there.result.weights_sha256


@pytest.mark.parametrize(
    ("algo", "env"), [("dqn", GRID), *slowly(("ppo", GRID), ("ppo", LOCKS), ("impala", GRID), ("sac", GRID))]
)
def test_a_killed_run_is_resumed_exactly(algo: str, env: str, tmp_path: Path) -> None:
    whole = train(algo, tmp_path / "whole", env=env)
    pid = os.fork()
    if pid == 0:
        kill = [lambda status: status.steps < 350 or os.kill(os.getpid(), signal.SIGKILL)]
        train(algo, tmp_path / "killed", env=env, callbacks=kill)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    resumed = raynforce.resume(tmp_path / "killed", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256


def test_masks_in_info_and_in_the_observation_lead_to_the_same_run(tmp_path: Path) -> None:
    one, other = (train("dqn", tmp_path / where, {"env_args.masks": where}) for where in ("info", "obs"))
    assert one.result.weights_sha256 == other.result.weights_sha256


@pytest.mark.parametrize("parallel", ["threads", *slowly("processes")])
def test_lanes_side_by_side_give_the_same_run(parallel: str, tmp_path: Path) -> None:
    one, other = (train("ppo", tmp_path / p, {"sampling.parallel": p}) for p in ("no", parallel))
    assert one.result.weights_sha256 == other.result.weights_sha256


# -- what fragments and replay have -----------------------------------------------------------------------


def sampled(env: str, algo: str, length: int = 40, lanes: int = 3) -> tuple[Any, ActingSpec]:
    config, _ = resolve({"env": env, "algo": algo, "topology": "sync"}, settings.nested(SMALL[algo]))
    spec = probe(env)
    acting = algorithm_class(algo)(config, spec).acting()
    sampler = Sampler(acting, EnvArgs(env, lanes, 1, masked=spec.masked), length)
    params = acting.network.initial(np.random.default_rng(0))
    fragment = sampler.sample(PolicyVersion(0, params, *_plain(acting), schedules={"epsilon": 0.5}))
    sampler.close()
    return fragment, acting


def _plain(acting: ActingSpec) -> Any:
    width = acting.network.input_width
    return (np.zeros(width, np.float32), np.ones(width, np.float32)) if acting.network.normalizes else ()


@pytest.mark.parametrize(("env", "algo"), [(GRID, "ppo"), (GRID, "dqn"), (LOCKS, "ppo")])
def test_a_fragment_has_masks_and_only_actions_that_they_allow(env: str, algo: str) -> None:
    fragment, acting = sampled(env, algo)
    mask, sizes = fragment[MASK], acting.env.action.sizes
    assert mask.shape == (41, 3, sum(sizes))
    places = fragment["action"].reshape(40, 3, -1) + np.cumsum((0, *sizes[:-1]))
    assert np.take_along_axis(mask[:-1], places, 2).all()
    assert fragment[f"final/{MASK}"].shape == (len(fragment["final/index"]), sum(sizes))
    assert [i.path for i in acting.network.inputs] == ["obs"], "a mask is no input"
    if algo == "ppo":
        assert np.isfinite(fragment["logp"]).all()
        assert (fragment["logp"] < 0).any()
    else:
        assert np.isfinite(fragment["priority"]).all()


def test_the_mask_of_a_step_is_that_of_its_place() -> None:
    fragment, _ = sampled(GRID, "ppo")
    env = MaskedGrid()
    for place, mask in zip(fragment["obs"].reshape(-1, 2), fragment[MASK].reshape(-1, 8), strict=True):
        env.place = np.rint(place * 4).astype(int)
        assert env.mask().tolist() == mask.tolist()
    for place, mask in zip(fragment["final/obs"], fragment[f"final/{MASK}"], strict=True):
        env.place = np.rint(place * 4).astype(int)
        assert env.mask().tolist() == mask.tolist(), "that of the true last observation"


def test_replay_gives_the_mask_of_the_next_observation() -> None:
    fragment, acting = sampled(GRID, "dqn", length=200)
    replay = Replay(acting.env.obs, acting.env.action, capacity=2000, lanes=3, n_step=3)
    replay.insert(fragment)
    saved = replay.state()
    again = Replay(acting.env.obs, acting.env.action, capacity=2000, lanes=3, n_step=3)
    again.load(saved)
    env = MaskedGrid()
    for buffer in (replay, again):
        drawn = buffer.sample(500, np.random.default_rng(0))
        for prefix in ("", "next_"):
            for place, mask in zip(drawn[f"{prefix}obs"], drawn[prefix + MASK], strict=True):
                env.place = np.rint(place * 4).astype(int)
                assert env.mask().tolist() == mask.tolist()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_an_implementation_of_its_own_gives_masks_however_it_resets(mode: str) -> None:
    vector = NativeVector("grid", masked_envs.GridVector(4, mode), seed=1, masked=True)
    seen, rng, ends = vector.reset(), np.random.default_rng(0), 0
    env = MaskedGrid(n=3)
    for _ in range(200):
        for place, mask in zip(seen["obs"], seen[MASK], strict=True):
            env.place = np.rint(place * 2).astype(int)
            assert env.mask().tolist() == mask.tolist()
        step = vector.step(np.array([rng.choice(np.flatnonzero(mask)) for mask in seen[MASK]]))
        ends += int((step.terminated | step.truncated).sum())
        for place, mask in zip(step.final_obs["obs"], step.final_obs[MASK], strict=True):
            env.place = np.rint(place * 2).astype(int)
            assert env.mask().tolist() == mask.tolist()
        seen = step.obs
    assert ends > 5


# -- acting -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("masked") / "run"
    raynforce.train(LOCKS, "ppo", out=out, steps=128, progress="quiet", runtime="inline", topology="sync")
    return out


def test_a_loaded_policy_takes_the_mask_beside_the_observation(run: Path) -> None:
    policy, env = raynforce.load(run), Locks()
    obs, info = env.reset(seed=1)
    for step in range(40):
        obs, _, over, cut, info = env.step(policy.act(obs, mask=info["action_mask"], greedy=step % 2 == 0))
        if over or cut:
            obs, info = env.reset()
    batch = np.zeros((3, 7), np.float32), np.array([[0, 0, 1, 0, 1, 0, 0]] * 3)
    assert policy.act(batch[0], mask=batch[1]).tolist() == [[7, 1]] * 3


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (None, "trained with action masks: give mask="),
        (np.ones(6), "mask has shape [6]; allowed are [7] or [1, 7]"),
        (np.full(7, 0.5), "expected true or false for each choice"),
        (np.array([1, 1, 1, 0, 0, 0, 0]), "mask allows no choice of element 1 of the action (flags 3 to 6)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(run: Path, mask: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        raynforce.load(run).act(np.zeros(7, np.float32), mask=mask)
    assert said in str(error.value)


def test_the_observation_s_own_mask_is_found(tmp_path: Path) -> None:
    run = train("dqn", tmp_path / "run", {"env_args.masks": "obs"}, steps=64)
    policy, env = raynforce.load(run.path), MaskedGrid(masks="obs")
    obs, _ = env.reset(seed=1)
    for step in range(60):
        obs, _, over, cut, _ = env.step(int(policy.act(obs, greedy=step % 2 == 0)))
        if over or cut:
            obs, _ = env.reset()


# -- what is wrong ----------------------------------------------------------------------------------------

WRONG = {
    "everything": "info['action_mask'] forbids every choice",
    "length": "info['action_mask'] has shape (5,); expected (8,)",
    "dtype": "info['action_mask'] has dtype float64; expected bool or integers",
    "values": "expected 0 (forbidden) or 1 (allowed) for each choice",
    "missing": "there is no info['action_mask'], which was there at first",
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_mask_is_one_line_that_names_env_and_lane(fault: str) -> None:
    args = {"fault": fault, "at": 2}
    vector = make_vector("masked_envs:Wrong", args, 2, seed=0, masked=True)
    seen = vector.reset()
    for _ in range(3):
        step = vector.step(seen[MASK].argmax(axis=1))
        seen = step.obs
    assert step.cut.tolist() == [] or step.valid.tolist() == [False, False]
    first, second = vector.take_faults()[:2]
    assert WRONG[fault] in first.cause
    line = str(first.error(EnvError))
    assert "'masked_envs:Wrong'" in line
    assert "lane 0" in line
    assert "\n" not in line
    assert second.lane == 1
    vector.close()


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ("masked_envs:Continuous", {}, "its actions are continuous: masks are for discrete ones"),
        ("masked_envs:Continuous", {"where": "obs"}, "its actions are continuous: masks are for discrete ones"),
        ("masked_envs:Leaf", {"fault": "length"}, "of shape (3,): expected (8,), a flag for each choice"),
        ("masked_envs:Leaf", {"fault": "dtype"}, "of dtype float32: expected bool or integers"),
        ("masked_envs:Leaf", {"fault": "alone"}, "has no observation beside its action mask"),
        ("masked_envs:Wrong", {"fault": "everything", "at": 0}, "forbids every choice"),
    ],
)
def test_masks_that_cannot_be_end_a_run_before_it_begins(
    env: str, args: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for name, value in args.items() for word in ("--set", f"env_args.{name}={value}")]
    words = ["train", "ppo", env, *given, "--runtime", "inline", "--topology", "sync", "--steps", "100"]
    assert main([*words, "--out", str(tmp_path / "run")]) != 0
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert said in told[-1]
    assert env in told[-1]


def test_the_doctor_says_that_masks_are_there_and_checks_them() -> None:
    good, bad = check_env(GRID, steps=100), check_env("masked_envs:Wrong", {"fault": "everything"}, steps=100)
    assert good.ok
    assert "action masks" in [finding.title for finding in good.findings]
    assert good.spec == probe(GRID)
    assert [f.title for f in bad.findings if f.level == "error"] == ["the action mask does not fit"]


def test_rllib_has_no_networks_for_them() -> None:
    config, _ = resolve({"env": GRID, "algo": "ppo", "engine": "rllib"})
    with pytest.raises(UsageError, match="has action masks, which engine rllib has no networks for"):
        translate(config, probe(GRID))


def test_an_environment_without_masks_is_described_as_ever() -> None:
    env = MaskedGrid(masks="none")
    spec = describe("grid", env.observation_space, env.action_space)
    assert [leaf.path for leaf in spec.obs] == ["obs"]
    assert not spec.masked
    assert not probe(GRID, {"masks": "none"}).masked
    assert probe(GRID).obs == (*spec.obs, probe(GRID, {"masks": "obs"}).obs[1])


def test_a_mask_that_is_none_from_the_first_reset_on_is_none() -> None:
    assert not probe("masked_envs:NoneAtAll").masked
    vector = make_vector("masked_envs:NoneAtAll", {}, 1, seed=0)
    vector.reset()
    assert vector.step(np.zeros(1, np.int64)).valid.all()
    vector.close()


def test_a_network_of_your_own_does_not_see_the_mask(tmp_path: Path) -> None:
    run = train("ppo", tmp_path / "run", {"network.factory": "examples.own_network:make"}, steps=64)
    assert "obs/action_mask" in {leaf.path for leaf in raynforce.load(run.path).spec.env.obs}
