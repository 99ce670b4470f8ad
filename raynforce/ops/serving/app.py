"""The ASGI application: who may ask, what is asked, and the answer. `/act` is plain code, with no router above."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from raynforce.errors import RaynforceError, UsageError, summary
from raynforce.ops.serving import metrics as prometheus
from raynforce.ops.serving.batching import Batcher
from raynforce.ops.serving.keeping import CANARY, MAIN, Served, differs
from raynforce.ops.serving.metrics import Metrics
from raynforce.ops.serving.pages import OPENAPI, PAGE
from raynforce.ops.serving.reading import DEPTH, NPY, Asked, Reader, parse
from raynforce.spaces import EnvSpec

BODY_SECONDS = 10.0  # for a body to arrive
DRAINED = 64 * 2**20  # bytes of a body that is too large that are read before it is refused
KNOWN_HOSTS = 1000  # Host headers that are remembered as fine
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: Headers = [(b"content-type", b"application/json")]
AS_NPY: Headers = [(b"content-type", NPY.encode())]
PLAIN: Headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
HTML: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
]
METHODS = {
    "/act": ("POST",),
    "/info": ("GET", "HEAD"),
    "/health": ("GET", "HEAD"),
    "/metrics": ("GET", "HEAD"),
    "/reload": ("POST",),
    "/rollback": ("POST",),
    "/openapi.json": ("GET", "HEAD"),
    "/docs": ("GET", "HEAD"),
}
OPEN = ("/health", "/openapi.json", "/docs")  # they tell nothing of the policy


@dataclass(frozen=True)
class Rules:
    """Who may ask for what, and how actions are chosen."""

    token: str
    greedy: bool = True
    seed: int | None = None
    share: float = 0.0  # of requests that the canary answers
    rate: float | None = None  # requests each second, at most
    hosts: tuple[str, ...] = ()  # names that it may be asked by, beyond addresses and this machine's; `*` for any


class Control(Protocol):
    """What reaches beyond one process: the keeper of the policies, and the other replicas."""

    async def reload(self) -> list[Served]: ...

    async def rollback(self, name: str) -> Served: ...

    async def counted(self) -> tuple[Iterable[Mapping[str, float]], Mapping[str, float]]:
        """The counts of all replicas, and what is not to be added up."""
        ...


class Refused(Exception):
    def __init__(self, code: int, why: str, *more: tuple[bytes, bytes]) -> None:
        super().__init__(why)
        self.code, self.more = code, more


class Gone(Exception):
    """Whoever asked has hung up."""


class PolicyApp:
    """Serves the policies that it is given by `take`; all of it runs in one event loop."""

    def __init__(self, rules: Rules, control: Control, say: Callable[[str], None] = lambda line: None) -> None:
        self.metrics = Metrics()
        self._rules, self._control, self._say = rules, control, say
        self._expected = f"Bearer {rules.token}".encode()
        self._batchers: dict[str, Batcher] = {}
        self._reader: Reader | None = None
        self._env: EnvSpec | None = None
        self._limit = 0
        self._hosts: set[bytes] = set()
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in rules.hosts)}
        self._random = random.Random(rules.seed)
        self._reading: dict[asyncio.Task[Any], float] = {}  # bodies, and until when they have to be there
        self._late: set[asyncio.Task[Any]] = set()
        self._sweeping = False
        self._allowance, self._asked_at = rules.rate or 0.0, time.monotonic()

    @property
    def served(self) -> list[Served]:
        return [batcher.served for batcher in self._batchers.values()]

    async def take(self, served: Served) -> None:
        """Act with this policy from the next request on; those that wait are answered by the one before."""

        def made() -> Batcher:
            policy = served.policy(self._rules.seed)
            reader = Reader(policy.spec.env)
            if self._env is not None and (difference := differs(self._env, policy.spec.env)):
                raise UsageError(f"{served.checkpoint} has other spaces than what is served: {difference}")
            self._env, self._reader, self._limit = policy.spec.env, reader, reader.limit
            return Batcher(served, policy, reader, self.metrics, greedy=self._rules.greedy)

        self._batchers[served.name] = await asyncio.to_thread(made)  # it may import torch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _other(scope, receive, send)
            return
        headers, name = JSON, ""
        more: tuple[tuple[bytes, bytes], ...] = ()
        began = time.perf_counter()
        try:
            path = scope["path"]
            kind, length = self._admitted(scope, path)
            if path == "/act":
                code, body = 200, b""
                asked = self._read(kind, await self._body(receive, length))
                batcher = self._chosen()
                name = batcher.served.name
                body = await batcher.act(asked)
                self.metrics.took(name, time.perf_counter() - began)
                if asked.npy:
                    headers = AS_NPY
            else:
                code, headers, body = await self._other(path, receive, length)
        except Gone:
            return
        except Refused as refused:
            code, body, more = refused.code, _line(refused), refused.more
        except UsageError as error:
            code, body = 422, _line(error)
        except Exception as error:
            self._say(f"500 for {scope['path'][:80]}: {summary(error)}")
            code, body = 500, _line(summary(error))
        if code != 200:
            self.metrics.answered(name, code) if name else self.metrics.refused(code)
        whole = [*headers, (b"content-length", b"%d" % len(body)), *more]
        await send({"type": "http.response.start", "status": code, "headers": whole})
        await send({"type": "http.response.body", "body": body})

    # -- who may ask ------------------------------------------------------------------------------------------

    def _admitted(self, scope: Scope, path: str) -> tuple[bytes, int]:
        """The type and length of the body of a request that may be answered."""
        host = token = kind = b""
        length = 0
        for name, value in scope["headers"]:
            if name == b"host":
                if value not in self._hosts:
                    self._check_host(value)
                host = value
            elif name == b"authorization":
                token = value
            elif name == b"content-type":
                kind = value
            elif name == b"content-length":
                length = int(value) if value.isdigit() and len(value) < 16 else 1 << 60
        if not host:
            raise Refused(421, "there is no Host header")
        methods = METHODS.get(path)
        if methods is None:
            raise Refused(404, f"there is nothing at {_plain(path)}: known are {', '.join(METHODS)}")
        if scope["method"] not in methods:
            only = " and ".join(methods)
            raise Refused(405, f"{path} takes {only}, not {_plain(scope['method'])}", (b"allow", only.encode()))
        if path not in OPEN and not hmac.compare_digest(token, self._expected):
            why = "the token is wrong" if token else "a token is wanted"
            raise Refused(401, f"{why}: send the header Authorization: Bearer TOKEN", (b"www-authenticate", b"Bearer"))
        if length > self._limit:
            raise self._too_large(length)
        if self._rules.rate is not None and path == "/act":
            self._within(self._rules.rate)
        return kind, length

    def _check_host(self, value: bytes) -> None:
        """An address cannot be rebound by DNS; a name can, so it has to be known."""
        host = value.decode("latin1").lower()
        bare = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
        if bare not in self._names and "*" not in self._names:
            try:
                ipaddress.ip_address(bare.strip("[]"))
            except ValueError:
                fix = "ask by its address, or start it with --allow-host NAME"
                raise Refused(421, f"this server is not known as {_plain(bare)}: {fix}") from None
        if len(self._hosts) < KNOWN_HOSTS:
            self._hosts.add(value)

    def _within(self, rate: float) -> None:
        now = time.monotonic()
        self._allowance = min(max(1.0, rate), self._allowance + (now - self._asked_at) * rate)
        self._asked_at = now
        if self._allowance < 1:
            raise Refused(429, f"more than {rate:g} requests each second", (b"retry-after", b"1"))
        self._allowance -= 1

    def _too_large(self, length: int) -> Refused:
        """Closing with bytes unread resets the connection, and the client sees that instead of the answer."""
        close = ((b"connection", b"close"),) if length > DRAINED else ()
        return Refused(413, f"the body is larger than {self._limit:,} bytes", *close)

    async def _body(self, receive: Receive, length: int) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        self._reading[task] = time.monotonic() + BODY_SECONDS
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(BODY_SECONDS / 4, self._sweep)
        size = 0
        try:
            message = await receive()
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                parts, size = [body], len(body)
                while message.get("more_body"):
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > DRAINED:
                        raise self._too_large(size)
                    if size > self._limit:
                        parts.clear()
                if size > self._limit:
                    raise self._too_large(size)
                body = b"".join(parts)
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            self._late.discard(task)
            task.uncancel()
            if size > self._limit:
                raise self._too_large(DRAINED + 1) from None
            why = f"the body did not arrive within {BODY_SECONDS:g} seconds"
            raise Refused(408, why, (b"connection", b"close")) from None
        finally:
            self._reading.pop(task, None)
        if message["type"] == "http.disconnect":
            raise Gone
        if len(body) > self._limit:
            raise self._too_large(len(body))
        return body

    def _sweep(self) -> None:
        """Give up bodies that do not come: one timer for all, as one for each would cost more than all else of it."""
        now = time.monotonic()
        for task in [task for task, until in self._reading.items() if until < now]:
            del self._reading[task]
            self._late.add(task)
            task.cancel()
        self._sweeping = bool(self._reading)
        if self._sweeping:
            asyncio.get_running_loop().call_later(BODY_SECONDS / 4, self._sweep)

    # -- what is asked ----------------------------------------------------------------------------------------

    def _read(self, kind: bytes, body: bytes) -> Asked:
        assert self._reader is not None
        if kind == b"application/json":
            return self._reader.json(body)
        plain = kind.partition(b";")[0].strip().lower()
        if plain == b"application/json":
            return self._reader.json(body)
        if plain in (NPY.encode(), b"application/octet-stream"):
            return self._reader.npy(body)
        raise Refused(
            415, f"the body is {_plain(kind.decode('latin1')) or 'of no type'}: send application/json or {NPY}"
        )

    def _chosen(self) -> Batcher:
        share = self._rules.share
        canary = share > 0 and CANARY in self._batchers and self._random.random() < share
        batcher = self._batchers[CANARY if canary else MAIN]
        if batcher.full:
            raise Refused(429, "too many observations wait to be acted on: try again", (b"retry-after", b"1"))
        return batcher

    async def _other(self, path: str, receive: Receive, length: int) -> tuple[int, Headers, bytes]:
        if path == "/health":
            return 200, JSON, b'{"status":"ok"}'
        if path == "/docs":
            return 200, HTML, PAGE
        if path == "/openapi.json":
            return 200, JSON, OPENAPI
        if path == "/metrics":
            counted, gauges = await self._control.counted()
            gauges = dict(gauges) | {f'policy_version|policy="{one.name}"': one.number for one in self.served}
            return 200, PLAIN, prometheus.text(counted, gauges).encode()
        if path == "/info":
            return 200, JSON, json.dumps(self.about()).encode()
        body = await self._body(receive, length)
        asked = parse(body) if body else {}
        try:
            if path == "/reload":
                taken = await self._control.reload()
            else:
                name = asked.get("policy", MAIN)
                if not isinstance(name, str):
                    raise UsageError("policy is not a name")
                taken = [await self._control.rollback(name)]
        except RaynforceError as error:
            raise Refused(409, str(error)) from None
        return 200, JSON, json.dumps({"taken": [one.about() for one in taken]}).encode()

    def about(self) -> dict[str, Any]:
        assert self._env is not None
        env = self._env.to_json()
        limits = {"body_bytes": self._limit, "json_depth": DEPTH, "requests_per_second": self._rules.rate}
        return {
            "env": env["env"],
            "observation": env["obs"],
            "action": {name: _bounded(value) for name, value in env["action"].items()},
            "policies": [one.about() for one in self.served],
            "canary": self._rules.share,
            "greedy": self._rules.greedy,
            "limits": limits,
        }


async def _other(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})
    while scope["type"] == "lifespan":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _line(why: object) -> bytes:
    """An error's body: one line of JSON."""
    text = str(why).splitlines()
    return json.dumps({"error": text[0][:500] if text else ""}).encode()


def _plain(text: str) -> str:
    """What a stranger has sent, short and without control characters."""
    shown = text[:80].encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in shown)


def _bounded(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, tuple | list):
        return [_bounded(one) for one in value]
    return str(value) if isinstance(value, float) and abs(value) == float("inf") else value
