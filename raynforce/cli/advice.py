"""How to run an environment that the doctor found sound: what was measured, what it means, and what to type."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raynforce import settings
from raynforce.algos import algorithm_class
from raynforce.auto import HANDLING, SLOW, WAITS, Facts, cost_of_policy, decide, duration, facts_of
from raynforce.config import Config
from raynforce.envs.doctor import Report
from raynforce.errors import UsageError
from raynforce.experiment import resolve
from raynforce.measured import cost_of_env
from raynforce.policies.spec import GRU, LSTM, Linear
from raynforce.spaces import EnvSpec
from raynforce.topologies import topology

MANY = 64  # environments that are also reckoned with, where these are slow
PASSES = 3  # forward, and twice as much backward
PER_SECOND = 10e9  # products of a learner with one thread, in minibatches; half or twice as many on other machines
LARGE = 100_000  # products from which on more than one thread pays
BOUND = 0.25  # of the time; less is not worth a change


def how_to_run(report: Report, env_args: Mapping[str, Any], *, me: str) -> list[str]:
    """Lines for a person, the last of which is the command; none for an environment that nothing can be said of."""
    cost, spec = report.cost, report.spec
    if not report.ok or cost is None or spec is None:
        return []
    config, _ = resolve({"env": report.env, "env_args": dict(env_args)})
    try:
        whole, tried = cost_of_env(report.env, env_args)  # what a run would go by, so that both say the same
        if tried.seconds is not None:
            cost = replace(tried, mean=cost.mean)
        facts = replace(facts_of(config, cost), policy=cost_of_policy(config, spec))
    except UsageError:  # nothing that this algorithm could learn
        return []
    chosen, sentence = decide(config, facts)
    learning, advised = _learner(config, chosen, facts, _products(config, spec))
    rows = {
        "step": _step(facts),
        "policy": _policy(facts),
        "sync": _sync(config, facts, native=report.native),
        "central": _central(config, facts),
        "learner": learning,
        "chosen": sentence.removeprefix("auto: "),
        "or": _command(advised, env_args, whole, me) if advised != chosen else "",
        "type": _command(chosen, env_args, whole, me),
    }
    return [f"{name:7}  {text}" for name, text in rows.items() if text]


def _step(facts: Facts) -> str:
    cost = facts.cost
    assert cost.seconds is not None
    low, high = map(duration, cost.spread)
    most = low if low == high else f"{low} to {high}"
    line = f"takes {duration(cost.seconds)} with its share of the resets, most of them {most}"
    if cost.computing is None:
        return line
    line += f", of which it computes {cost.computing:.0%}"
    how = "side by side in processes alone"
    if cost.computing < WAITS:
        how = "it waits, which many can do side by side in threads"
    return f"{line}: {how}" if facts.slow else line


def _policy(facts: Facts) -> str:
    policy = facts.policy
    if policy is None:
        return "acts with torch; what it costs was not measured"
    one, all_of_them = duration(policy.one), duration(policy.all)
    return f"takes {one} to choose for one environment, {all_of_them} for {policy.envs} at once"


def _sync(config: Config, facts: Facts, *, native: bool) -> str:
    """Steps take turns in a sampler, and each round has a forward pass; learning comes on top."""
    envs, policy = config.sampling.envs, facts.policy
    per_second = envs / (envs * _mean(facts) + (policy.all if policy else 0.0))
    line = f"one after another, {envs} environments would give at most {per_second:,.0f} steps/s, less while it learns"
    return f"{line}; its own vector implementation gives more" if native else line


def _central(config: Config, facts: Facts) -> str:
    """What one policy for all would give: every environment all of the time, unless the policy or the cores end it."""
    mean, computing, envs = _mean(facts), facts.cost.computing or 0.0, config.sampling.envs
    if not facts.slow:
        why = f"handing over an observation and an action takes about {duration(HANDLING)} by itself"
        least = f"it is for steps of {duration(SLOW)} and more"
        return f"side by side with one policy for all would not pay: {why}; {least}"

    def best(n: int) -> float:
        return min(n / mean, n / facts.round_seconds(n))

    line = f"side by side with one policy for all, {envs} environments would give at most "
    if computing < WAITS:
        many = f", {MANY} (--envs {MANY}) {best(MANY):,.0f}" if envs < MANY else ""
        return f"{line}{best(envs):,.0f} steps/s{many}"
    line += f"{min(best(envs), facts.cores / (mean * computing)):,.0f} steps/s on {facts.cores} cores"
    even = f"; but steps are even, so nobody waits long for the slowest: --samplers {facts.cores} does as well"
    return line if facts.cost.uneven else line + even


def _products(config: Config, spec: EnvSpec) -> int:
    """Multiplications for one observation in the network that this run would train; 0 if it is the user's own."""
    acting = algorithm_class(config.algo)(config, spec).acting()
    if acting.factory:
        return 0
    network = acting.network
    dense = sum(math.prod(shape) * layer.size for _, _, layer, shape in network.walk() if isinstance(layer, Linear))
    cells = [(layer, shape) for _, _, layer, shape in network.walk() if isinstance(layer, LSTM | GRU)]
    recurrent = sum(layer.gates * layer.size * (shape[0] + layer.size) for layer, shape in cells)
    return network.conv_products + dense + recurrent


def _learner(config: Config, chosen: Config, facts: Facts, products: int) -> tuple[str, Config]:
    """What learning from a step would take beside sampling it, and a config in which that costs less."""
    if not products:
        return "trains a network of your own; what that costs was not measured", chosen
    learning = PASSES * getattr(config.algorithm, "epochs", 1) * products / PER_SECOND
    policy, envs = facts.policy, config.sampling.envs
    sampling = _mean(facts) + (policy.all / envs if policy else products / PER_SECOND)
    line = f"takes about {duration(learning)} a step, by the {products:,} products of its network for an observation"
    whole = sampling + learning
    if facts.cores == 1 or learning < BOUND * whole:
        return line, chosen
    if products >= LARGE:
        line += f", {learning / whole:.0%} of the time; torch in {facts.cores} threads takes less, if cores are free"
        return line, replace(chosen, learner=replace(chosen.learner, threads=facts.cores))
    could_overlap = facts.tolerates_lag and not facts.obstacle and not topology(chosen.topology).overlaps
    if could_overlap and sampling >= BOUND * whole:
        line += f", and sampling {duration(sampling)}: process and overlap do both at once"
        return line, replace(chosen, runtime="process", topology="overlap")
    return line, chosen


def _mean(facts: Facts) -> float:
    return max(1e-9, facts.cost.mean or 0.0)


def _command(config: Config, env_args: Mapping[str, Any], spec: EnvSpec, me: str) -> str:
    sampling = config.sampling
    words = ["train", config.algo, config.env, "--runtime", config.runtime, "--topology", config.topology]
    words += ["--samplers", str(sampling.samplers), "--envs", str(sampling.envs)]
    given = {f"env_args.{key}": value for key, value in env_args.items()}
    given |= {"sampling.parallel": sampling.parallel} if sampling.parallel != "no" else {}
    given |= {"learner.threads": config.learner.threads} if config.learner.threads > 1 else {}
    given |= _policies(spec)
    for key, value in given.items():
        words += ["--set", settings.assignment(key, value)]
    return f"{me} {shlex.join(words)}"


def _policies(spec: EnvSpec) -> dict[str, Any]:
    """A policy for each kind of agent, if there are several: one could not play them all."""
    if spec.agents is None or len(spec.agents.kinds) < 2:
        return {}
    found: dict[str, Any] = {}
    for kind in spec.agents.kinds:
        names = [spec.agents.names[agent] for agent in kind.agents]
        stem = re.sub(r"[^A-Za-z]+$", "", names[0])
        found[stem if stem.isidentifier() and stem not in found else f"policy_{len(found)}"] = {"agents": names}
    return {"policies": found}
