"""Run directories as training leaves them, made up: for tests and measurements of the page."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

CONFIG = """\
env: {env}
algo: {algo}
config_version: 1
seed: {seed}
steps: {steps}
target: 475.0
engine: native
runtime: process
topology: overlap
sampling:
  samplers: 4
  envs: 8
  fragment: 64
algorithm:
  learning_rate: {rate}
  gamma: 0.98
faults:
  restarts: 5
"""
ROLES = ["learner", "sampler 0", "sampler 1", "sampler 2", "sampler 3", "evaluator"]
BOUND = (
    "where the time went, in percent (it took 30.1 s):\n"
    "  of the run       ▒▒▒▒  start-up 4, env 22, learner 61\n"
    "the learner bound this run: it took 61 % of it. Fewer or larger updates cost less: --set algorithm.epochs=5"
)


def metrics_line(step: int, seconds: float, total: int, chance: random.Random) -> dict[str, Any]:
    done = step / total
    reward = 500 / (1 + math.exp(-9 * (done - 0.4))) + chance.gauss(0, 12 * (1 - done) + 3)
    waiting = 0.25 + 0.1 * math.sin(done * 9)
    return {
        "step": step,
        "time": round(seconds, 3),
        "charts/episodic_return": reward,
        "charts/episodic_length": reward,
        "charts/SPS": 17_000 + chance.gauss(0, 600),
        "charts/updates": step // 25,
        "charts/episodes": step // 90,
        "charts/learning_rate": 0.002 * (1 - done),
        "losses/policy_loss": -0.02 + chance.gauss(0, 0.006),
        "losses/value_loss": 9 * math.exp(-4 * done) + abs(chance.gauss(0, 0.3)),
        "losses/entropy": 0.69 - 0.4 * done + chance.gauss(0, 0.01),
        "losses/approx_kl": abs(chance.gauss(0.01, 0.004)),
        "lag/mean": 1.0 + abs(chance.gauss(0, 0.2)),
        "lag/max": 2.0,
        "time/sampler/env": 0.45 - waiting / 3,
        "time/sampler/policy": 0.15,
        "time/sampler/other": 0.05,
        "time/sampler/transport": 0.1,
        "time/sampler/waiting": 0.25 + waiting / 3,
        "time/learner/prepare": 0.08,
        "time/learner/learn": 0.8 - waiting / 2,
        "time/learner/transport": 0.04,
        "time/learner/waiting": 0.08 + waiting / 2,
        "health/produced_steps": step + 512,
        "health/in_flight_steps": 512,
        "health/lost_steps": 0,
        "health/restarts": 1,
    }


def make_run(
    path: Path, *, lines: int = 100, seed: int = 0, algo: str = "ppo", env: str = "CartPole-v1", ended: bool = True
) -> Path:
    """A run of so many reports, with evaluations, faults and what it tells."""
    chance, total, began = random.Random(seed), 2000 * max(lines, 1), time.time() - 600
    (path / "checkpoints").mkdir(parents=True)
    rate = 0.002 if seed % 2 else 0.001
    (path / "config.yaml").write_text(CONFIG.format(env=json.dumps(env), algo=algo, seed=seed, steps=total, rate=rate))
    with (path / "metrics.jsonl").open("w") as file:
        for index in range(1, lines + 1):
            file.write(json.dumps(metrics_line(2000 * index, 0.1 * index, total, chance)) + "\n")
            if index % max(1, lines // 10) == 0:
                score = {"eval/return": 500 * index / lines, "eval/deviation": 10.0, "time/seconds": 0.1 * index}
                file.write(json.dumps({"step": 2000 * index, "time": 0.1 * index, **score}) + "\n")
    fault = {"role": "sampler 1", "kind": "died", "cause": "sampler 1 died: SIGSEGV", "action": "restarted"}
    events: list[dict[str, Any]] = [{"event": "started", "steps": 0, "cpu": "AMD EPYC", "kernels": "avx2"}]
    events.append({"event": "fault", "steps": total // 2, **fault, "attempt": 1, "said": "Segmentation fault"})
    events.append({"event": "recovered", "role": "sampler 1", "seconds": 0.42})
    events += [{"event": "stopped", "reason": "steps done", "steps": total}] if ended else []
    text = "".join(json.dumps({"time": began + 60 * i, **event}) + "\n" for i, event in enumerate(events))
    (path / "events.jsonl").write_text(text)
    states = {"sampler 3": "restarting", "evaluator": "waiting"}
    roles = [
        {"role": role, "kind": role.split()[0], "state": states.get(role, "working"), "node": "node-a", "pid": 4711 + i}
        for i, role in enumerate(ROLES)
    ]
    live = {"time": time.time(), "roles": roles, "steps": total, "time_went": BOUND}
    (path / "live.json").write_text(json.dumps(live))
    return path


def make_large(path: Path, points: int = 1_000_000) -> Path:
    """A run with so many reports of a few metrics."""
    make_run(path, lines=0)
    chance = random.Random(1)
    with (path / "metrics.jsonl").open("w") as file:
        for index in range(points):
            reward = 400 * index / points + 60 * math.sin(index / 5e4) + chance.gauss(0, 20)
            spike = 300 if index == points // 3 else 0
            line = {"step": index, "time": index / 100, "charts/episodic_return": reward + spike}
            line |= {"losses/value_loss": chance.random(), "charts/SPS": 20_000 + chance.gauss(0, 500)}
            file.write(json.dumps(line) + "\n")
    return path


def make_search(path: Path, trials: int = 24) -> Path:
    """What `raynforce tune` leaves, with a run for each of the first trials."""
    chance = random.Random(3)
    path.mkdir(parents=True)
    search = {
        "algorithm.learning_rate": {"kind": "log", "low": 1e-5, "high": 1e-2},
        "algorithm.gamma": {"kind": "uniform", "low": 0.9, "high": 0.999},
        "sampling.envs": {"kind": "choice", "values": [4, 8, 16]},
        "network.activation": {"kind": "choice", "values": ["tanh", "relu"]},
    }
    tune = {"schema": 1, "algorithm": "ppo", "env": "CartPole-v1", "objective": "eval/return", "mode": "max"}
    tune |= {"search": search, "scheduler": "asha", "seeds": 1, "trials": trials, "created": time.time()}
    rows = []
    for number in range(trials):
        rate, gamma = 10 ** chance.uniform(-5, -2), chance.uniform(0.9, 0.999)
        score = 500 * math.exp(-((math.log10(rate) + 3) ** 2)) * gamma
        status = "failed" if number == 5 else "running" if number > trials - 3 else chance.choice(["done", "stopped"])
        config: dict[str, Any] = {"algorithm.learning_rate": rate, "algorithm.gamma": gamma}
        config |= {"sampling.envs": chance.choice([4, 8, 16]), "network.activation": chance.choice(["tanh", "relu"])}
        runs = [f"trial_{number:03d}"] if number < 4 else []
        for name in runs:
            make_run(path / name, lines=40, seed=number)
        row = {"id": f"t{number:03d}", "config": config, "status": status, "steps": 50_000, "seconds": 12.0 + number}
        failed = status == "failed"
        row |= {"objective": None if failed else score, "runs": runs} | ({"cause": "ValueError: NaN"} if failed else {})
        rows.append(row)
    (path / "tune.json").write_text(json.dumps(tune))
    (path / "trials.json").write_text(json.dumps(rows))
    shares = {
        "algorithm.learning_rate": 0.71,
        "algorithm.gamma": 0.18,
        "sampling.envs": 0.08,
        "network.activation": 0.03,
    }
    (path / "importance.json").write_text(json.dumps(shares))
    return path
