"""A cluster whose nodes come and go: what a lost one costs, and that a new one is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from rays import TOKEN, SharedRay

import raynforce
from raynforce.config import Config, FaultsConfig, RayConfig, SamplingConfig
from raynforce.errors import UsageError
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, Runtime
from raynforce.runtimes.ray.connecting import connect
from raynforce.runtimes.ray.runtime import RayHandle, RayRuntime
from raynforce.runtimes.ray.state import environment

NOTEBOOK = "roles_for_tests:Notebook"
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
LARGE = 200_000  # numbers: too many to be sent along with the answer itself


class Nodes:
    """A head with two CPUs, on which the driver is, and a second node with two."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        Path("/tmp/ray").mkdir(exist_ok=True)  # where it notes the newest cluster, whatever its temp_dir is
        self._size = {"num_cpus": 2, "object_store_memory": 100_000_000}
        head = {**self._size, "include_dashboard": False, "temp_dir": str(folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self.add()

    def add(self) -> Any:
        return self.cluster.add_node(**self._size)

    @property
    def head_id(self) -> str:
        return str(self.cluster.head_node.node_id)

    def config(self, samplers: int, **faults: Any) -> Config:
        sampling, ray = SamplingConfig(samplers=samplers), RayConfig(address=self.cluster.address)
        return Config(env="CartPole-v1", runtime="ray", sampling=sampling, ray=ray, faults=FaultsConfig(**faults))


@pytest.fixture(scope="module")
def nodes(one_ray: SharedRay) -> Iterator[Nodes]:
    one_ray.close()
    folder = Path(tempfile.mkdtemp(prefix="rnn-", dir="/tmp"))
    others = dict.fromkeys(name for name in os.environ if name.startswith("RAY_"))
    try:
        with environment({**others, **SETTINGS, "HOME": str(folder)}):
            made = Nodes(folder)
            try:
                yield made
            finally:
                made.cluster.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def spawned(runtime: RayRuntime, *samplers: int) -> list[RayHandle]:
    place = runtime.places["sampler"]
    return [runtime.spawn(NOTEBOOK, name=f"sampler {n}", place=place) for n in samplers]


def answer(runtime: Runtime, pending: Pending) -> Any:
    assert runtime.wait([pending], timeout=20)[1] == [], f"{pending.name} does not answer"
    return pending.result()


def death(runtime: Runtime, pending: Pending) -> RoleDied:
    with pytest.raises(RoleDied) as raised:
        answer(runtime, pending)
    return raised.value


def room(handles: list[RayHandle]) -> list[bool]:
    return [handle.has_room() for handle in handles]


def test_below_the_quorum_a_run_does_not_start(nodes: Nodes) -> None:
    with pytest.raises(UsageError, match=r"ask for 7 CPUs; the cluster has 4, 3 short: use --samplers 3"):
        connect(nodes.config(6, quorum=0.6), lambda text: None)


def test_a_lost_node_costs_its_roles_alone_and_a_new_one_is_used(
    nodes: Nodes, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with RayRuntime(nodes.config(4), said.append) as runtime:
        assert said == ["the cluster has room for 3 of 4 samplers; the others join when there is room"]
        learner = runtime.spawn(NOTEBOOK, name="learner", place=runtime.places["learner"])
        samplers = spawned(runtime, 0, 1, 2)
        for role in (learner, *samplers):
            answer(runtime, role.call("pid"))
        (late,) = spawned(runtime, 3)
        assert learner.node() == nodes.head_id
        away = [sampler for sampler in samplers if sampler.node() == nodes.second.node_id]
        here = [sampler for sampler in samplers if sampler not in away]
        assert (len(away), len(here)) == (2, 1), "spread"
        assert room([*samplers, late]) == [True] * 3 + [False]
        assert runtime.pending_reason() == ": not started yet, the cluster has 0 of 4 CPUs free"

        learner.end()  # the one without room does not get its place
        learner = runtime.spawn(NOTEBOOK, name="learner", place=runtime.places["learner"])
        answer(runtime, learner.call("pid"))
        assert (learner.node(), late.has_room()) == (nodes.head_id, False)

        waited = away[0].call("array", LARGE, 1.0)
        answer(runtime, waited)
        kept, not_kept = away[0].call("array", LARGE, 2.0), away[1].call("array", LARGE, 3.0)
        runtime.keep(kept)
        for _ in range(20):  # nobody waits for them
            answer(runtime, learner.call("sleep", 0.02))
        calls = [role.call("sleep", 1000) for role in away]
        used = learner.call("note", calls[0])
        capfd.readouterr()

        began = time.monotonic()
        nodes.cluster.remove_node(nodes.second, allow_graceful=False)
        for role, call in zip(away, calls, strict=True):
            error = death(runtime, call)
            assert error.role == role.name
            assert "its node was lost" in str(error)
        assert death(runtime, used).role == away[0].name, "who died, not who waited"
        assert answer(runtime, here[0].call("echo", 7)) == 7
        assert time.monotonic() - began < 60
        assert answer(runtime, learner.call("total", waited)) == LARGE, "what was reported as there is there"
        assert answer(runtime, learner.call("total", kept)) == 2 * LARGE
        lost = death(runtime, learner.call("total", not_kept))
        assert (lost.role, str(lost)) == (None, "learner: an answer it was to get was lost with the node that held it")

        for role in [*away, late]:
            role.end()
        again = spawned(runtime, *(int(role.name.split()[1]) for role in away))
        time.sleep(0.5)
        assert room(again) == [False, False]
        nodes.second = nodes.add()
        for role in again:
            assert answer(runtime, role.call("note", "new")) == 1
            assert role.node() == nodes.second.node_id
        assert len(runtime._handles) == 4
    out, err = capfd.readouterr()
    assert out == "", "it carries the result"
    assert "Traceback" not in err


def test_the_last_lines_come_from_other_nodes(nodes: Nodes) -> None:
    with RayRuntime(nodes.config(3), lambda text: None) as runtime:
        places = [Place(call_seconds=0.5)] * 4
        roles: list[Handle] = [
            runtime.spawn("roles_for_tests:Mortal", name=f"sampler {n}", place=place) for n, place in enumerate(places)
        ]
        for call in [role.call("hang", "c") for role in roles]:
            error = death(runtime, call)
            assert "it hung for 0:00:00.500000 in hang (roles_for_tests.py:" in str(error)
            assert "Timeout (0:00:00.500000)!" in error.said


# -- hosts of their own --------------------------------------------------------------------------------------

DRIVER = """
import json, sys, time
from pathlib import Path
from raynforce.config import Config, RayConfig, SamplingConfig
from raynforce.errors import RaynforceError
from raynforce.runtimes.ray.runtime import RayRuntime

config = Config(env="CartPole-v1", runtime="ray", sampling=SamplingConfig(samplers=3), ray=RayConfig(address="auto"))
flags = Path(sys.argv[1])
with RayRuntime(config) as runtime:
    def spawn(name):
        return runtime.spawn("platform:uname_result", *"abcde", name=name, place=runtime.places["sampler"])

    roles = [spawn(f"sampler {n}") for n in range(4)]
    for role in roles:
        role.call("index", "a").result()
    far = [role for role in roles if role.node() != runtime._node]
    near = [role for role in roles if role not in far]
    flags.joinpath("cut").touch()
    while not flags.joinpath("is_cut").exists():
        time.sleep(0.05)
    began, errors = time.monotonic(), []
    for role in far:
        try:
            role.call("index", "a").result()
        except RaynforceError as error:
            errors.append([type(error).__name__, error.role, str(error)])
    seconds = time.monotonic() - began
    alive = [role.call("index", "b").result() for role in near]
    for role in far:
        role.end()
    again = [spawn(role.name).call("index", "c") for role in far]
    flags.joinpath("mend").touch()
    back = len(runtime.wait(again, timeout=60)[0])
    names = [role.name for role in far]
    print(json.dumps({"shipped": runtime._cluster.shipped, "far": names, "seconds": seconds, "errors": errors,
                      "alive": alive, "back": back}))
"""


class Hosts:
    """Two machines, each with a network, a name and an address of its own, joined by a switch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"rn{os.getpid() % 100_000}"
        self._undo = ExitStack()
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | SETTINGS
        self._environment |= {"HOME": str(folder), "PYTHONPATH": str(Path(raynforce.__file__).parents[1])}

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            bridge = f"{self._mark}b"
            self._ip(f"link add {bridge} type bridge")
            undo.callback(self._ip, f"link del {bridge}")
            self._ip(f"link set {bridge} up")
            for n in (1, 2):
                host = f"{self._mark}h{n}"
                self._ip(f"netns add {host}")
                undo.callback(self._ip, f"netns del {host}")
                self._ip(f"link add {self._mark}v{n} type veth peer name eth0 netns {host}")
                self._ip(f"link set {self._mark}v{n} master {bridge} up")
                self._ip(f"-n {host} addr add 10.77.0.{n}/24 dev eth0")
                self._ip(f"-n {host} link set eth0 up")
                self._ip(f"-n {host} link set lo up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _ip(self, words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    def cut(self, n: int, state: str = "down") -> None:
        self._ip(f"link set {self._mark}v{n} {state}")

    def run(self, n: int, *words: str) -> subprocess.Popen[str]:
        """Start a Python program on a host; it is ended with the hosts, if it has not ended by then."""
        named = ["unshare", "-u", "sh", "-c", f'hostname node{n}; exec "$@"', "sh"]
        log = self.folder / f"{n}.log"
        with log.open("a") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", f"{self._mark}h{n}", *named, sys.executable, *words],
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE if words[0] == "-c" else output,
                stderr=output,
                text=True,
            )
        self._undo.callback(end, process)
        return process

    def ray(self, n: int, *words: str) -> subprocess.Popen[str]:
        log = self.folder / f"{n}.log"
        seen = len(log.read_text()) if log.exists() else 0
        process = self.run(n, "-m", "ray.scripts.scripts", "start", "--block", *words)
        wait_until(lambda: "block forever" in log.read_text()[seen:], 60)
        return process


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=15)
    process.kill()
    process.wait()


def wait_until(there: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2 for its networks")
def test_a_cluster_by_hand_of_which_one_host_is_cut_off() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rnh-", dir="/tmp"))
    store = "--object-store-memory=100000000"
    joining = ["--address=10.77.0.1:6379", "--node-ip-address=10.77.0.2", "--num-cpus=2", store]
    try:
        with Hosts(folder) as hosts:
            head = ["--head", "--node-ip-address=10.77.0.1", "--port=6379", "--num-cpus=2", store]
            hosts.ray(1, *head, f"--temp-dir={folder}/r", "--include-dashboard=false")
            first = hosts.ray(2, *joining)
            driver = hosts.run(1, "-c", DRIVER, str(folder))
            wait_until((folder / "cut").exists, 60)
            hosts.cut(2)
            (folder / "is_cut").touch()
            wait_until((folder / "mend").exists, 60)
            hosts.cut(2, "up")
            first.wait(timeout=60)  # a node that the cluster has given up ends by itself
            hosts.ray(2, *joining)
            out, _ = driver.communicate(timeout=90)
        assert out, (folder / "1.log").read_text()
        found = json.loads(out)
        assert found["shipped"], "there is another host"
        assert found["errors"] == [["RoleDied", name, f"{name} died: its node was lost"] for name in found["far"]]
        assert len(found["far"]) == found["back"] == 2
        assert found["alive"] == [1, 1]
        assert found["seconds"] < 15
    finally:
        shutil.rmtree(folder, ignore_errors=True)
