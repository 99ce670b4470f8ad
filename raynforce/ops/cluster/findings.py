"""What a check has found: what is wrong, and what to do, in one line each."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    level: Literal["error", "warning", "note"]
    what: str
    fix: str

    @property
    def line(self) -> str:
        return f"{self.level}: {self.what}: {self.fix}"
