"""Who is promoted, by a test with known answers; what a registry keeps, and what is left of it after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exported import SEEN, acting
from gymnasium import spaces

import raynforce
from raynforce.cli import main
from raynforce.envs.describe import describe
from raynforce.errors import UsageError
from raynforce.ops import registry as module
from raynforce.ops.comparing import compare
from raynforce.ops.registry import Registry, promote, rollback
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.spec import Linear, NetworkSpec, Tower
from raynforce.runs import checkpoint, lock


def test_the_test_of_means_has_known_answers() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0, 1, 100)
    assert not compare(a, a).better
    same = compare(np.full(20, 500.0), np.full(20, 500.0))  # a ceiling that both have reached
    assert (same.better, same.p, same.difference, same.low, same.high) == (False, 1.0, 0.0, 0.0, 0.0)
    sure = compare(np.full(20, 9.0), np.full(20, 8.0))
    assert sure.better
    assert sure.p < 1e-3
    assert not compare(np.full(20, 8.0), np.full(20, 9.0)).better
    assert not compare(a + 0.05, a).better  # far within the spread
    big = compare(a + 0.7, rng.normal(0, 1, 100))
    assert big.better
    assert big.low > 0
    assert compare(np.array([1.0, 2.0]), np.array([0.0, 0.5])).p > 0.05  # two episodes are not enough
    assert compare(a, a + 0.1) == compare(a, a + 0.1)


def test_few_are_promoted_by_chance() -> None:
    rng = np.random.default_rng(1)
    lucky = [compare(rng.normal(0, 1, 30), rng.normal(0, 5, 60)).better for _ in range(40)]  # of unequal spread
    assert sum(lucky) <= 5


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A policy that always does the same."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, action: int, tag: float = 0.0) -> Path:
        spec = acting(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), "ppo", {})
        env = describe("pipe_envs:Choice", spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
        network = NetworkSpec(spec.network.inputs, (Tower("policy", (Linear(2),)),))
        spec = replace(spec, env=env, network=network, heads={"policy": 2})
        bias = [0, 1 + tag] if action else [1 + tag, 0]
        version = PolicyVersion(1, np.array([0, 0, 0, 0, *bias], np.float32))
        content = {"acting": spec.to_json(), "version": version.state()}
        checkpoint.save(tmp_path / name, {"policy": content}, step=1)
        return tmp_path / name

    return make


def test_better_is_promoted_worse_is_not_and_history_says_by_how_much(
    policy: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first = promote(policy("weak", 0), "registry")
    assert (first.promoted, first.reason, first.entry.number) == (True, "the first", 1)
    assert main(["promote", str(policy("strong", 1)), "--to", "registry", "--episodes", "30", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = told["comparison"]
    assert figures["difference"] == pytest.approx(5, abs=0.3)
    assert figures["low"] < 5 < figures["high"] or abs(figures["low"] - 5) < 0.3
    assert (figures["p"] < 1e-3, figures["episodes"], figures["champion_episodes"]) == (True, 30, 30)
    assert (told["entry"]["over"], told["entry"]["name"]) == (1, "strong")
    assert main(["promote", str(policy("equal", 1, tag=0.5)), "--to", "registry", "--episodes", "30"]) == 1
    assert "not promoted: not better than strong" in capsys.readouterr().out
    assert promote("strong", "registry").reason == "strong is current already"

    found = raynforce.registry("registry")
    assert [entry.name for entry in found.entries] == ["weak", "strong"]
    assert found.entries[1].comparison == figures
    assert found.entries[1].checkpoint_sha256 == checkpoint.manifest(Path("strong"))["sha256"]
    assert raynforce.load("registry").act(np.zeros(2, np.float32)) == 1
    assert raynforce.evaluate("registry", episodes=2).returns.mean() > 4
    assert main(["registry", "registry"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("*   2  strong")
    assert "over 1 by +" in " ".join(lines)


def test_rollback_adds_an_entry_and_goes_further_back_each_time(policy: Callable[..., Path]) -> None:
    for name, tag in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        promote(policy(name, 0, tag), "registry", force=True)
    before = (Path("registry") / "checkpoints" / "step_000000000003" / "manifest.json").read_bytes()
    assert [rollback("registry").name, rollback("registry").name] == ["b", "a"]
    with pytest.raises(UsageError, match="nothing to go back to"):
        rollback("registry")
    again = rollback("registry", "c")
    assert (again.number, again.event, again.of, again.over) == (6, "rolled back", 3, 5)
    assert raynforce.load("registry").version.params[4] == np.float32(1.3)
    with pytest.raises(UsageError, match="c is current already"):
        rollback("registry", 3)
    with pytest.raises(UsageError, match=r"no entry 'x'.*it has"):
        rollback("registry", "x")
    assert len(Registry("registry").entries) == 6
    assert (Path("registry") / "checkpoints" / "step_000000000003" / "manifest.json").read_bytes() == before


def test_a_kill_between_an_entry_and_its_link_is_put_right(
    policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(policy("a", 0), "registry")
    with monkeypatch.context() as patch:

        def killed(run: object, path: Path) -> None:
            if path.name.endswith("2"):
                raise KeyboardInterrupt

        patch.setattr(module, "_point", killed)
        with pytest.raises(KeyboardInterrupt):
            promote(policy("b", 1), "registry", force=True)
    assert raynforce.load("registry").act(np.zeros(2, np.float32)) == 0  # what is served is whole, and the older one
    assert promote("b", "registry").reason == "b is current already"
    assert raynforce.load("registry").act(np.zeros(2, np.float32)) == 1
    assert rollback("registry").name == "a"
    assert [e.name for e in Registry("registry").entries] == ["a", "b", "a"]


def test_a_registry_at_a_url(policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SETTLE", 0.01)
    where = "memory://bucket/registry"
    promote(policy("a", 0), where)
    promote(policy("b", 1), where, episodes=20)
    assert raynforce.load(where).act(np.zeros(2, np.float32)) == 1
    assert rollback(where).name == "a"
    assert raynforce.load(where).act(np.zeros(2, np.float32)) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path.cwd() / "elsewhere"))  # as another machine sees it
    assert [entry.name for entry in Registry(where).entries] == ["a", "b", "a"]
    promote(policy("c", 1, 0.5), where, force=True)
    assert [entry.number for entry in Registry(where).entries] == [1, 2, 3, 4]


def test_what_is_refused_changes_nothing(
    policy: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(policy("a", 0), "registry")
    other = acting(SEEN["vector"], spaces.Discrete(2), "ppo", {})
    version = PolicyVersion(1, other.network.initial(np.random.default_rng(0)))
    checkpoint.save(tmp_path / "other", {"policy": {"acting": other.to_json(), "version": version.state()}}, step=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    policy("b", 1)
    for words, says in {
        ("promote", "other", "--to", "registry", "--force"): "other observations than those in registry",
        ("promote", "none", "--to", "registry"): "there is no run or checkpoint at none",
        ("promote", "b", "--to", "full"): "is no registry",
        ("promote", "b", "--to", "a"): "is a run, not a registry",
        ("promote", "b", "--to", "full/mine.txt"): "is a file",
        ("promote", "b", "--to", "registry", "--level", "2"): "--level = '2' must be a number from 1e-06 to 0.5",
        ("promote", "b", "--to", "registry", "--episodes", "1"): "--episodes",
        ("promote", "b", "--to", "registry", "--name", "7"): "is no name of an entry",
        ("rollback", "nowhere"): "there is no registry at nowhere",
        ("registry", "full"): "is no registry",
        ("registry", "nowhere"): "makes one",
        ("resume", "registry"): "is a registry of policies, not a run",
    }.items():
        capsys.readouterr()
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert says in error, error
        assert len(error.splitlines()) == 1
    assert [entry.name for entry in Registry("registry").entries] == ["a"]
    assert not (tmp_path / "nowhere").exists()


def test_one_writer_at_a_time(policy: Callable[..., Path]) -> None:
    promote(policy("a", 0), "registry")
    with lock.locked(Path("registry")), pytest.raises(UsageError, match="is in use by"):
        promote(policy("b", 1), "registry", force=True)


def test_runs_do_not_list_it_and_show_does(policy: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    promote(policy("a", 0), "registry")
    capsys.readouterr()
    assert main(["runs", ".", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert main(["show", "registry"]) == 0
    assert "the first" in capsys.readouterr().out
