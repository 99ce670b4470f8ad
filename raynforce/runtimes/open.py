"""From a config to its runtime."""

from __future__ import annotations

from collections.abc import Callable

from raynforce.config import Config
from raynforce.runtimes.base import Runtime
from raynforce.runtimes.placing import place_roles, require_room


def open_runtime(config: Config, say: Callable[[str], None]) -> Runtime:
    """The runtime that the config names, ready to spawn roles; `say` is told what a user should know."""
    if config.runtime == "ray":
        from raynforce.runtimes.ray.runtime import RayRuntime  # imports ray

        return RayRuntime(config, say)
    places, _ = place_roles(config, None)
    if config.runtime == "process":
        from raynforce.runtimes.process import ProcessRuntime

        require_room(config)
        return ProcessRuntime(places, say)
    from raynforce.runtimes.inline import InlineRuntime

    return InlineRuntime(places, say)
