"""The doctor of algorithms: tries one for a few updates on a tiny environment, and says what they show."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raynforce import settings
from raynforce.algos import algorithm_class
from raynforce.algos.base import Algorithm, Loss
from raynforce.algos.contract import declared, names
from raynforce.config import Config
from raynforce.envs.doctor import Report, check_env
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import AlgorithmError, RaynforceError, UsageError, reason
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler
from raynforce.runs import checkpoint
from raynforce.spaces import EnvSpec
from raynforce.topologies import BUILT_IN as TOPOLOGIES
from raynforce.topologies import topology
from raynforce.trees import SEGMENTS, Tree, split

TINY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("raynforce.envs.tiny:Largest", {"length": 5}),
    "continuous": ("raynforce.envs.tiny:IdentityBox", {"length": 5}),
    "multi-discrete": ("raynforce.envs.tiny:MultiIdentity", {"length": 5}),
}
"""What an algorithm is tried on, by the kind of its actions, the plain case first."""
KINDS = {"discrete": "discrete", "box": "continuous", "multidiscrete": "multi-discrete"}
UPDATES = 8  # that show most of it
MANY = 300  # before it is saved: targets are often copied every 250 updates
ROUNDS = 400  # at most
SECONDS = 3.0  # after which few have to be enough
SHOWN = 6  # names in one line


def check_algorithm(name: str, env: str | None = None, given: Mapping[str, Any] | None = None) -> Report:
    """Try an algorithm on `env`, if nothing is wrong with that, or on the first tiny environment that suits it; `given`
    settings are nested."""
    report, given = Report(name), dict(given or {})
    try:
        kind = algorithm_class(name)
    except UsageError as error:
        report.add("error", "is not complete", str(error))
        return report
    args = dict(given.pop("env_args", {}))
    if env is not None and not _env_is_sound(env, args, report):
        return report
    trials = dict(TINY) if env is None else {"": (env, args)}
    refused: list[str] = []
    failed: list[tuple[str, str]] = []
    for actions, (where, its_args) in trials.items():
        try:
            config, spec = _tried(name, where, its_args | args, given)
            checkup = _Checkup(config, spec, declared(config, spec, kind), report)
            checkup.start()
        except UsageError as error:
            refused.append(f"{actions} actions: {error}" if actions else str(error))
        except Exception as error:
            failed.append((actions, reason(error)))
        else:
            for before, text in failed:
                detail = f"{text}; if it is not for them, let __init__ raise a raynforce.UsageError"
                report.add("warning", f"fails with {before} actions", detail)
            for text in refused:
                report.add("ok", "refuses", text)
            report.add("ok", "tried on", f"{where}, {KINDS[spec.action.kind]} actions")
            checkup.run(kind)
            return report
    for actions, text in failed:
        report.add("error", f"fails with {actions} actions" if actions else f"fails on {env}", text)
    for text in refused:
        report.add("ok" if failed else "error", f"refuses {text.partition(':')[0]}" if env is None else "refuses", text)
    return report


def _env_is_sound(env: str, args: dict[str, Any], report: Report) -> bool:
    """Whether the doctor of environments finds no error; all that it does not find fine joins the report."""
    try:
        found = check_env(env, args)
    except UsageError:  # it is not found, which the trial tells
        return True
    for finding in found.findings:
        if finding.level != "ok":
            report.add(finding.level, f"{env}: {finding.title}", finding.detail, finding.fix)
    return found.ok


def _tried(name: str, env: str, args: dict[str, Any], given: Mapping[str, Any]) -> tuple[Config, EnvSpec]:
    """A small experiment: the algorithm's own settings, but few environments and a short wait for the first update."""
    basis = {"algo": name, "env": env, "env_args": args, "preset": "none", "topology": "sync", "runtime": "inline"}
    small = {"sampling.envs": 4, "learner.device": "cpu", "steps": 10_000, "eval.every": 0}
    config, _ = resolve(basis, settings.nested(small))
    hp, shorter = config.algorithm, {"sampling.fragment": min(32, config.sampling.fragment)}
    spec = algorithm_class(name).replay_spec(config)
    if spec is not None and hasattr(hp, "learning_starts"):
        shorter |= {"algorithm.learning_starts": min(spec.learning_starts, 64)}
    if spec is not None and hasattr(hp, "buffer_size"):
        shorter |= {"algorithm.buffer_size": min(spec.buffer_size, max(4096, 8 * spec.batch_size))}
    config, _ = resolve(basis, settings.nested(small), settings.nested(shorter), given)
    return config, probe(env, config.env_args)


class _Watched(Learner):
    """A learner that looks at every gradient."""

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        self.algo, self.net, self.keeper = self._algo, self._net, self._keeper
        self.largest: dict[str, float] = {}  # of each parameter, the largest gradient so far
        self.not_finite: list[str] = []  # those whose gradients were the first that were not finite

    def gradients(self, loss: Loss) -> Tensor:
        flat = super().gradients(loss)
        now = {name: float(flat[part].abs().max()) for name, part in self._net.parts.items() if part.start < part.stop}
        self.not_finite = self.not_finite or [name for name, size in now.items() if not np.isfinite(size)]
        self.largest = {name: max(self.largest.get(name, 0.0), size) for name, size in now.items()}
        return flat


class _Checkup:
    def __init__(self, config: Config, env: EnvSpec, acting: ActingSpec, report: Report) -> None:
        self._config, self._env, self._acting, self.report = config, env, acting, report
        self._learner: _Watched
        self._first: list[Fragment] = []  # of the rounds of the first few updates
        self._weights: Tensor | None = None  # that they led to
        self._updates = self._steps = 0
        self._modules: dict[str, Tensor] = {}  # parameters of its own optimisers, as they were at first

    def start(self) -> None:
        """Learn for a moment; raises what the algorithm raises."""
        sampling = self._config.sampling
        envs = EnvArgs(
            self._config.env, sampling.envs, self._config.seed, self._config.env_args, masked=self._env.masked
        )
        self._sampler = Sampler(self._acting, envs, sampling.fragment)
        try:
            self._learner = _Watched(self._config, self._env)
            self._modules = {n: p.detach().clone() for n, p in _optimised(self._learner.algo)}
            self._first = list(self._rounds(UPDATES))
            self._weights = self._learner.net.flat.clone()
            for _ in self._rounds(MANY):
                pass
        except BaseException as error:
            self._sampler.close()
            broken = self._learner.not_finite if hasattr(self, "_learner") else []
            if not broken or not isinstance(error, RaynforceError):
                raise
            raise AlgorithmError(f"{_not_finite(broken)}; then {error}") from error

    def _rounds(self, until: int) -> Iterator[Fragment]:
        """Sample and learn until so many updates were made; yields the fragment of each round."""
        deadline = time.monotonic() + SECONDS
        for _ in range(ROUNDS):
            if self._updates >= until or (self._updates >= UPDATES and time.monotonic() > deadline):
                return
            fragment = self._sampler.sample(self._learner.publish())
            self._updates += self._learner.learn(fragment).updates
            self._steps += fragment.steps
            yield fragment

    def run(self, kind: type[Algorithm[Any]]) -> None:
        try:
            if self._updates:
                done = f"{self._updates} updates on {self._steps:,} steps, with finite losses"
                self.report.add("ok", "updates", done)
                self.check_gradients()
                self.check_own_parameters()
                self.check_saved()
                self.check_same_again()
            else:
                detail = f"none in {self._steps:,} steps: does minibatches yield any? --set changes its settings"
                self.report.add("error", "makes no update", detail)
        finally:
            self._sampler.close()
        self.tell_declared(kind)

    def check_gradients(self) -> None:
        learner, report = self._learner, self.report
        if learner.not_finite:
            report.add("error", "gradients are not finite", _not_finite(learner.not_finite))
        zero = [name for name, largest in learner.largest.items() if largest == 0.0]
        learned = [name for name in learner.largest if name not in zero]
        free = {free.name for free in learner.net.spec.free}  # that no observation reaches: they may stay as they are
        dead = [name for name in zero if name not in free]
        if not learned:
            detail = f"every gradient of all {self._updates} updates is zero: make Loss.total of what "
            detail += "net(observations(minibatch)) returns, in one call, without detach()"
            report.add("error", "the loss does not depend on the network", detail)
            return
        if dead:
            detail = f"of {_some(_grouped(dead, learner.largest))} in all {self._updates} updates, so they never learn"
            why = "or used only by detach(), argmax or a comparison, through which no gradient flows"
            report.add("warning", "gradients are zero", f"{detail}: is an output left out of the loss, {why}?")
        else:
            report.add("ok", "gradients", f"reach {_some(_grouped(learned, learner.largest))}")
        if constant := [name for name in zero if name in free]:
            report.add("ok", "constant", f"{_some(constant)} had no gradient and stays at its initial value")

    def check_own_parameters(self) -> None:
        now = dict(_optimised(self._learner.algo))
        broken = [name for name, value in now.items() if not bool(value.isfinite().all())]
        same = [name for name, before in self._modules.items() if name in now and torch.equal(now[name], before)]
        if broken:
            self.report.add("error", "own parameters are not finite", f"{_some(broken)} after {self._updates} updates")
        if same:
            detail = f"{_some(same)} did not change in {self._updates} updates: is backward() called for what they are"
            detail += " to learn, and their optimiser's step()?"
            self.report.add("warning", "own parameters do not learn", detail)
        elif now:
            self.report.add("ok", "own parameters", f"{len(now)} tensors are learned by optimisers of its own")

    def check_saved(self) -> None:
        """One copy goes on, another is saved, loaded from the disk, and goes on: both must end the same."""
        try:
            with tempfile.TemporaryDirectory(prefix="raynforce-doctor-") as folder:
                checkpoint.save(Path(folder) / "one", {"learner": self._learner.state()})
                saved = checkpoint.load(Path(folder) / "one")["learner"]
            other = _Watched(self._config, self._env)
            notes = other.load(saved)
        except Exception as error:
            self.report.add("error", "cannot be saved and loaded", reason(error))
            return
        for fragment in self._rounds(self._updates + UPDATES):
            other.learn(fragment)
        differ = _differences(self._learner.state(), other.state())
        lost = self._learner.keeper.unsaved  # what changes and is not saved
        what = ", ".join(f"{name} ({kind})" for name, kind in lost.items())
        if differ:
            why = "is something that later updates depend on neither in keeps nor in state()?"
            if lost:
                why = f"it changes {what} and saves nothing of it: name it in keeps"
            detail = f"a copy that was saved, loaded and trained on has another {_some(differ)}; {why}"
            self.report.add("error", "does not resume exactly", detail)
        elif lost:
            detail = f"{what}; name it in keeps, or in forgets if nothing depends on it"
            self.report.add("warning", "changes what is not saved", detail)
        else:
            self.report.add("ok", "resume", "a copy that was saved, loaded and trained on is equal to the bit")
        for note in notes:
            self.report.add("warning", "not loaded", note)

    def check_same_again(self) -> None:
        """The same seed and the same fragments must lead to the same weights."""
        again = _Watched(self._config, self._env)
        for fragment in self._first:
            again.learn(fragment)
        if self._weights is not None and torch.equal(again.net.flat, self._weights):
            self.report.add("ok", "repeats", "the same seed and the same steps give the same weights")
        else:
            detail = "the same seed and the same steps gave other weights: draw from the rng that minibatches gets, or "
            detail += "from torch, which is seeded for you; not from np.random, random or the time"
            self.report.add("error", "does not repeat", detail)

    def tell_declared(self, kind: type[Algorithm[Any]]) -> None:
        declared = {
            "outputs: ": [f"{name} {size}" for name, size in self._acting.heads.items()],
            "max_lag: ": ["any" if kind.max_lag is None else str(kind.max_lag)],
            "learns from ": {"replay": ["replay"], "data": ["recorded episodes"]}.get(kind.consumes, []),
            "groups: ": self._learner.algo.groups(),
            "keeps ": names(kind, "keeps"),
            "forgets ": vars(kind).get("forgets", ()),
            "defaults: ": [f"{k}={v}" for k, v in kind.defaults.items()],
        }
        said = [f"{word}{', '.join(several)}" for word, several in declared.items() if several]
        self.report.add("ok", "declares", "; ".join(said))
        fit = [name for name in TOPOLOGIES if topology(name).reads_data and kind.consumes == "data"]  # if data is given
        for name in TOPOLOGIES:
            with contextlib.suppress(UsageError):
                topology(name).check(replace(self._config, topology=name), kind, self._env)
                fit.append(name)
        self.report.add("ok", "topologies", ", ".join(fit))


def _optimised(algo: Algorithm[Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that optimisers among the algorithm's attributes have, by the names of modules among them."""
    known: dict[int, str] = {}
    for name, value in vars(algo).items():
        if isinstance(value, torch.nn.Module):
            known |= {id(p): f"{name}.{path}" for path, p in value.named_parameters()}
        elif isinstance(value, Tensor):
            known[id(value)] = name
    for name, value in vars(algo).items():
        if isinstance(value, torch.optim.Optimizer):
            several = [p for group in value.param_groups for p in group["params"]]
            yield from ((known.get(id(p), f"{name} parameter {i}"), p) for i, p in enumerate(several))


def _differences(one: Tree, other: Tree) -> list[str]:
    """The names of arrays and numbers that two states do not have in common, in words that a user knows."""
    (arrays, rest), (others, other_rest) = split(_without_segments(one)), split(_without_segments(other))
    paths = [p for p in arrays if p not in others or not np.array_equal(arrays[p], others[p], equal_nan=True)]
    paths += [p for p in others if p not in arrays]
    words = {"params": "network", "adam": "optimiser", "torch_rng": "random stream of torch", "rng": "random stream"}
    found = [words.get(parts[0], parts[1] if len(parts) > 1 else parts[0]) for parts in (p.split("/") for p in paths)]
    for part in ("algo", "keeps"):
        its, others_its = rest.get(part, {}), other_rest.get(part, {})
        found += [name for name in {**its, **others_its} if repr(its.get(name)) != repr(others_its.get(name))]
    return list(dict.fromkeys(found))


def _without_segments(tree: Tree) -> Tree:
    """What a replay buffer holds follows from the fragments; only its counts can differ."""
    parts = {k: v for k, v in tree.items() if k != SEGMENTS}
    return {k: _without_segments(v) if isinstance(v, dict) else v for k, v in parts.items()}


def _grouped(some: list[str], all_of_them: Mapping[str, Any]) -> list[str]:
    """Parameters by name; a tower of which all are meant, by the tower's."""
    found: list[str] = []
    for tower in dict.fromkeys(name.partition(".")[0] for name in all_of_them):
        members = [name for name in all_of_them if name.partition(".")[0] == tower]
        meant = [name for name in members if name in some]
        found += [tower] if meant == members else meant
    return found


def _not_finite(names: list[str]) -> str:
    return f"the gradients of {_some(names)} are not finite: look for a division, log or sqrt at 0"


def _some(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
