"""Recording: a policy, or chance, plays episodes, and they are written into files to learn from."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raynforce.api import TELL_AFTER, as_file_name, lent
from raynforce.config import EvalConfig
from raynforce.data.episodes import Episode, Gathering, joined
from raynforce.data.files import require_installed
from raynforce.data.minari_files import MinariWriter
from raynforce.data.parquet import ParquetWriter
from raynforce.envs.addresses import reached
from raynforce.envs.agents import ID
from raynforce.envs.make import close_env, make
from raynforce.envs.vector import EnvArgs, Parallel, probe
from raynforce.envs.wrappers import for_evaluation
from raynforce.errors import UsageError
from raynforce.given import lending
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion, sampler_places
from raynforce.policies.chance import ChanceActor
from raynforce.policy import read_policy
from raynforce.roles.sampler import Sampler
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path
from raynforce.runs.store import is_url
from raynforce.settings import COUNT, SEED, STEPS, coerce
from raynforce.spaces import EnvSpec

Format = Literal["parquet", "minari"]
EPISODES = 100
LENGTH = 64  # steps of each lane that are played in one go
LONGEST = EvalConfig.max_length  # steps after which an episode is cut
FLUSH = 2**26  # bytes that are gathered before they are written
RECORDING_STREAM = 1 << 21  # apart from samplers and evaluation: what is recorded is new


@dataclass(frozen=True)
class Recorded:
    """What was written."""

    path: Path
    format: str
    env: str
    env_args: Mapping[str, Any]
    episodes: int
    steps: int
    returns: np.ndarray
    """Of each episode, `[E]`."""


def record(
    source: str | os.PathLike[str] | Callable[..., Any],
    *,
    episodes: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    sampled: bool = False,
    policy: Literal["random"] | None = None,
    format: Format = "parquet",
    env_args: Mapping[str, Any] | None = None,
    which: str = "best",
    seed: int | None = None,
    parallel: Parallel = "no",
    say: Callable[[str], None] | None = None,
) -> Recorded:
    """Write episodes that a run's policy plays, greedily or `sampled` as in training.

    `source` is a run or a checkpoint (`which` of a run's, `best` or `last`); with `policy="random"` it may be an
    environment, which is played at random. 100 `episodes` are written, or so many `steps`: then the last episode of
    each environment is truncated there. `out` is a new file, or with `format="minari"` a new folder whose name ends
    with a version (`mine-v0`); by default one in `data/`. `env_args` are laid over the run's own. `say` is told how far
    it is, once that takes longer than two seconds.
    """
    if episodes is not None and steps is not None:
        raise UsageError("episodes and steps do not go together: give one of them")
    episodes = None if episodes is None else coerce(episodes, COUNT, "episodes")
    steps = None if steps is None else coerce(steps, STEPS, "steps")
    fresh = time.time_ns() % 2**63 if seed is None else coerce(seed, SEED, "seed")
    if format not in ("parquet", "minari"):
        raise UsageError(f"format = {format!r} is not one of: parquet, minari")
    if policy not in (None, "random"):
        raise UsageError(f"policy = {policy!r} is not one of: random; a trained policy is recorded by its run")
    if policy and sampled:
        raise UsageError("sampled is for a run's policy, and policy = 'random' always is: leave it out")
    require_installed("pyarrow", "recording writes Parquet")
    if format == "minari":
        require_installed("minari", "format is minari")
    if policy is None and not _is_run(source):
        what = f"source = {str(source)!r} is no run"
        raise UsageError(f"{what}: name one, or play an environment at random (--policy random)")
    target = None if out is None else _new(Path(out).expanduser())
    with lending() as lender, contextlib.ExitStack() as opened:
        acting: ActingSpec | None = None
        version = PolicyVersion(0, np.zeros(0, np.float32))
        if _is_run(source):
            found = find_policy(local_path(str(source)), which)
            acting, version = read_policy(found)
            args = {**for_evaluation(acting.env.args), **(env_args or {})}  # rewards are the environment's own
            opened.enter_context(reached(acting.env.env, say=say))
            name, env = lent(acting.env, None, args, lender), replace(acting.env, args=args)
            who = f"{'sampled' if sampled else 'greedy'} policy of {found}"
        else:
            name, args = lender.name_of(source if callable(source) else str(source)), dict(env_args or {})
            opened.enter_context(reached(name, say=say))
            env = probe(name, args)
        if policy == "random":
            acting, who = None, "random"
        lanes = min(EPISODES if episodes is None else episodes, EvalConfig.envs) if steps is None else _few(steps)
        how: dict[str, Any] = {"parallel": parallel, "masked": env.masked, "ids": any(x.path == ID for x in env.obs)}
        envs = EnvArgs(name, lanes, fresh, args, exact_resume=False, **how)
        actor = _actor(acting, env, lanes, sampled)
        target = target or _new(_default(env, format))
        facts = {"env": env.to_json(), "policy": who, "seed": fresh}
        with _writer(target, env, format, facts) as writer:
            played: Any = actor
            sampler = Sampler(played.spec, envs, LENGTH, RECORDING_STREAM, actor=played)
            opened.callback(sampler.close)
            wanted = EPISODES if episodes is None and steps is None else episodes
            playing = _Playing(sampler, version, env, lanes * env.lanes, writer, wanted, steps)
            playing.to_the_end(say)
        played_in = (target, format, env.env, args)
        return Recorded(*played_in, len(playing.returns), playing.steps, np.array(playing.returns))


def _is_run(source: Any) -> bool:
    """Whether it is a run or a checkpoint; else it is an environment."""
    if callable(source):
        return False
    return is_url(str(source)) or Path(source).expanduser().is_dir()


def _few(steps: int) -> int:
    """Environments for so many steps: episodes are not to be cut after a few of them."""
    return max(1, min(EvalConfig.envs, steps // 1000))


class _Playing:
    """Lets a sampler play until each lane has given its share: taking whichever end first would favour short ones."""

    def __init__(
        self,
        sampler: Sampler,
        version: PolicyVersion,
        env: EnvSpec,
        lanes: int,
        writer: Any,
        episodes: int | None,
        steps: int | None,
    ) -> None:
        self._sampler, self._version, self._env, self._writer = sampler, version, env, writer
        self._by_steps, self._wanted = steps is not None, steps or episodes or 0
        self._left = np.full(lanes, self._wanted // lanes) + (np.arange(lanes) < self._wanted % lanes)
        self._gathering = Gathering(env, lanes)
        self._held: list[Episode] = []
        self.returns: list[float] = []
        self.steps = 0

    def to_the_end(self, say: Callable[[str], None] | None) -> None:
        tell_at, wait = time.monotonic() + TELL_AFTER, TELL_AFTER
        while self._left.any():
            self._go_on()
            if say is not None and time.monotonic() >= tell_at:
                unit = "steps" if self._by_steps else "episodes"
                say(f"recording: {self._wanted - int(self._left.sum()):,} of {self._wanted:,} {unit}")
                wait = min(60.0, 2 * wait)
                tell_at = time.monotonic() + wait
        self._flush()

    def _go_on(self) -> None:
        fragment = self._sampler.sample(self._version)
        for lane, ended in enumerate(self._gathering.add(fragment)):
            for episode in ended:
                self._take(lane, episode)
            under_way = self._gathering.length(lane)
            enough = under_way >= (self._left[lane] if self._by_steps else LONGEST)
            if self._left[lane] and enough:
                for episode in self._gathering.cut(lane, fragment):
                    self._take(lane, episode)
                    self._left[lane] = 0  # its env is somewhere in the middle
        if sum(one.action.nbytes + sum(seen.nbytes for seen in one.obs.values()) for one in self._held) > FLUSH:
            self._flush()

    def _take(self, lane: int, episode: Episode) -> None:
        """Keep an episode, as far as the lane's share reaches."""
        if not self._left[lane]:
            return
        if self._by_steps:
            count = min(len(episode.reward), int(self._left[lane]))
            if count < len(episode.reward):
                obs = {path: seen[: count + 1] for path, seen in episode.obs.items()}
                episode = Episode(obs, episode.action[:count], episode.reward[:count], False, True)
            self._left[lane] -= count
        else:
            self._left[lane] -= 1
        self._held.append(episode)
        self.returns.append(float(episode.reward.sum(dtype=np.float64)))
        self.steps += len(episode.reward)

    def _flush(self) -> None:
        if self._held:
            self._writer.write(joined(self._held, self._env))
            self._held = []


def _actor(acting: ActingSpec | None, env: EnvSpec, lanes: int, sampled: bool) -> Actor | ChanceActor:
    if acting is None:
        return ChanceActor(env)
    actor = Actor(replace(acting, record=()), places=sampler_places(lanes, 0, 1))
    if not sampled:
        actor.sample = lambda out, noise: actor.distribution.mode(out)  # type: ignore[method-assign]
    return actor


def _writer(path: Path, env: EnvSpec, format: Format, facts: Mapping[str, Any]) -> ParquetWriter | MinariWriter:
    if format == "parquet":
        return ParquetWriter(path, env, facts)
    if env.agents is not None:
        what = f"format = 'minari' is for environments of one agent, and env {env.env!r} has {len(env.agents.names)}"
        raise UsageError(f"{what}: use parquet")
    made = make(env.env, env.args)
    try:
        if env.masked and "action_mask" not in getattr(made.observation_space, "spaces", {}):
            raise UsageError("format = 'minari' has no place for action masks that come with info: use parquet")
        return MinariWriter(path, env, facts, (made.observation_space, made.action_space))
    finally:
        close_env(made)


def _default(env: EnvSpec, format: Format) -> Path:
    name = f"{as_file_name(env.env)}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path("data") / (f"{name}.parquet" if format == "parquet" else f"{name}-v0")


def _new(path: Path) -> Path:
    if path.exists():
        raise UsageError(f"out = {str(path)!r} is there already: give it another name")
    return path
