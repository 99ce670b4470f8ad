"""The application in this process, under uvicorn in a thread of its own: no Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.serving.app import PolicyApp, Rules
from raynforce.ops.serving.keeping import LOOK, Keeper, Served

STARTING = 60.0  # seconds, torch included
STOPPING = 10  # seconds for requests in flight
BACKLOG = 2048


class LocalServer:
    """Serves until it is stopped; the keeper's policies are reloaded where it is asked to."""

    def __init__(
        self, keeper: Keeper, rules: Rules, listening: socket.socket, *, follow: bool, say: Callable[[str], None]
    ) -> None:
        try:
            import uvicorn
        except ImportError:
            raise UsageError('serving needs an HTTP server: pip install "raynforce[serve]"') from None
        self._keeper, self._follow = keeper, follow
        self._changing = asyncio.Lock()
        self.app = PolicyApp(rules, self, say)
        self._socket = listening
        config = uvicorn.Config(self.app, **settings())
        self._server = uvicorn.Server(config)
        self._up = threading.Event()
        self._failed: BaseException | None = None
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="raynforce-serve", daemon=True)
        self._thread.start()
        self._up.wait(STARTING)
        if self._failed is not None:
            raise self._failed
        if not self._server.started:
            raise RaynforceError(f"the server did not start within {STARTING:g} seconds")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failed = error
        finally:
            self._up.set()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        for served in self._keeper.served.values():
            await self.app.take(served)
        tasks = [asyncio.create_task(self._tell_when_up())]
        if self._follow:
            tasks.append(asyncio.create_task(self._followed()))
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_when_up(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.005)
        self._up.set()

    async def _followed(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            async with self._changing:
                await self._taken(self._keeper.follow)

    async def _taken(self, find: Callable[[], list[Served]]) -> list[Served]:
        found = await asyncio.to_thread(find)
        for served in found:
            await self.app.take(served)
        return found

    # -- what the application asks for ------------------------------------------------------------------------

    async def reload(self) -> list[Served]:
        async with self._changing:
            return await self._taken(self._keeper.reload)

    async def rollback(self, name: str) -> Served:
        async with self._changing:
            (served,) = await self._taken(lambda: [self._keeper.rollback(name)])
            return served

    async def counted(self) -> tuple[Iterable[Mapping[str, float]], Mapping[str, float]]:
        return [self.app.metrics.state()], gauges(self._keeper, 1)

    # -- from other threads -----------------------------------------------------------------------------------

    def reload_now(self) -> list[Served]:
        return self._asked(self.reload())

    def rollback_now(self, name: str) -> Served:
        return self._asked(self.rollback(name))

    def _asked(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Answer what is in flight, then end."""
        self._server.should_exit = True
        self._thread.join(STOPPING + 5)
        self._socket.close()


def settings() -> dict[str, Any]:
    """How uvicorn serves: its quickest parser and loop, no log of requests."""
    how = {"lifespan": "off", "ws": "none", "log_config": None, "log_level": "critical", "access_log": False}
    return {**how, "server_header": False, "timeout_graceful_shutdown": STOPPING, "backlog": BACKLOG}


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def gauges(keeper: Keeper, replicas: int) -> dict[str, float]:
    counts = {'reloads_total|result="taken"': keeper.taken, 'reloads_total|result="refused"': keeper.refused}
    return {**counts, "replicas": replicas}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        why = "is taken" if error.errno == 98 else f"cannot be used ({error.strerror or error})"
        raise UsageError(f"port {port} of {host} {why}: give another with --port, or 0 for any that is free") from None
    return found
