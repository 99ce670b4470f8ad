"""Modules that are imported at first use, so that configs, samplers and `--help` never pay for torch."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module; the first attribute asked for imports it. Later look-ups cost nothing extra."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self.__name), attribute)
        setattr(self, attribute, value)
        return value
