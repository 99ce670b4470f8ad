"""What the tests of saved replay buffers share: segments so small that there are many."""

from __future__ import annotations

import pytest

from raynforce.experience import ring as ring_module


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "LEAST_SEGMENT", 12)
