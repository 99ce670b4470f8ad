"""YAML with comments: values are written by rule and read back, so that no value can make a file invalid."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

WIDTH = 100


class Note(str):
    """A comment: a key of a mapping, without a value, above the keys that follow it."""


def text(*documents: Any, above: str = "") -> str:
    """One file with these documents, below a comment."""
    head = "".join(f"{line}\n" for line in _comment(above, "")) + "\n" * bool(above)
    parts = ["\n".join(_lines(document, "")) + "\n" for document in documents]
    written = head + "---\n".join(parts)
    assert list(yaml.safe_load_all(written)) == [plain(document) for document in documents], written
    return written


def plain(value: Any) -> Any:
    """Without comments."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not isinstance(key, Note)}
    return [plain(item) for item in value] if isinstance(value, list) else value


def _lines(value: Any, pad: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, Note):
                yield from _comment(key, pad)
                continue
            first, *more = _item(item, pad)
            yield f"{pad}{_scalar(key)}:{first}"
            yield from more
        return
    for item in value:
        if isinstance(item, dict) and item and not isinstance(next(iter(item)), Note):
            first, *more = _lines(item, f"{pad}  ")
            yield f"{pad}- {first.lstrip()}"
            yield from more
        else:
            first, *more = _item(item, pad, nested=True)
            yield f"{pad}-{first}"
            yield from more


def _item(value: Any, pad: str, *, nested: bool = False) -> Iterator[str]:
    """What follows a colon or a dash, and the lines below."""
    if isinstance(value, (dict, list)) and plain(value):
        yield ""
        yield from _lines(value, pad if isinstance(value, list) and not nested else f"{pad}  ")
    elif isinstance(value, str) and "\n" in value and value == textwrap.dedent(value) and value[-1:] == "\n":
        yield " |"
        yield from (f"{pad}  {line}" if line else "" for line in value[:-1].split("\n"))
    else:
        yield f" {_scalar(plain(value))}"


def _scalar(value: Any) -> str:
    quoted = '"' if isinstance(value, str) and "\n" in value else None
    written = yaml.safe_dump(value, default_flow_style=True, default_style=quoted, width=10**6, allow_unicode=True)
    return written.removesuffix("\n").removesuffix("...").strip()


def _comment(said: str, pad: str) -> Iterator[str]:
    for line in said.splitlines():
        for part in textwrap.wrap(line, WIDTH - len(pad)) or [""]:
            yield f"{pad}# {part}".rstrip()
