"""Making and describing environments."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from raynforce.envs.describe import describe, flatten_obs
from raynforce.envs.make import make
from raynforce.errors import UsageError
from raynforce.imports import load_object
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf


def fails(env: str, **env_args: object) -> str:
    with pytest.raises(UsageError) as caught:
        make(env, env_args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_makes_ids_and_factories() -> None:
    assert make("CartPole-v1").spec.id == "CartPole-v1"
    assert make("CartPole").spec.id == "CartPole-v1"
    assert make("bad_envs:Counter", {"length": 7}).length == 7
    assert make("gymnasium:CartPole-v1", {"max_episode_steps": 5}).spec.max_episode_steps == 5


def test_unknown_ids() -> None:
    assert "'CartPol-v1' is not registered" in fails("CartPol-v1")
    assert "did you mean 'CartPole-v1'?" in fails("CartPol-v1")
    assert "no such version (did you mean 'CartPole-v1'?)" in fails("CartPole-v9")
    assert "module:factory" in fails("Zzzzzzzzzzzzzz-v0")
    assert "'' is not registered" in fails("")


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("Box2D", "mujoco", "ale_py", "jax"):
        monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    for name in [n for n in sys.modules if n.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d", "ale_py."))]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in gymnasium.registry if n.startswith("ALE/")]:  # another test may have made one
        monkeypatch.delitem(gymnasium.registry, name)
    assert fails("LunarLander-v3").endswith('needs box2d, which is not installed: pip install "raynforce[box2d]"')
    assert 'pip install "gymnasium[mujoco]"' in fails("Ant-v5")
    assert 'pip install "raynforce[atari]"' in fails("ALE/Pong-v5")


def test_wrong_arguments() -> None:
    assert "does not take env_args {'lenght': 3}" in fails("bad_envs:Counter", lenght=3)
    assert "it takes length, end, dtype" in fails("bad_envs:Counter", lenght=3)
    assert "does not take env_args {'gravity': 1}" in fails("CartPole-v1", gravity=1)
    assert "unexpected keyword argument 'gravity'" in fails("CartPole-v1", gravity=1)


def test_bad_factories() -> None:
    assert "the factory raised RuntimeError: no licence" in fails("bad_envs:Bad", fault="make")
    assert "returned a builtins.dict; the factory must return a gymnasium.Env" in fails("bad_envs:not_an_env")
    assert "is a int; it must be a class or function" in fails("bad_envs:a_number")
    assert "no module named 'no_such_module'" in fails("no_such_module:Env")
    assert "has no 'Countr' (did you mean 'Counter'?)" in fails("bad_envs:Countr")
    assert "not of the form module:name" in fails("bad_envs:")


def test_modules_come_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "here_now.py").write_text("class A:\n    b = 5\n")
    (tmp_path / "needs_more.py").write_text("import surely_not_there\n")
    (tmp_path / "broken_here.py").write_text("def f(:\n")
    assert load_object("here_now:A.b") == 5
    with pytest.raises(UsageError, match=r"importing 'needs_more' failed: ModuleNotFoundError: .*surely_not_there"):
        load_object("needs_more:f")
    with pytest.raises(UsageError, match="importing 'broken_here' failed: SyntaxError"):
        load_object("broken_here:f")
    with pytest.raises(UsageError, match=r"no module named 'here_now.py': write 'here_now'"):
        load_object("here_now.py:A")


def test_describe_observations() -> None:
    space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        inner=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(2)]),
        many=spaces.MultiDiscrete([[2, 3], [4, 5]]),
        wide=spaces.Box(-1, 1, (2,), np.float64),
    )
    leaves = describe("e", space, spaces.Discrete(2)).obs
    assert leaves == (
        ObsLeaf("obs/image", "box", (4, 4, 3), "uint8"),
        ObsLeaf("obs/inner/0", "discrete", (), "int64", (3,), (-1,)),
        ObsLeaf("obs/inner/1", "multibinary", (2,), "int8"),
        ObsLeaf("obs/many", "multidiscrete", (2, 2), "int64", (2, 3, 4, 5), (0, 0, 0, 0)),
        ObsLeaf("obs/wide", "box", (2,), "float32"),
    )
    obs = space.sample()
    flat = flatten_obs(obs, leaves)
    assert list(flat) == [leaf.path for leaf in leaves]
    assert flat["obs/inner/0"] == obs["inner"][0]
    assert flat["obs/wide"] is obs["wide"]
    plain = describe("e", spaces.Box(0, 1, (1,)), spaces.Discrete(2))
    assert flatten_obs(5, plain.obs) == {"obs": 5}
    with pytest.raises(UsageError, match=r"lacks 'obs/inner/1'"):
        flatten_obs({**obs, "inner": (1,)}, leaves)
    with pytest.raises(UsageError, match=r"lacks 'obs/image': 'image' was looked for in keys \['b'\]"):
        flatten_obs({"b": 1}, leaves)


def test_describe_actions() -> None:
    def action(space: gymnasium.Space) -> ActionSpec:
        spec = describe("e", spaces.Discrete(2), space)
        assert EnvSpec.from_json(spec.to_json()) == spec
        return spec.action

    assert action(spaces.Discrete(3, start=1)) == ActionSpec("discrete", (), "int64", (3,), (1,))
    assert action(spaces.MultiDiscrete([2, 3])) == ActionSpec("multidiscrete", (2,), "int64", (2, 3), (0, 0))
    assert action(spaces.MultiBinary((2, 1))) == ActionSpec("multidiscrete", (2, 1), "int64", (2, 2), (0, 0))
    box = action(spaces.Box(np.array([-1.0, -np.inf]), np.array([2.0, np.inf]), dtype=np.float64))
    assert box == ActionSpec("box", (2,), "float32", low=(-1.0, -np.inf), high=(2.0, np.inf))


@pytest.mark.parametrize(
    ("obs", "action", "message"),
    [
        (spaces.Text(3), spaces.Discrete(2), "observation space Text.*allowed: Box, Discrete"),
        (spaces.Sequence(spaces.Discrete(2)), spaces.Discrete(2), "observation space Sequence"),
        (spaces.Dict(a=spaces.Graph(spaces.Discrete(2), None)), spaces.Discrete(2), "Graph.* at 'obs/a'"),
        (spaces.Dict(), spaces.Discrete(2), "empty observation space"),
        (spaces.Dict({"a/b": spaces.Discrete(2)}), spaces.Discrete(2), "key 'a/b'"),
        (spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(2)), "action space Dict.*allowed: Discrete"),
        (spaces.Discrete(2), spaces.Box(0, 3, (1,), np.int64), "action space Box.*Box of floats"),
    ],
)
def test_describe_refuses(obs: gymnasium.Space, action: gymnasium.Space, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        describe("e", obs, action)
