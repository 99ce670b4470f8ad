"""A policy over HTTP from one process: its answers, its limits, and policies that are replaced under load."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="there is no uvicorn: pip install 'raynforce[serve]'")

from served_policies import TOKEN, ServedRun, save

import raynforce
from raynforce.client import Client, ServerError
from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.ops.serving import app, keeping
from raynforce.ops.serving.reading import read_npy
from raynforce.ops.serving.service import Service, serve
from raynforce.policy import Policy, load

OBS = np.random.default_rng(0).normal(0, 1, (200, 4)).astype(np.float32)
Start = Callable[..., Service]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves locally at a free port, until the test is over."""
    began: list[Service] = []

    def begin(run: Path, **how: Any) -> Service:
        began.append(serve(run, **{"port": 0, "token": TOKEN, "local": True, **how}))
        return began[-1]

    yield begin
    for service in began:
        service.stop()


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    return save(tmp_path / "policy")[0]


def post(service: Service, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    host, _, port = service.url.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", path, body, {name: value for name, value in given.items() if value})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


# -- answers --------------------------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "discrete": {},
    "dqn": {"algo": "dqn"},
    "normalised": {"normalize_obs": True},
    "continuous": {"env": "Pendulum-v1"},
    "dict": {"env": "served_policies:Several"},
    "tuple": {"env": "served_policies:Several", "env_args": {"kind": "tuple"}},
    "torch": {"factory": "served_policies:torch_module"},
}


def nested(observations: list[Any]) -> Any:
    """Several observations as one batch."""
    first = observations[0]
    if isinstance(first, dict):
        return {name: nested([obs[name] for obs in observations]) for name in first}
    if isinstance(first, tuple):
        return tuple(nested([obs[i] for obs in observations]) for i in range(len(first)))
    return np.stack(observations)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_equal_those_of_load(kind: str, tmp_path: Path, start: Start) -> None:
    path, space = save(tmp_path / "policy", **KINDS[kind])
    space.seed(1)
    seen = [space.sample() for _ in range(20)] if "env" in KINDS[kind] else list(OBS[:20])
    policy = load(path)
    with start(path).client() as client:
        for obs in seen:
            np.testing.assert_allclose(client.act(obs), policy.act(obs), rtol=1e-5, atol=1e-6)
        batch = nested(seen)
        np.testing.assert_allclose(client.act(batch), policy.act(batch), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(client.act(batch, greedy=True), policy.act(batch), rtol=1e-5, atol=1e-6)
        answer, expected = client.act(seen[0]), policy.act(seen[0])
        assert (np.shape(answer), np.asarray(answer).dtype) == (np.shape(expected), np.asarray(expected).dtype)


def test_requests_that_come_together_are_one_batch(cartpole: Path, start: Start) -> None:
    service, policy = start(cartpole), load(cartpole)
    expected = policy.act(OBS)
    with service.client() as client, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(client.act, OBS)) == expected.tolist()
        text = client.metrics()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures['raynforce_serve_requests_total{policy="main",code="200"}']) == len(OBS)
    assert float(figures['raynforce_serve_observations_total{policy="main"}']) == len(OBS)
    assert float(figures['raynforce_serve_batches_total{policy="main"}']) <= len(OBS)


def test_a_slow_policy_has_a_thread_and_requests_gather_meanwhile(
    cartpole: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = Policy.act

    def slow(self: Policy, *args: Any, **how: Any) -> Any:
        time.sleep(0.02)
        return act(self, *args, **how)

    monkeypatch.setattr(Policy, "act", slow)
    service = start(cartpole)
    with service.client() as client, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(client.act, OBS)) == act(load(cartpole), OBS).tolist()
        figures = dict(line.rsplit(" ", 1) for line in client.metrics().splitlines() if not line.startswith("#"))
    assert float(figures['raynforce_serve_batches_total{policy="main"}']) < len(OBS) / 3


def test_masks_and_sampling(cartpole: Path, start: Start) -> None:
    with start(cartpole, sample=True, seed=3).client() as client:
        assert [client.act(obs, mask=np.array([False, True])) for obs in OBS[:5]] == [1] * 5
        with pytest.raises(UsageError, match="mask has shape"):
            client.act(OBS[0], mask=np.array([True, True, True]))
        sampled = client.act(np.repeat(OBS[:1], 400, axis=0))
        assert set(sampled.tolist()) == {0, 1}
        greedy = client.act(np.repeat(OBS[:1], 400, axis=0), greedy=True)
        assert len(set(greedy.tolist())) == 1
    with (
        start(cartpole, sample=True, seed=3).client() as first,
        start(cartpole, sample=True, seed=3).client() as second,
    ):
        assert first.act(OBS).tolist() == second.act(OBS).tolist()


def test_what_is_served_is_told(cartpole: Path, start: Start) -> None:
    service = start(cartpole)
    with service.client() as client:
        about = client.info()
        assert client.health() == {"status": "ok"}
    assert (about["env"], about["policies"][0]["version"], about["policies"][0]["step"]) == ("CartPole-v1", 1, 100)
    assert about["observation"][0]["shape"] == [4]
    connection = HTTPConnection(service.url.removeprefix("http://"))
    for path, word in (("/openapi.json", b'"openapi": "3.1.0"'), ("/docs", b"<script>")):  # without a token
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200
        assert word in body
        assert b"://" not in body
    connection.close()


def test_prometheus_reads_the_metrics(cartpole: Path, start: Start) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool (Debian: apt install prometheus)")
    with start(cartpole).client() as client:
        client.act(OBS[0])
        text = client.metrics()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- what is refused ------------------------------------------------------------------------------------------


def as_npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


GOOD = json.dumps({"obs": [0.0, 0.1, 0.0, -0.1]}).encode()
NPY = {"Content_Type": "application/x-npy"}
REFUSED: dict[str, tuple[int, str, bytes, dict[str, str]]] = {
    "no token": (401, "/act", GOOD, {"Authorization": ""}),
    "a wrong token": (401, "/act", GOOD, {"Authorization": "Bearer wrong"}),
    "another scheme": (401, "/act", GOOD, {"Authorization": f"Basic {TOKEN}"}),
    "another path": (404, "/acts", GOOD, {}),
    "a method": (405, "/info", GOOD, {}),
    "no type": (415, "/act", GOOD, {"Content_Type": ""}),
    "another type": (415, "/act", GOOD, {"Content_Type": "text/plain"}),
    "another host": (421, "/act", GOOD, {"Host": "evil.example"}),
    "no JSON": (422, "/act", b"{", {}),
    "not UTF-8": (422, "/act", b"\xff\xfe", {}),
    "a list": (422, "/act", b"[1]", {}),
    "no obs": (422, "/act", b"{}", {}),
    "an unknown field": (422, "/act", b'{"obs": [0,0,0,0], "x": 1}', {}),
    "greedy": (422, "/act", b'{"obs": [0,0,0,0], "greedy": 1}', {}),
    "a shape": (422, "/act", b'{"obs": [0, 0, 0]}', {}),
    "too many dimensions": (422, "/act", b'{"obs": [[[0, 0, 0, 0]]]}', {}),
    "an empty batch": (422, "/act", as_npy(np.zeros((0, 4), np.float32)), NPY),
    "ragged": (422, "/act", b'{"obs": [[0, 0], [0]]}', {}),
    "text": (422, "/act", b'{"obs": ["a", "b", "c", "d"]}', {}),
    "a number as text": (422, "/act", b'{"obs": ["1", 0, 0, 0]}', {}),
    "null": (422, "/act", b'{"obs": [null, 0, 0, 0]}', {}),
    "NaN": (422, "/act", b'{"obs": [NaN, 0, 0, 0]}', {}),
    "infinity": (422, "/act", b'{"obs": [1e999, 0, 0, 0]}', {}),
    "more than float32": (422, "/act", b'{"obs": [1e39, 0, 0, 0]}', {}),
    "a huge integer": (422, "/act", b'{"obs": [%b, 0, 0, 0]}' % (b"9" * 400), {}),
    "more digits than Python reads": (422, "/act", b'{"obs": [%b, 0, 0, 0]}' % (b"9" * 9000), {}),
    "deep": (422, "/act", b'{"obs": %b0%b}' % (b"[" * 5000, b"]" * 5000), {}),
    "deep objects": (422, "/act", b'{"a":' * 5000 + b"1" + b"}" * 5000, {}),
    "large": (413, "/act", b'{"obs": [%b0]}' % (b"0," * 600_000), {}),
    "no npy": (422, "/act", GOOD, NPY),
    "npy with objects": (422, "/act", as_npy(np.array([{}, 1], object)), NPY),
    "npy with text": (422, "/act", as_npy(np.array(["a", "b", "c", "d"])), NPY),
    "npy cut off": (422, "/act", as_npy(np.zeros(4, np.float32))[:-3], NPY),
    "npy with NaN": (422, "/act", as_npy(np.full(4, np.nan, np.float32)), NPY),
    "npy of another shape": (422, "/act", as_npy(np.zeros(7, np.float32)), NPY),
    "state": (422, "/act", b'{"obs": [0, 0, 0, 0], "state": [1]}', {}),
    "nothing to go back to": (409, "/rollback", b"", {}),
    "an unknown policy": (409, "/rollback", b'{"policy": "x"}', {}),
}


def one_line(body: bytes) -> str:
    assert b"\n" not in body.strip()
    found = json.loads(body)
    assert set(found) == {"error"}
    assert found["error"]
    assert "\n" not in found["error"]
    assert len(found["error"]) <= 500
    return str(found["error"])


def test_what_is_wrong_is_told_in_one_line(cartpole: Path, start: Start) -> None:
    service = start(cartpole)
    for name, (code, path, body, headers) in REFUSED.items():
        status, answer = post(service, path, body, **headers)
        assert status == code, (name, answer)
        one_line(answer)
    assert post(service, "/act", GOOD)[0] == 200
    for host in ("localhost", "127.0.0.1:80", "[::1]:8000", socket.gethostname()):
        assert post(service, "/act", GOOD, Host=host)[0] == 200, host


def raw(service: Service, request: bytes, seconds: float = 5.0) -> bytes:
    """What comes back for bytes as they are."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.settimeout(seconds)
        answer = b""
        try:
            connection.sendall(request)
            while piece := connection.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer


def a_shape(rng: np.random.Generator) -> bytes:
    shape = rng.integers(0, 6, int(rng.integers(1, 5)))
    fits = tuple(shape[-1:]) == (4,) and len(shape) <= 2 and shape.all()
    return b"{}" if fits else json.dumps({"obs": np.zeros(shape).tolist()}).encode()


def deep(rng: np.random.Generator) -> bytes:
    depth = int(rng.integers(40, 20_000))
    return b'{"obs": ' + b"[" * depth + b"]" * int(rng.integers(0, depth)) + b"}"


def broken_npy(rng: np.random.Generator) -> bytes:
    whole = bytearray(as_npy(np.zeros(4, np.float32)))
    for place in rng.integers(0, 100, 3):
        whole[place] ^= 1 + int(rng.integers(255))
    return bytes(whole)[: int(rng.integers(0, len(whole)))]


def lying_npy(rng: np.random.Generator) -> bytes:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % int(rng.integers(10, 2**40))
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)


def noise(rng: np.random.Generator) -> bytes:
    return bytes(rng.integers(0, 256, int(rng.integers(1, 200)), dtype=np.uint8))


def one(rng: np.random.Generator, *values: bytes) -> bytes:
    return values[int(rng.integers(len(values)))]


NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e39", b"[]", b'"1"')
METHODS = (b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"HEAD", b"TRACE")
HOSTS = (b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil", b"[::1", b"a@127.0.0.1", b"")
TOKENS = (b"", b"Bearer", b"Bearer wrong", TOKEN.encode(), b"bearer x")
WAYS: list[Callable[[np.random.Generator], dict[str, Any]]] = [
    lambda rng: {"body": a_shape(rng)},
    lambda rng: {"body": b'{"obs": [%b, 0, 0, 0]}' % one(rng, *NO_NUMBERS)},
    lambda rng: {"body": b'{"obs": [%b]}' % (b"1.5," * int(rng.integers(1000, 50_000)) + b"1")},
    lambda rng: {"body": deep(rng)},
    lambda rng: {"token": one(rng, *TOKENS)},
    lambda rng: {"line": one(rng, *METHODS) + b" /act HTTP/1.1"},
    lambda rng: {"host": one(rng, *HOSTS)},
    lambda rng: {"kind": b"application/x-npy", "body": broken_npy(rng)},
    lambda rng: {"kind": b"application/x-npy", "body": lying_npy(rng)},
    lambda rng: {"body": noise(rng)},
    lambda rng: {"kind": one(rng, b"text/html", b"application/x-pickle", noise(rng).hex().encode(), b"")},
    lambda rng: {"missing": int(rng.integers(1, 1000))},  # it hangs up before all is there
    lambda rng: {"chunked": True, "body": b'{"obs": [0,0,' + b"1," * int(rng.integers(1, 5000))},
    lambda rng: {"line": b"POST /%b HTTP/1.1" % noise(rng).hex()[:60].encode()},
]


def hostile(rng: np.random.Generator) -> tuple[bytes, bool]:
    """A request that no client sends, and whether it must be answered."""
    usual = {"line": b"POST /act HTTP/1.1", "host": b"127.0.0.1", "kind": b"application/json", "body": GOOD}
    way = {**usual, "token": f"Bearer {TOKEN}".encode(), "missing": 0, **WAYS[int(rng.integers(len(WAYS)))](rng)}
    body, length = way["body"], b"Content-Length: %d" % (len(way["body"]) + way["missing"])
    if "chunked" in way:
        length, body = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = [way["line"], b"Host: " + way["host"], b"Authorization: " + way["token"], b"Content-Type: " + way["kind"]]
    return b"\r\n".join([*head, b"Connection: close", length]) + b"\r\n\r\n" + body, not way["missing"]


def ask_hostile(service: Service, count: int, policy: Policy) -> None:
    """Hostile requests, with good ones between them."""
    rng = np.random.default_rng(5)
    with service.client() as client:
        for number in range(count):
            request, answered = hostile(rng)
            answer = raw(service, request, 5.0 if answered else 0.02)
            if answered:
                head, _, body = answer.partition(b"\r\n\r\n")
                code = int(head.split()[1])
                assert 400 <= code < 500, (request[:300], answer)
                if not request.startswith(b"HEAD"):
                    assert b"\n" not in body.strip(), (request[:300], answer)
                    assert body.strip(), (request[:300], answer)
            if number % 50 == 0:
                assert client.act(OBS[number % len(OBS)]) == policy.act(OBS[number % len(OBS)])
        assert client.act(OBS).tolist() == policy.act(OBS).tolist()


def test_a_thousand_hostile_requests_leave_it_unharmed(cartpole: Path, start: Start) -> None:
    ask_hostile(start(cartpole), 1000, load(cartpole))


def test_a_body_that_does_not_come_is_not_waited_for(
    cartpole: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    service = start(cartpole)
    head = (
        f"POST /act HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    )
    answer = raw(service, head.encode() + b"Content-Length: 50\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408"), answer
    one_line(answer.partition(b"\r\n\r\n")[2])
    endless = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"1" * 65536 + b"\r\n") * 20
    assert b"413" in raw(service, endless)[:20]
    assert post(service, "/act", GOOD)[0] == 200


def test_more_requests_than_the_rate_are_refused(cartpole: Path, start: Start) -> None:
    service = start(cartpole, rate=5)
    codes = [post(service, "/act", GOOD)[0] for _ in range(12)]
    assert codes[:5] == [200] * 5
    assert codes.count(429) >= 5
    time.sleep(0.5)
    assert post(service, "/act", GOOD)[0] == 200


def test_npy_is_read_without_pickle() -> None:
    for array in (np.zeros((2, 3), ">f8"), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float32(1)):
        np.testing.assert_array_equal(read_npy(as_npy(array)), array)


WRONG: dict[str, dict[str, Any]] = {
    "needs a token": {"host": "0.0.0.0", "token": None},
    "needs at least 16": {"host": "0.0.0.0", "token": "short"},
    "a header cannot carry": {"token": "two words"},
    "share is 1.5": {"canary": (1.5, "runs/x")},
    "--port 70000": {"port": 70000},
    "--replicas 0": {"replicas": 0},
    "--local is one process": {"replicas": 2},
    "--rate 0": {"rate": 0},
    "for Ray": {"address": "auto"},
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_use_is_one_line(said: str, cartpole: Path, start: Start) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        start(cartpole, **WRONG[said])
    assert "\n" not in str(raised.value)


def test_a_port_that_is_taken_and_a_run_without_a_policy(cartpole: Path, tmp_path: Path, start: Start) -> None:
    port = int(start(cartpole).url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is taken"):
        start(cartpole, port=port)
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "empty", "holds no checkpoint"), (tmp_path / "none", "there is no run")):
        with pytest.raises(CheckpointError, match=said):
            start(path)


# -- policies that are replaced -------------------------------------------------------------------------------


def test_a_new_best_is_taken_and_given_back(tmp_path: Path, start: Start) -> None:
    run = ServedRun(tmp_path / "run")
    service, old = start(run.path), load(run.path)
    with service.client() as client:
        assert client.reload() == []
        made = run.best()
        new = load(run.path)
        assert old.act(OBS).tolist() != new.act(OBS).tolist()
        assert client.act(OBS).tolist() == old.act(OBS).tolist()
        (taken,) = client.reload()
        assert (taken["version"], taken["checkpoint"]) == (2, str(made))
        assert client.act(OBS).tolist() == new.act(OBS).tolist()
        assert client.rollback()["version"] == 1
        assert client.act(OBS).tolist() == old.act(OBS).tolist()
        with pytest.raises(ServerError, match="no way back") as raised:
            client.rollback()
        assert raised.value.status == 409
        assert 'reloads_total{result="taken"} 2' in client.metrics()


def test_other_spaces_are_refused_and_the_old_policy_stays(tmp_path: Path, start: Start) -> None:
    run = ServedRun(tmp_path / "run")
    service, old = start(run.path), load(run.path)
    run.best(env="Pendulum-v1")
    with service.client() as client:
        with pytest.raises(ServerError, match=r"spaces of .* are not those that are served"):
            client.reload()
        with pytest.raises(UsageError, match="are not those that are served"):
            service.reload()
        assert client.act(OBS).tolist() == old.act(OBS).tolist()
        (run.path / "best" / "policy.json").write_text("{")
        with pytest.raises(ServerError, match="torn"):
            client.reload()
        assert client.act(OBS).tolist() == old.act(OBS).tolist()


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_follow_takes_each_new_best(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LOOK", 0.05)
    monkeypatch.setattr("raynforce.ops.serving.local.LOOK", 0.05)
    run, said = ServedRun(tmp_path / "run"), []
    service = start(run.path, follow=True, say=said.append)
    with service.client() as client:

        def version() -> int:
            return int(client.info()["policies"][0]["version"])

        run.best()
        wait_for(lambda: version() == 2)
        assert client.rollback()["version"] == 1
        time.sleep(0.3)
        assert version() == 1  # what was given back is not taken again
        run.best(env="Pendulum-v1")
        wait_for(lambda: any("version 1 stays" in line for line in said))
        run.best()
        wait_for(lambda: version() == 4)
    assert sum("stays" in line for line in said) == 1


def test_no_request_is_lost_or_wrong_in_ten_reloads_under_load(tmp_path: Path, start: Start) -> None:
    run = ServedRun(tmp_path / "run")
    service = start(run.path)
    answers: dict[int, list[int]] = {1: load(run.path).act(OBS).tolist()}
    found: list[tuple[int, int, int]] = []
    over = threading.Event()

    def ask(offset: int) -> None:
        connection = HTTPConnection(service.url.removeprefix("http://"), timeout=60)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        index = offset
        while not over.is_set():
            index = (index + 7) % len(OBS)
            connection.request("POST", "/act", json.dumps({"obs": OBS[index].tolist()}), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            found.append((index, answer["version"], answer["action"]))
        connection.close()

    with ThreadPoolExecutor(8) as pool, service.client() as client:
        asking = [pool.submit(ask, offset) for offset in range(8)]
        for _ in range(10):
            time.sleep(0.1)
            run.best()
            answers[len(answers) + 1] = load(run.path).act(OBS).tolist()
            client.reload()
        time.sleep(0.1)
        over.set()
        for each in asking:
            each.result()
    assert {version for _, version, _ in found} == set(range(1, 12))
    assert all(answers[version][index] == action for index, version, action in found)


def test_a_canary_answers_its_share_and_is_counted_apart(tmp_path: Path, start: Start) -> None:
    main, other = save(tmp_path / "main")[0], save(tmp_path / "other", number=9, seed=9)[0]
    expected = {"main": load(main).act(OBS).tolist(), "canary": load(other).act(OBS).tolist()}
    service = start(main, canary=(0.25, other), seed=1)
    counts = {"main": 0, "canary": 0}
    for index, obs in enumerate(OBS):
        answer = json.loads(post(service, "/act", json.dumps({"obs": obs.tolist()}).encode())[1])
        assert answer["action"] == expected[answer["policy"]][index]
        counts[answer["policy"]] += 1
    assert 0.15 < counts["canary"] / len(OBS) < 0.35
    with service.client() as client:
        text = client.metrics()
    for name, count in counts.items():
        assert f'requests_total{{policy="{name}",code="200"}} {count}\n' in text
    assert 'policy_version{policy="canary"} 9' in text
    with pytest.raises(UsageError, match="has other spaces"):
        start(main, canary=(0.1, save(tmp_path / "odd", env="Pendulum-v1")[0]))


# -- the end, and clients -------------------------------------------------------------------------------------


def test_requests_in_flight_are_answered_before_it_ends(
    cartpole: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = Policy.act
    asked = threading.Event()
    service = start(cartpole)

    def slow(self: Policy, *args: Any, **how: Any) -> Any:
        asked.set()
        time.sleep(0.3)
        return act(self, *args, **how)

    monkeypatch.setattr(Policy, "act", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, service, "/act", GOOD)
        assert asked.wait(5)
        service.stop()
        assert answer.result()[0] == 200
    assert not service.alive()
    with pytest.raises(UsageError, match="was stopped"):
        service.reload()


def test_a_client_comes_back_to_a_server_that_was_restarted(cartpole: Path, start: Start) -> None:
    first = start(cartpole)
    port = int(first.url.rpartition(":")[2])
    with first.client() as client:
        before = client.act(OBS[0])
        first.stop()
        with pytest.raises(RaynforceError, match="cannot be reached"):
            client.act(OBS[0])
        start(cartpole, port=port)
        assert client.act(OBS[0]) == before
    with pytest.raises(ServerError, match="token is wrong"), Client(f"http://127.0.0.1:{port}", "wrong") as stranger:
        stranger.info()
    with pytest.raises(UsageError, match="is not the URL of a server"):
        Client("127.0.0.1:8000", TOKEN)


def test_a_client_needs_no_torch() -> None:
    script = "import sys, raynforce; raynforce.Client; print('torch' in sys.modules, 'ray' in sys.modules)"
    root = Path(raynforce.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root)},
        check=False,
    )
    assert done.stdout.split() == ["False", "False"], done.stderr
