"""What an import costs: configuring, sampling and acting need no torch, and `--help` needs no numpy either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raynforce.lazy import LazyModule

ROOT = Path(__file__).resolve().parents[1]
LIGHT = [
    "raynforce",
    "raynforce.cli",
    "raynforce.config",
    "raynforce.experiment",
    "raynforce.algos.ppo",
    "raynforce.algos.dqn",
    "raynforce.envs.vector",
    "raynforce.experience.replay",
    "raynforce.protocol.channel",
    "raynforce.protocol.host_session",
    "raynforce.protocol.policy_session",
    "raynforce.roles.sampler",
    "raynforce.roles.evaluator",
    "raynforce.policy",
    "raynforce.driver.driver",
    "raynforce.api",
]


def fresh(script: str) -> Any:
    """Run a script in a new interpreter; the last line it prints is JSON."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_light_modules_import_neither_torch_nor_ray() -> None:
    """One after the other in one process, so that the first to bring something heavy is named."""
    brought = fresh(f"""
import importlib, json, sys
brought = {{}}
for name in {LIGHT}:
    importlib.import_module(name)
    for heavy in ("torch", "ray"):
        if heavy in sys.modules:
            brought.setdefault(heavy, name)
print(json.dumps(brought))
""")
    assert brought == {}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["trian"]], ids=" ".join)
def test_help_is_instant(arguments: list[str]) -> None:
    """As `python -m raynforce --help` runs it."""
    loaded = fresh(f"""
import json, runpy, sys
sys.argv = ["raynforce", *{arguments}]
try:
    runpy.run_module("raynforce", run_name="__main__", alter_sys=True)
except SystemExit as exit:
    code = exit.code
heavy = ("torch", "numpy", "gymnasium", "ray", "yaml", "rich", "safetensors")
print(json.dumps([code or 0, [m for m in heavy if m in sys.modules]]))
""")
    assert loaded == [0 if "--help" in arguments else 2, []]


def test_a_policy_acts_without_torch_or_environments() -> None:
    """From a spec that came as JSON to an action, in a process that sees neither."""
    action = fresh("""
import json, sys
import numpy as np
from raynforce import Policy
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.spec import Linear, NetworkSpec, Tower, inputs_of
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

leaf = ObsLeaf("obs", "box", (2,), "float32")
env = EnvSpec("Test-v0", (leaf,), ActionSpec("discrete", (), "int64", sizes=(2,), start=(0,)))
network = NetworkSpec(inputs_of([leaf]), (Tower("policy", (Linear(2),)),))
spec = ActingSpec.from_json(json.loads(json.dumps(ActingSpec(env, network, {"policy": 2}).to_json())))
policy = Policy(spec, PolicyVersion(1, np.array([1, 0, 0, 1, 0, 0], np.float32)))
action = policy.act(np.array([[0.0, 1.0], [1.0, 0.0]]))
print(json.dumps([action.tolist(), [m for m in ("torch", "gymnasium", "ray") if m in sys.modules]]))
""")
    assert action == [[1, 0], []]


def test_everything_public_can_be_fetched() -> None:
    import raynforce

    for name in raynforce.__all__:
        assert getattr(raynforce, name) is not None
    assert set(raynforce.__all__) <= set(dir(raynforce))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        raynforce.trian  # noqa: B018


def test_lazy_modules_are_imported_at_first_use() -> None:
    loaded = fresh("""
import json, sys
from raynforce.lazy import LazyModule
colours = LazyModule("colorsys")
before = "colorsys" in sys.modules
value = colours.rgb_to_hsv(0, 0, 1)
print(json.dumps([before, "colorsys" in sys.modules, value]))
""")
    assert loaded == [False, True, [2 / 3, 1, 1]]
    with pytest.raises(AttributeError):
        LazyModule("colorsys").nothing_of_this_name  # noqa: B018
