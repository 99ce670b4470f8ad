"""`raynforce watch`: serve the page until Ctrl-C; `train --watch`: as long as the training lasts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from raynforce.web import watching


def watch(sources: list[str], *, port: int | None, browser: bool, as_json: bool) -> int:
    if watching.PARENT in os.environ:
        watching.beside(tuple(sources)).serve()
        return 0
    server = watching.make_server(tuple(sources), port=port)
    if as_json:
        print(json.dumps({"url": server.url, "port": server.port, "watching": server.board.sources}), flush=True)
    else:
        print(f"watching {', '.join(server.board.sources)}: {server.url}", flush=True)
        print("the link is for you alone, it holds a token; Ctrl-C ends the page and no run", flush=True)
    if browser and watching.open_browser(server.url) and not as_json:
        print("opened in the browser", file=sys.stderr, flush=True)
    server.serve()
    return 0


@contextlib.contextmanager
def page(arguments: argparse.Namespace, how: dict[str, Any], tell: Callable[[str], Any]) -> Iterator[None]:
    """With --watch, the page of what is `opened`, while it lasts."""
    if not arguments.watch:
        yield
        return
    watching.require()
    served, before = watching.Beside(), how.get("opened") or (lambda path: None)

    def opened(path: str) -> None:
        before(path)
        served.show(path)

    how["opened"] = opened
    try:
        tell(f"watch: {served.url}\n")
        watching.open_browser(served.url)
        yield
    finally:
        served.close()
