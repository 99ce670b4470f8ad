"""What is said of a server that is no dashboard, takes no jobs, or is not there; and how a log is shown."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raynforce.cli.jobs import _View
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.dashboard import Dashboard, located
from raynforce.runs.progress import PlainProgress, ProgressState, read_plain_line


class Server:
    """A web server with these answers, by path."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.headers.append(dict(self.headers))
                code, body = outer.answers.get(self.path, (404, "Not Found"))
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", body)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    found = Server()
    yield found
    found.server.shutdown()
    found.server.server_close()


VERSION = json.dumps({"version": "4", "ray_version": "2.60.0"})


def test_nothing_there(server: Server) -> None:
    with pytest.raises(UsageError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:1"):
        Dashboard("http://127.0.0.1:1").require_jobs()


@pytest.mark.parametrize("body", ["<html>hello</html>", "[1]", "{}"])
def test_another_server(server: Server, body: str) -> None:
    server.answers["/api/version"] = (200, body)
    with pytest.raises(UsageError, match="is no Ray dashboard"):
        Dashboard(server.url).require_jobs()


@pytest.mark.parametrize("code", [404, 500])
def test_a_dashboard_without_jobs(server: Server, code: int) -> None:
    server.answers |= {"/api/version": (200, VERSION), "/api/jobs/": (code, "no")}
    with pytest.raises(UsageError, match=r"Ray 2\.60\.0 at .* takes no jobs"):
        Dashboard(server.url).require_jobs()


def test_a_token_is_shown_only_where_it_is_asked_for_and_follows_no_redirect(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    server.answers |= {"/api/version": (200, VERSION), "/api/jobs/": (200, "[]")}
    Dashboard(server.url).require_jobs()
    assert not any("Authorization" in headers for headers in server.headers)
    server.answers["/api/version"] = (302, f"{server.url}/elsewhere")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(RaynforceError, match="status 302"):
        Dashboard(server.url).require_jobs()
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    assert len(server.headers) == 3


@pytest.mark.parametrize("address", ["ray://head:10001", "http://", "http://a b", "auto:x", "http://me:pw@head:8265"])
def test_addresses_that_are_none(server: Server, address: str) -> None:
    with pytest.raises(UsageError, match="such as http"):
        located(address)


def test_where_an_address_comes_from(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert located(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the control store, which takes no jobs
    assert located(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://head/")
    assert located(None) == "https://head"
    assert located("head:8265") == "http://head:8265"


STATE = ProgressState(12_345, 200_000, 8.0, 15_000.4, None, None, 123.4, None, None, {"v": -0.01}, faults=3)


def test_a_line_of_a_log_is_read_as_it_was_written() -> None:
    out = io.StringIO()
    view = PlainProgress(out)
    view.update(STATE)
    view.message("preset: none")
    first, second = out.getvalue().splitlines()
    found = read_plain_line(first, 8.0)
    assert found == ProgressState(12_345, 200_000, 8.0, 15_000, None, None, 123.4, None, None, {"v": -0.01}, faults=3)
    assert read_plain_line(second, 8.0) is None


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_panel_and_a_pipe_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    out = io.StringIO()
    PlainProgress(out).update(STATE)
    log = [*out.getvalue().splitlines(), "", "finished: all steps are done", "raynforce: broken", '{"run": "x"}']
    screen, pipe = Terminal(), io.StringIO()
    for stream in (screen, pipe):
        view = _View(stream, "job mine", 0.0)
        for line in log:
            view.show(line)
        view.close()
    assert pipe.getvalue().splitlines() == log[:3]
    assert "╭" in screen.getvalue()
    assert "job mine" in screen.getvalue()
    assert screen.getvalue().rindex("finished") > screen.getvalue().rindex("╰")
    assert "broken" not in screen.getvalue()
