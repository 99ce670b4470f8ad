"""What the tests of saved episodes share: a walk that has an id and a time limit."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import pytest


@pytest.fixture
def walk_id() -> Iterator[None]:
    gymnasium.register("Walk-v0", entry_point="walks:Walk", max_episode_steps=17)
    yield
    del gymnasium.registry["Walk-v0"]
