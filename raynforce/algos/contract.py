"""What is wanted of an algorithm, and what is said when it gives something else: who, where, what, and the fix."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

import raynforce
from raynforce.algos.base import Algorithm, Loss
from raynforce.algos.sequences import has_memory, sequence_length
from raynforce.config import Config
from raynforce.errors import AlgorithmError, RaynforceError, UsageError, summary
from raynforce.policies.acting import ActingSpec
from raynforce.policies.groups import Group, stretches
from raynforce.policies.spec import NetworkSpec
from raynforce.spaces import EnvSpec

METHODS = {  # what an algorithm has to define itself
    "heads": "heads() returns the network's outputs and their sizes, such as {'policy': 2, 'value': 1}",
    "prepare": "prepare(net, fragments) returns the arrays to learn from; an OffPolicy algorithm has one",
    "loss": "loss(net, minibatch) returns a raynforce.Loss",
}
OURS = str(Path(raynforce.__file__).parent) + os.sep
STANDARD = str(Path(os.__file__).parent) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def require_methods(kind: type[Algorithm[Any]], name: str) -> None:
    for method, what in METHODS.items():
        if getattr(kind, method) is getattr(Algorithm, method):
            raise UsageError(f"algorithm {name!r} does not define {method}: {what}")


def require_consistent(kind: type[Algorithm[Any]], name: str) -> None:
    consumes, lag, shares = (getattr(kind, name) for name in ("consumes", "max_lag", "shares_gradients"))
    has_spec = kind.replay_spec.__func__ is not Algorithm.replay_spec.__func__  # type: ignore[attr-defined]
    wrong = ""
    if consumes not in ("stream", "replay", "data"):
        wrong = f"consumes = {consumes!r}; it is 'stream', 'replay' or 'data'"
    elif lag is not None and (isinstance(lag, bool) or not isinstance(lag, int) or lag < 0):
        wrong = f"max_lag = {lag!r}; it is how many policy versions old a fragment may be, or None for any"
    elif not isinstance(shares, bool):
        wrong = f"shares_gradients = {shares!r}; it is True or False"
    elif consumes == "replay" and lag is not None:
        wrong = f"consumes = 'replay' and max_lag = {lag}, and what a buffer holds is of any age: set max_lag = None"
    elif consumes != "replay" and has_spec:
        wrong = f"a replay_spec and consumes = {consumes!r}: set consumes = 'replay', or leave the spec out"
    if wrong:
        raise UsageError(f"algorithm {name!r} declares {wrong}")


def names(kind: type[Algorithm[Any]], declaration: str) -> tuple[str, ...]:
    """All names that a class and its bases give in `keeps` or `forgets`, those of the bases first."""
    found: dict[str, None] = {}
    for each in reversed(kind.__mro__):
        given = vars(each).get(declaration, ())
        if not (isinstance(given, tuple | list) and all(isinstance(name, str) for name in given)):
            what = f"{declaration} of {kind.__name__} is {given!r}"
            raise UsageError(f'{what}; it is a tuple of names of attributes, such as ("critic",): mind the comma')
        found |= dict.fromkeys(given)
    return tuple(found)


def make_algorithm(config: Config, env: EnvSpec, kind: type[Algorithm[Any]]) -> Algorithm[Any]:
    with blamed(config.algo):
        return kind(config, env)


def declared(config: Config, env: EnvSpec, kind: type[Algorithm[Any]]) -> ActingSpec:
    """What samplers need to know; refuses an algorithm that declares anything in another form than is wanted."""
    names(kind, "keeps"), names(kind, "forgets")
    for each in kind.__mro__:
        for both in set(vars(each).get("keeps", ())) & set(vars(each).get("forgets", ())):
            raise UsageError(f"{each.__name__} names {both!r} in keeps and in forgets: it is saved or it is not")
    algo = make_algorithm(config, env, kind)
    with blamed(config.algo, algo):
        heads = algo.heads()
    if not (heads and _is_mapping(heads, int | np.integer)):
        raise _wrong(algo, "heads", heads, "a dict of output names and sizes, such as {'policy': 2, 'value': 1}")
    with blamed(config.algo, algo):
        network, acting, groups = algo.network(), algo.acting(), algo.groups()
    if not _is_mapping(groups, Group) or "" in groups:
        raise _wrong(algo, "groups", groups, "a dict of Group by name, such as {'critics': Group(('q1', 'q2'), 1e-3)}")
    with blamed(config.algo, algo):
        schedules = algo.schedules(0.0)
    if not isinstance(network, NetworkSpec):
        raise _wrong(algo, "network", network, "a NetworkSpec: self.spec(towers…), or leave it out")
    if not isinstance(acting, ActingSpec):
        raise _wrong(algo, "acting", acting, "an ActingSpec: replace(super().acting(), …), or leave it out")
    if not (_is_mapping(schedules, int | float | np.number) and "learning_rate" in schedules):
        wanted = "numbers by name, 'learning_rate' among them: {**super().schedules(progress), …}"
        raise _wrong(algo, "schedules", schedules, wanted)
    if not config.network.factory:  # else the learner, which has the module, sees what there is
        stretches(groups, network.parts)
    acting = replace(acting, factory_args=config.network.factory_args)  # which an algorithm need not know of
    return replace(acting, sequence=_sequence(config, acting, kind))


def _sequence(config: Config, acting: ActingSpec, kind: type[Algorithm[Any]]) -> int:
    """Steps of a sequence if the network has memory, else 0; refuses memory where it cannot be learned."""
    asked = has_memory(config)
    if not (asked or acting.network.states):
        if (given := getattr(config.algorithm, "sequence", None)) is not None:
            what = f"algorithm.sequence = {given} is for networks with memory"
            raise UsageError(f"{what}: set network.memory=lstm or gru, or leave it out")
        return 0
    what = f"network.memory = {config.network.memory!r}" if asked else "its network has a recurrent layer"
    if not kind.recurrent:
        able = "use ppo, impala, a3c or dqn, or leave it out"
        raise UsageError(f"{what}, and {config.algo} learns without memory: {able}")
    if not acting.network.states:
        raise UsageError(f"{what}, and {config.algo} declares a network without a recurrent layer: leave it out")
    return sequence_length(config)


def _is_mapping(given: Any, kind: Any) -> bool:
    """Whether it is values of this kind by name."""
    return isinstance(given, Mapping) and all(isinstance(k, str) and isinstance(v, kind) for k, v in given.items())


@contextmanager
def blamed(name: str, algo: Algorithm[Any] | None = None) -> Iterator[None]:
    """What the user's code raises in here leaves as one line with its place; its own error is the cause."""
    try:
        yield
    except RaynforceError as error:
        place = _place(error.__traceback__, algo)
        if place and not place.own and algo is not None and error.args:  # ours, of a call in the user's code
            error.args = (f"{error} ({place.text})",)
        raise
    except Exception as error:
        place = _place(error.__traceback__, algo)
        if not place:
            raise
        raise AlgorithmError(f"algorithm {name} raised {summary(error)} in {place.text}") from error


class _Place(NamedTuple):
    text: str
    own: bool  # whether it was raised there, not further in


def _place(trace: TracebackType | None, algo: Algorithm[Any] | None) -> _Place | None:
    """The innermost line of the user's own code on the way to an error; None if there is none."""
    found: _Place | None = None
    while trace is not None:
        code, frame = trace.tb_frame.f_code, trace.tb_frame
        path = os.path.abspath(code.co_filename)
        library = path.startswith(STANDARD) or any(folder in path for folder in INSTALLED)
        # An algorithm that was installed as a package lies among the libraries.
        theirs = not library or (algo is not None and frame.f_locals.get("self") is algo)
        if theirs and not path.startswith(OURS) and not code.co_filename.startswith("<"):
            near = os.path.relpath(path)
            text = f"{code.co_name} ({path if near.startswith('..') else near}:{trace.tb_lineno})"
            found = _Place(text, trace.tb_next is None)
        trace = trace.tb_next
    return found


# -- what it returns while it learns -----------------------------------------------------------------------------------


def is_own(algo: Algorithm[Any]) -> bool:
    return not type(algo).__module__.startswith("raynforce.")


def wrong_arrays(algo: Algorithm[Any], method: str, given: Any, error: Exception) -> AlgorithmError:
    wanted, verb = "arrays by name, such as rows(fragment, {'advantage': advantage})", "returned"
    if method == "minibatches":
        wanted, verb = "a dict of tensors or arrays", "yielded"
    if not isinstance(given, Mapping):
        return _wrong(algo, method, given, wanted, verb)
    for name, value in given.items():
        if not isinstance(value, np.ndarray) and not hasattr(value, "requires_grad"):
            return _wrong(algo, method, value, f"an array or a tensor as {name!r}", verb)
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            return _wrong(algo, method, value, f"numbers in {name!r}, and its dtype is {value.dtype}", verb)
    return AlgorithmError(f"{type(algo).__name__}.{method} {verb} what cannot be made tensors: {summary(error)}")


def explained(algo: Algorithm[Any], loss: Any, error: Exception) -> Exception:
    """The error as the user should see it that using `loss`, the last one returned, has led to."""
    if loss is None or not is_own(algo) or _place(error.__traceback__, algo):  # which tells more
        return error
    if not isinstance(loss, Loss):
        return _wrong(algo, "loss", loss, "raynforce.Loss(total, metrics)")
    total: Any = loss.total
    metrics: Any = loss.metrics
    who = type(algo).__name__
    if not hasattr(total, "requires_grad"):
        return _wrong(algo, "loss", total, "a scalar tensor as Loss.total")
    if loss.gradients is None and total.numel() != 1:
        return _wrong(algo, "loss", total, "a scalar as Loss.total: take its mean()")
    if loss.gradients is None and not total.requires_grad:
        how = "make it of net(observations(minibatch)), outside of torch.no_grad() and without detach()"
        return _wrong(algo, "loss", total, f"a Loss.total that depends on the network: {how}")
    if not isinstance(metrics, Mapping):
        return _wrong(algo, "loss", metrics, "a dict of tensors as Loss.metrics, which may be empty")
    bad = next((name for name, value in metrics.items() if not hasattr(value, "requires_grad")), None)
    if bad is not None:
        return _wrong(algo, "loss", metrics[bad], f"a tensor as the metric {bad!r}: torch.tensor(…)")
    if not bool(total.isfinite().all()):
        fix = "look for a division, log or exp of what may be 0 or large, or lower algorithm.learning_rate"
        when = f"a total of {total.item():g} within {algo.updates:,} updates"
        return AlgorithmError(f"{who}.loss returned {when}: {fix}; {error}")
    if isinstance(error, KeyError):
        return AlgorithmError(f"{who}.loss has other metrics for each minibatch, now {', '.join(metrics)}")
    return error


def require_savable(algo: Algorithm[Any], tree: Any, path: str = "") -> None:
    if not path and not isinstance(tree, dict):
        raise _wrong(algo, "state", tree, "a dict of arrays, numbers and texts")
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise _wrong(algo, "state", key, f"texts as names{path and ' in ' + path}")
            require_savable(algo, value, f"{path}/{key}" if path else key)
    elif isinstance(tree, list | tuple):
        for value in tree:
            require_savable(algo, value, path)
    elif not (tree is None or isinstance(tree, np.ndarray | bool | int | float | str)):
        fix = "tensor.cpu().numpy()" if hasattr(tree, "requires_grad") else "an array or a number"
        raise _wrong(algo, "state", tree, f"{fix} as {path!r}; or name the attribute in keeps instead")


def _wrong(algo: Algorithm[Any], method: str, given: Any, wanted: str, verb: str = "returned") -> AlgorithmError:
    return AlgorithmError(f"{type(algo).__name__}.{method} {verb} {_described(given)}; wanted is {wanted}")


def _described(given: Any) -> str:
    if given is None:
        return "nothing (None)"
    if isinstance(given, bool | int | float | str):
        return f"{given!r}"
    kind = type(given).__name__
    if hasattr(given, "shape"):
        return f"a {kind} of shape {tuple(given.shape)}"
    if isinstance(given, Mapping | list | tuple) and not given:
        return f"an empty {kind}"
    text = repr(given) if isinstance(given, Mapping | list | tuple) else ""
    return f"{text} ({kind})" if 0 < len(text) <= 80 else f"a {kind}"
