"""`raynforce doctor` without an environment: is this machine fit to train on?"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from typing import Literal

from raynforce.envs.doctor import Finding, Report

NEEDED = ("numpy", "torch", "gymnasium", "pyyaml", "safetensors", "rich", "ray")


def check_machine() -> Report:
    """Look at Python, the packages, cores, memory, disk and accelerators."""
    return Report(
        "this machine", [_python(), *_packages(), _cores(), _memory(), _shared_memory(), _disk(), _accelerator()]
    )


def _python() -> Finding:
    fine = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.platform()}"
    return Finding("ok" if fine else "error", "python", detail if fine else f"{detail}; 3.11 or newer is needed")


def _packages() -> list[Finding]:
    found = []
    for name in NEEDED:
        try:
            found.append(Finding("ok", name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Finding("error", name, f"not installed: pip install {name}"))
    return found


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("ok", "cores", f"{allowed} usable of {os.cpu_count()}")


def _memory() -> Finding:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (ValueError, OSError):
        return Finding("warning", "memory", "unknown on this system")
    level: Literal["ok", "warning"] = "ok" if free > 1 else "warning"
    return Finding(level, "memory", f"{free:.1f} GB free" + ("" if level == "ok" else "; training wants 1 GB or more"))


def _shared_memory() -> Finding:
    """Ray keeps its object store there; the other runtimes need none."""
    try:
        free = shutil.disk_usage("/dev/shm").free / 1e9
    except OSError:
        return Finding("ok", "shared memory", "no /dev/shm; Ray uses files instead")
    if free < 0.2:
        return Finding(
            "warning", "shared memory", f"{free:.2f} GB free in /dev/shm; --runtime ray wants 0.2 GB or more"
        )
    return Finding("ok", "shared memory", f"{free:.1f} GB free in /dev/shm")


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
