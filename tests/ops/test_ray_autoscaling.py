"""A run that asks for more than there is begins with what there is, and grows with the cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_cluster import TOKEN, autoscaling, surroundings, wait_until
from rays import SharedRay

from raynforce.runtimes.ray import private
from raynforce.runtimes.ray.state import environment

MANY = ("--runtime", "ray", "--samplers", "5", "--topology", "async")


def nodes(address: str) -> int:
    return len(private.ask(address).nodes)


@pytest.mark.slow
def test_a_run_scales_the_cluster_from_one_node_to_three_and_back(no_ray: None, one_ray: SharedRay) -> None:
    with autoscaling(every=25) as (address, folder), environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}):
        wait_until(lambda: private.ask(address).grows, 60)
        assert nodes(address) == 1
        words = ["train", "impala", "CartPole-v1", *MANY, "--address", address, "--steps", "100000000", "--out", "run"]
        out = folder / "out.txt"
        with out.open("w") as output:
            command = [sys.executable, "-m", "raynforce", *words]
            run = subprocess.Popen(command, cwd=folder, env=surroundings(folder), stdout=output, stderr=output)
        try:
            wait_until(lambda: nodes(address) == 3 or run.poll() is not None, 120)
            assert run.poll() is None, out.read_text()
            wait_until(lambda: len(sampling(folder / "run")) == 5, 60)
        finally:
            run.terminate()
            run.wait(timeout=60)
        said = out.read_text()
        assert "room for 1 of 5 samplers: its autoscaler is asked for more" in said
        assert "going on without sampler" in said, "it began with the one that had room"
        began = time.monotonic()
        wait_until(lambda: nodes(address) == 1, 120)
        print(f"back to one node after {time.monotonic() - began:.0f} s")


def sampling(run: Path) -> set[str]:
    """Samplers that have come back, or were there from the start."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    absent: set[str] = set()
    for event in events:
        if event.get("event") == "absent":
            absent.add(event["role"])
        elif event.get("event") == "back":
            absent.discard(event["role"])
    return {f"sampler {n}" for n in range(5)} - absent
