"""What an algorithm of the user's own keeps comes back to the bit; what it does not keep is told."""

from __future__ import annotations

import io
import re
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import own_algos
import pytest
import torch
from marks import slowly
from torch import nn

import raynforce
from raynforce.config import Config
from raynforce.envs.vector import probe
from raynforce.experiment import resolve
from raynforce.roles.gradient_worker import GradientWorker
from raynforce.roles.kept import Kept
from raynforce.roles.learner import Learner
from raynforce.runs import checkpoint

SMALL: dict[str, Any] = {
    "sampling.envs": 4,
    "sampling.fragment": 16,
    "eval.every": 0,
    "eval.episodes": 1,
    "eval.final_episodes": 0,
    "env_args.length": 5,
}
CURIOUS, DECLARED = "own_algos:Curious", "own_algos:Declared"
DDPG = "examples.own_off_policy:DDPG"
REPLAY = SMALL | {"sampling.fragment": 4, "algorithm.learning_starts": 32, "algorithm.batch_size": 16}
REPLAY |= {"algorithm.samples_per_insert": 4.0, "network.hidden": [16]}
DISCRETE, BOX = "raynforce.envs.tiny:Identity", "raynforce.envs.tiny:IdentityBox"


def halves(algo: str, env: str, settings: dict[str, Any], where: tuple[str, str], out: Path, steps: int) -> list[str]:
    """The weights of a run that was never stopped, and of one that was stopped half way and resumed."""

    def stop_half_way(status: raynforce.Status) -> None:
        if status.steps >= steps // 2:
            status.stop("half way")

    runtime, topology = where
    how = {"steps": steps, "seed": 3, "settings": settings, "progress": "quiet"}
    how |= {"runtime": runtime, "topology": topology}
    whole = raynforce.train(env, algo, out=out / "whole", **how)
    half = raynforce.train(env, algo, out=out / "half", callbacks=[stop_half_way], **how)
    assert 0 < half.result.updates < whole.result.updates
    resumed = raynforce.resume(out / "half", progress="quiet")
    assert resumed.result.updates == whole.result.updates
    return [run.result.weights_sha256 for run in (whole, resumed)]


CELLS: list[Any] = [
    (DECLARED, DISCRETE, ("inline", "sync"), 1024),
    (DECLARED, DISCRETE, ("inline", "shared-agent"), 1024),
    (DDPG, BOX, ("inline", "replay"), 256),
]
CELLS += slowly(
    (DECLARED, DISCRETE, ("ray", "sync"), 1024),
    (DECLARED, DISCRETE, ("ray", "overlap"), 1024),
    (DECLARED, DISCRETE, ("process", "sync"), 1024),
    (DECLARED, DISCRETE, ("process", "overlap"), 1024),
    (DDPG, BOX, ("inline", "sync"), 256),
    (DDPG, BOX, ("process", "overlap"), 256),
    (DDPG, BOX, ("ray", "sync"), 256),
    ("own_algos:Demonstrations", DISCRETE, ("inline", "sync"), 512),
)


@pytest.mark.parametrize(("algo", "env", "where", "steps"), CELLS)
def test_what_is_kept_resumes_to_the_bit(
    algo: str, env: str, where: tuple[str, str], steps: int, tmp_path: Path
) -> None:
    settings = SMALL if algo == DECLARED else REPLAY
    whole, resumed = halves(algo, env, settings, where, tmp_path, steps)
    assert whole == resumed


@pytest.mark.parametrize("runtime", ["inline", *slowly("process", "ray")])
def test_own_modules_begin_by_the_seed_alone(runtime: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 256, "settings": SMALL, "topology": "sync", "progress": "quiet"}
    torch.manual_seed(1)
    one = raynforce.train(DISCRETE, DECLARED, runtime="inline", out=tmp_path / "one", **how)
    torch.manual_seed(2)  # who else draws from torch changes nothing, nor does where it runs
    same = raynforce.train(DISCRETE, DECLARED, runtime=runtime, out=tmp_path / "same", **how)
    other = raynforce.train(DISCRETE, DECLARED, runtime="inline", seed=1, out=tmp_path / "other", **how)
    assert one.result.weights_sha256 == same.result.weights_sha256 != other.result.weights_sha256


@pytest.mark.parametrize("where", [("inline", "sync"), ("inline", "shared-agent"), *slowly((("process", "overlap"),))])
def test_what_is_not_kept_is_told_once_and_at_resume(where: tuple[str, str], tmp_path: Path) -> None:
    runtime, topology = where
    said = train_and_resume(CURIOUS, tmp_path, runtime=runtime, topology=topology)
    notes = [line for line in said.splitlines() if "Curious" in line and "note:" in line]
    told, lost = notes
    assert "changes model (Linear), slow (Linear), optimizer (Adam), noise (Generator)" in told
    assert "seen (int), recent (deque), means (list) in training and does not save them" in told
    assert "keeps" in told
    assert "model, slow, optimizer, noise, scale, seen, recent, means of Curious were not saved" in lost
    assert "they begin at their initial values" in lost
    for constant in ("constant", "frozen"):
        assert constant not in told + lost


@pytest.mark.parametrize("algo", [DECLARED, "own_algos:Remembers", "own_algos:Demonstrations"])
def test_nothing_is_said_of_what_is_saved(algo: str, tmp_path: Path) -> None:
    said = train_and_resume(algo, tmp_path)
    assert "not save" not in said


def test_what_changes_late_is_told_with_the_next_checkpoint(tmp_path: Path) -> None:
    said = train_and_resume("own_algos:CopiesLate", tmp_path)
    assert "target of CopiesLate was not saved: it begins at its initial value" in said


def train_and_resume(algo: str, tmp_path: Path, **more: Any) -> str:
    """What a short run says, and another that goes on with it."""
    name = algo.partition(":")[2]
    settings = SMALL if issubclass(getattr(own_algos, name, int), own_algos.Plain) else REPLAY
    stream = io.StringIO()
    flags = {"runtime": "inline", "topology": "sync"} | more
    config, preset = resolve(
        {"env": DISCRETE, "algo": algo, "steps": 384, **flags}, raynforce.settings.nested(settings)
    )
    from raynforce.api import start

    start(config, preset, tmp_path / "run", stream=stream, progress="plain")
    raynforce.resume(tmp_path / "run", steps=512, stream=stream, progress="plain")
    return re.sub(r"\n +", " ", stream.getvalue())  # lines that were broken, as one


def learner(algo: str, **settings: Any) -> Learner:
    return Learner(*experiment(algo, **settings))


def experiment(algo: str, **settings: Any) -> tuple[Config, Any]:
    given = {"env": DISCRETE, "algo": algo, "topology": "sync"}
    config, _ = resolve(given, raynforce.settings.nested(SMALL | settings))
    return config, probe(DISCRETE, config.env_args)


def test_the_network_begins_as_before_whatever_is_kept() -> None:
    assert torch.equal(learner(DECLARED)._net.flat, learner("own_algos:Plain")._net.flat)


def test_own_modules_of_all_workers_begin_alike() -> None:
    config, spec = experiment(DECLARED)
    from raynforce.algos.contract import declared
    from raynforce.envs.vector import EnvArgs

    acting = declared(config, spec, own_algos.Declared)
    envs = EnvArgs(config.env, 2, 0, config.env_args)
    models = []
    for index in range(2):
        worker = GradientWorker(config, acting, envs, index)
        worker._begin()
        models.append(worker._algo.model.weight)  # type: ignore[attr-defined]
        worker.close()
    assert torch.equal(*models)


class Everything:
    """An algorithm in as far as `Kept` looks at it."""

    keeps = ("module", "optimizer", "alpha", "half", "array", "rng", "count", "deep", "recent", "pair", "own", "none")

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.alpha = torch.rand((), requires_grad=True)
        self.half = torch.rand(3).bfloat16()
        self.optimizer = torch.optim.Adam([*self.module.parameters(), self.alpha], lr=0.1, betas=(0.8, 0.9))
        self.array = np.random.default_rng(seed).normal(size=(2, 3))
        self.rng = np.random.default_rng(seed)
        self.count = seed
        self.deep = {"a/b": [nn.Linear(1, 1), {3: np.float32(seed)}], 7: (1, "x", None)}
        self.recent = deque([float(seed)], maxlen=3)
        self.pair = (torch.rand(2), 1.5)
        self.own = Counts(seed)
        self.none = None

    def learn(self) -> None:
        (self.module(torch.rand(4, 3)).sum() * self.alpha).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recent.append(self.rng.normal())
        self.count += 1


class Counts:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed, "array": np.arange(self.seed)}

    def load(self, tree: dict[str, Any]) -> None:
        assert len(tree["array"]) == tree["seed"]
        self.seed = tree["seed"]


def kept(seed: int) -> tuple[Everything, Kept]:
    algo = Everything(seed)
    found = Kept(algo)  # type: ignore[arg-type]
    found.begin(torch.device("cpu"))
    return algo, found


def test_every_kind_of_thing_comes_back_through_the_disk(tmp_path: Path) -> None:
    one, saved = kept(1)
    for _ in range(3):
        one.learn()
    checkpoint.save(tmp_path / "one", {"kept": saved.state()})
    other, loaded = kept(2)
    alpha, array, recent, module = other.alpha, other.array, other.recent, other.module
    assert loaded.load(checkpoint.load(tmp_path / "one")["kept"]) == []
    assert other.alpha is alpha  # in place: the optimiser has it
    assert (other.array is array, other.recent is recent, other.module is module) == (True, True, True)
    torch.manual_seed(9)
    one.learn()
    torch.manual_seed(9)
    other.learn()
    for a, b in zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.alpha, other.alpha)
    assert torch.equal(one.half, other.half)
    assert torch.equal(one.pair[0], other.pair[0])
    assert one.pair[1] == other.pair[1]
    assert np.array_equal(one.array, other.array)
    assert (one.count, one.recent, one.own.seed, one.none) == (other.count, other.recent, other.own.seed, other.none)
    assert other.recent.maxlen == 3
    layer, inner = other.deep["a/b"]
    assert torch.equal(layer.weight, one.deep["a/b"][0].weight)
    assert inner == {3: np.float32(1)}
    assert other.deep[7] == (1, "x", None)


def test_settings_of_an_optimiser_come_back_unless_they_were_changed_for_the_resume() -> None:
    one, saved = kept(1)
    one.learn()
    one.optimizer.param_groups[0]["lr"] = 0.05  # a schedule of its own
    tree = saved.state()
    same, loaded = kept(2)
    loaded.load(tree)
    assert same.optimizer.param_groups[0]["lr"] == 0.05
    assert same.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    changed = Everything(3)
    changed.optimizer.param_groups[0]["lr"] = 0.7  # as by --set algorithm.critic_rate=0.7
    into = Kept(changed)  # type: ignore[arg-type]
    into.begin(torch.device("cpu"))
    into.load(tree)
    assert changed.optimizer.param_groups[0]["lr"] == 0.7
    assert len(changed.optimizer.state_dict()["state"]) == 5  # the moments are those that were saved


def test_what_was_not_kept_when_it_was_saved_is_told() -> None:
    before, after = learner(CURIOUS), learner(DECLARED)
    (note,) = after.load(before.state())
    assert note.startswith("model, slow, optimizer, noise, scale, seen, recent, means of Declared were not saved")
    (note,) = before.load(after.state())
    assert "is not kept by Curious any more: left out" in note


def test_another_shape_is_refused_with_its_name(tmp_path: Path) -> None:
    _, saved = kept(1)
    other = Everything(2)
    other.module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    into = Kept(other)  # type: ignore[arg-type]
    into.begin(torch.device("cpu"))
    with pytest.raises(raynforce.RaynforceError, match=r"Everything\.module is not what was saved"):
        into.load(saved.state())


def test_a_checkpoint_of_ours_has_nothing_new() -> None:
    assert not {"keeps", "unsaved"} & learner("ppo").state().keys()
