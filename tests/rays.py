"""The Rays that tests use: one of our own that all share, and a head node that was started by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from raynforce.config import Config, SamplingConfig
from raynforce.runtimes.ray.cluster import Cluster
from raynforce.runtimes.ray.connecting import connect

TOKEN = "c0ffee" * 8


def on_ray(nodeid: str) -> bool:
    """Whether a test uses Ray: it, its file or an argument is named after it."""
    return bool(re.search(r"(?<![a-z])ray(?![a-z])|/test_(cluster|nodes)\.py", nodeid))


class SharedRay:
    """A Ray of our own that starts when it is first asked for; runtimes find it in use and leave it running."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None

    def open(self) -> None:
        if self.cluster is None:
            config = Config(env="CartPole-v1", runtime="ray", sampling=SamplingConfig(samplers=7))
            self.cluster = connect(config, lambda text: None)

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


def needs(runtime: str, request: pytest.FixtureRequest) -> None:
    """If this is `ray`, it is the one that all tests share."""
    if runtime == "ray":
        request.getfixturevalue("shared_ray")


@dataclass(frozen=True)
class Head:
    """A cluster of one node that was started by hand, as a user would: 4 CPUs, 1 simulator, and a token."""

    address: str
    folder: Path
    token: str = TOKEN
