"""`raynforce.watch`: the page, from Python; and the page beside a training, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from raynforce.errors import UsageError
from raynforce.runs.store import is_url

if TYPE_CHECKING:
    from raynforce.web.server import Server

DEFAULT = "runs"
PARENT = "RAYNFORCE_WATCH_SOCKET"  # the descriptor that a training hands to the process of its page


def watch(*sources: str | Path, port: int | None = None, browser: bool = True) -> Server:
    """Serve a page that shows runs, folders of runs, or URLs of either, live; by default those in `runs`.

    Returns at once: `url` is the link, `close()` ends it, and so does the end of this process.
    """
    server = make_server(sources, port=port).start()
    if browser:
        open_browser(server.url)
    return server


def make_server(sources: tuple[str | Path, ...], *, port: int | None) -> Server:
    for source in sources:
        if not is_url(str(source)) and not Path(source).expanduser().exists():
            raise UsageError(f"{source} does not exist: give a run, a folder of runs, or a URL")
    require()
    from raynforce.web.server import Server

    return Server(sources or (DEFAULT,), port=port)


def require() -> None:
    """Refuse in one line where what the page needs is not installed."""
    for name in ("starlette", "uvicorn"):
        if find_spec(name) is None:
            raise UsageError(f'the page needs {name}, which is not installed: pip install "raynforce[web]"')


def open_browser(url: str) -> bool:
    """Open the link, if there is a browser and somebody to see it."""
    seen = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if not seen or os.environ.get("SSH_CONNECTION"):
        return False
    import webbrowser

    with contextlib.suppress(webbrowser.Error):
        return webbrowser.open(url)
    return False


class Beside:
    """The page of a training: a process of its own, which ends with this one however that comes."""

    def __init__(self, port: int | None = None) -> None:
        from raynforce.web.server import HOST, listen, token

        self._socket = listen(port)  # here, so that the link is known before there is a run
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}/#token={token()}"
        self._process: subprocess.Popen[bytes] | None = None

    def show(self, run: str) -> None:
        """Begin to serve a run, once it is there."""
        if self._process is not None:
            return
        descriptor = self._socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raynforce", "watch", "--no-browser", run],
            env={**os.environ, PARENT: str(descriptor)},
            stdin=subprocess.PIPE,  # its end tells that this process is gone
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for the training
        )

    def close(self) -> None:
        self._socket.close()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


def beside(sources: tuple[str, ...]) -> Server:
    """The server in such a process."""
    import signal
    import socket

    from raynforce.web.server import Server

    server = Server(sources, opened=socket.socket(fileno=int(os.environ.pop(PARENT))))  # the folder may be yet to come
    os.nice(5)  # training comes first

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return server
