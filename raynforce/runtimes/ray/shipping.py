"""Sending the user's modules and this package to the nodes of a cluster."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from raynforce.config import Config
from raynforce.envs.addresses import is_remote
from raynforce.envs.launching import PREFIX, command, is_simulator
from raynforce.errors import UsageError
from raynforce.imports import is_given
from raynforce.runtimes.ray import private
from raynforce.runtimes.ray.state import PACKAGE

LARGEST = 256 << 20  # bytes; Ray takes twice that
NOT_SHIPPED = [".?*", "__pycache__", "*.pyc", "venv", "*.pem", "*.key", "auth_token"]
# What runs leave, wherever they are.
NOT_SHIPPED += ["step_[0-9]*", "best_[0-9]*", "metrics.jsonl", "events.out.tfevents*"]


def shipment(config: Config, stack: ExitStack) -> dict[str, Any]:
    """A runtime environment with this package and the directories that the user's modules live in."""
    return packed(code_roots(config), stack)


def packed(roots: Sequence[Path], stack: ExitStack) -> dict[str, Any]:
    """A runtime environment with this package and these directories; the first becomes the current one."""
    if not roots:  # without a directory of its own, Ray would put the driver's current one first
        roots = [Path(tempfile.mkdtemp(prefix="rnf-"))]
        stack.callback(shutil.rmtree, roots[0], ignore_errors=True)
    for root in roots:
        _require_small(root)
    first, *others = roots
    found = [path for root in others for path in root.iterdir()]
    modules = [path for path in found if path.suffix == ".py" or (path / "__init__.py").exists()]
    return {"working_dir": str(first), "py_modules": [*map(str, [PACKAGE, *modules])], "excludes": NOT_SHIPPED}


def _require_small(root: Path) -> None:
    """Ray packs for minutes before it says that a directory is too large."""
    if (ignored := private.ignored(root)) is None:
        return
    sizes: dict[str, int] = {}  # of what is in it, by name
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not any(fnmatch(name, pattern) for pattern in NOT_SHIPPED)]
        for file in files:
            path = Path(folder, file)
            if any(skip(path) for skip in ignored):
                continue
            top = path.relative_to(root).parts[0]
            sizes[top] = sizes.get(top, 0) + (path.lstat().st_size if path.is_file() else 0)
        if sum(sizes.values()) > LARGEST:
            large = max(sizes, key=lambda name: sizes[name])
            what = f"{large} alone has {sizes[large] >> 20} MB so far"
            problem = f"{root}, where your modules are, holds more than {LARGEST >> 20} MB ({what})"
            fix = f"keep large files elsewhere, name them in {root / '.gitignore'}, or set ray.ship_code=never"
            raise UsageError(f"{problem} and would be sent to the cluster: {fix}")


def code_roots(config: Config) -> list[Path]:
    """Directories from which the user's own modules are imported, found without importing them."""
    return roots_of((config.env, config.algo, config.network.factory or ""))


def roots_of(names: Sequence[str]) -> list[Path]:
    """Of `module:name`s, the directories that the modules are imported from, and of simulators where their files are;
    installed packages have none."""
    installed = [Path(path).resolve() for path in {*sysconfig.get_paths().values(), str(PACKAGE)}]
    roots: dict[Path, None] = {}
    for name in names:
        if is_given(name):  # it travels by itself, but may need its neighbours
            roots |= dict.fromkeys(_neighbours(installed))
            continue
        if is_simulator(name):
            roots |= dict.fromkeys(_of_simulator(name))
            continue
        module, colon, _ = name.partition(":")
        top = module.partition(".")[0]
        spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or importlib.util.find_spec(top) if colon else None
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else [None]
        if places[0] is None:
            continue  # not a module, or one whose import will say what is wrong
        path = Path(places[0]).resolve()
        if not any(path.is_relative_to(place) for place in installed):
            roots[path.parent] = None
    return list(roots)


def _of_simulator(env: str) -> Iterator[Path]:
    """The current directory, if the simulator's command names a file in it: roles start it from there."""
    if is_remote(env):
        return
    command(env)  # says what is wrong with it
    here = Path.cwd().resolve()
    files = [here / word for word in shlex.split(env.removeprefix(PREFIX)) if not os.path.isabs(word)]
    if any(file.is_file() and file.resolve().is_relative_to(here) for file in files):
        yield here


def _neighbours(installed: Sequence[Path]) -> Iterator[Path]:
    """The directory of the user's script, or that a notebook works in, if modules were imported from there."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    root = Path(script).resolve().parent if script else Path.cwd()
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values()) if module is not main]
    found = [path for file in files if file and (path := Path(file).resolve()).is_relative_to(root)]
    if any(not any(path.is_relative_to(place) for place in installed) for path in found):
        yield root
