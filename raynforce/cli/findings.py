"""What a doctor has found, for a person or as JSON."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence

from raynforce.cli.text import TIED, say, width
from raynforce.envs.report import Finding, Report

COLUMNS = 80  # at most, unless a word alone is longer
MARKS = {"ok": "ok       ", "warning": "warning  ", "error": "error    "}


def tell(report: Report, how: Sequence[str], *, as_json: bool) -> int:
    """Print it; 0 if all is well, 1 if not."""
    if as_json:
        found = [{"level": f.level, "title": f.title, "detail": f.detail, "fix": f.fix} for f in report.findings]
        facts = {"ok": report.ok, "findings": found} | ({"steps": report.steps} if report.steps else {})
        print(json.dumps(facts | ({"how_to_run": list(how)} if how else {})))
        return 0 if report.ok else 1
    columns = min(width(), COLUMNS)
    for finding in report.findings:
        for line in _finding(finding, columns):
            say(line)
    if how:
        say("\nhow to run it:")
        for row in how:
            for line in _row(row, columns):
                say(line)
    warnings = sum(finding.level == "warning" for finding in report.findings)
    told = f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    say(f"\nready to train{told}" if report.ok else "\nfix the errors above, then ask the doctor again")
    return 0 if report.ok else 1


def _finding(finding: Finding, columns: int) -> Iterator[str]:
    """The title, what was seen, and what to do: one idea a line."""
    mark, pad = MARKS[finding.level], " " * len(MARKS["ok"])
    ideas = finding.detail.split("; ") if finding.detail else []
    if ideas and (finding.level == "ok" or len(f"{mark}{finding.title}: {finding.detail}") <= columns):
        ideas = [f"{finding.title}: {finding.detail}"]
    else:
        ideas = [f"{finding.title}:" if ideas else finding.title, *ideas]
    ideas += [f"fix: {finding.fix}" if finding.level != "ok" else finding.fix] if finding.fix else []
    for index, idea in enumerate(ideas):
        yield from _folded(idea, columns, mark if index == 0 else pad, pad if index == 0 else f"{pad}  ")


def _row(row: str, columns: int) -> Iterator[str]:
    """A row of advice; commands, which are to be copied, go on in the next line as a shell has it."""
    name, text = row[:9], row[9:]
    tied = re.sub(r"(?<=\s)(--[a-z-]+) ", rf"\1{TIED}", text)  # an option stays with its value
    lines = [line.replace(TIED, " ") for line in _folded(tied, columns - 2, f"  {name}", " " * 11)]
    if name.strip() in ("or", "type"):
        lines = [f"{line} \\" for line in lines[:-1]] + lines[-1:]
    yield from lines


def _folded(text: str, columns: int, head: str, pad: str) -> list[str]:
    how = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, columns, initial_indent=head, subsequent_indent=pad, **how)  # type: ignore[arg-type]
