"""A run as Prometheus sees it: `--metrics-port N` answers scrapes on loopback, and jobs of Ray tell their node's agent.

Training hands over a dictionary once per report. What is exported is made of it when somebody asks, in their thread.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Literal, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import numpy as np

from raynforce.errors import UsageError

HOST = "127.0.0.1"
BUCKETS = [float(f"{digit}e{power}") for power in range(-1, 5) for digit in (1, 2, 5)]
RETURN_BUCKETS = [*(-bound for bound in reversed(BUCKETS)), 0.0, *BUCKETS]
LENGTH_BUCKETS = [bound for bound in BUCKETS if bound >= 1]
LAST_SCRAPE_SECONDS = 30.0  # that a run which failed stays to be scraped once more, if anybody scrapes it

Labels = tuple[str, ...]
Values = dict[Labels, float]


class State:
    """What a run has reported so far."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] = {}
        self.path = Path()
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.reported = 0.0  # when, in seconds since 1970
        self.evaluations = 0
        self.best_eval: float | None = None
        self.failed = ""  # the error that ended it
        self.returns, self.lengths = Buckets(RETURN_BUCKETS), Buckets(LENGTH_BUCKETS)

    def get(self, name: str) -> Values:
        """A metric of the run, if it has reported it."""
        return {(): self.metrics[name]} if name in self.metrics else {}

    def below(self, prefix: str, depth: int = 1) -> Values:
        """Those that begin so, by what follows, in so many words."""
        found = {name: value for name, value in self.metrics.items() if name.startswith(prefix)}
        words = {tuple(name.removeprefix(prefix).split("/")): value for name, value in found.items()}
        return {labels: value for labels, value in words.items() if len(labels) == depth}


class Buckets:
    """A histogram: how many values there were up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.asarray(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def add(self, values: np.ndarray) -> None:
        finite = values[np.isfinite(values)].astype(np.float64)
        np.add.at(self.counts, np.searchsorted(self.bounds, finite), 1)
        self.sum += float(finite.sum())

    def cumulative(self) -> list[tuple[str, int]]:
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, np.cumsum(self.counts).tolist(), strict=True))


class Exported(NamedTuple):
    """A metric: its name, what it is, where it comes from, and its labels beside `run`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    what: str
    read: Callable[[State], Values | Buckets]
    labels: Labels = ()


def _of(name: str) -> Callable[[State], Values]:
    return lambda state: state.get(name)


def _info(state: State) -> Values:
    config = state.config
    named = [str(config.get(name, "")) for name in ("algo", "env", "engine", "runtime", "topology", "seed")]
    return {tuple(named): 1.0}


def _lag(state: State) -> Values:
    return {("mean",): state.metrics.get("lag/mean", 0.0), ("max",): state.metrics.get("lag/max", 0.0)}


def _batch(state: State) -> Values:
    """A sampler chooses for all of its environments at once."""
    each = (state.config.get("sampling") or {}).get("envs", 0)
    return state.get("inference/batch") or {(): float(each)}


def _dropped(state: State) -> Values:
    dropped, unasked, lost = (state.metrics.get(f"health/{name}_steps", 0.0) for name in ("dropped", "skipped", "lost"))
    return {("stale",): dropped - unasked, ("unasked",): unasked, ("lost",): lost}


def _unbalanced(state: State) -> Values:
    if "health/produced_steps" not in state.metrics:  # an engine without books
        return {}
    used = state.step + sum(state.metrics.get(f"health/{name}_steps", 0.0) for name in ("dropped", "in_flight"))
    return {(): state.metrics["health/produced_steps"] - used}


def _failed(state: State) -> Values:
    return {(state.failed or "none",): float(bool(state.failed))}


def _every(state: State) -> Values:
    return {(name,): value for name, value in state.metrics.items()}


_INFO = ("algo", "env", "engine", "runtime", "topology", "seed")
METRICS: tuple[Exported, ...] = (
    Exported("raynforce_run_info", "gauge", "1; which run this is", _info, _INFO),
    Exported("raynforce_steps_total", "counter", "environment steps trained on", lambda s: {(): float(s.step)}),
    Exported(
        "raynforce_planned_steps",
        "gauge",
        "environment steps to train for",
        lambda s: {(): float(s.config.get("steps", 0))},
    ),
    Exported("raynforce_episodes_total", "counter", "episodes that ended", _of("charts/episodes")),
    Exported("raynforce_updates_total", "counter", "optimiser steps", _of("charts/updates")),
    Exported("raynforce_steps_per_second", "gauge", "speed of training in this process", _of("charts/SPS")),
    Exported("raynforce_episode_return", "histogram", "returns of episodes in this process", lambda s: s.returns),
    Exported("raynforce_episode_length", "histogram", "lengths of episodes in this process", lambda s: s.lengths),
    Exported("raynforce_return_mean", "gauge", "mean return of the last 100 episodes", _of("charts/episodic_return")),
    Exported("raynforce_eval_return", "gauge", "mean return of the newest evaluation", _of("eval/return")),
    Exported(
        "raynforce_eval_return_best",
        "gauge",
        "of the best evaluation in this process",
        lambda s: {} if s.best_eval is None else {(): s.best_eval},
    ),
    Exported(
        "raynforce_evaluations_total",
        "counter",
        "evaluations played in this process",
        lambda s: {(): float(s.evaluations)},
    ),
    Exported(
        "raynforce_evaluations_skipped_total",
        "counter",
        "evaluations that were due and not played",
        _of("eval/skipped"),
    ),
    Exported(
        "raynforce_lag_versions",
        "gauge",
        "policy versions that the last batch was older than the newest",
        _lag,
        ("stat",),
    ),
    Exported("raynforce_replay_size", "gauge", "transitions in the replay buffer", _of("replay/size")),
    Exported("raynforce_replay_capacity", "gauge", "transitions that it has room for", _of("replay/capacity")),
    Exported("raynforce_replay_age_steps", "gauge", "mean age of what was sampled from it", _of("replay/age")),
    Exported(
        "raynforce_replay_samples_per_insert", "gauge", "samples taken per insert", _of("replay/samples_per_insert")
    ),
    Exported("raynforce_inference_batch", "gauge", "observations in one forward pass of the acting policy", _batch),
    Exported(
        "raynforce_time_ratio",
        "gauge",
        "share of a role's time since the last report: env, policy, learn, transport, waiting, ...",
        lambda s: s.below("time/", 2),
        ("role", "activity"),
    ),
    Exported("raynforce_evaluate_seconds_total", "counter", "seconds waited for evaluations", _of("time/evaluate")),
    Exported(
        "raynforce_restarts_total",
        "counter",
        "roles and environments that were restarted: died, hung, memory, raised, garbage",
        lambda s: s.below("health/restarts/", 2) or {("sampler", "died"): 0.0},
        ("role", "reason"),
    ),
    Exported(
        "raynforce_given_up_total",
        "counter",
        "roles that were not restarted any more",
        lambda s: s.below("health/given_up/", 2) or {("sampler", "died"): 0.0},
        ("role", "reason"),
    ),
    Exported("raynforce_produced_steps_total", "counter", "environment steps sampled", _of("health/produced_steps")),
    Exported(
        "raynforce_dropped_steps_total",
        "counter",
        "sampled and not learned from: stale (too old), unasked (a simulator could not wait), lost (with a role)",
        _dropped,
        ("reason",),
    ),
    Exported("raynforce_in_flight_steps", "gauge", "sampled and not learned from yet", _of("health/in_flight_steps")),
    Exported("raynforce_unbalanced_steps", "gauge", "produced - trained - dropped - in flight: always 0", _unbalanced),
    Exported("raynforce_checkpoints_total", "counter", "checkpoints written in this process", _of("disk/checkpoints")),
    Exported(
        "raynforce_checkpoint_seconds", "gauge", "that the newest took, in a thread", _of("disk/checkpoint_seconds")
    ),
    Exported(
        "raynforce_checkpoint_pause_seconds",
        "gauge",
        "that training waited for the newest",
        _of("disk/checkpoint_pause"),
    ),
    Exported("raynforce_checkpoint_bytes", "gauge", "written for the newest", _of("disk/checkpoint_bytes")),
    Exported("raynforce_checkpoint_step", "gauge", "of the newest", _of("disk/checkpoint_step")),
    Exported("raynforce_checkpoint_failures_total", "counter", "checkpoints that failed", _of("disk/failures")),
    Exported(
        "raynforce_checkpoint_failures_in_a_row",
        "gauge",
        "since the last that was written",
        _of("disk/failures_in_a_row"),
    ),
    Exported("raynforce_reported_timestamp_seconds", "gauge", "when the run last reported", lambda s: {(): s.reported}),
    Exported("raynforce_failed", "gauge", "1 once an error has ended the run", _failed, ("error",)),
    Exported("raynforce_metric", "gauge", "every metric of the run, by its own name", _every, ("name",)),
)


class Reports:
    """A sink that keeps what a run reports."""

    def __init__(self) -> None:
        self._state, self._lock = State(), threading.Lock()

    def begin(self, path: Path, config: Mapping[str, Any]) -> None:
        with self._lock:
            self._state.path, self._state.config = path, config

    def episodes(self, step: int, returns: np.ndarray, lengths: np.ndarray) -> None:
        with self._lock:
            self._state.returns.add(returns)
            self._state.lengths.add(lengths)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            state = self._state
            state.metrics |= metrics
            if "eval/return" in metrics:  # of a version that may be older than the newest report
                score = float(metrics["eval/return"])
                state.evaluations += 1
                state.best_eval = score if state.best_eval is None else max(state.best_eval, score)
            else:
                state.step, state.reported = step, time.time()

    def close(self) -> None:
        """Nothing is open here."""

    def collect(self) -> Iterator[Any]:
        """What a scrape gets, as prometheus_client's families."""
        from prometheus_client import core

        makers = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        with self._lock:
            run = self._state.path.name
            found = [(exported, exported.read(self._state)) for exported in METRICS]
            buckets = {
                id(values): (values.cumulative(), values.sum) for _, values in found if isinstance(values, Buckets)
            }
        for exported, values in found:
            if isinstance(values, Buckets):
                counts, total = buckets[id(values)]
                family = core.HistogramMetricFamily(exported.name, exported.what, labels=["run"])
                family.add_metric([run], counts, total)
                yield family
            elif values:
                family = makers[exported.kind](exported.name, exported.what, labels=["run", *exported.labels])
                for labels, value in values.items():
                    family.add_metric([run, *labels], value)
                yield family

    def describe(self) -> list[Any]:
        return []  # not before the run has begun


class PrometheusSink(Reports):
    """Answers scrapes at `http://127.0.0.1:PORT/metrics`, for as long as the run lasts."""

    def __init__(self, port: int) -> None:
        super().__init__()
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._app = make_wsgi_app(registry, disable_compression=True)
        self.scraped = 0  # how often
        self._again, self._closed = threading.Event(), False
        try:
            self._server = make_server(HOST, port, self._answer, _Server, _Quiet)
        except OSError as error:
            wrong = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise UsageError(f"metrics_port {port} {wrong}: choose another with --metrics-port N") from None
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True).start()

    def close(self) -> None:
        """A run that has failed is scraped once more by whoever scraped it before: so that an alert can tell of it."""
        if self._closed:
            return
        self._closed, error = True, sys.exc_info()[1]
        if isinstance(error, Exception):
            with self._lock:
                self._state.failed = type(error).__name__
            if self.scraped:
                self._again.clear()
                self._again.wait(LAST_SCRAPE_SECONDS)
        with contextlib.suppress(OSError):
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        host = str(environ.get("HTTP_HOST", ""))
        if host.partition(":")[0] not in (HOST, "localhost"):  # a page whose name was made to lead here
            return _refused(start, "403 Forbidden", f"{HOST} and localhost alone")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refused(start, "405 Method Not Allowed", "GET /metrics")
        if environ["PATH_INFO"] != "/metrics":
            return _refused(start, "404 Not Found", "GET /metrics")
        answer = self._app(environ, start)
        self.scraped += 1
        self._again.set()
        return answer


def _refused(start: Any, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, address: Any) -> None:
        """Whoever scrapes may leave before the answer: no traceback over the live view."""


class _Quiet(WSGIRequestHandler):
    timeout = 10.0  # seconds for a request to come

    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def exporting(port: int) -> Iterator[list[Reports]]:
    """The sink that answers at a port, if it is not 0; a port that cannot be used is a `UsageError`."""
    sinks: list[Reports] = [PrometheusSink(port)] if port else []
    try:
        yield sinks
    finally:
        for sink in sinks:
            sink.close()
