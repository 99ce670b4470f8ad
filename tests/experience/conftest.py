"""What the tests of saved replay buffers share: segments so small that there are many."""

from __future__ import annotations

import pytest

from raynforce.experience import replay as replay_module


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "LEAST_SEGMENT", 12)
