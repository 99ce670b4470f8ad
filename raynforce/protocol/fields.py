"""Reading a peer's JSON: each value is taken by name, type and range, and a wrong one is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raynforce.protocol.frame import ProtocolError, clean

_NEEDED: Any = object()


def wrong(where: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError("field", f"{where} is {clean(repr(value), 80)}; expected {expected}")


def take(data: Mapping[str, Any], name: str, where: str, default: Any = _NEEDED) -> Any:
    value = data.get(name, default)
    if value is _NEEDED:
        raise ProtocolError("field", f"{where} lacks {name!r}")
    return value


def whole(value: object, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise wrong(where, value, f"a whole number from {low} to {high}")
    return value


def text(value: object, where: str, most: int = 200) -> str:
    if not isinstance(value, str) or not value or len(value) > most or not value.isprintable():
        raise wrong(where, value, f"printable text of 1 to {most} characters")
    return value


def one_of(value: object, where: str, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise wrong(where, value, f"one of {', '.join(known)}")
    return value


def flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(where, value, "true or false")
    return value


def mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    return value


def items(value: object, where: str, least: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        size = f"{len(value)} items" if isinstance(value, list) else clean(repr(value), 80)
        raise ProtocolError("field", f"{where} is {size}; expected a list of {least} to {most}")
    return value
