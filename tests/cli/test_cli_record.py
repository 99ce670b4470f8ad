"""`raynforce record` and `train bc --data`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raynforce
from raynforce.cli import main
from raynforce.data.files import read
from raynforce.envs.vector import probe

QUICK = ["--steps", "2048", "--quiet", "--runtime", "inline", "--set", "eval.episodes=2"]
QUICK += ["--set", "eval.final_episodes=0", "--set", "eval.every=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    assert main(["train", "ppo", "CartPole-v1", "--out", str(out), *QUICK]) == 0
    return out


def test_record_and_learn_from_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "mine.parquet"
    capsys.readouterr()
    assert main(["record", str(run), "--episodes", "7", "--out", str(data), "--seed", "1"]) == 0
    told = capsys.readouterr().out
    assert "recorded: 7 episodes and " in told
    assert f"train bc CartPole-v1 --data {data}" in " ".join(told.replace("\\\n", " ").split())
    found = read(str(data), probe("CartPole-v1"))
    assert found.count == 7
    again = tmp_path / "again.parquet"
    assert main(["record", str(run), "--episodes", "7", "--out", str(again), "--seed", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["episodes"], facts["steps"], facts["path"]) == (7, found.steps, str(again))
    assert facts["mean"] == pytest.approx(found.returns().mean())
    assert read(str(again), probe("CartPole-v1")).fingerprint() == found.fingerprint()
    out = tmp_path / "clone"
    assert main(["train", "bc", "CartPole-v1", "--data", str(data), "--out", str(out), *QUICK]) == 0
    assert main(["resume", str(out), "--quiet", "--steps", "4096"]) == 0
    assert raynforce.load(out).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    file = tmp_path / "bc.yaml"
    file.write_text(f"algo: bc\nenv: CartPole-v1\ndata: {data}\n")
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "yaml"), *QUICK]) == 0


def test_greedy_and_sampled_and_random_differ(run: Path, tmp_path: Path) -> None:
    env = probe("CartPole-v1")
    kinds = {"greedy": [], "sampled": ["--sampled"], "random": ["--policy", "random"]}
    found = {}
    for name, words in kinds.items():
        path = tmp_path / f"{name}.parquet"
        assert main(["record", str(run), *words, "--episodes", "5", "--out", str(path), "--seed", "3"]) == 0
        found[name] = read(str(path), env).fingerprint()
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "raynforce.envs.tiny:Catch"])
def test_steps_are_exact_and_the_last_episodes_are_truncated(env: str, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    assert main(["record", env, "--policy", "random", "--steps", "2345", "--out", str(path)]) == 0
    found = read(str(path), probe(env))
    assert found.steps == 2345
    assert (found.terminated | found.truncated).all()


def test_an_env_that_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.demonstrations.LONGEST", 300)
    path = tmp_path / "x.parquet"
    words = ["record", "raynforce.envs.tiny:Endless", "--policy", "random", "--episodes", "3", "--out", str(path)]
    assert main([*words, "--set", "env_args.length=1000000"]) == 0
    found = read(str(path), probe("raynforce.envs.tiny:Endless"))
    assert found.count == 3
    assert found.truncated.all()
    assert (found.length >= 300).all()


def test_a_minari_dataset_by_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", "CartPole-v1", "--policy", "random", "--episodes", "2", "--format", "minari"]) == 0
    assert main(["record", "CartPole-v1", "--policy", "random", "--episodes", "2"]) == 0
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert [name.rpartition("-")[2] for name in names if name.endswith("-v0")] == ["v0"]
    assert [name for name in names if name.endswith(".parquet")]
    for name in names:
        assert read(f"data/{name}", probe("CartPole-v1")).count == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["record", "CartPole-v1"], "is no run: name one, or play an environment at random (--policy random)"),
        (["record", "RUN", "--episodes", "3", "--steps", "9"], "episodes and steps do not go together"),
        (["record", "RUN", "--policy", "mine"], "policy = 'mine' is not one of: random"),
        (["record", "RUN", "--policy", "random", "--sampled"], "sampled is for a run's policy"),
        (["record", "RUN", "--episodes", "0"], "--episodes = '0' must be a whole number from 1 to"),
        (["record", "RUN", "--out", "HERE"], "is there already: give it another name"),
        (["record", "RUN", "--format", "minari", "--out", "mine"], "with a version: such as mine-v0"),
        (["record", "RUN", "--set", "steps=3"], "record takes --set env_args.KEY=VALUE only"),
        (["train", "bc", "CartPole-v1"], "bc learns from recorded episodes, and data is not given: add --data PATH"),
        (["train", "bc", "CartPole-v1", "--data", "nowhere"], "is not there: give a Parquet file"),
        (["train", "bc", "CartPole-v1", "--data", ""], "--data is empty: give it a value"),
        (
            ["train", "ppo", "CartPole-v1", "--data", "x"],
            "is for algorithms that learn from recorded episodes, such as bc",
        ),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    words: list[str],
    line: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main([{"RUN": str(run), "HERE": str(run)}.get(word, word) for word in words]) == 2
    told = capsys.readouterr().err
    assert line in told
    assert len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [{"episodes": "ten"}, {"episodes": 0}, {"steps": 0}, {"steps": 2.5}, {"seed": -1}])
def test_in_python_too_numbers_are_checked(given: dict[str, Any], run: Path, tmp_path: Path) -> None:
    ((name, value),) = given.items()
    with pytest.raises(raynforce.UsageError, match=f"{name} = {value!r} must be a whole number"):
        raynforce.record(run, out=tmp_path / "some.parquet", **given)
    assert not list(tmp_path.iterdir())
    if name != "steps":
        with pytest.raises(raynforce.UsageError, match=f"{name} = {value!r} must be a whole number"):
            raynforce.evaluate(run, **given)


def test_what_to_type_next_has_the_environments_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, env = tmp_path / "nim.parquet", "raynforce.envs.tiny_agents:Nim"
    given = ["--set", "env_args.masked=true", "--set", "env_args.heap=4"]
    assert main(["record", env, "--policy", "random", "--episodes", "4", "--out", str(data), *given]) == 0
    told = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert f"train bc {env} --data {data} {' '.join(given)}" in told
