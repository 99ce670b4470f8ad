"""The server of the page: static files, and data under `/api` for those who have the token. On loopback alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from raynforce import __version__
from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import asking
from raynforce.runs.disk import cache_folder
from raynforce.web import detail
from raynforce.web.board import Board, Watched
from raynforce.web.reading import OWN, Column, draw, plain

HOST, PORT, PORTS = "127.0.0.1", 8420, 20  # the first port that is tried, and how many
NAMES = ("127.0.0.1", "localhost", "[::1]")  # a Host of any other name is a page elsewhere that rebinds its DNS
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain",
}
WAIT = 0.5  # seconds that a question for curves may read for; the rest comes with the next
MOST_SETS, MOST_KEYS, MOST_POINTS = 200, 60, 4000
TICK, BEAT = 0.2, 10.0  # seconds between looks for changes, and between signs of life

Answer = Callable[[Request], Awaitable[Response]]


def token() -> str:
    """This user's token: it outlasts the server, so that a page finds its way back after a restart."""
    path = cache_folder() / "watch.token"
    with contextlib.suppress(OSError):
        stat = path.stat()
        if stat.st_uid == os.getuid() and not stat.st_mode & 0o077 and len(found := path.read_text().strip()) >= 32:
            return found
    made = secrets.token_urlsafe(32)
    with contextlib.suppress(OSError):  # else it lasts as long as this server
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
            file.write(made)
        temporary.replace(path)
    return made


class Guard:
    """Refuses other hosts, other origins, and questions for data without the token."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        refused = self._refused(Request(scope))
        if refused is not None:
            return await refused(scope, receive, send)

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in known]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        return await self._app(scope, receive, sending)

    def _refused(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        name = hosts[0].rpartition(":")[0] if len(hosts) == 1 and not hosts[0].endswith("]") else "".join(hosts)
        if len(hosts) != 1 or (name or hosts[0]) not in NAMES:
            return _refusal(403, "this server answers to 127.0.0.1 and localhost alone")
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            return _refusal(403, "a page of another origin may not ask")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _refusal(403, "a page of another origin may not ask")
        if f"{request.url.path}/".startswith("/api/"):
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(given, self._secret):
                return _refusal(401, "the token is missing or wrong: open the link that `raynforce watch` printed")
        return None


def _refusal(code: int, why: str) -> Response:
    return _json({"error": why}, code, HEADERS)


def _json(data: Any, code: int = 200, headers: Any = None) -> Response:
    text = json.dumps(detail.safe(data), separators=(",", ":"), ensure_ascii=False)
    return Response(text, code, media_type="application/json", headers=headers)


def app(board: Board, secret: str, closing: threading.Event | None = None) -> ASGIApp:
    """The page of a board, for those who have the secret."""
    closing = closing or threading.Event()
    page = _Page(board, closing)
    routes = [Route(path, _static(file), methods=["GET"]) for path, file in _files().items()]
    routes += [
        Route("/api/hello", page.hello, methods=["GET"]),
        Route("/api/runs", page.runs, methods=["GET"]),
        Route("/api/series", page.series, methods=["GET"]),
        Route("/api/changes", page.changes, methods=["GET"]),
        Route("/api/run/{id}", page.run, methods=["GET"]),
        Route("/api/run/{id}/events", page.events, methods=["GET"]),
        Route("/api/run/{id}/evidence/{number:int}", page.evidence, methods=["GET"]),
        Route("/api/run/{id}/episode/{name}", page.episode, methods=["GET"]),
        Route("/api/run/{id}/ask", page.ask, methods=["POST"]),
        Route("/api/run/{id}/notes", page.notes, methods=["POST"]),
        Route("/api/tuning/{id}", page.tuning, methods=["GET"]),
    ]
    handlers: Any = {404: _error, 405: _error, 500: _error}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), secret)


async def _error(request: Request, error: Any) -> Response:
    code = int(getattr(error, "status_code", 500))
    words = {404: "there is no such thing", 405: "that method is not for this"}
    return _json({"error": words.get(code, "the server failed")}, code)


def _files() -> dict[str, tuple[bytes, str]]:
    """Everything that is served beside data, by path: there is no way to any other file."""
    found = {}
    folder = files("raynforce") / "web" / "static"
    for inner in (folder, folder / "vendor", folder / "views"):
        for file in inner.iterdir():
            if file.is_file():
                kind = TYPES[file.name.rpartition(".")[2]]
                within = "" if inner is folder else f"{inner.name}/"
                found[f"/{within}{file.name}"] = file.read_bytes(), kind
    found["/"] = found.pop("/index.html")
    return found


def _static(file: tuple[bytes, str]) -> Answer:
    data, kind = file
    tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(data, media_type=kind, headers={"etag": tag})

    return answer


class _Page:
    """What the page asks for."""

    def __init__(self, board: Board, closing: threading.Event) -> None:
        self._board, self._closing = board, closing

    async def hello(self, request: Request) -> Response:
        return _json({"version": __version__, "time": time.time()})

    async def runs(self, request: Request) -> Response:
        self._board.touch()
        answer = await run_in_threadpool(lambda: _json({**self._board.to_json(), "time": None}))
        tag = f'"{hashlib.sha256(bytes(answer.body)).hexdigest()[:20]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        answer.headers["etag"] = tag
        return answer

    async def changes(self, request: Request) -> Response:
        """Server-sent events: which runs have changed, as they do."""

        async def stream() -> AsyncIterator[str]:
            seen, version, said = dict[str, int](), -1, 0.0
            yield f"retry: 500\ndata: {json.dumps({'hello': __version__})}\n\n"
            while not self._closing.is_set():
                self._board.touch()
                if self._board.version != version:
                    version, now = self._board.version, self._board.versions
                    changed = [id for id, each in now.items() if seen.get(id) != each]
                    same = seen.keys() == now.keys()
                    seen, said = now, time.monotonic()
                    yield f"data: {json.dumps({'changed': changed, 'list': not same})}\n\n"
                elif time.monotonic() - said > BEAT:
                    said = time.monotonic()
                    yield ": alive\n\n"
                await asyncio.sleep(TICK)

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _run(self, request: Request) -> Watched:
        self._board.touch()
        run = self._board.run(request.path_params["id"])
        if run is None or run.glance is None:
            raise _Missing
        return run

    async def run(self, request: Request) -> Response:
        return await self._told(request, detail.detail)

    async def events(self, request: Request) -> Response:
        return await self._told(request, lambda run: {"events": detail.events(run)})

    async def evidence(self, request: Request) -> Response:
        return await self._told(request, lambda run: detail.evidence(run, request.path_params["number"]))

    async def _told(self, request: Request, tell: Callable[[Watched], Any]) -> Response:
        try:
            run = self._run(request)
            found = await run_in_threadpool(tell, run)
        except (_Missing, FileNotFoundError):  # it is being deleted
            found = None
        return await _error(request, _Missing()) if found is None else await run_in_threadpool(_json, found)

    async def episode(self, request: Request) -> Response:
        try:
            path = await run_in_threadpool(detail.episode, self._run(request), request.path_params["name"])
        except _Missing:
            path = None
        if path is None:
            return await _error(request, _Missing())
        return FileResponse(path, media_type=detail.TYPES[path.suffix[1:]])

    async def ask(self, request: Request) -> Response:
        given = await _body(request)
        what = given.get("what") if given else None
        if what not in asking.REQUESTS:
            return _json({"error": f"what must be one of: {', '.join(asking.REQUESTS)}"}, 400)
        return await self._changed(request, lambda run: detail.ask(run, what))

    async def notes(self, request: Request) -> Response:
        given = await _body(request)
        text = given.get("text") if given else None
        if not isinstance(text, str) or len(text.encode(errors="replace")) > asking.LONGEST_NOTES:
            return _json({"error": f"text must be a text of at most {asking.LONGEST_NOTES:,} bytes"}, 400)
        return await self._changed(request, lambda run: detail.note(run, text))

    async def _changed(self, request: Request, change: Callable[[Watched], str]) -> Response:
        try:
            why = await run_in_threadpool(change, self._run(request))
        except _Missing as missing:
            return await _error(request, missing)
        return _json({"error": why}, 409) if why else _json({"ok": True})

    async def tuning(self, request: Request) -> Response:
        path = self._board.tuning(request.path_params["id"])
        if path is None:
            return await _error(request, _Missing())
        return await run_in_threadpool(lambda: _json(detail.tuning(self._board, path)))

    async def series(self, request: Request) -> Response:
        """`set=ID,ID&set=ID&key=NAME&key=NAME&x=step|time&from=&to=&points=&smooth=`."""
        self._board.touch()
        given = request.query_params
        try:
            sets = [text.split(",") for text in given.getlist("set")][:MOST_SETS]
            keys, by = given.getlist("key")[:MOST_KEYS], given.get("x", "step")
            view = tuple(_figure(given.get(name)) for name in ("from", "to"))
            points = min(max(int(given.get("points", 800)), 16), MOST_POINTS)
            smooth = min(max(_figure(given.get("smooth")) or 0.0, 0.0), 1.0)
            if by not in OWN:
                raise ValueError
        except ValueError:
            return _json({"error": "x is step or time, from, to, points and smooth are numbers"}, 400)
        return await run_in_threadpool(self._series, sets, keys, by, view, points, smooth)

    def _series(
        self, sets: list[list[str]], keys: list[str], by: str, view: Any, points: int, smooth: float
    ) -> Response:
        found = self._board.metrics([id for each in sets for id in each])
        until, whole = time.monotonic() + WAIT, True
        for file in found.values():
            whole = file.read(max(0.0, until - time.monotonic())) and whole
        names = sorted({name for file in found.values() for name in file.names})
        curves = {}
        for key in keys:
            columns = [[found[id].column(key, by) for id in each if id in found] for each in sets]
            drawn = draw([each or [_NOTHING] for each in columns], view, points, smooth)
            curves[key] = {
                "x": plain(drawn.x),
                "y": [plain(each) for each in drawn.y],
                "low": [plain(each) for each in drawn.low],
                "high": [plain(each) for each in drawn.high],
                "raw": [plain(each) for each in drawn.raw],
                "points": drawn.points,
                "span": drawn.span,
            }
        text = json.dumps({"curves": curves, "names": names, "whole": whole}, separators=(",", ":"), allow_nan=False)
        return Response(text, media_type="application/json")


class _Missing(Exception):
    status_code = 404


_NOTHING = Column(np.empty(0), np.empty(0))


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent; empty if it is none, or too long."""
    data = b""
    with contextlib.suppress(ClientDisconnect, ValueError, RecursionError):
        async for piece in request.stream():
            data += piece
            if len(data) > 4 * asking.LONGEST_NOTES:
                return {}
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    return {}


def _figure(text: str | None) -> float | None:
    if text in (None, ""):
        return None
    value = float(text or "")
    if not math.isfinite(value):
        raise ValueError
    return value


# -- running it -------------------------------------------------------------------------------------------------------


def listen(port: int | None) -> socket.socket:
    """A socket on loopback: at this port, or where None is given at the first that is free."""
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is not a port: give one from 1 to 65535, or 0 for any that is free")
    for number in [port] if port is not None else [*range(PORT, PORT + PORTS), 0]:
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((HOST, number))
            opened.listen(128)
            return opened
        except OSError as error:
            opened.close()
            if port is not None:
                why = error.strerror or error
                raise UsageError(f"port {port} cannot be used ({why}): give another --port, or 0 for any") from None
    raise RaynforceError("no port of this machine is free")


class Server:
    """A page that is being served. In a `with` statement, until its end."""

    def __init__(self, sources: Sequence[str | Path], *, port: int | None = None, opened: socket.socket | None = None):
        self.board = Board([str(source) for source in sources])
        self._socket = opened or listen(port)
        self._secret, self._closing = token(), threading.Event()
        self.port = int(self._socket.getsockname()[1])
        self._server = _Uvicorn(
            uvicorn.Config(
                app(self.board, self._secret, self._closing),
                log_level="critical",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            ),
            self._closing,
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The link, with the token."""
        return f"http://{HOST}:{self.port}/#token={self._secret}"

    def serve(self) -> None:
        """Serve until a signal comes."""
        self.board.start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._stopped()

    def start(self) -> Server:
        """Serve in a thread."""
        if self._thread is not None:
            return self
        self.board.start()
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        until = time.monotonic() + 10.0
        while not self._server.started and time.monotonic() < until:
            time.sleep(0.005)
        return self

    def close(self) -> None:
        self._closing.set()
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(10.0)
        self._stopped()

    def _stopped(self) -> None:
        self._closing.set()
        self.board.close()
        self._socket.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Uvicorn(uvicorn.Server):
    """Ends the streams that would keep it from ending."""

    def __init__(self, config: uvicorn.Config, closing: threading.Event) -> None:
        super().__init__(config)
        self._closing = closing

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._closing.set()
        super().handle_exit(sig, frame)
