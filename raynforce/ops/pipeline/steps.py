"""What each kind of step does. All of it can be killed at any moment and begun again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import raynforce
from raynforce import settings
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.comparing import compare
from raynforce.ops.exporting import export
from raynforce.ops.pipeline.plan import Plan, Step, command_of, training_layers
from raynforce.ops.registry import Registry, decide, digest, is_current, require_same_spaces
from raynforce.runs import checkpoint, disk
from raynforce.runs.catalog import glance
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import begun_run, local_path
from raynforce.runs.store import Store, is_url
from raynforce.runtimes.process import first_on_path

EXPORTED = "# A policy for "  # how README.md begins of a folder that may be replaced
Outputs = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A step that runs."""

    plan: Plan
    step: Step
    hash: str
    path: str
    """Its folder, or URL."""
    inputs: Mapping[str, Outputs]
    """The outputs of the steps that it needs."""
    say: Callable[[str], None]
    stream: Any
    progress: Any

    def seed(self, purpose: str) -> int:
        """Of fresh episodes: another one for other inputs, the same one after a restart."""
        return int(hashlib.sha256(f"{self.hash}/{purpose}".encode()).hexdigest()[:15], 16)


def train(work: Work) -> Outputs:
    """One run, or one for each seed; what was begun goes on."""
    from dataclasses import replace

    from raynforce.api import start
    from raynforce.experiment import resolve

    best, tuned, begin = None, None, {}
    for need in work.step.needs:
        found = work.inputs[need]
        if "config" in found:
            tuned, best = work.plan.step(need), found["config"]
        else:
            begin = {"start_from": found["runs"][0]["run"]}
    config, preset = resolve(*training_layers(work.step, tuned, best), begin)
    runs = []
    count = work.step.settings.get("seeds", 1)
    for seed in range(config.seed, config.seed + count):
        out = f"{work.path}/run" + (f"-seed{seed}" if count > 1 else "")
        if not _is_over(out):  # resuming a run that met its target would train on
            start(replace(config, seed=seed), preset, out, go_on=True, stream=work.stream, progress=work.progress)
        policy = find_policy(local_path(out))
        runs.append({"run": out, "policy_sha256": _digest(policy), "eval_return": _score(policy)})
    return {"runs": runs, "id": [run["policy_sha256"] for run in runs]}


def tune(work: Work) -> Outputs:
    """The command `raynforce tune`, or `tune --resume` of what was begun; gives the settings that it found."""
    folder = f"{work.path}/tune"
    words = command_of(work.step, folder)
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        words = ["tune", "--resume", folder]
    command = [sys.executable, "-m", "raynforce", *words]
    code = subprocess.run(command, stdout=_as_file(work.stream), env=environment()).returncode
    if code < 0 or code > 128:
        raise KeyboardInterrupt(-code if code < 0 else code - 128)
    if code:
        raise RaynforceError(f"raynforce tune ended with exit code {code}: see what it said above")
    best = settings.read_yaml(f"{folder}/best.yaml")
    return {"folder": folder, "config": best, "id": best}


def environment() -> dict[str, str]:
    """For a command of ours in a process of its own: it finds this package."""
    return {**os.environ, "PYTHONPATH": first_on_path(Path(raynforce.__file__).parents[1])}


def _as_file(stream: Any) -> Any:
    """What a process can write to: a stream that is none leaves it this one's."""
    try:
        stream.fileno()
    except (OSError, AttributeError, ValueError):
        return None
    return stream


def _is_over(out: str) -> bool:
    """Whether a run has come to its own end, by steps or target."""
    run = begun_run(out)
    if run is None or glance(run.path).state != "finished":
        return False
    if is_url(out):  # a kill may have come before its last push
        with run.locked():
            run.finish()
    return True


def evaluate(work: Work) -> Outputs:
    """Episodes on fresh seeds. Of several policies the best is chosen, and plays others: luck does not count."""
    own = work.step.settings
    candidates = [run["run"] for need in work.step.needs for run in work.inputs[need]["runs"]]
    how = {key: own[key] for key in ("env", "env_args", "parallel", "which") if key in own}
    chosen, tried = candidates[0], {}
    if len(candidates) > 1:
        for run in candidates:
            tried[run] = float(played(run, own["episodes"], work.seed("choice"), how, work.say).mean())
            work.say(f"{run}: mean return {tried[run]:.6g} over {own['episodes']} episodes")
        chosen = max(tried, key=lambda run: tried[run])
    seed = own.get("seed", work.seed("test"))
    returns = played(chosen, own["episodes"], seed, how, work.say)
    policy = find_policy(local_path(chosen), own["which"])
    facts = {"run": chosen, "policy_sha256": _digest(policy), "episodes": len(returns), "seed": seed, "how": how}
    facts |= {"mean": float(returns.mean()), "deviation": float(returns.std())}
    facts |= {"tried": tried} if tried else {}
    return {**facts, "returns": returns.tolist(), "id": [facts["policy_sha256"], returns.tolist()]}


def played(
    path: str | Path, episodes: int, seed: int, how: Mapping[str, Any], say: Callable[[str], None]
) -> np.ndarray:
    from raynforce.api import evaluate

    return evaluate(path, episodes=episodes, seed=seed, say=say, **how).returns


def promote(work: Work) -> Outputs:
    """Into the registry, if better there than what is served."""
    own, (need,) = work.step.settings, work.step.needs
    found = work.inputs[need]
    registry = Registry(own["to"])
    policy = find_policy(local_path(found["run"]), found["how"].get("which", "best"))
    if _digest(policy) != found["policy_sha256"]:
        raise RaynforceError(
            f"the policy of {found['run']} is another than the one that was evaluated: use --from {need}"
        )
    current, comparison = registry.current, None
    if current is not None and not is_current(registry, policy):
        require_same_spaces(Path(current.path), policy, registry.where)
        work.say(f"{current.name}, which is served, plays the same {found['episodes']} episodes")
        how = {key: value for key, value in found["how"].items() if key != "which"}
        champion = played(current.path, found["episodes"], found["seed"], how, work.say)
        comparison = compare(np.array(found["returns"]), champion, own["level"])
    name = own.get("name") or f"{work.plan.name}-{work.hash[:6]}"
    promotion = decide(registry, policy, run=found["run"], name=name, comparison=comparison)
    told = promotion.to_json()
    told["comparison"] = told["comparison"] or promotion.entry.comparison
    sha = promotion.entry.policy_sha256
    return {**told, "registry": own["to"], "run": found["run"], "id": [promotion.promoted, sha]}


def export_(work: Work) -> Outputs:
    """Beside its marker, and from there to `out`, whose place it takes in one step."""
    own, (need,) = work.step.settings, work.step.needs
    found = work.inputs[need]
    run = found["run"] if "run" in found else found["runs"][0]["run"]
    which = found.get("how", {}).get("which", "best")
    out = str(own.get("out") or f"{work.path}/export")
    with tempfile.TemporaryDirectory(prefix="raynforce-pipeline-") as temporary:
        made = export(run, own["to"], Path(temporary) / "export", which=which)
        if is_url(out):
            store = Store.open(out)
            for file in made.files:
                store.write(file, made.path / file)
        else:
            _replace(made.path, Path(out).expanduser())
        told = {**made.to_json(), "path": out}
    return {**told, "id": [out, made.sha256]}


def _replace(made: Path, out: Path) -> None:
    require_replaceable(out)
    new, old = (out.with_name(f".{out.name}.{what}.tmp") for what in ("new", "old"))
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(made, new)
    for path in new.rglob("*"):
        disk.flush(path)
    with contextlib.suppress(FileNotFoundError):
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def require_replaceable(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    readme = out / "README.md"
    if not (readme.is_file() and readme.read_text(errors="replace").startswith(EXPORTED)):
        raise UsageError(f"out = {str(out)!r} is there already and is no exported policy: give another folder")


def run_step(work: Work) -> Outputs:
    return RUN[work.step.kind](work)


RUN: dict[str, Callable[[Work], Outputs]] = {
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "promote": promote,
    "export": export_,
}


def in_words(step: Step, outputs: Outputs) -> str:
    """What came of a step, in a few words."""
    if step.kind == "train":
        scores = [run["eval_return"] for run in outputs["runs"]]
        return ", ".join("no evaluation" if score is None else f"return {score:.6g}" for score in scores)
    if step.kind == "evaluate":
        return f"mean return {outputs['mean']:.6g} over {outputs['episodes']} episodes"
    if step.kind == "promote":
        return f"{'promoted' if outputs['promoted'] else 'not promoted'}: {outputs['reason']}"
    if step.kind == "export":
        return f"{outputs['path']}, verified on {outputs['observations']:,} observations"
    return str(outputs["folder"])


def server(plan: Plan) -> Iterator[tuple[Step, list[str]]]:
    """The step that serves, if there is one, and the command that does."""
    for step in plan.steps:
        if step.kind == "serve":
            registry = str(plan.step(step.needs[0]).settings["to"])
            yield step, command_of(step, registry if is_url(registry) else os.path.abspath(registry))


def _digest(policy: Path) -> str:
    return digest(checkpoint.load(policy, only=["policy"])["policy"])


def _score(policy: Path) -> float | None:
    found = checkpoint.manifest(policy).get("eval_return")
    return float(found) if isinstance(found, int | float) else None
