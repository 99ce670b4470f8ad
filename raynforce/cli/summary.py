"""The block at the end of a run: how it ended, what it learned, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from raynforce.runs.progress import number
from raynforce.runs.terminal import command, folded
from raynforce.topologies.declaration import stepping

if TYPE_CHECKING:
    from raynforce.config import Config


def summary(config: Config, result: Any, time_block: str, most: int, me: str) -> Iterator[str]:
    """The block, in lines of so many columns; `me` is how this command was called."""
    target, parallel = config.target, stepping(config)
    faulty, missed = result.restarts or result.env_restarts, False
    yield ""
    if result.solved_steps is not None and target is not None:
        yield f"solved: an evaluation met the target of {target:g} after {result.solved_steps:,} steps"
    elif target is not None and result.stopped == "steps done":
        yield f"not solved: no evaluation reached the target of {target:g}"
    else:
        words = {"steps done": "finished: all steps are done", "SIGINT": "stopped by Ctrl-C"}
        yield from folded(words.get(result.stopped, f"stopped: {result.stopped}"), most, further="  ")
    speed = f", {result.steps_per_second:,.0f} steps/s" if result.steps_per_second else ""
    yield f"trained: {result.steps:,} steps and {result.updates:,} updates; here {result.seconds:.1f} s{speed}"
    yield from _nothing_learned(config, result, most)
    if result.eval_return is not None:
        yield f"best policy: {number(result.eval_return)} mean return on fresh greedy episodes"
        missed = target is not None and result.solved_steps is not None and result.eval_return < target
        if missed:
            yield "  that is below the target: few episodes met it by chance, more training may help"
    if not result.episodes and result.steps:
        yield "no episode has ended: returns are not known, and nothing says whether it has learned"
    if skipped := result.skipped_evaluations:
        told = f"evaluations: {skipped:,} of {result.evaluations + skipped:,} that were due have no outcome: "
        failed = not result.evaluations and result.env_restarts
        late = "evaluating took longer than training on, or failed (--set eval.every=N spreads them)"
        told += f"environments failed in each, `{me} doctor` tells how" if failed else late
        yield from folded(told, most, further="  ")
    if result.recycled:
        cut = f", {result.recycle_cuts:,} episodes cut" if result.recycle_cuts else ""
        yield f"recycled: {result.recycled:,} simulator process{'es' * (result.recycled != 1)}{cut}"
    if faulty:
        yield _faults(result)
    if time_block:
        yield from ("", time_block)
    run = shlex.quote(result.run)
    yield from ("", f"run: {result.run}", "", "what to type next:")
    typed = []
    if result.stopped.startswith("SIG"):
        typed.append(f"{me} resume {run}")
    elif result.solved_steps is None:
        typed.append(f"{me} resume {run} --steps {2 * result.steps}")
    elif missed:
        typed.append(f"{me} resume {run} --target none --steps {2 * result.steps}")
    typed += [f"{me} doctor {run}"] if faulty else []
    typed.append(f"{me} eval {run}" + f" --parallel {parallel}" * (parallel != "no"))
    typed += ["pip install tensorboard"] if find_spec("tensorboard") is None else []
    typed.append(f"tensorboard --logdir {run}")
    for line in typed:
        yield from command(line, most, "  ")


def _nothing_learned(config: Config, result: Any, most: int) -> list[str]:
    """Why a run that learns from replay has made no update, if it has made none."""
    starts = getattr(config.algorithm, "learning_starts", None) if config.engine == "native" else None
    if starts is None or result.updates or not result.steps:
        return []
    so_few = "nothing was learned: so few steps lead to no update"
    if result.steps > starts:  # what is learned from is longer than what was stored of it
        names = ("n_step", "sequence", "burn_in", "batch_size")
        found = {name: getattr(config.algorithm, name, None) for name in names}
        why = ", ".join(f"{name} = {value:,}" for name, value in found.items() if value)
        return folded(f"{so_few} (algorithm.{why}): raise --steps, or lower these", most, further="  ")
    why = f"algorithm.learning_starts = {starts:,}"
    return folded(f"{so_few} ({why}): raise --steps, or lower it", most, further="  ")


def _faults(result: Any) -> str:
    counts = {"role": result.restarts, "environment": result.env_restarts}
    which = " and ".join(f"{n:,} restart{'s' * (n != 1)} of {what}s" for what, n in counts.items() if n)
    return f"faults: {which}" + (f", {result.lost_steps:,} steps lost" if result.lost_steps else ", no step lost")
