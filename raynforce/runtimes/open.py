"""From a config to its runtime."""

from __future__ import annotations

from collections.abc import Callable

from raynforce.config import Config
from raynforce.given import pack
from raynforce.kernels import kind, pin, pins
from raynforce.runtimes.base import Runtime
from raynforce.runtimes.placing import PLAIN, Demands, place_roles, require_room


def open_runtime(config: Config, say: Callable[[str], None], demands: Demands = PLAIN) -> Runtime:
    """The runtime that the config names, ready to spawn roles; `say` is told what a user should know."""
    pin(config.kernels)
    if config.runtime in ("process", "ray"):  # what has no module is sent to the roles
        given = pack((config.env, config.algo, config.network.factory))
    if config.runtime == "ray":
        from raynforce.runtimes.ray.runtime import RayRuntime  # imports ray

        return RayRuntime(config, say, demands, given)
    places, _ = place_roles(config, None, demands)
    if config.runtime == "process":
        from raynforce.runtimes.process import ProcessRuntime

        require_room(config, demands)
        return ProcessRuntime(places, say, given)
    from raynforce.runtimes.inline import InlineRuntime

    if config.kernels == "portable" and pins() and kind().kernels == "native":
        problem = "numpy or torch was loaded before it could be held to AVX2: weights are those of this CPU model"
        say(f"note: {problem}; put `from raynforce import train` first, or use the runtime process")
    return InlineRuntime(places, say)
