"""The process runtime and what its roles say; pools of walkers; how often recovery points are taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from walkers import Scene

from raynforce.runtimes import pool as pool_module
from raynforce.runtimes.base import Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.process import ProcessRuntime


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def runtime(said: list[str]) -> Iterator[Runtime]:
    with ProcessRuntime({}, said.append) as opened:
        yield opened


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RNF_TEST_FLAGS", str(tmp_path))
    return tmp_path


@pytest.fixture
def process() -> Iterator[Scene]:
    with ProcessRuntime({}, lambda text: None) as runtime:
        yield Scene(runtime)


@pytest.fixture
def inline() -> Iterator[Scene]:
    with InlineRuntime({}) as runtime:
        yield Scene(runtime)


@pytest.fixture(params=["inline", "process", pytest.param("ray", marks=pytest.mark.slow)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "ray":
        with request.getfixturevalue("make_ray")() as runtime:
            yield Scene(runtime)
    else:
        yield request.getfixturevalue(request.param)


@pytest.fixture
def recovery_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery point is taken after every job."""
    monkeypatch.setattr(pool_module, "RECOVERY_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "RECOVERY_COST", 0.0)


@pytest.fixture
def no_recovery_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the start took."""
    monkeypatch.setattr(pool_module, "RECOVERY_SECONDS", 1000.0)
