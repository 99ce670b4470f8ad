"""A Ray that lacks a private part that is used: something else is done instead, or one line says what to do."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray._private.node
import ray._private.ray_constants
import ray._private.ray_logging
import ray._private.services
import ray._private.utils
import ray._private.worker
import ray._raylet
import ray.core.generated.node_manager_pb2
import ray.job_config

from raynforce.errors import UsageError
from raynforce.runtimes.ray import private
from raynforce.runtimes.ray.private import Raylet


@pytest.mark.parametrize("name", ["Config", "AuthenticationTokenLoader"])
def test_without_a_way_to_read_variables_anew_nothing_happens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray._raylet, name)
    private.reread_environment()


def test_sigterm_is_kept_from_ray_where_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ray._private.utils.set_sigterm_handler
    with private.own_sigterm():
        assert ray._private.utils.set_sigterm_handler is not before
    assert ray._private.utils.set_sigterm_handler is before
    monkeypatch.delattr(ray._private.utils, "set_sigterm_handler")
    with private.own_sigterm():
        pass
    assert not hasattr(ray._private.utils, "set_sigterm_handler")


def test_a_job_without_a_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.job(Path("/here"))._py_driver_sys_path == ["/here"]
    monkeypatch.setattr(ray.job_config, "JobConfig", lambda: "plain")
    assert private.job(Path("/here")) == "plain"


def test_the_address_of_a_local_ray_is_in_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray._private.services, "canonicalize_bootstrap_address")
    monkeypatch.setattr(private, "CURRENT", tmp_path / "cluster")
    assert private.local_address() == ""
    (tmp_path / "cluster").write_text("127.0.0.1:6379\n")
    assert private.local_address() == "127.0.0.1:6379"


def test_a_cluster_that_cannot_be_asked_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray._raylet, "GcsClient")
    with pytest.raises(UsageError, match=r"^Ray \S+ cannot be asked what runs at 10.0.0.1:1: use Ray") as error:
        private.ask("10.0.0.1:1")
    assert "\n" not in str(error.value)


def test_processes_that_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [SimpleNamespace(process=SimpleNamespace(pid=7))]
    assert private.started_processes(SimpleNamespace(all_processes={"raylet": infos})) == [7]
    assert private.started_processes(SimpleNamespace()) == []
    monkeypatch.delattr(ray._private.worker, "_global_node")
    assert private.started_processes() == []
    private.end_node(SimpleNamespace())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (ray._private.node, "Node"),
        (ray._private.utils, "get_dashboard_dependency_error"),
        (ray._private.ray_constants, "ENABLE_RAY_CLUSTER"),
        (ray, "__version__"),
    ],
)
def test_a_ray_of_which_nothing_can_be_left_out_starts_in_full(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("shutdown"))
    if name == "__version__":
        monkeypatch.setattr(ray, name, "9.9.9")
    else:
        monkeypatch.delattr(module, name)
    before = [dict(vars(part)) for part in (ray._private.node, ray._private.utils, ray._private.ray_constants)]
    with ExitStack() as stack, private.few_processes(stack, ended.append):
        now = [dict(vars(part)) for part in (ray._private.node, ray._private.utils, ray._private.ray_constants)]
        assert now == before
    assert ended == ["shutdown"]


def test_parts_are_left_out_for_as_long_as_ray_starts() -> None:
    before = ray._private.node.Node
    with ExitStack() as stack, private.few_processes(stack, lambda node: None):
        assert issubclass(ray._private.node.Node, before)
        assert ray._private.node.Node is not before
        assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is False
    assert ray._private.node.Node is before


def test_an_actor_without_an_id_has_no_name_of_its_own() -> None:
    assert private.actor_id(SimpleNamespace(_actor_id=b"\x01")) == "01"
    assert private.actor_id(SimpleNamespace()) == ""


def test_room_without_a_node_to_prefer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = private.ray_module("util.placement_group")
    monkeypatch.setattr(module, "placement_group", lambda *args, strategy: asked.append(args))
    private.room_near({"CPU": 1}, "node")
    assert asked == [([{"CPU": 1}],)]


@pytest.mark.parametrize("name", ["GetNodeStatsRequest", "PrestartWorkersRequest"])
def test_a_raylet_that_cannot_be_asked_costs_a_figure_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray.core.generated.node_manager_pb2, name)
    raylet = Raylet()
    assert raylet.used_bytes() is None
    raylet.start_worker()
    raylet.close()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (ray._private.worker, "print_to_stdstream"),
        (ray._private.ray_logging, "global_worker_stdstream_dispatcher"),
    ],
)
def test_output_that_cannot_be_taken_is_left_to_ray(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = ray._private.ray_logging.global_worker_stdstream_dispatcher
    handlers = list(dispatcher.handlers)
    monkeypatch.delattr(module, name)
    with ExitStack() as stack:
        private.redirect_output(stack, lambda name, line: None)
        assert dispatcher.handlers == handlers
