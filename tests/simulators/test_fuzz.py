"""The protocol fuzzer's messages, played to the C++ header under AddressSanitizer and UBSan."""

from __future__ import annotations

import random
import re
import struct
import subprocess
from collections.abc import Callable

import pytest

from tests.protocol.protocol_fuzz import WORLDS, Fuzzer

SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
KNOWN = [number for number, (_, mode) in enumerate(WORLDS) if mode in ("same_step", "explicit")]  # to the header


def hostile_sessions(seed: int, sessions: int) -> bytes:
    """Some of a valid session, then hostile messages; each of so many sessions."""
    fuzzer, chance, out = Fuzzer(seed), random.Random(seed), []
    for _ in range(sessions):
        world = chance.choice(KNOWN)
        script = [message.to_bytes() for message in fuzzer.records[world][0]]
        played = script[: chance.randrange(len(script))]
        for _ in range(chance.randrange(1, 60)):
            data = chance.choice(script)
            for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
                data = chance.choice(fuzzer._mutations)(data)
            played.append(data)
        out.append(struct.pack("<I", WORLDS[world][0] is not WORLDS[0][0]))
        out += [struct.pack("<i", len(data)) + data for data in played]
        out.append(struct.pack("<i", -1))
    return b"".join(out)


@pytest.mark.parametrize("messages", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_fuzzers_messages_do_not_harm_it(compiled: Callable[..., str], messages: int) -> None:
    program = compiled("tests/simulators/fuzz.cpp", *SANITIZED)
    played = welcomed = seed = 0
    while played < messages:
        data = hostile_sessions(seed, 500)
        done = subprocess.run([program], input=data, capture_output=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        counts = [int(number) for number in re.findall(r"\d+", done.stdout.decode())]
        welcomed, played, seed = welcomed + counts[1], played + counts[2], seed + 1
    assert welcomed > 100 * seed  # else it was refused at the door
