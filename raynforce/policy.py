"""A trained policy, loaded and acting: numpy and safetensors are all it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import CheckpointError, UsageError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.runs import checkpoint
from raynforce.runs.directory import find_policy


class Policy:
    """A trained policy that acts: numpy alone, unless the network is your own torch module."""

    def __init__(self, spec: ActingSpec, version: PolicyVersion, seed: int | None = None) -> None:
        self.spec = spec
        self.version = version
        self._actor = Actor(spec)
        self._actor.load(version)
        self._rng = np.random.default_rng(seed)

    def act(
        self, obs: Any, state: Any = None, mask: np.ndarray | None = None, *, greedy: bool = True
    ) -> np.ndarray | Any:
        """Choose an action for one observation, or actions for a batch of them.

        `obs` is what the environment gives (a dict for `Dict` spaces), alone or with one leading batch dimension;
        the answer has the same form. `greedy=False` samples as in training. `mask` marks allowed choices of a
        discrete space. `state` is for recurrent policies, of which there are none yet.
        """
        if state is not None:
            raise UsageError("this policy is not recurrent: leave out `state`")
        batch, single = self._batched(obs)
        out = self._actor.outputs(batch)
        if mask is not None:
            out = self._masked(out, np.asarray(mask, bool))
        distribution = self._actor.distribution
        if greedy:
            action = distribution.mode(out)
        else:
            lanes = len(next(iter(batch.values())))
            action = self._actor.sample(out, distribution.noise(self._rng, 1, lanes)[0])
            if mask is not None and self.spec.exploration == "epsilon":
                action = self._allowed(action, np.asarray(mask, bool))
        answer = self._actor.to_env(action)
        return answer[0] if single else answer

    def _batched(self, obs: Any) -> tuple[dict[str, np.ndarray], bool]:
        batch: dict[str, np.ndarray] = {}
        single = False
        for leaf in self.spec.env.obs:
            value = obs
            for key in leaf.path.split("/")[1:]:
                try:
                    value = value[int(key)] if isinstance(value, tuple | list) else value[key]
                except (KeyError, IndexError, TypeError, ValueError):
                    raise UsageError(f"the observation has no {leaf.path.removeprefix('obs/')!r}") from None
            array = np.asarray(value, leaf.dtype)
            single = array.shape == leaf.shape
            if not single and array.shape[1:] != leaf.shape:
                shape = list(leaf.shape)
                raise UsageError(f"{leaf.path} has shape {list(array.shape)}; allowed are {shape} and {['N', *shape]}")
            batch[leaf.path] = array[None] if single else array
        return batch, single

    def _masked(self, out: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
        name = self._actor.distribution.outputs[0]
        if self.spec.env.action.kind == "box":
            raise UsageError("mask is for discrete actions, and this policy's are continuous")
        mask = mask.reshape(-1, mask.shape[-1])
        if mask.shape[1] != out[name].shape[1]:
            raise UsageError(f"mask has {mask.shape[1]} entries for {out[name].shape[1]} choices")
        return {**out, name: np.where(mask, out[name], np.float32(-1e30))}

    def _allowed(self, action: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Replace forbidden uniform choices by uniform choices among the allowed ones."""
        mask = np.broadcast_to(mask.reshape(-1, mask.shape[-1]), (len(action), mask.shape[-1]))
        wrong = np.flatnonzero(~mask[np.arange(len(action)), action])
        for row in wrong:
            action[row] = self._rng.choice(np.flatnonzero(mask[row]))
        return action


def load(path: str | Path, which: str = "best", *, seed: int | None = None) -> Policy:
    """Load the policy of a run (its `best`, or `last`) or of a checkpoint directory."""
    saved = read_policy(find_policy(Path(path), which))
    return Policy(*saved, seed=seed)


def read_policy(path: Path) -> tuple[ActingSpec, PolicyVersion]:
    """The acting spec and the policy version in a checkpoint."""
    tree = checkpoint.load(path, only=["policy"])["policy"]
    try:
        spec, version = ActingSpec.from_json(tree["acting"]), PolicyVersion.from_state(tree["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} does not hold a policy: {error}") from None
    wanted = sum(p.size for p in spec.network.params())
    if not spec.factory and wanted != version.params.size:
        found = version.params.size
        raise CheckpointError(f"checkpoint {path} is of another shape: expected {wanted} parameters, found {found}")
    return spec, version
