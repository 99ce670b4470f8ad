"""`raynforce.serve`: a policy over HTTP, from this process or on Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raynforce.client import Client
from raynforce.errors import UsageError
from raynforce.ops.serving.app import Rules
from raynforce.ops.serving.keeping import Keeper, Served
from raynforce.ops.serving.local import LocalServer, listen
from raynforce.ops.serving.tokens import settled

if TYPE_CHECKING:
    from raynforce.ops.serving.on_ray import RayServer

PORT = 8000
REPLICAS = 1000  # at most


class Service:
    """A policy that is being served, until `stop`; a context manager that does so."""

    def __init__(self, server: LocalServer | RayServer, url: str, token: str, served: Sequence[Served]) -> None:
        self.url, self.token = url, token
        self.served = list(served)
        """What is served from the beginning; `Client.info` tells what it is now."""
        self._server: LocalServer | RayServer | None = server
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<Service at {self.url}>"

    def client(self) -> Client:
        return Client(self.url, self.token)

    def reload(self) -> list[dict[str, Any]]:
        """Take the run's checkpoint of this moment; what has changed. A policy of other spaces is refused."""
        return [served.about() for served in self._running.reload_now()]

    def rollback(self, policy: str = "main") -> dict[str, Any]:
        """Serve again what was served before."""
        return self._running.rollback_now(policy).about()

    def stop(self) -> None:
        """Answer what is in flight, then end."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._ended.set()

    def alive(self) -> bool:
        return self._server is not None and self._server.alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is stopped, or so long; whether it was."""
        return self._ended.wait(seconds)

    @property
    def _running(self) -> LocalServer | RayServer:
        if self._server is None:
            raise UsageError("this service was stopped")
        return self._server

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    local: bool = False,
    checkpoint: str = "best",
    sample: bool = False,
    seed: int | None = None,
    follow: bool = False,
    canary: tuple[float, str | Path] | None = None,
    replicas: int = 1,
    rate: float | None = None,
    allow_hosts: Sequence[str] = (),
    address: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Service:
    """Serve the policy of a run over HTTP, and return once it answers.

    `local` serves from this process, without Ray. `follow` takes each new `checkpoint` (`best` or `last`) of the run.
    `canary` is the share of requests that another run's policy answers, and that run. `sample` acts as in training.
    `rate` is how many requests each second are answered at most. Without `token` one is made; it is `service.token`.
    `allow_hosts` are names that clients may call this server by, beyond addresses and this machine's own name.
    """
    say = say or (lambda line: None)
    if not 0 <= port < 65536:
        raise UsageError(f"--port {port} is not a port: allowed are 0 to 65535, 0 for any that is free")
    if checkpoint not in ("best", "last"):
        raise UsageError(f"checkpoint = {checkpoint!r} is not one of: best, last")
    share, other = canary if canary is not None else (0.0, None)
    if not 0 <= share <= 1:
        raise UsageError(f"the canary's share is {share:g}: allowed are 0 to 1, such as --canary 0.1 RUN")
    if not 1 <= replicas <= REPLICAS:
        raise UsageError(f"--replicas {replicas} is out of range: allowed are 1 to {REPLICAS}")
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate {rate:g} would refuse everything: give requests each second, or leave it out")
    if local and replicas > 1:
        raise UsageError(f"--local is one process, and --replicas is {replicas}: drop one of them")
    if local and address is not None:
        raise UsageError(f"--address {address} is for Ray, which --local does without: drop one of them")
    if host == "localhost":
        host = "127.0.0.1"
    rules = Rules(settled(token, host), not sample, seed, share, rate, (*allow_hosts, host))
    listening = listen(host, port)
    try:
        port = listening.getsockname()[1]
        url = f"http://{_named(host)}:{port}"
        keeper = Keeper(run, checkpoint, other, say)  # what is wrong with a run is told before anything is started
        if local:
            server = LocalServer(keeper, rules, listening, follow=follow, say=say)
            return Service(server, url, rules.token, list(keeper.served.values()))
    except BaseException:
        listening.close()
        raise
    listening.close()
    from raynforce.ops.serving.on_ray import RayServer

    where: dict[str, Any] = {"host": host, "port": port, "replicas": replicas, "address": address}
    how: dict[str, Any] = {"which": checkpoint, "follow": follow, "canary": None if other is None else _absolute(other)}
    on_ray = RayServer(_absolute(run), rules, **where, **how, say=say)
    service = Service(on_ray, url, rules.token, on_ray.served)
    _require_answer(service)
    return service


def _require_answer(service: Service, seconds: float = 90.0) -> None:
    """Serve's proxy learns of the application a moment after it runs."""
    until = time.monotonic() + seconds
    while True:
        try:
            with service.client() as client:
                client.health()
            return
        except Exception:
            if time.monotonic() > until:
                service.stop()
                raise
            time.sleep(0.05)


def _absolute(run: str | Path) -> str:
    from raynforce.runs.store import is_url

    return str(run) if is_url(str(run)) else str(Path(run).expanduser().absolute())


def _named(host: str) -> str:
    """A host as it is in a URL that this machine can open."""
    if host == "0.0.0.0":
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
