"""Which cells of a matrix of tests run with `make slow` alone."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet

slow = pytest.mark.slow


def slowly(*cells: Any) -> list[ParameterSet]:
    """These sets of arguments (or single ones), each marked as slow."""
    return [pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=slow) for cell in cells]
