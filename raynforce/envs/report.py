"""What a doctor has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raynforce.envs.cost import Cost
from raynforce.spaces import EnvSpec

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    level: Level
    title: str
    detail: str
    fix: str = ""  # what to do about it


@dataclass
class Report:
    env: str
    findings: list[Finding] = field(default_factory=list)
    spec: EnvSpec | None = None  # what it takes and gives, once that is known
    cost: Cost | None = None  # of its steps, one environment at a time
    native: bool = False  # whether it has a vector implementation of its own
    steps: int = 0  # of random play that were tried

    @property
    def ok(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    def add(self, level: Level, title: str, detail: str, fix: str = "") -> None:
        """Note a finding; the same title is noted once, however often it happens."""
        if all(finding.title != title for finding in self.findings):
            self.findings.append(Finding(level, title, detail, fix))
