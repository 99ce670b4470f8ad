"""Settings that are known to work, the defaults for their environment; `preset: none` leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[tuple[str, str], Mapping[str, Any]] = {}


def preset_for(algo: str, env: str) -> dict[str, Any]:
    """The tuned settings (dotted) of a built-in algorithm on an environment; empty if there are none."""
    return dict(PRESETS.get((algo, env), {}))
