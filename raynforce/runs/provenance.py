"""With what and where something was made: versions, processor, host."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from importlib import metadata

from raynforce.kernels import cpu_model


@functools.cache
def provenance() -> dict[str, str]:
    """Versions of what numbers depend on, the processor's model and the host's name; imports none of them."""
    from raynforce import __version__

    versions = {"raynforce": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with contextlib.suppress(ValueError, OSError, AttributeError):  # it has sin and exp, and not every system has it
        versions["libc"] = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return {**versions, "cpu": cpu_model(), "host": platform.node()}
