"""Runs in which something fails for good: they stop with the cause, or go on without it; and bad settings."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import Start, starting
from failing import ALGOS, SMALL, STEPS, is_sound, train
from marks import slow, slowly
from rays import needs
from running import events

import raynforce
from raynforce.cli import main
from raynforce.errors import EnvError, RaynforceError
from raynforce.runs import checkpoint
from raynforce.runtimes.base import RoleDied


def words(env: str, runtime: str = "process", **settings: Any) -> list[str]:
    """The command of a small run in the directory `run`."""
    given = SMALL | ALGOS["ppo"] | settings
    assigned = [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    where = ["--runtime", runtime, "--topology", "sync", "--steps", str(STEPS), "--out", "run", "--quiet"]
    return ["train", "ppo", f"fault_envs:{env}", *where, *assigned]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in a directory that has the environments."""
    shutil.copy(Path(__file__).with_name("fault_envs.py"), tmp_path)
    with starting(tmp_path) as start:
        yield start


# -- hanging from the start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["process", *slowly("ray")])
@pytest.mark.parametrize("what", ["sleep", *slowly("hold the lock")])
def test_a_reset_that_never_returns_is_named(what: str, runtime: str, tmp_path: Path, start: Start) -> None:
    began = time.monotonic()
    settings = {"env_args.what": what, "env_args.where": "reset", "faults.start_seconds": 2}
    started = start(*words("Sudden", runtime, **settings))
    assert started.ended() == 1, started.said
    line = started.said.splitlines()[-1]
    assert line.startswith("raynforce: "), started.said
    for word in ("sampler", "has not started within 2 s", "'fault_envs:Sudden'", "reset", "faults.start_seconds"):
        assert word in line
    assert time.monotonic() - began < (20 if runtime == "process" else 40)
    assert not (tmp_path / "run").exists()
    started.nothing_left()


@slow
@pytest.mark.parametrize("what", ["sleep", "hold the lock"])
def test_a_make_that_never_returns_is_named(what: str, tmp_path: Path) -> None:
    settings = {"env_args.what": what, "env_args.where": "make", "env_args.spared": os.getpid()}
    settings |= {"faults.start_seconds": 2}
    with pytest.raises(RoleDied, match=r"has not started within 2 s: env 'fault_envs:Sudden' .* faults.start_seconds"):
        train(tmp_path / "run", "Sudden", runtime="process", topology="sync", settings=settings)
    assert not (tmp_path / "run").exists()


# -- failing for good ---------------------------------------------------------------------------------------


def doomed(tmp_path: Path, quorum: float, **more: Any) -> dict[str, Any]:
    settings = {"env_args.flag": str(tmp_path / "flag"), "faults.restarts": 2, "faults.quorum": quorum}
    return settings | {f"env_args.{name}": value for name, value in more.items()}


@pytest.mark.parametrize(
    ("runtime", "topology", "where"),
    [
        ("inline", "sync", "step"),
        *slowly(
            ("process", "sync", "step"),
            ("process", "sync", "reset"),
            ("process", "overlap", "step"),
            ("process", "async", "step"),
            ("ray", "sync", "step"),
            ("ray", "async", "reset"),
        ),
    ],
)
def test_a_sampler_that_cannot_go_on_is_given_up(
    runtime: str, topology: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    settings = doomed(tmp_path, 0.5, where=where, at=100 if where == "step" else 4)
    run = train(tmp_path / "run", "Doomed", runtime=runtime, topology=topology, settings=settings)
    faults = [fault for fault in events(run.path, "fault") if "attempt" in fault]
    seen = [(fault["role"], fault["action"], fault["attempt"]) for fault in faults]
    expected = [("sampler 0", "restarted", 1), ("sampler 0", "restarted", 2), ("sampler 0", "given up", 3)]
    assert seen == (expected if topology != "async" else expected[: len(seen)])  # the other one may be done before
    assert seen
    is_sound(run)
    assert "the licence has run out" in faults[0]["cause"]
    assert run.result.stopped == "steps done"
    assert run.result.steps >= STEPS


def test_too_few_samplers_stop_the_run_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word for word in words("Doomed", "inline", **doomed(tmp_path, 1.0)) if word != "--quiet"]) == 1
    said = "".join(capsys.readouterr())
    assert "run: run" in said.splitlines()
    line = said.splitlines()[-1]
    assert line.startswith("raynforce: sampler 0 failed 3 times in a row"), said
    for word in ("faults.restarts", "1 of 2 samplers are left", "'fault_envs:Doomed'", "seed", "step", "licence"):
        assert word in line
    assert "Traceback" not in said
    run = tmp_path / "run"
    last = [fault for fault in events(run, "fault") if "attempt" in fault][-1]
    assert last["action"] in ("given up", "stopped")
    assert {"env", "seed", "step"} <= set(last)
    assert any("in _come_to" in fault.get("trace", "") for fault in events(run, "fault"))
    assert "the licence has run out" in events(run, "failed")[-1]["reason"]


def test_an_update_that_was_under_way_when_the_run_failed_is_counted(tmp_path: Path) -> None:
    """What is saved then is one moment: the learner's steps are the run's."""
    settings = doomed(tmp_path, 1.0) | {"faults.restarts": 0}
    with pytest.raises(RaynforceError, match="the licence has run out"):
        train(tmp_path / "run", "Doomed", runtime="inline", topology="overlap", settings=settings)
    saved = checkpoint.load(tmp_path / "run" / "last")
    assert saved["run"]["steps"] == saved["learner"]["steps"] > 0
    assert saved["run"]["ledger"]["trained"] == saved["learner"]["steps"]
    assert saved["policy"]["version"]["number"] == saved["learner"]["number"]


@slow
def test_a_wrong_space_is_not_tried_again(tmp_path: Path) -> None:
    settings = {"env_args.spared": os.getpid(), "env_args.tries": str(tmp_path / "tries")}
    with pytest.raises(EnvError, match=r"sampler . *: env 'fault_envs:Misfit' broke .*\(3,\)"):
        train(tmp_path / "run", "Misfit", runtime="process", topology="sync", settings=settings)
    assert max(Counter((tmp_path / "tries").read_text().split()).values()) == 1
    assert len((tmp_path / "tries").read_text().split()) <= 2
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_imported_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "import os\n"
        "from fault_envs import CartPole\n"
        f"if os.getpid() != {os.getpid()}:\n"
        f"    open({str(tmp_path / 'tries')!r}, 'a').write('x')\n"
        "    import no_such_simulator\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with pytest.raises(RaynforceError, match="no_such_simulator"):
        raynforce.train(
            "elsewhere:CartPole",
            steps=STEPS,
            out=tmp_path / "run",
            runtime="process",
            topology="sync",
            settings=SMALL | ALGOS["ppo"],
            progress="quiet",
        )
    assert (tmp_path / "tries").read_text() in ("x", "xx"), "once in each sampler"
    assert time.monotonic() - began < 20
    assert not (tmp_path / "run").exists()


@slow
def test_a_learner_that_raises_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(RaynforceError, match=r"learner: network.factory's forward raised ZeroDivisionError"):
        train(tmp_path / "run", runtime="process", topology="sync", settings={"network.factory": f"{__name__}:broken"})


def broken(leaves: Any, heads: Mapping[str, int]) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleDict({k: torch.nn.Linear(4, n) for k, n in heads.items()})

        def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
            if torch.is_grad_enabled():
                raise ZeroDivisionError
            return {k: head(obs) for k, head in self.heads.items()}

    return Net()


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "faults.restarts=-1",
        "faults.restarts=1.5",
        "faults.quorum=0",
        "faults.quorum=2",
        "faults.quorum=nan",
        "faults.quorum=.nan",
        "faults.sample_seconds=0",
        "faults.sample_seconds=soon",
        "faults.start_seconds=-5",
        "faults.learn_seconds=.inf",
        "faults.absent_seconds=20",
        "faults.memory_mb=0",
        "faults.memory_mb=lots",
        "faults.retries=3",
    ],
)
def test_settings_that_make_no_sense(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "CartPole-v1", "--set", setting]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("raynforce: ")
    assert setting.partition("=")[0] in line
    assert (out, list(tmp_path.iterdir())) == ("", [])
