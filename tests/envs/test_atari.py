"""Atari games. Without ale-py and OpenCV most of this is skipped, and said so by `pytest -rs`.

To run it: `.venv/bin/pip install --constraint constraints.txt --editable '.[atari]'`. The games come with ale-py.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import numpy as np
import pytest

from raynforce.envs.make import make
from raynforce.envs.vector import make_vector, probe
from raynforce.envs.wrappers import for_evaluation
from raynforce.errors import UsageError
from raynforce.trees import join, split

ATARI = "raynforce.envs.atari:make"
LIVES = "raynforce.envs.atari:episodic_life"
THERE = all(importlib.util.find_spec(name) for name in ("ale_py", "cv2"))
needs_atari = pytest.mark.skipif(not THERE, reason='needs pip install "raynforce[atari]"')


@pytest.mark.parametrize(("module", "package"), [("ale_py", "ale-py"), ("cv2", "opencv-python")])
def test_a_missing_package_is_one_line_with_the_command(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ale_py", "cv2"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as caught:
        make(ATARI, {"game": "Pong"})
    line = f'Atari games need {package}, which is not installed: pip install "raynforce[atari]"'
    assert str(caught.value) == line


def test_an_id_without_ale_py_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(UsageError, match=r'Atari games need pip install "raynforce\[atari\]"'):
        make("ALE/NoSuchGame-v5")


@needs_atari
def test_what_is_seen() -> None:
    spec = probe(ATARI, {"game": "Pong"})
    (leaf,) = spec.obs
    assert (leaf.shape, leaf.dtype, leaf.stack, spec.action.sizes) == ((4, 84, 84), "uint8", 4, (6,))
    small = probe(ATARI, {"game": "ALE/Pong-v5", "frame_stack": 1, "screen": 42, "all_actions": True})
    assert (small.obs[0].shape, small.obs[0].stack, small.action.sizes) == ((42, 42), 1, (18,))
    env = make(ATARI, {"game": "Breakout", "clip_rewards": True})
    first, _ = env.reset(seed=0)
    assert 0 < first.max() <= 255
    np.testing.assert_array_equal(first[0], first[3])
    then = env.step(1)[0]
    np.testing.assert_array_equal(then[:3], first[1:])
    env.close()  # type: ignore[no-untyped-call]


@needs_atari
@pytest.mark.parametrize("args", [{}, {"sticky": 0.25}, {"noops": 0, "fire": True}])
def test_an_episode_is_determined_by_its_seed_whatever_came_before(args: dict[str, Any]) -> None:
    def play(env: Any, seed: int) -> list[Any]:
        rng, seen = np.random.default_rng(seed), [env.reset(seed=seed)[0].tobytes()]
        for _ in range(60):
            obs, reward, ended, cut, _ = env.step(int(rng.integers(4)))
            seen.append((obs.tobytes(), float(reward), ended, cut))
            if ended or cut:
                break
        return seen

    one, other = (make(ATARI, {"game": "Breakout", **args}) for _ in range(2))
    first = [play(one, seed) for seed in (1, 2)]
    assert first[0] != first[1]
    assert [play(other, seed) for seed in (2, 1, 2)] == [first[1], first[0], first[1]]
    one.close()
    other.close()


@needs_atari
@pytest.mark.parametrize(
    ("args", "steps"),
    [({"fire": True}, 150), ({"sticky": 0.25, "clip_rewards": True, "fire": True, "wrappers": [LIVES]}, 40)],
)
def test_running_episodes_come_back(args: dict[str, Any], steps: int) -> None:
    vectors = [make_vector(ATARI, {"game": "Breakout", **args}, 2, seed=3) for _ in range(2)]
    one, other = vectors
    assert one.way_back == "through save_state and load_state of raynforce.envs.atari:Atari"
    rng = np.random.default_rng(0)
    one.reset()
    for _ in range(30):
        one.step(rng.integers(4, size=2))
    arrays, rest = split(one.state())
    saved = join({path: array.copy() for path, array in arrays.items()}, json.loads(json.dumps(rest)))
    other.reset()
    assert other.load(saved) == []
    ends = 0
    for _ in range(steps):
        action = rng.integers(4, size=2)
        a, b = one.step(action), other.step(action)
        ends += len(a.final_lanes)
        np.testing.assert_equal(a._asdict(), b._asdict())
    assert ends > 0
    for vector in vectors:
        vector.close()


@needs_atari
@pytest.mark.parametrize(
    ("args", "message"),
    [({"game": "Pongo"}, "no Atari game 'Pongo'.*did you mean 'Pong'"), ({"game": "xyz"}, "such as Breakout, Pong")],
)
def test_an_unknown_game_is_one_line(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(ATARI, args)


@needs_atari
def test_fire_is_pressed_at_the_start_and_after_each_life() -> None:
    """Without it, and without playing, Breakout waits; with it a ball falls, life by life, until the game is over."""

    def idle(steps: int, **args: Any) -> tuple[int, list[int]]:
        env = make(ATARI, {"game": "Breakout", **args})
        game: Any = env.unwrapped
        env.reset(seed=0)
        lives, over = [game.ale.lives()], False
        while not over and len(lives) <= steps:
            over = env.step(0)[2]
            lives.append(game.ale.lives())
        env.close()  # type: ignore[no-untyped-call]
        return len(lives) - 1, sorted(set(lives), reverse=True)

    assert idle(400) == (400, [5])
    steps, lives = idle(400, fire=True)
    assert steps < 400
    assert lives == [5, 4, 3, 2, 1, 0]
    without = make(ATARI, {"game": "MsPacman", "fire": True})  # it has no FIRE
    assert without.reset(seed=0)[0].shape == (4, 84, 84)
    without.close()  # type: ignore[no-untyped-call]


@needs_atari
def test_a_life_is_an_episode_in_training_and_a_game_in_evaluation() -> None:
    """With it an idle player's game is five episodes, each begun by FIRE and by a stack of one frame; rewards, images
    and the end of the game are the same."""

    def game(args: dict[str, Any]) -> tuple[list[int], list[float]]:
        env: Any = make(ATARI, {"game": "Breakout", "fire": True, **args})
        env.reset(seed=0)
        ends, rewards = [], []
        while env.unwrapped.ale.lives() and len(rewards) < 1000:
            _, reward, terminated, truncated, _ = env.step(2 if len(rewards) < 60 else 3)
            assert not truncated
            rewards.append(float(reward))
            if terminated:
                ends.append(env.unwrapped.ale.lives())
                if ends[-1]:
                    obs, _ = env.reset(seed=len(ends))
                    np.testing.assert_array_equal(obs[0], obs[3])
        env.close()
        return ends, rewards

    args = {"wrappers": [LIVES, {"ClipReward": {"min_reward": -1, "max_reward": 1}}]}
    lives, learned = game(args)
    whole, played = game(for_evaluation(args))
    assert lives == [4, 3, 2, 1, 0]
    assert whole == [0]
    assert learned == played


@needs_atari
def test_a_game_that_is_left_begins_anew() -> None:
    """Only the end of a life goes on with the game: a reset amid one is the beginning that its seed determines."""
    env: Any = make(ATARI, {"game": "Breakout", "fire": True, "wrappers": [LIVES]})
    first, _ = env.reset(seed=5)
    for _ in range(30):
        env.step(2)
    again, _ = env.reset(seed=5)
    np.testing.assert_array_equal(first, again)
    env.close()


@needs_atari
def test_lives_of_what_has_none_are_one_line() -> None:
    with pytest.raises(UsageError, match=r"episodic_life is for raynforce\.envs\.atari:make"):
        make("CartPole-v1", {"wrappers": [LIVES]})
