"""The Python API: `train`, `resume`, `evaluate`, `load`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raynforce import settings
from raynforce.config import Config
from raynforce.envs.vector import probe
from raynforce.errors import CheckpointError, UsageError
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory, find_policy
from raynforce.runs.metrics import Sink
from raynforce.runs.progress import Mode
from raynforce.training import Callback, Result, Status, Training

OnRound = Callable[[Status], None]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    path: Path
    config: Config
    result: Result

    def policy(self, which: str = "best") -> Policy:
        """Its `best` (or `last`) policy, ready to act."""
        return load(self.path, which)


def train(
    env: str,
    algo: str = "ppo",
    *,
    steps: int | None = None,
    target: float | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | OnRound] = (),
    sinks: Sequence[Sink] = (),
    progress: Mode = "auto",
) -> Run:
    """Train an agent and return where the run is and how it ended.

    `env` is a gymnasium id or `module:factory`, `algo` is `ppo`, `dqn` or your own `module:Class`. `settings` are
    dotted (`{"algorithm.learning_rate": 1e-3}`) and win over `config`, a YAML file or nested mapping, which wins
    over the preset. A callback is a `Callback`, or a function that is called with the `Status` after every round.
    """
    given = {"steps": steps, "target": target, "seed": seed}
    layers = [_layer(config), _nested(settings), {"env": env, "algo": algo}]
    layers.append({k: v for k, v in given.items() if v is not None})
    resolved, preset = resolve(*layers)
    return start(resolved, preset, out, callbacks=callbacks, sinks=sinks, progress=progress)


def start(
    config: Config,
    preset: Mapping[str, Any],
    out: str | Path | None = None,
    *,
    callbacks: Sequence[Callback | OnRound] = (),
    sinks: Sequence[Sink] = (),
    progress: Mode = "auto",
    stream: Any = None,
    began: float | None = None,
) -> Run:
    """Train a resolved config."""
    stream = stream or sys.stdout
    directory = RunDirectory(Path(out) if out else _fresh(config))
    directory.must_be_new()
    env = probe(config.env, config.env_args)
    if preset and progress != "quiet":
        tuned = ", ".join(f"{k}={v}" for k, v in preset.items())
        print(f"preset for {config.algo} on {config.env}: {tuned}", file=stream)
    training = Training(
        config,
        env,
        directory,
        callbacks=_callbacks(callbacks),
        sinks=sinks,
        stream=stream,
        progress=progress,
        began=began,
    )
    return _finished(training, directory, config)


def resume(
    run: str | Path,
    *,
    steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | OnRound] = (),
    sinks: Sequence[Sink] = (),
    progress: Mode = "auto",
    stream: Any = None,
    began: float | None = None,
) -> Run:
    """Continue a run from its last checkpoint as if it had never stopped; `settings` may change what makes sense."""
    directory = RunDirectory.open(Path(run))
    changes = _nested(settings)
    if steps is not None:
        changes["steps"] = steps
    config, _ = resolve({"preset": "none"}, _layer(directory.config), changes)
    training = Training(
        config,
        probe(config.env, config.env_args),
        directory,
        resume=True,
        callbacks=_callbacks(callbacks),
        sinks=sinks,
        stream=stream or sys.stdout,
        progress=progress,
        began=began,
        title=f"resuming {directory.path}",
    )
    if changes:  # only once everything fits
        directory.config.write_text(config.to_yaml())
    return _finished(training, directory, config)


def _finished(training: Training, directory: RunDirectory, config: Config) -> Run:
    result = training.train()
    if training.signal is not None:
        raise Interrupted(Run(directory.path, config, result), training.signal)
    return Run(directory.path, config, result)


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after a clean checkpoint; `run` is what there is of it."""

    def __init__(self, run: Run, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; to go on: raynforce resume {run.path}")
        self.run = run
        self.number = number


class Policy:
    """A trained policy that acts: numpy alone, unless the network is your own torch module."""

    def __init__(self, spec: ActingSpec, version: PolicyVersion, seed: int | None = None) -> None:
        self.spec = spec
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
    saved = _saved_policy(find_policy(Path(path), which))
    return Policy(*saved, seed=seed)


def evaluate(
    path: str | Path, *, episodes: int = 100, which: str = "best", seed: int | None = None
) -> tuple[np.ndarray, Path]:
    """Play greedy episodes with a run's policy on fresh seeds; returns their returns and the checkpoint used."""
    from raynforce.roles.evaluator import Evaluator
    from raynforce.roles.sampler import EnvArgs

    found = find_policy(Path(path), which)
    spec, version = _saved_policy(found)
    args: dict[str, Any] = {}
    for folder in (found.resolve(), *found.resolve().parents[:2]):
        if (folder / "config.yaml").is_file():
            args = resolve({"preset": "none"}, _layer(folder / "config.yaml"))[0].env_args
    fresh = time.time_ns() % 2**63 if seed is None else seed
    evaluator = Evaluator(spec, EnvArgs(spec.env.env, min(episodes, 20), fresh, args))
    try:
        return evaluator.evaluate(version, episodes), found
    finally:
        evaluator.close()


def _saved_policy(path: Path) -> tuple[ActingSpec, PolicyVersion]:
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


def _layer(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else settings.read_yaml(str(config))


def _nested(dotted: Mapping[str, Any] | None) -> dict[str, Any]:
    return settings.nested(dotted or {})


def _callbacks(given: Sequence[Callback | OnRound]) -> list[Callback]:
    return [c if isinstance(c, Callback) else _FunctionCallback(c) for c in given]


class _FunctionCallback(Callback):
    def __init__(self, function: OnRound) -> None:
        self._function = function

    def on_round(self, status: Status) -> None:
        self._function(status)


def _fresh(config: Config) -> Path:
    """A run directory of its own under `runs/`."""
    names = [part.replace("/", "-").replace(":", "-") for part in (config.algo, config.env)]
    base = Path("runs") / f"{names[0]}-{names[1]}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path
