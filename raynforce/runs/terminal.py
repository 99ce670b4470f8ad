"""Lines that fit: into a terminal's columns, or into a log. They end between words; what is typed stays whole."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from typing import Any

LOG = 119  # columns where there is no terminal
TIED = "\xa0"  # a space at which no line is broken
_OPTION = re.compile(r"(?<!\S)(--[a-z-]+) (?=[^\s-])")  # `--set a=b`, `--topology overlap`
_UNIT = re.compile(r"(?<=\d) (?=(?:[µm]?s|min|h|[kMG]?B|%)(?!\w))")  # `12 µs`, `34 %`
_QUOTED = re.compile(r"`[^`]+`")


def columns(stream: Any) -> int:
    """How wide lines may be: as the terminal, or as COLUMNS says; 119 for a pipe or a file."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or LOG
    except (OSError, ValueError, AttributeError):  # no terminal, closed, no stream
        return LOG


def folded(text: str, most: int, head: str = "", further: str | None = None) -> list[str]:
    """`head` and `text` in lines of at most so many columns; those after the first begin with `further`.

    A word that is longer than a line, such as a path, is left to the terminal, which lets it be copied. An option stays
    with its value, and a command in backticks with itself.
    """
    pad = " " * len(head) if further is None else further
    room, width = most - max(len(head), len(pad)), max(most, len(pad) + 30, len(head) + 30)
    lines: list[str] = []
    for part in text.splitlines() or [""]:
        tied = _UNIT.sub(TIED, _OPTION.sub(rf"\1{TIED}", part))
        tied = _QUOTED.sub(lambda found: found[0].replace(" ", TIED) if len(found[0]) <= room else found[0], tied)
        first = pad if lines else head
        wrapper = textwrap.TextWrapper(width, first, pad, break_long_words=False, break_on_hyphens=False)
        lines += [line.replace(TIED, " ") for line in wrapper.wrap(tied)] or [first.rstrip()]
    return lines


def command(text: str, most: int, head: str = "") -> list[str]:
    """A command to type, in one line if it fits; else in several that a shell takes as one."""
    if len(head) + len(text) <= most:
        return [head + text]
    words = " ".join(shlex.quote(word).replace(" ", TIED) for word in shlex.split(text))
    lines = folded(words, most - 2, head, " " * len(head) + "  ")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def shortened(text: str, most: int) -> str:
    """At most so long, without its middle: names of runs differ at their end."""
    if len(text) <= most:
        return text
    head = max(0, most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}" if most > 1 else "…"
