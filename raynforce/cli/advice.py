"""How to run an environment that the doctor found sound: what was measured, what it means, and what to type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raynforce import settings
from raynforce.auto import HANDLING, SLOW, WAITS, Facts, cost_of_policy, decide, duration, facts_of
from raynforce.config import Config
from raynforce.envs.doctor import Report
from raynforce.errors import UsageError
from raynforce.experiment import resolve

MANY = 64  # environments that are also reckoned with, where these are slow


def how_to_run(report: Report, env_args: Mapping[str, Any], *, me: str) -> list[str]:
    """Lines for a person, the last of which is the command; none for an environment that nothing can be said of."""
    cost, spec = report.cost, report.spec
    if not report.ok or cost is None or spec is None:
        return []
    config, _ = resolve({"env": report.env, "env_args": dict(env_args)})
    try:
        facts = replace(facts_of(config, cost), policy=cost_of_policy(config, spec))
    except UsageError:  # nothing that this algorithm could learn
        return []
    chosen, sentence = decide(config, facts)
    rows = {
        "step": _step(facts),
        "policy": _policy(facts),
        "sync": _sync(config, facts, native=report.native),
        "central": _central(config, facts),
        "chosen": sentence.removeprefix("auto: "),
        "type": _command(chosen, env_args, me),
    }
    return [f"{name:7}  {text}" for name, text in rows.items()]


def _step(facts: Facts) -> str:
    cost = facts.cost
    assert cost.seconds is not None
    low, high = map(duration, cost.spread)
    line = f"takes {duration(cost.seconds)} with its share of the resets, most of them {low} to {high}"
    if cost.computing is None:
        return line
    line += f", of which it computes {cost.computing:.0%}"
    if not facts.slow:
        return line
    if cost.computing >= WAITS:
        return f"{line}: side by side in processes alone"
    return f"{line}: it waits, which many can do side by side in threads"


def _policy(facts: Facts) -> str:
    policy = facts.policy
    if policy is None:
        return "acts with torch; what it costs was not measured"
    return (
        f"takes {duration(policy.one)} to choose for one environment, {duration(policy.all)} for {policy.envs} at once"
    )


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
        return (
            f"side by side with one policy for all would not pay: handing over an observation and an action takes "
            f"about {duration(HANDLING)} by itself; it is for steps of {duration(SLOW)} and more"
        )

    def best(n: int) -> float:
        return min(n / mean, n / facts.round_seconds(n))

    line = "side by side with one policy for all, "
    if computing >= WAITS:
        cores = facts.cores / (mean * computing)
        line += f"{envs} environments would give at most {min(best(envs), cores):,.0f} steps/s on {facts.cores} cores"
        if not facts.cost.uneven:
            line += f"; but steps are even, so nobody waits long for the slowest: --samplers {facts.cores} does as well"
        return line
    line += f"{envs} environments would give at most {best(envs):,.0f} steps/s"
    return line + (f", {MANY} (--envs {MANY}) {best(MANY):,.0f}" if envs < MANY else "")


def _mean(facts: Facts) -> float:
    return max(1e-9, facts.cost.mean or 0.0)


def _command(config: Config, env_args: Mapping[str, Any], me: str) -> str:
    sampling = config.sampling
    words = ["train", config.algo, config.env, "--runtime", config.runtime, "--topology", config.topology]
    words += ["--samplers", str(sampling.samplers), "--envs", str(sampling.envs)]
    given = {f"env_args.{key}": value for key, value in env_args.items()}
    given |= {"sampling.parallel": sampling.parallel} if sampling.parallel != "no" else {}
    for key, value in given.items():
        plain = f"{key}={value}"
        as_text = isinstance(value, str) and settings.parse_assignments([plain]) == settings.nested({key: value})
        words += ["--set", plain if as_text else f"{key}={json.dumps(value)}"]
    return f"{me} {shlex.join(words)}"
