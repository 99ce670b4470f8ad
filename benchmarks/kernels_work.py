"""One side of `benchmarks.kernels`: samples and learns when asked to, and tells the CPU time it took.

`python -m benchmarks.kernels_work portable '{"env": …}'` prints seconds for each line with a number of rounds that it
reads.
"""

from __future__ import annotations

import json
import sys
import time

from raynforce.kernels import pin
from raynforce.threads import cap_threads


def main(kernels: str, layers: str) -> None:
    cap_threads()
    pin("portable" if kernels == "portable" else "native")
    from raynforce.algos import algorithm_class
    from raynforce.envs.vector import EnvArgs, probe
    from raynforce.experiment import resolve
    from raynforce.roles.learner import Learner
    from raynforce.roles.sampler import Sampler

    config = resolve(json.loads(layers))[0]
    env = probe(config.env, config.env_args)
    acting = algorithm_class(config.algo)(config, env).acting()
    args = EnvArgs(config.env, config.sampling.envs, config.seed, config.env_args)
    learner, sampler = Learner(config, env), Sampler(acting, args, config.sampling.fragment)
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            learner.learn(sampler.sample(learner.publish()))
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
