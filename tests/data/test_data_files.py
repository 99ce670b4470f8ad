"""Recorded episodes in files: what is written is read, to the bit; what does not fit has its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recordings import ENVS, assert_equal, episodes_of

from raynforce.data.episodes import Episodes, to_recorded
from raynforce.data.files import absolute, read, require_data
from raynforce.data.minari_files import MinariWriter
from raynforce.data.parquet import NEEDED, ParquetWriter
from raynforce.envs.make import make
from raynforce.errors import UsageError
from raynforce.policies.acting import action_map
from raynforce.spaces import EnvSpec


def written(path: Path, spec: EnvSpec, *several: Episodes) -> Path:
    if path.suffix == ".parquet":
        with ParquetWriter(path, spec, {}) as writer:
            for episodes in several:
                writer.write(episodes)
        return path
    env = make(spec.env, spec.args)
    with MinariWriter(path, spec, {}, (env.observation_space, env.action_space)) as made:
        for episodes in several:
            made.write(episodes)
    env.close()
    return path


@pytest.mark.parametrize("out", ["data.parquet", "mine-v0"])
@pytest.mark.parametrize("name", ENVS)
def test_what_is_written_is_read_to_the_bit(name: str, out: str, tmp_path: Path) -> None:
    spec, episodes = episodes_of(name)
    path = written(tmp_path / out, spec, episodes)
    assert require_data(str(path)) == episodes.steps
    assert_equal(read(str(path), spec), episodes)
    assert [each.name for each in tmp_path.iterdir()] == [out]  # nothing else is left


@pytest.mark.parametrize("out", ["data.parquet", "mine-v0"])
def test_a_writer_appends_and_leaves_nothing_when_it_fails(out: str, tmp_path: Path) -> None:
    spec, episodes = episodes_of("numbers")
    both = read(str(written(tmp_path / out, spec, episodes, episodes)), spec)
    assert both.steps == 2 * episodes.steps
    assert both.length.tolist() == 2 * episodes.length.tolist()
    with pytest.raises((KeyError, pa.ArrowInvalid)):
        written(tmp_path / f"other-{out}", spec, episodes, replace(episodes, obs={}))
    assert [each.name for each in tmp_path.iterdir()] == [out]


def test_minari_itself_reads_what_is_written_and_finds_it_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import minari

    spec, episodes = episodes_of("numbers")
    written(tmp_path / "mine-v0", spec, episodes)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    dataset = minari.load_dataset("mine-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (episodes.count, episodes.steps)
    for theirs, ours in zip(dataset.iterate_episodes(), episodes.each(), strict=True):
        np.testing.assert_array_equal(theirs.observations, ours.obs["obs"])
        np.testing.assert_array_equal(theirs.actions, ours.action)
        assert theirs.terminations.tolist()[-1] == ours.terminated
    assert_equal(read("mine-v0", spec), episodes)
    assert absolute("mine-v0") == "mine-v0"


def test_a_file_of_others_is_read_by_ids_and_where_steps_are_missing(tmp_path: Path) -> None:
    """As RLlib writes it: lists, no `t`, episodes whose rows are mixed, float64, and a gap in one of them."""
    spec, _ = episodes_of("numbers")
    seen = np.arange(5 * 4, dtype=np.float64).reshape(5, 4)
    later = seen + 4.0
    later[1] += 100.0  # what comes after is not there
    table = {
        "eps_id": ["b", "a", "a", "b", "a"],
        "obs": [seen[i].tolist() for i in (0, 0, 1, 1, 3)],
        "new_obs": [later[i].tolist() for i in (0, 0, 1, 1, 3)],
        "actions": [0, 1, 0, 1, 1],
        "rewards": [1.0, 2.0, 3.0, 4.0, 5.0],
        "terminateds": [False, False, False, True, False],
        "truncateds": [False] * 5,
    }
    pq.write_table(pa.table(table), tmp_path / "theirs.parquet")
    found = read(str(tmp_path), spec)
    assert found.length.tolist() == [2, 2, 1]  # b; a until the gap; what comes after it
    assert found.reward.tolist() == [1.0, 4.0, 2.0, 3.0, 5.0]
    assert found.terminated.tolist() == [True, False, False]
    assert found.truncated.tolist() == [False, True, True]
    assert found.obs["obs"].dtype == np.float32


def test_actions_are_those_of_the_env_and_come_back_as_fragments_have_them() -> None:
    for name in ENVS:
        spec, episodes = episodes_of(name)
        there = to_recorded(spec.action, episodes.action)
        np.testing.assert_allclose(action_map(spec.action)(there), episodes.action, rtol=1e-6)
        assert there.dtype == (np.float32 if spec.action.kind == "box" else np.int64)


def _changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    columns = dict(zip(*_columns(path), strict=True))
    change(columns)
    pq.write_table(pa.table(columns), path)
    return path


def _columns(path: Path) -> tuple[list[str], list[Any]]:
    table = pq.read_table(path)
    return table.column_names, table.columns


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_column_has_its_line(name: str, tmp_path: Path) -> None:
    spec, episodes = episodes_of("numbers")
    path = _changed(written(tmp_path / "x.parquet", spec, episodes), lambda columns: columns.pop(name))
    with pytest.raises(UsageError, match=f"has no column '{name}': needed are eps_id, obs"):
        require_data(str(path))


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (lambda c: c.update(obs=[[1.0, 2.0]] * 8), r"obs has shape \(2,\) and does not fit env 'CartPole-v1'"),
    "dtype": (lambda c: c.update(actions=[0.5] * 8), "actions is double|actions is float64 and does not fit"),
    "range": (lambda c: c.update(actions=[7] * 8), "actions has 7 and does not fit env 'CartPole-v1'.*discrete 2"),
    "finite": (lambda c: c.update(obs=[[np.nan] * 4] * 8), "obs has numbers that are not finite"),
    "ragged": (lambda c: c.update(obs=[[1.0]] + [[1.0] * 4] * 7), "obs has cells of different lengths"),
    "null": (lambda c: c.update(rewards=[None] + [1.0] * 7), "rewards has empty cells"),
    "bytes": (lambda c: c.update(obs=[b"\x80\x04K\x01."] * 8), "obs is packed bytes, which may run code"),
    "pairs": (lambda c: c.update(rewards=[[1.0, 2.0]] * 8), "rewards has 2 numbers in each row; it must have one"),
    "flag": (lambda c: c.update(terminateds=[0.0] * 7 + [7.0]), "terminateds has 7.0; allowed are true and false"),
    "no id": (lambda c: c.update(eps_id=["0"] * 7 + [None]), "eps_id has empty cells"),
    "ids": (lambda c: c.update(eps_id=[[1]] * 8), "eps_id is list<.*>, not text or numbers"),
    "text": (lambda c: c.update(obs=["a"] * 8), "obs is string, not numbers"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_values_that_do_not_fit_have_their_line(wrong: str, tmp_path: Path) -> None:
    spec, episodes = episodes_of("numbers")
    change, line = WRONG[wrong]
    path = _changed(written(tmp_path / "x.parquet", spec, episodes), change)
    with pytest.raises(UsageError, match=line) as caught:
        read(str(path), spec)
    assert "\n" not in str(caught.value)


def test_what_is_no_data_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "notes.parquet").write_text("these are no episodes")
    (tmp_path / "folder").mkdir()
    spec, episodes = episodes_of("numbers")
    empty = _changed(
        written(tmp_path / "empty.parquet", spec, episodes),
        lambda columns: columns.update({name: column[:0] for name, column in columns.items()}),
    )
    bare = written(tmp_path / "bare-v0", spec, episodes)
    about = json.loads((bare / "data" / "metadata.json").read_text())
    (bare / "data" / "metadata.json").write_text(json.dumps(about | {"total_steps": 0}))
    for path, line in {
        "nowhere.parquet": "is not there: give a Parquet file, a folder, or a Minari dataset",
        "notes.parquet": "is no Parquet file",
        "folder": "has no .*parquet in it",
        empty.name: "is empty: it has no rows",
        bare.name: "is empty: it has no steps",
    }.items():
        with pytest.raises(UsageError, match=line):
            require_data(str(tmp_path / path))
    spec, _ = episodes_of("continuous")
    (bare / "data" / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match="does not fit env 'Pendulum-v1'"):
        read(str(bare), spec)


def test_a_minari_dataset_is_called_with_a_version(tmp_path: Path) -> None:
    spec, episodes = episodes_of("numbers")
    with pytest.raises(UsageError, match="such as mine-v0"):
        written(tmp_path / "mine", spec, episodes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("env", ["recorded_envs:InInfo", "recorded_envs:InDict"])
def test_masks_are_recorded_and_kept_to(env: str, tmp_path: Path) -> None:
    """At random among what is allowed; an action that its own mask forbids is refused."""
    import raynforce
    from raynforce.envs.vector import probe
    from raynforce.spaces import MASK

    path = tmp_path / "x.parquet"
    raynforce.record(env, policy="random", episodes=20, out=path, seed=0)
    spec = probe(env)
    found = read(str(path), spec)
    assert spec.masked
    assert found.obs[MASK].shape == (found.steps + found.count, 3)
    assert set(found.action.tolist()) == {0, 1, 2}
    given: Any = {"data": path, "steps": 2048, "progress": "quiet", "runtime": "inline"}
    run = raynforce.train(env, "bc", out=tmp_path / "run", settings={"eval.final_episodes": 0}, **given)
    assert run.result.steps == 2048
    wrong = replace(found, action=(found.action + 1) % 3)
    with pytest.raises(UsageError, match="has actions that its own action_mask forbids"):
        read(str(written(tmp_path / "wrong.parquet", spec, wrong)), spec)
    if env.endswith("InInfo"):
        with pytest.raises(UsageError, match="has no place for action masks that come with info"):
            raynforce.record(env, policy="random", episodes=2, out=tmp_path / "x-v0", format="minari")


def test_a_folder_of_files_keeps_their_episodes_apart(tmp_path: Path) -> None:
    """Each of ours counts its episodes from 0; an id of others may go on in the next file."""
    spec, episodes = episodes_of("numbers")
    for name in ("one", "two"):
        written(tmp_path / "ours" / f"{name}.parquet", spec, episodes)
    found = read(str(tmp_path / "ours"), spec)
    assert found.length.tolist() == 2 * episodes.length.tolist()
    names, columns = _columns(tmp_path / "ours" / "one.parquet")
    (tmp_path / "theirs").mkdir()
    for part, rows in enumerate((slice(0, 2), slice(2, None))):
        table = pa.table(dict(zip(names, (column[rows] for column in columns), strict=True)))
        pq.write_table(table, tmp_path / "theirs" / f"{part}.parquet")
    assert_equal(read(str(tmp_path / "theirs"), spec), episodes)


@pytest.mark.parametrize("name", ENVS)
def test_one_row_is_an_episode(name: str, tmp_path: Path) -> None:
    spec, episodes = episodes_of(name, (1,))
    assert_equal(read(str(written(tmp_path / "x.parquet", spec, episodes)), spec), episodes)
