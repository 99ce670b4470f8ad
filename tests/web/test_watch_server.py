"""The server of the page: who may ask, what is told, and what is shown of odd runs."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.watch_runs import make_run, make_search
from raynforce.errors import UsageError
from raynforce.runs import lock
from raynforce.web import board
from raynforce.web.server import HEADERS, Server, listen, token
from raynforce.web.watching import make_server

EVIL = "<img src=x onerror=alert(1)>"


class Asker:
    def __init__(self, server: Server) -> None:
        self.port, self.secret = server.port, server.url.partition("token=")[2]

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        body: Any = None,
        bare: bool = False,
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        given = {} if bare else {"Authorization": f"Bearer {self.secret}"}
        try:
            text = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            link.request(method, path, text, given | (headers or {}))
            answer = link.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            return answer.status, json.loads(data) if data and "json" in kind else data, answer.headers
        finally:
            link.close()

    def get(self, path: str) -> Any:
        code, data, _ = self.ask(path)
        assert code == 200, data
        return data

    def runs(self) -> dict[str, Any]:
        return {run["name"]: run for run in self.get("/api/runs")["runs"]}

    def until(self, what: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "runs"
    make_run(folder / "seeds" / "seed0", seed=0)
    make_run(folder / "seeds" / "seed1", seed=1)
    make_run(folder / "evil<b>", env=EVIL, lines=5)
    make_search(folder / "search", trials=6)
    (make_run(folder / "rllib", lines=3) / "live.json").unlink()
    told = (
        "where the time went: learning 90%\n  learning bound it: fewer epochs, larger minibatches, or --engine native"
    )
    with (folder / "rllib" / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": "result", "where_the_time_went": told}) + "\n")
    return folder


@pytest.fixture(scope="module")
def asker(folder: Path) -> Iterator[Asker]:
    with Server([folder], port=0) as server:
        found = Asker(server)
        found.until(lambda: len(found.runs()) == 8)
        yield found


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_data_are_for_those_who_have_the_token(asker: Asker) -> None:
    paths = ["/api/runs", "/api/hello", "/api/changes", "/api/series?set=a&key=b", "/api/run/x", "/api", "/api/none"]
    for path in paths:
        assert asker.ask(path, bare=True)[0] == 401, path
        assert asker.ask(path, bare=True, headers={"Authorization": "Bearer wrong"})[0] == 401
        assert asker.ask(path, bare=True, headers={"Authorization": "Bearer"})[0] == 401
        assert asker.ask(path, bare=True, headers={"Authorization": f"Bearer {asker.secret}x"})[0] == 401
        assert asker.ask(path, bare=True, headers={"Cookie": f"token={asker.secret}"})[0] == 401
    assert asker.ask(f"/api/runs?token={asker.secret}", bare=True)[0] == 401, (
        "addresses are written down in many places"
    )
    code, data, _ = asker.ask("/", bare=True)
    assert code == 200
    assert b"seed0" not in data


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil.example:1"]
)
def test_a_name_that_others_let_lead_here_is_refused(asker: Asker, host: str) -> None:
    for path in ("/", "/api/runs", "/main.js"):
        assert asker.ask(path, headers={"Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_has_three_names_and_any_port_that_leads_here(asker: Asker, host: str) -> None:
    assert asker.ask("/api/hello", headers={"Host": f"{host}:9999"})[0] == 200
    assert asker.ask("/api/hello", headers={"Host": host})[0] == 200


def test_pages_of_other_origins_are_refused(asker: Asker) -> None:
    here = f"http://127.0.0.1:{asker.port}"
    assert asker.ask("/api/runs", headers={"Origin": here})[0] == 200
    for origin in ("http://evil.example", "null", "https://127.0.0.1", f"{here}.evil.example", "http://127.0.0.1:1"):
        assert asker.ask("/api/runs", headers={"Origin": origin})[0] == 403
    assert asker.ask("/api/runs", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    code, _, headers = asker.ask("/api/runs", method="OPTIONS", headers={"Origin": "http://evil.example"})
    assert code == 403
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_every_answer_has_the_strict_headers(asker: Asker) -> None:
    for path, code in (("/", 200), ("/api/runs", 200), ("/none", 404), ("/api/run/none", 404)):
        found = asker.ask(path)
        assert found[0] == code
        assert {name: found[2][name] for name in HEADERS} == HEADERS
    refused = asker.ask("/", headers={"Host": "evil"})
    assert refused[2]["content-security-policy"] == HEADERS["content-security-policy"]
    assert "unsafe" not in HEADERS["content-security-policy"]


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/views/../../server.py", "/vendor/..%2f..%2fserver.py"]
)
@pytest.mark.parametrize("start", ["", "/api/run/ID/episode"])
def test_no_path_leads_out(asker: Asker, path: str, start: str) -> None:
    start = start.replace("ID", asker.runs()["seeds/seed0"]["id"])
    for what in (path, "/..%2f..%2fconfig.yaml", "/%2e%2e%2fconfig.yaml", "//etc/passwd"):
        assert asker.ask(start + what)[0] in (403, 404)


def test_wrong_methods_are_refused(asker: Asker) -> None:
    run = asker.runs()["seeds/seed0"]["id"]
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert asker.ask("/api/runs", method=method)[0] == 405
        assert asker.ask("/", method=method)[0] == 405
    for path in ("ask", "notes"):
        assert asker.ask(f"/api/run/{run}/{path}")[0] == 405
        assert asker.ask(f"/api/run/{run}/{path}", method="POST", body={}, bare=True)[0] == 401


def test_the_token_is_this_users_alone_and_outlasts_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = token()
    assert token() == first
    path = tmp_path / "raynforce" / "watch.token"
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o644)
    assert token() != first, "others may have read it"
    path.write_text("short")
    path.chmod(0o600)
    assert len(token()) >= 32


# -- what is told -----------------------------------------------------------------------------------------------------


def test_text_stays_text(asker: Asker) -> None:
    run = asker.runs()["evil<b>"]
    assert run["env"] == EVIL
    code, _, headers = asker.ask(f"/api/run/{run['id']}")
    assert (code, headers["content-type"]) == (200, "application/json")


def test_one_run_is_told_with_its_settings_roles_faults_and_what_bounds_it(asker: Asker) -> None:
    run = asker.get(f"/api/run/{asker.runs()['seeds/seed0']['id']}")
    assert run["config"]["algorithm.learning_rate"] == 0.001
    assert run["bound"].startswith("the learner bound this run")
    assert [role["role"] for role in run["live"]["roles"]][:2] == ["learner", "sampler 0"]
    (group,) = run["history"]["groups"]
    assert "native code crashed" in group["advice"]
    assert run["can"]["stop"] == "it is not running"
    events = asker.get(f"/api/run/{run['id']}/events")["events"]
    assert [event["event"] for event in events] == ["started", "fault", "recovered", "stopped"]


def test_what_bound_a_run_that_left_no_live_json_is_known_from_its_result(asker: Asker, folder: Path) -> None:
    run = asker.get(f"/api/run/{asker.runs()['rllib']['id']}")
    assert run["live"] == {}
    assert run["bound"] == "learning bound it: fewer epochs, larger minibatches, or --engine native"


def test_curves_of_runs_and_of_seeds_together(asker: Asker) -> None:
    a, b = (asker.runs()[f"seeds/seed{n}"]["id"] for n in (0, 1))
    found = asker.get(f"/api/series?set={a}&set={b}&key=charts/episodic_return&key=none")
    curve = found["curves"]["charts/episodic_return"]
    assert curve["points"] == [100, 100]
    assert curve["low"] == [None, None]
    assert curve["span"] == [2000, 200_000]
    assert found["curves"]["none"]["x"] == []
    assert "eval/return" in found["names"]
    both = asker.get(f"/api/series?set={a},{b}&key=charts/episodic_return&points=50")["curves"][
        "charts/episodic_return"
    ]
    assert all(low <= y <= high for low, y, high in zip(both["low"][0], both["y"][0], both["high"][0], strict=True))
    near = asker.get(f"/api/series?set={a}&key=charts/SPS&from=50000&to=60000")["curves"]["charts/SPS"]
    assert near["x"] == [48000, 50000, 52000, 54000, 56000, 58000, 60000, 62000]
    for wrong in ("x=other", "from=a", "points=x", "smooth=nan"):
        assert asker.ask(f"/api/series?set={a}&key=charts/SPS&{wrong}")[0] == 400


def test_a_search_with_its_trials(asker: Asker) -> None:
    (found,) = asker.get("/api/runs")["tunings"]
    search = asker.get(f"/api/tuning/{found['id']}")
    assert len(search["trials"]) == 6
    assert search["trials"][0]["runs"] == [asker.runs()["search/trial_000"]["id"]]
    assert search["importance"]["algorithm.learning_rate"] == 0.71
    assert search["trials"][5]["cause"] == "ValueError: NaN"


def test_the_table_is_sent_once_as_long_as_it_is_the_same(asker: Asker) -> None:
    _, _, headers = asker.ask("/api/runs")
    code, data, _ = asker.ask("/api/runs", headers={"If-None-Match": headers["etag"]})
    assert (code, data) == (304, b"")


def test_notes_are_kept_in_the_run_and_stop_is_for_runs_that_run(asker: Asker, folder: Path) -> None:
    run = asker.runs()["seeds/seed1"]["id"]
    assert asker.ask(f"/api/run/{run}/notes", method="POST", body={"text": "gut <b>"})[0] == 200
    assert (folder / "seeds" / "seed1" / "notes.txt").read_text() == "gut <b>"
    assert asker.until(lambda: asker.get(f"/api/run/{run}")["notes"]) == "gut <b>"
    for body in ({}, {"text": 1}, {"text": "x" * 70_000}, [1], b"{", b"x" * 400_000):
        assert asker.ask(f"/api/run/{run}/notes", method="POST", body=body)[0] == 400
    code, data, _ = asker.ask(f"/api/run/{run}/ask", method="POST", body={"what": "stop"})
    assert (code, data) == (409, {"error": "it is not running"})
    assert asker.ask(f"/api/run/{run}/ask", method="POST", body={"what": "rm"})[0] == 400
    assert not list((folder / "seeds" / "seed1").glob("asked.*"))


def test_a_film_is_sent_if_it_is_one_of_the_run(asker: Asker, folder: Path) -> None:
    run = folder / "seeds" / "seed0"
    (run / "episodes").mkdir()
    (run / "episodes" / "step_000000050000-1.mp4").write_bytes(b"film")
    (run / "episodes" / "odd.html").write_text("<script>")
    id = asker.runs()["seeds/seed0"]["id"]
    (film,) = asker.until(lambda: asker.get(f"/api/run/{id}")["episodes"])
    assert film["step"] == 50_000
    code, data, headers = asker.ask(f"/api/run/{id}/episode/{film['name']}")
    assert (code, data, headers["content-type"]) == (200, b"film", "video/mp4")
    assert asker.ask(f"/api/run/{id}/episode/odd.html")[0] == 404


# -- runs that live, and odd ones -------------------------------------------------------------------------------------


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Asker]]:
    monkeypatch.setattr(board, "FIND", 0.2)
    monkeypatch.setattr(board, "LOOK", 0.1)
    (tmp_path / "runs").mkdir()
    with Server([tmp_path / "runs"], port=0) as server:
        yield tmp_path / "runs", Asker(server)


def test_runs_come_change_and_go_within_a_moment(watching: tuple[Path, Asker]) -> None:
    folder, asker = watching
    assert asker.until(lambda: asker.get("/api/runs")["ready"])
    assert asker.runs() == {}
    link = http.client.HTTPConnection("127.0.0.1", asker.port, timeout=10)
    link.request("GET", "/api/changes", headers={"Authorization": f"Bearer {asker.secret}"})
    stream = link.getresponse()

    def news() -> dict[str, Any]:
        while not (text := stream.readline()).startswith(b'data: {"changed'):
            pass
        return dict(json.loads(text[6:]))

    make_run(folder / "a", lines=3, ended=False)
    with lock.locked(folder / "a"):
        id = asker.until(lambda: asker.runs().get("a"))["id"]
        while id not in news()["changed"]:
            pass
        asker.until(lambda: asker.runs()["a"]["status"] == "running")
        before = asker.runs()["a"]["steps"]
        with (folder / "a" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": before + 500, "time": 9.0, "charts/episodic_return": 1.0}) + "\n")
        while id not in news()["changed"]:
            pass
        asker.until(lambda: asker.runs()["a"]["steps"] == before + 500)
        code, _, _ = asker.ask(f"/api/run/{id}/ask", method="POST", body={"what": "checkpoint"})
        assert code == 200
        assert (folder / "a" / "asked.checkpoint").exists()
    link.close()
    shutil.rmtree(folder / "a")
    assert asker.ask(f"/api/run/{id}")[0] in (200, 404), "it is being deleted"
    asker.until(lambda: asker.runs() == {})
    assert asker.ask(f"/api/run/{id}")[0] == 404


def test_odd_runs_are_shown_as_what_they_are(watching: tuple[Path, Asker]) -> None:
    folder, asker = watching
    for name in ("yaml", "empty", "nan", "pipe", "bytes"):
        make_run(folder / name, lines=2)
    (folder / "yaml" / "config.yaml").write_text("{{{")
    for file in ("metrics.jsonl", "events.jsonl", "live.json"):
        (folder / "empty" / file).write_text("")
        (folder / "bytes" / file).write_bytes(os.urandom(3000))
    (folder / "nan" / "metrics.jsonl").write_text(
        '{"step": 1, "time": 0.1, "charts/episodic_return": NaN, "b": Infinity}\n{"st'
    )
    (folder / "pipe" / "metrics.jsonl").unlink()
    os.mkfifo(folder / "pipe" / "metrics.jsonl")
    (folder / "no-run").mkdir()
    asker.until(lambda: len(asker.runs()) == 5)
    runs = asker.runs()
    assert runs["yaml"]["status"] == "broken"
    assert "YAML" in runs["yaml"]["reason"]
    assert runs["nan"]["return"] is None
    for run in runs.values():
        assert asker.ask(f"/api/run/{run['id']}")[0] == 200, run["name"]
        assert asker.ask(f"/api/run/{run['id']}/events")[0] == 200
        curve = asker.get(f"/api/series?set={run['id']}&key=charts/episodic_return")["curves"]["charts/episodic_return"]
        assert len(curve["x"]) == len(curve["y"][0])


def test_a_run_at_a_url_is_watched_without_a_working_copy(tmp_path: Path) -> None:
    make_run(tmp_path / "there" / "runs" / "one", lines=4)
    with Server([f"file://{tmp_path}/there/runs"], port=0) as server:
        asker = Asker(server)
        run = asker.until(lambda: asker.runs().get("one"))
        assert run["path"] == f"file://{tmp_path}/there/runs/one"
        assert asker.get(f"/api/run/{run['id']}")["config"]["algo"] == "ppo"
        assert asker.ask(f"/api/run/{run['id']}/notes", method="POST", body={"text": "there"})[0] == 200
        copies = server.board.run(run["id"])
        assert copies is not None
        assert str(tmp_path) not in str(copies.path)
    assert (tmp_path / "there" / "runs" / "one" / "notes.txt").read_text() == "there"
    assert not copies.path.exists()


def test_a_port_in_use_and_a_place_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} cannot be used .*another --port"):
            listen(port)
    with pytest.raises(UsageError, match="nowhere does not exist: give a run"):
        make_server((tmp_path / "nowhere",), port=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        make_server((tmp_path / "file",), port=0)


def test_the_server_ends_with_nothing_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    server = Server([tmp_path], port=0).start()
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    link.request("GET", "/api/changes", headers={"Authorization": f"Bearer {Asker(server).secret}"})
    assert link.getresponse().status == 200  # a stream that is open
    server.close()
    link.close()
    left = {thread for thread in threading.enumerate() if thread.is_alive()} - before
    assert not [thread for thread in left if "AnyIO" not in thread.name]
