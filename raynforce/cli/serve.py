"""`raynforce serve`: a policy over HTTP, until a signal ends it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

from raynforce import settings
from raynforce.errors import RaynforceError

PORT = Annotated[int, settings.Range(0, 65535)]
REPLICAS = Annotated[int, settings.Range(1, 1000)]
RATE = Annotated[float, settings.Range(1e-3, 1e9)]
SHARE = Annotated[float, settings.Range(0, 1)]
LOOK = 0.2  # seconds between two looks at whether the server is still there


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, and exit with 130 or 143; SIGHUP reloads."""
    kinds: dict[str, Any] = {"port": PORT, "replicas": REPLICAS, "seed": settings.SEED, "rate": RATE}
    given = {name: getattr(arguments, name) for name in kinds}
    how = {name: settings.coerce(v, kinds[name], f"--{name}") for name, v in given.items() if v is not None}
    for name in ("token", "host", "address"):
        if getattr(arguments, name) is not None:
            how[name] = getattr(arguments, name)
    if arguments.canary:
        how["canary"] = settings.coerce(arguments.canary[0], SHARE, "--canary"), arguments.canary[1]
    how |= {name: getattr(arguments, name) for name in ("local", "checkpoint", "sample", "follow")}
    how["allow_hosts"] = arguments.allow_host
    say = functools.partial(print, file=sys.stderr, flush=True)
    with _Signals() as signals:
        from raynforce.ops.serving.service import serve

        service = serve(arguments.run, say=say, **how)
        with service:
            if not signals.stop:
                _tell(service, arguments.json, how)
            while not signals.stop and not service.wait(0 if signals.reload else LOOK):
                if not service.alive():
                    raise RaynforceError("the server ended by itself")
                if signals.reload:
                    signals.reload = False
                    _reload(service, say)
            say("stopping: requests in flight are answered")
    return 128 + signals.stop if signals.stop else 0


def _reload(service: Any, say: Callable[[str], None]) -> None:
    try:
        if not service.reload():
            say("nothing is new")
    except RaynforceError as error:
        say(f"not reloaded: {error}")


def _tell(service: Any, as_json: bool, how: dict[str, Any]) -> None:
    from raynforce.ops.serving.tokens import token_from_environment

    if as_json:
        facts = {"url": service.url, "token": service.token, "pid": os.getpid(), "local": how["local"]}
        print(json.dumps({**facts, "policies": [served.about() for served in service.served]}), flush=True)
        return
    for served in service.served:
        share = f", {how['canary'][0]:.0%} of requests" if served.name == "canary" else ""
        print(f"{served.name}: version {served.number} of {served.checkpoint}{share}")
    print(f"listening: {service.url} (POST /act; {service.url}/docs shows the rest)")
    given = how.get("token") or token_from_environment()  # logs need not have what the user has already
    print(f"token: {service.token}" if given is None else "token: the one that was given")
    print("Ctrl-C stops it", flush=True)


class _Signals:
    """SIGINT and SIGTERM stop, SIGHUP reloads; none of them interrupts what is being done."""

    def __init__(self) -> None:
        self.stop = 0
        self.reload = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        elif self.stop:
            raise KeyboardInterrupt(number)  # the second time somebody means it
        else:
            self.stop = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
