"""What is said before the first step: HELLO, and the WELCOME or REJECT that answers it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from raynforce.errors import UsageError
from raynforce.protocol.agents import agents_json, read_agents
from raynforce.protocol.codec import AUTORESET
from raynforce.protocol.fields import flag, items, mapping, one_of, take, text, whole
from raynforce.protocol.frame import MAJOR, MINORS, MOST_BODY, MOST_ENVS, Message, ProtocolError, Type, clean
from raynforce.protocol.shared import SharedObs
from raynforce.protocol.spaces import Spaces, differences, row_bytes
from raynforce.spaces import Agents

# The host's own count of returns and lengths; what each env itself took; numbers of episodes that ended; saved states.
CAPABILITIES = ("episodes", "timing", "info", "snapshot")
_DAY = 86_400_000  # milliseconds


@dataclass(frozen=True)
class Deadlines:
    """Milliseconds after which something is overdue; the policy's are used by both sides."""

    handshake_ms: int = 10_000  # from the connection to HELLO, and from HELLO to WELCOME
    ping_ms: int = 1_000  # nothing heard for so long: ask
    silence_ms: int = 10_000  # nothing heard for so long: the other side is gone
    reset_ms: int = 60_000
    step_ms: int = 30_000
    close_ms: int = 5_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 1 <= value <= _DAY:
                raise UsageError(f"{name} is {value}; it must be from 1 to {_DAY} milliseconds")

    @staticmethod
    def from_json(data: object) -> Deadlines:
        """From a peer; what is missing has its default, what is unknown is left out."""
        found = mapping(data, "deadlines")
        names = [name for name in asdict(Deadlines()) if name in found]
        return Deadlines(**{name: whole(found[name], f"deadlines.{name}", 1, _DAY) for name in names})


@dataclass(frozen=True)
class Hello:
    envs: int
    spaces: Spaces
    autoreset: tuple[str, ...] = ("same_step",)  # what it can do, the best first
    capabilities: tuple[str, ...] = ()
    software: str = "raynforce"
    version: str = "0"
    pid: int = 0
    launch: str = ""  # the nonce that it was started with, if any
    proof: str = ""  # `prove(token, launch)`, if it was given a token
    minors: tuple[int, int] = MINORS
    host: int | None = None  # which of the launch's hosts it is, if it was told
    resume: int = 0  # the session that it wants to go on with, after its connection was lost
    agents: Agents | None = None  # who takes part in each env, if there are several; `spaces` are then of all of them

    def message(self) -> Message:
        protocol = {"major": MAJOR, "minor_min": self.minors[0], "minor_max": self.minors[1]}
        software = {"name": self.software, "version": self.version}
        meta = {"protocol": protocol, "software": software, "pid": self.pid, "spaces": self.spaces.to_json()}
        meta |= {"autoreset": list(self.autoreset), "capabilities": list(self.capabilities)}
        if self.agents is not None:
            meta["agents"] = agents_json(self.agents)
        if self.host is not None:
            meta["host"] = self.host
        if self.resume:
            meta["resume"] = f"{self.resume:016x}"
        if self.launch:
            meta |= {"launch": self.launch, "proof": self.proof}
        return Message(Type.HELLO, envs=self.envs, minor=self.minors[1], meta=meta)

    @staticmethod
    def read(message: Message) -> Hello:
        meta = message.meta
        protocol = mapping(take(meta, "protocol", "HELLO"), "protocol")
        if whole(take(protocol, "major", "protocol"), "protocol.major", 0, 255) != MAJOR:
            raise ProtocolError("version", f"protocol.major is {protocol['major']}; this side speaks {MAJOR}")
        low, high = (whole(take(protocol, n, "protocol"), f"protocol.{n}", 0, 255) for n in ("minor_min", "minor_max"))
        software = mapping(take(meta, "software", "HELLO"), "software")
        spaces, agents = Spaces.from_json(take(meta, "spaces", "HELLO")), meta.get("agents")
        return Hello(
            envs=message.envs,
            spaces=spaces,
            autoreset=_words(take(meta, "autoreset", "HELLO"), "autoreset", 1),
            capabilities=_words(take(meta, "capabilities", "HELLO", []), "capabilities", 0),
            software=text(take(software, "name", "software"), "software.name"),
            version=text(take(software, "version", "software"), "software.version"),
            pid=whole(take(meta, "pid", "HELLO", 0), "pid", 0, (1 << 32) - 1),
            launch=_optional(meta, "launch"),
            proof=_optional(meta, "proof"),
            minors=(low, high),
            host=None if (host := meta.get("host")) is None else whole(host, "host", 0, (1 << 32) - 1),
            resume=_session(_optional(meta, "resume")),
            agents=None if agents is None else read_agents(agents, spaces),
        )


@dataclass(frozen=True)
class Inference:
    """What a host needs to choose actions itself: the size of every POLICY and FRAGMENT follows from it."""

    length: int  # steps of each env in a fragment
    policy: Mapping[
        str, Any
    ]  # `network`, `exploration` and `values` of the `acting` part of a checkpoint's policy.json


@dataclass(frozen=True)
class Welcome:
    session: int
    autoreset: str
    seeds: np.ndarray  # [envs] uint64, what each env's first RESET begins with if it carries no seed
    minor: int = MINORS[1]
    capabilities: tuple[str, ...] = ()
    finite: bool = True  # whether NaN and infinity in rewards and observations break the env that gave them
    deadlines: Deadlines = field(default_factory=Deadlines)
    spec_hash: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # for all envs
    env_config: Sequence[Mapping[str, Any]] = ()  # for each env, laid over `config`; empty if they are all alike
    memory: SharedObs | None = None  # whose file descriptor goes with it
    inference: Inference | None = None  # if the host chooses actions itself

    def message(self) -> Message:
        meta: dict[str, Any] = {"autoreset": self.autoreset, "capabilities": list(self.capabilities)}
        meta |= {"finite": self.finite, "deadlines": asdict(self.deadlines)}
        meta |= {"spec_hash": self.spec_hash, "config": dict(self.config)}
        if self.env_config:
            meta["env_config"] = [dict(config) for config in self.env_config]
        if self.inference is not None:
            meta |= {"fragment": self.inference.length, "policy": dict(self.inference.policy)}
        envs, seeds = len(self.seeds), self.seeds.astype("<u8")
        return Message(Type.WELCOME, self.session, envs=envs, minor=self.minor, meta=meta, buffers=[seeds])

    @staticmethod
    def read(message: Message, hello: Hello) -> Welcome:
        meta = message.meta
        if not message.session:
            raise ProtocolError("session", "WELCOME: session is 0; it must be another number")
        if message.envs != hello.envs:
            raise ProtocolError("env", f"WELCOME: envs {message.envs}; HELLO said {hello.envs}")
        if not hello.minors[0] <= message.minor <= hello.minors[1]:
            raise ProtocolError("version", f"WELCOME: minor version {message.minor}; HELLO said {list(hello.minors)}")
        capabilities = _words(take(meta, "capabilities", "WELCOME", []), "capabilities", 0)
        if foreign := set(capabilities) - set(hello.capabilities):
            raise ProtocolError("field", f"capabilities has {min(foreign)!r}, which HELLO did not offer")
        spec_hash = _optional(meta, "spec_hash")
        if spec_hash and spec_hash != hello.spaces.digest():
            raise ProtocolError(
                "spaces", f"spec_hash is {spec_hash}; that of HELLO's spaces is {hello.spaces.digest()}"
            )
        env_config = items(take(meta, "env_config", "WELCOME", []), "env_config", 0, hello.envs)
        if env_config and len(env_config) != hello.envs:
            raise ProtocolError("field", f"env_config has {len(env_config)} items; expected {hello.envs} or none")
        return Welcome(
            session=message.session,
            autoreset=one_of(take(meta, "autoreset", "WELCOME"), "autoreset", hello.autoreset),
            seeds=message.buffers[0],
            minor=message.minor,
            capabilities=capabilities,
            finite=flag(take(meta, "finite", "WELCOME", True), "finite"),
            deadlines=Deadlines.from_json(take(meta, "deadlines", "WELCOME", {})),
            spec_hash=spec_hash,
            config=mapping(take(meta, "config", "WELCOME", {}), "config"),
            env_config=[mapping(c, f"env_config[{i}]") for i, c in enumerate(env_config)],
        )


@dataclass(frozen=True)
class Offer:
    session: int = field(default_factory=lambda: secrets.randbits(64) | 1)  # not 0, and not used before
    spaces: Spaces | None = None  # what the hosts' spaces must be; None takes any
    seeds: Callable[[int], np.ndarray] = lambda envs: np.arange(envs, dtype=np.uint64)  # seeds of so many envs
    most_envs: int = MOST_ENVS
    most_bytes: int = MOST_BODY  # of the largest message that a host's spaces and number of envs allow
    autoreset: tuple[str, ...] = AUTORESET
    capabilities: tuple[str, ...] = CAPABILITIES
    finite: bool = True
    deadlines: Deadlines = field(default_factory=Deadlines)
    config: Mapping[str, Any] = field(default_factory=dict)
    env_config: Sequence[Mapping[str, Any]] = ()
    token: bytes = b""  # if given, hosts must prove that they know it, for the launch below
    launch: str = ""
    memory: Callable[[Spaces, int], SharedObs] | None = None
    """Makes shared memory for `same_step` observations of a host that offers to use it, on a Unix socket."""
    inference: Inference | None = None  # for hosts that can choose actions themselves, with `same_step`
    each: Callable[[Offer, Hello], Offer] | None = None  # the offer for a proven host; may raise a `Refusal`

    def __post_init__(self) -> None:
        if not 0 < self.session < 1 << 64:
            raise UsageError(f"session is {self.session}; it must be from 1 to 2**64 - 1")
        if not 0 < self.most_envs <= MOST_ENVS:
            raise UsageError(f"most_envs is {self.most_envs}; it must be from 1 to {MOST_ENVS}")

    def answer(self, hello: Hello) -> Welcome:
        """The welcome for a host, or a `Refusal`, a `ProtocolError` whose code and text go into a REJECT."""
        if self.token and not self.proven(hello):
            fix = "start hosts with the token they are given"
            raise Refusal("auth", f"launch and proof do not belong to this launch: {fix}")
        if self.each is not None:
            return replace(self.each(self, hello), token=b"", each=None).answer(hello)
        minor = min(hello.minors[1], MINORS[1])
        if minor < max(hello.minors[0], MINORS[0]):
            raise Refusal("version", f"minor versions {list(hello.minors)}; this side speaks {list(MINORS)}")
        if self.spaces is not None and (diff := differences(hello.spaces, self.spaces)):
            first = diff[0]
            told = f"{first['field']} is {clean(first['host'], 80)} at the host; expected {clean(first['policy'], 80)}"
            raise Refusal("spaces", told + (f" (and {len(diff) - 1} more)" if diff[1:] else ""), diff)
        largest = hello.envs * (max(2 * hello.spaces.obs_bytes, row_bytes(hello.spaces.action)) + 64)
        if hello.envs > self.most_envs or largest > self.most_bytes:
            asked = f"{hello.envs} envs with messages up to {largest} bytes"
            raise Refusal("capacity", f"{asked}; at most {self.most_envs} and {self.most_bytes}")
        if self.env_config and len(self.env_config) != hello.envs:
            raise Refusal("capacity", f"{hello.envs} envs; this side has settings for {len(self.env_config)}")
        modes = [mode for mode in self.autoreset if mode in hello.autoreset]
        if not modes:
            raise Refusal("autoreset", f"autoreset {list(hello.autoreset)}; this side takes {list(self.autoreset)}")
        capabilities = tuple(c for c in self.capabilities if c in hello.capabilities)
        memory = None
        if self.memory is not None and "memory" in hello.capabilities and modes[0] == "same_step":
            memory, capabilities = self.memory(hello.spaces, hello.envs), (*capabilities, "memory")
        inference = self.inference if "inference" in hello.capabilities and modes[0] == "same_step" else None
        if inference is not None:
            capabilities = (*capabilities, "inference")
        return Welcome(
            session=self.session,
            autoreset=modes[0],
            seeds=self.seeds(hello.envs),
            minor=minor,
            capabilities=capabilities,
            finite=self.finite,
            deadlines=self.deadlines,
            spec_hash=hello.spaces.digest(),
            config=self.config,
            env_config=self.env_config,
            memory=memory,
            inference=inference,
        )

    def proven(self, hello: Hello) -> bool:
        """Whether a host has shown that it knows the token of this launch."""
        proof, told = prove(self.token, self.launch), hello.proof.encode("utf-8", "replace")
        return hello.launch == self.launch and hmac.compare_digest(proof.encode(), told)


class Refusal(ProtocolError):
    def __init__(self, code: str, text: str, diff: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(code, text)
        self.diff = diff


def prove(token: bytes, launch: str) -> str:
    """HMAC of the launch: good for one launch, and does not show the token."""
    return hmac.new(token, b"raynforce hello " + launch.encode(), hashlib.sha256).hexdigest()


def signed(hello: Hello, token: bytes, launch: str) -> Hello:
    return replace(hello, launch=launch, proof=prove(token, launch))


def reject(error: ProtocolError) -> Message:
    diff = [dict(entry) for entry in getattr(error, "diff", ())]
    meta = {"code": error.code, "text": clean(str(error)), **({"diff": diff} if diff else {})}
    return Message(Type.REJECT, meta=meta)


def _words(value: object, where: str, least: int) -> tuple[str, ...]:
    return tuple(text(word, f"{where}[{i}]", 40) for i, word in enumerate(items(value, where, least, 64)))


def _session(word: str) -> int:
    try:
        return int(word or "0", 16) & (1 << 64) - 1
    except ValueError:
        raise ProtocolError("field", f"resume is {clean(word, 40)!r}; it must be a session in hex") from None


def _optional(meta: Mapping[str, Any], name: str) -> str:
    value = meta.get(name, "")
    return text(value, name, 256) if value else ""
