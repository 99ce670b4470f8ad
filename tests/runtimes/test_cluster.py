"""Starting a Ray that leaves nothing behind, and joining one; whatever is in the way is one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rays import Head
from roles_for_tests import alive

from raynforce.config import Config, RayConfig, SamplingConfig
from raynforce.errors import UsageError
from raynforce.runtimes.ray import connecting, starting
from raynforce.runtimes.ray.connecting import connect
from raynforce.runtimes.ray.runtime import RayRuntime
from raynforce.runtimes.ray.state import workers

pytestmark = pytest.mark.usefixtures("no_ray")


def config(address: str | None = None, samplers: int = 1, env: str = "CartPole-v1", **ray: Any) -> Config:
    settings = RayConfig(address=address, **ray)
    return Config(env=env, runtime="ray", sampling=SamplingConfig(samplers=samplers), ray=settings)


def refusal(asked: Config, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a user sees; nothing else reaches the screen."""
    began = time.monotonic()
    with pytest.raises(UsageError) as raised:
        connect(asked, lambda text: None)
    assert time.monotonic() - began < 10, "Ray itself tries for minutes"
    assert capfd.readouterr() == ("", "")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://127.0.0.1:10001", "Ray Client is far too slow"),
        ("somewhere", "is not an address: give host:port"),
        ("127.0.0.1:99999", "is not an address"),
        ("two words:6379", "is not an address"),
        ("127.0.0.1:1", "no Ray at 127.0.0.1:1: Connection refused"),
    ],
)
def test_addresses_that_cannot_be(address: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(config(address), capfd)


def test_the_environment_names_the_address(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    assert "no Ray at 127.0.0.1:2" in refusal(config(), capfd)
    assert "no Ray at 127.0.0.1:2" in refusal(config("auto"), capfd)
    assert "no Ray at 127.0.0.1:1" in refusal(config("127.0.0.1:1"), capfd)


def test_a_stranger_at_the_address(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer).start()
        line = refusal(config(f"127.0.0.1:{server.getsockname()[1]}"), capfd)
    assert "does not answer as Ray does" in line


def test_auto_where_none_runs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    import ray._private.services as services

    def none_found(*_: object) -> str:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(services, "canonicalize_bootstrap_address", none_found)
    assert "no Ray runs on this machine" in refusal(config("auto"), capfd)


def test_shared_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(starting, "shared_memory_bytes", lambda: 64 << 20)
    line = refusal(config(), capfd)
    assert "/dev/shm has 67 MB free" in line
    assert "--shm-size=1g" in line
    assert "--runtime process" in line


def test_the_object_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "available_bytes", lambda: None)
    monkeypatch.setattr(starting, "shared_memory_bytes", lambda: 1_000_000_000)
    assert starting._store_bytes(config(samplers=1)) == 200_000_000
    assert starting._store_bytes(config(samplers=1000)) == 500_000_000


def test_another_version_of_ray_or_python() -> None:
    for found in (connecting.About("2.40.0", "3.11.1", [], set()), connecting.About("2.60.0", "3.9.1", [], set())):
        with pytest.raises(UsageError, match=rf"is Ray {found.ray} on Python {found.python}, here is Ray .* make them"):
            connecting._require_same_versions("10.0.0.1:6379", found)


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "it wants a token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}, "the token here is not the cluster's"),
        ({"RAY_AUTH_TOKEN": "wrong" * 8}, "the token here is not the cluster's"),
        ({"RAY_AUTH_MODE": "token"}, "there is no token here"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nowhere"}, "RAY_AUTH_TOKEN_PATH = '/nowhere'"),
    ],
)
def test_tokens_that_do_not_match(
    head: Head,
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refusal(config(head.address), capfd)
    assert words in line
    assert "RAY_AUTH_TOKEN_PATH" in line
    assert "wrong" not in line


# -- joining -------------------------------------------------------------------------------------------------


@pytest.fixture
def token(head: Head, tmp_path: Path) -> str:
    """The cluster's token where `ray get-auth-token` keeps it; no mode is set. Returns the address."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(head.token)
    return head.address


def test_too_much_is_asked_of_a_cluster(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "ask for 9 CPUs; the cluster has 4, 5 short: use --samplers 3" in refusal(config(token, 8), capfd)
    no_tpu = refusal(config(token, sampler_resources={"tpu": 1}), capfd)
    assert 'the cluster has no "tpu"; it has CPU, simulator' in no_tpu


def test_joining_uses_the_cluster_and_leaves_it_as_it_was(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    before, said = dict(os.environ), []
    with RayRuntime(config(token, samplers=3), said.append) as runtime:
        places = runtime.places
        roles = [
            runtime.spawn("roles_for_tests:Talker", name=f"sampler {n}", place=places["sampler"]) for n in range(4)
        ]
        roles[2].call("say", "from afar").result()
        late = runtime.spawn("roles_for_tests:Mirror", name="late", place=places["sampler"]).call("nice")
        deadline = time.monotonic() + 10
        while "sampler 2: from afar" not in said or not runtime.pending_reason():
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        assert runtime.pending_reason() == ": not started yet, the cluster has 0 of 4 CPUs free"
        assert runtime.wait([late], timeout=0)[1] == [late]
    assert not ray.is_initialized()
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")

    began = time.monotonic()
    with closing(connect(config(token, samplers=3), said.append)):  # as if a script had called ray.init
        while ray.available_resources().get("CPU") != 4:
            assert time.monotonic() - began < 10, "roles still hold CPUs"
            time.sleep(0.05)
        with RayRuntime(config(samplers=3), said.append) as adopted:
            assert adopted.spawn("roles_for_tests:Mirror", name="guest").call("nice").result() >= 0
        assert ray.is_initialized(), "a connection that is not ours stays"


def test_shipped_code_is_what_runs(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "shipped_pkg").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "shipped_pkg" / "__init__.py").touch()
    (project / "shipped_pkg" / "role.py").write_text(
        "import os, raynforce, shipped_neighbour\n"
        "from raynforce import Sink, load, train\n"
        "from . import near\n"
        "class Role:\n"
        "    def files(self):\n"
        "        return [m.__file__ for m in (near, shipped_neighbour, raynforce)], os.listdir()\n"
    )
    (project / "shipped_pkg" / "near.py").touch()
    (project / "shipped_neighbour.py").touch()
    for secret in (".env", "key.pem", "auth_token", "ignored.txt"):
        (project / secret).write_text("secret")
    (project / ".gitignore").write_text("ignored.txt")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    asked = config(token, env="shipped_pkg.role:Role", ship_code="always")
    with RayRuntime(asked, lambda text: None) as runtime:
        role = runtime.spawn("shipped_pkg.role:Role", name="sampler 0", place=runtime.places["sampler"])
        files, shipped = role.call("files").result()
    assert [file for file in files if "/runtime_resources/" not in file] == []
    assert sorted(set(shipped) - {"__pycache__"}) == ["shipped_neighbour.py", "shipped_pkg"]


# -- starting ------------------------------------------------------------------------------------------------


def test_our_own_is_private_and_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    before, said = dict(os.environ), []
    handler = signal.getsignal(signal.SIGTERM)
    with closing(connect(config(samplers=40, sampler_cpus=0.01), said.append)) as own:
        assert own.folder is not None
        assert own.folder.stat().st_mode & 0o777 == 0o700
        assert signal.getsignal(signal.SIGTERM) is handler
        assert own.address.startswith("127.0.0.1:")
        assert _reachable_from_outside() == []
        assert not (tmp_path / ".ray").exists(), "the token is in no file"
        assert os.environ["RAY_AUTH_TOKEN"] not in _words_of_all_processes()
    assert not own.folder.exists()
    assert dict(os.environ) == before

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the second start has another token: none
    with closing(connect(config(), said.append)):
        assert "RAY_AUTH_TOKEN" not in os.environ
        assert ray.get(ray.remote(lambda: 7).remote()) == 7
    assert capfd.readouterr() == ("", "")


def _reachable_from_outside() -> list[str]:
    """Ports on which processes of this Ray listen beyond the loopback interface."""
    import ray._private.worker as worker

    started = [info.process.pid for infos in worker._global_node.all_processes.values() for info in infos]
    sockets = set()
    for pid in [os.getpid(), *started, *(process.pid for process in workers())]:
        sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    open_to_all = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listening, loopback = fields[3] == "0A", fields[1].split(":")[0].endswith("0100007F")
            if listening and not loopback and f"socket:[{fields[9]}]" in sockets:
                open_to_all.append(fields[1])
    return open_to_all


def _words_of_all_processes() -> str:
    words = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(words)


def test_nothing_is_left_when_the_driver_is_killed() -> None:
    script = (
        "import sys, time\n"
        "from raynforce.config import Config, SamplingConfig\n"
        "from raynforce.runtimes.ray.state import workers\n"
        "from raynforce.runtimes.ray.runtime import RayRuntime\n"
        "runtime = RayRuntime(Config(env='CartPole-v1', runtime='ray', sampling=SamplingConfig(samplers=2)))\n"
        "roles = [runtime.spawn('roles_for_tests:Mortal', True, name=f'sampler {n}') for n in range(2)]\n"
        "busy = [pid for role in roles for pid in role.call('pids').result()]\n"
        "calls = [roles[0].call('hang', 'loop'), roles[1].call('hang', 'c')]\n"
        "time.sleep(0.3)\n"
        "print(runtime._cluster.folder, *busy, *(process.pid for process in workers()), flush=True)\n"
        "time.sleep(1000)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert driver.stdout is not None
        folder, *pids = driver.stdout.readline().split()
    finally:
        driver.kill()
        driver.communicate()
    assert len(pids) >= 8
    deadline = time.monotonic() + 15
    while Path(folder).exists() or any(alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "something outlived the driver"
        time.sleep(0.2)
