"""A trained policy, loaded and acting: numpy and safetensors are all it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import CheckpointError, UsageError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.runs import checkpoint
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path
from raynforce.spaces import ObsLeaf


class Policy:
    """A trained policy that acts: numpy alone, unless the network is your own torch module."""

    def __init__(self, spec: ActingSpec, version: PolicyVersion, seed: int | None = None) -> None:
        self.spec = spec
        self.version = version
        self._actor = Actor(spec, light=True)
        self._actor.load(version)
        self._rng = np.random.default_rng(seed)

    def __repr__(self) -> str:
        return f"<Policy version {self.version.number} for {self.spec.env.env}>"

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
        batch, lanes, single = self._batched(obs)
        out, distribution = self._actor.outputs(batch), self._actor.distribution
        allowed = None if mask is None else self._allowed(np.asarray(mask, bool), lanes)
        if allowed is not None:
            name = distribution.outputs[0]
            out = {**out, name: np.where(allowed, out[name], np.float32(-1e30))}
        if greedy:
            action = distribution.mode(out)
        else:
            action = self._actor.sample(out, distribution.noise(self._rng, 1, lanes)[0])
            if allowed is not None and self.spec.exploration == "epsilon":
                for row in np.flatnonzero(~allowed[np.arange(lanes), action]):  # a uniform choice knows no mask
                    action[row] = self._rng.choice(np.flatnonzero(allowed[row]))
        answer = self._actor.to_env(action)
        return answer[0] if single else answer

    def _batched(self, obs: Any) -> tuple[dict[str, np.ndarray], int, bool]:
        """The observation's leaves with a batch dimension, its length, and whether there was none."""
        batch = {leaf.path: self._leaf(leaf, obs) for leaf in self.spec.env.obs}
        forms = {batch[x.path].shape[: batch[x.path].ndim - len(x.shape)] for x in self.spec.env.obs}
        if len(forms) > 1:
            raise UsageError(f"the leaves of the observation disagree about the batch: {sorted(forms)}")
        (form,) = forms
        if form:
            return batch, form[0], False
        return {path: array[None] for path, array in batch.items()}, 1, True

    def _leaf(self, leaf: ObsLeaf, obs: Any) -> np.ndarray:
        for key in leaf.path.split("/")[1:]:
            try:
                obs = obs[int(key)] if isinstance(obs, tuple | list) else obs[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise UsageError(f"the observation has no {leaf.path.removeprefix('obs/')!r}") from None
        try:
            array = np.asarray(obs).astype(leaf.dtype, copy=False)
        except (TypeError, ValueError):
            raise UsageError(f"{leaf.path} is not an array of {leaf.dtype}: {str(obs)[:60]}") from None
        if array.shape != leaf.shape and array.shape[1:] != leaf.shape:
            allowed = f"{list(leaf.shape)} and [{', '.join(['N', *map(str, leaf.shape)])}]"
            raise UsageError(f"{leaf.path} has shape {list(array.shape)}; allowed are {allowed}")
        if leaf.sizes:
            index = array - np.asarray(leaf.start)
            if (index < 0).any() or (index >= np.asarray(leaf.sizes)).any():
                raise UsageError(f"{leaf.path} = {array.tolist()} is outside its space of {list(leaf.sizes)} values")
        return array

    def _allowed(self, mask: np.ndarray, lanes: int) -> np.ndarray:
        """The mask as `[lanes, choices]`, checked."""
        action = self.spec.env.action
        if action.kind == "box":
            raise UsageError("mask is for discrete actions, and this policy's are continuous")
        rows = mask.reshape(-1, mask.shape[-1]) if mask.ndim else mask.reshape(1, 1)
        if rows.shape[1] != sum(action.sizes) or len(rows) not in (1, lanes):
            wanted = f"[{sum(action.sizes)}] or [{lanes}, {sum(action.sizes)}]"
            raise UsageError(f"mask has shape {list(mask.shape)}; allowed are {wanted}")
        for choices in np.split(rows, np.cumsum(action.sizes)[:-1], axis=1):
            if not choices.any(axis=1).all():
                raise UsageError("mask allows no choice at all: at least one must be True")
        return np.broadcast_to(rows, (lanes, rows.shape[1]))


def load(path: str | Path, which: str = "best", *, seed: int | None = None) -> Policy:
    """Load the policy of a run (its `best`, or `last`) or of a checkpoint directory; a run may be at a URL."""
    return Policy(*read_policy(find_policy(local_path(path), which)), seed=seed)


def read_policy(path: Path) -> tuple[ActingSpec, PolicyVersion]:
    """The acting spec and the policy version in a checkpoint."""
    tree = checkpoint.load(path, only=["policy"])["policy"]
    try:
        spec, version = ActingSpec.from_json(tree["acting"]), PolicyVersion.from_state(tree["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} does not hold a policy: {error}") from None
    wanted, found = sum(p.size for p in spec.network.params()), version.params.size
    if not spec.factory and wanted != found:
        raise CheckpointError(f"checkpoint {path} is of another shape: expected {wanted} parameters, found {found}")
    return spec, version
