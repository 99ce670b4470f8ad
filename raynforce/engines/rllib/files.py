"""RLlib's own files as a part of our checkpoints, under their manifest and hashes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raynforce.errors import CheckpointError
from raynforce.trees import Tree


def pack(folder: Path) -> Tree:
    """All files of a folder, by name and content."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    content = {str(index): np.fromfile(path, np.uint8) for index, path in enumerate(files.values())}
    return {"names": list(files), "files": content}


def unpack(tree: Tree, folder: Path) -> None:
    """Write them again, which the manifest of our checkpoint has vouched for."""
    for index, name in enumerate(tree["names"]):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"a file of RLlib's checkpoint is called {name!r}, which leads out of it")
        path.parent.mkdir(parents=True, exist_ok=True)
        tree["files"][str(index)].tofile(path)
