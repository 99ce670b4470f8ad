"""Machines to reach over SSH, on this one: each with a network, processes, a name, a home and a /tmp of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import raynforce

ROOT = Path(raynforce.__file__).parents[1]
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SUBNET = "10.78.0"
HOME = "/tmp/home"  # of root, on each
# `ray stop` ends all Rays that it sees: a host sees its own processes alone.
BOOT = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /tmp
mkdir -p /tmp/home /tmp/shared /run/sshd
mount --bind "$3" /tmp/shared
mount --bind "$2/passwd" /etc/passwd
mkdir -m 700 /tmp/home/.ssh
cp "$2/id_ed25519.pub" /tmp/home/.ssh/authorized_keys
chmod 600 /tmp/home/.ssh/authorized_keys
exec "$4" -D -e -f "$2/sshd_config"
"""


def missing() -> str:
    """Why such hosts cannot be had here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root for its networks"
    lacking = [tool for tool in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "rsync") if not shutil.which(tool)]
    lacking += [] if os.path.exists(SSHD) else ["sshd"]
    return f"needs {', '.join(lacking)}" if lacking else ""


class Hosts:
    """Three machines and a laptop, joined by a switch: the laptop is 10.78.0.100, the machines count from 1."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self._mark = f"ru{os.getpid() % 100_000}"
        self._undo = ExitStack()
        self.addresses = [f"{SUBNET}.{n}" for n in range(1, count + 1)]
        self._inits: dict[str, int] = {}

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            self._keys()
            bridge = f"{self._mark}b"
            self._ip(f"link add {bridge} type bridge")
            undo.callback(self._ip, f"link del {bridge}")
            self._ip(f"link set {bridge} up")
            for n in [*range(1, self.count + 1), 100]:
                self._host(n, bridge, undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _keys(self) -> None:
        for name in ("id_ed25519", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        lines = [f"HostKey {self.folder}/host_key", "PermitRootLogin prohibit-password", "PasswordAuthentication no"]
        lines += ["UsePAM no", "PidFile none", "StrictModes no", "AcceptEnv *", "Subsystem sftp internal-sftp"]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        users = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        (self.folder / "passwd").write_text("\n".join([f"root:x:0:0:root:{HOME}:/bin/bash", *users]) + "\n")

    def _host(self, n: int, bridge: str, undo: ExitStack) -> None:
        name = f"{self._mark}h{n}"
        self._ip(f"netns add {name}")
        undo.callback(self._ip, f"netns del {name}")
        self._ip(f"link add {self._mark}v{n} type veth peer name eth0 netns {name}")
        self._ip(f"link set {self._mark}v{n} master {bridge} up")
        self._ip(f"-n {name} addr add {SUBNET}.{n}/24 dev eth0")
        self._ip(f"-n {name} link set eth0 up")
        self._ip(f"-n {name} link set lo up")
        shared = self.folder / "shared"
        shared.mkdir(exist_ok=True)
        words = ["ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        words += ["--mount-proc", "sh", "-c", BOOT, "sh", f"host{n}", str(self.folder), str(shared), SSHD]
        with (self.folder / f"sshd-{n}.log").open("w") as log:
            host = subprocess.Popen(words, env=self._environment(), stdout=log, stderr=log, cwd="/")
        undo.callback(self._end, host, n)
        deadline = time.monotonic() + 10
        while "Server listening" not in (self.folder / f"sshd-{n}.log").read_text():
            assert host.poll() is None, (self.folder / f"sshd-{n}.log").read_text()
            assert time.monotonic() < deadline, (self.folder / f"sshd-{n}.log").read_text()
            time.sleep(0.05)
        self._inits[str(n)] = _sshd_of(host.pid)

    def _end(self, host: subprocess.Popen[bytes], n: int) -> None:
        """The first process of a namespace takes all others there with it."""
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self._inits[str(n)], signal.SIGKILL)
        host.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(timeout=10)
        host.kill()
        host.wait()

    def _environment(self) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON", "PYTEST"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return plain | {"HOME": HOME, "PATH": path}

    def _ip(self, words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    def on(self, n: int, script: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a script on a host, within all that is its own."""
        words = ["nsenter", "-t", str(self._inits[str(n)]), "-m", "-n", "-p", "-u", "-i", "bash", "-c", script]
        environment = self._environment() | {"PYTHONPATH": str(ROOT)}
        with (self.folder / "out.txt").open("w+") as out:
            done = subprocess.run(
                words, env=environment, cwd="/", stdout=out, stderr=out, text=True, timeout=seconds, check=False
            )
            out.seek(0)
            done.stdout = out.read()
        return done


def _sshd_of(pid: int) -> int:
    """The process of the other namespaces: the last of the line of only children."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            return pid
        pid = int(children[0])
