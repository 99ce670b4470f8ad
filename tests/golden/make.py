"""Makes golden runs of the format that a tree writes, with the settings of those that are here.

`PYTHONPATH=TREE python tests/golden/make.py FOLDER`. Each is a run that was stopped half way, with `expected.json`:
where it ends if it is not.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

import raynforce


def make(golden: Path, path: Path) -> None:
    config = yaml.safe_load((golden / "config.yaml").read_text())

    def half_way(status: raynforce.Status) -> None:
        if 2 * status.steps >= config["steps"]:
            status.stop("half way")

    raynforce.train(config["env"], config["algo"], config=config, out=path, progress="quiet", callbacks=[half_way])
    with tempfile.TemporaryDirectory() as place:
        whole = raynforce.train(config["env"], config["algo"], config=config, out=f"{place}/run", progress="quiet")
        last = raynforce.load(whole.path, "last").version
    counted = {name: getattr(whole.result, name) for name in ("steps", "episodes", "updates")}
    params = [float(value) for value in last.params]
    (path / "expected.json").write_text(json.dumps({**counted, "version": last.number, "params": params}))
    for file in (path / "run.lock", path / "best"):
        file.unlink(missing_ok=True)
    newest = (path / "last").resolve()
    for folder in [path / "tensorboard", *(p for p in path.glob("checkpoints/*_*") if p != newest)]:
        shutil.rmtree(folder)


if __name__ == "__main__":
    for found in sorted(Path(__file__).parent.glob("v*/*/config.yaml")):
        make(found.parent, Path(sys.argv[1]) / found.parent.name)
