"""The history of a run's faults: written as they happen, with what is needed to see them again; read by the doctor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raynforce.errors import RaynforceError, UsageError, reason
from raynforce.runs import checkpoint
from raynforce.runs.catalog import object_in, whole
from raynforce.runs.directory import RunDirectory
from raynforce.runs.metrics import cannot_write
from raynforce.runs.repeats import Repeats
from raynforce.trees import Tree

FOLDER = "faults"
MOST_EVIDENCE = 20  # of a run
MOST_OF_A_CAUSE = 3
MOST_CAUSES = 200  # that are told apart; later ones are counted together
LONGEST_CAUSE, LONGEST_TEXT = 400, 8000  # characters in a line of the history
ENV_RESTARTED = "environment restarted"

Evidence = Callable[[], dict[str, Tree]]
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d[\d_,.]*(?:[eE][-+]?\d+)?")
_EPISODE = ("env", "args", "seed", "actions", "dtype", "too_long", "lane", "step")


def same_cause(role: str, kind: str, cause: str) -> str:
    """A text that is equal for equal causes in equal kinds of role: `seed 123` and `seed 456` are."""
    return f"{kind_of(role)} {kind}: {_NUMBER.sub('#', cause)}"


def kind_of(role: str) -> str:
    """What a role is: `sampler 3` is a `sampler`."""
    return role.partition(" ")[0]


# -- writing ----------------------------------------------------------------------------------------------------------


class FaultHistory:
    """Writes the faults of a run to its `events.jsonl`, and keeps evidence of the first of each cause.

    Equal faults are counted, not repeated: from some point on a line stands for `count` of them (`Repeats`).
    A fault that cannot be written down must not end the run: the first time, `say` is told; the counters go on.
    """

    def __init__(self, run: RunDirectory, say: Callable[[str], None] = lambda text: None) -> None:
        self.faults = 0
        self.last = ""  # the newest fault in a few words, for the live view
        self._run, self._say = run, say
        self._folder = run.path / FOLDER
        self._told = False
        self._repeats: Repeats[tuple[str, ...]] = Repeats()
        self._untold: dict[tuple[str, ...], dict[str, Any]] = {}  # the last of each that no line stands for yet
        self._causes: set[str] = set()
        taken = [path.stem for path in self._folder.glob("[0-9]*")]
        self._number = max((int(stem) for stem in taken if stem.isdecimal()), default=0)
        kept = [facts for _, facts in evidence_of(run)]  # of the processes that this run was resumed from
        self._kept = Counter(same_cause(*(str(facts.get(k)) for k in ("role", "fault", "cause"))) for facts in kept)

    def env_fault(self, role: str, facts: Mapping[str, Any], steps: int) -> None:
        """Note an environment that broke and was replaced: `facts` are those of an `EnvFault`."""
        kind, cause = str(facts.get("kind", "raised")), _one_line(facts.get("cause", ""))
        did = {"raised": "raised", "hung": "hung", "died": "died"}.get(kind, "returned garbage")
        self.last = f"an environment of {role} {did}, restarted: {cause}"
        line = {"steps": steps, "role": role, "kind": kind, "cause": cause, "action": ENV_RESTARTED}
        line |= {k: facts[k] for k in ("env", "lane", "seed", "step") if k in facts}
        self._fault(line, str(facts.get("trace", "")), facts, None)

    def role_fault(
        self,
        role: str,
        kind: str,
        cause: str,
        action: str,
        attempt: int,
        steps: int,
        said: str = "",
        trace: str = "",
        facts: Mapping[str, Any] | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        """Note a role that failed.

        `facts` are those of its error: of an environment, they are its evidence. Otherwise `evidence` gives the
        parts that fragments are sampled again from: `sampler`, its state, and `versions`, numbered. It is
        called only if there is room for more. `facts["lost"]` are environment steps that were lost with the role.
        """
        facts, cause = facts or {}, _one_line(cause)
        self.last = f"{role} {action}: {_brief(cause, role)}"
        line = {"steps": steps, "role": role, "kind": kind, "cause": cause, "action": action, "attempt": attempt}
        line |= {k: facts[k] for k in ("env", "lane", "seed", "step", "lost") if k in facts}
        if said:
            line["said"] = said[-LONGEST_TEXT:]
        self._fault(line, trace or str(facts.get("trace", "")), facts, evidence)

    def recovered(self, role: str, seconds: float) -> None:
        """Note that a role is where it was before its fault, and how long that took."""
        self._event("recovered", {"role": role, "seconds": round(seconds, 3)}, role)

    def absent(self, role: str, cause: str) -> None:
        self.last = f"{role} is absent: {_brief(_one_line(cause), role)}"
        self._event("absent", {"role": role, "cause": _one_line(cause)}, role)

    def back(self, role: str) -> None:
        self.last = f"{role} is back"
        self._event("back", {"role": role}, role)

    def close(self) -> None:
        """Write the counts of what no line stands for yet."""
        for key, count in self._repeats.rest():
            self._write(key[0], {**self._untold[key], "count": count})

    def _fault(self, line: dict[str, Any], trace: str, facts: Mapping[str, Any], parts: Evidence | None) -> None:
        self.faults += 1
        cause = same_cause(line["role"], line["kind"], line["cause"])
        if cause not in self._causes and len(self._causes) >= MOST_CAUSES:
            line["cause"] = "another cause: too many different ones to tell apart"
            cause = same_cause(line["role"], line["kind"], line["cause"])
        evidence = None
        most = 1 if facts.get("too_long") else MOST_OF_A_CAUSE  # room for those that can be seen again
        if self._kept.total() < MOST_EVIDENCE and self._kept[cause] < most:
            evidence = self._keep(cause, {**line, "trace": trace}, facts, parts)
        if trace and cause not in self._causes:
            line["trace"] = trace[-LONGEST_TEXT:]
        self._causes.add(cause)
        self._event("fault", {**line, "evidence": evidence}, line["role"], cause, line["action"])

    def _keep(self, cause: str, known: dict[str, Any], facts: Mapping[str, Any], parts: Evidence | None) -> str | None:
        """Write evidence; returns its name below the run, or None if there is nothing to see the fault again with."""
        evidence = {"kind": "", "fault": known.pop("kind"), "time": time.time(), **known}
        path = self._folder / f"{self._number + 1:04d}.json"
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            known_by_seed = facts.get("step") == 0 or facts.get("too_long")  # the latter is not to be seen again
            if "seed" in facts and (facts.get("actions") is not None or known_by_seed):
                evidence |= {"kind": "episode", "actions": []} | {k: facts[k] for k in _EPISODE if k in facts}
            elif parts is not None:
                evidence |= {"kind": "fragment", "index": int(known["role"].partition(" ")[2] or 0)}
                checkpoint.save(path.with_suffix(""), parts())
            else:
                return None
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps(evidence, default=str))
            temporary.replace(path)
        except Exception as error:  # whatever is wrong with it, training goes on
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._complain(cannot_write(path, error) if isinstance(error, OSError) else error)
            return None
        self._number += 1
        self._kept[cause] += 1
        return f"{FOLDER}/{path.name}"

    def _event(self, kind: str, facts: dict[str, Any], *equal: str) -> None:
        """Count an event, and write it down if it is due; those with the same `equal` are."""
        key = (kind, *equal)
        count = self._repeats.add(key, due=bool(facts.get("evidence")))
        lost = self._untold.pop(key, {}).get("lost", 0) + facts.get("lost", 0)
        facts |= {"lost": lost} if lost else {}
        if count:
            self._write(kind, facts | ({"count": count} if count > 1 else {}))
        else:
            self._untold[key] = facts

    def _write(self, kind: str, facts: Mapping[str, Any]) -> None:
        try:
            self._run.event(kind, **facts)
        except (RaynforceError, TypeError, ValueError) as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            self._say(f"a fault could not be written down in full, training goes on: {reason(error)}")


def _one_line(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST_CAUSE else f"{line[: LONGEST_CAUSE - 3]}..."


def _brief(cause: str, role: str) -> str:
    """A cause to stand behind the name of its role, without the advice that may follow; a view cuts it to its width."""
    text = cause.removeprefix(f"{role} ").removeprefix(f"{role}: ")
    return text.partition("; ")[0].strip() or text


# -- reading ----------------------------------------------------------------------------------------------------------


def evidence_of(run: RunDirectory) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and content of each evidence of a run, in order; what is torn is left out."""
    for path in sorted((run.path / FOLDER).glob("[0-9]*.json")):
        with contextlib.suppress(OSError):
            if path.stem.isdecimal() and (facts := object_in(path.read_bytes())):
                yield int(path.stem), facts


def each_event(path: Path) -> Iterator[dict[str, Any]]:
    """The events of an `events.jsonl`, one by one; torn lines are left out, but not what was appended behind them."""
    try:
        with path.open("rb") as file:
            for line in file:
                event = object_in(line, b'{"time":')
                if isinstance(event.get("event"), str) and isinstance(event.get("time"), int | float):
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


@dataclass
class FaultGroup:
    """Faults of one kind of role with an equal cause."""

    role: str  # `sampler`, `learner`, `evaluator`
    kind: str
    cause: str  # of the first one
    count: int = 0
    roles: Counter[str] = field(default_factory=Counter)  # how often in which: `sampler 3`
    actions: Counter[str] = field(default_factory=Counter)  # what was done, how often
    first: tuple[float, int] = (0.0, 0)  # time, and environment steps trained by then
    last: tuple[float, int] = (0.0, 0)
    trace: str = ""
    said: str = ""  # the last lines that the last one of them printed
    evidence: list[int] = field(default_factory=list)

    @property
    def grave(self) -> bool:
        """Whether the run went on with less, or not at all."""
        return "given up" in self.actions or "stopped" in self.actions


@dataclass
class History:
    began: float | None = None
    ended: float | None = None  # time of the last event; of the end, if it had one
    outcome: str = "none"  # how the last process of the run ended: `stopped`, `failed`, or `none` that was written down
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0  # from start to end, of all processes of the run
    starts: int = 0  # how often it was started or resumed
    groups: list[FaultGroup] = field(default_factory=list)  # the grave ones first, then the most frequent
    recoveries: dict[str, list[float]] = field(default_factory=dict)  # seconds of each, by kind of role
    given_up: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # roles that were away at the end, and why
    absences: int = 0
    storage: list[str] = field(default_factory=list)  # why checkpoints could not be written, each time
    lost: int | None = None  # environment steps that were sampled and lost with a role, as far as that was written down

    @property
    def faults(self) -> int:
        return sum(group.count for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        recoveries = {}
        for role, seconds in self.recoveries.items():
            median, longest = statistics.median(seconds), max(seconds)
            recoveries[role] = {"count": len(seconds), "median_seconds": median, "max_seconds": longest}
        data = {k: v for k, v in vars(self).items() if k not in ("groups", "lost")}
        data |= {"seconds": round(self.seconds, 3), "faults": self.faults, "recoveries": recoveries}
        groups = []
        for group in self.groups:
            row = {k: v for k, v in vars(group).items() if k not in ("first", "last")}
            for name, (at, steps) in (("first", group.first), ("last", group.last)):
                row |= {f"{name}_time": at, f"{name}_steps": steps}
            groups.append(row)
        return data | {"lost_steps": self.lost, "groups": groups}


def summarise(events: Iterable[Mapping[str, Any]]) -> History:
    """Put a history together from its events, in one pass."""
    history, groups = History(), dict[str, FaultGroup]()
    since: float | None = None  # when the process that is read of began, if that is known
    for event in events:
        at, kind, role = float(event["time"]), event["event"], str(event.get("role", ""))
        if kind == "result":  # of a run whose end has been told
            continue
        if history.began is None:
            history.began = at
        if kind == "started":
            if since is not None and history.ended is not None:  # the one before was killed
                history.seconds += history.ended - since
            history.starts += 1
            history.outcome, history.reason, since = "none", "", at
            history.given_up, history.absent = [], {}  # everybody is tried again
        history.ended, steps = at, whole(event.get("steps"))
        history.steps = steps if kind == "started" else max(history.steps, steps)
        if kind in ("stopped", "failed"):
            history.outcome, history.reason = kind, str(event.get("reason", ""))
            history.seconds += at - (at if since is None else since)
            since = None
        elif kind == "fault":
            _add(history, groups, event)
        elif kind == "recovered" and isinstance(event.get("seconds"), int | float):
            history.recoveries.setdefault(kind_of(role), []).append(float(event["seconds"]))
        elif kind == "storage" and event.get("state") == "failed":
            history.storage.append(str(event.get("cause", "")).partition("; training goes on")[0])
        elif kind == "absent":
            history.absent[role] = str(event.get("cause", ""))
            history.absences += max(1, whole(event.get("count", 1)))
        elif kind == "back":
            history.absent.pop(role, None)
            if role in history.given_up:
                history.given_up.remove(role)
    if since is not None and history.ended is not None:
        history.seconds += history.ended - since
    history.groups = sorted(groups.values(), key=lambda group: (not group.grave, -group.count))
    return history


def _add(history: History, groups: dict[str, FaultGroup], event: Mapping[str, Any]) -> None:
    role, kind, cause = str(event.get("role", "")), str(event.get("kind", "failed")), str(event.get("cause", ""))
    where, action = (float(event["time"]), whole(event.get("steps"))), str(event.get("action", ""))
    group = groups.setdefault(same_cause(role, kind, cause), FaultGroup(kind_of(role), kind, cause, first=where))
    count = max(1, whole(event.get("count", 1)))
    group.count += count
    group.roles[role] += count
    group.actions[action] += count
    group.last = where
    group.trace = group.trace or str(event.get("trace", ""))
    group.said = str(event.get("said", "")) or group.said
    evidence = event.get("evidence")
    if isinstance(evidence, str) and (stem := os.path.basename(evidence).partition(".")[0]).isdecimal():
        group.evidence.append(int(stem))
    if action == "given up" and role not in history.given_up:
        history.given_up.append(role)
    if "lost" in event:
        history.lost = (history.lost or 0) + whole(event["lost"])
