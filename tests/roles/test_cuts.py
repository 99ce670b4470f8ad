"""Episodes cut by an environment that breaks: what a fragment says of them, against a list of what truly happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from raynforce.algos.ppo import PPO
from raynforce.config import Config
from raynforce.envs import faults
from raynforce.envs.vector import EnvArgs, derive_seed, probe
from raynforce.experience.advantages import Steps, discounted, final_values, gae, vtrace
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.evaluator import Evaluator
from raynforce.roles.sampler import Sampler

GAMMA, LAMBDA = 0.9, 0.8
Name = tuple[float, float]


@dataclass
class Taken:
    """A step that went well."""

    obs: Name
    action: int
    reward: float
    next_obs: Name
    terminated: bool


@dataclass
class Episode:
    steps: list[Taken] = field(default_factory=list)
    over: str = ""
    """How it came to an end: `ended` or `cut`; empty while it goes on."""


class Shaky(gymnasium.Env[np.ndarray, int]):
    """Breaks, ends and goes on as its seed says, and writes down in `log`, by seed, what truly happened."""

    log: ClassVar[dict[int, Episode]] = {}
    tame: ClassVar[bool] = False
    observation_space = gymnasium.spaces.Box(0.0, 1e7, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, p_break: float = 0.3, p_end: float = 0.2, p_reset: float = 0.2) -> None:
        self.p_break, self.p_end, self.p_reset = p_break, p_end, p_reset

    def obs(self) -> np.ndarray:
        return np.array([self.start, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.start, self.t = float(self.np_random.integers(1, 1 << 20)), 0
        self.episode = self.log[seed] = Episode()
        if self.np_random.random() < self.p_reset and not self.tame:
            self.episode.over = "cut"
            raise RuntimeError("no map")
        return self.obs(), {}

    def step(self, action: int) -> Any:
        before = (self.start, float(self.t))
        self.t += 1
        reward = float(np.float32(self.np_random.normal()))
        ends = bool(self.np_random.random() < self.p_end)
        terminated = ends and bool(self.np_random.random() < 0.5)
        if self.np_random.random() < self.p_break:
            self.episode.over = "cut"
            kind = self.np_random.integers(4)
            if kind == 0:
                raise RuntimeError("bad luck")
            if kind == 1:
                return self.obs() * np.nan, reward, terminated, ends, {}
            return (self.obs(), np.inf, terminated, ends, {}) if kind == 2 else None
        self.episode.over = "ended" if ends else ""
        self.episode.steps.append(Taken(before, int(action), reward, (self.start, float(self.t)), terminated))
        return self.obs(), reward, terminated, ends and not terminated, {}


def configured(lanes: int, length: int) -> Config:
    sampling = {"envs": lanes, "fragment": length}
    return resolve({"env": f"{__name__}:Shaky", "preset": "none", "sampling": sampling}, {})[0]


def acting(config: Config, **env_args: float) -> tuple[PPO, PolicyVersion]:
    algo = PPO(config, probe(config.env, env_args))
    size = sum(param.size for param in algo.network().params())
    return algo, PolicyVersion(0, np.zeros(size, np.float32))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faults, "BREAKS_IN_A_ROW", 10_000)
    Shaky.log.clear()
    yield
    Shaky.log.clear()


class Gathered:
    """Fragments, receipts, and the true episodes of each lane."""

    def __init__(self, seed: int, lanes: int, length: int, count: int, anew_after: int = -1, **env_args: float) -> None:
        algo, version = acting(configured(lanes, length), **env_args)
        args = EnvArgs(f"{__name__}:Shaky", lanes, seed, env_args)
        self.sampler = proven_sampler(algo, args, length)
        self.algo, self.lanes, self.seed = algo, lanes, seed
        self.fragments: list[Fragment] = []
        self.receipts: list[Receipt] = []
        self.left: list[list[Episode]] = [[] for _ in range(lanes)]
        for k in range(count):
            if k == anew_after:
                self.left = self.episodes()
                for lane in self.left:
                    lane[-1].over = lane[-1].over or "cut"
                self.sampler.start_fresh(k, 3)
                self.first = 3 << 32
            fragment, receipt = self.sampler.produce(version)
            self.fragments.append(fragment)
            self.receipts.append(receipt)

    first = 0

    def episodes(self) -> list[list[Episode]]:
        """Of each lane, in order."""
        found = []
        for lane in range(self.lanes):
            mine, number = list(self.left[lane]), self.first
            while (episode := Shaky.log.get(derive_seed(self.seed, 0, lane, number))) is not None:
                mine.append(episode)
                number += 1
            found.append(mine)
        return found


def proven_sampler(algo: PPO, args: EnvArgs, length: int) -> Sampler:
    """A sampler whose environments have shown that they can work, and may break from now on."""
    Shaky.tame = True
    sampler = Sampler(algo.acting(), args, length)
    Shaky.tame = False
    sampler._envs._shared.proven = True  # type: ignore[attr-defined]
    return sampler


def worth(obs: np.ndarray) -> np.ndarray:
    """A value for each observation `[..., 2]`."""
    return np.sin(obs[..., 0] + 3 * obs[..., 1])


def worth_of(name: Name) -> float:
    return float(worth(np.array(name, np.float32)))


@dataclass
class Seen:
    """A true step, and where it stands in the fragments."""

    step: Taken
    episode: Episode
    fragment: int
    t: int


def placed(gathered: Gathered, lane: int, episodes: list[Episode]) -> list[Seen]:
    """The true steps of a lane beside the valid rows, which must be equally many."""
    rows = [(k, int(t)) for k, f in enumerate(gathered.fragments) for t in np.flatnonzero(f["valid"][:, lane])]
    steps = [(step, episode) for episode in episodes for step in episode.steps]
    return [Seen(step, episode, k, t) for (k, t), (step, episode) in zip(rows, steps, strict=True)]


CASES = [(seed, lanes, length) for seed in range(8) for lanes, length in [(1, 1), (2, 2), (3, 5), (2, 16)]]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("seed", "lanes", "length"), CASES)
def test_fragments_tell_the_truth(seed: int, lanes: int, length: int) -> None:
    gathered = Gathered(seed, lanes, length, 48 // length)
    carry = np.zeros(lanes)
    episodes = gathered.episodes()
    seen = [placed(gathered, lane, episodes[lane]) for lane in range(lanes)]
    for k, f in enumerate(gathered.fragments):
        valid, terminated, truncated = f["valid"], f["terminated"], f["truncated"]
        value = worth(f["obs"])
        final = final_values(f, value, worth(f["final/obs"]))
        advantage, _ = gae(Steps(f["reward"], value, terminated, truncated, final), GAMMA, LAMBDA)
        log_ratio = np.zeros_like(f["reward"])
        traced, _ = vtrace(Steps(f["reward"], value, terminated, truncated, final), log_ratio, GAMMA, LAMBDA)
        so_far, carry = discounted(f["reward"], f["first"], valid, GAMMA, carry)
        idle = ~valid
        assert not f["reward"][idle].any()
        assert not f["first"][idle].any()
        assert not terminated[idle].any()
        assert not truncated[1:][idle[1:]].any()
        assert len(set(f["final/index"].tolist())) == len(f["final/index"])
        ended = (terminated | truncated).reshape(-1)
        assert ended[f["final/index"]].all()
        for lane in range(lanes):
            here = [s for s in seen[lane] if s.fragment == k]
            for i, s in enumerate(here):
                step, episode, t = s.step, s.episode, s.t
                assert tuple(f["obs"][t, lane].tolist()) == step.obs
                assert f["first"][t, lane] == (step is episode.steps[0])
                assert (f["action"][t, lane], f["reward"][t, lane]) == (step.action, np.float32(step.reward))
                last = step is episode.steps[-1]
                if last and episode.over == "ended":
                    assert (terminated[t, lane], truncated[t, lane]) == (step.terminated, not step.terminated)
                else:  # a cut is known in this fragment, or it is marked in the next
                    cut = last and episode.over == "cut" and t < length - 1
                    assert (terminated[t, lane], truncated[t, lane]) == (False, cut)
                # The true next observation, as learning finds it.
                listed = np.flatnonzero(f["final/index"] == t * lanes + lane)
                shown = f["final/obs"][listed[0]] if len(listed) else f["obs"][t + 1, lane]
                assert tuple(shown.tolist()) == step.next_obs
                if (terminated | truncated)[t, lane] and not len(listed):
                    assert t == length - 1 or not valid[t + 1, lane]
                # Advantages, over the rest of this episode in this fragment.
                expected, weight = 0.0, 1.0
                for after in (x.step for x in here[i:] if x.episode is episode):
                    bootstrap = 0.0 if after.terminated else worth_of(after.next_obs)
                    expected += weight * (after.reward + GAMMA * bootstrap - worth_of(after.obs))
                    weight *= GAMMA * LAMBDA
                assert advantage[t, lane] == pytest.approx(expected, abs=1e-4)
                assert traced[t, lane] == pytest.approx(expected, abs=1e-4)
                past = episode.steps[: episode.steps.index(step) + 1]
                assert so_far[t, lane] == pytest.approx(sum(GAMMA**j * x.reward for j, x in enumerate(past[::-1])))

    for lane in range(lanes):
        still = episodes[lane][-1]
        now = (sum(s.reward for s in still.steps), len(still.steps)) if not still.over else (0, 0)
        assert gathered.sampler._flying.returns[lane] == pytest.approx(now[0], abs=1e-5)
        assert gathered.sampler._flying.lengths[lane] == now[1]
    over = [episode for lane in episodes for episode in lane if episode.over == "ended"]
    returns = np.concatenate([f["episode/return"] for f in gathered.fragments])
    lengths = np.concatenate([f["episode/length"] for f in gathered.fragments])
    assert sorted(returns) == pytest.approx(sorted(sum(s.reward for s in e.steps) for e in over), abs=1e-5)
    assert sorted(lengths) == sorted(len(e.steps) for e in over)

    assert [r.record.steps for r in gathered.receipts] == [f.steps for f in gathered.fragments]
    cuts = sum(episode.over == "cut" for lane in episodes for episode in lane)
    faults = [fault for receipt in gathered.receipts for fault in receipt.faults]
    assert len(faults) == cuts > 3


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("anew_after", [-1, 2])
@pytest.mark.parametrize(("seed", "lanes", "length"), CASES[:16])
def test_replay_reaches_across_no_cut(seed: int, lanes: int, length: int, n_step: int, anew_after: int) -> None:
    gathered = Gathered(seed, lanes, length, 48 // length, anew_after, p_break=0.2, p_end=0.1)
    env = gathered.algo.env
    replay = Replay(env.obs, env.action, capacity=1000, lanes=lanes, n_step=n_step, gamma=GAMMA)
    expected: dict[Name, tuple[float, float, Name]] = {}
    for fragment in gathered.fragments:
        replay.insert(fragment)
    for lane in gathered.episodes():
        for episode in lane:
            for i, step in enumerate(episode.steps):
                window = episode.steps[i : i + n_step]
                if len(window) < n_step and not episode.over:
                    continue
                total = sum(GAMMA**j * s.reward for j, s in enumerate(window))
                discount = 0.0 if window[-1].terminated else GAMMA ** len(window)
                expected[step.obs] = (total, discount, window[-1].next_obs)
    (ready,) = np.nonzero(replay._ready)
    assert len(replay) == len(ready) == len(expected)
    replay._draw_uniform = lambda n, rng: ready  # type: ignore[method-assign]
    batch = replay.sample(len(ready), np.random.default_rng(0))
    for i in range(len(ready)):
        total, discount, next_obs = expected[tuple(batch["obs"][i].tolist())]
        assert tuple(batch["next_obs"][i].tolist()) == next_obs
        assert batch["reward"][i] == pytest.approx(total, abs=1e-5)
        assert batch["discount"][i] == pytest.approx(discount)


@pytest.mark.usefixtures("patient")
def test_a_sampler_with_faults_is_resumed_exactly() -> None:
    gathered = Gathered(0, 3, 5, 4)
    _, version = acting(configured(3, 5))
    state = gathered.sampler.state()
    other = proven_sampler(gathered.algo, EnvArgs(f"{__name__}:Shaky", 3, 0), 5)
    assert other.load(state) == []
    faults = 0
    for _ in range(4):
        (a, told), (b, told_again) = gathered.sampler.produce(version), other.produce(version)
        assert a.columns.keys() == b.columns.keys()
        assert all(a[k].tobytes() == b[k].tobytes() for k in a.columns)
        assert [f["cause"] for f in told.faults] == [f["cause"] for f in told_again.faults]
        faults += len(told.faults)
    assert faults > 3


@pytest.mark.usefixtures("patient")
def test_beginning_anew() -> None:
    gathered = Gathered(0, 2, 5, 3, p_break=0.0, p_reset=0.0)
    _, version = acting(configured(2, 5))
    sampler = gathered.sampler
    sampler.start_fresh(7, 1)
    assert not sampler._flying.lengths.any()
    first = sampler.sample(version)
    assert (first.sequence, sampler.sample(version).sequence) == (7, 8)
    starts = {tuple(row) for f in gathered.fragments for row in f["obs"].reshape(-1, 2).tolist()}
    assert not starts & {tuple(row) for row in first["obs"].reshape(-1, 2).tolist()}
    sampler.start_fresh(7, 1)
    assert np.array_equal(sampler.sample(version)["action"], first["action"])
    sampler.start_fresh(7, 2)
    assert not np.array_equal(sampler.sample(version)["obs"], first["obs"])


@pytest.mark.usefixtures("patient")
def test_a_receipt_says_where_the_time_went() -> None:
    gathered = Gathered(0, 2, 50, 1, p_break=0.0, p_reset=0.0)
    (receipt,) = gathered.receipts
    assert (receipt.record[:3], list(receipt.faults)) == ((0, 0, 100), [])
    assert receipt.seconds.keys() == {"env", "policy", "other"}
    assert all(x > 0 for x in receipt.seconds.values())
    assert receipt.memory > 10_000_000


def played(seed: int, breaks: int = 5, **env_args: float) -> tuple[Evaluator, PolicyVersion]:
    algo, version = acting(configured(3, 5), **env_args)
    return Evaluator(algo.acting(), EnvArgs(f"{__name__}:Shaky", 3, seed, env_args), breaks), version


@pytest.mark.usefixtures("patient")
def test_evaluation_counts_no_cut_episode() -> None:
    evaluator, version = played(0, breaks=50, p_break=0.15, p_end=0.2, p_reset=0.0)
    evaluator.begin(version, 1)
    evaluator._vector()._shared.proven = True  # type: ignore[attr-defined]
    Shaky.log.clear()
    found = evaluator.play(version, 60)
    assert len(found.returns) == 60
    assert np.array_equal(found.returns, evaluator.play(version, 60).returns)
    over = [sum(s.reward for s in e.steps) for e in Shaky.log.values() if e.over == "ended"]
    for total in found.returns:
        assert min(abs(total - x) for x in over) < 1e-5
    assert len(found.faults) == sum(e.over == "cut" for e in Shaky.log.values()) > 10


def test_evaluation_survives_an_env_that_breaks_now_and_then() -> None:
    evaluator, version = played(1, p_break=0.001, p_end=0.01, p_reset=0.0)
    found = evaluator.play(version, 60)
    assert len(found.returns) == 60
    assert found.failure is None
    assert len(found.faults) > 0


@pytest.mark.usefixtures("patient")
def test_an_evaluation_that_never_ends_an_episode_is_given_up() -> None:
    evaluator, version = played(0, breaks=5, p_break=0.2, p_end=0.0, p_reset=0.0)
    evaluator.begin(version, 1)
    evaluator._vector()._shared.proven = True  # type: ignore[attr-defined]
    found = evaluator.advance()
    assert found.over
    assert "broke in 6 evaluation episodes in a row, in lane 0" in str(found.failure)
    assert found.failure is not None
    assert found.failure.facts["lane"] == 0
    assert 6 <= len(found.faults) <= 3 * 6, "those of the two other lanes at most"
