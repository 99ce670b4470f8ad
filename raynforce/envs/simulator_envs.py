"""Simulators as gymnasium's environments, single or many, for any library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from raynforce.envs.addresses import is_remote
from raynforce.envs.faults import EnvFault
from raynforce.envs.joined import EnvOfAgents, Moves
from raynforce.envs.launching import PREFIX, is_simulator
from raynforce.envs.make import locate
from raynforce.envs.simulators import Simulators
from raynforce.errors import EnvError
from raynforce.spaces import MASK, ActionSpec, EnvSpec, ObsLeaf, leaf_name
from raynforce.trees import join

Autoreset = Literal["same-step", "next-step"]
MODES = {"same-step": AutoresetMode.SAME_STEP, "next-step": AutoresetMode.NEXT_STEP}


class SimulatorEnv(EnvOfAgents):
    """One env of a simulator process as an ordinary environment; `config` are the simulator's settings."""

    def __init__(self, command: str, **config: Any) -> None:
        self._lanes = simulators(command, config, 1)
        self.agents = self._lanes.spec.agents
        self.observation_space, self.action_space = gym_spaces(self._lanes.spec)
        self._masks: dict[str, np.ndarray] = {}  # of agents, as they are shown now: [A, n] each
        if self.agents is not None:
            masks: dict[int, np.ndarray] = {}
            for k, kind in enumerate(self.agents.kinds):
                for i, leaf in enumerate(kind.obs):
                    if leaf.path == MASK:
                        shown = np.ones((len(kind.agents), *leaf.shape), np.int8)
                        self._masks[f"obs/{leaf_name(k, i)}"] = shown
                        masks |= dict(zip(kind.agents, shown, strict=True))
            self.action_space = Moves(self.agents, masks)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._lanes.reset(seed)
        return self._seen(self._lanes.obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        lanes, spec = self._lanes, self._lanes.spec.action
        broken = lanes.step_all(np.asarray(action, spec.dtype).reshape(1, *spec.shape))
        if broken:
            raise EnvError(broken[0].text)
        terminated, truncated = bool(lanes.terminated[0]), bool(lanes.truncated[0])
        seen = self._seen(lanes.final if terminated or truncated else lanes.obs)
        return seen, float(lanes.reward[0]), terminated, truncated, dict(lanes.take_info().get(0, {}))

    def close(self) -> None:
        close_simulators(self._lanes)

    def _seen(self, rows: Mapping[str, np.ndarray]) -> Any:
        for path, shown in self._masks.items():
            shown[...] = rows[path][0]
        return _observation({path: column[0].copy() for path, column in rows.items()})


class SimulatorVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The envs of a simulator process as gymnasium's vector environment.

    An episode that ends is followed by the next one in the same step (`autoreset="same-step"`), or in the step after
    it, whose action is ignored (`"next-step"`). An env that breaks is truncated, with `infos["broken"]` its cause, and
    begins a new episode.
    """

    def __init__(self, command: str, envs: int, *, autoreset: Autoreset = "same-step", **config: Any) -> None:
        self.metadata = {"autoreset_mode": MODES[autoreset]}
        self._waits = autoreset == "next-step"
        self._ended = np.zeros(envs, np.bool_)  # lanes whose next step shows the episode that has begun
        self._lanes = self._open(command, envs, config)
        self.num_envs = envs
        self.single_observation_space, self.single_action_space = gym_spaces(self._lanes.spec)
        self.observation_space = batch_space(self.single_observation_space, envs)
        self.action_space = batch_space(self.single_action_space, envs)

    def _open(self, command: str, envs: int, config: Mapping[str, Any]) -> Simulators:
        return simulators(command, config, envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._lanes.reset(seed[0] if isinstance(seed, list) else seed)
        self._ended[:] = False
        return self._seen(self._lanes.obs), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        lanes, spec = self._lanes, self._lanes.spec.action
        actions = np.asarray(actions, spec.dtype).reshape(self.num_envs, *spec.shape)
        broken = lanes.step_some(np.flatnonzero(~self._ended), actions[~self._ended])
        terminated, truncated = lanes.terminated & ~self._ended, lanes.truncated & ~self._ended
        reward = np.where(self._ended, 0.0, lanes.reward)
        ended = terminated | truncated
        infos: dict[str, Any] = {}
        if ended.any():
            if not self._waits:
                infos = {"final_obs": self._seen(lanes.final), "_final_obs": ended}
            for lane, told in lanes.take_info().items():
                for name, number in told.items():
                    infos.setdefault(name, np.zeros(self.num_envs))[lane] = number
                    infos.setdefault(f"_{name}", np.zeros(self.num_envs, np.bool_))[lane] = True
        for one in broken:
            truncated[one.lane] = True
            infos.setdefault("broken", np.full(self.num_envs, None, object))[one.lane] = one.text
        rows: Mapping[str, np.ndarray] = lanes.obs
        if self._waits:
            self._ended = terminated | truncated
            rows = {path: np.where(_wide(ended, seen), lanes.final[path], seen) for path, seen in rows.items()}
        return self._seen(rows), reward.astype(np.float64), terminated, truncated, infos

    def take_faults(self) -> list[EnvFault]:
        """Envs that broke since this was last asked."""
        return self._lanes.take_faults()

    def close_extras(self, **kwargs: Any) -> None:
        close_simulators(self._lanes)

    def _seen(self, rows: Mapping[str, np.ndarray]) -> Any:
        return _observation({path: column.copy() for path, column in rows.items()})


def _wide(chosen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return chosen.reshape(-1, *(1,) * (rows.ndim - 1))


def simulators(env: str, config: Mapping[str, Any], envs: int) -> Simulators:
    """So many envs of a simulator, or of those that others started: this process has the gateway to them then."""
    if not is_remote(env):
        return Simulators(env, config, envs, seed=0)
    from raynforce.envs.remote import remote_lanes

    return remote_lanes(env, config, envs, seed=0, gateway=None)


def simulator(
    command: str, envs: int | None = None, *, autoreset: Autoreset = "same-step", **config: Any
) -> gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv[Any, Any, Any]:
    """A simulator as an environment of gymnasium, or as a vector environment of `envs`, for any library.

    `command` starts it, such as `./my_sim --track oval`; `config` are its settings. `autoreset` is for several envs.
    """
    command = command if is_simulator(command) else f"{PREFIX}{command}"
    locate(command)
    return (
        SimulatorEnv(command, **config)
        if envs is None
        else SimulatorVectorEnv(command, envs, autoreset=autoreset, **config)
    )


def close_simulators(lanes: Simulators) -> None:
    """Close them, and the gateway to them if this process has it for nothing else."""
    lanes.close()
    if is_remote(lanes.spec.env):
        from raynforce.envs.gateway import close_unused

        close_unused()


def _observation(leaves: Mapping[str, Any]) -> Any:
    """Values by path as the observation that they are of: one alone, or a dictionary, which may have others in it."""
    return join(leaves, {})["obs"]


def gym_spaces(spec: EnvSpec) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """What a simulator declares, as gymnasium's spaces."""
    seen = _observation({leaf.path: _space(leaf) for leaf in spec.obs})
    return _dictionary(seen) if isinstance(seen, dict) else seen, _space(spec.action)


def _dictionary(entries: Mapping[str, Any]) -> spaces.Dict:
    return spaces.Dict({k: _dictionary(v) if isinstance(v, dict) else v for k, v in entries.items()})


def _space(leaf: ObsLeaf | ActionSpec) -> spaces.Space[Any]:
    start = leaf.start or (0,) * len(leaf.sizes)
    if leaf.kind == "discrete":
        return spaces.Discrete(leaf.sizes[0], start=start[0])
    if leaf.kind == "multidiscrete":
        sizes = np.array(leaf.sizes).reshape(leaf.shape)
        return spaces.MultiDiscrete(sizes, start=np.array(start).reshape(leaf.shape))
    if leaf.kind == "multibinary":
        return spaces.MultiBinary(leaf.shape)
    dtype = np.dtype(leaf.dtype)
    low, high = (-math.inf, math.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = [np.full(leaf.shape, bound, dtype) for bound in (low, high)]
    for i, name in enumerate(("low", "high")):
        if given := getattr(leaf, name, ()):
            bounds[i] = np.array(given, dtype).reshape(leaf.shape)
    return spaces.Box(bounds[0], bounds[1], leaf.shape, dtype.type)
