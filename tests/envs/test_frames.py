"""Frame stacking: what is shown, what the spec says of it, and that it comes back at resume."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from raynforce.envs.doctor import check_env
from raynforce.envs.frames import FrameStack, stacked
from raynforce.envs.make import make, make_described
from raynforce.envs.tiny import Catch
from raynforce.envs.vector import make_vector, probe
from raynforce.errors import UsageError
from raynforce.spaces import EnvSpec
from raynforce.trees import join, split

STACKED = "raynforce.envs.frames:stacked"
CATCH = {"env": "raynforce.envs.tiny:Catch", "frames": 3, "args": {"length": 6}}


class Numbers(gymnasium.Env[Any, int]):
    """The n-th image of an episode is full of n, the first of `10 * seed`."""

    def __init__(self, shape: tuple[int, ...] = (5, 6), inside: bool = False) -> None:
        self.action_space = spaces.Discrete(2)
        image = spaces.Box(0, 255, shape, np.uint8)
        self.inside, self.shape = inside, shape
        self.observation_space: spaces.Space[Any] = (
            spaces.Dict(camera=image, speed=spaces.Box(0, 2, (2,), np.float32)) if inside else image
        )

    def show(self) -> Any:
        image = np.full(self.shape, self.n, np.uint8)
        return {"camera": image, "speed": np.full(2, self.n / 100, np.float32)} if self.inside else image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n = 10 * (seed or 0) % 100
        return self.show(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n += 1 + action
        return self.show(), 1.0, self.n % 50 > 40, False, {}


class Saved(Numbers):
    """One that can be saved."""

    def save_state(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state(self, tree: dict[str, Any]) -> None:
        self.n = tree["n"]


def around_saved() -> gymnasium.Env[Any, Any]:
    return TimeLimit(FrameStack(Saved(inside=True), 4), 30)


def gymnasiums_own() -> gymnasium.Env[Any, Any]:
    return TimeLimit(FrameStackObservation(Numbers(), 4), 30)


@pytest.mark.parametrize(
    ("shape", "expected"), [((5, 6), (3, 5, 6)), ((5, 6, 1), (3, 5, 6)), ((5, 6, 3), (9, 5, 6)), ((3, 5, 6), (9, 5, 6))]
)
def test_the_newest_frame_is_last_and_the_first_one_is_repeated(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    env = FrameStack(Numbers(shape), 3)
    assert env.observation_space.shape == expected
    obs, _ = env.reset(seed=2)
    shown = [obs]
    for _ in range(3):
        shown.append(env.step(0)[0])
    again, _ = env.reset(seed=1)
    assert all(x in env.observation_space for x in (*shown, again))
    frames = [x.reshape(3, -1).mean(axis=1).tolist() for x in (*shown, again)]
    assert frames == [[20, 20, 20], [20, 20, 21], [20, 21, 22], [21, 22, 23], [10, 10, 10]]


def test_channels_keep_their_order() -> None:
    image = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    env = FrameStack(Numbers((2, 5, 3)), 2)
    env.env.show = lambda: image  # type: ignore[attr-defined]
    obs, _ = env.reset(seed=0)
    np.testing.assert_array_equal(obs, np.concatenate([image.transpose(2, 0, 1)] * 2))


def test_only_the_images_of_a_dict_are_stacked() -> None:
    env = FrameStack(Numbers(inside=True), 2)
    env.reset(seed=0)
    obs = env.step(1)[0]
    assert obs in env.observation_space
    assert obs["speed"].tolist() == pytest.approx([0.02, 0.02])
    assert obs["camera"][:, 0, 0].tolist() == [0, 2]


def test_the_spec_says_which_leaves_are_stacks() -> None:
    made, spec = make_described("test_frames:around_saved")
    made.close()
    assert {leaf.path: (leaf.stack, leaf.shape) for leaf in spec.obs} == {
        "obs/camera": (4, (4, 5, 6)),
        "obs/speed": (1, (2,)),
    }
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert probe("test_frames:gymnasiums_own").obs[0].stack == 4
    assert probe("test_frames:Numbers").obs[0].stack == 1
    assert probe(STACKED, {**CATCH, "frames": 1}).obs[0].stack == 1


def test_a_spec_of_before_there_were_stacks_still_reads() -> None:
    data = probe("CartPole-v1").to_json()
    for leaf in data["obs"]:
        del leaf["stack"]
    assert EnvSpec.from_json(data) == probe("CartPole-v1")


@pytest.mark.parametrize(
    ("env", "args", "way"),
    [
        (STACKED, CATCH, "by replaying their actions"),
        ("test_frames:around_saved", {}, "through save_state and load_state of test_frames:Saved"),
        ("test_frames:gymnasiums_own", {}, "by replaying their actions"),
    ],
)
def test_running_episodes_come_back_with_their_frames(env: str, args: dict[str, Any], way: str) -> None:
    one, other = (make_vector(env, args, 3, seed=0) for _ in range(2))
    assert one.way_back == way
    rng = np.random.default_rng(0)
    one.reset()
    for _ in range(8):
        one.step(rng.integers(2, size=3))
    arrays, rest = split(one.state())
    saved = join({path: array.copy() for path, array in arrays.items()}, json.loads(json.dumps(rest)))
    assert other.load(saved) == []
    for _ in range(12):
        action = rng.integers(2, size=3)
        a, b = one.step(action), other.step(action)
        np.testing.assert_equal(a._asdict(), b._asdict())
    one.close()
    other.close()


def test_the_doctor_finds_nothing_wrong_with_it() -> None:
    for env, args in ((STACKED, CATCH), ("test_frames:around_saved", {})):
        report = check_env(env, args)
        found = [finding.title for finding in report.findings if finding.level != "ok"]
        assert set(found) <= {"terminated may be a time limit", "every episode starts the same"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"env": "FrozenLake-v1"}, r"no image and no vector but is Discrete\(.*; an image is a uint8 Box of HxW"),
        ({"env": "raynforce.envs.tiny:Catch", "frames": 0}, "frames = 0 is not allowed; it is a whole number from 1"),
        ({"env": "raynforce.envs.tiny:Cat"}, "did you mean 'Catch'"),
        ({"env": "raynforce.envs.tiny:Catch", "args": {"size": 3}}, "it takes length, width"),
        ({}, "missing a required argument: 'env'"),
    ],
)
def test_wrong_use_is_one_line(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(STACKED, args)


# The tiny environment whose frames have to be stacked


def mean_return(env: gymnasium.Env[Any, Any], act: Any, episodes: int = 400) -> float:
    total = 0.0
    for seed in range(episodes):
        obs, ended = env.reset(seed=seed)[0], False
        while not ended:
            obs, reward, ended, _, _ = env.step(act(obs))
            total += float(reward)
    return total / episodes


def test_catch_has_the_returns_it_says() -> None:
    def moved(obs: np.ndarray) -> int:
        (*_, before), (*_, now) = np.argwhere(obs)
        return int((now - before) % 8 == 1)  # in twice the first frame nothing has moved: a guess

    assert mean_return(stacked("raynforce.envs.tiny:Catch", 2), moved) == pytest.approx(7.5, abs=0.1)
    rng = np.random.default_rng(0)
    assert mean_return(Catch(), lambda _: int(rng.integers(2))) == pytest.approx(4, abs=0.25)
    for _ in range(3):  # whatever is done on what one image shows
        table = rng.integers(2, size=(9, 8))
        assert mean_return(Catch(), lambda obs, t=table: int(t[tuple(np.argwhere(obs)[0][:2])])) == pytest.approx(
            4, abs=0.3
        )


def test_catch_is_determined_by_its_seed_and_ends_in_time() -> None:
    one, other = Catch(length=5, width=4), Catch(length=5, width=4)
    for seed in range(5):
        a, b = one.reset(seed=seed)[0], other.reset(seed=seed)[0]
        assert a.shape == (6, 4, 1)
        for step in range(1, 6):
            np.testing.assert_array_equal(a, b)
            assert np.count_nonzero(a) == 1
            a, _, ended, cut, _ = one.step(0)
            b = other.step(1)[0]
            assert (ended, cut) == (step == 5, False)
