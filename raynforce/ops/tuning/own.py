"""`raynforce.trainable`: our runs for a Tuner that the user writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raynforce.api import resolved, with_absolute_paths
from raynforce.engines import engine_class
from raynforce.errors import UsageError
from raynforce.given import lending
from raynforce.given import pack as pack_given
from raynforce.ops.tuning.study import Plan
from raynforce.ops.tuning.tuner import require_in_a_process
from raynforce.seeds import cores_of, numbers


def trainable(
    env: str | Callable[..., Any],
    algo: str | type[Any] = "ppo",
    *,
    seeds: int | Sequence[int] = 1,
    steps: int | None = None,
    target: float | None = None,
    seed: int | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    cpus: float | None = None,
    gpus: float = 0.0,
) -> Any:
    """A trainable for `ray.tune.Tuner`, whose `param_space` has our settings: `{"algorithm.gamma": tune.uniform(…)}`.

    It reports `return` (the median of its seeds), `score` (the same, and with a target the higher the sooner it is
    met), `evaluated`, `steps` and, once the target is met, `solved_steps` and `solved_at`. It saves and loads exactly,
    for PBT and failures, and its actors can be reused. The other arguments are those of `train`.
    """
    try:
        from ray import tune

        from raynforce.ops.tuning.trainable import Trials, Work, search_path
    except ImportError as error:
        raise UsageError(f"raynforce.trainable needs Ray Tune: pip install 'raynforce[tune]' ({error})") from error
    with lending() as lender:
        given = {"steps": steps, "target": target, "seed": seed, "runtime": "inline"}
        found, _ = resolved(env, algo, config, settings, lender, **given)
        require_in_a_process(found)
        found, _, _ = engine_class(found.engine).settle(with_absolute_paths(found))
        packed = pack_given((found.env, found.algo, found.network.factory))
    asked = float(cores_of(found) if cpus is None else cpus)
    plan = Plan(
        algorithm=found.algo,
        env=found.env,
        objective="return" if found.target is None else "steps",
        search={},
        scheduler="random",
        seeds=tuple(numbers(seeds, found.seed)),
        trials=0,
        seed=found.seed,
        steps=found.steps,
        target=found.target,
        cpus=asked,
        gpus=gpus,
        created=time.time(),
    )
    work = Work(plan, found.to_dict(), None, search_path(), packed)
    return tune.with_resources(tune.with_parameters(Trials, work=work), {"cpu": asked, "gpu": gpus})
