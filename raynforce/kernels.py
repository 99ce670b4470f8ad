"""Which kernels numpy and torch compute with: those of AVX2, so that all x86-64 processors that have it round alike.

Libraries choose their kernels by the processor, and each kernel rounds in its own way: with AVX-512, sums are taken in
another order than with AVX2. What they may choose from is read from the environment when they are loaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from typing import Any, Literal, NamedTuple

Kernels = Literal["portable", "native"]
SAME = ("haswell", "zen")  # names of one set of kernels in OpenBLAS
WIDE = ("X86_V4", "AVX512_ICL", "AVX512_SPR")  # numpy's names of what goes beyond AVX2; it warns of those it has not
WIDE_BEFORE = ("AVX512F", "AVX512CD", "AVX512_SKX", "AVX512_CLX", "AVX512_CNL", "AVX512_ICL", "AVX512_SPR")
_set: dict[str, bool] = {}  # variables that this process has set, and whether numpy or torch was loaded by then


class KernelKind(NamedTuple):
    cpu: str  # the processor's model
    kernels: str  # `avx2`, or `native`: whatever libraries choose for it


def pin(kernels: Kernels = "portable") -> None:
    """Hold libraries that are not loaded yet, here and in children, to AVX2, unless the user did; `native` lets go."""
    if kernels == "native":
        for name in _set:
            os.environ.pop(name, None)
        _set.clear()
        return
    for name, value in pins().items():
        if name not in os.environ:
            os.environ[name] = value
            _set[name] = "numpy" in sys.modules or "torch" in sys.modules


@functools.cache
def pins() -> dict[str, str]:
    import platform  # here: `--help` does without

    if platform.machine() != "x86_64" or not {"avx2", "fma"} <= set(cpu("flags").split()):
        return {}
    return {
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": " ".join(WIDE if _numpy_version() >= (2, 4) else WIDE_BEFORE),
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",  # on Intel's processors alone; what we learn with does without MKL
    }


def kind() -> KernelKind:
    """Of this process: `avx2` if numpy and torch are held to it, or have nothing else to choose."""
    needed = {name: value for name, value in pins().items() if name != "MKL_CBWR"}
    held = bool(needed) and all(os.environ.get(name) == value for name, value in needed.items())
    if held and any(_set.values()):  # it may have come too late: then what they do is looked at
        torch: Any = sys.modules.get("torch")
        held = _numpy_is_held() and (torch is None or torch.backends.cpu.get_cpu_capability() == "AVX2")
    return KernelKind(cpu_model(), "avx2" if held else "native")


def _numpy_is_held() -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return True
    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
    used = [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]
    if any(name.startswith(("AVX512", "X86_V4")) for name in used):
        return False
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    found = [lib.get("architecture", "") for lib in threadpool_info() if lib["internal_api"] == "openblas"]
    return all(name.lower() in SAME for name in found)


def cpu_model() -> str:
    import platform

    return cpu("model name") or platform.processor() or platform.machine()


def cpu(field: str) -> str:
    """A field of the first processor in `/proc/cpuinfo`; empty where there is none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:  # not all of it: the kernel takes its time over each processor
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def _numpy_version() -> tuple[int, ...]:
    """Read, not imported: numpy because it is to be loaded later, `importlib.metadata` because it takes 15 ms."""
    from importlib.util import find_spec

    spec = find_spec("numpy")
    if spec is None or spec.origin is None:
        return ()
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        found = re.search(r"""version\s*=\s*["'](\d+)\.(\d+)""", file.read())
    return () if found is None else tuple(map(int, found.groups()))
