"""A trained policy, loaded and acting: numpy and safetensors are all it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from raynforce.errors import CheckpointError, UsageError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.team import TeamSpec, TeamVersion
from raynforce.runs import checkpoint
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path
from raynforce.settings import Range, coerce
from raynforce.spaces import MASK, ObsLeaf, forbidden_of, forbids_all

LANES = Annotated[int, Range(0, 1_000_000)]
NO_MASK = "this policy was trained with action masks: give mask=info['action_mask'], which choices are allowed"


class Policy:
    """A trained policy that acts: numpy alone, unless the network is your own torch module."""

    def __init__(self, spec: ActingSpec, version: PolicyVersion, seed: int | None = None) -> None:
        self.spec = spec
        self.version = version
        self._actor = Actor(spec, light=True)
        self._actor.load(version)
        self._rng = np.random.default_rng(seed)
        self.policies: dict[str, Policy] = {}  # by name, of a run of several

    def __repr__(self) -> str:
        return f"<Policy version {self.version.number} for {self.spec.env.env}>"

    def act(
        self, obs: Any, state: Any = None, mask: np.ndarray | None = None, *, greedy: bool = True
    ) -> np.ndarray | Any:
        """Choose an action for one observation, or actions for a batch of them.

        `obs` is what the environment gives (a dict for `Dict` spaces), alone or with one leading batch dimension;
        the answer has the same form. `greedy=False` samples as in training. `mask` says which choices of a discrete
        space are allowed, one flag for each: as `info["action_mask"]`, or instead of the observation's `action_mask`.
        A policy with memory wants the `state` before, `policy.initial_state()` where an episode begins, and returns the
        next one too: `action, state = policy.act(obs, state)`.
        """
        batch, lanes, single = self._batched(obs, given=mask is not None)
        distribution, after = self._actor.distribution, None
        if self.recurrent:
            out, after = self._actor.step(batch, self._state(state, lanes))
        elif state is not None:
            raise UsageError("this policy has no memory: leave out `state`")
        else:
            out = self._actor.outputs(batch)
        flags = batch.get(MASK) if mask is None else np.asarray(mask)
        if flags is not None:
            out = dict(self._actor.masked(out, {MASK: self._allowed(flags, lanes)}))
            distribution = self.spec.distribution(masked=True)
        if greedy:
            action = distribution.mode(out)
        else:
            noise = distribution.noise(self._rng, 1, lanes)[0]
            action = distribution.sample(out, noise, self.version.schedules)
        answer = self._actor.to_env(action)
        answer = answer[0] if single else answer
        return answer if after is None else (answer, after)

    @property
    def recurrent(self) -> bool:
        """Whether it has memory."""
        return bool(self.spec.network.states)

    def initial_state(self, lanes: int = 1) -> dict[str, np.ndarray]:
        """What a policy with memory remembers where an episode begins, `[lanes, size]` for each recurrent layer."""
        return self.spec.network.initial_state(coerce(lanes, LANES, "lanes"))

    def _state(self, state: Any, lanes: int) -> dict[str, np.ndarray]:
        """The state that was given, checked."""
        sizes = self.spec.network.states
        start = "{} or policy.initial_state() where an episode begins"
        if isinstance(state, Mapping) and not state:
            return self.spec.network.initial_state(lanes)
        if state is None:
            raise UsageError(f"this policy has memory: act(obs, state) wants the state before, {start}")
        if not isinstance(state, Mapping) or set(state) != set(sizes):
            raise UsageError(f"state is not a dict of {', '.join(sizes)}: give what act returned, or {start}")
        try:
            found = {name: np.asarray(state[name], np.float32) for name in sizes}
        except (TypeError, ValueError):
            raise UsageError(f"state is not made of numbers: give what act returned, or {start}") from None
        for name, array in found.items():
            if not np.isfinite(array).all():
                raise UsageError(f"state {name!r} has numbers that are not finite: give what act returned, or {start}")
            if array.shape != (lanes, sizes[name]):
                wanted = [lanes, sizes[name]]
                raise UsageError(
                    f"state {name!r} has shape {list(array.shape)}; wanted is {wanted}: one row for each lane"
                )
        return found

    def _batched(self, obs: Any, given: bool) -> tuple[dict[str, np.ndarray], int, bool]:
        """The observation's leaves with a batch dimension, its length, and whether there was none; no mask if one is
        `given` apart."""
        leaves = [leaf for leaf in self.spec.env.obs if not (leaf.path == MASK and given)]
        batch = {leaf.path: self._leaf(leaf, obs) for leaf in leaves}
        forms = {batch[x.path].shape[: batch[x.path].ndim - len(x.shape)] for x in leaves}
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
                if leaf.path == MASK:
                    raise UsageError(NO_MASK) from None
                raise UsageError(f"the observation has no {leaf.path.removeprefix('obs/')!r}") from None
        try:
            array = np.asarray(obs).astype(leaf.dtype, copy=False)
        except (TypeError, ValueError):
            raise UsageError(f"{leaf.path} is not an array of {leaf.dtype}: {str(obs)[:60]}") from None
        if wrong := leaf.misshapen(array.shape):
            raise UsageError(wrong)
        if leaf.outside(array):
            raise UsageError(f"{leaf.path} = {array.tolist()} is outside its space of {list(leaf.sizes)} values")
        return array

    def _allowed(self, mask: np.ndarray, lanes: int) -> np.ndarray:
        """The mask as `[lanes, choices]` bool, checked."""
        action = self.spec.env.action
        if action.kind == "box":
            raise UsageError("mask is for discrete actions, and this policy's are continuous")
        rows = mask.reshape(-1, mask.shape[-1]) if mask.ndim else mask.reshape(1, 1)
        if rows.shape[1] != sum(action.sizes) or len(rows) not in (1, lanes):
            wanted = f"[{sum(action.sizes)}] or [{lanes}, {sum(action.sizes)}]"
            raise UsageError(f"mask has shape {list(mask.shape)}; allowed are {wanted}")
        if rows.dtype.kind not in "biuf" or ((rows != 0) & (rows != 1)).any():
            raise UsageError(
                f"mask is {str(mask.tolist())[:60]} ({mask.dtype}); expected true or false for each choice"
            )
        if forbids_all(rows, action.sizes).any():
            raise UsageError(
                f"mask allows no choice{forbidden_of(rows, action.sizes) or ' at all'}: allow one at least"
            )
        return np.broadcast_to(rows.astype(bool), (lanes, rows.shape[1]))


class Policies(Policy):
    """Several policies of one run, `policies` by name; each agent is played by one of them."""

    def __init__(self, spec: TeamSpec, version: TeamVersion, seed: int | None = None) -> None:
        self.spec, self.version = spec, version
        self.policies = {name: Policy(part.acting, version.policies[name], seed) for name, part in spec.parts.items()}

    def __repr__(self) -> str:
        return f"<Policies {', '.join(self.policies)} version {self.version.number} for {self.spec.env.env}>"

    def act(self, *args: Any, **how: Any) -> Any:
        raise UsageError(f"there are several policies: say which, as policies[{next(iter(self.policies))!r}].act(obs)")


def policy_of(spec: ActingSpec, version: PolicyVersion, seed: int | None = None) -> Policy:
    """One that acts, or several."""
    if isinstance(spec, TeamSpec) and isinstance(version, TeamVersion):
        return Policies(spec, version, seed)
    return Policy(spec, version, seed)


def load(
    path: str | os.PathLike[str], which: str = "best", *, policy: str | None = None, seed: int | None = None
) -> Policy:
    """Load the policy of a run (its `best`, or `last`) or of a checkpoint directory; a run may be at a URL.

    Of a run of several policies, `policy` is the name of one; without it, all are under `policies` by name.
    """
    found = find_policy(local_path(path), which)
    return policy_of(*(read_policies(found) if policy is None else read_policy(found, policy)), seed=seed)


def read_policy(
    path: Path, policy: str | None = None, *, wanted: str = "here a run with one policy for all agents is needed"
) -> tuple[ActingSpec, PolicyVersion]:
    """The acting spec and the policy version in a checkpoint; of several, those of this name.

    `wanted` is what a user is told who names none of several.
    """
    spec, version = read_policies(path)
    several = isinstance(spec, TeamSpec) and isinstance(version, TeamVersion)
    if not several and policy is None:
        return spec, version
    if not (isinstance(spec, TeamSpec) and isinstance(version, TeamVersion)):
        raise UsageError(f"policy = {policy!r}, but {path} has one policy alone: leave it out")
    if policy is None or policy not in spec.parts:
        has = f"{path} has the policies {', '.join(spec.parts)}"
        raise UsageError(f"{has}: {wanted}" if policy is None else f"policy = {policy!r}, but {has}")
    return spec.parts[policy].acting, version.policies[policy]


def read_policies(path: Path) -> tuple[ActingSpec, PolicyVersion]:
    """All that acts in a checkpoint."""
    tree = checkpoint.load(path, only=["policy"])["policy"]
    try:
        spec, version = ActingSpec.from_json(tree["acting"]), PolicyVersion.from_state(tree["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} does not hold a policy: {error}") from None
    if isinstance(spec, TeamSpec):
        return spec, version
    wanted, found = sum(p.size for p in spec.network.params()), version.params.size
    if not spec.factory and wanted != found:
        raise CheckpointError(f"checkpoint {path} is of another shape: expected {wanted} parameters, found {found}")
    return spec, version
