"""A simulator with one defect, named by the first argument: what the conformance kit has to find."""

import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "sdk" / "python"))
import raynforce_sim as sim

DEFECT = sys.argv.pop(1)


class Env:
    observation_space = sim.box((2,))
    action_space = sim.discrete(2)
    stream = 0

    def reset(self, seed):
        if DEFECT == "equal-seeds":
            seed = time.monotonic_ns()
        if DEFECT == "other-seeds":
            seed = 1
        if DEFECT in ("seeds-of-welcome", "episodes-differ"):
            Env.stream += DEFECT == "seeds-of-welcome"
            seed = seed + Env.stream if DEFECT == "seeds-of-welcome" else 1
        self.place, self.steps = np.random.default_rng(seed % (1 << 63)).uniform(-1, 1), 0
        return self.place, 0.0

    def step(self, action):
        self.place += 0.1 * (2 * action - 1)
        self.steps += 1
        reward = float("nan") if DEFECT == "step" and self.steps == 3 else 1.0
        return (self.place, self.steps), reward, False, self.steps == 8

    if DEFECT not in ("none without snapshot",):
        kept = []  # which no other process has

        def save_state(self):
            if DEFECT == "saving-changes-nothing":
                self.place += 0.5
            if DEFECT == "restored-elsewhere":
                Env.kept.append((self.place, self.steps))
                return {"number": len(Env.kept) - 1}
            return {"place": self.place, "steps": self.steps}

        def load_state(self, tree):
            if DEFECT == "restored-elsewhere":
                self.place, self.steps = Env.kept[tree["number"]]
                return
            self.place, self.steps = float(tree["place"]), tree["steps"]
            if DEFECT == "restored":
                self.steps = 0


def patch(*names):
    """Decorates a function that takes the method it replaces, for some defects."""

    def decorate(make):
        if DEFECT in names:
            method = make.__name__
            setattr(sim._Host, method, make(getattr(sim._Host, method)))
        return make

    return decorate


@patch("hello")
def _send(real):
    return lambda self, kind, *args, **kwargs: real(self, sim.LOG if kind == sim.HELLO else kind, *args, **kwargs)


@patch("refused")
def greet(real):
    def found(self):
        try:
            real(self)
        except sim.Refused:
            sys.exit(0)

    return found


@patch("proof")
def _send(real):
    def found(self, kind, meta=None, *args, **kwargs):
        if kind == sim.HELLO:
            meta["proof"] = "0" * 64
        real(self, kind, meta, *args, **kwargs)

    return found


@patch("token-secret")
def _send(real):
    def found(self, kind, meta=None, *args, **kwargs):
        if kind == sim.HELLO:
            meta["software"]["name"] = os.environ["RAYNFORCE_TOKEN"]
        real(self, kind, meta, *args, **kwargs)

    return found


@patch("ping")
def _send(real):
    def found(self, kind, meta=None, *args, **kwargs):
        if kind == sim.PONG:
            kwargs["sequence"] += 1
        real(self, kind, meta, *args, **kwargs)

    return found


@patch("unknown-keys")
def _message(real):
    def found(self):
        got = real(self)
        if "from_the_future" in got[6]:
            sys.exit(3)
        return got

    return found


@patch("other-session")
def _message(real):
    def found(self):
        got = list(real(self))
        got[3] = self.session
        return got

    return found


@patch("request-before-welcome", "other-major")
def greet(real):  # noqa: F811
    def found(self):
        try:
            real(self)
        except sim.Violation:
            time.sleep(60)

    return found


def rows(change):
    """A defect of what is sent for rows."""

    def make(real):
        def found(self, ids):
            change(self, ids)
            real(self, ids)

        return found

    sim._Host._send_rows = make(sim._Host._send_rows)


def set_all(**values):
    def change(self, ids):
        for i in ids:
            self.lanes[i].row = {**self.lanes[i].row, **values}

    return change


if DEFECT == "number-of-envs":
    os.environ["RAYNFORCE_ENVS"] = "2"
elif DEFECT == "reset":
    rows(set_all(status=0))
elif DEFECT == "timing":
    rows(set_all(seconds=1e6))
elif DEFECT == "returns-and-lengths":
    rows(set_all(length=3))
elif DEFECT == "final-observations":

    def wrong_final(self, ids):
        for i in ids:
            if self.lanes[i].row["final"]:
                self.lanes[i].row = {**self.lanes[i].row, "final": self.lanes[i].row["obs"]}

    rows(wrong_final)
elif DEFECT == "requests-cross":

    def another_request(self, ids):
        for i in ids:
            self.lanes[i].request += i == 1 and len(ids) < len(self.lanes)

    rows(another_request)
elif DEFECT in ("reset-some", "step-some"):
    real_rows = sim._Host._send_rows
    held = []

    def once_all_are_there(self, ids):
        held.extend(ids)
        if len(set(held)) == len(self.lanes):
            real_rows(self, list(held))
            held.clear()

    sim._Host._send_rows = once_all_are_there
elif DEFECT == "restored-observation":
    real_load = sim._Host._load
    sim._Host._load = lambda self, *args: {k: 0 * v for k, v in real_load(self, *args).items()}
elif DEFECT == "bad-state":
    real_load = sim._Host._load

    def fragile(self, *args):
        try:
            return real_load(self, *args)
        except ValueError:
            os._exit(139)

    sim._Host._load = fragile
elif DEFECT in ("step-again", "reset-again", "part-again", "old-request", "snapshot-again", "restore-again"):
    real_taken = sim._Host._taken

    def forgetful(self, *request):
        for lane in self.lanes:
            lane.request, lane.state = 0, None
            if DEFECT == "snapshot-again" and request[0] == sim.SNAPSHOT:
                lane.total += 1
        return real_taken(self, *request)

    sim._Host._taken = forgetful
elif DEFECT in ("asks", "silence"):
    sim._Host._watch = lambda self: None
elif DEFECT in ("close", "hang-up", "hang-up-in-message"):
    real_listen = sim._Host._listen

    def deaf(self):
        real = self.requests

        class Queue:
            get = real.get

            def put(self, request):
                if isinstance(request, tuple):
                    real.put(request)

        self.requests = Queue()
        real_listen(self)

    sim._Host._listen = deaf
elif DEFECT == "hang-up-before-welcome":
    real_greet = sim._Host.greet

    def patient(self):
        try:
            real_greet(self)
        except OSError:
            time.sleep(60)

    sim._Host.greet = patient
elif DEFECT == "unknown-type":
    sim._Host._say_error = lambda self, *args: None
elif DEFECT == "byte-by-byte":

    def impatient(self, count):
        data = self.connection.recv(count)
        if len(data) < count:
            raise ConnectionError("half a message")
        return data

    sim._Host._read = impatient
elif DEFECT == "several-at-once":

    def wasteful(self, count):
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError("gone")
        return data[:count]

    sim._Host._read = wasteful
elif DEFECT in ("bad-magic", "bad-length", "bad-meta", "no-such-env", "env-twice", "too-many-envs", "unknown-flags",
                "step-before-reset", "states-and-sizes", "large-state", "large-body", "save-before-reset"):  # fmt: skip

    class Lenient(Exception):
        pass

    sim.Violation = Lenient  # nothing that catches it: the thread or the loop goes on
    real_listen, real_taken = sim._Host._listen, sim._Host._taken

    def listen(self):
        real = self.requests

        class Queue:
            get = real.get

            def put(self, request):
                if not isinstance(request, Lenient):
                    real.put(request)

        self.requests = Queue()
        real_listen(self)
        time.sleep(60)

    def taken(self, *request):
        try:
            return real_taken(self, *request)
        except Exception:
            return []

    sim._Host._listen, sim._Host._taken = listen, taken

sim.serve(Env)
