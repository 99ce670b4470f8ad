"""Runs a parameter-server DQN on Ray as it is, and counts what it did without the time that its actors took to start.

    python -m benchmarks.parameter_server PATH SECONDS

The script at PATH has names of its own for what is counted: a buffer actor `buf` with a method `count`, and at its end
the environment steps `n`, the updates `ups`, and `dl`, the time at which everybody stopped. The buffer is asked five
times a second until the first step is in it, and then left alone. Prints what the script prints, then one JSON object.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
import time


def main(path: str, seconds: str) -> None:
    sys.argv = [path, seconds]
    began: list[float] = []
    threading.Thread(target=_see_first_step, args=(began,), daemon=True).start()
    found = runpy.run_path(path, run_name="__main__")
    lasted = found["dl"] - began[0]
    print(json.dumps({"steps": found["n"] / lasted, "updates": found["ups"] / lasted, "startup": found["S"] - lasted}))


def _see_first_step(began: list[float]) -> None:
    import ray

    while not began:
        time.sleep(0.2)
        script = sys.modules["__main__"]  # the one that runs, not this one
        if hasattr(script, "buf") and ray.get(script.buf.count.remote()):
            began.append(time.time())  # the clock that such scripts use for their deadline


if __name__ == "__main__":
    main(*sys.argv[1:])
