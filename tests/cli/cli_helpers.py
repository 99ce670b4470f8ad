"""How the tests of the command line call it and read its answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = [
    "run",
    "algo",
    "env",
    "runtime",
    "topology",
    "seed",
    "steps",
    "episodes",
    "updates",
    "seconds",
    "startup_seconds",
    "steps_per_second",
    "return_mean",
    "eval_return",
    "solved_at",
    "solved_steps",
    "restarts",
    "dropped_steps",
    "weights_sha256",
]
PLAIN, SICK = "cli_envs:Plain", "cli_envs:Sick"
TINY = ["--steps", "64", "--envs", "2", "--no-preset", "--quiet", "--set", "sampling.fragment=16"]
TINY += ["--set", "eval.episodes=2", "--set", "eval.final_episodes=2"]
TINY += ["--runtime", "inline", "--topology", "sync"]  # not chosen by how busy this machine is today


@dataclass(frozen=True)
class Answer:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on the last line of stdout; NaN and Infinity are not JSON."""

        def no_constant(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        assert self.out.endswith("\n")
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1], parse_constant=no_constant)
        return found

    def refused(self, code: int, *words: str, after_faults: bool = False) -> None:
        """It failed with this code and one clear line on stderr, which holds these words; faults may come before it."""
        assert self.err.endswith("\n"), self
        *before, line = self.err.splitlines()
        assert bool(before) == after_faults, before
        assert line.startswith("raynforce: ")
        assert len(line) < 600
        for word in words:
            assert word in line
        assert (self.code, "Traceback" in self.out) == (code, False)
        assert "--debug shows where" not in line, "an error that nobody thought of"


def contents(path: Path) -> dict[str, bytes | str]:
    """Everything below a path: to see that nothing was changed."""
    found: dict[str, bytes | str] = {}
    for item in sorted(path.rglob("*")):
        found[str(item.relative_to(path))] = (
            f"-> {item.readlink()}" if item.is_symlink() else item.read_bytes() if item.is_file() else "directory"
        )
    return found
