"""Every algorithm on every runtime and topology that takes it: killed with `kill -9`, resumed, equal to a quiet run.

Where a topology's checkpoints are exact and its order does not depend on the machine, weights are equal to the bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from every_cell import CASES, STEPS, train
from failing import is_sound
from marks import slowly
from rays import Head

import raynforce
from raynforce.errors import UsageError
from raynforce.topologies import BUILT_IN, topology

RUNTIMES = ("inline", "process", "ray")
STREAM = ("sync", "overlap", "async", "central")
TAKEN: dict[str, tuple[str, ...]] = {  # which topologies take what
    "ppo": STREAM,
    "ppo-lstm": STREAM,
    "ppo-masked": STREAM,
    "ppo-gsde": ("sync", "overlap", "async"),
    "ppo-rnd": STREAM,
    "ppo-agents": STREAM,
    "ppo-turns": STREAM,
    "mappo": STREAM,
    "ppo-policies": ("sync", "overlap"),
    "ppo-self-play": ("sync", "overlap"),
    "ppo-agents-lstm": STREAM,
    "ppo-turns-gru": STREAM,
    "impala": STREAM,
    "impala-gru": STREAM,
    "a3c": ("sync", "shared-agent"),
    "a3c-lstm": ("sync", "shared-agent"),
    "dqn": ("sync", "overlap", "async", "replay", "shared-agent"),
    "dqn-lstm": ("sync", "overlap", "async", "replay", "shared-agent"),
    "dqn-masked": ("sync", "overlap", "async", "replay", "shared-agent"),
    "dqn-agents": ("sync", "overlap", "async", "replay", "shared-agent"),
    "dqn-agents-lstm": ("sync", "overlap", "async", "replay", "shared-agent"),
    "dqn-policies": ("sync", "overlap"),
    "sac": ("sync", "overlap", "async", "replay"),
    "sac-gsde": ("sync", "overlap", "async", "replay"),
    "sac-discrete": ("sync", "overlap", "async", "replay"),
    "td3": ("sync", "overlap", "async", "replay"),
}
CELLS = [(case, how, runtime) for case, hows in TAKEN.items() for how in hows for runtime in RUNTIMES]
CI = [("td3", "overlap", "process")]


def ordered(how: str, runtime: str) -> bool:
    """Whether equal seeds give equal runs."""
    return runtime == "inline" or how in ("sync", "overlap")


@cache
def quiet(base: Path, case: str, how: str) -> raynforce.Run:
    return train(case, how, "inline", str(base / f"{case}-{how}"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


@pytest.mark.parametrize(("case", "how", "runtime"), [*CI, *slowly(*(cell for cell in CELLS if cell not in CI))])
def test_a_killed_and_resumed_run_is_the_one_that_was_never_stopped(
    case: str, how: str, runtime: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment: dict[str, str] = {}
    cell: dict[str, Any] = {"case": case, "topology": how, "runtime": runtime, "out": str(tmp_path / "run")}
    if runtime == "ray":
        head: Head = request.getfixturevalue("head")
        cell["address"] = head.address
        environment = {"HOME": str(head.folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token}
    killed = start(cell | {"kill": True}, environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = start(cell | {"resume": True}, environment)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["steps"] >= STEPS
    if ordered(how, runtime) and topology(how).exact:
        assert result["sha"] == quiet(base, case, how).result.weights_sha256
    elif ordered(how, runtime):
        again = train(case, how, runtime, str(tmp_path / "again"))
        assert again.result.weights_sha256 == quiet(base, case, how).result.weights_sha256
        is_sound(again)


def start(cell: dict[str, Any], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(Path(__file__).with_name("every_cell.py")), json.dumps(cell)]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_every_other_topology_refuses_it_in_one_line(case: str, tmp_path: Path) -> None:
    for how in BUILT_IN:
        if how not in TAKEN[case]:
            with pytest.raises(UsageError) as refused:
                train(case, how, "inline", str(tmp_path / "run"))
            assert "\n" not in str(refused.value)
            assert not (tmp_path / "run").exists()
