"""Episodes as a Minari dataset: a folder `NAME-v0` with `data/` in it, as Minari's own tools have them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from raynforce.data.episodes import Episode, Episodes, fitted, joined
from raynforce.envs.describe import flatten_obs
from raynforce.errors import UsageError, summary
from raynforce.spaces import EnvSpec

METADATA = "metadata.json"
AT_ONCE = 131_072  # rows that Arrow reads in one piece; Minari takes each piece for an episode


def root() -> Path:
    """Where Minari looks for a dataset by its id."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def is_minari(path: Path) -> bool:
    return _data(path) is not None


def _data(path: Path) -> Path | None:
    """The folder that has a dataset's metadata."""
    return next((folder for folder in (path, path / "data") if (folder / METADATA).is_file()), None)


class MinariWriter:
    """Writes episodes into a folder, which is there once it is complete."""

    def __init__(self, path: Path, env: EnvSpec, facts: Mapping[str, Any], spaces: Sequence[Any]) -> None:
        """`spaces` are gymnasium's, of observations and actions."""
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.dataset.minari_storage import MinariStorage

        try:
            parse_dataset_id(path.name)
        except (ValueError, TypeError):
            problem = f"out = {str(path)!r}: a Minari dataset is called by letters, digits, - and _, with a version"
            raise UsageError(f"{problem}: such as {path.name}-v0") from None
        path = path.absolute()  # Minari loses its way by relative ones
        self._path, self._unfinished = path, path.with_name(f".{path.name}.tmp")
        self._env, self._spaces = env, spaces
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        self._count = 0
        # Raw arrays instead of JPEG, so that images come back as they were.
        self._storage = MinariStorage.new(
            self._unfinished / "data", *spaces, data_format="parquet", jpeg_encoding=False
        )
        self._size, self._storage.get_size = self._storage.get_size, lambda: 0.0  # else of all files for each episode
        self._about = {"dataset_id": path.name, "description": json.dumps(dict(facts))}

    def write(self, episodes: Episodes) -> None:
        from minari.data_collector.episode_buffer import EpisodeBuffer

        observations, actions = self._spaces
        buffers = []
        for one in episodes.each():
            flags = [np.zeros(len(one.reward), np.bool_) for _ in range(2)]
            flags[0][-1], flags[1][-1] = one.terminated, one.truncated
            buffers.append(
                EpisodeBuffer(
                    id=self._count,
                    observations=_as_space(observations, one.obs),
                    actions=_cast(one.action, actions),
                    rewards=one.reward,
                    terminations=flags[0],
                    truncations=flags[1],
                )
            )
            self._count += 1
        self._storage.update_episodes(buffers)

    def __enter__(self) -> MinariWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None and self._count:
            from importlib.metadata import version

            about = {**self._about, "minari_version": version("minari"), "dataset_size": float(self._size())}
            self._storage.update_metadata(about)
            self._unfinished.rename(self._path)
        else:
            shutil.rmtree(self._unfinished, ignore_errors=True)


def _as_space(space: Any, leaves: Mapping[str, np.ndarray], path: str = "obs") -> Any:
    """Leaves `[n, ...]` in the form of a space: dicts and tuples of arrays, of the space's dtypes."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _as_space(below, leaves, f"{path}/{key}") for key, below in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_as_space(below, leaves, f"{path}/{index}") for index, below in enumerate(space.spaces))
    return _cast(leaves[path], space)


def _cast(column: np.ndarray, space: Any) -> np.ndarray:
    return column.astype(space.dtype, copy=False)


# -- reading -----------------------------------------------------------------------------------------------------------


def require_minari(path: Path, name: str) -> int:
    """Refuse a dataset whose metadata is incomplete, or that is empty; returns how many steps it has."""
    folder = _data(path)
    assert folder is not None
    try:
        about = json.loads((folder / METADATA).read_text())
        steps, kind = int(about["total_steps"]), str(about["data_format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"data {name!r} is no Minari dataset: {folder / METADATA}: {summary(error)}") from None
    if "observation_space" not in about or "action_space" not in about:  # Minari would make its environment
        raise UsageError(f"data {name!r} does not say its spaces in {METADATA}: write it with a newer Minari")
    if kind == "hdf5":
        from importlib.util import find_spec

        if find_spec("h5py") is None:
            raise UsageError(f'data {name!r} is in HDF5, and h5py is not installed: pip install "minari[hdf5]"')
    if not steps:
        raise UsageError(f"data {name!r} is empty: it has no steps")
    return steps


def read_minari(path: Path, env: EnvSpec, name: str) -> Episodes:
    from minari.dataset.minari_storage import MinariStorage

    steps, folder = require_minari(path, name), _data(path)
    what, episodes = f"data {name!r}: ", []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            storage = MinariStorage.read(folder)
            found = list(storage.get_episodes(range(storage.total_episodes)))
        except Exception as error:  # whatever is wrong with its files
            raise UsageError(f"data {name!r} cannot be read by Minari: {summary(error)}") from error
    for one in found:
        obs = {path: np.asarray(value) for path, value in flatten_obs(one["observations"], env.obs).items()}
        obs = {leaf.path: fitted(f"{what}{leaf.path}", obs[leaf.path], leaf, env.env) for leaf in env.obs}
        action = fitted(f"{what}actions", np.asarray(one["actions"]), env.action, env.env)
        reward = np.asarray(one["rewards"], np.float32)
        if not np.isfinite(reward).all():
            raise UsageError(f"{what}rewards are not all finite: leave these episodes out")
        if len(reward):
            terminated = bool(one["terminations"][-1])
            truncated = bool(one["truncations"][-1]) or not terminated
            episodes.append(Episode(obs, action, reward, terminated, truncated))
    if sum(len(one.reward) for one in episodes) != steps:
        problem = f"data {name!r} has episodes of more than {AT_ONCE:,} steps, which Minari takes apart"
        raise UsageError(f"{problem}: record shorter ones, or as Parquet")
    return joined(episodes, env)
