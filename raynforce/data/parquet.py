"""Episodes as Parquet: a row is a step, in the columns that RLlib's offline data has. Packed objects are not read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from raynforce.data.episodes import Episodes, fitted
from raynforce.errors import UsageError
from raynforce.spaces import MASK, ActionSpec, EnvSpec, ObsLeaf

NEEDED = ("eps_id", "obs", "new_obs", "actions", "rewards", "terminateds", "truncateds")
OWN = b"raynforce"  # the key of metadata in files that were written here
Nested = dict[str, Any]


class ParquetWriter:
    """Writes episodes into one file, which is there once it is complete."""

    def __init__(self, path: Path, env: EnvSpec, facts: Mapping[str, Any]) -> None:
        self._path, self._unfinished = path, path.with_name(f".{path.name}.tmp")
        self._env, self._facts = env, facts
        self._file: Any = None
        self._count = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, episodes: Episodes) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = _table(episodes, self._env, self._count)
        self._count += episodes.count
        if self._file is None:
            schema = table.schema.with_metadata({OWN: json.dumps(self._facts)})
            self._file = pq.ParquetWriter(self._unfinished, schema, compression="zstd")
        self._file.write_table(pa.table(table.columns, schema=self._file.schema))

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if kind is None and self._file is not None:
            self._unfinished.rename(self._path)
        else:
            self._unfinished.unlink(missing_ok=True)


def _table(episodes: Episodes, env: EnvSpec, first: int) -> Any:
    import pyarrow as pa

    count = episodes.count
    last = np.cumsum(episodes.length + 1) - 1  # [E] where the last observations are
    acted = np.ones(episodes.steps + count, np.bool_)
    acted[last] = False
    after = np.ones(episodes.steps + count, np.bool_)
    after[last - episodes.length] = False
    ends = np.cumsum(episodes.length) - 1
    done = {name: np.zeros(episodes.steps, np.bool_) for name in ("terminated", "truncated")}
    for name, column in done.items():
        column[ends] = getattr(episodes, name)
    number = np.repeat(np.arange(count), episodes.length)
    columns = {
        "eps_id": pa.array([str(first + e) for e in range(count)]).take(pa.array(number)),
        "t": pa.array(np.arange(episodes.steps) - np.repeat(episodes.starts, episodes.length)),
        "obs": _nested({path: column[acted] for path, column in episodes.obs.items()}),
        "actions": _array(episodes.action),
        "rewards": pa.array(episodes.reward),
        "terminateds": pa.array(done["terminated"]),
        "truncateds": pa.array(done["truncated"]),
        "new_obs": _nested({path: column[after] for path, column in episodes.obs.items()}),
    }
    if _beside(env):  # a mask from `info` is no part of such an observation
        columns |= {
            "action_mask": _array(episodes.obs[MASK][acted]),
            "new_action_mask": _array(episodes.obs[MASK][after]),
        }
    return pa.table(columns)


def _beside(env: EnvSpec) -> bool:
    """Whether masks of allowed actions come beside an observation that is one array."""
    return {leaf.path for leaf in env.obs} == {"obs", MASK}


def _nested(leaves: Mapping[str, np.ndarray]) -> Any:
    """`obs` as it is; `obs/a`, `obs/b/c` as a struct."""
    if "obs" in leaves:
        return _array(leaves["obs"])
    import pyarrow as pa

    tree: Nested = {}
    for path, column in leaves.items():
        *parents, name = path.split("/")[1:]
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = _array(column)

    def struct(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return pa.StructArray.from_arrays([struct(below) for below in node.values()], names=list(node))

    return struct(tree)


def _array(column: np.ndarray) -> Any:
    """Numbers as they are, vectors as lists of one size, and what has more dimensions as Arrow's tensors."""
    import pyarrow as pa

    column = np.ascontiguousarray(column)
    if column.ndim == 1:
        return pa.array(column)
    if column.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), column.shape[1])
    return pa.FixedShapeTensorArray.from_numpy_ndarray(column)


# -- reading -----------------------------------------------------------------------------------------------------------


def require_parquet(files: Sequence[Path], name: str) -> int:
    """Refuse files that are no Parquet, lack a column, or have no rows; returns how many rows there are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 0
    for file in files:
        try:
            found = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as error:
            why = str(error).partition("\n")[0].rstrip(".")
            raise UsageError(f"data {str(file)!r} is no Parquet file: {why[:120]}") from None
        with found:
            names = found.schema_arrow.names
            if lacking := [column for column in NEEDED if column not in names]:
                has = ", ".join(names[:12])
                problem = f"data {str(file)!r} has no column {lacking[0]!r}"
                raise UsageError(f"{problem}: needed are {', '.join(NEEDED)}, and it has {has} (docs/data.md)")
            rows += found.metadata.num_rows
    if not rows:
        raise UsageError(f"data {name!r} is empty: it has no rows")
    return rows


def read_parquet(files: Sequence[Path], env: EnvSpec, name: str) -> Episodes:
    """All rows of these files; an episode ends where its id changes, where it is done, or where steps are missing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    require_parquet(files, name)
    tables = [pq.ParquetFile(file).read() for file in files]
    rows = sum(len(table) for table in tables)
    what = f"data {name!r}: "

    def joined(column: str) -> Any:
        if any(column not in table.column_names for table in tables):
            raise UsageError(f"{what}has no column {column!r}, and the env says which actions are allowed")
        return pa.chunked_array([chunk for table in tables for chunk in table[column].chunks]).combine_chunks()

    timed = all("t" in table.column_names for table in tables)
    column = {name: joined(name) for name in (*NEEDED, *(("t",) if timed else ()))}

    ids = _ids(what, column["eps_id"], tables)
    order = np.lexsort((_plain(what, "t", column["t"]), ids)) if "t" in column else np.argsort(ids, kind="stable")
    ordered = np.array_equal(order, np.arange(rows))

    def leaf_of(name: str, array: Any, leaf: ObsLeaf | ActionSpec) -> np.ndarray:
        found = fitted(f"{what}{name}", _cells(f"{what}{name}", array, tuple(leaf.shape)), leaf, env.env)
        return found if ordered else found[order]

    def shown(prefix: str) -> dict[str, np.ndarray]:
        found = {}
        for leaf in env.obs:
            masks = leaf.path == MASK and _beside(env)
            array = joined(f"{prefix}action_mask") if masks else _leaf(what, column[f"{prefix}obs"], leaf)
            found[leaf.path] = leaf_of(f"{prefix}{leaf.path}", array, leaf)
        return found

    obs, later = shown(""), shown("new_")
    action = leaf_of("actions", column["actions"], env.action)
    reward = _plain(what, "rewards", column["rewards"])[order].astype(np.float32)
    terminated, truncated = (_flags(what, name, column[name])[order] for name in ("terminateds", "truncateds"))
    if not np.isfinite(reward).all():
        raise UsageError(f"{what}rewards are not all finite: leave these episodes out")

    ids, broken = ids[order], np.zeros(rows - 1, np.bool_)
    for path, now in obs.items():
        broken |= (later[path][:-1] != now[1:]).reshape(rows - 1, math.prod(now.shape[1:])).any(1)
    ends = np.append((ids[1:] != ids[:-1]) | broken, True) | terminated | truncated
    (at,) = np.nonzero(ends)
    length = np.diff(at, prepend=-1)
    places = at + 1  # a last observation comes behind the step that led to it
    return Episodes(
        {path: np.insert(column, places, later[path][at], axis=0) for path, column in obs.items()},
        action,
        reward,
        length.astype(np.int64),
        terminated[at],
        truncated[at] | ~terminated[at],
    )


def _ids(what: str, array: Any, tables: Sequence[Any]) -> np.ndarray:
    """A number for each episode. Ids of files that we wrote count from 0 in each; those of others may go on in the
    next file."""
    from pyarrow import types

    if array.null_count or types.is_nested(array.type):
        found = "has empty cells" if array.null_count else f"is {array.type}, not text or numbers"
        raise UsageError(f"{what}eps_id {found}")
    own = [1 + i if OWN in (table.schema.metadata or {}) else 0 for i, table in enumerate(tables)]
    ids: np.ndarray = array.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return ids + (ids.max() + 1) * np.repeat(own, [len(table) for table in tables])


def _flags(what: str, name: str, array: Any) -> np.ndarray:
    found = _plain(what, name, array)
    if not np.isin(found, (0, 1)).all():
        raise UsageError(f"{what}{name} has {found[~np.isin(found, (0, 1))][0]}; allowed are true and false")
    return found.astype(np.bool_)


def _leaf(what: str, array: Any, leaf: ObsLeaf) -> Any:
    """The Arrow array of one leaf of the observation."""
    import pyarrow as pa

    for key in leaf.path.split("/")[1:]:
        if not pa.types.is_struct(array.type) or array.type.get_field_index(key) < 0:
            has = ", ".join(f.name for f in array.type) if pa.types.is_struct(array.type) else str(array.type)
            raise UsageError(f"{what}obs has no {leaf.path.removeprefix('obs/')!r}, which the env shows: it has {has}")
        array = array.field(key)
    return array


def _plain(what: str, name: str, array: Any) -> np.ndarray:
    found = _cells(f"{what}{name}", array, ())
    if found.ndim > 1:
        raise UsageError(f"{what}{name} has {found.shape[1]} numbers in each row; it must have one")
    return found


def _cells(what: str, array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Arrow's cells as one array `[N, *shape]`, or `[N, n]` if that is not what they hold."""
    import pyarrow as pa
    from pyarrow import types

    rows = len(array)
    if isinstance(array, pa.ExtensionArray):  # Arrow's tensors, and Ray's
        array = array.storage
    if types.is_struct(array.type) and array.type.get_field_index("data") >= 0:  # Ray's tensors of several shapes
        array = array.field("data")
    if types.is_binary(array.type) or types.is_large_binary(array.type):
        fix = "write it with output_compress_columns=[]"
        raise UsageError(f"{what} is packed bytes, which may run code and are never read: {fix}")
    while types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        if array.null_count or len(array.value_lengths().unique()) > 1:
            raise UsageError(f"{what} has cells of different lengths, or empty ones")
        array = array.flatten()
    if array.null_count:
        raise UsageError(f"{what} has empty cells")
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise UsageError(f"{what} is {array.type}, not numbers")
    flat: np.ndarray = array.to_numpy(zero_copy_only=False)
    return flat.reshape(rows, *shape) if flat.size == rows * math.prod(shape) else flat.reshape(rows, -1)
