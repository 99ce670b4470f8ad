"""A simulator that acts, with one defect: stands between a right one (the second argument) and the trainer."""

import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading

import numpy as np

DEFECT, PROGRAM = sys.argv[1:3]
STEP, POLICY, SAMPLE, FRAGMENT = 5, 14, 15, 16
LENGTH = 16
state = {"policies": 0, "held": None}


def message(connection):
    """Header, meta and body of the next message; None if there is none."""
    head = read(connection, 48)
    if head is None:
        return None
    meta, body = struct.unpack_from("<IQ", head, 36)
    return bytearray(head), bytearray(read(connection, meta) or b""), bytearray(read(connection, body) or b"")


def read(connection, count):
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            return None
        data += more
    return data


def column(head, body, name):
    """An array of a FRAGMENT of one leaf of four floats and one choice, in place."""
    envs, ended = struct.unpack_from("<II", head, 24)
    cells = LENGTH * envs
    at = 0
    layout = [("obs", "<f4", cells * 4 + envs * 4), ("action", "<i8", cells), ("logp", "<f4", cells)]
    layout += [("reward", "<f4", cells), ("status", "u1", cells), ("version", "<u4", cells)]
    layout += [("returns", "<f8", ended), ("lengths", "<u4", ended), ("final", "<f4", ended * 4)]
    for found, dtype, count in layout:
        if found == name:
            return np.frombuffer(body, dtype, count, at)
        at += -(-count * np.dtype(dtype).itemsize // 8) * 8
    raise KeyError(name)


def spoiled(head, meta, body):
    """What goes to the trainer instead of a message of the simulator."""
    if head[6] != FRAGMENT:
        return [(head, meta, body)]
    if DEFECT == "acts":
        column(head, body, "logp")[5] -= 0.1
    elif DEFECT == "value":
        column(head, body, "obs")[7] = np.nan
    elif DEFECT == "fragment-episodes":
        column(head, body, "lengths")[:] += 1
    elif DEFECT == "fragments-join":
        column(head, body, "obs")[:4] += 1
    elif DEFECT == "newest-policy":
        column(head, body, "version")[:] = state["policies"]
    elif DEFECT == "equal-fragments":
        column(head, body, "reward")[0] = secrets.randbelow(1000)
    elif DEFECT == "unasked-fragments":
        return [(head, meta, body)] * 2
    elif DEFECT == "samples-in-order":
        held, state["held"] = state["held"], (head, meta, body)
        if held is None:
            return []
        state["held"] = None
        return [(head, meta, body), held]
    return [(head, meta, body)]


def wanted(head, meta, body):
    """What goes to the simulator instead of a message of the trainer."""
    if head[6] == POLICY:
        state["policies"] = json.loads(meta)["version"]
        if DEFECT == "newest-policy" and state["policies"] > 1:  # it goes on with the first
            return None
    kind = {"sample-before-policy": SAMPLE, "policy-length": POLICY, "step-while-acting": STEP}
    return None if kind.get(DEFECT) == head[6] else (head, meta, body)


def relay(source, target, change):
    try:
        while (found := message(source)) is not None:
            changed = change(*found)
            for one in changed if isinstance(changed, list) else [changed]:
                if one is not None:
                    target.sendall(b"".join(one))
    except OSError:
        pass
    target.close()
    source.close()
    state["program"].wait()
    os._exit(0)


def main():
    name = f"raynforce-broken-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(1)
    trainer = socket.socket(socket.AF_UNIX)
    trainer.connect("\0" + os.environ["RAYNFORCE_CONNECT"].removeprefix("unix:@"))
    state["program"] = subprocess.Popen([PROGRAM], env=os.environ | {"RAYNFORCE_CONNECT": f"unix:@{name}"})
    simulator, _ = listener.accept()
    threading.Thread(target=relay, args=(simulator, trainer, spoiled), daemon=True).start()
    relay(trainer, simulator, wanted)


main()
