"""`raynforce doctor` without an environment: is this machine fit to train on?"""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata

from raynforce.envs.doctor import Finding, Report
from raynforce.memory import available_bytes
from raynforce.runtimes.placing import cores
from raynforce.runtimes.ray.starting import SHARED_MEMORY, SMALLEST_STORE, shared_memory_bytes

NEEDED = ("numpy", "torch", "gymnasium", "pyyaml", "safetensors", "rich", "ray")


def check_machine() -> Report:
    """Look at Python, the packages, cores, memory, disk and accelerators."""
    python = Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    found = Finding("ok", "cores", f"{cores()} usable of {os.cpu_count()}")
    return Report("this machine", [python, *_packages(), found, _memory(), _shared_memory(), _disk(), _accelerator()])


def _packages() -> list[Finding]:
    found = []
    for name in NEEDED:
        try:
            found.append(Finding("ok", name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Finding("error", name, f"not installed: pip install {name}"))
    return found


def _memory() -> Finding:
    free = available_bytes()
    if free is None:
        return Finding("warning", "memory", "unknown on this system")
    if free < 1e9:
        return Finding("warning", "memory", f"{free / 1e9:.2f} GB free; training wants 1 GB or more")
    return Finding("ok", "memory", f"{free / 1e9:.1f} GB free")


def _shared_memory() -> Finding:
    """Ray keeps its object store there; the other runtimes need none."""
    free = shared_memory_bytes()
    if free is None:
        return Finding("ok", "shared memory", f"no {SHARED_MEMORY}; Ray uses files instead")
    if free < SMALLEST_STORE:
        wanted = f"--runtime ray wants {SMALLEST_STORE / 1e9:g} GB or more"
        return Finding("warning", "shared memory", f"{free / 1e9:.2f} GB free in {SHARED_MEMORY}; {wanted}")
    return Finding("ok", "shared memory", f"{free / 1e9:.1f} GB free in {SHARED_MEMORY}")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 1e9
    if not os.access(".", os.W_OK):
        return Finding("warning", "disk", "this directory cannot be written: give runs another with --out")
    return Finding("ok" if free > 1 else "warning", "disk", f"{free:.1f} GB free in {os.getcwd()}")


def _accelerator() -> Finding:
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    return Finding("ok", "accelerator", names or "none; learner.device=auto uses the CPU")
