"""A registry: a directory or URL with the policies that were promoted, of which the newest is served.

It has the form of a run: each entry is a checkpoint with a policy alone, `best` and `last` lead to the newest. So all
that reads a run reads it: `load`, `eval`, `serve --follow`, at a URL too. What happened is in the manifests of the
entries, written whole or not at all and never changed: a rollback adds an entry with an older policy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raynforce.errors import CheckpointError, RaynforceError, UsageError, nearest
from raynforce.ops.comparing import LEVEL, Comparison, compare
from raynforce.policies.acting import ActingSpec
from raynforce.policy import read_policy
from raynforce.runs import checkpoint
from raynforce.runs.catalog import is_registry
from raynforce.runs.directory import RunDirectory, find_policy
from raynforce.runs.mirrored import begun_run, local_path, new_run
from raynforce.runs.provenance import provenance
from raynforce.runs.store import is_url
from raynforce.trees import Tree

EPISODES = 100
CONFIG = "# A registry of promoted policies: `raynforce registry` lists them.\nregistry: 1\n"
FACTS = "promotion"  # in the manifest of an entry


@dataclass(frozen=True)
class Entry:
    """A policy that was promoted, or came back."""

    number: int
    event: Literal["promoted", "rolled back"]
    name: str
    time: float
    run: str
    """Where the policy came from."""
    checkpoint: str
    """The name of its checkpoint there."""
    checkpoint_sha256: str
    """Of that checkpoint's manifest."""
    policy_sha256: str
    """Of the policy alone: equal for equal ones."""
    over: int | None = None
    """The entry that was current before."""
    of: int | None = None
    """Of a rollback: the entry whose policy came back."""
    comparison: dict[str, Any] | None = None
    """How it did beside that one; None if there was none, or nobody asked."""
    path: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Promotion:
    """What became of a candidate."""

    promoted: bool
    entry: Entry
    """The current one: the candidate's, or the champion's."""
    comparison: Comparison | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        compared = None if self.comparison is None else self.comparison.to_json()
        return {"promoted": self.promoted, "reason": self.reason, "comparison": compared, "entry": self.entry.to_json()}


class Registry:
    """Promoted policies, the oldest first; `registry.current` is what is served."""

    def __init__(self, where: str | Path) -> None:
        self.where = str(where).rstrip("/")
        self._run = _opened(self.where)

    def __repr__(self) -> str:
        current = self.current
        return f"<Registry {self.where}: {len(self.entries)} entries{f', current {current.name}' if current else ''}>"

    @property
    def entries(self) -> list[Entry]:
        """As far as they were there when it was opened, or written since."""
        return [] if self._run is None else _entries(self._run)

    @property
    def current(self) -> Entry | None:
        found = self.entries
        return found[-1] if found else None

    def find(self, which: str | int) -> Entry:
        """The newest entry of a name, or that of a number."""
        found = [x for x in self.entries if str(which) in (str(x.number), x.name)]
        if not found:
            known = [x.name for x in self.entries]
            raise UsageError(
                f"{self.where} has no entry {which!r}{nearest(str(which), known)}: it has {_listed(known)}"
            )
        return found[-1]

    def add(self, policy: Path, *, run: str, name: str | None = None, comparison: Comparison | None = None) -> Entry:
        """Make a checkpoint's policy the current one; if it is that already, nothing happens."""
        tree = checkpoint.load(policy, only=["policy"])["policy"]
        manifest = checkpoint.manifest(policy)
        name = name or Path(str(run).rstrip("/")).name
        require_name(name)
        facts: dict[str, Any] = {"event": "promoted", "name": name, "run": run, "checkpoint": policy.resolve().name}
        facts |= {"checkpoint_sha256": manifest["sha256"], "policy_sha256": digest(tree)}
        facts["comparison"] = None if comparison is None else comparison.to_json()
        with self._writing() as target:
            before = _entries(target)
            if before and before[-1].policy_sha256 == facts["policy_sha256"]:
                return before[-1]
            if before:
                require_same_spaces(Path(before[-1].path), policy, self.where)
                facts["over"] = before[-1].number
            return _write(target, tree, facts)

    def back(self, to: str | int | None = None) -> Entry:
        """Bring back an older policy: the one before the current one's, or that of an entry."""
        if self.current is None:
            raise UsageError(f"there is no registry at {self.where}: promote a policy first")
        if to is not None:
            self.find(to)
        with self._writing() as target:
            found = _entries(target)
            wanted = self.find(to) if to is not None else _before(found, self.where)
            if wanted.policy_sha256 == found[-1].policy_sha256:
                raise UsageError(f"{self.where}: {wanted.name} is current already")
            tree = checkpoint.load(Path(wanted.path), only=["policy"])["policy"]
            of = wanted.number if wanted.of is None else wanted.of
            facts = {k: v for k, v in asdict(wanted).items() if k not in ("number", "path", "time", "comparison")}
            return _write(target, tree, {**facts, "event": "rolled back", "over": found[-1].number, "of": of})

    def put_right(self) -> None:
        """Let `best` lead to the newest entry, should a kill have come between the two."""
        current = self.current
        if self._run is not None and current is not None and self._run.best.resolve() != Path(current.path).resolve():
            with self._writing():
                pass

    @contextlib.contextmanager
    def _writing(self) -> Iterator[RunDirectory]:
        """Be its one writer."""
        run = _opened(self.where, to_write=True)
        if run is None:
            run = new_run(self.where)
            run.create(CONFIG)
        self._run = run
        with run.locked():
            if newest := _entries(run):
                _point(run, Path(newest[-1].path))
            yield run
            run.finish()


def promote(
    run: str | Path,
    to: str | Path,
    *,
    name: str | None = None,
    episodes: int = EPISODES,
    level: float = LEVEL,
    seed: int | None = None,
    which: str = "best",
    force: bool = False,
    say: Any = None,
) -> Promotion:
    """Promote a run's policy into the registry at `to`, if it is better than the current one there.

    Both play `episodes` on the same fresh seeds. Better means that the mean return is higher and that a one-sided
    permutation test of Welch's t says so at `level`. The first policy of a registry has nobody to beat; `force`
    promotes without playing.
    """
    registry = Registry(to)
    policy = find_policy(local_path(run), which)
    require_name(name or Path(str(run).rstrip("/")).name)
    read_policy(policy)
    current = registry.current
    if current is not None:
        require_same_spaces(Path(current.path), policy, registry.where)
    if current is None or force or is_current(registry, policy):
        return decide(registry, policy, run=str(run), name=name, comparison=None)
    from raynforce.api import evaluate

    fresh = time.time_ns() % 2**63 if seed is None else seed
    tell = say or (lambda line: None)
    tell(f"playing {episodes} episodes with {run}, and as many with {current.name}")
    own, champion = (evaluate(path, episodes=episodes, seed=fresh, say=say).returns for path in (policy, current.path))
    return decide(registry, policy, run=str(run), name=name, comparison=compare(own, champion, level))


def decide(registry: Registry, policy: Path, *, run: str, name: str | None, comparison: Comparison | None) -> Promotion:
    """Promote a policy unless a comparison says that it is not better than the current one."""
    current = registry.current
    if current is not None and is_current(registry, policy):
        registry.put_right()
        return Promotion(True, current, None, f"{current.name} is current already")
    if current is not None and comparison is not None and not comparison.better:
        return Promotion(False, current, comparison, f"not better than {current.name}: {comparison}")
    entry = registry.add(policy, run=run, name=name, comparison=comparison)
    why = "the first" if current is None else f"instead of {current.name}, without playing"
    if current is not None and comparison is not None:
        why = f"better than {current.name}: {comparison}"
    return Promotion(True, entry, comparison, why)


def registry(where: str | Path) -> Registry:
    """The registry at a directory or URL: its entries, and which is current."""
    found = Registry(where)
    if found.current is None:
        raise UsageError(f"there is no registry at {where}: raynforce promote RUN --to {where} makes one")
    return found


def rollback(registry: str | Path, to: str | int | None = None) -> Entry:
    """Bring back the policy before the current one, or that of the entry `to`: a name or a number."""
    return Registry(registry).back(to)


def is_current(registry: Registry, policy: Path) -> bool:
    current = registry.current
    return current is not None and current.policy_sha256 == digest(checkpoint.load(policy, only=["policy"])["policy"])


def digest(policy: Tree) -> str:
    """Of what a policy does: its acting spec and its arrays."""
    version = policy["version"]
    sha = hashlib.sha256(json.dumps(policy["acting"], sort_keys=True).encode())
    for array in ("params", "shift", "scale"):
        if version.get(array) is not None:
            sha.update(np.ascontiguousarray(version[array]).tobytes())
    return sha.hexdigest()


def require_same_spaces(current: Path, candidate: Path, where: str) -> None:
    """Whoever is served from a registry must not be sent other shapes from one request to the next."""

    def spaces(path: Path) -> tuple[Any, Any]:
        spec: ActingSpec = read_policy(path)[0]
        return spec.env.obs, spec.env.action

    for what, its, own in zip(("observations", "actions"), spaces(candidate), spaces(current), strict=True):
        if its != own:
            raise UsageError(f"the policy has other {what} than those in {where}: promote it into another registry")


def require_name(name: str) -> None:
    if not name or len(name) > 100 or not name.isprintable() or name.isdigit():
        raise UsageError(f"--name {name!r} is no name of an entry: use some letters, at most 100 and no number alone")


def _opened(where: str, *, to_write: bool = False) -> RunDirectory | None:
    """The run that the registry is; None if there is none yet."""
    if not is_url(where):
        path = Path(where).expanduser()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{where} is a file, not a registry")
        if (path / "config.yaml").is_file() or (path / checkpoint.MANIFEST).is_file():
            _require_registry(path, where)
            return RunDirectory(path)
        if path.is_dir() and set(os.listdir(path)) - {"checkpoints", "events.jsonl", ".config.yaml.tmp"}:
            raise UsageError(f"{where} is there already and is no registry: give another directory")
        return None
    run = begun_run(where)
    if run is not None:
        _require_registry(run.path, where)
    return run


def _require_registry(path: Path, where: str) -> None:
    if not is_registry(path):
        raise UsageError(f"{where} is a run, not a registry: give another directory")


def _entries(run: RunDirectory) -> list[Entry]:
    found = []
    for path in sorted(run.checkpoints.glob("step_*")):
        try:
            manifest = checkpoint.manifest(path)
            found.append(Entry(number=manifest["step"], path=str(path), **manifest[FACTS]))
        except (CheckpointError, KeyError, TypeError) as error:
            raise RaynforceError(f"{path} is no entry of a registry that can be read: {error}") from error
    return found


def _write(run: RunDirectory, policy: Tree, facts: dict[str, Any]) -> Entry:
    before = _entries(run)
    number = before[-1].number + 1 if before else 1
    path = run.checkpoints / f"step_{number:012d}"
    facts = {**facts, "time": time.time()}
    stated = {"step": number, "number": number, "time": facts["time"], **provenance(), FACTS: facts}
    checkpoint.save(path, {"policy": policy}, **stated)
    _point(run, path)
    return Entry(number=number, path=str(path), **facts)


def _point(run: RunDirectory, path: Path) -> None:
    for link in (run.best, run.last):
        if link.resolve() != path.resolve():
            checkpoint.point(link, path)


def _before(entries: Sequence[Entry], where: str) -> Entry:
    """The policy that was current before the one that is: going back again goes further back."""
    at = entries[-1].of or entries[-1].number
    older = [x for x in entries if x.number < at and x.policy_sha256 != entries[-1].policy_sha256]
    if not older:
        raise UsageError(f"{where} has no policy before {entries[-1].name}: there is nothing to go back to")
    return older[-1]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[-5:]) or "none"
