"""The protocol between env hosts and a policy: what a message costs, and what a million hostile ones do to it.

`RESULT` is encoded to one piece of memory and decoded from it; `both sessions` is a whole step of all envs: STEP
encoded, decoded and checked by the host's session, its slots gathered into a RESULT, and that checked by the policy's
session. Times are of CPU, one thread; environments and sockets are left out. `over a Unix socket` is the same between
two processes, as `raynforce.protocol.channel` joins them: CPU of each, and how long both take. With `--fuzz N`, N
hostile messages are played instead (`tests/protocol/protocol_fuzz.py`), and a table shows what became of them.
"""

from __future__ import annotations

import multiprocessing
import select
import time
import tracemalloc

import numpy as np

from benchmarks.measure import Row, Table, command, pinned, row
from raynforce.protocol.channel import Address, Listener, connect
from raynforce.protocol.frame import Message
from raynforce.protocol.handshake import Hello, Offer
from raynforce.protocol.host_session import HostSession, StepRequest
from raynforce.protocol.policy_session import PolicySession, Results
from raynforce.protocol.session import Closing, Ended, Note
from raynforce.protocol.spaces import Spaces
from raynforce.spaces import ActionSpec, ObsLeaf
from tests.protocol.protocol_fuzz import Fuzzer

ACTION = ActionSpec("discrete", (), "int64", sizes=(4,), start=(0,))
WORLDS = {
    "4 floats": Spaces((ObsLeaf("obs", "box", (4,), "float32"),), ACTION),
    "84x84x4 bytes": Spaces((ObsLeaf("obs", "box", (84, 84, 4), "uint8"),), ACTION),
}
MEMORY = 8 << 20
"""Bytes that hostile messages may make both sides and the fuzzer itself take."""
TRACED = 20_000


def measure(repeats: int = 7, messages: int = 500, fuzz: int = 0) -> list[Table]:
    if fuzz:
        return [hostile(fuzz)]
    sockets = [
        Table(f"{name}, over a Unix socket", [r for n in (1, 4, 16) for r in _socket_rows(s, n, repeats, messages)])
        for name, s in WORLDS.items()
    ]
    with pinned():
        return [
            Table(name, [r for n in (1, 8, 64) for r in _rows(s, n, repeats, messages)]) for name, s in WORLDS.items()
        ] + sockets


def _rows(spaces: Spaces, envs: int, repeats: int, messages: int) -> list[Row]:
    host, policy = _introduced(spaces, envs)
    everyone = np.arange(envs)
    actions = np.zeros(envs, np.int64)
    result = host.results(everyone, 0.0)
    policy.take(result.to_bytes(), 0.0)
    codec, whole = [], []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(messages):
            policy.codec.decode(result.to_bytes())
        coded = time.process_time()
        for _ in range(messages):
            _exchange(host, policy, everyone, actions)
        codec.append((coded - began) / messages * 1e6)
        whole.append((time.process_time() - coded) / messages * 1e6)
    per_second = [1e6 / each for each in codec]
    return [
        row(f"RESULT of {envs} envs, encode and decode", "1/s", per_second),
        row("the same", "µs", codec),
        row("a step through both sessions", "µs", whole),
    ]


def _exchange(host: HostSession, policy: PolicySession, everyone: np.ndarray, actions: np.ndarray) -> None:
    host.take(policy.step(everyone, actions, 0.0).to_bytes(), 0.0)
    outcome = policy.take(host.results(everyone, 0.0).to_bytes(), 0.0)
    assert len(outcome.events) == 1


def _introduced(spaces: Spaces, envs: int) -> tuple[HostSession, PolicySession]:
    """Two sides that have met, and whose envs all owe their first observation."""
    host, policy = HostSession(Hello(envs, spaces), 0.0), PolicySession(Offer(1, spaces), 0.0)
    to_host: list[Message] = [*policy.take(host.start().to_bytes(), 0.0).send, policy.reset(np.arange(envs), 0.0)]
    for message in to_host:
        host.take(message.to_bytes(), 0.0)
    return host, policy


def _socket_rows(spaces: Spaces, envs: int, repeats: int, messages: int) -> list[Row]:
    """STEP of all envs of a host in another process, and its RESULT."""
    listener = Listener("unix", Offer(spaces=spaces))
    child = multiprocessing.get_context("spawn").Process(target=_host, args=(listener.address, envs, spaces))
    child.start()
    while (link := listener.accept()) is None:
        time.sleep(0.001)
    ready = select.poll()
    ready.register(link, select.POLLIN)
    everyone, actions = np.arange(envs), np.zeros(envs, np.int64)

    def until(kind: type) -> list[object]:
        while True:
            ready.poll(1000)
            if found := [event for event in link.receive(time.monotonic()) if isinstance(event, kind)]:
                return found

    link.send(link.session.reset(everyone, time.monotonic()))
    until(Results)
    mine, wall = [], []
    for _ in range(repeats):
        began, began_cpu = time.monotonic(), time.process_time()
        for _ in range(messages):
            link.send(link.session.step(everyone, actions, time.monotonic()))
            until(Results)
        mine.append((time.process_time() - began_cpu) / messages * 1e6)
        wall.append((time.monotonic() - began) / messages * 1e6)
    link.send(*link.session.close(time.monotonic()).send)
    (said,) = until(Note)
    assert isinstance(said, Note)
    link.close()
    listener.close()
    child.join()
    theirs = float(said.text) / (repeats * messages) * 1e6
    return [
        row(f"STEP and RESULT of {envs} envs, the policy's CPU", "µs", mine),
        row("the host's", "µs", [theirs]),
        row("from STEP to RESULT", "µs", wall),
    ]


def _host(address: Address, envs: int, spaces: Spaces) -> None:
    """Answer every STEP at once; at the end, say how much CPU that took."""
    link = connect(address, Hello(envs, spaces, capabilities=("timing",)), seconds=10)
    ready = select.poll()
    ready.register(link, select.POLLIN)
    began = 0.0
    while not link.session.ended:
        ready.poll(1000)
        for event in link.receive(time.monotonic()):
            if isinstance(event, Closing):
                link.send(link.session.log("info", f"{time.process_time() - began}"))
                link.close()
            elif not isinstance(event, Ended):
                began = began if isinstance(event, StepRequest) else time.process_time()
                link.send(link.session.results(event.envs, time.monotonic()))
        while link.wants_write:
            link.flush()


def hostile(messages: int) -> Table:
    """Play hostile messages; what is required of both sides is an assertion of the fuzzer."""
    began = time.monotonic()
    fuzzer = Fuzzer(seed=0)
    fuzzer.play(messages)
    seconds = time.monotonic() - began
    traced = Fuzzer(seed=1)
    tracemalloc.start()
    traced.play(min(messages, TRACED))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if peak > MEMORY:
        raise SystemExit(f"hostile messages took {peak:,} bytes of memory; the limit is {MEMORY:,}")
    counts = [row(name, "times", [n]) for name, n in sorted(fuzzer.counts.items())]
    notes = [
        f"peak of memory over {min(messages, TRACED):,} more messages: {peak / 2**20:.2f} MiB, limit {MEMORY >> 20} MiB"
    ]
    return Table("hostile messages", [*counts, row("played in", "s", [seconds])], notes)


if __name__ == "__main__":
    command(measure, __doc__ or "")
