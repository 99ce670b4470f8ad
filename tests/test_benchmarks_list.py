"""benchmarks/README.md lists every benchmark once, and `python -m benchmarks` runs what it says."""

from __future__ import annotations

import ast
import re
from collections import Counter

from test_readme import ROOT

FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text()
NO_BENCHMARKS = {"__main__", "parameter_server"}  # all of them; a side to compare with


def benchmarks() -> set[str]:
    """Modules that are commands, but for those that a benchmark starts as one of its sides."""
    commands = {path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    return {name for name in commands - NO_BENCHMARKS if not name.endswith("_work")}


def rows() -> list[str]:
    """The commands of the table, each with its options; `…` is the one above."""
    found: list[str] = []
    for command in re.findall(r"^\| `([^`]+)` \|", README, flags=re.MULTILINE):
        before = found[-1].partition(" --")[0] if found else ""
        found.append(command.replace("…", before))
    return found


def test_every_benchmark_is_listed_once() -> None:
    listed = rows()
    assert [row for row, count in Counter(listed).items() if count > 1] == []
    names = {row.split()[2].removeprefix("benchmarks.") for row in listed}
    assert names - {"benchmarks"} == benchmarks()


def test_all_of_them_is_all_but_those_it_names() -> None:
    (said,) = re.findall(r"^\| `python -m benchmarks` \| (.*?) \|", README, flags=re.MULTILINE)
    tree = ast.parse((FOLDER / "__main__.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "benchmarks"]
    run = {alias.name for node in imported for alias in node.names}
    assert benchmarks() - run == set(re.findall(r"`(\w+)`", said))
    assert run <= benchmarks()
