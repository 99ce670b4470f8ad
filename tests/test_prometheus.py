"""Runs that Prometheus scrapes: what they export, that it is right, and that alerts and dashboard work on it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import SMALL

import raynforce
from raynforce import prometheus
from raynforce.cli import main
from raynforce.experience.ledger import LedgerError
from raynforce.prometheus import METRICS, PrometheusSink

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
needs_prometheus = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def scrape(port: int, path: str = "/metrics", host: str = "127.0.0.1", method: str = "GET") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host}, method=method)
    with urllib.request.urlopen(request, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def values(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink(free_port())
    made.begin(Path("/runs/mine"), {"steps": 100, "algo": "ppo", "sampling": {"envs": 8}})
    yield made
    made.close()


def test_a_run_is_scraped_while_it_lasts_and_no_longer(tmp_path: Path) -> None:
    port, seen = free_port(), list[str]()

    def look(status: raynforce.Status) -> None:
        if status.steps >= 400 and not seen:
            seen.append(scrape(port))

    how: dict[str, Any] = {"steps": 500, "runtime": "inline", "progress": "quiet", "callbacks": [look]}
    raynforce.train("CartPole-v1", out=tmp_path / "run", settings=SMALL | {"log_every": 1, "metrics_port": port}, **how)
    found = values(seen[0])
    steps = found['raynforce_steps_total{run="run"}']
    assert steps >= 400
    assert steps == found['raynforce_produced_steps_total{run="run"}']
    assert found['raynforce_unbalanced_steps{run="run"}'] == 0
    episodes = found['raynforce_episodes_total{run="run"}']
    assert found['raynforce_episode_return_bucket{le="+Inf",run="run"}'] == episodes > 0
    assert found['raynforce_planned_steps{run="run"}'] == 500
    assert 'raynforce_metric{name="losses/value_loss",run="run"}' in found
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_returns_fall_into_their_buckets(sink: PrometheusSink) -> None:
    sink.episodes(1, np.array([-30.0, 0.0, 1.0, 499.0, 1e9, np.nan]), np.array([1, 2, 3, 4, 5, 6]))
    found = values(scrape(sink.port))
    counts = {
        bound: found[f'raynforce_episode_return_bucket{{le="{bound}",run="mine"}}'] for bound in ("-50", "-20", "0")
    }
    assert counts == {"-50": 0, "-20": 1, "0": 2}
    assert found['raynforce_episode_return_bucket{le="500",run="mine"}'] == 4
    assert found['raynforce_episode_return_bucket{le="+Inf",run="mine"}'] == 5  # NaN is none


def test_restarts_and_drops_by_reason_and_books_that_do_not_balance(sink: PrometheusSink) -> None:
    facts = {"health/restarts/sampler/died": 2.0, "health/restarts/env/raised": 7.0, "health/produced_steps": 110.0}
    facts |= {"health/dropped_steps": 5.0, "health/skipped_steps": 2.0, "health/lost_steps": 3.0}
    sink.write(90, {**facts, "health/in_flight_steps": 10.0, "losses/a": float("nan")})
    found = values(scrape(sink.port))
    assert found['raynforce_restarts_total{reason="died",role="sampler",run="mine"}'] == 2
    assert found['raynforce_restarts_total{reason="raised",role="env",run="mine"}'] == 7
    dropped = {
        reason: found[f'raynforce_dropped_steps_total{{reason="{reason}",run="mine"}}']
        for reason in ("stale", "unasked", "lost")
    }
    assert dropped == {"stale": 3, "unasked": 2, "lost": 3}
    assert found['raynforce_unbalanced_steps{run="mine"}'] == 110 - 90 - 5 - 10
    assert found['raynforce_inference_batch{run="mine"}'] == 8
    assert np.isnan(found['raynforce_metric{name="losses/a",run="mine"}'])


def test_names_cannot_break_the_text(sink: PrometheusSink) -> None:
    sink.begin(Path('/runs/a"b\\c\nd'), {"env": '"} 1\nevil 2'})
    sink.write(1, {'charts/info/x"\n': 1.0})
    assert "evil 2" not in scrape(sink.port).splitlines()


def test_only_this_machine_by_its_own_name_and_only_reading(sink: PrometheusSink) -> None:
    assert sink._server.server_address[0] == "127.0.0.1"
    assert "raynforce_run_info" in scrape(sink.port, host=f"localhost:{sink.port}")
    for code, how in ((403, {"host": "evil.example"}), (404, {"path": "/../etc/passwd"}), (405, {"method": "POST"})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(sink.port, **how)
        refused.value.close()
        assert refused.value.code == code


def test_a_port_in_use_is_one_line_and_changes_nothing(
    sink: PrometheusSink, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "ppo", "CartPole-v1", "--steps", "100", "--out", str(tmp_path / "run"), "--metrics-port"]
    assert main([*words, str(sink.port)]) == 2
    assert f"metrics_port {sink.port} is in use: choose another with --metrics-port N" in capsys.readouterr().err
    assert main([*words, "99999"]) == 2
    assert "99999" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_failed_run_is_seen_by_whoever_scraped_it_before(
    sink: PrometheusSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    unseen = PrometheusSink(free_port())
    with pytest.raises(LedgerError):
        _fail(unseen)
    assert time.monotonic() - began < 5  # nobody had scraped it
    scrape(sink.port)
    monkeypatch.setattr(prometheus, "LAST_SCRAPE_SECONDS", 60.0)
    script = f"import time, urllib.request as r; time.sleep(1); print(r.urlopen('http://127.0.0.1:{sink.port}/metrics').read().decode())"
    reader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with pytest.raises(LedgerError):
        _fail(sink)
    told, _ = reader.communicate(timeout=60)
    assert 'raynforce_failed{error="LedgerError",run="mine"} 1.0' in told
    assert time.monotonic() - began < 50


def _fail(sink: PrometheusSink) -> None:
    try:
        raise LedgerError("the ledger does not balance")
    finally:
        sink.close()


def test_the_page_lists_what_is_exported() -> None:
    rows = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {each.kind} | {labels} | {each.what} |")
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = page.partition("<!-- metrics -->\n")[2].partition("<!-- /metrics -->")[0]
    assert table == "\n".join(rows) + "\n", "docs/metrics.md is to have:\n" + "\n".join(rows)


def test_dashboard_and_rules_name_only_what_is_exported() -> None:
    known = {each.name + end for each in METRICS for end in ("", "_bucket")}
    for text in (*_queries(), (DEPLOY / "prometheus" / "alerts.yml").read_text()):
        assert set(re.findall(r"\braynforce_\w+", text)) <= known


@needs_prometheus
def test_promtool_finds_nothing_wrong_with_rules_and_config() -> None:
    for words in (
        ["check", "rules", "alerts.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_a_real_prometheus_scrapes_a_run_and_every_query_of_the_dashboard_returns_data(tmp_path: Path) -> None:
    port, at = free_port(), free_port()
    scraping = {
        "job_name": "raynforce",
        "scrape_interval": "500ms",
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }
    rules = [str(DEPLOY / "prometheus" / "alerts.yml")]
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scraping], "rule_files": rules}))
    words = ["dqn", "CartPole-v1", "--runtime", "process", "--topology", "replay", "--steps", "10M", "--quiet"]
    words += ["--metrics-port", str(port), "--out", str(tmp_path / "run"), "--set", "checkpoint.seconds=1"]
    words += ["--set", "eval.every=2000", "--set", "eval.episodes=1", "--set", "algorithm.learning_starts=500"]
    serving = ["--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{at}", "--storage.tsdb.path=data"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in ([sys.executable, "-m", "raynforce", "train", *words], ["prometheus", *serving]):
            started.append(
                subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        queries, deadline = _queries(), time.monotonic() + 90
        assert len(queries) > 20
        while queries and time.monotonic() < deadline:
            assert all(process.poll() is None for process in started)
            time.sleep(0.5)
            queries = [query for query in queries if not _ask(at, query)]
        assert not queries, "no data"
        with urllib.request.urlopen(f"http://127.0.0.1:{at}/api/v1/rules", timeout=5) as answer:
            groups = json.load(answer)["data"]["groups"]
        assert [rule["health"] for group in groups for rule in group["rules"]].count("err") == 0
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(timeout=60)


def _queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "raynforce.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [query.replace("$run", ".*").replace("$__rate_interval", "10s") for query in found]


def _ask(port: int, query: str) -> list[Any]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=5
        ) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found
    except (urllib.error.URLError, ConnectionError):  # not there yet
        return []
