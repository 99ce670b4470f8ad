"""Episodes made up for tests: random numbers for every kind of space."""

from __future__ import annotations

import numpy as np

from raynforce.data.episodes import Episode, Episodes, joined
from raynforce.envs.make import make_described
from raynforce.spaces import EnvSpec

ENVS = {
    "numbers": ("CartPole-v1", {}),
    "continuous": ("Pendulum-v1", {}),
    "choices": ("raynforce.envs.tiny:MultiIdentity", {}),
    "number": ("raynforce.envs.tiny:Identity", {}),
    "several": ("raynforce.envs.tiny:DictIdentity", {}),
    "image": ("raynforce.envs.tiny:Catch", {}),
}


def episodes_of(name: str, lengths: tuple[int, ...] = (3, 1, 4)) -> tuple[EnvSpec, Episodes]:
    """Samples of the spaces of an environment, in episodes of these lengths, some terminated, some truncated."""
    env, args = ENVS[name]
    made, spec = make_described(env, args)
    made.action_space.seed(1)
    made.observation_space.seed(1)
    several = []
    for number, length in enumerate(lengths):
        shown = [made.observation_space.sample() for _ in range(length + 1)]
        columns = {}
        for leaf in spec.obs:
            values = [one[leaf.path.partition("/")[2]] if "/" in leaf.path else one for one in shown]
            columns[leaf.path] = np.nan_to_num(np.array(values).astype(leaf.dtype), posinf=9.0, neginf=-9.0)
        kind = np.float32 if spec.action.kind == "box" else np.int64
        actions = np.array([made.action_space.sample() for _ in range(length)]).astype(kind)
        rewards = np.linspace(0.1, 1.0, length, dtype=np.float32) + np.float32(number)
        several.append(Episode(columns, actions, rewards, number % 2 == 0, number % 2 == 1))
    made.close()
    return spec, joined(several, spec)


def assert_equal(one: Episodes, other: Episodes) -> None:
    """To the bit, dtypes included."""
    assert one.obs.keys() == other.obs.keys()
    columns = [(one.obs[path], other.obs[path]) for path in one.obs]
    names = ("action", "reward", "length", "terminated", "truncated")
    columns += [(getattr(one, name), getattr(other, name)) for name in names]
    for a, b in columns:
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
