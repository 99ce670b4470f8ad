"""Other libraries that Raynforce is measured beside, each in a virtual environment of its own."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from benchmarks.measure import ROOT, run


class Peer(NamedTuple):
    """A library, and what is installed to measure it."""

    title: str
    name: str
    """In the names of its files: `.venv-NAME`, `requirements-NAME.txt`, `RAYNFORCE_NAME_PYTHON`."""
    packages: tuple[str, ...]

    def python(self) -> str:
        """A Python that has it: the one in `RAYNFORCE_NAME_PYTHON`, or a virtual environment, made at first use."""
        given = os.environ.get(f"RAYNFORCE_{self.name.upper()}_PYTHON")
        if given:
            return given
        venv = ROOT / f".venv-{self.name}"
        python, done = venv / "bin" / "python", venv / ".installed"
        if not done.exists():
            print(f"installing {self.title} into {venv} (once) …", file=sys.stderr)
            install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            constraints = str(ROOT / "benchmarks" / f"requirements-{self.name}.txt")
            run([sys.executable, "-m", "venv", str(venv)])
            run([*install, "-c", constraints, *self.packages])
            done.touch()
        return str(python)


SB3 = Peer("Stable-Baselines3", "sb3", ("torch==2.13.0", "stable-baselines3"))
WORLDS = ("gymnasium[mujoco]", "mpe2", "pettingzoo")  # environments of `learning_vs_sb3`
CONTRIB = Peer("sb3-contrib", "contrib", ("torch==2.13.0", "stable-baselines3", "sb3-contrib", *WORLDS))
RLLIB = Peer("RLlib", "rllib", ("torch==2.13.0", "gymnasium==1.2.2", "ray[rllib]==2.60.0"))
