"""With what and where something was made: versions, processor, host."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib import metadata
from pathlib import Path


@functools.cache
def provenance() -> dict[str, str]:
    """Versions of what numbers depend on, the processor's model and the host's name; imports none of them."""
    from raynforce import __version__

    versions = {"raynforce": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {**versions, "cpu": cpu_model(), "host": platform.node()}


def cpu_model() -> str:
    """The processor's model: equal results are promised on one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
