"""`cluster status` against a Ray that was started by hand: what is there, what a run gets, what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rays import Head

import raynforce
from raynforce.cli import main
from raynforce.errors import UsageError
from raynforce.ops import cluster
from raynforce.runtimes.ray.state import environment

module = importlib.import_module("raynforce.ops.cluster.status")  # the function of that name hides it
ROOT = Path(raynforce.__file__).parents[1]


def with_token(head: Head) -> dict[str, str | None]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token}


def test_a_cluster_in_plain_words(head: Head, no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    with environment(with_token(head)):
        assert main(["cluster", "status", "--address", head.address]) == 0
    out = capsys.readouterr().out
    assert f"{head.address}, Ray " in out
    assert "with a token" in out
    assert "4 of 4 CPU, 1 of 1 simulator" in out
    assert "a learner and up to 3 samplers with a CPU each" in out
    assert "dashboard     " in out


def test_the_same_as_json_and_from_python(head: Head, no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    with environment(with_token(head)):
        assert main(["cluster", "status", "--address", head.address, "--json"]) == 0
        found = raynforce.cluster.status(head.address)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["total"] == found.total == {"CPU": 4.0, "simulator": 1.0}
    assert (facts["ok"], facts["token"], facts["autoscaler"], facts["samplers"]) == (True, True, False, 3)
    (node,) = facts["nodes"]
    assert node["head"]
    assert 0 < node["reach_ms"] < 3000
    assert facts["findings"] == []


@pytest.mark.parametrize(
    ("mode", "token", "said"),
    [
        ("token", "wrong" * 8, "the token here is not the cluster's"),
        (None, None, "it wants a token"),
        ("token", None, "RAY_AUTH_MODE=token is set, but there is no token here"),
    ],
)
def test_without_the_token_there_is_one_line(
    mode: str | None, token: str | None, said: str, head: Head, no_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with environment({"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}):
        assert main(["cluster", "status", "--address", head.address]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray at 127.0.0.1:1: Connection refused"),
        ("nonsense", "--address 'nonsense' is not an address"),
        ("ray://127.0.0.1:10001", "Ray Client"),
        ("http://127.0.0.1:8265", "is a dashboard's.* give HOST:PORT of the cluster's head"),
    ],
)
def test_no_cluster_there_is_one_line(address: str, said: str, no_ray: None) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        cluster.status(address)
    assert "start a Ray for this run" not in str(raised.value)


def test_what_is_wrong_is_said_with_the_fix() -> None:
    node = module.Node("10.0.0.2", "far", False, {"CPU": 4.0}, {"CPU": 1.0}, None)
    slow = module.Node("10.0.0.3", "slow", False, {"CPU": 4.0}, {"CPU": 1.0}, 80.0)
    waiting = [{"resources": {"CPU": 1.0}, "count": 3}]
    found = module.Status("a:1", "2.9.0", "3.9.1", False, False, "0.0.0.0:8265", [node, slow], waiting, 0)
    lines = [finding.line for finding in module._findings(found, ["no quota"])]
    starts = [
        "error: the cluster has Ray 2.9.0, here is",
        "error: the cluster has Python 3.9.1, here is",
        "error: it asks for no token: whoever reaches a:1 can run code on it",
        "error: the dashboard listens beyond loopback (0.0.0.0:8265)",
        "error: far (10.0.0.2) cannot be reached from here",
        "warning: slow (10.0.0.3) takes 80 ms to reach",
        "warning: a node could not be started: no quota",
        "note: 3 roles or tasks wait for room: add nodes, or ask for less",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_status_from_a_shell_joins_nothing(head: Head, tmp_path: Path) -> None:
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    others |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    others["RAY_ADDRESS"] = head.address
    command = [sys.executable, "-m", "raynforce", "cluster", "status", "--json"]
    done = subprocess.run(command, env=others, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["address"] == head.address
