"""Simulators in C++: what a step costs on our side, beside other ways to have one; how they train; and faults.

`--only` takes one part, or several with commas; all are measured without it.

- `cost`: CPU time of `Simulators.step` and `collect` for each environment step, 64 environments a message, waiting and
  acting left out: over a Unix socket, and with observations in shared memory. It is examples/cpp/cartpole.cpp that is
  stepped. Beside it stands the CPU time of the whole loop, that of waiting for the socket included.
- `beside`: environment steps per second with 64 environments, actions at random: that simulator; a ping-pong of REQ/REP
  and JSON (pyzmq here, libzmq in C++ there, one environment a message); gymnasium's AsyncVectorEnv with CartPole-v1.
- `images`: observations of 84x84x4 bytes (examples/cpp/pixels.cpp) per second, 64 environments a message, over shared
  memory, a Unix socket, and ZMQ (`ipc`).
- `learning`: steps until PPO and DQN have solved CartPole, with the settings of the preset for CartPole-v1: that
  simulator beside gymnasium's, on `process` and `ray`. Solved is a version whose 20 greedy episodes average 475; one is
  evaluated after every 5,000 steps. A run that has not solved it counts with all of its steps. The sides take turns,
  with another seed in each.
- `slow`: examples/cpp/slow_uneven.cpp, whose steps take 10 to 50 ms, with PPO training on `central`: 64 environments in
  one process and 256 in four, over `--transport` unix or zmq. N of them can give N / 0.03 s steps per second, and no
  more. Counted are the steps that the run's ledger has received, from 10 s after the first update on, for `--seconds`.
- `faults`: 10 simulators and PPO on CartPole. One that is chosen at random is killed every second, for `--seconds` but
  at least a minute; then, in network namespaces, their links are cut for 5 s every 20 s (ZMQ, needs root).
  In the end the last policy plays gymnasium's CartPole: the best one is only the best of those that were evaluated.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import gymnasium
import numpy as np

from benchmarks.faults import Training, training
from benchmarks.measure import ROOT, Bar, Row, Table, command, ratio, row, take_turns
from benchmarks.measure import run as run_command
from benchmarks.runs import Trained, apart, held, train
from raynforce.algos.presets import PRESETS
from raynforce.envs.simulators import Simulators

ENVS = 64
COST_BARS: dict[str, Bar] = {"Unix socket": ("at most", 3.0), "shared memory": ("at most", 2.0)}  # µs
IMAGES_BAR: Bar = ("at least", 3.0)
LEARNING_BAR: Bar = ("at most", 1.3)
SLOW_BARS = {(64, 1): 0.95, (256, 4): 0.90}  # envs and processes: share of the limit
TOLD_BAR: Bar = ("at least", 0.95)  # one that is killed twice before it is back loses nothing more
STEP = 0.03  # mean seconds of a slow step
SETTLING = 10.0
TARGET = 475.0
EVERY = {"ppo": 1_000, "dqn": 5_000}  # steps between evaluations: PPO needs some 15,000
STEPS = {"ppo": 200_000, "dqn": 300_000}
SIMULATORS, FAULTY_ENVS = 10, 4  # processes, and environments in each
CUT, CUT_EVERY = 5.0, 20.0
PARTS = ("cost", "beside", "images", "learning", "slow", "faults")
Said = Callable[[], float]


class Unshared(Simulators):
    """All that a simulator says goes over its socket."""

    _shared = None  # type: ignore[assignment]


def measure(
    repeats: int = 5, messages: int = 3000, seeds: int = 5, seconds: int = 20, transport: str = "unix", only: str = ""
) -> list[Table]:
    """Measure all parts, or those of `only`."""
    wanted = only.split(",") if only else list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"--only {unknown[0]} is unknown; known are {', '.join(PARTS)}")
    if transport not in ("unix", "zmq"):
        raise SystemExit(f"--transport {transport} is unknown; known are unix and zmq")
    parts: dict[str, Callable[[], list[Table]]] = {
        "cost": lambda: [_cost(repeats, messages)],
        "beside": lambda: [_beside(repeats, messages)],
        "images": lambda: [_images(repeats, messages // 10)],
        "learning": lambda: _learning(seeds),
        "slow": lambda: [_slow(repeats, seconds, transport)],
        "faults": lambda: _faults(max(60, seconds)),
    }
    return [table for name in wanted for table in parts[name]()]


@cache
def program(source: str, *options: str) -> str:
    """The path of a program, compiled once, by that of its source."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("there is no g++ to compile simulators with (Debian: apt install g++)")
    made = str(Path(_folder()) / Path(source).stem)
    words = [compiler, "-std=c++17", "-O2", "-pthread", "-I", str(ROOT / "sdk" / "cpp"), str(ROOT / source)]
    done = subprocess.run([*words, "-o", made, *options], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source} does not compile:\n{done.stderr}")
    return made


@cache
def _folder() -> str:
    import atexit

    folder = mkdtemp(prefix="rb-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _no_zmq() -> str:
    """Why nothing goes over ZMQ here; empty if it does."""
    if importlib.util.find_spec("raynforce.envs.gateway") is None:
        return "this version has no gateway (raynforce.envs.gateway)"
    return "" if importlib.util.find_spec("zmq") else "pyzmq is not installed"


# -- what a step costs --------------------------------------------------------------------------------------


def _cost(repeats: int, messages: int) -> Table:
    kinds = {"Unix socket": Unshared, "shared memory": Simulators}
    sides = [partial(_cpu_of_steps, kind, messages) for kind in kinds.values()]
    found = dict(zip(kinds, take_turns(repeats, *sides, label=" / ".join(kinds)), strict=True))
    rows = []
    for name, turns in found.items():
        rows.append(held(row(f"a step, {name}", "µs", [alone for alone, _ in turns]), COST_BARS[name]))
        rows.append(row("  with waiting", "µs", [whole for _, whole in turns]))
    return Table(f"CPU time of a step on our side, {ENVS} envs a message, {repeats} turns each", rows)


def _cpu_of_steps(kind: type[Simulators], messages: int) -> tuple[float, float]:
    """Microseconds for each environment step, without waiting and with it."""
    lanes = kind(program("examples/cpp/cartpole.cpp"), {}, ENVS, seed=0)
    everyone, actions = np.arange(ENVS), np.random.default_rng(0).integers(0, 2, (messages, ENVS))
    spent, start = 0.0, time.thread_time()
    try:
        for chosen in actions:
            began = time.thread_time()
            lanes.step(everyone, chosen)
            spent += time.thread_time() - began
            left = ENVS
            while left:
                lanes.wait()
                began = time.thread_time()
                done, broken = lanes.collect()
                spent += time.thread_time() - began
                left -= len(done) + len(broken)
        whole = time.thread_time() - start
    finally:
        lanes.close()
    return spent / (messages * ENVS) * 1e6, whole / (messages * ENVS) * 1e6


# -- other ways to have a simulator -------------------------------------------------------------------------


def _beside(repeats: int, messages: int) -> Table:
    cartpole = program("examples/cpp/cartpole.cpp")
    sides: dict[str, Said] = {
        "shared memory": partial(_speed_of_lanes, partial(Simulators, cartpole, {}, ENVS, seed=0), messages),
        "Unix socket": partial(_speed_of_lanes, partial(Unshared, cartpole, {}, ENVS, seed=0), messages),
        "AsyncVectorEnv": partial(_speed_of_gymnasium, messages // 10),
    }
    notes = []
    if importlib.util.find_spec("zmq") is None:
        notes.append("no ping-pong: pyzmq is not installed")
    elif not Path("/usr/include/zmq.h").exists():
        notes.append("no ping-pong: there is no zmq.h (Debian: apt install libzmq3-dev)")
    else:
        sides["REQ/REP with JSON"] = partial(_speed_of_ping_pong, messages // 10)
    found = dict(zip(sides, take_turns(repeats, *sides.values(), label=" / ".join(sides)), strict=True))
    rows = [row(name, "steps/s", values) for name, values in found.items()]
    rows += [
        ratio(f"{ours} / {other}", found[ours], found[other])
        for other in list(sides)[2:]
        for ours in ("shared memory", "Unix socket")
    ]
    return Table(f"Steps of {ENVS} environments, {repeats} turns each", rows, notes)


def _speed_of_lanes(make: Callable[[], Simulators], messages: int) -> float:
    lanes = make()
    try:
        choices = lanes.spec.action.sizes[0]
        actions = np.random.default_rng(0).integers(0, choices, (messages, ENVS))
        began = time.monotonic()
        for chosen in actions:
            lanes.step_all(chosen)
        return messages * ENVS / (time.monotonic() - began)
    finally:
        lanes.close()


def _speed_of_gymnasium(messages: int) -> float:
    envs = gymnasium.vector.AsyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * ENVS)
    try:
        envs.reset(seed=0)
        actions = np.random.default_rng(0).integers(0, 2, (messages, ENVS))
        began = time.monotonic()
        for chosen in actions:
            envs.step(chosen)
        return messages * ENVS / (time.monotonic() - began)
    finally:
        envs.close()


def _speed_of_ping_pong(messages: int) -> float:
    import zmq

    with TemporaryDirectory(prefix="rb-", dir="/tmp") as folder:
        address, context = f"ipc://{folder}/s", zmq.Context()
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        process = subprocess.Popen([program("benchmarks/ping_pong.cpp", "-lzmq"), address, str(ENVS)])
        try:
            actions = np.random.default_rng(0).integers(0, 2, (messages, ENVS)).tolist()
            began = time.monotonic()
            for chosen in actions:
                for env, action in enumerate(chosen):
                    socket.send_json({"env": env, "action": action}, separators=(", ", ": "))
                    answer: Any = socket.recv_json()
                    np.array(answer["obs"], np.float32)
            return messages * ENVS / (time.monotonic() - began)
        finally:
            process.terminate()
            process.wait()
            socket.close()
            context.term()


# -- images -------------------------------------------------------------------------------------------------


def _images(repeats: int, messages: int) -> Table:
    pixels = program("examples/cpp/pixels.cpp")
    sides: dict[str, Said] = {
        "shared memory": partial(_speed_of_lanes, partial(Simulators, pixels, {}, ENVS, seed=0), messages),
        "Unix socket": partial(_speed_of_lanes, partial(Unshared, pixels, {}, ENVS, seed=0), messages),
    }
    notes = []
    if why := _no_zmq():
        notes.append(f"nothing was measured over ZMQ: {why}")
    else:
        sides["ZMQ"] = partial(_speed_over_zmq, pixels, messages)
    found = dict(zip(sides, take_turns(repeats, *sides.values(), label=" / ".join(sides)), strict=True))
    rows = [row(name, "images/s", values) for name, values in found.items()]
    first = found.pop("shared memory")
    for name, values in found.items():
        rows.append(ratio(f"shared memory / {name}", first, values, bar=IMAGES_BAR if name == "ZMQ" else None))
    return Table(f"Images of 84x84x4 bytes, {ENVS} envs a message, {repeats} turns each", rows, notes)


def _speed_over_zmq(simulator: str, messages: int) -> float:
    import raynforce

    with TemporaryDirectory(prefix="rb-", dir="/tmp") as folder, _key(folder):
        address = f"zmq:ipc://{folder}/s"
        with _simulators(simulator, 1, ENVS, address):
            made: Any = raynforce.simulator(f"listen:{address}", envs=ENVS)
            return _speed_of_lanes(lambda: made._lanes, messages)


@contextmanager
def _key(folder: str) -> Iterator[None]:
    """A token that this process, its runs and simulators have."""
    path = Path(folder) / "key"
    path.write_text(json.dumps({"token": secrets.token_hex(32)}))
    before = os.environ.get("RAYNFORCE_KEY")
    os.environ["RAYNFORCE_KEY"] = str(path)
    try:
        yield
    finally:
        os.environ.pop("RAYNFORCE_KEY")
        if before is not None:
            os.environ["RAYNFORCE_KEY"] = before


@contextmanager
def _simulators(
    simulator: str, processes: int, envs: int, address: str, before: Sequence[str] = (), **environment: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Simulators that connect to an address, ended with the block."""
    words = [*before, simulator, "--connect", address, "--envs", str(envs)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            started.append(subprocess.Popen(words, env=os.environ | environment, stderr=subprocess.DEVNULL))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


# -- learning -----------------------------------------------------------------------------------------------


def _learning(seeds: int) -> list[Table]:
    envs = {"C++": program("examples/cpp/cartpole.cpp"), "gymnasium": "CartPole-v1"}
    tables = []
    for algo in ("ppo", "dqn"):
        for runtime in ("process", "ray"):
            sides = [partial(_solve, algo, runtime, env, count()) for env in envs.values()]
            turns = take_turns(seeds, *sides, label=f"{algo} on {runtime}: {' / '.join(envs)}")
            found = dict(zip(envs, turns, strict=True))
            steps = {name: [_solved(run) for run in runs] for name, runs in found.items()}
            rows = [row(f"{name}: solved after", "steps", values) for name, values in steps.items()]
            rows += [row(f"{name}: speed", "steps/s", [run.speed for run in runs]) for name, runs in found.items()]
            rows.append(ratio("steps, C++ / gymnasium", steps["C++"], steps["gymnasium"], bar=LEARNING_BAR))
            solved = {name: sum(run.facts["solved_steps"] is not None for run in runs) for name, runs in found.items()}
            notes = [f"{name}: {number} of {seeds} runs solved it" for name, number in solved.items()]
            tables.append(Table(f"{algo.upper()} on CartPole, {runtime}, {seeds} seeds each", rows, notes))
    return tables


def _solve(algo: str, runtime: str, env: str, seeds: Iterator[int]) -> Trained:
    settings = dict(PRESETS[algo, "CartPole-v1"]) | {"seed": next(seeds), "target": TARGET, "sampling.envs": 8}
    settings |= {"eval.every": EVERY[algo], "eval.episodes": 20, "eval.max_length": 500}
    return train(env, algo=algo, steps=STEPS[algo], runtime=runtime, settings=settings)


def _solved(run: Trained) -> float:
    return float(run.facts["solved_steps"] or run.facts["steps"])


# -- slow and uneven ----------------------------------------------------------------------------------------


def _slow(repeats: int, seconds: int, transport: str) -> Table:
    if transport == "zmq" and (why := _no_zmq()):
        raise SystemExit(f"--transport zmq: {why}")
    sides = [partial(_train_slow, envs, processes, seconds, transport) for envs, processes in SLOW_BARS]
    turns = take_turns(repeats, *sides, label=f"slow simulators over {transport}")
    rows: list[Row] = []
    for ((envs, processes), bar), runs in zip(SLOW_BARS.items(), turns, strict=True):
        speeds = [_received(run, seconds) for run in runs]
        rows.append(row(f"{envs} envs in {processes} processes", "steps/s", speeds))
        share = row("  share of the limit", "ratio", [speed * STEP / envs for speed in speeds])
        rows.append(held(share, ("at least", bar)))
        rows.append(row("  environments busy", "share", [run.median("time/env/busy") for run in runs]))
        rows.append(row("  first update", "s", [run.startup for run in runs]))
    return Table(f"PPO with steps of 10 to 50 ms in C++ over {transport}, {repeats} turns each", rows)


def _train_slow(envs: int, processes: int, seconds: int, transport: str) -> Trained:
    each, simulator = envs // processes, program("examples/cpp/slow_uneven.cpp")
    settings = {
        "sampling.samplers": processes,
        "sampling.envs": each,
        "sampling.fragment": 32,
        "log_every": 1,  # a line of metrics for each round
    }
    steps = int(envs / STEP * (SETTLING + seconds + 2))
    wanted: dict[str, Any] = {"steps": steps, "runtime": "process", "topology": "central", "settings": settings}
    if transport == "unix":
        return train(simulator, **wanted)
    with TemporaryDirectory(prefix="rb-", dir="/tmp") as folder, _key(folder):
        address = f"zmq:ipc://{folder}/s"
        with _simulators(simulator, processes + 1, each, address):  # one is for the evaluation at the end
            return train(f"listen:{address}", **wanted)


def _received(run: Trained, seconds: float) -> float:
    """Steps per second that came in, once it runs."""
    lines = [line for line in run.metrics if "health/produced_steps" in line]
    since = lines[0]["time/seconds"] + SETTLING
    lines = [line for line in lines if since <= line["time/seconds"] <= since + seconds]
    if len(lines) < 2:
        raise SystemExit(f"there were no two rounds within {seconds:g} s")
    steps, took = (lines[-1][name] - lines[0][name] for name in ("health/produced_steps", "time/seconds"))
    return steps / took


# -- faults -------------------------------------------------------------------------------------------------


def _faults(seconds: int) -> list[Table]:
    cartpole = program("examples/cpp/cartpole.cpp")
    with apart() as environment:
        settings = _fault_settings()
        with training(cartpole, environment, settings, *_endless()) as run:
            run.wait_for(lambda: run.reports)
            killed, gaps = _kill_one_a_second(run, cartpole, seconds)
            time.sleep(3.0)  # the last one is told
            tables = [_faults_table(run, f"{SIMULATORS} simulators, one killed every second", killed, gaps, lost=True)]
    return [*tables, _cut_links(cartpole, seconds)]


def _fault_settings() -> dict[str, Any]:
    settings = dict(PRESETS["ppo", "CartPole-v1"])
    settings["algorithm.learning_rate"] = 5e-4  # the preset's 2e-3 is for short runs: later the policy comes and goes
    settings |= {"sampling.samplers": SIMULATORS, "sampling.envs": FAULTY_ENVS, "log_every": 1, "learner.device": "cpu"}
    return settings | {"eval.every": 20_000, "eval.episodes": 20, "eval.envs": 2, "checkpoint.every": 0}


def _endless() -> list[str]:
    return ["--runtime", "process", "--topology", "central", "--steps", "1e9"]


def _kill_one_a_second(run: Training, simulator: str, seconds: float) -> tuple[int, list[float]]:
    """How many were killed, and for how many seconds each time nothing was reported."""
    chance, killed = random.Random(0), 0
    began = time.time()
    while run.running and time.time() < began + seconds:
        time.sleep(1.0)
        if pids := _descendants(run.process.pid, simulator):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
                killed += 1
    return killed, _gaps(run)


def _descendants(pid: int, simulator: str) -> list[int]:
    """Processes of this program that descend from another."""
    parents: dict[int, int] = {}
    theirs: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            one = int(path.name)
            parents[one] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            theirs += [one] * _samples(path, simulator)

    def descends(one: int) -> bool:
        while one and one != pid:
            one = parents.get(one, 0)
        return one == pid

    return [one for one in theirs if descends(one)]


def _samples(process: Path, simulator: str) -> bool:
    """Whether this is a simulator that is trained on: those of the evaluator have another number of environments."""
    if not (process / "cmdline").read_text().startswith(simulator):
        return False
    return f"\0RAYNFORCE_ENVS={FAULTY_ENVS}\0" in "\0" + (process / "environ").read_text()


def _gaps(run: Training) -> list[float]:
    times = [line["time/seconds"] for line in run.reports]
    return [later - sooner for sooner, later in pairwise(times)]


def _faults_table(run: Training, title: str, times: int, gaps: Sequence[float], lost: bool = False) -> Table:
    """With `lost`, each fault cost the episodes of one simulator, and every one of them must have been told."""
    if not run.running:
        raise SystemExit(f"{title}: the run has ended by itself")
    run.end(signal.SIGINT)
    facts, score = run.facts, _score(run.folder)
    cut = facts["env_restarts"]
    told = (
        [held(row("environments restarted / lost", "ratio", [cut / (times * FAULTY_ENVS)]), TOLD_BAR)] if lost else []
    )
    rows = [
        row("faults made", "", [times], f"{cut} environments and {facts['restarts']} roles restarted"),
        *told,
        row("between two updates", "s", gaps),
        row("trained", "steps/s", [facts["steps_per_second"]]),
        held(row("last policy, 100 episodes of gymnasium's", "return", [score]), ("at least", TARGET)),
    ]
    return Table(f"PPO on CartPole: {title}", rows, [run.books(), f"{facts['lost_steps']} steps lost"])


def _score(folder: Path) -> float:
    words = [sys.executable, "-m", "raynforce", "eval", str(folder), "--env", "CartPole-v1", "--episodes", "100"]
    return float(json.loads(run_command([*words, "--checkpoint", "last", "--json"]).splitlines()[-1])["mean"])


def _cut_links(cartpole: str, seconds: int) -> Table:
    cut = f"all links cut for {CUT:g} s every {CUT_EVERY:g} s"
    title = f"{SIMULATORS} simulators over ZMQ that others start, one killed and started every second, {cut}"
    why = _no_zmq() or ("" if os.geteuid() == 0 and shutil.which("ip") else "network namespaces need root and iproute2")
    if why:
        return Table(f"PPO on CartPole: {title}", [], [f"not measured: {why}"])
    with ExitStack() as stack:
        environment = stack.enter_context(apart())
        keys = Path(environment["HOME"]) / "keys"
        subprocess.run([sys.executable, "-m", "raynforce", "sim", "keys", str(keys)], cwd=ROOT, check=True)
        trainer, simulators, host = stack.enter_context(_namespaces())
        address = f"zmq:tcp://{host}:5555"
        theirs: Mapping[str, str] = {"RAYNFORCE_KEY": str(keys / "simulator.key")}
        inside = ("ip", "netns", "exec", simulators)
        started = stack.enter_context(_simulators(cartpole, SIMULATORS + 1, FAULTY_ENVS, address, inside, **theirs))
        ours = environment | {"RAYNFORCE_KEY": str(keys / "trainer.key")}
        run = stack.enter_context(
            training(f"listen:{address}", ours, _fault_settings(), *_endless(), before=("ip", "netns", "exec", trainer))
        )
        run.wait_for(lambda: run.reports)
        chance, faults = random.Random(0), 0
        for second in range(1, seconds + 1):
            time.sleep(1.0)
            if not run.running:
                break
            victim = chance.randrange(len(started))
            started[victim].kill()
            started[victim].wait()
            started[victim] = subprocess.Popen(started[victim].args, env=os.environ | theirs, stderr=subprocess.DEVNULL)
            place = second % CUT_EVERY
            if place in (CUT_EVERY - CUT, 0):
                _ip("-n", simulators, "link", "set", "sims", "down" if place else "up")
            faults += 1 + (place == 0)
        time.sleep(2 * CUT)
        return _faults_table(run, title, faults, _gaps(run))


@contextmanager
def _namespaces() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces with a link between them: the trainer's, the simulators', and the trainer's address."""
    tag = secrets.token_hex(3)
    ours, theirs = f"rb-trainer-{tag}", f"rb-sims-{tag}"
    try:
        for name in (ours, theirs):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", ours, "link", "add", "trainer", "type", "veth", "peer", "name", "sims", "netns", theirs)
        for name, device, address in ((ours, "trainer", "10.213.0.1/30"), (theirs, "sims", "10.213.0.2/30")):
            _ip("-n", name, "address", "add", address, "dev", device)
            _ip("-n", name, "link", "set", device, "up")
        yield ours, theirs, "10.213.0.1"
    finally:
        for name in (ours, theirs):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    command(measure, __doc__ or "")
