"""Where a run's time went: seconds by role and activity, their shares as metrics, and at the end what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from raynforce.config import Config
from raynforce.runs.terminal import folded
from raynforce.topologies import topology

WIDTH = 80
BAR = 12
SHADES = {"env": "█", "learn": "█", "policy": "▓", "prepare": "▓", "other": "▒", "transport": "░", "waiting": "·"}
SHADES |= {"training": "█", "evaluation": "▓", "start-up": "▒", "saving": "░"}
SHADES |= {"gradients": "▓", "busy": "█", "wire": "░", "learner": "▒", "restart": "·"}
STANDS_OUT = 1 / 3  # of the run; less, and no single change helps much
SLIGHT = 0.05  # of the time; less is not worth a change
SUBSTANTIAL = 0.25  # of the run; from here on it pays to do it beside something else
OF_WHAT = {"run": "of the run", "sampler": "of the samplers", "learner": "of the learner", "env": "of the environments"}


class TimeTree:
    """Adds up where each kind of role spends its time.

    Sampler: `env` (steps), `policy` (forward passes), `other` (fragments), `transport`, `waiting`; a worker of a shared
    agent also `gradients`. Learner: `learn`, `prepare` (advantages, replay), `transport`, `waiting`. Where environments
    go their own pace, `env`: `busy`, and what they waited for: `policy`, `wire`, `learner`, `restart`.
    """

    def __init__(self) -> None:
        self._total: dict[str, dict[str, float]] = {}
        self._reported: dict[str, dict[str, float]] = {}

    def add(self, role: str, seconds: Mapping[str, float]) -> None:
        total = self._total.setdefault(role, {})
        for name, value in seconds.items():
            total[name] = total.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Shares of each role's time since the last call, as `time/sampler/env`; they add up to 1 for each role."""
        shares: dict[str, float] = {}
        for role, total in self._total.items():
            before = self._reported.get(role, {})
            spent = {name: value - before.get(name, 0.0) for name, value in total.items()}
            shares |= {f"time/{role}/{name}": share for name, share in _shares(spent).items()}
            self._reported[role] = dict(total)
        return shares

    def report(
        self,
        config: Config,
        *,
        cores: int,
        tolerates_lag: bool,
        run: Mapping[str, float] | None = None,
        side_by_side: Callable[[float], str] = lambda seconds: "",
    ) -> str:
        """A few lines for the end of a run: where its time and each role's went, what bound it, and what to change.

        `run` are the driver's seconds by purpose, of which `training` is divided among what held it up. `side_by_side`
        is asked, with the seconds of all environment steps, for the options that would step environments side by side.
        """
        own_pace = "env" in self._total
        of_run = dict(run or {})
        if {"sampler", "learner"} <= self._total.keys() and not own_pace:
            training = of_run.pop("training", 1.0)
            held = {name: share * training for name, share in wall_shares(self._total, config).items()}
            before = {"start-up": of_run.pop("start-up")} if "start-up" in of_run else {}
            of_run = before | held | of_run
        total = ({"run": of_run} if run else {}) | self._total
        roles = {role: shares for role, spent in total.items() if (shares := _shares(spent))}
        if not roles.keys() - {"run"}:
            return ""
        width = max(len(OF_WHAT[role]) for role in roles)
        whole = f" (it took {sum(run.values()):.1f} s)" if run else ""
        lines = [f"where the time went, in percent{whole}:"]
        for role, shares in roles.items():
            parts = ", ".join(f"{name} {share * 100:.0f}" for name, share in shares.items() if share >= 0.005)
            lines += folded(parts, WIDTH, f"  {OF_WHAT[role]:<{width}}  {_bar(shares)}  ")
        if {"sampler", "learner"} <= set(roles):
            seen = Seen(_shares(of_run), config, cores, tolerates_lag)
            in_env = self._total["sampler"].get("env", 0.0)
            if own_pace and (not run or max(of_run, key=lambda part: of_run[part]) == "training"):
                told = _own_pace(replace(seen, shares=roles["env"]))
            else:
                told = verdict(seen, lambda: side_by_side(in_env))
            lines += folded(told, WIDTH)
        return "\n".join(lines)


def wall_shares(total: Mapping[str, Mapping[str, float]], config: Config) -> dict[str, float]:
    """Shares of the run's time that each activity held up: of all roles if they take turns, else of the busier one."""
    sampler, learner = dict(total["sampler"]), dict(total["learner"])
    if config.runtime == "inline":  # one call after the other: nobody waits, somebody else is at work
        sampler.pop("waiting", None)
        learner.pop("waiting", None)
    else:
        sampler = {name: value / config.sampling.samplers for name, value in sampler.items()}
    parts = {
        "env": sampler.get("env", 0.0),
        "policy": sampler.get("policy", 0.0) + sampler.get("other", 0.0),
        "learner": learner.get("learn", 0.0) + learner.get("prepare", 0.0),
        "transport": 0.0,
        "waiting": 0.0,
    }
    if "gradients" in sampler:
        parts["gradients"] = sampler["gradients"]
    transport = [side.get("transport", 0.0) for side in (sampler, learner)]
    if config.runtime == "inline" or not topology(config.topology).overlaps:
        parts["transport"] = sum(transport)
        wall = max(sum(sampler.values()), sum(learner.values())) if config.runtime != "inline" else 0.0
        parts["waiting"] = max(0.0, wall - sum(parts.values()))  # for the slowest sampler, and for the driver
    else:
        idle = [side.get("waiting", 0.0) / max(sum(side.values()), 1e-12) for side in (sampler, learner)]
        busier = 0 if idle[0] <= idle[1] else 1
        parts["transport"], parts["waiting"] = transport[busier], (sampler, learner)[busier].get("waiting", 0.0)
        others = ["learner"] if busier == 0 else [name for name in ("env", "policy", "gradients") if name in parts]
        parts |= dict.fromkeys(others, 0.0)
    return _shares(parts)


@dataclass(frozen=True)
class Seen:
    shares: Mapping[str, float]  # of the run, or of its environments' time where these go their own pace
    config: Config
    cores: int
    tolerates_lag: bool


def verdict(run: Seen, side_by_side: Callable[[], str] = lambda: "") -> str:
    """What took the largest share of the run, and which setting to change."""
    name = max(run.shares, key=lambda part: run.shares[part])
    turns = not topology(run.config.topology).overlaps
    sampling, learning = run.shares.get("env", 0.0) + run.shares.get("policy", 0.0), run.shares.get("learner", 0.0)
    took_turns = turns and min(sampling, learning) >= SUBSTANTIAL
    if name == "env" and (options := side_by_side()):
        bound = f"the environment bound this run: it took {_percent(run.shares[name])} of it"
        return f"{bound}, most of that waiting. {options} steps environments side by side"
    if took_turns and run.tolerates_lag and (run.cores > 1 or run.config.runtime == "ray"):
        where = "--runtime process " if run.config.runtime == "inline" else ""
        shares = f"{_percent(sampling)} and {_percent(learning)} of the run"
        return f"sampling and learning took turns, {shares}: {where}--topology overlap does both at once"
    if run.shares[name] < STANDS_OUT:
        return "nothing stands out: this run was balanced"
    what, advice = _BOUNDS[name]
    return f"{what} bound this run: it took {_percent(run.shares[name])} of it. {advice(run)}"


def _own_pace(run: Seen) -> str:
    """What environments that go their own pace waited for, and which setting to change."""
    sampling = run.config.sampling
    told = f"environments were busy {_percent(run.shares['busy'])} of their time"
    waits = {name: share for name, share in run.shares.items() if name != "busy"}
    name = max(waits, key=lambda part: waits[part])
    more = f"--envs {2 * sampling.envs} runs more of them side by side"
    if waits[name] < SLIGHT:
        return f"{told}: {more}"
    if run.shares["busy"] < SUBSTANTIAL and name in ("policy", "wire"):
        return f"{told}: they are too quick to be waited for one by one, and --topology overlap costs less"
    cheaper = "smaller layers (network.hidden) make it cheaper, and central.batch_min=1 waits for nobody"
    spread = f"--samplers {2 * sampling.samplers} --envs {max(1, sampling.envs // 2)} spreads them over more hosts"
    who, advice = {
        "policy": ("the policy", f": {cheaper}"),
        "wire": ("their hosts and messages", f": {spread}"),
        "learner": ("the learner", f". {_learner(run)}"),
        "restart": ("being started or replaced", ": `raynforce show RUN` tells what broke"),
    }[name]
    return f"{told}; most of the rest they waited for {who}, {_percent(waits[name])}{advice}"


def _environment(run: Seen) -> str:
    config, faster = run.config, "make the environment faster"
    samplers, where = config.sampling.samplers, "--runtime process " if config.runtime == "inline" else ""
    if config.runtime == "ray":
        return f"--samplers {_split(run, 2 * samplers)} uses more of the cluster, if it has free CPUs; or {faster}"
    if run.cores == 1:
        return f"This machine has one core: --runtime ray uses others, or {faster}"
    if samplers < run.cores:
        return f"{where}--samplers {_split(run, run.cores)} uses all {run.cores} cores"
    if where:
        return f"{where}uses all {run.cores} cores"
    return f"All {run.cores} cores are in use: --runtime ray uses other machines, or {faster}"


def _split(run: Seen, samplers: int) -> str:
    """A number of samplers, and what keeps the batch about as large as it is."""
    sampling = run.config.sampling
    before = sampling.samplers * sampling.envs
    envs = max(1, round(before / samplers))
    fragment = max(1, round(sampling.fragment * before / samplers)) if before < samplers else sampling.fragment
    fewer = f" --envs {envs}" if envs != sampling.envs else ""
    return f"{samplers}{fewer}" + (f" --set sampling.fragment={fragment}" if fragment != sampling.fragment else "")


def _policy(run: Seen) -> str:
    envs, smaller = run.config.sampling.envs, "smaller layers (network.hidden)"
    return f"--envs {2 * envs} steps more environments with each forward pass; {smaller} make it cheaper"


def _learner(run: Seen) -> str:
    config, algorithm = run.config, run.config.algorithm
    epochs = getattr(algorithm, "epochs", 1)
    ways = [f"--set algorithm.epochs={epochs // 2}"] if epochs > 1 else []
    sizes = {name: getattr(algorithm, name, None) for name in ("minibatch_size", "batch_size")}
    ways += [f"--set algorithm.{name}={2 * size}" for name, size in sizes.items() if size]
    if hasattr(algorithm, "samples_per_insert"):  # it counts samples, so a larger batch means fewer updates
        ways.append(f"--set algorithm.samples_per_insert={algorithm.samples_per_insert / 2:g}")
    if max(config.network.hidden, default=0) >= 256 or config.network.factory:
        if config.learner.threads < run.cores:
            ways.append(f"--set learner.threads={run.cores}")
        if config.learner.device == "cpu":
            ways.append("--set learner.device=auto")
    return f"Fewer or larger updates cost less: {' or '.join(ways)}" if ways else "A smaller network.hidden costs less"


def _gradients(run: Seen) -> str:
    samplers, runtime = run.config.sampling.samplers, run.config.runtime
    if runtime != "ray" and samplers >= run.cores:
        return _learner(run)
    where = "--runtime process " if runtime == "inline" else ""
    return f"{where}--samplers {2 * samplers if runtime == 'ray' else run.cores} computes more of them at once"


def _transport(run: Seen) -> str:
    longer = f"--set sampling.fragment={2 * run.config.sampling.fragment}"
    alone = ", and --runtime inline needs none" if run.config.sampling.samplers == 1 else ""
    return f"{longer} or --envs {2 * run.config.sampling.envs} moves more at a time{alone}"


def _waiting(run: Seen) -> str:
    declared = topology(run.config.topology)
    if not declared.exact:  # the samplers that are ready make the next batch
        return "--set stream.batch=1 learns from each fragment as it comes"
    if run.config.sampling.samplers > 1 and run.tolerates_lag and not declared.gathers_gradients:
        return "--topology async lets nobody wait for the slowest sampler"
    return f"--set sampling.fragment={2 * run.config.sampling.fragment} lets roles meet less often"


def _startup(run: Seen) -> str:
    sooner = "--runtime process starts sooner, and a" if run.config.runtime == "ray" else "A"
    return f"{sooner} longer run (--steps) makes up for it"


def _evaluation(run: Seen) -> str:
    how = run.config.eval
    every = how.every or max(1, run.config.steps // 20)
    beside = "--runtime process evaluates beside training; " if run.config.runtime == "inline" and run.cores > 1 else ""
    fewer = f" or --set eval.episodes={how.episodes // 2}" if how.episodes > 1 else ""
    return f"{beside}--set eval.every={2 * every}{fewer} plays less"


def _saving(run: Seen) -> str:
    return f"--set checkpoint.every={2 * (run.config.checkpoint.every or 50_000)} saves less often"


_BOUNDS: Mapping[str, tuple[str, Callable[[Seen], str]]] = {
    "env": ("the environment", _environment),
    "policy": ("the policy", _policy),
    "learner": ("the learner", _learner),
    "gradients": ("computing gradients", _gradients),
    "transport": ("transport between roles", _transport),
    "waiting": ("waiting for each other", _waiting),
    "start-up": ("start-up", _startup),
    "evaluation": ("evaluation", _evaluation),
    "saving": ("saving", _saving),
}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()} if whole > 0 else {}


def _bar(shares: Mapping[str, float]) -> str:
    """The shares side by side; each ends where the sum so far says, so that the whole is always full."""
    bar, so_far = "", 0.0
    for name, share in shares.items():
        so_far += share
        bar += SHADES.get(name, "▒") * (round(so_far * BAR) - len(bar))
    return bar


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
