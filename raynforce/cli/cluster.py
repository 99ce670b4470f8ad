"""`raynforce cluster`: write the files of a cluster, check such a file, ask a cluster how it is."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from raynforce.cli.text import RED, YELLOW, Page, count, paint
from raynforce.errors import UsageError, nearest
from raynforce.runs.terminal import columns, folded

if TYPE_CHECKING:
    from raynforce.ops.cluster.findings import Finding
    from raynforce.ops.cluster.status import Node, Status

ACTIONS = ("init", "check", "status")
COLOURS = {"error": (RED,), "warning": (YELLOW,), "note": ()}


def run(arguments: argparse.Namespace, *, me: str) -> int:
    from raynforce.ops.cluster.options import TARGETS, Options

    action = arguments.action
    if action not in ACTIONS:
        known = "cluster init TARGET [DIR], cluster check FILE, or cluster status"
        raise UsageError(f"unknown action {action!r}{nearest(action, ACTIONS)}: {known}")
    given = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    given = {name: value for name, value in given.items() if value not in (None, False)}
    for option, of in ((dict.fromkeys(given, "init")) | {"crds": "check", "address": "status"}).items():
        if of != action and getattr(arguments, option) is not None:
            raise UsageError(f"--{option.replace('_', '-')} is for cluster {of}: leave it out")
    if action == "init":
        if arguments.target is None:
            raise UsageError(f"which cluster? {me} cluster init {'|'.join(TARGETS)}")
        return _init(arguments.target, arguments.folder, given, as_json=arguments.json)
    if arguments.folder is not None:
        raise UsageError(f"one argument too many: unexpected argument {arguments.folder!r}")
    if action == "check":
        if arguments.target is None:
            raise UsageError(f"which file? {me} cluster check FILE")
        return _check(arguments.target, arguments.crds, as_json=arguments.json)
    if arguments.target is not None:
        raise UsageError(f"cluster status takes no {arguments.target!r}: give --address {arguments.target}")
    return _status(arguments.address or "auto", as_json=arguments.json)


def _init(target: str, folder: str | None, options: dict[str, Any], *, as_json: bool) -> int:
    from raynforce.ops.cluster.writing import init

    written = init(target, folder, **options)
    if as_json:
        print(json.dumps(written._asdict()))
        return 0
    print(f"{written.folder} has {', '.join(written.files)}.")
    for note in written.notes:
        print(*folded(f"note: {note}", columns(sys.stdout), further="  "), sep="\n")
    print("Next:")
    for line in written.next:
        print(f"  {line}")
    return 0


def _check(file: str, crds: str | None, *, as_json: bool) -> int:
    from raynforce.ops.cluster.checking import check

    found = check(file, crds=crds)
    if as_json:
        findings = [finding._asdict() for finding in found.findings]
        print(
            json.dumps(
                {"ok": found.ok, "file": file, "kind": found.kind, "against": found.schema, "findings": findings}
            )
        )
        return 0 if found.ok else 1
    _tell(found.findings)
    errors = sum(finding.level == "error" for finding in found.findings)
    print(
        f"{file} ({found.kind}, against {found.schema}): {count(errors, 'error')}"
        if errors
        else f"{file} is fine ({found.kind}, against {found.schema})"
    )
    return 0 if found.ok else 1


def _tell(findings: list[Finding]) -> None:
    most = columns(sys.stdout)
    for finding in findings:
        line = finding.line if not sys.stdout.isatty() else "\n".join(folded(finding.line, most, further="  "))
        print(paint(line, *COLOURS[finding.level]))


def _status(address: str, *, as_json: bool) -> int:
    from raynforce.ops.cluster.status import status

    found = status(address)
    if as_json:
        facts = asdict(found) | {"ok": found.ok, "total": found.total, "free": found.free}
        facts["nodes"] = [node._asdict() for node in found.nodes]
        facts["findings"] = [finding._asdict() for finding in found.findings]
        print(json.dumps(facts))
        return 0 if found.ok else 1
    page = Page(14)
    token = "with a token" if found.token else "without a token"
    page.row("cluster", f"{found.address}, Ray {found.ray} on Python {found.python}, {token}")
    for node in found.nodes:
        page.row("head" if node.head else "node", _node(node))
    page.row("free", _resources(found.free, found.total))
    page.row("a run gets", _share(found))
    page.row("dashboard", found.dashboard or "none: no jobs can be submitted")
    _tell(found.findings)
    return 0 if found.ok else 1


def _node(node: Node) -> str:
    reached = "out of reach" if node.reach_ms is None else f"{node.reach_ms:.1f} ms away"
    return f"{node.hostname} ({node.address}), {reached}: {_resources(node.free, node.total)}"


def _resources(free: dict[str, float], total: dict[str, float]) -> str:
    parts = [f"{free.get(name, 0.0):g} of {amount:g} {name}" for name, amount in total.items()]
    return ", ".join(parts) or "nothing"


def _share(found: Status) -> str:
    more = "; its autoscaler adds nodes for more" if found.autoscaler else ""
    if not found.samplers:
        return f"no room for a learner and a sampler with a CPU each{more}"
    return f"a learner and up to {count(found.samplers, 'sampler')} with a CPU each{more}"
