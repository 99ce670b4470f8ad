"""What a server counts, as Prometheus reads it; counts of replicas are added up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
HELP = {
    "requests_total": ("counter", "Answers of /act by policy and status code."),
    "observations_total": ("counter", "Observations acted on."),
    "batches_total": ("counter", "Forward passes: observations by batches is the mean size of a batch."),
    "refused_total": ("counter", "Requests that were refused before a policy was chosen, by status code."),
    "reloads_total": ("counter", "Policies that were taken, and that were refused."),
    "request_seconds": ("histogram", "From a request's headers to its answer."),
    "policy_version": ("gauge", "The policy version that is served."),
    "replicas": ("gauge", "Processes that answer."),
}
Key = tuple[str, str]  # a name without its prefix, and labels as they are written


class Latencies:
    """How long one policy's requests took."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(SECONDS) + 1)
        self.total = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds
        self.count += 1


class Metrics:
    """Counts of one process."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self.latencies: dict[str, Latencies] = {}

    def refused(self, code: int) -> None:
        self.counts["refused_total", f'code="{code}"'] += 1

    def answered(self, policy: str, code: int) -> None:
        self.counts["requests_total", f'policy="{policy}",code="{code}"'] += 1

    def took(self, policy: str, seconds: float) -> None:
        """A request that was answered with an action."""
        found = self.latencies.get(policy)
        if found is None:
            found = self.latencies[policy] = Latencies()
        found.add(seconds)

    def acted(self, policy: str, rows: int) -> None:
        self.counts["observations_total", f'policy="{policy}"'] += rows
        self.counts["batches_total", f'policy="{policy}"'] += 1

    def state(self) -> dict[str, float]:
        """All of it as plain data, to be added to others'."""
        counts: dict[str, float] = {f"{name}|{labels}": count for (name, labels), count in self.counts.items()}
        for policy, found in self.latencies.items():
            counts[f'requests_total|policy="{policy}",code="200"'] = found.count
            counts[f'request_seconds_sum|policy="{policy}"'] = found.total
            below = 0
            for bound, count in zip((*map(str, SECONDS), "+Inf"), found.buckets, strict=True):
                below += count
                counts[f'request_seconds_bucket|policy="{policy}",le="{bound}"'] = below
            counts[f'request_seconds_count|policy="{policy}"'] = found.count
        return counts


def text(states: Iterable[Mapping[str, float]], gauges: Mapping[str, float]) -> str:
    """The page that Prometheus reads, from the `state()`s of all replicas and what is not to be added up."""
    total: Counter[str] = Counter()
    for state in states:
        total.update(state)
    values = {**total, **gauges}
    lines = []
    for name, (kind, what) in HELP.items():
        full = f"raynforce_serve_{name}"
        mine = [key for key in values if _belongs(key.partition("|")[0], name, kind)]
        if mine:
            lines += [f"# HELP {full} {what}", f"# TYPE {full} {kind}"]
        for key in mine:
            own, _, labels = key.partition("|")
            lines.append(f"raynforce_serve_{own}{{{labels}}} {values[key]}" if labels else f"{full} {values[key]}")
    return "\n".join(lines) + "\n"


def _belongs(key: str, name: str, kind: str) -> bool:
    return key == name or (kind == "histogram" and key in (f"{name}_bucket", f"{name}_sum", f"{name}_count"))
