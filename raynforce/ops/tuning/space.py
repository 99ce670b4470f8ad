"""What is searched: for each setting the values it may take, written as `log(1e-5,1e-2)` or `choice(32,64)`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raynforce.errors import UsageError, nearest
from raynforce.settings import dotted, finite, read_yaml

KINDS = {
    "log": "log(LOW,HIGH)",
    "uniform": "uniform(LOW,HIGH) or uniform(LOW,HIGH,STEP)",
    "int": "int(LOW,HIGH) or int(LOW,HIGH,STEP)",
    "logint": "logint(LOW,HIGH)",
    "choice": "choice(A,B,...)",
}
_WRITTEN = re.compile(r"\s*(?P<kind>\w+)\s*\((?P<args>.*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class Domain:
    """The values of one setting."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    values: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        return self.kind in ("int", "logint")

    @property
    def logarithmic(self) -> bool:
        return self.kind in ("log", "logint")

    @property
    def finite(self) -> bool:
        return self.kind in ("choice", "int") or self.step is not None

    def sample(self, rng: np.random.Generator) -> Any:
        if self.finite:
            return self.grid()[int(rng.integers(self.size()))]
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        drawn = float(rng.uniform(low, high))
        return self.clip(math.exp(drawn) if self.logarithmic else drawn)

    def size(self) -> int:
        if self.kind == "choice":
            return len(self.values)
        return 1 + int((self.high - self.low) / (self.step or 1) + 1e-9)

    def grid(self) -> list[Any]:
        """All values of a finite domain."""
        if self.kind == "choice":
            return [list(value) if isinstance(value, tuple) else value for value in self.values]
        return [self.clip(self.low + number * (self.step or 1)) for number in range(self.size())]

    def clip(self, value: float) -> int | float:
        """The nearest number that is allowed, with few digits: a setting is to be read and typed again."""
        value = min(max(float(value), self.low), self.high)
        if self.step is not None:
            value = self.low + round((value - self.low) / self.step) * self.step
        return round(value) if self.whole else float(f"{value:.6g}")

    def position(self, value: Any) -> float:
        """Where a value is, from 0 to 1: for pictures and importance."""
        if self.kind == "choice":
            return self.grid().index(list(value) if isinstance(value, tuple) else value) / max(1, self.size() - 1)
        if self.high == self.low:
            return 0.5
        low, high, at = self.low, self.high, float(value)
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-300))
        return (at - low) / (high - low)

    def to_json(self) -> dict[str, Any]:
        if self.kind == "choice":
            return {"kind": self.kind, "values": self.grid()}
        return {name: value for name, value in asdict(self).items() if name != "values" and value is not None}

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Domain:
        return Domain(**{**facts, "values": tuple(_plain(value) for value in facts.get("values", ()))})

    def __str__(self) -> str:
        args = self.grid() if self.kind == "choice" else [self.low, self.high, *([self.step] if self.step else [])]
        shown = [f"{arg:g}" if isinstance(arg, float) else json.dumps(arg, separators=(",", ":")) for arg in args]
        return f"{self.kind}({','.join(shown)})"


Space = dict[str, Domain]


def read(given: Iterable[str] | Mapping[str, Any]) -> Space:
    """A search space from `setting=log(1e-5,1e-2)`, names of YAML files, or a mapping of such texts, nested or not."""
    pairs: dict[str, Any] = {}
    if isinstance(given, Mapping):
        pairs |= dotted(given)
    else:
        for item in given:
            key, equals, text = item.partition("=")
            if not equals and (item.endswith((".yaml", ".yml")) or os.path.exists(item)):
                pairs |= dotted(read_yaml(item))
            elif not equals or not key.strip():
                raise UsageError(f"--search {item!r} must look like algorithm.learning_rate=log(1e-5,1e-2)")
            else:
                pairs[key.strip()] = text
    return {key: domain(key, value) for key, value in pairs.items()}


def domain(key: str, given: Any) -> Domain:
    """What `log(1e-5,1e-2)`, or a list of choices, stands for."""
    if isinstance(given, Domain):
        return given
    if isinstance(given, list | tuple):
        return _choice(key, given)
    found = _WRITTEN.fullmatch(str(given))
    shown = f"--search {key}={given}"
    ways = "; ".join(KINDS.values())
    if found is None:
        raise UsageError(f"{shown} must be one of: {ways}")
    kind = found["kind"]
    if kind not in KINDS:
        raise UsageError(f"{shown}: no kind {kind!r}{nearest(kind, KINDS)}; there are {ways}")
    args = _arguments(found["args"], shown)
    if kind == "choice":
        return _choice(key, args)
    most = 2 if kind in ("log", "logint") else 3
    numbers = [finite(arg) for arg in args]
    if not 2 <= len(numbers) <= most or None in numbers:
        raise UsageError(f"{shown} must be {KINDS[kind]}, in numbers")
    low, high, *rest = (float(number) for number in numbers if number is not None)
    step = rest[0] if rest else None
    if kind in ("int", "logint") and not all(value.is_integer() for value in (low, high, step or 1.0)):
        raise UsageError(f"{shown} must have whole numbers")
    if low >= high:
        raise UsageError(f"{shown} is an empty range: {low:g} must be below {high:g}")
    if kind in ("log", "logint") and low <= 0:
        raise UsageError(f"{shown}: a logarithmic range begins above 0, such as {kind}(1e-5,{high:g})")
    if step is not None and not 0 < step <= high - low:
        raise UsageError(f"{shown}: a step must be above 0 and at most {high - low:g}")
    return Domain(kind, low, high, step)


def _arguments(text: str, shown: str) -> list[Any]:
    import yaml

    try:
        return list(yaml.safe_load(f"[{text}]"))
    except (yaml.YAMLError, ValueError):
        raise UsageError(f"{shown} cannot be read: values are separated by commas, lists are [64,64]") from None


def _choice(key: str, values: Iterable[Any]) -> Domain:
    found = [_plain(value) for value in values]
    if not found:
        raise UsageError(f"--search {key} is an empty range: choice(...) needs values")
    return Domain("choice", values=tuple(dict.fromkeys(found)))


def _plain(value: Any) -> Any:
    """As settings are read: 1e-3, which YAML takes for text, is a number, and a list can be looked up."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, str) and (number := finite(value)) is not None:
        return number
    return value
