"""Frozen dataclasses from dicts, YAML and `a.b=c`, with errors that name the field, the value and the fix."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from raynforce.errors import UsageError, nearest, said_elsewhere

COUNTS = {"k": 10**3, "K": 10**3, "M": 10**6}  # what a whole number may end with: `--steps 10k`
T = TypeVar("T")
Nested = dict[str, Any]
Guess = Callable[[str, Iterable[str]], str]


@dataclass(frozen=True)
class Range:
    """What a number may be, both ends included; put it into a field's type with `Annotated`."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.low:g}" if self.high == math.inf else f"from {self.low:g} to {self.high:g}"


COUNT = Annotated[int, Range(1, 1_000_000)]
STEPS = Annotated[int, Range(1, 10**9)]
SEED = Annotated[int, Range(0, 2**63 - 1)]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _section(hint: Any, sections: Mapping[str, type], path: str) -> type | None:
    """The dataclass behind a field that is a section of the config, or None for a plain value."""
    found = sections.get(path, hint)
    return found if dataclasses.is_dataclass(found) and isinstance(found, type) else None


def known_keys(cls: type, sections: Mapping[str, type], prefix: str = "") -> Iterator[str]:
    for name, hint in _hints(cls).items():
        path = prefix + name
        below = _section(hint, sections, path)
        if below is not None:
            yield from known_keys(below, sections, path + ".")
        elif "ClassVar" not in str(hint):
            yield path


def build(cls: type[T], data: Mapping[str, Any], sections: Mapping[str, type], meant: Guess = nearest) -> T:
    """Make `cls` from nested plain data; `sections` has the types of open sections, `meant` guesses unknown names."""

    def make(kind: type, values: Any, prefix: str) -> Any:
        if not isinstance(values, Mapping):
            raise UsageError(f"{prefix.rstrip('.')} = {values!r} is not a section: give it keys of its own")
        hints = {k: h for k, h in _hints(kind).items() if "ClassVar" not in str(h)}
        made: Nested = {}
        for key, value in values.items():
            path = f"{prefix}{key}"
            if key not in hints:
                if "." in str(key):
                    section, _, rest = str(key).partition(".")
                    raise UsageError(f"unknown setting {path!r}: write {section!r} as a section with {rest!r} in it")
                known = list(known_keys(cls, sections))
                sections_too = {k.rpartition(".")[0] for k in known if "." in k} if isinstance(value, Mapping) else ()
                raise UsageError(f"unknown setting {path!r}{meant(path, sections_too or known)}")
            below = _section(hints[key], sections, path)
            made[key] = make(below, value, path + ".") if below else coerce(value, hints[key], path)
        for key in hints.keys() - made.keys():  # open sections (the algorithm's) have no usable default of their own
            if below := _section(hints[key], sections, f"{prefix}{key}"):
                made[key] = make(below, {}, f"{prefix}{key}.")
        for field in dataclasses.fields(kind):
            if field.name not in made and field.default is field.default_factory is dataclasses.MISSING:
                raise UsageError(f"setting {prefix}{field.name} is required")
        return kind(**made)

    result: T = make(cls, data, "")
    return result


def coerce(value: Any, hint: Any, path: str) -> Any:
    """Turn a value from YAML or the command line into a field's type, or say what is wrong with it."""
    limits: Range | None = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)[:2]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
        (hint,) = [a for a in args if a is not types.NoneType]
        return coerce(value, Annotated[hint, limits] if limits else hint, path)
    if origin is Literal:
        if value is False and "no" in args:  # which is what YAML takes a plain no for
            return "no"
        if value is True and "linear" in args:
            return "linear"
        if value in args:
            return value
        raise UsageError(f"{path} = {value!r} is not one of: {', '.join(map(str, args))}{_choice(str(value), args)}")
    if origin is tuple:
        items = value.strip("[]()").split(",") if isinstance(value, str) else value
        if not isinstance(items, Iterable):
            items = [items]
        element = Annotated[args[0], limits] if limits else args[0]
        return tuple(coerce(x, element, path) for x in items if x != "")
    if hint is dict or origin is dict:
        if not isinstance(value, Mapping):
            raise UsageError(f"{path} = {value!r} is not a mapping: write it as {path}.KEY=VALUE")
        return dict(value)
    return _scalar(value, hint, limits, path)


def _choice(value: str, allowed: Sequence[Any]) -> str:
    """What was meant by a value that is not allowed."""
    from raynforce.synonyms import VALUES  # only once there is a mistake

    elsewhere = said_elsewhere(value, VALUES)
    if elsewhere is None:
        return nearest(value, map(str, allowed))
    return f" (here it is {elsewhere!r})" if elsewhere in allowed else ""


def _scalar(value: Any, hint: Any, limits: Range | None, path: str) -> Any:
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))
    wrong = UsageError(f"{path} = {value!r} must be {name}{f' {limits}' if limits else ''}")
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
            return value.lower() in ("true", "yes", "on")
    elif isinstance(value, bool):
        pass
    elif hint is str and isinstance(value, str | int | float):
        return str(value)
    elif hint in (int, float):
        number = _number(value, hint)
        if number is not None and (not limits or limits.low <= number <= limits.high):
            return number
    raise wrong


def _number(value: Any, kind: type) -> int | float | None:
    """Read a number from YAML or the command line, where 3e-4, 1_000 and 10k are text; None if it is none."""
    try:
        if kind is int and (isinstance(value, Integral) or (isinstance(value, str) and value.strip("+-_").isdigit())):
            return int(value) if abs(int(value)) < 2**63 else None
        if kind is int and isinstance(value, str) and value[-1:] in COUNTS:
            from decimal import Decimal

            value = float(Decimal(value[:-1]) * COUNTS[value[-1]])  # in decimals: 2.3M is whole
        number = float(value)
    except (TypeError, ValueError, ArithmeticError):
        return None
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return None
    return int(number) if kind is int else number


def finite(value: Any) -> float | None:
    """The number that something is, or that a text is of; None if it is none, or not finite."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Nested:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged


def nested(flat: Mapping[str, Any]) -> Nested:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    if not isinstance(flat, Mapping):
        raise UsageError(f"settings = {flat!r} is no mapping: give values by name, as {{'algorithm.gamma': 0.98}}")
    out: Nested = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UsageError(f"{path!r} and {parent!r} cannot both be set")
        node[leaf] = value
    return out


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Undo `nested`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def parse_assignments(items: Iterable[str]) -> Nested:
    """`["a.b=1", …]` of the command line as nested data; values are read as YAML."""
    import yaml

    flat: Nested = {}
    for item in items:
        path, equals, text = item.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {item!r} must look like section.setting=value")
        try:
            flat[path.strip()] = yaml.safe_load(text) if text else ""
        except (yaml.YAMLError, ValueError):  # ValueError: what looks like a date and is none
            flat[path.strip()] = text
    return nested(flat)


def assignment(key: str, value: Any) -> str:
    """`a.b=1`, which `parse_assignments` reads as that value."""
    import json

    plain = f"{key}={value}"
    as_text = isinstance(value, str) and parse_assignments([plain]) == nested({key: value})
    return plain if as_text else f"{key}={json.dumps(value)}"


def read_yaml(path: str) -> Nested:
    """Read a config file, one clear line for everything that can be wrong with it."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # eight times as fast
    except OSError as error:
        raise UsageError(f"cannot read config {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no UTF-8, or what looks like a date and is none
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"config {path!r} is not valid YAML{where}") from None
    if data is not None and not isinstance(data, dict):
        raise UsageError(f"config {path!r} must hold settings, one `key: value` a line")
    return data or {}


def to_dict(config: Any) -> Nested:
    """A config as plain nested data, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    found: Nested = plain(dataclasses.asdict(config))
    return found


def to_yaml(config: Any, *, explain: bool = False) -> str:
    """Write a config as YAML; with `explain`, the sentence of each field stands above it as a comment."""
    import textwrap

    import yaml

    def lines(value: Any, depth: int) -> Iterator[str]:
        kind: Any = type(value)
        sentences = docs(kind) if explain else {}
        pad = "  " * depth
        for field in dataclasses.fields(value):
            if field.name in sentences:
                wrapper = textwrap.TextWrapper(78 - len(pad), break_long_words=False, break_on_hyphens=False)
                yield from (f"{pad}# {line}" for line in wrapper.wrap(" ".join(sentences[field.name].split())))
            content = getattr(value, field.name)
            if dataclasses.is_dataclass(content):
                yield f"{pad}{field.name}:" + ("" if dataclasses.fields(content) else " {}")
                yield from lines(content, depth + 1)
            else:
                content = list(content) if isinstance(content, tuple) else content
                text = yaml.safe_dump([content], default_flow_style=True, sort_keys=False, width=100_000)
                yield f"{pad}{field.name}: {text.strip()[1:-1]}"

    return "\n".join(lines(config, 0)) + "\n"


@functools.cache
def docs(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, read from its source."""
    import ast
    import inspect
    import textwrap

    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # a class made in a REPL has no source
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for pair in pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found
