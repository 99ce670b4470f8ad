"""Takes over a checkpoint that RLlib wrote without us. Its pickles are read in a process of its own (`foreign`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raynforce import settings
from raynforce.config import Config
from raynforce.engines.rllib.algorithms import described
from raynforce.engines.rllib.files import pack
from raynforce.errors import RaynforceError, UsageError
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.trees import Tree

SECONDS = 300.0  # that reading it may take
HEADS = ("rllib_checkpoint.json", "metadata.json")  # of an algorithm's checkpoint, and of a module's
RAY = "2.60."
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME")
"""What its process gets of the environment: no token and no key is among it."""
PICKLES = "it holds pickles, which can run any code as you when they are read"


class Found(NamedTuple):
    """What there was in a checkpoint."""

    config: Config
    acting: ActingSpec
    version: PolicyVersion
    steps: int
    episodes: int
    episode_return: float | None
    parts: dict[str, Tree]  # RLlib's own files, as the engine saves them; nothing of a module alone
    counts: Tree
    notes: list[str]
    unfit: str  # why `resume` cannot go on from it; empty if it can


def read(path: Path, *, trust: bool, env: str | None) -> Found:
    """Everything in RLlib's checkpoint as data of ours."""
    head = _head(path)
    version = head.get("ray_version")
    if not str(version).startswith(RAY):
        again = "load it with RLlib 2.60 (Algorithm.from_checkpoint), and save it again (save_to_path)"
        raise UsageError(f"{path} was made by Ray {version}, and those of {RAY}x are read here: {again}")
    if not trust:
        raise UsageError(f"{path} was not read: {PICKLES}; if it is your own, add --trust (in Python trust=True)")
    with tempfile.TemporaryDirectory(prefix="rnf-") as folder:
        told = _answer(path, env or "", Path(folder))
        arrays = {name: np.load(Path(folder, f"{name}.npy")) for name in told["arrays"]}
    trained, kind = told["trained"], described(told["config"]["algo"])
    number = int(trained["iteration"])
    policy = PolicyVersion(number, schedules=told["schedules"], **arrays)
    counted = {"sampled": int(trained["steps"]), "trained": float(trained["samples"]), "dropped": 0}
    return Found(
        settings.build(Config, told["config"], {"algorithm": kind.Settings}),
        ActingSpec.from_json(told["acting"]),
        policy,
        int(trained["steps"]),
        int(trained["episodes"]),
        trained["episode_return"],
        {"rllib": pack(path)} if (path / HEADS[0]).is_file() else {},
        {"rllib": {"number": number, **counted}},
        list(told["notes"]),
        str(told["unfit"]),
    )


def _head(path: Path) -> dict[str, Any]:
    """What its file of metadata says, or one line that says why it is no checkpoint of RLlib's."""
    if not path.is_dir():
        raise UsageError(f"{path} is {'a file' if path.exists() else 'not there'}: give the directory of a checkpoint")
    file = next((path / name for name in HEADS if (path / name).is_file()), None)
    if file is None:
        below = sorted(one.parent.relative_to(path) for one in path.glob(f"**/{HEADS[0]}"))
        hint = f"; it has {below[-1]}, name that" if below else ": it has no rllib_checkpoint.json"
        raise UsageError(f"{path} is no checkpoint of RLlib's{hint}")
    try:
        found = json.loads(file.read_text())
        return {**found}
    except (OSError, ValueError, TypeError):
        raise UsageError(f"{path} is no checkpoint of RLlib's: {file.name} cannot be read") from None


def _answer(path: Path, env: str, folder: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "raynforce.engines.rllib.foreign", str(path.resolve()), env, str(folder)]
    passed = {name: os.environ[name] for name in KEPT if name in os.environ}
    passed |= {"PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path), "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("wb") as output, _process(words, env=passed, stdout=output, stderr=output) as process:
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise RaynforceError(f"{path} could not be read within {SECONDS:.0f} s") from None
    try:
        found = {**json.loads((folder / "answer.json").read_text())}
    except (OSError, ValueError, TypeError):
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = said[-1] if said else f"its process ended with {process.returncode}"
        raise RaynforceError(f"{path} could not be read: {why[:500]}") from None
    if "refused" in found:
        raise (UsageError if found.get("use") else RaynforceError)(str(found["refused"]))
    return found


@contextlib.contextmanager
def _process(words: list[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this block, with all that it started."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **how)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
