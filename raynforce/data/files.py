"""Recorded episodes by name: a Parquet file, a folder of them, a Minari dataset's folder, or its id."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from raynforce.data.episodes import Episodes, require_allowed
from raynforce.data.minari_files import is_minari, read_minari, require_minari, root
from raynforce.data.parquet import read_parquet, require_parquet
from raynforce.errors import UsageError
from raynforce.spaces import EnvSpec

EXTRA = 'pip install "raynforce[data]"'


def absolute(name: str) -> str:
    """A path from anywhere; the id of a Minari dataset stays as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() or not is_minari(root() / name) else name


def find(name: str) -> tuple[Path, list[Path]]:
    """Where it is, and its files if it is Parquet; one line if there is nothing, or what reads it is missing."""
    path = Path(name).expanduser()
    if not path.exists() and not path.is_absolute() and is_minari(root() / name):
        path = root() / name
    if not path.exists():
        raise UsageError(f"data {name!r} is not there: give a Parquet file, a folder, or a Minari dataset on this disk")
    if is_minari(path):
        require_installed("minari", f"data {name!r} is a Minari dataset")
        return path, []
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*.parquet") if file.is_file())
    if not files:
        raise UsageError(f"data {name!r} has no *.parquet in it, and is no Minari dataset: give another folder")
    require_installed("pyarrow", f"data {name!r} is Parquet")
    return path, files


def require_data(name: str) -> int:
    """Refuse what is no data, has not all columns, or is empty; returns its steps. Values are looked at by `read`."""
    path, files = find(name)
    return require_parquet(files, name) if files else require_minari(path, name)


def read(name: str, env: EnvSpec) -> Episodes:
    """All of it, if it fits the environment."""
    path, files = find(name)
    found = read_parquet(files, env, name) if files else read_minari(path, env, name)
    require_allowed(found, env, f"data {name!r}")
    return found


def require_installed(package: str, why: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"{why}, and {package} is not installed: {EXTRA}")
