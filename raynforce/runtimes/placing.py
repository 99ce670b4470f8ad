"""What each role asks of its machine, and whether the machines there are can give it."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.memory import available_bytes
from raynforce.runtimes.base import Place

Resources = Mapping[str, float]
AWAKE = 0.005  # seconds; about as long as sampler and learner wait for each other where they are well balanced
BACKGROUND = 5  # samplers step back for the learner, whom all wait for
BESIDE = 15  # the evaluator steps back for everybody: nobody waits for it
SMALLER = (0.5, 0.25, 0.1, 0.05, 0.01)  # CPUs to try where one does not fit
MEGABYTES = {"process": 45, "ray": 130}  # measured for a process with numpy and gymnasium
TORCH_MEGABYTES = 300
HIDDEN = re.compile("node:|accelerator_type:|(object_store_)?memory$")  # resources of Ray's own
CHILD_MEGABYTES = 12  # of an environment's own process, beside what it shares with the others


@dataclass(frozen=True)
class Demands:
    """What the roles of a topology ask of their machines, beyond the settings."""

    serving: bool = False  # samplers are env hosts, which serve for as long as the run lasts
    buffering: bool = False  # samplers have replay buffers, which fill
    torch: bool = False  # samplers import torch
    processes: int = 0  # environments of each sampler that have processes of their own
    simulators: int = 0  # processes of simulators that each sampler starts: they compute beside it


PLAIN = Demands()


def place_roles(
    config: Config,
    nodes: Sequence[Resources] | None,
    demands: Demands = PLAIN,
    *,
    may_grow: bool = False,
    grows: bool = False,
) -> tuple[dict[str, Place], list[str]]:
    """What each role asks for, and notes on where less has to do. `nodes` are the total resources of each node by Ray's
    names, None for no limit; with `may_grow`, learner and a quorum of samplers suffice; where it `grows` by itself, any
    number of them."""
    places = _asked(config, demands)
    samplers = config.sampling.samplers
    if nodes is None or _fits(places, samplers, nodes):
        return places, []
    if not grows:
        _require_known(places, nodes)
    free = [role for role in ("sampler", "learner") if getattr(config.ray, f"{role}_cpus") is None]
    for cpus in SMALLER if samplers == 1 else ():  # a number of samplers that was asked for is kept as asked
        smaller = {role: replace(place, cpus=cpus) if role in free else place for role, place in places.items()}
        if free and _fits(smaller, samplers, nodes):
            who = f"{free[0]} asks for {cpus:g}" if len(free) == 1 else f"sampler and learner ask for {cpus:g} each"
            return smaller, [f"the cluster has {count(_total(nodes, 'CPU'), 'CPU')}: {who}"]
    fit = _most_samplers(places, samplers, nodes)
    if grows:
        room = f"room for {fit} of {samplers} samplers" if fit else "no room for a learner and a sampler yet"
        return places, [f"the cluster has {room}: its autoscaler is asked for more"]
    if may_grow and fit >= quorum(config):
        return places, [f"the cluster has room for {fit} of {samplers} samplers; the others join when there is room"]
    raise UsageError(_shortage(places, samplers, nodes))


def require_room(config: Config, demands: Demands = PLAIN) -> None:
    """Refuse more samplers than the memory of this machine can hold."""
    each = MEGABYTES.get(config.runtime)
    available = available_bytes()
    if each is None or available is None:
        return
    each += TORCH_MEGABYTES * demands.torch
    samplers, free, bare, envs = config.sampling.samplers, available / 1e6, each, 0
    if demands.processes:
        each += CHILD_MEGABYTES * demands.processes
        envs = int(((free - TORCH_MEGABYTES) / samplers - bare) / CHILD_MEGABYTES)  # that would fit
    needed = samplers * each + TORCH_MEGABYTES
    if needed > free:
        fit = int((free - TORCH_MEGABYTES) / each)
        fix = "not even one fits here: free some memory"
        if fit > 0:
            fix = f"at most {fit} fit here: lower --samplers or --envs"
        elif envs > 0:
            fix = f"with --envs {envs} or fewer, a process for each, they would fit"
        need = f"need about {needed / 1e3:.1f} GB ({each} MB each and {TORCH_MEGABYTES} MB)"
        raise UsageError(f"{samplers} samplers and a learner {need}, {free / 1e3:.1f} GB are free; {fix}")


def quorum(config: Config) -> int:
    return max(1, math.ceil(config.faults.quorum * config.sampling.samplers - 1e-9))


def memory_limit(config: Config, *, buffering: bool = False) -> float:
    """Bytes that the process of one sampler may take."""
    if config.faults.memory_mb is not None:
        return config.faults.memory_mb * 1e6
    if buffering:
        return math.inf  # it grows as its buffer fills
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return math.inf
    return total / 2 / config.sampling.samplers


def needs(place: Place) -> dict[str, float]:
    """A place by Ray's names of resources."""
    asked = {"CPU": place.cpus, "GPU": place.gpus, **place.resources}
    return {name: amount for name, amount in asked.items() if amount > 0}


def total_needs(places: Mapping[str, Place], samplers: int) -> dict[str, float]:
    """All that the roles of a run ask for together."""
    total: Counter[str] = Counter()
    for asked in _items(places, samplers):
        total.update(asked)
    return dict(total)


def _asked(config: Config, demands: Demands) -> dict[str, Place]:
    ray, faults, serving = config.ray, config.faults, demands.serving
    spare = config.runtime == "process" and config.sampling.samplers + 1 <= cores()  # to wait awake costs nothing then
    awake = AWAKE if spare and not serving else 0.0
    plain = Place(cpus=0.0, start_seconds=faults.start_seconds, kernels=config.kernels)
    sampler = replace(
        plain,
        cpus=1.0 + demands.simulators if ray.sampler_cpus is None else ray.sampler_cpus,
        resources=dict(ray.sampler_resources),
        nice=0 if serving else BACKGROUND,
        awake=awake,
        call_seconds=0.0 if serving else faults.sample_seconds,
    )
    shard = replace(plain, awake=awake, call_seconds=faults.learn_seconds)
    learner = replace(
        shard,
        cpus=1.0 if ray.learner_cpus is None else ray.learner_cpus,
        gpus=ray.learner_gpus or float(config.learner.device.startswith("cuda")),  # Ray hides GPUs nobody asked for
        resources=dict(ray.learner_resources),
        threads=config.learner.threads,
        nice=BACKGROUND if serving else 0,
        home=True,
    )
    evaluator = replace(plain, nice=BESIDE, call_seconds=faults.sample_seconds)
    return {"sampler": sampler, "policy": plain, "learner": learner, "shard": shard, "evaluator": evaluator}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _items(places: Mapping[str, Place], samplers: int) -> Iterator[dict[str, float]]:
    return chain([needs(places["learner"])], repeat(needs(places["sampler"]), samplers))


def _fits(places: Mapping[str, Place], samplers: int, nodes: Sequence[Resources]) -> bool:
    """First fit, the largest first: each role goes to the first node that still has room for it."""
    left = [dict(node) for node in nodes]
    totals = {name: _total(nodes, name) for node in nodes for name in node}

    def size(asked: Resources) -> float:
        return max((amount / (totals.get(name) or 1e-9) for name, amount in asked.items()), default=0.0)

    for asked in sorted(_items(places, samplers), key=size, reverse=True):
        for node in left:
            if all(node.get(name, 0.0) >= amount - 1e-6 for name, amount in asked.items()):
                for name, amount in asked.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def _require_known(places: Mapping[str, Place], nodes: Sequence[Resources]) -> None:
    has = sorted({name for node in nodes for name, amount in node.items() if amount > 0 and not HIDDEN.match(name)})
    for role in ("sampler", "learner"):
        for name in needs(places[role]):
            if name != "CPU" and _total(nodes, name) <= 0:
                fix = "set ray.learner_gpus=0 and learner.device=cpu" if name == "GPU" else f"drop ray.{role}_resources"
                there = ", ".join(has) or "nothing"
                problem = f'the {role} asks for "{name}", the cluster has no "{name}"; it has {there}'
                raise UsageError(f"{problem}: start a node with it, or {fix}")


def _shortage(places: Mapping[str, Place], samplers: int, nodes: Sequence[Resources]) -> str:
    """One line: what is asked, what there is, what is missing, what to do."""
    asked = total_needs(places, samplers)
    short = {name: amount - _total(nodes, name) for name, amount in asked.items()}
    name = max(short, key=lambda n: short[n])
    per_sampler, per_learner = needs(places["sampler"]).get(name, 0.0), needs(places["learner"]).get(name, 0.0)
    parts = [f"{samplers} sampler{'s' * (samplers > 1)} with {count(per_sampler, name)} each"] if per_sampler else []
    parts += [f"a learner with {count(per_learner, name)}"] if per_learner else []
    has = _total(nodes, name)
    line = f"{' and '.join(parts)} ask for {count(asked[name], name)}; the cluster has {has:g}"
    if short[name] > 1e-6:
        line += f", {short[name]:g} short"
    else:
        largest = max(node.get(name, 0.0) for node in nodes)
        line += f" in all, but not in pieces that fit: its largest node has {largest:g}"
    return f"{line}: {_fix(places, samplers, nodes)}"


def _fix(places: Mapping[str, Place], samplers: int, nodes: Sequence[Resources]) -> str:
    """Settings that would fit, found by trying."""
    fewer = _most_samplers(places, samplers, nodes)
    ways = [f"use --samplers {fewer}"] if fewer else []
    for cpus in SMALLER:
        sampler = replace(places["sampler"], cpus=cpus)
        if cpus < places["sampler"].cpus and _fits({**places, "sampler": sampler}, samplers, nodes):
            ways.append(f"--sampler-cpus {cpus:g}")
            break
    else:
        smaller = {role: replace(place, cpus=min(place.cpus, 0.5)) for role, place in places.items()}
        if _fits(smaller, samplers, nodes):
            ways.append("--sampler-cpus 0.5 --learner-cpus 0.5")
    return " or ".join([*ways, "add nodes"])


def _most_samplers(places: Mapping[str, Place], samplers: int, nodes: Sequence[Resources]) -> int:
    low, high = 0, samplers  # `low` fits or is 0, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(places, middle, nodes) else (low, middle)
    return low


def _total(nodes: Sequence[Resources], name: str) -> float:
    return sum(node.get(name, 0.0) for node in nodes)


def count(amount: float, name: str) -> str:
    return f"{amount:g} {name}{'s' * (amount != 1 and name in ('CPU', 'GPU'))}"
