"""The same on Ray Serve, with replicas; all of it on one Serve, which takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("ray.serve", reason="there is no Ray Serve: pip install 'raynforce[serve]'")

from served_policies import TOKEN, ServedRun
from test_serve import GOOD, REFUSED, ask_hostile, one_line, post

from raynforce.client import ServerError
from raynforce.errors import UsageError
from raynforce.ops.serving.service import Service, serve
from raynforce.policy import load

OBS = np.random.default_rng(0).normal(0, 1, (200, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ServedRun:
    return ServedRun(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def service(one_ray: object, run: ServedRun) -> Iterator[Service]:
    """On the Ray that tests share, which stays; Serve goes."""
    one_ray.open()  # type: ignore[attr-defined]
    with serve(run.path, port=0, token=TOKEN, replicas=2) as served:
        yield served


def test_answers_equal_those_of_load_while_policies_are_replaced(service: Service, run: ServedRun) -> None:
    answers = {1: load(run.path).act(OBS).tolist()}
    with service.client() as client, ThreadPoolExecutor(4) as pool:
        assert client.act(OBS).tolist() == answers[1]
        assert [int(client.act(obs)) for obs in OBS[:5]] == answers[1][:5]
        found = [pool.submit(client.act, obs) for obs in OBS]
        run.best()
        answers[2] = load(run.path).act(OBS).tolist()
        assert [taken["version"] for taken in client.reload()] == [2]
        for index, each in enumerate(found):
            assert int(each.result()) in {answers[1][index], answers[2][index]}
        for _ in range(10):  # both replicas have it
            assert client.act(OBS).tolist() == answers[2]
        assert service.rollback()["version"] == 1
        for _ in range(10):
            assert client.act(OBS).tolist() == answers[1]
        with pytest.raises(ServerError, match="no way back"):
            client.rollback()
        run.best(env="Pendulum-v1")
        with pytest.raises(ServerError, match="are not those that are served"):
            client.reload()
        assert client.act(OBS).tolist() == answers[1]


def test_what_is_wrong_is_told_in_one_line_on_ray(service: Service) -> None:
    for name, (code, path, body, headers) in REFUSED.items():
        status, answer = post(service, path, body, **headers)
        assert status == code, (name, answer)
        one_line(answer)
    assert post(service, "/act", GOOD)[0] == 200


def test_counts_of_replicas_are_added_up(service: Service) -> None:
    with service.client() as client:
        text = client.metrics()
    assert "raynforce_serve_replicas 2\n" in text


def test_a_ray_that_serves_is_left_alone(service: Service, run: ServedRun) -> None:
    with pytest.raises(UsageError, match="serves something already"):
        serve(run.path / "checkpoints" / "best_000000000001", port=0)
    assert post(service, "/act", GOOD)[0] == 200


@pytest.mark.slow
def test_hostile_requests_on_ray(service: Service, run: ServedRun) -> None:
    ask_hostile(service, 300, load(run.path / "checkpoints" / "best_000000000001"))
