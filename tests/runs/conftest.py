"""What the tests of runs at a URL share: stores that are emptied, an address there, and a run to push."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from odd_store import empty_stores


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores in memory that are empty afterwards, and a disk that nobody waits for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them, and no power is cut here
    yield
    empty_stores()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a run may be pushed to."""
    return f"file://{tmp_path}/store/run" if request.param == "file" else f"{request.param}://bucket/run"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The directory of a run that has begun; `pushed_runs.save` adds checkpoints."""
    path = tmp_path / "run"
    (path / "checkpoints" / "segments").mkdir(parents=True)
    (path / "tensorboard").mkdir()
    (path / "config.yaml").write_text("env: CartPole-v1\n")
    (path / "metrics.jsonl").write_text("")
    (path / "tensorboard" / "events.out.tfevents.1").write_bytes(b"begun")
    return path
