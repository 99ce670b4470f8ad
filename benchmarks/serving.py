"""A served policy beside the server alone: requests per second and latency, 64 clients, a 64-64 policy of CartPole-v1.

Load is `wrk` (Debian: apt install wrk) with one thread: POST /act with one observation as JSON, a token, connections
kept. `--local` stands beside uvicorn under the same settings whose application sends constant bytes and reads nothing;
Ray Serve beside a deployment on the same Serve that sends its request's body back. Both are up all the time and are
asked in turns. At last a policy is reloaded ten times under load, and every answer is compared with what `load` says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import ROOT, Table, command, ratio, row, take_turns

CLIENTS = 64
TOKEN = "benchmark-of-serving"
OBS = [0.0123, -0.2, 0.03, 0.4]
RELOADS = 10
SETTLING = 1  # seconds of load before it counts
SCRIPT = """
wrk.method = "POST"
wrk.body = '{body}'
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer {token}"
"""
CHECK = """
local thread
function setup(t) thread = t end
function init() wrong = 0 end
function response(status, headers, body)
  if status ~= 200 or string.sub(body, 1, {length}) ~= '{expected}' then wrong = wrong + 1 end
end
function done() io.write("wrong answers: " .. thread:get("wrong") .. "\\n") end
"""
CONSTANT = """
import socket, sys, uvicorn
from raynforce.ops.serving.local import settings
body = b'{"action":1,"version":7,"policy":"main"}'
headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
config = uvicorn.Config(app, **settings())
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(config).run(sockets=[listening])
"""
ON_RAY = """
import json, sys
import raynforce
from ray import serve
service = raynforce.serve(sys.argv[1], port=0, token=sys.argv[2])
class Echo:
    async def __call__(self, request):
        from starlette.responses import Response
        return Response(await request.body(), media_type="application/json")
quiet = {"log_level": "WARNING", "enable_access_log": False}
made = serve.deployment(Echo, max_ongoing_requests=10_000, logging_config=quiet, ray_actor_options={"num_cpus": 1})
serve.run(made.bind(), name="echo", route_prefix="/echo")
print(service.url, flush=True)
sys.stdin.read()
service.stop()
"""


class Load(NamedTuple):
    """What wrk tells of a turn."""

    per_second: float
    p50: float  # milliseconds
    p99: float
    failed: int  # not answered, or not with 200
    wrong: int = 0


def measure(repeats: int = 5, seconds: int = 5, only: str = "all") -> list[Table]:
    """Ask in turns; `only` is local, ray or reloads."""
    if shutil.which("wrk") is None:
        raise SystemExit("there is no wrk to make load with (Debian: apt install wrk)")
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        first, second = (policy(Path(folder) / name, number) for name, number in (("first", 7), ("second", 8)))
        if only in ("all", "local"):
            with _local(first) as url, _constant() as other:
                found = take_turns(
                    repeats, partial(_load, f"{url}/act", seconds), partial(_load, other, seconds), label="local"
                )
            tables.append(_table("--local beside a constant of the same server", 0.6, *found))
        if only in ("all", "ray"):
            with _on_ray(first) as url:
                ask = partial(_load, f"{url}/act", seconds), partial(_load, f"{url}/echo", seconds)
                found = take_turns(repeats, *ask, label="ray")
            tables.append(_table("Ray Serve beside a deployment that echoes", 0.85, *found))
        if only in ("all", "reloads"):
            for name, served in (("--local", _local), ("Ray Serve", _on_ray)):
                tables.append(_reloads(name, served, Path(folder), first, second))
    return tables


def _table(title: str, bar: float, ours: list[Load], other: list[Load]) -> Table:
    rows = [
        row("policy", "requests/s", [turn.per_second for turn in ours]),
        row("beside it", "requests/s", [turn.per_second for turn in other]),
        ratio("policy / beside it", [t.per_second for t in ours], [t.per_second for t in other], ("at least", bar)),
    ]
    for name, turns in (("policy", ours), ("beside it", other)):
        rows += [row(f"p50, {name}", "ms", [t.p50 for t in turns]), row(f"p99, {name}", "ms", [t.p99 for t in turns])]
    failed = sum(turn.failed for turn in (*ours, *other))
    return Table(f"{title}, {CLIENTS} clients, {len(ours)} turns", rows, [f"{failed} requests failed"])


def _reloads(
    name: str,
    served: Callable[[Path], AbstractContextManager[str]],
    folder: Path,
    first: Path,
    second: Path,
) -> Table:
    """A link that points to one policy, then the other: equal parameters, other versions."""
    link = folder / "best"
    link.unlink(missing_ok=True)
    link.symlink_to(first)
    import raynforce

    expected = f'{{"action":{int(raynforce.load(first).act(OBS))},'
    with served(folder) as url, raynforce.Client(url, TOKEN) as client:
        load = _started(f"{url}/act", RELOADS, CHECK.format(length=len(expected), expected=expected))
        versions = []
        for number in range(RELOADS):
            time.sleep(0.8)
            fresh = folder / ".best"
            fresh.symlink_to((second, first)[number % 2])
            fresh.replace(link)
            versions += [taken["version"] for taken in client.reload()]
        found = _read(load)
    rows = [
        row("reloads", "policies", [len(versions)]),
        row("requests", "1/s", [found.per_second]),
        row("not answered", "requests", [found.failed]),
        row("answered wrongly", "requests", [found.wrong]),
        row("p99", "ms", [found.p99]),
    ]
    return Table(f"{RELOADS} reloads under load, {name}", rows)


def policy(path: Path, number: int) -> Path:
    """A checkpoint of a 64-64 policy with random parameters, always the same."""
    import numpy as np

    from raynforce.algos import algorithm_class
    from raynforce.envs.make import make_described
    from raynforce.experiment import resolve
    from raynforce.policies.acting import PolicyVersion
    from raynforce.runs import checkpoint

    config, _ = resolve({"env": "CartPole-v1", "algo": "ppo", "network": {"hidden": [64, 64]}})
    _, spec = make_described("CartPole-v1", {})
    acting = algorithm_class("ppo")(config, spec).acting()
    size = sum(parameter.size for parameter in acting.network.params())
    params = np.random.default_rng(1).normal(0, 0.3, size).astype(np.float32)
    version = PolicyVersion(number, params)
    checkpoint.save(path, {"policy": {"acting": acting.to_json(), "version": version.state()}}, step=number)
    return path


@contextmanager
def _child(*words: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **how
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a server did not start")
    return line


@contextmanager
def _local(run: Path) -> Iterator[str]:
    with _child("-m", "raynforce", "serve", str(run), "--local", "--port", "0", "--token", TOKEN, "--json") as process:
        yield str(json.loads(_said(process))["url"])


@contextmanager
def _constant() -> Iterator[str]:
    with _child("-c", CONSTANT) as process:
        yield f"http://127.0.0.1:{_said(process)}/act"


@contextmanager
def _on_ray(run: Path) -> Iterator[str]:
    with _child("-c", ON_RAY, str(run), TOKEN, stdin=subprocess.PIPE) as process:
        yield _said(process)


def _load(url: str, seconds: int) -> Load:
    _read(_started(url, SETTLING))
    return _read(_started(url, seconds))


def _started(url: str, seconds: int, more: str = "") -> subprocess.Popen[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".lua", delete=False) as script:
        script.write(SCRIPT.format(body=json.dumps({"obs": OBS}), token=TOKEN) + more)
    words = ["wrk", "-t1", f"-c{CLIENTS}", f"-d{seconds}", "--latency", "--timeout", "10", "-s", script.name, url]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def _read(process: subprocess.Popen[str]) -> Load:
    printed, _ = process.communicate(timeout=600)
    per_second = re.search(r"Requests/sec:\s+([\d.]+)", printed)
    tail = {
        percent: _milliseconds(*found) for percent, *found in re.findall(r"(50|99)%\s+([\d.]+)(us|ms|s|m)", printed)
    }
    if per_second is None or len(tail) < 2:
        raise SystemExit(f"wrk said:\n{printed}")
    socket_errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", printed)
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", printed)
    wrong = re.search(r"wrong answers: (\d+)", printed)
    failed = sum(map(int, socket_errors.groups())) if socket_errors else 0
    failed += int(refused[1]) if refused else 0
    return Load(float(per_second[1]), tail["50"], tail["99"], failed, int(wrong[1]) if wrong else 0)


def _milliseconds(figure: str, unit: str) -> float:
    return float(figure) * {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}[unit]


if __name__ == "__main__":
    command(measure, __doc__ or "")
