"""What a pipeline file says: steps, what they need of each other, and everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from raynforce import settings
from raynforce.errors import UsageError, nearest
from raynforce.ops.comparing import LEVEL
from raynforce.ops.exporting import FORMATS
from raynforce.ops.registry import EPISODES, require_name
from raynforce.runs.store import is_url

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
TOP = ("name", "dir", "steps")
Count = Annotated[int, settings.Range(2, 1_000_000)]
Level = Annotated[float, settings.Range(1e-6, 0.5)]
Seed = Annotated[int, settings.Range(0, 2**63 - 1)]


@dataclass(frozen=True)
class Kind:
    """What a kind of step takes: its settings, and which kinds it may need."""

    takes: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    least: int = 0
    most: int = 1
    required: tuple[str, ...] = ()
    open: bool = False  # further settings are options of the command of its name


KINDS: dict[str, Kind] = {
    "tune": Kind({"algo": str, "env": str}, required=("algo", "env"), open=True),
    "train": Kind(
        {
            "algo": str,
            "env": str,
            "steps": Any,
            "target": Any,
            "seed": Any,
            "seeds": Annotated[int, settings.Range(1, 100)],
            "runtime": str,
            "topology": str,
            "engine": str,
            "config": str,
            "settings": dict[str, Any],
        },
        needs=("tune", "train"),
    ),
    "evaluate": Kind(
        {
            "episodes": Count,
            "seed": Seed,
            "env": str,
            "env_args": dict[str, Any],
            "parallel": Literal["no", "threads", "processes"],
            "which": Literal["best", "last"],
        },
        needs=("train",),
        least=1,
        most=100,
    ),
    "promote": Kind({"to": str, "name": str, "level": Level}, needs=("evaluate",), least=1, required=("to",)),
    "export": Kind({"to": str, "out": str}, needs=("train", "evaluate", "promote"), least=1, required=("to",)),
    "serve": Kind({}, needs=("promote",), least=1, open=True),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "evaluate": {"episodes": EPISODES, "parallel": "no", "which": "best"},
    "promote": {"level": LEVEL},
}


_PATHS = {"promote": ("to",), "export": ("out",)}


@dataclass(frozen=True)
class Step:
    name: str
    kind: str
    needs: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """The steps of a pipeline in an order in which they can run."""

    name: str
    where: str
    """Where its state and its runs are kept: a directory or a URL."""
    steps: tuple[Step, ...]
    given: bool = False
    """Whether its file says where that is."""

    def step(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        names = [step.name for step in self.steps]
        raise UsageError(f"the pipeline has no step {name!r}{nearest(name, names)}: it has {', '.join(names)}")

    def after(self, name: str) -> set[str]:
        """A step and all that depend on it."""
        found = {self.step(name).name}
        for step in self.steps:
            if found.intersection(step.needs):
                found.add(step.name)
        return found

    @property
    def token(self) -> str | None:
        """That clients of its server send, if the file says so."""
        found = [step.settings.get("token") for step in self.steps if step.kind == "serve"]
        return None if not found or found[0] is None else str(found[0])

    def names(self) -> list[str]:
        """Of the user's code, for a job that has to have it."""
        found: set[str] = set()
        for step in self.steps:
            below = settings.dotted(step.settings.get("settings") or {})
            given = {**below, **step.settings}
            found |= {str(given[key]) for key in ("env", "algo", "network.factory") if given.get(key)}
        return sorted(found)

    def to_json(self) -> dict[str, Any]:
        """What `read` makes the same plan of, wherever it is called."""
        steps = {}
        for step in self.steps:
            own = dict(step.settings)
            for key in _PATHS.get(step.kind, ()):
                own |= {key: _absolute(str(own[key]))} if key in own else {}
            steps[step.name] = {"kind": step.kind, "needs": list(step.needs), **own}
        return {"name": self.name, "dir": _absolute(self.where), "steps": steps}


def read(given: str | Path | Mapping[str, Any], where: str | None = None) -> Plan:
    """A pipeline from a YAML file, the same as JSON text, or a mapping; `where` in place of its `dir`."""
    stem, beside = "pipeline", Path()
    if isinstance(given, Mapping):
        data: Mapping[str, Any] = given
    elif str(given).lstrip().startswith("{"):
        try:
            data = json.loads(str(given))
        except ValueError as error:
            raise UsageError(f"the pipeline is neither a file nor JSON: {error}") from None
    else:
        data, stem, beside = settings.read_yaml(str(given)), Path(given).stem, Path(given).parent
    for key in data:
        if key not in TOP:
            raise UsageError(f"unknown key {key!r}{nearest(str(key), TOP)}: a pipeline has {', '.join(TOP)}")
    steps = data.get("steps")
    if not isinstance(steps, Mapping) or not steps:
        raise UsageError("a pipeline needs steps: a mapping of names to their settings, such as steps: {train: {…}}")
    name = str(data.get("name") or stem)
    require_name(name)
    found = {str(key): _step(str(key), value, steps, beside) for key, value in steps.items()}
    ordered = tuple(_ordered(found))
    for step in ordered:
        _check(step, found)
    if len(servers := [step.name for step in ordered if step.kind == "serve"]) > 1:
        raise UsageError(f"steps {servers[0]} and {servers[1]} both serve: a server runs until it is stopped; drop one")
    ordered = (*(s for s in ordered if s.kind != "serve"), *(s for s in ordered if s.kind == "serve"))
    place = where or str(data.get("dir") or os.path.join("pipelines", name))
    place = place if is_url(place) else os.path.expanduser(place)
    return Plan(name, place.rstrip("/"), ordered, "dir" in data)


def _step(name: str, given: Any, all_of: Mapping[str, Any], beside: Path) -> Step:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a step: use letters, digits and _")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise UsageError(f"step {name} = {given!r} must have settings of its own, such as {name}: {{needs: train}}")
    given = dict(given)
    kind = given.pop("kind", name)
    if kind not in KINDS:
        whose = f"step {name} has the kind {kind!r}" if kind != name else f"step {name!r} has no kind"
        raise UsageError(f"{whose}{nearest(str(kind), KINDS)}: allowed are {', '.join(KINDS)}")
    needs = given.pop("needs", ())
    needs = (needs,) if isinstance(needs, str) else tuple(map(str, needs or ()))
    for need in needs:
        if need not in all_of:
            others = [str(other) for other in all_of if other != name]
            raise UsageError(
                f"step {name} needs {need!r}, which is no step{nearest(need, others)}: there are {_and(others)}"
            )
    return Step(name, kind, needs, {**DEFAULTS.get(kind, {}), **_settings(name, KINDS[kind], given, beside)})


def _settings(name: str, kind: Kind, given: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in kind.takes and not kind.open:
            known = ("needs", "kind", *kind.takes)
            raise UsageError(f"step {name}: unknown key {key!r}{nearest(str(key), known)}: it takes {', '.join(known)}")
        hint = kind.takes.get(key, Any)
        found[str(key)] = value if hint is Any else settings.coerce(value, hint, f"step {name}: {key}")
    if "config" in found and "config" in kind.takes:  # what is in it decides, not its name
        path = Path(found.pop("config")).expanduser()
        file = settings.read_yaml(str(path if path.is_absolute() else beside / path))
        found["settings"] = settings.merge(file, settings.nested(settings.dotted(found.get("settings", {}))))
    for key in kind.required:
        if key not in found:
            raise UsageError(f"step {name} has no {key!r}: add it, such as {key}: {_EXAMPLES[key]}")
    return found


_EXAMPLES = {"to": "registry (of promote), onnx (of export)", "algo": "ppo", "env": "CartPole-v1"}


def _ordered(steps: Mapping[str, Step]) -> Iterator[Step]:
    """Each after those that it needs."""
    done: set[str] = set()
    left = dict(steps)
    while left:
        ready = [step for step in left.values() if done.issuperset(step.needs)]
        if not ready:
            raise UsageError(f"the steps need each other in a cycle: {_cycle(left)}; drop one of these needs")
        for step in ready:
            yield left.pop(step.name)
            done.add(step.name)


def _cycle(left: Mapping[str, Step]) -> str:
    path = [next(iter(left))]
    while True:
        following = next(need for need in left[path[-1]].needs if need in left)
        if following in path:
            return " → ".join([*path[path.index(following) :], following])
        path.append(following)


def _check(step: Step, steps: Mapping[str, Step]) -> None:
    """What a step asks of those that it needs, and of its own settings."""
    kind = KINDS[step.kind]
    for need in step.needs:
        if steps[need].kind not in kind.needs:
            takes = f"it can need {_and(kind.needs)}" if kind.needs else "it can need none"
            raise UsageError(f"step {step.name} needs {need}, a step of kind {steps[need].kind}: {takes}")
    if len(step.needs) < kind.least:
        raise UsageError(f"step {step.name} needs a step of kind {' or '.join(kind.needs)}: add needs: NAME")
    if len(step.needs) > kind.most:
        raise UsageError(
            f"step {step.name} needs {len(step.needs)} steps, and {step.kind} takes {kind.most}: drop some"
        )
    if step.kind == "export" and step.settings["to"] not in FORMATS:
        to = str(step.settings["to"])
        raise UsageError(f"step {step.name}: to = {to!r} is not one of: {', '.join(FORMATS)}{nearest(to, FORMATS)}")
    if step.kind == "promote" and step.settings.get("name") is not None:
        require_name(str(step.settings["name"]))
    if step.kind == "train":
        _check_training(step, steps)
    if kind.open:
        words = command_of(step, "REGISTRY" if step.kind == "serve" else "DIR")
        _parsed(step.name, words)


def _check_training(step: Step, steps: Mapping[str, Step]) -> None:
    from raynforce.experiment import resolve

    tuned = [steps[need] for need in step.needs if steps[need].kind == "tune"]
    layers = training_layers(step, tuned[0] if tuned else None)
    try:
        resolve(*layers)
    except UsageError as error:
        raise UsageError(f"step {step.name}: {error}") from None


def training_layers(step: Step, tuned: Step | None, best: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """What is laid over the defaults of a run: what tuning was of, what it found, and the step's own settings."""
    own = dict(step.settings)
    extra = settings.nested(settings.dotted(own.pop("settings", {})))
    own.pop("seeds", None)
    of = {key: tuned.settings[key] for key in ("algo", "env")} if tuned else {}
    return [of, dict(best or {}), extra, own]


def command_of(step: Step, where: str) -> list[str]:
    """The command line of a step that is one: `tune ALGO ENV --out DIR`, `serve REGISTRY --follow`."""
    own = dict(step.settings)
    if step.kind == "serve":
        own.pop("token", None)  # which lists of processes and logs would show: it goes by the environment
    words = [step.kind, *(str(own.pop(key)) for key in ("algo", "env") if key in own)]
    options: list[str] = []
    for key, value in own.items():
        option = f"--{key.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif isinstance(value, list | tuple):
            options += [option, *map(_word, value)]
        elif isinstance(value, Mapping):
            raise UsageError(f"step {step.name}: {key} = {dict(value)!r} is no value of an option: write it as text")
        elif value is not False and value is not None:
            options += [option, _word(value)]
    if step.kind == "serve":
        return [*words, where, "--follow", *options]
    return [*words, "--out", where, *options]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(name: str, words: Sequence[str]) -> None:
    from raynforce.cli.parser import parse

    try:
        parse(words)
    except UsageError as error:
        raise UsageError(f"step {name}: {error}") from None


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def _and(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
