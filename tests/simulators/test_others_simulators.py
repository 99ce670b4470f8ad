"""Simulators that others start: every transport, who gets whom, links that break, keys."""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raynforce
from raynforce.cli import main
from raynforce.envs import gateway as gateways
from raynforce.envs.addresses import find_key, make_keys
from raynforce.envs.gateway import Gateway
from raynforce.envs.masks import random_actions
from raynforce.envs.remote import RemoteSimulators
from raynforce.envs.simulator_vector import SimulatorVector
from raynforce.envs.simulators import Simulators
from raynforce.errors import EnvError, UsageError

DEADLINE = 30.0
ROOT = Path(__file__).parents[2]
TRANSPORTS = ("unix", "tcp", "zmq:tcp", "zmq:ipc")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAYNFORCE_KEY", raising=False)
    return tmp_path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def address(transport: str, folder: Path) -> str:
    if transport.startswith("zmq"):
        pytest.importorskip("zmq", reason="pyzmq is not installed")
        if ctypes.util.find_library("zmq") is None:
            pytest.skip("there is no libzmq for simulators in C++ (Debian: apt install libzmq5)")
    return {
        "unix": f"unix:{folder / 's'}",
        "tcp": f"tcp:127.0.0.1:{free_port()}",
        "zmq:tcp": f"zmq:tcp://127.0.0.1:{free_port()}",
        "zmq:ipc": f"zmq:ipc://{folder / 'z'}",
    }[transport]


class Scene:
    """A gateway, and simulators that are started and ended as in life."""

    def __init__(self, env: str, folder: Path) -> None:
        find_key()  # the trainer writes the token that simulators read
        self.gateway = Gateway(env, say=lambda text: self.told.append(text))
        self.env, self.folder = env, folder
        self.told: list[str] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.lanes: list[RemoteSimulators] = []

    def start(self, program: str, *words: str, home: Path | None = None) -> subprocess.Popen[bytes]:
        """A program, with its first arguments if there are some."""
        where = self.env.partition(":")[2]
        options = words if "--connect" in words or "--listen" in words else ("--connect", where, *words)
        log = open(self.folder / f"sim{len(self.started)}.log", "wb")  # noqa: SIM115
        env = os.environ | {"HOME": str(home or self.folder), "RAYNFORCE_KEY": ""}
        self.started.append(subprocess.Popen([*program.split(), *options], stderr=log, env=env))
        log.close()
        return self.started[-1]

    def said(self, number: int = -1) -> str:
        return (self.folder / f"sim{number % len(self.started)}.log").read_text()

    def make(self, count: int, seed: int = 1, **more: Any) -> RemoteSimulators:
        made = RemoteSimulators(self.env, {}, count, seed=seed, gateway=self.gateway.address, **more)
        self.lanes.append(made)
        return made

    def close(self) -> None:
        for lanes in self.lanes:
            lanes.close()
        self.gateway.close()
        for one in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(2)
            one.kill()
            one.wait()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    made: list[Scene] = []

    def make(env: str) -> Scene:
        made.append(Scene(env, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def play(lanes: Simulators, steps: int, between: Callable[[int], None] = lambda step: None) -> np.ndarray:
    """What so many steps give, `[steps, lanes, …]`, with actions that are always the same."""
    rng, found = np.random.default_rng(0), []
    for step in range(steps):
        between(step)
        actions = random_actions(lanes.spec.action, lanes.count, rng).astype(lanes.spec.action.dtype)
        assert lanes.step_all(actions) == []
        found.append(np.concatenate([lanes.obs["obs"], lanes.reward[:, None], lanes.terminated[:, None]], axis=1))
    return np.array(found)


@pytest.fixture
def program(request: pytest.FixtureRequest) -> str:
    """A simulator in C++, or with the SDK for Python."""
    if request.param == "C++":
        found: str = request.getfixturevalue("cartpole")
        return found
    return f"{sys.executable} {ROOT / 'examples' / 'other_python.py'}"


BOTH = pytest.mark.parametrize("program", ["C++", "Python"], indirect=True)


@BOTH
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_over_every_transport_the_same_comes(
    program: str, tmp_path: Path, scene: Callable[[str], Scene], transport: str
) -> None:
    here = scene(f"listen:{address(transport, tmp_path)}")
    started = here.start(program, "--envs", "5")
    found = play(here.make(5), 60)
    launched = Simulators(f"sim:{program}", {}, 5, seed=1)
    try:
        assert np.array_equal(found, play(launched, 60))
    finally:
        launched.close()
    here.close()
    assert (started.wait(5), here.said()) == (0, "")
    assert not list(tmp_path.glob("[sz]"))  # no socket stays behind


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_may_go_to_where_they_are(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene], transport: str
) -> None:
    where = address(transport, tmp_path)
    here = scene(f"connect:{where}")
    started = here.start(cartpole, "--listen", where, "--envs", "3")
    for _ in range(2):  # one trainer after the other
        lanes = here.make(3)
        assert play(lanes, 20).shape == (20, 3, 6)
        lanes.close()
    started.send_signal(signal.SIGTERM)


def test_several_of_them_are_the_lanes_of_one_role(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]
) -> None:
    """One that is killed takes its lanes with it; another one that is free takes them over, and the rest goes on."""
    here = scene(f"listen:{address('tcp', tmp_path)}")
    for _ in range(3):
        here.start(cartpole, "--envs", "2", "--sessions", "1")
    lanes = here.make(6)
    assert play(lanes, 10).shape == (10, 6, 6)
    owner = lanes._owner.copy()
    victim = int(np.bincount(owner).argmax())
    pid = lanes._peers[victim].session.hello.pid
    os.kill(pid, signal.SIGKILL)
    here.start(cartpole, "--envs", "4", "--sessions", "1")
    broken: list[int] = []
    until = time.monotonic() + DEADLINE
    lanes.link_seconds = 0.5
    while len(broken) < 2 and time.monotonic() < until:
        broken += [lane.lane for lane in lanes.step_all(np.zeros(6, np.int64))]
    assert sorted(broken) == np.flatnonzero(owner == victim).tolist()
    faults = lanes.take_faults()
    assert len(faults) == 1
    assert "its link was lost" in faults[0].cause
    assert play(lanes, 10).shape == (10, 6, 6)


class Proxy:
    """A link between simulator and trainer that can be cut."""

    def __init__(self, port: int) -> None:
        self.cuts = 0
        self._to, self._cut, self._over = port, threading.Event(), False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._over = True
        self._cut.set()
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._over:
            with contextlib.suppress(OSError, ValueError):  # closed
                if select.select([self._listener], [], [], 0.05)[0]:
                    self._carry(self._listener.accept()[0])

    def _carry(self, near: socket.socket) -> None:
        """Until it is cut: then both ends see a reset connection, and what was on its way is lost."""
        self._cut.clear()
        far = socket.create_connection(("127.0.0.1", self._to))
        while not self._cut.is_set():
            for one in select.select([near, far], [], [], 0.005)[0]:
                data = one.recv(1 << 16)
                if not data:
                    self._cut.set()
                elif not self._cut.is_set():
                    (far if one is near else near).sendall(data)
        self.cuts += 1
        for one in (near, far):
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            one.close()


@BOTH
def test_a_link_that_breaks_costs_no_step(program: str, tmp_path: Path, scene: Callable[[str], Scene]) -> None:
    """Requests are sent again by number: what comes is what would have come, and no episode is cut."""
    where = address("tcp", tmp_path)
    here = scene(f"listen:{where}")
    proxy = Proxy(int(where.rpartition(":")[2]))
    try:
        one = () if program.startswith(sys.executable) else ("--sessions", "1")
        here.start(program, "--connect", f"tcp:127.0.0.1:{proxy.port}", "--envs", "5", *one)
        lanes = here.make(5)
        found = play(lanes, 120, between=lambda step: proxy.cut() if step % 20 == 10 else None)
        assert proxy.cuts >= 5
        assert lanes.take_faults() == []
        assert "the link to the trainer is lost" in here.said()
    finally:
        proxy.close()
    launched = Simulators(f"sim:{program}", {}, 5, seed=1)
    try:
        assert np.array_equal(found, play(launched, 120))
    finally:
        launched.close()


def test_what_is_asked_while_the_link_is_down_is_done_later(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]
) -> None:
    where = address("tcp", tmp_path)
    here = scene(f"listen:{where}")
    proxy = Proxy(int(where.rpartition(":")[2]))
    try:
        here.start(cartpole, "--connect", f"tcp:127.0.0.1:{proxy.port}", "--envs", "3", "--sessions", "1")
        lanes = here.make(3)
        first = play(lanes, 10)
        proxy.cut()
        until = time.monotonic() + DEADLINE
        while lanes._peers[0].session.open and time.monotonic() < until:  # seen by a role that asks nothing
            lanes.wait()
            lanes.collect()
        assert lanes.step_all(np.zeros(3, np.int64)) == []
        assert lanes.take_faults() == []
        assert not np.array_equal(lanes.obs["obs"], first[-1][:, :4])
    finally:
        proxy.close()


def test_what_was_saved_is_loaded_into_several(cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]) -> None:
    here = scene(f"listen:{address('unix', tmp_path)}")
    for _ in range(2):
        here.start(cartpole, "--envs", "3", "--sessions", "1")
    vector = SimulatorVector(here.make(5), record=True)
    vector.reset()
    actions = np.random.default_rng(0).integers(0, 2, (80, 5))
    for action in actions[:30]:
        vector.step(action)
    saved = vector.state()
    then = [vector.step(action) for action in actions[30:]]
    assert vector.load(saved) == []
    for before, action in zip(then, actions[30:], strict=True):
        now = vector.step(action)
        assert np.array_equal(now.obs["obs"], before.obs["obs"])
        assert np.array_equal(now.terminated, before.terminated)


def test_one_that_has_other_spaces_is_refused(
    cartpole: str, odd: str, tmp_path: Path, scene: Callable[[str], Scene]
) -> None:
    here = scene(f"listen:{address('unix', tmp_path)}")
    here.start(cartpole, "--envs", "2", "--sessions", "1")
    lanes = here.make(2)
    os.kill(lanes._peers[0].session.hello.pid, signal.SIGKILL)
    lanes.link_seconds = 0.2
    stranger = here.start(odd, "--envs", "2", "--sessions", "1")
    until = time.monotonic() + DEADLINE
    lanes.step(np.arange(2), np.zeros(2, np.int64))
    while stranger.poll() is None and time.monotonic() < until:
        lanes.wait()
        lanes.collect()
    assert stranger.returncode == 78
    assert "refuses this simulator (spaces)" in here.said()


def test_an_evaluation_does_not_wait_for_ever(cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]) -> None:
    here = scene(f"listen:{address('unix', tmp_path)}")
    with pytest.raises(EnvError, match=r"no simulator was free within 0\.2 s: connect one more"):
        here.make(4, at_most=True, free_seconds=0.2)
    here.start(cartpole, "--envs", "3")
    assert here.make(20, at_most=True).count == 3


def test_who_wants_many_gets_the_largest_and_an_evaluation_the_smallest(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]
) -> None:
    here = scene(f"listen:{address('unix', tmp_path)}")
    for envs in ("2", "6", "4"):
        here.start(cartpole, "--envs", envs, "--sessions", "1")
    here.gateway.wait_for(12)
    assert [peer.session.hello.envs for peer in here.make(5)._peers] == [6]
    assert here.make(20, at_most=True).count == 2


def test_without_one_to_evaluate_on_a_run_still_ends_well(cartpole: str, tmp_path: Path) -> None:
    where = address("unix", tmp_path)
    find_key()
    words = [cartpole, "--connect", where, "--envs", "4", "--sessions", "1"]
    with subprocess.Popen(words, env=os.environ | {"HOME": str(tmp_path)}) as started:
        small = {"sampling.envs": 4, "sampling.fragment": 32, "eval.every": 0, "eval.final_episodes": 0}
        how: dict[str, Any] = {"runtime": "inline", "steps": 300, "settings": small}
        run = raynforce.train(f"listen:{where}", out=tmp_path / "run", progress="quiet", **how)
        assert started.wait(10) == 0
    assert run.result.steps >= 300
    assert run.result.eval_return is None


def test_it_trains_where_they_connect(cartpole: str, tmp_path: Path) -> None:
    """One process of two sessions: one trains, the other evaluates."""
    where = address("tcp", tmp_path)
    find_key()
    words = [cartpole, "--connect", where, "--envs", "4"]
    with subprocess.Popen(words, env=os.environ | {"HOME": str(tmp_path)}) as started:
        small = {"sampling.envs": 4, "sampling.fragment": 32, "eval.every": 500, "eval.episodes": 2}
        run = raynforce.train(
            f"listen:{where}", runtime="inline", steps=1000, out=tmp_path / "run", settings=small, progress="quiet"
        )
        assert started.wait(10) == 0
    assert run.result.steps >= 1000
    assert run.result.eval_return is not None
    assert not gateways._OPEN


@pytest.mark.parametrize("transport", ["unix", "zmq:tcp"])
def test_they_may_choose_their_own_actions(cartpole: str, tmp_path: Path, transport: str) -> None:
    where = address(transport, tmp_path)
    find_key()
    words = [cartpole, "--connect", where, "--envs", "4"]
    with subprocess.Popen(words, env=os.environ | {"HOME": str(tmp_path)}) as started:
        small = {"sampling.envs": 4, "sampling.fragment": 32, "eval.every": 500, "eval.episodes": 2}
        how = {"runtime": "inline", "steps": 1000, "settings": small | {"sampling.inference": "client"}}
        run = raynforce.train(f"listen:{where}", out=tmp_path / "run", progress="quiet", **how)
        assert started.wait(10) == 0
    assert run.result.steps >= 1000
    assert run.result.eval_return is not None


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("listen:5555", "'5555' is no address; one of: unix:/path"),
        ("listen:tcp:127.0.0.1", "is no address"),
        ("listen:tcp:127.0.0.1:99999", "is no address"),
        ("listen:tcp:127.0.0.1:1,tcp:127.0.0.1:2", "one address to listen on, not 2"),
        ("listen:tcp:0.0.0.0:5555", "not encrypted and reaches beyond this machine: use zmq:tcp://0.0.0.0:5555"),
        ("listen:zmq:tcp://0.0.0.0:5555", "needs keys: `raynforce sim keys DIR` makes them"),
        ("listen:unix:/no/such/folder/s", "cannot listen on unix:/no/such/folder/s: No such file"),
    ],
)
def test_what_cannot_be_listened_on_is_refused(env: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("?", "\\?")):
        Gateway(env)


@pytest.mark.parametrize("transport", ["tcp", "zmq:tcp"])
def test_a_port_that_is_taken(tmp_path: Path, transport: str) -> None:
    where = address(transport, tmp_path)
    with (
        socket.create_server(("127.0.0.1", int(where.rpartition(":")[2]))),
        pytest.raises(UsageError, match=f"cannot listen on {where}: Address already in use"),
    ):
        Gateway(f"listen:{where}")


def test_a_token_that_is_another_is_refused(cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]) -> None:
    here = scene(f"listen:{address('tcp', tmp_path)}")
    other = tmp_path / "other"
    (other / ".raynforce").mkdir(parents=True)
    (other / ".raynforce" / "token").write_text("ab" * 32)
    stranger = here.start(cartpole, "--sessions", "1", home=other)
    assert stranger.wait(DEADLINE) == 78
    assert "refuses this simulator (auth): the token is not the trainer's" in here.said()
    assert here.gateway.refused == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--connect", "tcp:10.0.0.1:5555"), "reaches beyond this machine and is not encrypted"),
        (("--connect", "zmq:tcp://10.0.0.1:5555"), "needs a key: give --key simulator.key"),
        (("--connect", "tcp:127.0.0.1:9", "--key", "/no/key"), "cannot read /no/key"),
        (("--connect", "pigeon:7"), "is not one of: unix:/path"),
        (("--connect", "tcp:127.0.0.1:9", "--retry", "0"), "cannot connect to tcp:127.0.0.1:9"),
    ],
)
def test_a_simulator_says_what_is_wrong(cartpole: str, words: tuple[str, ...], told: str) -> None:
    done = subprocess.run([cartpole, *words, "--sessions", "1"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode != 0
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_keys_encrypt_and_tell_who_is_who(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = address("zmq:tcp", tmp_path)
    trainer, simulator = make_keys(tmp_path / "keys")
    assert [path.stat().st_mode & 0o777 for path in (trainer, simulator)] == [0o600, 0o600]
    assert "secret" not in json.loads(simulator.read_text())
    monkeypatch.setenv("RAYNFORCE_KEY", str(trainer))
    here = scene(f"listen:{where}")
    stranger = here.start(cartpole, "--envs", "3", "--sessions", "1", "--retry", "1")  # which has no key
    other = make_keys(tmp_path / "others")[1]
    here.start(cartpole, "--envs", "3", "--sessions", "1", "--key", str(other))
    here.start(cartpole, "--envs", "3", "--sessions", "1", "--key", str(simulator))
    lanes = here.make(3)
    assert play(lanes, 20).shape == (20, 3, 6)
    assert lanes._peers[0].session.hello.pid == here.started[2].pid
    assert here.gateway.counts.free == 0
    until = time.monotonic() + DEADLINE
    while not here.told and time.monotonic() < until:
        time.sleep(0.05)
    assert here.told == ["a simulator was refused: its key is not that of this trainer"]
    for one in (stranger, here.started[1]):
        one.kill()
    with pytest.raises(UsageError, match="is there already"):
        make_keys(tmp_path / "keys")


def test_who_says_nothing_is_dropped(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "HELLO_SECONDS", 0.3)
    where = address("unix", tmp_path)
    scene(f"listen:{where}")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(where.removeprefix("unix:"))
        stranger.settimeout(DEADLINE)
        assert stranger.recv(1) == b""


def test_one_that_is_killed_while_it_is_free_is_forgotten(
    cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]
) -> None:
    here = scene(f"listen:{address('zmq:ipc', tmp_path)}")
    here.start(cartpole, "--envs", "2", "--sessions", "1")
    here.gateway.wait_for(2)
    time.sleep(1.5)  # it is asked whether it is there, and goes on waiting
    assert here.gateway.counts.free == 2
    here.started[0].kill()
    until = time.monotonic() + DEADLINE
    while here.gateway.counts.free and time.monotonic() < until:
        time.sleep(0.05)
    assert here.gateway.counts.free == 0


def test_garbage_harms_nobody(cartpole: str, tmp_path: Path, scene: Callable[[str], Scene]) -> None:
    where = address("unix", tmp_path)
    here = scene(f"listen:{where}")
    here.start(cartpole, "--envs", "2", "--sessions", "1")
    lanes = here.make(2)
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"RAYN" + b"\xff" * 200, b"RAYN\1\0\1" + bytes(41), b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(where.removeprefix("unix:"))
            stranger.sendall(data)
            if data:
                stranger.settimeout(DEADLINE)
                assert stranger.recv(4) == b"RAYN"  # a REJECT
    for request in (
        b'{"proof": "0", "session": 0, "envs": 1}',
        b'{"proof": "\\ud800", "session": 0, "envs": 1}',
        b"[1]",
    ):
        with socket.socket(socket.AF_UNIX) as stranger:  # where roles ask
            stranger.connect(f"\0{here.gateway.address.where}")
            stranger.sendall(request)
            stranger.settimeout(DEADLINE)
            assert stranger.recv(4) == b""
    assert play(lanes, 10).shape == (10, 2, 6)


def test_one_that_listens_is_checked(cartpole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"unix:{tmp_path / 'l'}"
    find_key()
    with subprocess.Popen([cartpole, "--listen", where, "--envs", "3"], stderr=subprocess.DEVNULL) as started:
        try:
            assert main(["sim", "check", where]) == 0
        finally:
            started.kill()
    told = capsys.readouterr().out
    assert " 2 skipped, 0 failed" in told  # what needs another process
    assert "steps/s" in told
