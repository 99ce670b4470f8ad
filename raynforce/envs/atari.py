"""Atari games as they are learned from: `raynforce train dqn raynforce.envs.atari:make --set env_args.game=Pong`."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.wrappers import AtariPreprocessing, ClipReward

from raynforce.envs.frames import FrameStack, layers
from raynforce.envs.make import closed_on_error
from raynforce.errors import UsageError, nearest
from raynforce.trees import Tree

Env = gymnasium.Env[Any, Any]
Stepped = tuple[Any, Any, bool, bool, dict[str, Any]]
FIRE, NOOP = "FIRE", 0  # an action's meaning, and the number of the one that every game has
INSTALL = 'pip install "raynforce[atari]"'


def make(
    game: str,
    frame_skip: int = 4,
    frame_stack: int = 4,
    screen: int = 84,
    noops: int = 30,
    sticky: float = 0.0,
    fire: bool = False,
    clip_rewards: bool = False,
    all_actions: bool = False,
    render_mode: str | None = None,
) -> Env:
    """A game of the Arcade Learning Environment, seen as in Mnih et al. 2015.

    `game` is its name (Pong, SpaceInvaders) or id (ALE/Pong-v5). An action is held for `frame_skip` frames; what is
    seen are the newest `frame_stack` images of them, gray, `[frame_stack, screen, screen]`, each the brighter of the
    last two frames. An episode begins with 1 to `noops` frames of doing nothing, and ends after 108,000 frames at the
    latest. `sticky` is the chance in each frame that the action before is held instead (0.25 in Machado et al. 2018);
    with it, or with `noops` 0, starting an episode takes as long as some hundred steps. `clip_rewards` cuts rewards to
    -1 and 1, in evaluations too; the wrappers `ClipReward` and `raynforce.envs.atari:episodic_life` are for training
    alone. `fire` presses FIRE, where the game has it, at the start of an episode and after each life: Breakout waits
    for it, and a greedy policy that never does plays on until the end. `all_actions` offers all 18 instead of those
    that the game uses; `render_mode` is as for `gymnasium.make`.
    """
    ale = _require("ale_py", "ale-py")
    _require("cv2", "opencv-python")
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Warning)  # no banner for each environment
    made = gymnasium.make(
        _id_of(game),
        obs_type="grayscale",  # of every frame; what is seen is asked for by AtariPreprocessing
        frameskip=1,
        repeat_action_probability=sticky,
        full_action_space=all_actions,
        render_mode=render_mode,
        disable_env_checker=True,
    )
    with closed_on_error(made):
        game_env = QuickReset(made) if noops and not sticky else made
        atari = Atari(game_env, noops, frame_skip, screen)
        game_of: Any = made.unwrapped
        atari.fires = fire and FIRE in game_of.get_action_meanings()
        env: Env = atari
        if clip_rewards:
            env = ClipReward(env, -1.0, 1.0)
        return FrameStack(env, frame_stack) if frame_stack != 1 else env


def episodic_life(env: Env) -> Env:
    """A wrapper for training: an episode ends with a life, and the next one goes on with the same game.

    What is lost with a life is then learned from the life itself. Evaluations play whole games.
    """
    atari = next((layer for layer in layers(env) if isinstance(layer, Atari)), None)
    if atari is None:
        raise UsageError("episodic_life is for raynforce.envs.atari:make")
    atari.episodic_life = True
    return env


episodic_life.training_only = True  # type: ignore[attr-defined]


class QuickReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begin every episode of a game without chance from the first one's state: reloading takes some hundred steps."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._start: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        game: Any = self.unwrapped
        if self._start is None:
            self._first = self.env.reset(seed=0, options=options)
            self._start = game.ale.cloneState()
        else:
            game.ale.restoreState(self._start)
        if seed is not None:
            game.np_random, _ = np_random(seed)
        obs, info = self._first
        return obs, dict(info)


class Atari(AtariPreprocessing):
    """gymnasium's `AtariPreprocessing`, whose running episodes can be saved, which may press FIRE by itself, and where
    a life may be an episode."""

    fires = episodic_life = False
    _goes_on = False  # whether the next episode is the same game's next life

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        goes_on, self._goes_on = self._goes_on, False
        if goes_on:
            obs, _, terminated, truncated, info = self._begin_life()
            if not (terminated or truncated):
                return obs, info
        begun: tuple[Any, dict[str, Any]] = super().reset(**how)
        if not self.fires:
            return begun
        obs, _, _, _, info = self._begin_life()
        return obs, info

    def step(self, action: Any) -> Stepped:
        lives = self.ale.lives()
        result: Stepped = super().step(action)
        obs, reward, terminated, truncated, info = result
        if terminated or truncated or self.ale.lives() >= lives:
            return result
        if self.episodic_life:
            self._goes_on = True
            return obs, reward, True, False, info
        if not self.fires:
            return result
        obs, more, *rest = self._begin_life()
        return (obs, float(reward) + float(more), *rest)

    def _begin_life(self) -> Stepped:
        game: Any = self.unwrapped
        return super().step(game.get_action_meanings().index(FIRE) if self.fires else NOOP)

    def save_state(self) -> Tree:
        state = np.frombuffer(self.ale.cloneState(include_rng=True).serialize(), np.uint8)
        frames = {str(i): frame for i, frame in enumerate(self.obs_buffer)}  # an early end shows parts of them
        over, goes_on = bool(self.game_over), self._goes_on
        return {"ale": state, "lives": int(self.lives), "over": over, "goes_on": goes_on, "frames": frames}

    def load_state(self, tree: Tree) -> None:
        self.ale.restoreState(importlib.import_module("ale_py").ALEState(tree["ale"].tobytes()))
        self.lives, self.game_over = tree["lives"], tree["over"]
        self._goes_on = tree.get("goes_on", False)  # not in what earlier versions saved
        self.obs_buffer = [tree["frames"][str(i)] for i in range(len(self.obs_buffer))]


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"Atari games need {package}, which is not installed: {INSTALL}") from error


def _id_of(game: str) -> str:
    name = game.removeprefix("ALE/").rpartition("-v")[0] or game.removeprefix("ALE/")
    found = {i.removeprefix("ALE/").rpartition("-v")[0]: i for i in gymnasium.registry if i.startswith("ALE/")}
    if name not in found:
        hint = nearest(name, found) or f"; there are {len(found)}, such as Breakout, Pong and SpaceInvaders"
        raise UsageError(f"there is no Atari game {game!r}{hint}")
    return found[name]
