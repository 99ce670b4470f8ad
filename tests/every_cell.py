"""One cell of `test_every_cell.py` in a process of its own: trains, or goes on, and prints how that ended.

python every_cell.py '{"case": …, "topology": …, "runtime": …, "out": …, "address": …, "kill": …, "resume": …}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import raynforce

TINY, AGENTS = "raynforce.envs.tiny", "raynforce.envs.tiny_agents"
STEPS, KILLED_AT = 1200, 700
ALL: dict[str, Any] = {"eval.every": 0, "eval.episodes": 1, "eval.final_episodes": 0, "checkpoint.every": 200}
ALL |= {"log_every": 96, "sampling.samplers": 2, "sampling.envs": 2, "sampling.fragment": 8, "network.hidden": [16]}
ALL |= {"preset": "none"}
REPLAY: dict[str, Any] = {"algorithm.learning_starts": 100, "algorithm.buffer_size": 600, "algorithm.batch_size": 16}
REPLAY |= {"algorithm.samples_per_insert": 4.0}
PPO: dict[str, Any] = {"algorithm.minibatch_size": 16, "algorithm.epochs": 2}
MASKED, RECALL, PENDULUM = f"{TINY}:MaskedGrid", f"{TINY}:Recall", "Pendulum-v1"
TEAM = {"policies": {"prey": {"agents": ["prey_*"]}, "hunter": {"agents": ["hunter_*"], "network": {"hidden": [8]}}}}
PAIR = {"policies": {"one": {"agents": ["agent_0"]}, "other": {"agents": ["agent_1"], "network": {"hidden": [8]}}}}
SELF_PLAY = {"policies": {"hero": {"agents": ["*"], "opponents": 2, "opponents_every": 2}}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("ppo", "CartPole-v1", PPO),
    "ppo-lstm": ("ppo", RECALL, PPO | {"network.memory": "lstm", "algorithm.sequence": 4}),
    "ppo-masked": ("ppo", MASKED, PPO),
    "ppo-gsde": ("ppo", PENDULUM, PPO | {"algorithm.gsde": True}),
    "ppo-rnd": ("ppo", "CartPole-v1", PPO | {"algorithm.rnd_coef": 0.5}),
    "ppo-agents": ("ppo", f"{AGENTS}:Leaving", PPO),
    "ppo-turns": ("ppo", f"{AGENTS}:Nim", PPO),
    "mappo": ("ppo", f"{AGENTS}:Together", PPO | {"algorithm.central_critic": True}),
    "ppo-policies": ("ppo", f"{AGENTS}:Hunt", PPO | TEAM),
    "ppo-self-play": ("ppo", f"{AGENTS}:Nim", PPO | SELF_PLAY),
    "ppo-agents-lstm": ("ppo", f"{AGENTS}:Echo", PPO | {"network.memory": "lstm", "algorithm.sequence": 4}),
    "ppo-turns-gru": ("ppo", f"{AGENTS}:EchoInTurns", PPO | {"network.memory": "gru"}),
    "impala": ("impala", "CartPole-v1", {}),
    "impala-gru": ("impala", RECALL, {"network.memory": "gru"}),
    "a3c": ("a3c", "CartPole-v1", {}),
    "a3c-lstm": ("a3c", RECALL, {"network.memory": "lstm"}),
    "dqn": ("dqn", "CartPole-v1", REPLAY | {"algorithm.prioritized": True}),
    "dqn-lstm": ("dqn", RECALL, REPLAY | {"network.memory": "lstm", "algorithm.sequence": 8}),
    "dqn-masked": ("dqn", MASKED, REPLAY),
    "dqn-agents": ("dqn", f"{AGENTS}:Leaving", REPLAY),
    "dqn-agents-lstm": ("dqn", f"{AGENTS}:Echo", REPLAY | {"network.memory": "lstm", "algorithm.sequence": 8}),
    "dqn-policies": ("dqn", f"{AGENTS}:Together", REPLAY | PAIR),
    "sac": ("sac", PENDULUM, REPLAY),
    "sac-gsde": ("sac", PENDULUM, REPLAY | {"algorithm.gsde": True}),
    "sac-discrete": ("sac", MASKED, REPLAY | {"algorithm.discrete": True}),
    "td3": ("td3", PENDULUM, REPLAY | {"algorithm.prioritized": True, "algorithm.n_step": 3}),
}


def train(
    case: str, topology: str, runtime: str, out: str, *, address: str | None = None, kill: bool = False
) -> raynforce.Run:
    algo, env, settings = CASES[case]
    given = ALL | settings | ({} if address is None else {"ray.address": address})
    deadly = [lambda status: status.steps < KILLED_AT or os.kill(os.getpid(), signal.SIGKILL)] if kill else []
    how: dict[str, Any] = {"runtime": runtime, "topology": topology, "steps": STEPS, "seed": 3}
    return raynforce.train(env, algo, out=out, settings=given, progress="quiet", callbacks=deadly, **how)


def main() -> None:
    given = json.loads(sys.argv[1])
    run = raynforce.resume(given["out"], progress="quiet") if given.pop("resume", False) else train(**given)
    print(json.dumps({"sha": run.result.weights_sha256, "steps": run.result.steps}))


if __name__ == "__main__":
    main()
