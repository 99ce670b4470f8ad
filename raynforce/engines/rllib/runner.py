"""What we put into RLlib's env runners: environments that outlive their faults, and news of episodes and faults."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from ray.rllib.callbacks.callbacks import RLlibCallback

from raynforce import given, infos
from raynforce.config import Config
from raynforce.engines.rllib.names import EPISODES, FATAL, FAULTS, quiet
from raynforce.envs.addresses import is_remote
from raynforce.envs.describe import describe
from raynforce.envs.faults import EnvFault, count_break, trace_of
from raynforce.envs.frames import stacks_of
from raynforce.envs.launching import is_simulator
from raynforce.envs.make import close_env, make
from raynforce.envs.simulator_envs import SimulatorVectorEnv
from raynforce.envs.simulators import Simulators
from raynforce.errors import EnvError, summary
from raynforce.policies.images import as_image
from raynforce.policies.spec import Input
from raynforce.topologies.declaration import env_args

quiet()
_faults: list[dict[str, Any]] = []  # of this process, until they are told
_lanes = itertools.count()


def context(config: Config, packed: bytes, images: bool) -> dict[str, Any]:
    """RLlib's `env_config` for the environments of this module."""
    how = env_args(config, config.sampling.envs) if is_simulator(config.env) else None
    what = {"env": config.env, "args": dict(config.env_args), "images": images, "simulator": how}
    return {**what, "given": packed, "path": list(sys.path)}


class RunnerEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One environment. If it raises, its episode is truncated, another is made, and the fault is told; images become
    what RLlib's convolutions read: `[height, width, channels]` from 0 to 1."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        sys.path += [path for path in config["path"] if path not in sys.path]  # where the driver finds modules
        given.unpack(config["given"])
        self._env, self._args, self._lane = config["env"], config["args"], next(_lanes)
        super().__init__(make(self._env, self._args))
        self._image = _image(self._env, self.env) if config["images"] else None
        self._seed: int | None = None
        self._steps = self._breaks = self._since_break = 0
        self._dead = False  # it broke too often: the driver has been told, and ends the run
        if self._image is not None:
            self.observation_space = image_space(self._image)
        self._last: Any = self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed, self._steps = seed if seed is not None else self._seed, 0
        while not self._dead:
            try:
                seen, info = self.env.reset(seed=seed, options=options)
            except Exception as error:
                self._replace(error)
            else:
                self._last = self._read(seen)
                return self._last, info
        return self._last, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._since_break += 1
        if self._dead:
            return self._last, 0.0, False, True, {}
        try:
            seen, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            self._replace(error)
            return self._last, 0.0, False, True, {}
        self._last = self._read(seen)
        return self._last, reward, terminated, truncated, info

    def _read(self, seen: Any) -> Any:
        return seen if self._image is None else read_images(self._image, np.asarray(seen)[None])[0]

    def _replace(self, error: Exception) -> None:
        """Make another environment, unless this has happened too often.

        It does not raise then: RLlib would end the process, and the driver would not learn why.
        """
        cause, at = summary(error), (self._lane, self._seed, self._steps)
        fault = EnvFault(self._env, self._args, "raised", *at, cause, trace_of(error))
        facts = fault.facts()
        try:
            self._breaks = count_break(fault, self._breaks, self._since_break, cause=error)
        except EnvError as ended:
            facts[FATAL], self._dead = str(ended), True
        _faults.append(facts)
        self._since_break = 0
        close_env(self.env)
        if not self._dead:
            self.env = make(self._env, self._args)


def _image(env: str, made: gymnasium.Env[Any, Any]) -> Input | None:
    spec = describe(env, made.observation_space, made.action_space, {}, stacks_of(made))
    return as_image(spec.obs[0], any_box=True)


def image_space(image: Input) -> spaces.Box:
    """What RLlib's convolutions read."""
    channels, height, width = image.image_shape
    return spaces.Box(0.0, 1.0, (height, width, channels), np.float32)


def read_images(image: Input, seen: np.ndarray) -> np.ndarray:
    """Images as an environment has them, as elements of `image_space`; both are batches."""
    scale = np.float32(255.0) if image.encoding == "image" else np.float32(1.0)
    return np.moveaxis(image.channels_first(seen), 1, -1).astype(np.float32) / scale


class RunnerSimulators(SimulatorVectorEnv):
    """The envs of one simulator process, batched by our side of the protocol; images as `RunnerEnv` has them."""

    def __init__(self, config: Any) -> None:
        self._how, self._runner = config["simulator"], int(getattr(config, "worker_index", 0))
        super().__init__(config["env"], int(config["num_envs"]), autoreset="next-step", **config["args"])
        self._image = as_image(self._lanes.spec.obs[0], any_box=True) if config["images"] else None
        if self._image is not None:
            self.single_observation_space = image_space(self._image)
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def _seen(self, rows: Mapping[str, np.ndarray]) -> Any:
        seen = super()._seen(rows)
        return seen if self._image is None else read_images(self._image, seen)

    def _open(self, command: str, envs: int, config: Mapping[str, Any]) -> Simulators:
        seed, sampler = self._how.seed, self._runner
        if is_remote(command):
            from raynforce.envs.remote import remote_lanes

            return remote_lanes(command, config, envs, seed=seed, sampler=sampler, gateway=self._how.gateway)
        return Simulators(command, config, envs, seed=seed, sampler=sampler, recycle=self._how.recycle)

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        _faults.extend(fault.facts() for fault in self.take_faults())
        return result


class News(RLlibCallback):
    """Tells the driver of every episode and every fault, through RLlib's own metrics."""

    def on_episode_end(self, *, episode: Any, metrics_logger: Any = None, **more: Any) -> None:
        chunks = [*(more.get("prev_episode_chunks") or ()), episode]
        total, length = sum(chunk.get_return() for chunk in chunks), sum(map(len, chunks))
        told: dict[str, float] = {}
        with contextlib.suppress(Exception):  # episodes need not have any
            told = infos.numbers(episode.get_infos(-1))
        metrics_logger.log_value(EPISODES, (float(total), int(length), told), reduce="item_series")

    def on_sample_end(self, *, env_runner: Any = None, metrics_logger: Any = None, **_: Any) -> None:
        while _faults:
            facts = {**_faults.pop(0), "runner": env_runner.worker_index}
            metrics_logger.log_value(FAULTS, json.dumps(facts), reduce="item_series")
