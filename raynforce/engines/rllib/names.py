"""What the driver and RLlib's env runners share.

`building`, `foreign`, `modules`, `kept` and `runner` import RLlib; nothing else here does.
"""

from __future__ import annotations

import logging
import os

EPISODES, FAULTS = "raynforce_episodes", "raynforce_faults"  # metrics that carry news from env runners to the driver
FATAL = "fatal"  # in a fault that ends the run: what to say
MODULE = "default_policy"  # what RLlib calls the one module of an algorithm with one agent


def quiet() -> None:
    """Keep what RLlib logs off the screen: advice to those who call it, and faults, which we tell ourselves."""
    logging.getLogger("ray._common.deprecation").setLevel(logging.ERROR)  # RLlib warns of its own calls
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    for name in ("ray.rllib", "ray.tune", "ray.data"):
        logger = logging.getLogger(name)
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False
