"""The policy of all environments and their hosts by themselves: in one process, and over a socket."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.algos.ppo import PPO
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs, as_lane, probe
from raynforce.errors import EnvError, RaynforceError
from raynforce.experience.advantages import final_values
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.protocol.channel import connect
from raynforce.protocol.handshake import Hello
from raynforce.protocol.host_session import ResetRequest, StepRequest
from raynforce.protocol.spaces import Spaces
from raynforce.roles import one_core
from raynforce.roles.env_host import EnvHost
from raynforce.roles.learned import ServeOutcome
from raynforce.roles.learner import Learner
from raynforce.roles.policy_server import PolicyServer
from raynforce.topologies.declaration import env_args

T = 5
PATIENCE = 20.0  # seconds, for what takes a moment


class Stage:
    """A policy and its hosts; those over a socket serve in threads."""

    def __init__(
        self,
        channel: Any = "direct",
        *,
        env: str = "central_envs:Steps",
        hosts: int = 2,
        envs: int = 3,
        one_core: bool = False,
        **more: Any,
    ) -> None:
        layers = {"env": env, "preset": "none", "topology": "central"}
        sampling = {"samplers": hosts, "envs": envs, "fragment": T, **more.pop("sampling", {})}
        self.config: Config = resolve(layers, {"sampling": sampling}, more)[0]
        spec = as_lane(probe(env, self.config.env_args), ids=self.config.sampling.agent_ids)
        self.acting = PPO(self.config, spec).acting()
        self.first = Learner(self.config, spec).publish()
        self.policy = PolicyServer(self.config, self.acting, channel)
        parallel = "no" if channel == "direct" else "threads"
        self.args = replace(env_args(self.config, envs), parallel=parallel)  # type: ignore[arg-type]
        hang = self.config.faults.sample_seconds
        self.hosts = [EnvHost(self.args, index, hang, one_core=one_core) for index in range(hosts)]
        self.ended: list[Any] = []
        self.threads: list[threading.Thread] = []
        self.has_processes = channel != "direct"

    def serve(self, *indices: int) -> None:
        """Let these hosts begin, or all."""
        for index in indices or range(len(self.hosts)):
            if self.has_processes:
                thread = threading.Thread(target=self._serve, args=(self.hosts[index],), daemon=True)
                thread.start()
                self.threads.append(thread)
            else:
                assert self.hosts[index].serve(self.policy.address()).outcome is ServeOutcome.JOINED

    def _serve(self, host: EnvHost) -> None:
        try:
            self.ended.append(host.serve(self.policy.address()))
        except RaynforceError as error:
            self.ended.append(error)

    def version(self, number: int = 0) -> PolicyVersion:
        return replace(self.first, number=number)

    def produce(self, number: int = 0) -> Fragment:
        return self.told(number)[0]

    def told(self, number: int = 0) -> tuple[Fragment, Receipt]:
        """A fragment and its receipt, with the faults of all that was told before it, within some patience."""
        version, faults, silent = self.version(number), [], []
        deadline = time.monotonic() + PATIENCE
        while True:
            fragment, receipt = self.policy.produce(version)
            faults += receipt.faults
            silent += receipt.silent
            if fragment is not None:
                return fragment, receipt._replace(faults=faults, silent=silent)
            assert self.has_processes
            assert time.monotonic() < deadline, "no fragment comes"

    def close(self) -> None:
        self.policy.close()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for host in self.hosts:
            host.close()


@contextlib.contextmanager
def stage(channel: Any = "direct", *, serve: bool = True, **more: Any) -> Iterator[Stage]:
    made = Stage(channel, **more)
    try:
        if serve:
            made.serve()
        yield made
    finally:
        made.close()


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


Row = tuple[int, int, bool]


def follow(fragments: Sequence[Fragment]) -> dict[int, list[Row]]:
    """Of each lane: episode, step, and whether it ended there. Each step follows the one before, and pays as it should.

    So does the observation after it, as learners find it.
    """
    stories: dict[int, list[Row]] = {}
    for fragment in fragments:
        ends = fragment["terminated"] | fragment["truncated"]  # [T, B]
        told = np.zeros_like(ends)  # where an episode ended; others go on in the next fragment
        told.reshape(-1)[fragment["final/index"]] = True
        value = fragment["obs"][..., 1]  # [T+1, B] steps so far
        after = np.where(ends, final_values(fragment, value, fragment["final/obs"][:, 1]), value[1:])
        assert fragment["valid"].any(axis=0).all()
        for b, lane in enumerate(fragment["lane"].tolist()):
            steps = int(fragment["valid"][:, b].sum())
            assert fragment["valid"][:steps, b].all()
            assert (after[:steps, b] == value[:steps, b] + 1).all()
            story = stories.setdefault(lane, [])
            for t in range(steps):
                number, at = fragment["obs"][t, b].astype(int).tolist()
                assert fragment["reward"][t, b] == at + 1
                if story and not (story[-1][0] == number and story[-1][1] + 1 == at):
                    assert at == 0
                    assert story[-1][0] != number
                    assert story[-1][2] or t == 0, "one that is cut between two segments ends with the first"
                story.append((number, at, bool(told[t, b])))
    return stories


def equal(a: Fragment, b: Fragment) -> bool:
    return a.columns.keys() == b.columns.keys() and all(np.array_equal(a[k], b[k]) for k in a.columns)


# -- in one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [{}, {"batch_min": 4}, {"batch_max": 2}])
def test_in_one_process_it_is_the_same_every_time(batch: dict[str, int]) -> None:
    runs: list[list[Fragment]] = []
    for _ in range(2):
        with stage(env="CartPole-v1", central=batch, seed=3) as s:
            runs.append([s.produce(number // 2) for number in range(8)])
    assert all(equal(a, b) for a, b in zip(*runs, strict=True))
    assert [f.sequence for f in runs[0]] == list(range(8))


def test_trajectories_are_whole_and_in_order_in_one_process() -> None:
    with stage() as s:
        fragments = [s.produce(number // 3) for number in range(20)]
    stories = follow(fragments)
    assert sorted(stories) == list(range(6))
    assert all(row[2] == (row[1] == 6) for story in stories.values() for row in story), "an episode has 7 steps"
    assert sum(f.steps for f in fragments) == sum(map(len, stories.values()))
    lengths = np.concatenate([f["episode/length"] for f in fragments])
    assert set(lengths.tolist()) == {7}
    assert set(np.concatenate([f["episode/return"] for f in fragments]).tolist()) == {28.0}
    assert len(lengths) == sum(row[2] for story in stories.values() for row in story)


def test_each_step_knows_its_version() -> None:
    with stage() as s:
        fragments = [s.produce(number) for number in range(12)]
    for number, fragment in enumerate(fragments):
        version = fragment["version"]
        assert fragment.version == version.min()
        assert version.max() <= number
        assert (np.diff(version, axis=0) >= 0).all(), "later steps are never chosen by an older one"


def test_without_hosts_it_says_so() -> None:
    with stage(serve=False) as s, pytest.raises(RaynforceError, match="no env host is there"):
        s.produce()


def test_a_host_that_does_not_belong_here_is_refused() -> None:
    with stage(hosts=1) as s:
        args = EnvArgs("central_envs:Steps", 3, 0)
        for host in (
            EnvHost(args, 1),
            EnvHost(replace(args, num_envs=4), 0),
            EnvHost(replace(args, env="CartPole-v1")),
        ):
            with pytest.raises(RaynforceError, match="refuses this host") as told:
                host.serve(s.policy.address())
            assert "\n" not in str(told.value)
            host.close()
        s.produce()


# -- over a socket ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", ["unix", "tcp"])
def test_trajectories_are_whole_and_in_order_over_a_socket(channel: str) -> None:
    with stage(channel, env_args={"slow": 4, "seconds": 0.0005}) as s:
        fragments, receipts = zip(*(s.told(number // 3) for number in range(25)), strict=True)
    stories = follow(fragments)
    assert len(stories) >= 5
    assert [f.sequence for f in fragments] == list(range(25))
    for fragment, receipt in zip(fragments, receipts, strict=True):
        assert fragment.steps == receipt.record.steps >= 3 * T
        assert receipt.faults == []
        assert min(receipt.envs.values()) >= 0
        assert receipt.size == sum(column.nbytes for column in fragment.columns.values())


@pytest.mark.parametrize(("least", "most"), [(1, 2), (4, 6), (6, 6)])
def test_batches_are_as_large_as_they_should_be(least: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    central = {"batch_min": least, "batch_max": most, "batch_wait": 1.0}
    with stage("unix", serve=False, central=central) as s:
        sizes: list[int] = []
        take = s.policy._former.next_batch

        def taking() -> Any:
            lanes, since = take()
            assert len(set(lanes.tolist())) == len(lanes)
            sizes.append(len(lanes))
            return lanes, since

        monkeypatch.setattr(s.policy._former, "next_batch", taking)
        s.serve()
        until(lambda: len(s.policy._former) == 6)  # all have come
        for number in range(6):
            s.produce(number)
        done = list(sizes)
    assert least <= min(done) <= max(done) <= most


def test_nobody_waits_for_ever_for_a_batch_to_fill() -> None:
    """Four are wanted at once, and one of the four environments is at a step that takes very long."""
    args = {"slow": 0, "seconds": 0.001, "times": 8000.0}
    central = {"batch_min": 4, "batch_wait": 0.01}
    with stage("unix", hosts=2, envs=2, env_args=args, central=central) as s:
        began = time.monotonic()
        fragments = [s.produce(number) for number in range(3)]
        assert time.monotonic() - began < 8.0
        assert 0 not in follow(fragments)


def test_one_slow_environment_does_not_hold_up_its_host() -> None:
    """One host, so that a fragment is as many steps as all of its lanes have in T."""
    args = {"slow": 1, "seconds": 0.001, "times": 3000.0}
    with stage("unix", hosts=1, envs=4, env_args=args) as s:
        began = time.monotonic()
        fragments = [s.produce(number) for number in range(6)]
        seconds = time.monotonic() - began
        waiting = s.policy._trajectories.steps
    assert seconds < 3.0, "as long as one of its steps"
    assert waiting <= 4 * T + 4 * T, "what is gathered does not pile up"
    follow(fragments)


def test_a_host_may_be_silent_for_as_long_as_a_step_may_take() -> None:
    """Where environments are stepped one after another, or keep Python's lock, nobody answers meanwhile."""
    for seconds in (0.1, 300.0):
        with stage(faults={"sample_seconds": seconds}) as s:
            s.produce()
            deadlines = s.policy._links[0].session.deadlines
            assert deadlines.silence_ms >= max(10_000, deadlines.step_ms)
            assert deadlines.step_ms > 1000 * seconds


# -- nobody asks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2])
def test_environments_wait_while_nobody_asks_for_fragments(hosts: int) -> None:
    with stage("unix", hosts=hosts) as s:
        fragments = [s.produce()]
        until(lambda: len(s.policy._former) == 3 * hosts)  # all have come to rest
        time.sleep(0.1)
        assert len(s.policy._former) == 3 * hosts
        made = s.policy._trajectories
        assert len(s.policy._done) == 1
        assert made.steps <= 2 * hosts * 3 * T
        fragments += [s.produce(number) for number in range(1, 12)]
    follow(fragments)


def test_they_go_on_as_soon_as_somebody_asks() -> None:
    with stage("unix") as s:
        s.produce()
        seconds = []
        for number in range(1, 9):
            until(lambda: len(s.policy._former) == 6 and s.policy._done)
            began = time.monotonic()
            s.produce(number)  # this is there
            until(lambda: s.policy._done)
            seconds.append(time.monotonic() - began)
    assert sorted(seconds)[4] < 0.1, "they were not left asleep"


def test_a_step_does_not_wait_for_others_until_it_is_too_old() -> None:
    """One environment is so slow that it would take many versions to fill its segment."""
    args = {"slow": 0, "seconds": 0.0005, "times": 20.0}
    with stage("unix", env_args=args, stream={"max_lag": 4}) as s:
        fragments = [s.produce(number) for number in range(150)]
    follow(fragments)
    lanes = [lane for f in fragments for lane in f["lane"].tolist()]
    assert lanes.count(0) > 3
    ages = [n - f["version"][f["valid"]].min() for n, f in enumerate(fragments)]
    assert max(ages) <= 4 + 4, "half of max_lag until it is sent, and what waits before it"


# -- hosts that go ------------------------------------------------------------------------------------------


def cuts(story: Sequence[Row]) -> int:
    """Episodes that ended before their time."""
    return sum(row[0] != after[0] and row[1] != 6 for row, after in pairwise(story))


@pytest.mark.parametrize("how", ["well", "suddenly"])
def test_a_host_that_hangs_up_and_comes_back(how: str) -> None:
    with stage("unix", env_args={"seconds": 0.0005}) as s:
        fragments = [s.produce(number) for number in range(4)]
        for _ in range(3):
            until(lambda: s.hosts[1]._link is not None)
            leave(s.hosts[1]._link, how)
            until(lambda: len(s.threads) - 1 == sum(t.is_alive() for t in s.threads))
            s.threads = [thread for thread in s.threads if thread.is_alive()]
            fragments += [s.produce(4) for _ in range(3)]  # of the other
            s.serve(1)
            fragments += [s.produce(5) for _ in range(10)]
    stories = follow(fragments)
    assert [cuts(stories[lane]) for lane in range(3)] == [0, 0, 0]
    assert all(cuts(stories[lane]) <= 3 for lane in range(3, 6))
    assert all(len({row[0] for row in stories[lane]}) > 3 for lane in range(3, 6)), "they take part again"


def leave(link: Any, how: str) -> None:
    """Have a host hang up the next time it looks around: a link belongs to the thread that serves."""

    def poll(now: float) -> list[Any]:
        if how == "well":
            link.close("a break")
        else:
            link.end("lost", "the cable")
        return []

    link.poll = poll


def test_a_host_that_comes_again_before_it_was_missed() -> None:
    """As one whose connection is dead, which nobody has noticed yet."""
    with stage("unix", env_args={"seconds": 0.0005}, serve=False) as s:
        s.serve(0)
        hello = Hello(3, Spaces.of(probe("central_envs:Steps")), capabilities=("timing",), host=1)
        fragments, silent = [s.produce(0)], []
        for number in range(1, 4):
            silent.append(connect(s.policy.address(), hello, seconds=PATIENCE))
            until(lambda: 1 in s.policy._links)
            fragments += [s.produce(number) for _ in range(3)]
        s.serve(1)
        fragments += [s.produce(4) for _ in range(15)]
        for link in silent:
            link.close()
    stories = follow(fragments)
    assert set(stories) == set(range(6))
    assert sum(map(cuts, stories.values())) == 0


def test_a_host_whose_environments_all_wait_for_an_action_comes_again() -> None:
    """Those that wait belong to a connection that is gone."""
    with stage("unix", serve=False) as s:
        hello = Hello(3, Spaces.of(probe("central_envs:Steps")), capabilities=("timing",), host=1)
        s.serve(0)
        s.produce()
        until(lambda: s.policy._done and s.policy._times.paused and len(s.policy._former) == 3)  # nobody asks
        one = connect(s.policy.address(), hello, seconds=PATIENCE)
        answer(one, ResetRequest)
        until(lambda: len(s.policy._former) == 6)
        two = connect(s.policy.address(), hello, seconds=PATIENCE)
        answer(two, ResetRequest)
        time.sleep(0.05)
        assert len(s.policy._former) == 6
        follow([s.produce(number) for number in range(4)])
        one.close()
        two.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is but one core")
def test_the_threads_of_a_host_are_kept_on_one_core_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FITS": 100.0, "FULL": 200.0, "WINDOW": 0.05}.items():
        monkeypatch.setattr(one_core, name, value)
    everywhere = os.sched_getaffinity(0)
    with stage("unix", one_core=True) as s:

        def cores(host: EnvHost) -> set[int]:
            assert host._lanes is not None
            return set.union(*(os.sched_getaffinity(thread) for thread in host._lanes.threads()))

        s.produce()
        until(lambda: all(len(cores(host)) == 1 for host in s.hosts))
        assert cores(s.hosts[0]) != cores(s.hosts[1])
        assert os.sched_getaffinity(0) == everywhere
        s.policy.close()
        until(lambda: all(cores(host) == everywhere for host in s.hosts))


def answer(link: Any, kind: type) -> None:
    """Answer the next request with what the slots have."""
    done = False

    def asked() -> bool:
        nonlocal done
        for event in link.receive(time.monotonic()):
            if isinstance(event, kind):
                assert isinstance(event, ResetRequest | StepRequest)
                link.send(link.session.results(event.envs, time.monotonic()))
                done = True
        return done

    until(asked)


def test_a_host_that_does_not_answer_is_told_of() -> None:
    with stage("unix", serve=False) as s:
        hello = Hello(3, Spaces.of(probe("central_envs:Steps")), capabilities=("timing",), host=1)
        mute = connect(s.policy.address(), hello, seconds=PATIENCE)
        until(lambda: 1 in s.policy._links)
        s.policy._links[1].session._due[:] = 0.0  # it should have reset them by now
        s.serve(0)
        found = []
        for number in range(100):
            found += s.told(number)[1].silent
            if found:
                break
            time.sleep(0.02)
        assert found == [1]
        assert 1 not in s.policy._links
        s.serve(1)
        stories = follow([s.produce(5) for _ in range(12)])
        assert set(stories) == set(range(6))
        mute.close()


def test_one_of_many_environments_of_a_host_is_overdue() -> None:
    """The others wait for an action meanwhile."""
    with stage("unix", serve=False) as s:
        s.serve(0)
        s.produce()
        hello = Hello(3, Spaces.of(probe("central_envs:Steps")), capabilities=("timing",), host=1)
        late = connect(s.policy.address(), hello, seconds=PATIENCE)
        answer(late, ResetRequest)
        s.produce(1)

        def asked() -> bool:
            return any(isinstance(event, StepRequest) for event in late.receive(time.monotonic()))

        until(asked)
        late.send(late.session.results(np.array([0, 1]), time.monotonic()))
        time.sleep(0.1)
        until(lambda: len(s.policy._former) >= 2)  # nobody asks
        s.policy._links[1].session._due[2] = 0.0
        until(lambda: 1 not in s.policy._links)
        assert {lane for number in range(2, 6) for lane in s.produce(number + 1)["lane"].tolist()} >= {0, 1, 2}
        late.close()


# -- environments that break --------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", ["direct", "unix"])
@pytest.mark.parametrize("what", ["raise", "nan"])
def test_an_environment_that_breaks(channel: str, what: str) -> None:
    """It is made anew; the step that broke it did not happen."""
    args = {"what": what, "lane": 4, "at": 17}
    with stage(channel, env_args=args) as s:
        fragments, receipts = zip(*(s.told(number) for number in range(30)), strict=True)
    stories = follow(fragments)
    faults = [fault for receipt in receipts for fault in receipt.faults]
    assert {fault["kind"] for fault in faults} == {"raised" if what == "raise" else "garbage"}
    assert {fault["lane"] for fault in faults} == {4}
    assert [cuts(stories[lane]) for lane in (0, 1, 2, 3, 5)] == [0] * 5
    told = cuts(stories[4])
    assert 1 <= told <= len(faults)
    assert stories[4][15][:2] == (stories[4][14][0], 1)
    assert stories[4][16][0] != stories[4][15][0], "the seventeenth step broke it"


def test_an_environment_that_breaks_in_a_reset_is_told_of_too() -> None:
    with stage("unix", env="central_envs:NoReset") as s:
        receipts = [s.told(number)[1] for number in range(20)]
    faults = [fault for receipt in receipts for fault in receipt.faults]
    assert faults
    assert all("no reset today" in fault["cause"] for fault in faults)


@pytest.mark.parametrize("channel", ["direct", "unix"])
def test_an_environment_that_breaks_for_good(channel: str) -> None:
    args = {"what": "raise", "lane": 2, "at": 1}
    with stage(channel, env_args=args) as s:
        if channel == "direct":
            with pytest.raises(EnvError, match="no licence"):
                [s.produce(number) for number in range(100)]
            return
        deadline, fragments = time.monotonic() + PATIENCE, []
        while not s.ended and time.monotonic() < deadline:
            fragments.append(s.produce(1))
        (error,) = s.ended
        assert isinstance(error, EnvError)
        assert "no licence" in str(error)


@pytest.mark.parametrize("count", [1, 4])
def test_one_that_hangs_is_replaced_and_the_others_go_on(count: int, tmp_path: Path) -> None:
    args = {"what": "sleep", "lane": 1, "at": 3, "once": str(tmp_path / "once")}
    with stage("unix", hosts=1, envs=count + 1, env_args=args, faults={"sample_seconds": 0.3}) as s:
        fragments, faults = [], []
        deadline = time.monotonic() + PATIENCE
        while not faults and time.monotonic() < deadline:
            fragment, receipt = s.told(0)
            fragments.append(fragment)
            faults += receipt.faults
        fragments += [s.produce(0) for _ in range(3)]
        stories = follow(fragments)
    assert {fault["kind"] for fault in faults} == {"hung"}
    assert cuts(stories[1]) == 1
    assert cuts(stories[0]) == 0
