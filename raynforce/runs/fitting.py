"""Whether what was saved fits what it is loaded into: a table of all that differs, expected and found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raynforce.errors import CheckpointError

MOST_ROWS = 20
LONGEST = 48  # characters of a value


class Difference(NamedTuple):
    what: str
    found: str
    expected: str


HEAD = Difference("what", "found in the checkpoint", "expected here")


def require_fit(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    checkpoint: object,
    *,
    settings: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    hint: str = "",
) -> None:
    """Refuse a checkpoint whose facts differ, with a table; differing `settings` explain it and come first."""
    rows = list(differences(_as_read(found), _as_read(expected)))
    if not rows:
        return
    if settings is not None:
        rows = list(dict.fromkeys([*differences(*map(_as_read, settings)), *rows]))
    lines = [f"the checkpoint in {checkpoint} does not fit this config:", *table(rows), *([hint] if hint else [])]
    raise CheckpointError("\n".join(lines))


def differences(found: Any, expected: Any, what: str = "") -> Iterator[Difference]:
    """Every place where two trees of JSON differ; lists of unequal length differ as a whole."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in dict.fromkeys([*expected, *found]):
            name = f"{what}.{key}" if what else str(key)
            if key not in found or key not in expected:
                yield Difference(name, *(_text(tree[key]) if key in tree else "–" for tree in (found, expected)))
            else:
                yield from differences(found[key], expected[key], name)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (old, new) in enumerate(zip(found, expected, strict=True)):
            yield from differences(old, new, f"{what}[{index}]")
    elif found != expected:
        yield Difference(what, _text(found), _text(expected))


def _as_read(tree: Any) -> Any:
    """As JSON gives it back: with lists for tuples."""
    return json.loads(json.dumps(tree, default=str))


def table(rows: Sequence[Difference]) -> Iterator[str]:
    """The differences in aligned columns; of very many, the first."""
    shown = [HEAD, *rows[:MOST_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(HEAD))]
    for row in shown:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
    if len(rows) > MOST_ROWS:
        yield f"  … and {len(rows) - MOST_ROWS} more"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split()) or '""'
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-(LONGEST // 2 - 1) :]}"
