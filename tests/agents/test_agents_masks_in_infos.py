"""Masks of several agents in `info`: the same as masks in what agents see, parallel and in turns."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import raynforce
from raynforce.envs.make import make
from raynforce.envs.masks import KEY
from raynforce.envs.tiny_agents import Nim
from raynforce.envs.vector import EnvArgs
from raynforce.errors import UsageError
from tests.envs.wrapped_envs import MaskedAim

HERE = "agents.test_agents_masks_in_infos:"
HOW: dict[str, Any] = {"runtime": "inline", "topology": "sync", "progress": "quiet", "seed": 2}
SMALL = {"sampling.envs": 2, "sampling.fragment": 8, "network.hidden": [8], "algorithm.minibatch_size": 16}
SMALL |= {"eval.every": 0, "eval.episodes": 2, "eval.final_episodes": 0}


class Strict(Nim):
    """Nim that refuses moves which its mask forbids."""

    def __init__(self, heap: int = 6) -> None:
        super().__init__(heap, masked=True)

    def move(self, agent: str, action: int) -> None:
        assert self.left >= action + 1, "forbidden"
        super().move(agent, action)


class InInfo:
    """An environment whose masks are in `info` instead."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["env"], name)

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space(agent)["observation"]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        found = self.env.reset(seed, options)
        return None if found is None else self._told(found[0])

    def step(self, action: Any) -> Any:
        found = self.env.step(action)
        if found is None:
            return None
        seen, infos = self._told(found[0])
        return seen, *found[1:4], infos

    def last(self) -> Any:
        seen, *rest, _ = self.env.last()
        return seen["observation"], *rest, {KEY: seen[KEY]}

    def _told(self, seen: Any) -> Any:
        return {k: v["observation"] for k, v in seen.items()}, {k: {KEY: v[KEY]} for k, v in seen.items()}


def turns() -> InInfo:
    return InInfo(Strict())


def side_by_side(mask: Any = None) -> InInfo:
    made = MaskedAim()
    if mask is not None:
        shown = made.show
        made.show = lambda: {k: v | {KEY: mask if made.steps else v[KEY]} for k, v in shown().items()}  # type: ignore[method-assign]
    return InInfo(made)


@pytest.mark.parametrize(
    ("told", "seen", "algo"),
    [("turns", f"{HERE}Strict", "ppo"), ("side_by_side", "tests.envs.wrapped_envs:MaskedAim", "dqn")],
)
def test_they_are_masks_in_what_agents_see_and_resume_is_exact(told: str, seen: str, algo: str, tmp_path: Path) -> None:
    replay = {"algorithm.learning_starts": 50, "algorithm.batch_size": 16}
    settings = {k: v for k, v in SMALL.items() if algo == "ppo" or k != "algorithm.minibatch_size"}
    settings |= replay if algo == "dqn" else {}

    def stop(status: Any) -> None:
        if status.steps >= 100:
            status.stop_reason = "enough"

    whole = raynforce.train(seen, algo, steps=240, settings=settings, out=tmp_path / "seen", **HOW)
    how = HOW | {"steps": 240, "settings": settings, "out": tmp_path / "told", "callbacks": [stop]}
    cut = raynforce.train(f"{HERE}{told}", algo, **how)
    assert cut.result.stopped == "enough"
    assert raynforce.resume(cut, progress="quiet").result.weights_sha256 == whole.result.weights_sha256
    policy = raynforce.load(cut)
    first = EnvArgs(f"{HERE}{told}", 1, 0, {}).vector(0).reset()
    given = {"observation": first["obs/observation"][0]}
    assert policy.act(given, mask=np.array([0, 1, 0, 0][: first["obs/action_mask"].shape[1]], bool)) == 1


def test_wrappers_do_not_see_them() -> None:
    envs = EnvArgs(f"{HERE}side_by_side", 1, 0, {"wrappers": [{"FrameStack": {"frames": 2}}]}).vector(0)
    seen = envs.reset()
    assert seen["obs/observation"].shape == (2, 2)
    assert seen["obs/action_mask"].tolist() == [[1, 1, 0, 1]] * 2


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.zeros(4, np.int8), "forbids every choice"),
        (np.ones(5, np.int8), r"has shape \(5,\); expected \(4,\)"),
        (None, "has no 'action_mask', and at the first reset"),
    ],
)
def test_a_mask_that_is_none_breaks_the_environment(mask: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = make(f"{HERE}side_by_side", {"mask": mask})
    made.reset(seed=0)
    if mask is None:
        inner = made.env._env
        monkeypatch.setattr(inner, "_told", lambda seen: ({k: v["observation"] for k, v in seen.items()}, {}))
    with pytest.raises(UsageError, match=said):
        made.step(made.action_space.sample())


def test_the_python_file_of_simulators_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "sdk" / "python"))
    sim = importlib.import_module("raynforce_sim")
    for made in (side_by_side, turns):
        with pytest.raises(ValueError, match="has an action_mask in its info: give it as a key of what it sees"):
            sim._Joined(made()).reset(0)
    sim._Joined(MaskedAim()).reset(0)


def test_a_module_is_told_from_an_environment() -> None:
    with pytest.raises(UsageError, match=r"is a module: say what makes the environment, as in tests.agents:env"):
        make("tests.agents")


def test_no_reset_is_asked_for_where_there_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Strict, "reset", lambda *given, **more: asked.append(given))
    assert isinstance(make(f"{HERE}Strict").observation_space, spaces.Dict)
    assert not asked
