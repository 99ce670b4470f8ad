"""`raynforce serve --local` as a command: what it prints, signals, and wrong use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="there is no uvicorn: pip install 'raynforce[serve]'")

from served_policies import ServedRun

import raynforce
from raynforce.cli import main

ROOT = Path(raynforce.__file__).parents[1]
OBS = np.random.default_rng(0).normal(0, 1, (50, 4)).astype(np.float32)


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command, once it has told where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "raynforce", "serve", *words, "--local", "--port", "0", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reload_and_end_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run")
    with command(str(run.path)) as (process, told):
        assert len(told["token"]) >= 32
        assert told["url"].startswith("http://127.0.0.1:")
        assert told["policies"][0]["version"] == 1
        with raynforce.Client(told["url"], told["token"]) as client:
            assert client.act(OBS).tolist() == raynforce.load(run.path).act(OBS).tolist()
            run.best()
            process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 60
            while client.info()["policies"][0]["version"] != 2:
                assert time.monotonic() < until
                time.sleep(0.05)
            assert client.act(OBS).tolist() == raynforce.load(run.path).act(OBS).tolist()
            process.send_signal(number)
            out, err = process.communicate(timeout=90)
    assert process.returncode == code
    assert out == ""  # the object was the last line
    assert "took version 2" in err


WRONG = {
    "there is no run or checkpoint": ["nowhere"],
    "--canary": ["RUN", "--canary", "1.5", "RUN"],
    "the canary": ["RUN", "--canary", "0.1", "nowhere"],
    "--port": ["RUN", "--port", "x"],
    "--replicas": ["RUN", "--replicas", "0"],
    "needs a token of yours": ["RUN", "--host", "0.0.0.0"],
    "RAYNFORCE_SERVE_TOKEN_FILE": ["RUN", "--host", "::", "--port", "0"],
    "cannot be used": ["RUN", "--host", "192.0.2.1", "--token", "0123456789abcdef"],
    "unknown option '--folow'": ["RUN", "--folow"],
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_use_is_one_line(said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(ServedRun(tmp_path / "run").path)
    words = [run if word == "RUN" else word for word in WRONG[said]]
    assert main(["serve", *words, "--local"]) == 2
    err = capsys.readouterr().err
    assert (said if said != "the canary" else "nowhere") in err
    assert err.count("\n") == 1
