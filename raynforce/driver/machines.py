"""The kinds of processor that a run's roles live on: written to its manifests, and told where they may round apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from raynforce.kernels import KernelKind
from raynforce.runs.directory import RunDirectory
from raynforce.runs.provenance import provenance
from raynforce.runtimes.base import Runtime

VERSIONS = ("torch", "numpy", "libc")  # what results depend on to the last bit, beside config and processor


class Machines:
    """CPU models of the roles; `portable` if the network can be held to AVX2: convolutions and own modules cannot."""

    def __init__(self, run: RunDirectory, runtime: Runtime, say: Callable[[str], None], *, portable: bool) -> None:
        self._run, self._runtime, self._say, self._portable = run, runtime, say, portable
        self._known: Set[KernelKind] = frozenset()

    def look(self) -> None:
        kinds = self._runtime.kinds()
        if not self._portable:
            kinds = {each._replace(kernels="native") for each in kinds}
        if kinds == self._known:
            return
        self._known = kinds
        models = sorted({each.cpu for each in kinds})
        common = "avx2" if all(each.kernels == "avx2" for each in kinds) else "native"
        self._run.made_on = {"cpu": ", ".join(models), "kernels": common} if kinds else {}
        if len(models) > 1 and common != "avx2":
            where = f"{len(models)} kinds of CPU ({', '.join(models)}), and not all are held to AVX2"
            same = "the run equals another only if each role is on the same kind there"
            self._say(f"note: roles live on {where}: {same}")

    def compare(self, manifest: Mapping[str, Any]) -> None:
        for note in machine_note(manifest, {**provenance(), **self._run.made_on}):
            self._say(f"note: {note}")


def machine_note(manifest: Mapping[str, Any], here: Mapping[str, str]) -> Iterator[str]:
    before = {"kernels": "native", **manifest}  # before there was a choice
    names = ["kernels", *VERSIONS]
    if not before["kernels"] == here.get("kernels") == "avx2":
        names.append("cpu")
    known = [name for name in names if name in before and name in here]
    changed = [f"{name} {before[name]} → {here[name]}" for name in known if before[name] != here[name]]
    if changed:
        yield f"another machine or release: {', '.join(changed)}; equal results are promised on one of each"
