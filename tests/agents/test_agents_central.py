"""Several agents where environments go their own pace: rows against a sampler's and a plain count; runs that fail."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from centrally import is_whole, nothing_is_left, train
from failing import is_sound
from marks import slow, slowly
from rays import needs
from running import events, metrics, solve
from test_agents_lanes import by_hand
from test_central_failures import Kills

import raynforce
from raynforce.envs.vector import EnvArgs
from raynforce.errors import RaynforceError
from raynforce.experience.fragment import Fragment
from raynforce.policies.acting import Actor
from raynforce.roles.agent_trajectories import AgentTrajectories
from raynforce.roles.env_host import EnvHost
from raynforce.roles.sampler import Sampler
from raynforce.spaces import ACTING, TERMINATED, ActionSpec, AgentKind, Agents, EnvSpec, ObsLeaf

sys.path.insert(0, str(Path(__file__).parents[1] / "roles"))
from test_policy_server import follow, leave, stage, until

TINY = "raynforce.envs.tiny_agents:"
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Together", {}, {"algorithm": {"central_critic": True}}),
    ("Leaving", {"late": 1}, {"sampling": {"agent_ids": True}}),
    ("Nim", {}, {"algorithm": {"central_critic": True}}),
    ("Nim", {"masked": True}, {}),
]


# -- rows ---------------------------------------------------------------------------------------------------


def rows(fragments: list[Fragment]) -> dict[int, list[tuple[Any, ...]]]:
    """By lane, what is known of each of its moves, and what was seen last where an episode ended."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for f in fragments:
        seen = f.obs() | f.state_columns()
        last = {int(at): k for k, at in enumerate(f["final/index"])}
        for b, lane in enumerate(f.columns.get("lane", np.arange(f.lanes)).tolist()):
            for t in np.flatnonzero(f["valid"][:, b]).tolist():
                row = [f[name][t, b].tolist() for name in ("action", "reward", "terminated", "first")]
                row += [column[t, b].tolist() for column in seen.values()]
                row.append(round(float(f["logp"][t, b]), 5))
                if f["terminated"][t, b]:
                    at = last.get(t * f.lanes + b)
                    row += [c[t + 1, b] if at is None else f[f"final/{p}"][at] for p, c in seen.items()]
                found.setdefault(lane, []).append(tuple(map(str, row)))
    return found


@pytest.mark.parametrize(("env", "args", "more"), CASES)
def test_rows_are_those_of_a_sampler(
    env: str, args: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a policy that draws nothing: both play the same episodes."""
    monkeypatch.setattr(Actor, "sample", lambda self, out, noise: self.distribution.mode(out))
    with stage(env=TINY + env, hosts=1, envs=3, env_args=args, preset="none", **more) as s:
        there = [s.produce(number) for number in range(12)]
        envs = EnvArgs(TINY + env, 3, s.config.seed, args, ids=s.args.ids, states=s.args.states)
        sampler = Sampler(s.acting, envs, 5)
        here = [sampler.sample(s.version(number)) for number in range(12)]
        sampler.close()
    ours, theirs = rows(there), rows(here)
    assert ours.keys() == theirs.keys()
    for lane, mine in ours.items():
        both = min(len(mine), len(theirs[lane]))
        assert both >= 8
        assert mine[:both] == theirs[lane][:both]
    counts = [sum(f.steps for f in fragments) for fragments in (there, here)]
    assert counts[0] >= counts[1] - 3 * 5, "fragments are as large as a sampler's"
    returns = sorted(total for mine in ours.values() for total in totals(mine))
    assert np.allclose(np.sort(np.concatenate([f["episode/return"] for f in there])), returns)


def totals(rows: list[tuple[Any, ...]]) -> list[float]:
    """Returns of episodes that ended, of rows in order."""
    found, total = [], 0.0
    for _, reward, terminated, first, *_ in rows:
        total = float(reward) + (0.0 if first == "True" else total)
        if terminated == "True":
            found.append(total)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_moves_are_what_a_plain_count_says(seed: int) -> None:
    """Some act in each step, get something at any time, and leave; environments break; fragments end anywhere."""
    rng, count, envs = random.Random(seed), 3, 2
    agent = ObsLeaf("obs", "box", (1,), "float32"), ActionSpec("discrete", (), "int64", (2,), (0,))
    agents = Agents(("a", "b", "c"), (AgentKind((0, 1, 2), (agent[0],), agent[1]),), turns=True)
    made = AgentTrajectories(EnvSpec("", (agent[0],), agent[1], agents=agents), 4, envs)
    story: dict[int, list[tuple[int, float, str]]] = {lane: [] for lane in range(count * envs)}
    here = {env: set(range(count)) for env in range(envs)}
    fragments: list[Fragment] = []

    def shown(reward: list[float], over: set[int], acting: set[int], t: int) -> dict[str, np.ndarray]:
        flags = np.zeros((1, 3, count), np.uint8)
        flags[0, ACTING, list(acting)], flags[0, TERMINATED, list(over)] = 1, 1
        seen = np.full((1, count, 1), t, np.float32)
        return {"obs/reward": np.array([reward], np.float32), "obs/flags": flags, "obs/seen_0_0": seen}

    for env in range(envs):
        made.begin(np.array([env]), shown([0.0] * count, set(), {0}, 0))
    none = np.zeros(1, np.float32), np.zeros(1, np.bool_), np.zeros(1, np.bool_)
    for _ in range(120):
        env = rng.randrange(envs)
        row, t = np.array([env]), len(story[count * env])
        lanes = made.acting(row)
        made.act(lanes, np.zeros(len(lanes), np.int64), np.full(len(lanes), t, np.float32), 0)
        moved = {int(lane) % count for lane in lanes}
        broke = rng.random() < 0.1
        over = set(here[env]) if rng.random() < 0.1 else {a for a in here[env] if rng.random() < 0.1}
        reward = [rng.choice([0.0, 1.0, -2.0]) for _ in range(count)]
        for a in range(count):
            if broke:  # what a move before this one led to is known
                story[count * env + a] += [(int(a in moved), 0.0, "."), (0, 0.0, "x")]
            else:
                story[count * env + a].append((int(a in moved), reward[a], "t" if a in over else "."))
        here[env] -= over
        fresh = broke or not here[env]
        here[env] = set(range(count)) if fresh else here[env]
        acting = set(rng.sample(sorted(here[env]), rng.randint(1, len(here[env]))))
        then = len(story[count * env])
        now = shown([0.0] * count if fresh else reward, set() if fresh else over, acting, then)
        if broke:
            made.cut(row)
            made.begin(row, now)
        else:
            ended = np.array([0] if fresh else [], np.int64)
            final = {p: c[: len(ended)] for p, c in shown(reward, over, set(), -1).items()}
            made.step(row, now, *none, ended, final)
        if rng.random() < 0.15 and (fragment := made.fragment(1)) is not None:
            fragments.append(fragment)
    fragments += filter(None, [made.fragment(1)])
    for lane in made.acting(np.arange(envs)).tolist():  # what their last moves led to is known
        story[lane].append((1, 0.0, "."))
    found: dict[int, list[tuple[float, float, bool]]] = {lane: [] for lane in story}
    for f in fragments:
        for b, lane in enumerate(f["lane"].tolist()):
            for t in np.flatnonzero(f["valid"][:, b]).tolist():
                found[lane].append((*map(float, (f["obs"][t, b, 0], f["reward"][t, b])), bool(f["terminated"][t, b])))
                assert f["logp"][t, b] == f["obs"][t, b, 0]
    plain = {lane: by_hand(raw) for lane, raw in story.items()}
    assert found == {lane: moves for lane, (moves, _) in plain.items()}
    returns = sorted(total for _, totals in plain.values() for total in totals)
    assert sorted(x for f in fragments for x in f["episode/return"].tolist()) == returns


# -- hosts --------------------------------------------------------------------------------------------------

SEVERAL = "central_envs:Several"


@pytest.mark.parametrize("channel", ["direct", "unix"])
def test_an_environment_that_breaks_cuts_the_episodes_of_its_agents(channel: str) -> None:
    with stage(channel, env=SEVERAL, env_args={"what": "raise", "lane": 4, "at": 17}) as s:
        told = [s.told(number) for number in range(30)]
    stories = follow([fragment for fragment, _ in told])
    faults = [fault for _, receipt in told for fault in receipt.faults]
    assert sorted(stories) == list(range(18))
    assert {fault["lane"] for fault in faults} == {4}
    for lane, story in stories.items():
        early = sum(row[0] != after[0] and row[1] != (4 if lane % 3 == 0 else 6) for row, after in pairwise(story))
        assert (early > 0) == (lane // 3 == 4), "the seventeenth step broke it"


def test_a_host_that_hangs_up_and_comes_back() -> None:
    with stage("unix", env=SEVERAL, env_args={"seconds": 0.0005}) as s:
        fragments = [s.produce(number) for number in range(3)]
        leave(s.hosts[1]._link, "suddenly")
        until(lambda: sum(thread.is_alive() for thread in s.threads) == 1)
        fragments += [s.produce(3) for _ in range(3)]
        s.serve(1)
        fragments += [s.produce(4) for _ in range(6)]
    stories = follow(fragments)
    assert {fragment["lane"].max() for fragment in fragments[-3:]} == {17}
    assert sorted(stories) == list(range(18))


def test_a_host_of_other_agents_is_refused() -> None:
    with stage(env=SEVERAL, hosts=1) as s:
        for env in (f"{TINY}Together", "CartPole-v1"):
            host = EnvHost(EnvArgs(env, 3, 0), 0)
            with pytest.raises(RaynforceError, match=r"refuses this host.*expected") as told:
                host.serve(s.policy.address())
            assert "\n" not in str(told.value)
            host.close()
        s.produce()


# -- runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", *slowly("impala")])
@pytest.mark.parametrize("env", ["Nim", *slowly("Together", "Leaving")])
@pytest.mark.parametrize("runtime", ["inline", *slowly("process", "ray")])
def test_runs_are_whole(runtime: str, env: str, algo: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    with nothing_is_left():
        is_whole(train(tmp_path / "run", TINY + env, algo, runtime=runtime, steps=600))


@pytest.mark.parametrize("critic", [False, *slowly(True)])
@pytest.mark.parametrize("runtime", ["inline", *slowly("process", "ray")])
def test_the_best_return_is_learned(runtime: str, critic: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs(runtime, request)
    how: dict[str, Any] = {"topology": "central", "runtime": runtime, "settings": {"algorithm.central_critic": critic}}
    run = solve(f"{TINY}Together", "ppo", tmp_path / "run", steps=60_000, target=4.0, **how)
    told = [line for line in metrics(run.path) if "eval/return" in line][-1]
    assert told["eval/team_return"] == 8.0


@slow
def test_a_killed_host_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Any] = [Kills(monkeypatch, "host 1")]
    settings = {"env_args.seconds": 0.002}
    with nothing_is_left():
        run = train(tmp_path / "run", SEVERAL, runtime="process", settings=settings, callbacks=callbacks)
    is_sound(run)
    assert run.result.restarts == 1
    assert len(events(run.path, "fault")) == 1


@pytest.mark.parametrize(("before", "after"), slowly(("central", "central"), ("central", "sync"), ("sync", "central")))
def test_a_resumed_run_counts_on(before: str, after: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", f"{TINY}Nim", topology=before, steps=600)
    resumed = raynforce.resume(run.path, steps=1200, settings={"topology": after}, progress="quiet")
    is_sound(resumed)
    assert resumed.result.steps >= 1200
    assert resumed.result.episodes > run.result.episodes
    assert resumed.result.abandoned_episodes == 6
