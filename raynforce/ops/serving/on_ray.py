"""The application on Ray Serve: a keeper of the policies, and replicas that answer.

    client ──▶ Serve's proxy ──▶ PolicyService (replicas)  ──── next(seen) ───▶ PolicyKeeper ──▶ run directory
                                  the ASGI application     ◀── new policies ──   reload, rollback, follow

`build` is what a Serve config file names as its `import_path`: the token comes from a file or a variable.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from raynforce.errors import RaynforceError, UsageError, reason, summary
from raynforce.ops.serving.app import PolicyApp, Rules
from raynforce.ops.serving.keeping import LOOK, Keeper, Served
from raynforce.ops.serving.local import gauges
from raynforce.ops.serving.tokens import token_from_environment
from raynforce.runtimes.ray.private import ray_module, redirect_output
from raynforce.runtimes.ray.watching import Tail, Voices

NAME = "raynforce"
WAITING = 1.0  # seconds that a replica's question for news is kept
AWAY = 5.0  # seconds after which a replica that has not asked is not waited for
ONGOING = 10_000  # requests at a time: the application has its own limits
STARTING = 180.0  # seconds for the first answer


class PolicyKeeper:
    """Reads the runs; replicas ask it for news, and tell it what they have counted."""

    def __init__(self, run: str, which: str, canary: str | None, follow: bool, paths: Sequence[str] = ()) -> None:
        _find_modules(paths)
        self._keeper = Keeper(run, which, canary, say=lambda line: print(line, flush=True))
        self._follow = follow
        self._news = asyncio.Condition()
        self._changing = asyncio.Lock()
        self._counts: dict[str, Mapping[str, float]] = {}
        self._seen: dict[str, Mapping[str, str]] = {}
        self._asked: dict[str, float] = {}
        self._following: asyncio.Task[None] | None = None

    async def next(self, replica: str, seen: Mapping[str, str], counts: Mapping[str, float]) -> list[Served]:
        """The policies that a replica does not have yet, by their hashes; nothing if there is none for a while."""
        self._counts[replica], self._seen[replica], self._asked[replica] = counts, dict(seen), time.monotonic()
        if self._follow and self._following is None:
            self._following = asyncio.create_task(self._followed())
        async with self._news:
            self._news.notify_all()  # whoever waits for all replicas to have it
            until = time.monotonic() + WAITING
            while not (new := self._new_to(seen)) and (left := until - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        return new

    def _new_to(self, seen: Mapping[str, str]) -> list[Served]:
        return [served for name, served in self._keeper.served.items() if seen.get(name) != served.sha256]

    async def change(self, what: str, name: str = "") -> list[Served] | str:
        """`reload` or `rollback`, until all replicas have it; or why not."""
        try:
            async with self._changing:
                if what == "reload":
                    taken = await asyncio.to_thread(self._keeper.reload)
                else:
                    taken = [await asyncio.to_thread(self._keeper.rollback, name)]
        except RaynforceError as error:
            return reason(error)
        await self._everywhere()
        return taken

    async def _everywhere(self) -> None:
        until = time.monotonic() + AWAY
        async with self._news:
            self._news.notify_all()
            while self._behind() and (left := until - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)

    def _behind(self) -> list[str]:
        now = time.monotonic()
        return [one for one, seen in self._seen.items() if now - self._asked[one] < AWAY and self._new_to(seen)]

    async def _followed(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            async with self._changing:
                taken = await asyncio.to_thread(self._keeper.follow)
            if taken:
                async with self._news:
                    self._news.notify_all()

    async def counted(self) -> tuple[list[Mapping[str, float]], dict[str, float]]:
        now = time.monotonic()
        replicas = sum(now - asked < AWAY for asked in self._asked.values())
        return list(self._counts.values()), gauges(self._keeper, replicas)

    async def about(self) -> list[Served]:
        return list(self._keeper.served.values())


class PolicyService:
    """A replica: the application, and a task that asks the keeper for news."""

    def __init__(self, keeper: Any, rules: Rules, paths: Sequence[str] = ()) -> None:
        _find_modules(paths)
        if not rules.token:
            rules = replace(rules, token=token_from_environment() or "")
            if not rules.token:
                raise UsageError("there is no token: set RAYNFORCE_SERVE_TOKEN_FILE or RAYNFORCE_SERVE_TOKEN")
        self._keeper = keeper
        self._replica = os.urandom(8).hex()
        self._policies = PolicyApp(rules, self, say=lambda line: print(line, flush=True))
        self._task: asyncio.Task[None] | None = None
        self._fresh = asyncio.Condition()

    async def __serve_build_asgi_app__(self) -> PolicyApp:
        while not await self._asked():
            pass
        self._task = asyncio.create_task(self._asking())
        return self._policies

    async def _asked(self) -> bool:
        seen = {served.name: served.sha256 for served in self._policies.served}
        new = await self._keeper.next.remote(self._replica, seen, self._policies.metrics.state())
        for served in new:
            await self._policies.take(served)
        return bool(new)

    async def _asking(self) -> None:
        while True:
            try:
                await self._asked()
            except Exception as error:  # the keeper is being restarted: what is served stays
                print(f"no news of policies: {summary(error)}", flush=True)
                await asyncio.sleep(WAITING)

    async def reload(self) -> list[Served]:
        return await self._change("reload")

    async def rollback(self, name: str) -> Served:
        return (await self._change("rollback", name))[0]

    async def _change(self, *what: str) -> list[Served]:
        taken = await self._keeper.change.remote(*what)
        if isinstance(taken, str):
            raise UsageError(taken)
        return list(taken)

    async def counted(self) -> tuple[Iterable[Mapping[str, float]], Mapping[str, float]]:
        counts, found = await self._keeper.counted.remote()
        return counts, found


def _find_modules(paths: Sequence[str]) -> None:
    """Modules of the user's are found where the driver finds them."""
    sys.path.extend(path for path in paths if path not in sys.path)


def application(
    run: str,
    rules: Rules,
    *,
    which: str = "best",
    canary: str | None = None,
    follow: bool = False,
    replicas: int = 1,
    cpus: float = 1.0,
    node: Mapping[str, float] | None = None,
    paths: Sequence[str] = (),
) -> Any:
    """A Serve application; `node` are the resources of where the runs can be read, if that is not everywhere."""
    serve = ray_module("serve")
    ending = {"graceful_shutdown_wait_loop_s": 0.1, "graceful_shutdown_timeout_s": 10.0}
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    shared: dict[str, Any] = {"max_ongoing_requests": ONGOING, "logging_config": quiet, **ending}
    asks = {"num_cpus": 0, **({"resources": dict(node)} if node else {})}
    keeper = serve.deployment(PolicyKeeper, name="PolicyKeeper", ray_actor_options=asks, **shared)
    made = serve.ingress()(PolicyService)
    service = serve.deployment(
        made, name="PolicyService", num_replicas=replicas, ray_actor_options={"num_cpus": cpus}, **shared
    )
    return service.bind(keeper.bind(run, which, canary, follow, list(paths)), rules, list(paths))


def build(args: dict[str, str]) -> Any:
    """The application of a Serve config: `import_path: raynforce.ops.serving.on_ray:build`.

    Its `args` are `run`, and as in `raynforce serve`: `checkpoint`, `follow`, `sample`, `seed`, `rate`, `canary` (a
    run) and `share`. The token is in RAYNFORCE_SERVE_TOKEN_FILE.
    """
    given = dict(args)
    run = given.pop("run", None) or os.environ.get("RAYNFORCE_RUN")
    if not run:
        raise UsageError("there is no run to serve: give `run` in args, or set RAYNFORCE_RUN")
    known = ("checkpoint", "follow", "sample", "seed", "rate", "canary", "share")
    if unknown := sorted(set(given) - set(known)):
        raise UsageError(f"unknown argument {unknown[0]!r}: known are run, {', '.join(known)}")
    seed, rate = given.get("seed"), given.get("rate")
    canary = given.get("canary")
    rules = Rules(
        token="",
        greedy=not _true(given.get("sample")),
        seed=None if seed is None else int(seed),
        share=float(given.get("share", 0.1)) if canary else 0.0,
        rate=None if rate is None else float(rate),
        hosts=("*",),  # Kubernetes has names of its own for it; the token is explicit
    )
    return application(
        run, rules, which=given.get("checkpoint", "best"), canary=canary, follow=_true(given.get("follow"))
    )


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


class RayServer:
    """Serves on the Ray that this process starts, joins or uses, until it is closed."""

    def __init__(
        self,
        run: str,
        rules: Rules,
        *,
        host: str,
        port: int,
        replicas: int,
        address: str | None,
        say: Callable[[str], None],
        **how: Any,
    ) -> None:
        from raynforce.config import Config, RayConfig, SamplingConfig
        from raynforce.runtimes.ray.connecting import connect

        # A sampler for each replica: that many CPUs, and one more.
        sampling = SamplingConfig(samplers=replicas, envs=1, fragment=1)
        config = Config(env="CartPole-v1", runtime="ray", ray=RayConfig(address=address), sampling=sampling)
        self._cluster = connect(config, say)
        self._serving = False
        self._hearing = ExitStack()
        try:
            self._hear(say)
            self._start(run, rules, host, port, replicas, say, how)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        run: str,
        rules: Rules,
        host: str,
        port: int,
        replicas: int,
        say: Callable[[str], None],
        how: Mapping[str, Any],
    ) -> None:
        import logging

        ray = ray_module()
        try:
            serve = ray_module("serve")
        except ImportError:
            raise UsageError('this needs Ray Serve: pip install "raynforce[serve]", or add --local') from None
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if _serves_already():
            fix = "end it with `serve shutdown`, or add --local"
            raise UsageError(f"the cluster at {self._cluster.address} serves something already: {fix}")
        say("starting Ray Serve")
        self._serving = True
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        paths = [os.path.abspath(path) for path in sys.path]
        made = application(run, rules, replicas=replicas, node=here, paths=paths, **how)
        try:
            serve.run(made, name=NAME, route_prefix="/")
        except Exception as error:
            raise RaynforceError(f"Ray Serve did not start the policy: {summary(error)}") from error
        self._keeper = serve.get_deployment_handle("PolicyKeeper", NAME)

    def _hear(self, say: Callable[[str], None]) -> None:
        """Pass on what the keeper says; Serve's own messages are in its logs."""

        def pass_on(line: str) -> None:
            _, name, text = line.partition("PolicyKeeper: ")
            if name:
                say(text)

        voices = Voices(pass_on)
        redirect_output(self._hearing, voices.hear)
        if self._cluster.folder is not None:
            Tail(self._cluster.folder, voices).follow(self._hearing)

    @property
    def served(self) -> list[Served]:
        return list(self._keeper.about.remote().result(timeout_s=STARTING))

    def reload_now(self) -> list[Served]:
        return self._change("reload")

    def rollback_now(self, name: str) -> Served:
        return self._change("rollback", name)[0]

    def _change(self, *what: str) -> list[Served]:
        taken = self._keeper.change.remote(*what).result(timeout_s=STARTING)
        if isinstance(taken, str):
            raise UsageError(taken)
        return list(taken)

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        """Answer what is in flight, then end Serve, and the Ray that was started for it."""
        try:
            if self._serving:
                ray_module("serve").shutdown()
        finally:
            self._serving = False
            self._cluster.close()
            self._hearing.close()


def _serves_already() -> bool:
    try:
        return bool(ray_module("serve.context")._get_global_client(raise_if_no_controller_running=False))
    except (ImportError, AttributeError, TypeError):
        return False
