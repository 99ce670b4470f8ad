"""The page: first view and frames a second with a million points, memory with 50 runs, and what it costs a training.

python -m benchmarks.watch            all of it, about two minutes
python -m benchmarks.watch page       the browser's part: chromium and playwright are needed
python -m benchmarks.watch memory
python -m benchmarks.watch training
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.watch_runs import make_large, make_run

RAYNFORCE = [sys.executable, "-m", "raynforce"]
TRAIN = ["train", "ppo", "CartPole-v1", "--steps", "600k", "--runtime", "inline", "--topology", "sync", "--json"]
TRAIN += ["--set", "eval.every=0", "--set", "eval.final_episodes=0"]
PAN = """
() => new Promise((done) => {
  const over = document.querySelector('[data-key="charts/episodic_return"] .u-over');
  const box = over.getBoundingClientRect(), y = box.top + box.height / 2, x = box.left + box.width / 2;
  const send = (kind, at) => (kind === "mousedown" ? over : window).dispatchEvent(
    new MouseEvent(kind, { clientX: at, clientY: y, shiftKey: true, bubbles: true, button: 0 }));
  send("mousedown", x);
  const times = [], began = performance.now();
  const frame = (now) => {
    times.push(now);
    if (now - began > 3000) { send("mouseup", x); done(times); return; }
    send("mousemove", x + 200 * Math.sin((now - began) / 400));
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})
"""


@contextmanager
def watching(*sources: Path) -> Iterator[tuple[str, int]]:
    """The link of a server in a process of its own, and its process id."""
    words = [*RAYNFORCE, "watch", "--no-browser", "--json", "--port", "0", *map(str, sources)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def ask(url: str, path: str) -> Any:
    address, _, token = url.partition("/#token=")
    request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def runs_of(url: str, count: int) -> list[str]:
    until = time.monotonic() + 60
    while len(found := ask(url, "/api/runs")["runs"]) < count and time.monotonic() < until:
        time.sleep(0.1)
    return [run["id"] for run in found]


@contextmanager
def browsing() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1400, "height": 900})
        browser.close()


def measure_page(folder: Path) -> None:
    """A run with a million reports: until its first curve is drawn, and frames a second while it is panned."""
    make_large(folder / "large")
    with watching(folder) as (url, pid), browsing() as page:
        (run,) = runs_of(url, 1)
        page.goto(url)
        page.wait_for_selector("h1")
        page.goto("about:blank")
        began = time.monotonic()
        page.goto(f"{url.partition('#')[0]}#/curves?runs={run}")
        drawn = '[data-key="charts/episodic_return"] .chart-head span:not(:empty)'
        page.wait_for_selector(drawn)
        print(f"first view of a million points: {time.monotonic() - began:.2f} s")
        page.wait_for_function("s => document.querySelector(s).textContent === '1M points'", arg=drawn, timeout=60_000)
        print(f"all of them read: {time.monotonic() - began:.2f} s")
        page.evaluate(f"location.hash = '#/curves?runs={run}&from=400000&to=500000'")
        page.wait_for_function(
            "s => /points/.test(document.querySelector(s)?.textContent || '')", arg=drawn, timeout=60_000
        )
        page.wait_for_timeout(1000)
        times = page.evaluate(PAN)
        gaps = [b - a for a, b in pairwise(times)]
        rate = 1000 * len(gaps) / (times[-1] - times[0])
        print(f"panning: {rate:.0f} frames a second, median {statistics.median(gaps):.1f} ms, worst {max(gaps):.0f} ms")
        print(f"server: {resident(pid):.0f} MB")


def resident(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def measure_memory(folder: Path) -> None:
    """50 runs, all of them in the table and their curves asked for."""
    for seed in range(50):
        make_run(folder / f"run{seed:02d}", seed=seed, lines=300)
    with watching(folder) as (url, pid):
        sets = "&".join(f"set={run}" for run in runs_of(url, 50))
        print(f"50 runs in the table: {resident(pid):.0f} MB")
        keys = [
            "charts/episodic_return",
            "eval/return",
            "charts/SPS",
            "losses/value_loss",
            "losses/entropy",
            "lag/mean",
        ]
        began = time.monotonic()
        ask(url, f"/api/series?{sets}&{'&'.join(f'key={key}' for key in keys)}")
        print(f"their curves, for the first time: {time.monotonic() - began:.2f} s, {resident(pid):.0f} MB")
        began = time.monotonic()
        ask(url, f"/api/series?{sets}&{'&'.join(f'key={key}' for key in keys)}")
        print(f"and again: {time.monotonic() - began:.2f} s, {resident(pid):.0f} MB")


def measure_training(folder: Path, pairs: int = 4) -> None:
    """Steps a second of a training alone, and with --watch and a page open, in turns."""
    alone, watched = [], []
    with browsing() as page:
        for number in range(pairs):
            alone.append(speed(folder / f"alone{number}", None))
            watched.append(speed(folder / f"watched{number}", page))
            print(f"alone {alone[-1]:,.0f}, watched {watched[-1]:,.0f} steps/s", flush=True)
    slower = 1 - statistics.median(watched) / statistics.median(alone)
    print(f"with --watch and a page open {slower:.1%} slower")


def speed(out: Path, page: Any) -> float:
    words = [*RAYNFORCE, *TRAIN, "--out", str(out), *(["--watch"] if page else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    if page is not None:
        for line in process.stderr:
            if found := re.search(r"watch: (\S+)", line):
                page.goto(found[1])
                page.wait_for_selector(".chip.running", timeout=20_000)
                break
    out_text, _ = process.communicate()
    return float(json.loads(out_text.splitlines()[-1])["steps_per_second"])


def main(parts: list[str]) -> None:
    every = {"page": measure_page, "memory": measure_memory, "training": measure_training}
    for name in parts or every:
        with tempfile.TemporaryDirectory(prefix="raynforce-watch-") as folder:
            every[name](Path(folder) / "runs")


if __name__ == "__main__":
    main(sys.argv[1:])
