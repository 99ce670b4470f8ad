"""Every point in the event files of a directory, as they are on the disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path


def points(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Step, tag and value, file after file."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    for file in sorted(directory.iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield event.step, value.tag, value.tensor.float_val[0]
