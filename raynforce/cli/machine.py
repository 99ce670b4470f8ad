"""`raynforce doctor` without an environment: is this machine fit to train on?"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata

from raynforce.envs.doctor import Finding, Report
from raynforce.memory import available_bytes
from raynforce.runtimes.placing import cores
from raynforce.runtimes.ray.starting import SHARED_MEMORY, SMALLEST_STORE, shared_memory_bytes

NEEDED = ("numpy", "torch", "gymnasium", "pyyaml", "safetensors", "rich", "ray")


def check_machine() -> Report:
    """Look at Python, the packages, cores, memory, disk and accelerators."""
    return Report("this machine", list(_findings()))


def _findings() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in NEEDED:
        try:
            yield Finding("ok", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("error", name, f"not installed: pip install {name}")
    yield Finding("ok", "cores", f"{cores()} usable of {os.cpu_count()}")

    free = available_bytes()
    if free is None:
        yield Finding("warning", "memory", "unknown on this system")
    elif free < 1e9:
        yield Finding("warning", "memory", f"{free / 1e9:.2f} GB free; training wants 1 GB or more")
    else:
        yield Finding("ok", "memory", f"{free / 1e9:.1f} GB free")

    shared = shared_memory_bytes()  # Ray keeps its object store there; the other runtimes need none
    if shared is None:
        yield Finding("ok", "shared memory", f"no {SHARED_MEMORY}; Ray uses files instead")
    elif shared < SMALLEST_STORE:
        wanted = f"--runtime ray wants {SMALLEST_STORE / 1e9:g} GB or more"
        yield Finding("warning", "shared memory", f"{shared / 1e9:.2f} GB free in {SHARED_MEMORY}; {wanted}")
    else:
        yield Finding("ok", "shared memory", f"{shared / 1e9:.1f} GB free in {SHARED_MEMORY}")

    room = shutil.disk_usage(".").free / 1e9
    if os.access(".", os.W_OK):
        yield Finding("ok" if room > 1 else "warning", "disk", f"{room:.1f} GB free in {os.getcwd()}")
    else:
        yield Finding("warning", "disk", "this directory cannot be written: give runs another with --out")

    import torch

    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    yield Finding("ok", "accelerator", names or "none; learner.device=auto uses the CPU")
