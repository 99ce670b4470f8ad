"""Settings that several benchmarks have in common."""

TRAINING_ALONE = {
    "preset": "none",
    "learner.device": "cpu",
    "eval.every": 0,
    "eval.episodes": 1,  # there is always an evaluation at the end: of one step
    "eval.max_length": 1,
    "eval.final_episodes": 0,
    "checkpoint.every": 0,
    "checkpoint.seconds": 0,
}
PPO_WORK = {  # cheap to learn from, so that the rest is seen; peers are given the same
    "algorithm.epochs": 4,
    "algorithm.minibatch_size": 256,
    "sampling.fragment": 128,
    "network.normalize_obs": False,
    "learner.scale_rewards": False,
}
