"""The sampler: environments, an acting policy and its own random stream in, fragments out."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from raynforce.envs.vector import EnvArgs, Step, VectorEnv, require_finite
from raynforce.experience.builder import InFlight, allocate, final_columns, finish
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Fragment
from raynforce.experience.turns import Turns
from raynforce.infos import NOTHING, Info
from raynforce.memory import resident_bytes
from raynforce.policies.acting import (
    ActingSpec,
    Actor,
    Memory,
    PolicyVersion,
    forget,
    remembered,
    sampler_places,
)
from raynforce.policies.distributions import StateDependent, masked
from raynforce.spaces import MASK
from raynforce.trees import Tree, load_rng, rng_state


class Sampler:
    """Steps `num_envs` environments with one forward pass each time, `length` times per fragment; one of `samplers`."""

    def __init__(
        self,
        acting: ActingSpec,
        envs: EnvArgs,
        length: int,
        index: int = 0,
        samplers: int = 1,
        actor: Actor | None = None,
        vector: VectorEnv | None = None,
        stream: Sequence[int] = (),
    ) -> None:
        """`actor`: who acts instead of the policy. `vector` and `stream` are for lanes that several samplers share a
        world with, and draw apart from."""
        self.index = index
        self._length = length
        self._args, self._envs = envs, envs.vector(index) if vector is None else vector
        lanes = self._envs.num_envs
        self._actor = actor or Actor(acting, places=sampler_places(lanes, index, samplers))
        self._rng = np.random.default_rng([envs.seed, index, 1, *stream])
        self._sequence, self._stream = 0, stream
        self._flying = InFlight(lanes)
        self._turns = Turns(lanes, acting.sequence) if self._envs.turns else None
        self._memory, self._measured = 0, float("-inf")
        self._recurrent = acting.network.initial_state(lanes)  # empty without memory
        self._after: Memory = {}  # the same, once it is known who moved
        self._every = acting.sequence if self._turns is None else 1  # where there are turns, these know a lane's rows
        self._obs = self._envs.reset()

    def note(self) -> str:
        """What a user should know of these environments and of how it acts; most often nothing."""
        return "; ".join(filter(None, (self._envs.note, self._actor.note)))

    def sample(self, version: PolicyVersion) -> Fragment:
        return self.produce(version)[0]

    def produce(self, version: PolicyVersion) -> tuple[Fragment, Receipt]:
        """Gather one fragment with this policy version, and tell how that went."""
        going = self.steps(version)
        ready = next(going)
        step = self._envs.step
        try:
            while True:
                ready = going.send(step(ready))
        except StopIteration as end:
            found: tuple[Fragment, Receipt] = end.value
            return found

    def steps(self, version: PolicyVersion) -> Generator[np.ndarray, Step, tuple[Fragment, Receipt]]:
        """The same, step by step: yields actions that are ready for the environments, and is sent what they gave."""
        clock = time.perf_counter
        began = clock()
        actor, envs, steps = self._actor, self._envs, self._length
        actor.load(version)
        in_policy, in_env = clock() - began, 0.0
        lanes, spec = envs.num_envs, actor.spec.env
        leaves = spec.obs if envs.state_leaf is None else (*spec.obs, envs.state_leaf)
        seen, rest = allocate(leaves, spec.action, steps, lanes)
        action, reward, terminated, truncated = rest.values()
        valid = np.empty((steps, lanes), np.bool_)
        has_memory, every = bool(self._recurrent), self._every
        state0 = {k: np.empty((-(-steps // every), *v.shape), np.float32) for k, v in self._recurrent.items()}
        kept: dict[str, np.ndarray] = {}  # network outputs, [T+1, B, n]
        ends: list[np.ndarray] = []
        finals: list[dict[str, np.ndarray]] = []
        cuts: list[np.ndarray] = []
        told: list[Mapping[int, Info]] = []  # [T], by lane

        start = clock()
        noise = actor.distribution.noise(self._rng, steps, lanes)
        in_policy += clock() - start
        now = self._obs
        for t in range(steps):
            for path, column in seen.items():
                column[t] = now[path]
            start = clock()
            out = self._remembering(now, t, state0) if has_memory else actor.outputs(now)
            chosen = actor.sample(actor.masked(out, now), noise[t])
            ready = actor.to_env(chosen)
            acted = clock()
            step = yield ready
            in_policy += acted - start
            in_env += clock() - acted
            action[t], reward[t] = chosen, step.reward
            terminated[t], truncated[t], valid[t] = step.terminated, step.truncated, step.valid
            if t == 0:
                kept = {k: np.empty((steps + 1, *out[k].shape), out[k].dtype) for k in actor.spec.kept}
            for name, column in kept.items():
                column[t] = out[name]
            if len(step.final_lanes):
                ends.append(t * lanes + step.final_lanes)
                finals.append(step.final_obs)
            told.append(step.info)
            if len(step.cut):
                cuts.append(t * lanes + step.cut)
                if t == 0:  # the row before went out with the last fragment, so the end is marked here
                    truncated[0, step.cut] = True
                    ends.append(step.cut)
                    finals.append({path: array[step.cut] for path, array in now.items()})
            now = step.obs
            if has_memory:
                self._recurrent = remembered(self._recurrent, self._after, step.valid, step.over)
        for path, column in seen.items():
            column[steps] = now[path]
        self._obs = now
        columns = {**seen, **rest, "valid": valid, **final_columns(seen, ends, finals)}
        episodes = self._flying.add(columns, _ends(terminated | truncated, cuts, told))
        _mark_cuts(cuts if self._turns is None else [], terminated, truncated, valid)
        told_by_env = {k: v for k, v in columns.items() if k == "reward" or k.startswith(("obs", "final/obs"))}
        require_finite(self._args.env, told_by_env, ("step", "lane"), self._args.args)
        start = clock()
        if "logp" in actor.spec.record:
            columns["logp"] = self._logp({**out, **kept}, action, seen)
        if "priority" in actor.spec.record and self._turns is None:
            columns["priority"] = self._priority(kept, columns)
        in_policy += clock() - start
        named = {"version": version.number, "sampler": self.index, "sequence": self._sequence}
        fragment = finish(columns, episodes, **named, state0=state0, every=every)
        if self._turns is not None:
            fragment = self._with_priority(self._turns.compact(fragment, cuts))
        self._sequence += 1
        faults = [fault.facts() for fault in envs.take_faults()]
        if began > self._measured + 0.1:  # it takes as long as a step
            self._memory, self._measured = resident_bytes(), began
        seconds = {"env": in_env, "policy": in_policy, "other": clock() - began - in_env - in_policy}
        return fragment, Receipt(fragment.record, seconds, faults, fragment.nbytes, self._memory)

    def _remembering(
        self, now: Mapping[str, np.ndarray], t: int, state0: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The outputs of a network with memory, whose state is recorded where a sequence begins."""
        row, within = divmod(t, self._every)
        if not within:
            for name, column in state0.items():
                column[row] = self._recurrent[name]
        out, self._after = self._actor.step(now, self._recurrent)
        return out

    def _logp(self, out: Mapping[str, np.ndarray], action: np.ndarray, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        """Behaviour log-probabilities `[T, B]` of the whole fragment at once."""
        flat = {k: v[:-1].reshape(-1, v.shape[2]) if v.ndim == 3 else v for k, v in out.items()}
        if MASK in seen:
            flat = {**flat, **self._actor.masked(flat, {MASK: seen[MASK][:-1].reshape(-1, seen[MASK].shape[2])})}
        actions = action.reshape(-1, *action.shape[2:])
        return self._actor.distribution.logp(flat, actions).reshape(action.shape[:2]).astype(np.float32)

    def _with_priority(self, fragment: Fragment) -> Fragment:
        """A fragment of turns with its priorities, if they are asked for: only now it is known what moves led to."""
        if "priority" not in self._actor.spec.record:
            return fragment
        seen = {path: fragment[path].reshape(-1, *fragment[path].shape[2:]) for path in self._obs}
        out = self._actor.outputs(seen)
        kept = {name: out[name].reshape(fragment.length + 1, fragment.lanes, -1) for name in self._actor.spec.kept}
        priority = self._priority(kept, fragment.columns)
        return replace(fragment, columns={**fragment.columns, "priority": priority})

    def _priority(self, kept: dict[str, np.ndarray], columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Absolute one-step errors `[T, B]` of the acting network's own action values; 0 where a row is not valid."""
        spec, outputs = self._actor.spec, self._actor.outputs
        valid, terminated, ends = columns["valid"], columns["terminated"], columns["final/index"]
        after = outputs({path: columns[path][-1] for path in self._obs})
        for name, column in kept.items():
            column[-1] = after[name]
        value = spec.action_values(kept)  # [n, T+1, B]
        best = _best(value, columns.get(MASK))[1:]  # [T, B] of the next state
        counts = (valid & ~terminated).reshape(-1)[ends]  # [K] whose last observations are bootstrapped from
        if counts.any():
            seen = {path: columns[f"final/{path}"][counts] for path in self._obs}
            last = _best(spec.action_values(outputs(seen)), seen.get(MASK))
            best[np.divmod(ends[counts], valid.shape[1])] = last
        chosen = np.take_along_axis(value[:, :-1], columns["action"][None], 0)[0]
        error = columns["reward"] + np.float32(spec.gamma) * np.where(terminated, 0, best) - chosen
        return np.where(valid, np.abs(error), 0).astype(np.float32, copy=False)

    def state(self) -> Tree:
        """At a fragment's border this is enough to redo every later fragment identically."""
        flying = {"returns": self._flying.returns.copy(), "lengths": self._flying.lengths.copy()}
        tree: Tree = {"envs": self._envs.state(), "rng": rng_state(self._rng), "sequence": self._sequence, **flying}
        if self._recurrent:
            tree["memory"] = {name: state.copy() for name, state in self._recurrent.items()}
        if self._turns is not None:
            tree["turns"] = self._turns.state()
        noise = self._actor.distribution
        return tree | {"noise": noise.state()} if isinstance(noise, StateDependent) else tree

    def load(self, tree: Tree) -> list[str]:
        """Undo `state`; returns a sentence for everything that could not be restored exactly."""
        notes = self._envs.load(tree["envs"])
        load_rng(self._rng, tree["rng"])
        if isinstance(self._actor.distribution, StateDependent) and "noise" in tree:
            self._actor.distribution.load(tree["noise"])
        self._sequence = tree["sequence"]
        self._flying.returns, self._flying.lengths = tree["returns"].copy(), tree["lengths"].copy()
        self._flying.restart(self._envs.restarted)
        if self._turns is not None:
            self._turns.load(tree["turns"])
            self._turns.restart(self._envs.restarted)
        for name, state in self._recurrent.items():
            state[...] = tree["memory"][name]
        forget(self._recurrent, self._envs.restarted)
        self._obs = self._envs.current()
        return notes

    def start_fresh(self, sequence: int, attempt: int) -> None:
        """Go on at fragment `sequence` without a state: other episodes and another random stream, by `attempt`."""
        self._obs = self._envs.start_fresh(attempt)
        self._rng = np.random.default_rng([self._args.seed, self.index, 1, attempt, *self._stream])
        if isinstance(self._actor.distribution, StateDependent):
            self._actor.distribution.forget()
        self._sequence = sequence
        self._flying.restart()
        if self._turns is not None:
            self._turns.restart()
        forget(self._recurrent, slice(None))

    def close(self) -> None:
        self._envs.close()


def _best(value: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The highest of action values `[n, ...]`, of those that a mask `[..., n]` allows."""
    return value.max(0) if mask is None else masked(value, np.moveaxis(mask, -1, 0)).max(0)


def _ends(
    done: np.ndarray, cuts: list[np.ndarray], told: Sequence[Mapping[int, Info]]
) -> Iterator[tuple[int, int, Info | None]]:
    """Row and lane of each episode's end, in order of time, and what it told; None where it was cut."""
    cut = np.zeros_like(done)  # [T, B]
    if cuts:
        cut.reshape(-1)[np.concatenate(cuts)] = True
    for t, lane in zip(*np.nonzero(done | cut), strict=True):
        yield t, lane, None if cut[t, lane] else told[t].get(int(lane), NOTHING)


def _mark_cuts(cuts: list[np.ndarray], terminated: np.ndarray, truncated: np.ndarray, valid: np.ndarray) -> None:
    """Let episodes end in the step before the one that broke their env; its row shows their last observation."""
    if not cuts:
        return
    t, lane = np.divmod(np.concatenate(cuts), valid.shape[1])
    before, lane = t[t > 0] - 1, lane[t > 0]
    truncated[before, lane] |= valid[before, lane] & ~terminated[before, lane]
