"""Where simulators are that others start: `listen:ADDRESS`, `connect:ADDRESS,…`, and the key that both sides have."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raynforce.errors import UsageError

LISTEN, CONNECT = "listen:", "connect:"
LAUNCH = "sims"
"""The nonce of simulators that no one run has launched."""
FORMS = "unix:/path, tcp:host:port, zmq:tcp://host:port, zmq:ipc:///path"


class Where(NamedTuple):
    """An address as it is typed."""

    kind: str  # unix, tcp or zmq
    place: str  # a path, `@name`, `host:port`, or what zmq takes

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    @property
    def host(self) -> str:
        """The name or number of its machine; empty for what has a path."""
        if self.kind == "unix" or self.place.startswith("ipc:"):
            return ""
        return self.place.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.place.rpartition(":")[2])

    @property
    def socket(self) -> tuple[int, Any]:
        """The family and the address of a socket, for unix and tcp."""
        if self.kind == "unix":
            return socket.AF_UNIX, f"\0{self.place[1:]}" if self.place.startswith("@") else self.place
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET, (self.host, self.port)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can be at the other end."""
        if not self.host or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def is_remote(env: str) -> bool:
    """Whether `env` says where simulators are, and not how to start one."""
    return env.startswith((LISTEN, CONNECT))


def addresses(env: str) -> list[Where]:
    """The addresses of `listen:…` or `connect:…,…`; a `UsageError` with one line if one is none."""
    prefix = LISTEN if env.startswith(LISTEN) else CONNECT
    found = [_address(env, text) for text in env.removeprefix(prefix).split(",")]
    if prefix == LISTEN and len(found) > 1:
        raise UsageError(f"env {env!r}: one address to listen on, not {len(found)}")
    return found


def _address(env: str, text: str) -> Where:
    kind, _, place = text.partition(":")
    right = {
        "unix": len(place) > 1 or place.startswith("/"),
        "tcp": _has_port(place),
        "zmq": place.startswith("ipc://") or (place.startswith("tcp://") and _has_port(place[6:])),
    }
    if not right.get(kind, False):
        raise UsageError(f"env {env!r}: {text!r} is no address; one of: {FORMS}")
    return Where(kind, place)


def _has_port(place: str) -> bool:
    host, _, port = place.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65_536


@contextlib.contextmanager
def reached(env: str, envs: int = 1, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """In here the simulators of `env` are within reach, if others start them: so many envs of theirs are waited for."""
    if not is_remote(env):
        yield
        return
    from raynforce.envs.gateway import gateway, gateways  # which bring the protocol along

    with gateways():
        gateway(env, say).wait_for(envs)
        yield


class Key(NamedTuple):
    """What proves who is who: a token that both have, and for ZMQ beyond this machine CURVE keys of the trainer."""

    token: bytes
    public: bytes = b""
    secret: bytes = b""  # the trainer's alone


def find_key() -> Key:
    """The key in the file that `RAYNFORCE_KEY` names; else the token in `~/.raynforce/token`, which is made if missing.

    So simulators of the same user on the same machine need nothing.
    """
    if given := os.environ.get("RAYNFORCE_KEY"):
        return read_key(Path(given))
    path = Path.home() / ".raynforce" / "token"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(f"cannot write the token for simulators: {path}: {error.strerror}") from error
    try:
        return Key(bytes.fromhex(path.read_text().strip()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no token; remove it, and a new one is made") from error


def read_key(path: Path) -> Key:
    try:
        found = json.loads(path.read_text())
        token, public, secret = (found.get(name, "") for name in ("token", "public", "secret"))
        return Key(bytes.fromhex(token), public.encode(), secret.encode())
    except FileNotFoundError:
        raise UsageError(f"there is no key {path}; `raynforce sim keys DIR` makes a pair") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{path} is no key of `raynforce sim keys`") from error


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write `trainer.key` and `simulator.key`, readable by their owner alone; neither may be there."""
    zmq = need_zmq("keys")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    token = secrets.token_hex(32)
    paths = folder / "trainer.key", folder / "simulator.key"
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} is there already: give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, more in zip(paths, ({"public": public, "secret": secret}, {"public": public}), strict=True):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(json.dumps({"token": token, **more}, indent=1) + "\n")
    return paths


def require_safe(where: Where, key: Key) -> None:
    """Refuse what would cross a network in the open."""
    if where.is_local:
        return
    if where.kind == "tcp":
        fix = f"use zmq:tcp://{where.place} with keys of `raynforce sim keys`, a tunnel, or 127.0.0.1"
        raise UsageError(f"{where} is not encrypted and reaches beyond this machine: {fix}")
    if not key.secret:
        fix = "`raynforce sim keys DIR` makes them; then RAYNFORCE_KEY=DIR/trainer.key"
        raise UsageError(f"{where} reaches beyond this machine and needs keys: {fix}")


def need_zmq(what: str) -> Any:
    try:
        import zmq
    except ImportError:
        raise UsageError(f'{what}: ZMQ is not installed: pip install "raynforce[zmq]"') from None
    return zmq


def own_ip(towards: str = "10.255.255.255") -> str:
    """The address of this machine that others on its network can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 1))  # sends nothing
        except OSError:
            return "127.0.0.1"
        found: str = probe.getsockname()[0]
        return found
