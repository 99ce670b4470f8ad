"""What a doctor has found, for a person or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from raynforce.envs.checkup import Finding, Report
from raynforce.runs.terminal import columns, command, folded


def tell(report: Report, how: Sequence[str], *, as_json: bool) -> int:
    if as_json:
        found = [{"level": f.level, "title": f.title, "detail": f.detail, "fix": f.fix} for f in report.findings]
        facts = {"ok": report.ok, "findings": found} | ({"steps": report.steps} if report.steps else {})
        print(json.dumps(facts | ({"how_to_run": list(how)} if how else {})))
        return 0 if report.ok else 1
    most = columns(sys.stdout)
    for finding in report.findings:
        print(*_finding(finding, most), sep="\n")
    if how:
        print("\nhow to run it:")
        for line in how:  # a word and a sentence each, or what to type
            row = command if line[:9].strip() in ("or", "type") else folded
            print(*row(line[9:], most, f"  {line[:9]}"), sep="\n")
    warnings = sum(finding.level == "warning" for finding in report.findings)
    told = f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    print(f"\nready to train{told}" if report.ok else "\nfix the errors above, then ask the doctor again")
    return 0 if report.ok else 1


def _finding(finding: Finding, most: int) -> Iterator[str]:
    """The title, what was seen, and what to do: one idea a line."""
    mark = f"{finding.level:<7}  "
    pad = " " * len(mark)
    ideas = finding.detail.split("; ") if finding.detail else []
    if ideas and (finding.level == "ok" or len(f"{mark}{finding.title}: {finding.detail}") <= most):
        ideas = [f"{finding.title}: {finding.detail}"]
    else:
        ideas = [f"{finding.title}:" if ideas else finding.title, *ideas]
    ideas += [f"fix: {finding.fix}" if finding.level != "ok" else finding.fix] if finding.fix else []
    for index, idea in enumerate(ideas):
        yield from folded(idea, most, pad if index else mark, f"{pad}  " if index else pad)
