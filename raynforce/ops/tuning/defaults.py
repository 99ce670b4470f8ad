"""What is searched if nothing else is said: for each algorithm the settings that matter most, over sound ranges.

Ranges are those that the tuned settings of SB3's zoo, CleanRL and "What Matters in On-Policy RL" (2006.05990) lie in.
"""

from __future__ import annotations

from collections.abc import Mapping

from raynforce.errors import UsageError
from raynforce.imports import bare
from raynforce.ops.tuning.space import Space, read

GAMMA = "choice(0.9,0.95,0.98,0.99,0.995,0.999)"
SPACES: Mapping[str, Mapping[str, str]] = {
    "ppo": {
        "algorithm.learning_rate": "log(1e-5,1e-2)",
        "algorithm.gamma": GAMMA,
        "algorithm.gae_lambda": "choice(0.8,0.9,0.95,0.98,1.0)",
        "algorithm.epochs": "int(2,20)",
        "algorithm.minibatch_size": "choice(32,64,128,256,512)",
        "algorithm.entropy_coef": "log(1e-5,0.1)",
        "sampling.fragment": "choice(32,64,128,256)",
    },
    "dqn": {
        "algorithm.learning_rate": "log(1e-5,1e-2)",
        "algorithm.gamma": GAMMA,
        "algorithm.batch_size": "choice(32,64,128,256)",
        "algorithm.samples_per_insert": "choice(4,8,16,32)",
        "algorithm.n_step": "int(1,5)",
        "algorithm.epsilon_fraction": "uniform(0.05,0.5)",
        "network.hidden": "choice([64,64],[128,128],[256,256])",
    },
    "impala": {
        "algorithm.learning_rate": "log(1e-4,1e-2)",
        "algorithm.gamma": GAMMA,
        "algorithm.entropy_coef": "log(1e-4,0.1)",
        "algorithm.minibatch_size": "choice(80,160,320)",
        "sampling.fragment": "choice(10,20,40)",
    },
    "a3c": {
        "algorithm.learning_rate": "log(1e-4,1e-2)",
        "algorithm.gamma": GAMMA,
        "algorithm.gae_lambda": "choice(0.9,0.95,0.98,1.0)",
        "algorithm.entropy_coef": "log(1e-4,0.1)",
        "sampling.fragment": "choice(5,10,20,40)",
    },
    "sac": {
        "algorithm.learning_rate": "log(1e-5,1e-2)",
        "algorithm.gamma": GAMMA,
        "algorithm.batch_size": "choice(64,128,256,512)",
    },
    "bc": {
        "algorithm.learning_rate": "log(1e-5,1e-2)",
        "algorithm.minibatch_size": "choice(32,64,128,256)",
        "network.hidden": "choice([64,64],[128,128],[256,256])",
    },
    "td3": {
        "algorithm.learning_rate": "log(1e-5,1e-2)",
        "algorithm.gamma": GAMMA,
        "algorithm.batch_size": "choice(64,128,256,512)",
    },
}


def default_space(algo: str) -> Space:
    if algo not in SPACES:
        example = "--search 'algorithm.learning_rate=log(1e-5,1e-2)'"
        raise UsageError(f"there is no default search space for {bare(algo)!r}: say what to search, such as {example}")
    return read(SPACES[algo])
