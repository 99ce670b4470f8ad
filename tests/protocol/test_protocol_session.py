"""Both state machines: handshake, partial results, retries, faults, closing and silence, each with known answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from protocol_worlds import CART, ROBOT, begun, met, tell

from raynforce.errors import UsageError
from raynforce.protocol.codec import RESET, TERMINATED, TRUNCATED
from raynforce.protocol.frame import Message, ProtocolError, Type
from raynforce.protocol.handshake import Deadlines, Hello, Offer, Welcome, signed
from raynforce.protocol.host_session import HostSession, Rejected, RestoreRequest, SnapshotRequest, StepRequest
from raynforce.protocol.policy_session import Broken, Joined, Overdue, PolicySession, Results, Snapshots
from raynforce.protocol.session import Closing, Ended, Note, Outcome
from raynforce.protocol.spaces import Spaces

ALL = np.arange(3)


def one(outcome: Outcome) -> Any:
    """The one event of an outcome."""
    (event,) = outcome.events
    return event


def ids(*envs: int) -> np.ndarray:
    return np.array(envs)


def stepped(host: HostSession, policy: PolicySession, *envs: int) -> Message:
    """A STEP that the host has taken."""
    message = policy.step(ids(*envs), np.zeros(len(envs)), 0.0)
    assert one(host.take(message.to_bytes(), 0.0)).envs.tolist() == list(envs)
    return message


# The handshake


def test_a_host_is_taken_in() -> None:
    hello = Hello(3, ROBOT, ("next_step", "same_step"), ("episodes", "of_later"), "sim", "2.1", pid=99)
    host = HostSession(hello, 0.0)
    limits = Deadlines(step_ms=123)
    offer = Offer(
        7,
        ROBOT,
        lambda n: np.arange(n) + 10,
        autoreset=("same_step",),
        deadlines=limits,
        config={"a": 1},
        env_config=[{}] * 3,
    )
    policy = PolicySession(offer, 0.0)
    outcome = policy.take(host.start().to_bytes(), 0.0)
    joined = one(outcome)
    assert isinstance(joined, Joined)
    assert joined.hello == hello
    welcome = one(tell(host, outcome))
    assert isinstance(welcome, Welcome)
    assert (welcome.session, welcome.minor, welcome.autoreset) == (7, 0, "same_step")
    assert welcome.seeds.tolist() == [10, 11, 12]
    assert (welcome.capabilities, welcome.config, len(welcome.env_config)) == (("episodes",), {"a": 1}, 3)
    assert host.deadlines == limits
    assert welcome.spec_hash == ROBOT.digest()


def refused(hello: Hello, offer: Offer) -> Rejected:
    host, policy = HostSession(hello, 0.0), PolicySession(offer, 0.0)
    outcome = policy.take(host.start().to_bytes(), 0.0)
    assert one(outcome).code == policy.refused.most_common()[0][0]
    told = one(tell(host, outcome))
    assert isinstance(told, Rejected)
    assert host.ended is not None
    return told


def test_a_host_with_other_spaces_is_told_the_difference() -> None:
    other = Spaces((dataclasses.replace(CART.obs[0], shape=(5,)),), CART.action)
    told = refused(Hello(3, other), Offer(7, CART))
    assert (told.code, told.text) == ("spaces", "obs.shape is [5] at the host; expected [4]")
    assert told.diff == [{"field": "obs.shape", "host": [5], "policy": [4]}]


@pytest.mark.parametrize(
    ("hello", "offer", "code"),
    [
        (Hello(3, CART, minors=(1, 4)), Offer(7), "version"),
        (Hello(3, CART, ("explicit",)), Offer(7, autoreset=("same_step",)), "autoreset"),
        (Hello(3, CART), Offer(7, most_envs=2), "env"),
        (Hello(3, CART), Offer(7, most_bytes=100), "capacity"),
        (Hello(3, CART), Offer(7, env_config=[{}, {}]), "capacity"),
        (Hello(3, CART), Offer(7, token=b"secret", launch="a1"), "auth"),
        (signed(Hello(3, CART), b"guess", "a1"), Offer(7, token=b"secret", launch="a1"), "auth"),
        (signed(Hello(3, CART), b"secret", "a0"), Offer(7, token=b"secret", launch="a1"), "auth"),
    ],
)
def test_a_host_that_does_not_fit_is_refused(hello: Hello, offer: Offer, code: str) -> None:
    assert refused(hello, offer).code == code


def test_a_host_that_knows_the_token_is_taken_in() -> None:
    host = HostSession(signed(Hello(3, CART), b"secret", "a1"), 0.0)
    policy = PolicySession(Offer(7, token=b"secret", launch="a1"), 0.0)
    assert isinstance(one(policy.take(host.start().to_bytes(), 0.0)), Joined)


def test_another_major_version_is_told_ours() -> None:
    data = bytearray(Hello(3, CART).message().to_bytes())
    data[4] = 2
    outcome = PolicySession(Offer(7), 0.0).take(bytes(data), 0.0)
    assert one(outcome) == Ended("version", "major version 2; this side speaks 1")
    assert outcome.send[0].type == Type.REJECT


def test_a_welcome_that_was_not_asked_for_is_refused() -> None:
    for change in (
        {"autoreset": "explicit"},
        {"capabilities": ("episodes",)},
        {"spec_hash": "00"},
        {"session": 0},
        {"minor": 3},
    ):
        host = HostSession(Hello(3, CART), 0.0)
        welcome = dataclasses.replace(Offer(7).answer(host.hello), **change)  # type: ignore[arg-type]
        outcome = host.take(welcome.message().to_bytes(), 0.0)
        assert isinstance(one(outcome), Ended)
        assert outcome.send[0].type == Type.ERROR


def test_unknown_keys_are_of_a_later_version() -> None:
    message = Hello(3, CART).message()
    message = message._replace(meta={**message.meta, "colour": "red"})
    assert isinstance(one(PolicySession(Offer(7), 0.0).take(message.to_bytes(), 0.0)), Joined)


# Steps and their results


def test_whoever_is_ready_is_handed_over() -> None:
    host, policy = begun()
    stepped(host, policy, 0, 1)
    stepped(host, policy, 2)
    host.slots.obs["obs"][:] = [[0] * 4, [1] * 4, [2] * 4]
    first = one(policy.take(host.results(ids(2, 0), 0.0).to_bytes(), 0.0))  # of two requests, in one message
    assert (first.envs.tolist(), first.obs["obs"][:, 0].tolist()) == ([2, 0], [2, 0])
    stepped(host, policy, 2)
    assert one(policy.take(host.results(ids(1, 2), 0.0).to_bytes(), 0.0)).envs.tolist() == [1, 2]
    assert not host.refused
    assert not policy.refused


def test_seeds_of_the_welcome_are_for_the_first_episodes() -> None:
    host, policy = met(offer={"seeds": lambda n: np.arange(n) + 10})
    first = one(host.take(policy.reset(ids(1), 0.0).to_bytes(), 0.0))
    assert (first.envs.tolist(), first.seeds.tolist()) == ([1], [11])
    policy.take(host.results(ids(1), 0.0).to_bytes(), 0.0)
    new, again = host.take(policy.reset(ids(2, 1, 0), 0.0).to_bytes(), 0.0).events
    assert (new.envs.tolist(), new.seeds.tolist()) == ([2, 0], [12, 10])
    assert (again.envs.tolist(), again.seeds) == ([1], None)
    policy.take(host.results(ALL, 0.0).to_bytes(), 0.0)
    given = one(host.take(policy.reset(ids(1, 0), 0.0, np.array([5, 2**64 - 1], np.uint64)).to_bytes(), 0.0))
    assert given.seeds.tolist() == [5, 2**64 - 1]


def test_actions_arrive_as_they_were_sent() -> None:
    host, policy = begun(ROBOT)
    event = one(host.take(policy.step(ids(2, 0), np.array([[0.5, 2], [-1, 3]]), 0.0).to_bytes(), 0.0))
    assert isinstance(event, StepRequest)
    assert (event.actions.dtype, event.actions.tolist()) == (np.float32, [[0.5, 2], [-1, 3]])


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "explicit"])
def test_where_an_episode_ends(autoreset: str) -> None:
    host, policy = begun(autoreset=autoreset, capabilities=("episodes",))
    stepped(host, policy, 0, 1)
    host.slots.status[:2] = TERMINATED, TRUNCATED
    host.slots.episode_return[:2], host.slots.episode_length[:2] = (3.5, 4.5), (7, 8)
    event = one(policy.take(host.results(ids(1, 0), 0.0).to_bytes(), 0.0))
    assert (event.terminated.tolist(), event.truncated.tolist()) == ([False, True], [True, False])
    assert (event.ended.tolist(), event.episode_return.tolist(), event.episode_length.tolist()) == (
        [0, 1],
        [4.5, 3.5],
        [8, 7],
    )
    assert list(event.final_obs) == (["obs"] if autoreset == "same_step" else [])
    if autoreset == "explicit":
        with pytest.raises(UsageError, match="STEP: env 0 must be reset first"):
            policy.step(ids(0), np.zeros(1), 0.0)
        host.take(policy.reset(ids(0), 0.0).to_bytes(), 0.0)
    else:
        stepped(host, policy, 0)
    event = one(policy.take(host.results(ids(0), 0.0).to_bytes(), 0.0))
    assert event.valid.tolist() == [autoreset == "same_step"]


@pytest.mark.parametrize("capabilities", [(), ("episodes",), ("timing",), ("timing", "episodes")])
def test_rows_have_what_was_agreed_upon(capabilities: tuple[str, ...]) -> None:
    host, policy = begun(capabilities=capabilities)
    stepped(host, policy, 0, 1, 2)
    host.slots.obs["obs"][:, 0] = 7, 8, 9
    host.slots.status[1], host.slots.seconds[:], host.slots.episode_return[1] = TERMINATED, (0.5, 0.25, 2), 5
    message = host.results(ids(2, 1), 0.0)
    assert message.flags == ("episodes" in capabilities) + 2 * ("timing" in capabilities)
    event = one(policy.take(message.to_bytes(), 0.0))
    assert (event.seconds.tolist() if "timing" in capabilities else event.seconds) == (
        [2, 0.25] if "timing" in capabilities else None
    )
    assert (event.episode_return is not None) == ("episodes" in capabilities)
    assert event.obs["obs"][:, 0].tolist() == [9, 8]
    host.slots.seconds[0] = 0.125
    again = host._rows(ALL)  # some of it was there already
    event = one(policy.take(again.to_bytes(), 0.0))
    assert event.envs.tolist() == [0]
    assert event.seconds is None or event.seconds.tolist() == [0.125]


def test_times_that_cannot_be_are_none() -> None:
    host, policy = begun(capabilities=("timing",))
    for seconds in (-1, np.nan, np.inf, 1e9):
        stepped(host, policy, 0, 1)
        host.slots.seconds[:2] = seconds, 86_400
        assert one(policy.take(host.results(ids(0, 1), 0.0).to_bytes(), 0.0)).seconds.tolist() == [0, 86_400]
    assert policy.refused == {"seconds": 4}


def test_numbers_of_episodes_are_told_where_they_end() -> None:
    host, policy = begun(capabilities=("info",))
    step = stepped(host, policy, 0, 1, 2)
    host.slots.status[:2] = TERMINATED, TRUNCATED
    host.slots.info |= {0: {"is_success": 1.0}, 2: {"is_success": 0.0}}  # 2 has not ended
    message = host.results(ALL, 0.0)
    assert message.meta == {"info": {"0": {"is_success": 1.0}}}
    assert host.take(step.to_bytes(), 0.0).send[0].meta == message.meta  # also if it is asked for again
    assert one(policy.take(message.to_bytes(), 0.0)).info == {0: {"is_success": 1.0}}
    stepped(host, policy, 0, 1)
    host.slots.status[:2] = TERMINATED
    assert host.results(ids(0, 1), 0.0).meta == {}  # that was another episode


def test_numbers_are_told_to_those_who_want_them() -> None:
    for capabilities in ((), ("timing",)):
        host, policy = begun(capabilities=capabilities)
        stepped(host, policy, 0)
        host.slots.status[0], host.slots.info[0] = TERMINATED, {"is_success": 1.0}
        message = host.results(ids(0), 0.0)
        assert message.meta == {}
        odd = message._replace(meta={"info": {"0": {"is_success": 1.0}}})
        assert one(policy.take(odd.to_bytes(), 0.0)).info == {}


@pytest.mark.parametrize(
    "info", [None, 3, [], {"0": 3}, {"0": {"a": "b", "c": None, "d": [1]}}, {"7": {"a": 1}}, {"1": {"a": 1}}]
)
def test_numbers_that_cannot_be_break_nothing(info: Any) -> None:
    host, policy = begun(capabilities=("info",))
    stepped(host, policy, 0, 1)
    host.slots.status[0] = TERMINATED
    message = host.results(ids(0, 1), 0.0)._replace(meta={"info": info})
    assert one(policy.take(message.to_bytes(), 0.0)).info == {}


def test_more_numbers_than_there_is_room_for_are_left_out() -> None:
    host, policy = begun(CART, 100, capabilities=("info",))
    stepped(host, policy, *range(100))
    host.slots.status[:] = TERMINATED
    host.slots.info |= {env: {f"{'ß' * 50} {i}": 1 / 3 for i in range(32)} for env in range(100)}
    told = one(policy.take(host.results(np.arange(100), 0.0).to_bytes(), 0.0))
    assert len(told.envs) == 100
    assert 0 < len(told.info) < 100


def test_each_env_owes_one_thing_at_a_time() -> None:
    host, policy = met()
    with pytest.raises(UsageError, match="STEP: env 1 must be reset first"):
        policy.step(ids(1), np.zeros(1), 0.0)
    host, policy = begun()
    stepped(host, policy, 1)
    for wrong in (lambda: policy.step(ids(0, 1), np.zeros(2), 0.0), lambda: policy.reset(ids(1), 0.0)):
        with pytest.raises(UsageError, match="env 1 still owes a result"):
            wrong()
    host.results(ids(1), 0.0)
    with pytest.raises(UsageError, match="env 1 owes no result"):
        host.results(ids(1), 0.0)


@pytest.mark.parametrize(
    ("envs", "text"),
    [
        ((3,), "env id 3; there are 3 envs"),
        ((-1,), "env id 4294967295"),
        ((1, 1), "comes twice"),
        ((), "no envs"),
        ((0,) * 5, "5 env ids; there are 3"),
    ],
)
def test_wrong_use_is_told_to_the_caller(envs: tuple[int, ...], text: str) -> None:
    _, policy = begun()
    with pytest.raises(UsageError, match=text):
        policy.step(np.array(envs, int), np.zeros(len(envs)), 0.0)
    with pytest.raises(UsageError, match=r"actions have shape \(2,\); expected \(1,\)"):
        policy.step(ids(0), np.zeros(2), 0.0)
    assert one(policy.take(b"", 0.0)).code == "size"
    with pytest.raises(UsageError, match="the session is over"):
        policy.step(ids(0), np.zeros(1), 0.0)


# Retries and strangers


def test_a_repeated_step_is_answered_and_not_taken_again() -> None:
    host, policy = begun()
    step = stepped(host, policy, 0, 1)
    assert host.take(step.to_bytes(), 0.0) == Outcome((), [])  # still at it
    host.slots.reward[:2] = 0.5, 1.5
    lost = host.results(ids(0), 0.0)
    (again,) = host.take(step.to_bytes(), 0.0).send
    for a, b in zip(lost.buffers, again.buffers, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one(policy.take(again.to_bytes(), 0.0)).reward.tolist() == [0.5]
    assert policy.take(lost.to_bytes(), 0.0) == Outcome()  # it comes after all
    assert (policy.refused, host.refused["duplicate"]) == ({"late": 1}, 4)
    assert one(policy.take(host.results(ids(1), 0.0).to_bytes(), 0.0)).reward.tolist() == [1.5]


def test_what_is_stale_is_dropped() -> None:
    host, policy = begun()
    old = stepped(host, policy, 0)
    policy.take(host.results(ids(0), 0.0).to_bytes(), 0.0)
    stepped(host, policy, 0, 1)
    assert host.take(old.to_bytes(), 0.0) == Outcome((), [])
    assert host.refused == {"stale": 1}


def test_other_sessions_are_dropped() -> None:
    host, policy = begun()
    step = stepped(host, policy, 0)
    result = host.results(ids(0), 0.0)
    assert host.take(step._replace(session=8).to_bytes(), 0.0) == Outcome()
    assert policy.take(result._replace(session=8).to_bytes(), 0.0) == Outcome()
    assert (host.refused, policy.refused) == ({"session": 1}, {"session": 1})
    assert isinstance(one(policy.take(result.to_bytes(), 0.0)), Results)


def test_an_unknown_type_is_answered_with_an_error() -> None:
    host, policy = begun()
    (error,) = host.take(Message(77, 7).to_bytes(), 0.0).send
    assert one(policy.take(error.to_bytes(), 0.0)) == Note("error", "type 77 is unknown to version 1.0")
    assert host.take(Message(77, 7, buffers=[np.zeros(9)]).to_bytes(), 0.0).send[0].meta["code"] == "type"
    assert host.ended is None


def test_a_mixed_result_keeps_what_is_owed() -> None:
    host, policy = begun(capabilities=("episodes",))
    stepped(host, policy, 0, 1, 2)
    host.slots.status[:] = TERMINATED
    host.slots.episode_return[:] = 1, 2, 3
    part, whole = host.results(ids(1), 0.0), host._rows(ALL)
    policy.take(part.to_bytes(), 0.0)
    event = one(policy.take(whole.to_bytes(), 0.0))
    assert (event.envs.tolist(), event.ended.tolist(), event.episode_return.tolist()) == ([0, 2], [0, 1], [1, 3])
    assert policy.refused == {"late": 1}


# What breaks


def test_an_env_that_breaks_leaves_the_others_alone() -> None:
    host, policy = begun()
    step = stepped(host, policy, 0, 1)
    error = host.broken(1, "raised", "ValueError: no\x1b[2J way", 0.0)
    event = one(policy.take(error.to_bytes(), 0.0))
    assert isinstance(event, Broken)
    assert (event.envs.tolist(), event.recoverable, event.code) == ([1], True, "raised")
    assert event.text == "ValueError: no\ufffd[2J way"
    (again,) = host.take(step.to_bytes(), 0.0).send  # a retry is told the same
    assert again.to_bytes() == error.to_bytes()
    assert one(policy.take(host.results(ids(0), 0.0).to_bytes(), 0.0)).envs.tolist() == [0]
    with pytest.raises(UsageError, match="env 1 must be reset first"):
        policy.step(ids(0, 1), np.zeros(2), 0.0)
    host.take(policy.reset(ids(1), 0.0).to_bytes(), 0.0)
    assert one(policy.take(host.results(ids(1), 0.0).to_bytes(), 0.0)).valid.tolist() == [False]
    stepped(host, policy, 0, 1)


def test_facts_of_a_fault_are_passed_on() -> None:
    deep: list[Any] = []
    for _ in range(20):
        deep = [deep]
    for facts, told in (
        ({"step": 3, "where": ["a.py", 7]}, {"step": 3, "where": ["a.py", 7]}),
        ({"long": "x" * 16_384}, {}),
        ({"deep": deep}, {}),
        ({"object": object()}, {}),
        ({"nan": float("nan")}, {}),
        (None, {}),
    ):
        host, policy = begun()
        stepped(host, policy, 1)
        event = one(policy.take(host.broken(1, "raised", "no", 0.0, facts=facts).to_bytes(), 0.0))
        assert (event.text, event.facts) == ("no", told)


def test_an_env_that_is_gone_is_not_asked_again() -> None:
    host, policy = begun()
    stepped(host, policy, 1)
    assert not one(
        policy.take(host.broken(1, "crashed", "segfault", 0.0, recoverable=False).to_bytes(), 0.0)
    ).recoverable
    with pytest.raises(UsageError, match="RESET: env 1 is gone"):
        policy.reset(ids(1), 0.0)


@pytest.mark.parametrize("finite", [True, False])
def test_values_that_cannot_be_break_their_env(finite: bool) -> None:
    host, policy = begun(offer={"finite": finite})
    stepped(host, policy, 0, 1, 2)
    host.slots.obs["obs"][1, 2] = np.nan
    events = policy.take(host.results(ALL, 0.0).to_bytes(), 0.0).events
    if not finite:
        assert [e.envs.tolist() for e in events] == [[0, 1, 2]]
        return
    assert [e.envs.tolist() for e in events] == [[0, 2], [1]]
    assert events[1].text == "obs has a value that its space does not have"
    host.take(policy.reset(ids(1), 0.0).to_bytes(), 0.0)  # the host thinks nothing of it
    assert policy.refused == {"value": 1}


def test_a_final_observation_is_looked_at_too() -> None:
    host, policy = begun(ROBOT)
    host.take(policy.step(ALL, np.zeros((3, 2)), 0.0).to_bytes(), 0.0)
    host.slots.status[1:] = TRUNCATED
    host.slots.final["obs/gear"][2] = 4
    kept, broken = policy.take(host.results(ALL, 0.0).to_bytes(), 0.0).events
    assert (kept.envs.tolist(), kept.ended.tolist(), broken.envs.tolist()) == ([0, 1], [1], [2])


VIOLATIONS = {"status": lambda m: m.buffers[3].__setitem__(0, 5), "env": lambda m: m.buffers[0].__setitem__(0, 3)}


@pytest.mark.parametrize("code", VIOLATIONS)
def test_a_violation_ends_the_session_with_its_reason(code: str) -> None:
    host, policy = begun()
    stepped(host, policy, 0)
    message = host.results(ids(0), 0.0)
    VIOLATIONS[code](message)
    outcome = policy.take(message.to_bytes(), 0.0)
    ended = one(outcome)
    assert ended.code == code
    told = one(tell(host, outcome))
    assert isinstance(told, Ended)
    assert ended.reason in told.reason
    assert policy.take(message.to_bytes(), 0.0) == Outcome()
    assert policy.refused == {code: 1, "ended": 1}


def test_a_first_observation_must_say_so() -> None:
    host, policy = begun()
    stepped(host, policy, 0)
    message = host.results(ids(0), 0.0)
    message.buffers[3][0] = RESET
    assert (
        one(policy.take(message.to_bytes(), 0.0)).reason == "env 0: status 4; it is not an episode's first observation"
    )


def test_an_action_out_of_its_space_is_a_violation() -> None:
    host, policy = begun()
    message = policy.step(ids(2), np.array([7]), 0.0)
    assert one(host.take(message.to_bytes(), 0.0)) == Ended("action", "STEP: the action of env 2 is not in its space")


def test_a_second_hello_is_a_violation() -> None:
    host, policy = begun()
    assert one(policy.take(host.start().to_bytes(), 0.0)).reason == "HELLO came after the handshake"


def test_what_the_stream_finds_wrong_ends_the_session() -> None:
    _, policy = begun()
    outcome = policy.violated(ProtocolError("magic", "no magic"))
    assert (one(outcome), outcome.send[0].meta["code"]) == (Ended("magic", "no magic"), "magic")


# Time


def test_silence_is_asked_about_and_then_final() -> None:
    host, policy = begun()
    assert policy.poll(1.0) == Outcome()
    (ping,) = policy.poll(1.5).send
    assert policy.poll(2.0) == Outcome()  # once a second
    host.progress(1.25)
    (pong,) = host.take(ping.to_bytes(), 1.5).send
    assert (pong.sequence, pong.meta) == (ping.sequence, {"progress_ms": 250})
    policy.take(pong.to_bytes(), 2.0)
    assert policy.peer_stalled == 0.25
    assert one(policy.poll(12.5)) == Ended("silence", "nothing heard for 10.5 s")
    assert one(host.poll(12.5)).code == "silence"  # simulators do not outlive their trainer


def test_nobody_waits_for_a_handshake_for_ever() -> None:
    for session in (HostSession(Hello(3, CART), 5.0), PolicySession(Offer(7), 5.0)):
        assert session.poll(14.9) == Outcome()
        assert one(session.poll(15.1)) == Ended("silence", "no handshake within 10000 ms")


def test_overdue_envs_are_told_once() -> None:
    _host, policy = begun(offer={"deadlines": Deadlines(step_ms=500, ping_ms=60_000)})
    policy.step(ids(0, 1), np.zeros(2), 1.0)
    policy.step(ids(2), np.zeros(1), 1.4)
    assert policy.poll(1.5) == Outcome()
    event = one(policy.poll(1.6))
    assert isinstance(event, Overdue)
    assert event.envs.tolist() == [0, 1]
    assert policy.poll(1.7) == Outcome()


def test_closing_waits_for_what_is_under_way() -> None:
    host, policy = begun()
    stepped(host, policy, 0)
    closing = one(tell(host, policy.close(1.0, "enough"), 1.0))
    assert closing == Closing("enough", 5.0)
    with pytest.raises(UsageError, match="the session is closing"):
        policy.step(ids(1), np.zeros(1), 0.0)
    assert isinstance(one(policy.take(host.results(ids(0), 1.0).to_bytes(), 1.0)), Results)
    outcome = host.close(2.0, "done")
    assert one(outcome).code == "closed"
    assert one(tell(policy, outcome, 2.0)) == Ended("closed", "done")


def test_closing_ends_with_its_grace() -> None:
    host, policy = begun()
    tell(host, policy.close(1.0), 1.0)
    assert (policy.poll(4.0), host.poll(4.0)) == (Outcome(), Outcome())  # nobody is asked any more
    assert one(policy.poll(6.0)) == Ended("silence", "no CLOSE in answer to ours within its grace")
    outcome = host.poll(6.0)
    assert (one(outcome).code, outcome.send[0].type) == ("closed", Type.CLOSE)


def test_a_step_that_crosses_a_close_is_not_taken() -> None:
    host, policy = begun()
    step = policy.step(ids(0), np.zeros(1), 0.0)
    closing = host.close(0.0, "memory")
    assert host.take(step.to_bytes(), 0.0) == Outcome((), [])
    assert one(tell(policy, closing)) == Closing("memory", 5.0)
    with pytest.raises(UsageError, match="the host is closing"):
        policy.step(ids(1), np.zeros(1), 0.0)
    assert one(tell(host, policy.close(0.0))).code == "closed"


def test_logs_are_passed_on() -> None:
    host, policy = begun()
    assert one(policy.take(host.log("warning", "x" * 5000).to_bytes(), 0.0)) == Note("warning", "x" * 4000)
    with pytest.raises(UsageError, match="level is 'loud'"):
        host.log("loud", "")


@pytest.mark.parametrize("wrong", [{"session": 0}, {"session": 1 << 64}, {"most_envs": 0}])
def test_an_offer_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is"):
        Offer(**{"session": 1, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="step_ms is 0; it must be from 1 to 86400000 milliseconds"):
        Deadlines(step_ms=0)


# Saved states


def saved(host: HostSession, policy: PolicySession, envs: np.ndarray, *states: bytes) -> Snapshots:
    asked = one(host.take(policy.snapshot(envs, 0.0).to_bytes(), 0.0))
    assert isinstance(asked, SnapshotRequest)
    assert asked.envs.tolist() == envs.tolist()
    found = one(policy.take(host.snapshots(envs, states, 0.0).to_bytes(), 0.0))
    assert isinstance(found, Snapshots)
    return found


def test_states_are_saved_and_restored() -> None:
    host, policy = begun(capabilities=("snapshot",))
    assert policy.saves
    found = saved(host, policy, ids(2, 0), b"two", b"")
    assert (found.envs.tolist(), found.states) == ([2, 0], [b"two", b""])
    asked = one(host.take(policy.restore(found.envs, found.states, 0.0).to_bytes(), 0.0))
    assert isinstance(asked, RestoreRequest)
    assert asked.states == [b"two", b""]
    host.slots.obs["obs"][ids(2, 0)] = [[2], [0]]
    rows = one(policy.take(host.results(ids(2, 0), 0.0).to_bytes(), 0.0))
    assert not rows.valid.any()
    assert rows.obs["obs"][:, 0].tolist() == [2, 0]
    stepped(host, policy, 0, 1, 2)


def test_a_snapshot_that_is_asked_for_again_is_sent_again() -> None:
    host, policy = begun(capabilities=("snapshot",))
    request = policy.snapshot(ids(1), 0.0)
    host.take(request.to_bytes(), 0.0)
    assert host.take(request.to_bytes(), 0.0) == Outcome(send=[])  # it is under way
    host.snapshots(ids(1), [b"x" * 9], 0.0)  # which is lost
    (again,) = host.take(request.to_bytes(), 0.0).send
    assert one(policy.take(again.to_bytes(), 0.0)).states == [b"x" * 9]
    assert policy.take(again.to_bytes(), 0.0) == Outcome()
    assert policy.refused["late"] == 1
    stepped(host, policy, 1)
    assert host.take(request.to_bytes(), 0.0) == Outcome(send=[])  # an old one
    restore = policy.restore(ids(0), [b"y"], 0.0)
    host.take(restore.to_bytes(), 0.0)
    host.results(ids(0), 0.0)
    (row,) = host.take(restore.to_bytes(), 0.0).send
    assert not one(policy.take(row.to_bytes(), 0.0)).valid.any()


def test_an_env_that_cannot_be_saved_has_broken() -> None:
    host, policy = begun(capabilities=("snapshot",))
    host.take(policy.snapshot(ids(1), 0.0).to_bytes(), 0.0)
    fault = one(policy.take(host.broken(1, "raised", "no disk", 0.0).to_bytes(), 0.0))
    assert (fault.envs.tolist(), fault.text) == ([1], "no disk")
    with pytest.raises(UsageError, match="env 1 must be reset first"):
        policy.snapshot(ids(1), 0.0)


def test_what_owes_something_is_not_saved() -> None:
    host, policy = begun(capabilities=("snapshot",))
    stepped(host, policy, 0)
    with pytest.raises(UsageError, match="SNAPSHOT: env 0 still owes a result"):
        policy.snapshot(ids(0), 0.0)
    policy.snapshot(ids(1), 0.0)
    with pytest.raises(UsageError, match="STEP: env 1 is being saved"):
        policy.step(ids(1), np.zeros(1), 0.0)
    with pytest.raises(UsageError, match="RESET: env 1 is being saved"):
        policy.restore(ids(1), [b""], 0.0)
    assert policy.take(host.log("info", "x").to_bytes(), 0.0).events


def test_without_the_capability_nobody_saves() -> None:
    host, policy = begun()
    assert not policy.saves
    message = Message(Type.SNAPSHOT, 7, 99, 1, buffers=[np.zeros(1, "<u4")])
    assert one(host.take(message.to_bytes(), 0.0)).code == "state"


@pytest.mark.parametrize(
    ("sizes", "total", "code"),
    [
        ([3, 4], 8, ""),
        ([3, 4], 16, "size"),
        ([9, 0], 8, "size"),
        ([1 << 27, 0], 8, "limit"),
        ([1 << 63, 1 << 63], 0, "limit"),
    ],
)
def test_sizes_of_states_must_fit(sizes: list[int], total: int, code: str) -> None:
    host, _ = begun(capabilities=("snapshot",))
    buffers = [np.arange(2, dtype="<u4"), np.array(sizes, "<u8"), np.zeros(total, "u1")]
    outcome = host.take(Message(Type.RESTORE, 7, 99, 2, buffers=buffers).to_bytes(), 0.0)
    assert getattr(one(outcome), "code", "") == code


def test_a_state_that_is_too_large_is_refused_by_its_header() -> None:
    host, policy = begun(capabilities=("snapshot",))
    for session, columns in ((host, 2), (policy, 3)):
        rows = [np.zeros(1, "<u4"), *[np.zeros(1, "<u8")] * (columns - 1)]
        type_ = Type.RESTORE if session is host else Type.SNAPSHOT
        head = bytearray(Message(type_, 7, 99, 1, buffers=[*rows, np.zeros(0, "u1")]).head())
        for size, code in (((1 << 26) + 8 * columns, ""), ((1 << 26) + 8 * columns + 8, "limit"), (8, "limit")):
            head[40:48] = size.to_bytes(8, "little")
            found = ""
            try:
                session.codec.measure(bytes(head))
            except ProtocolError as error:
                found = error.code
            assert found == code


def test_states_in_frames() -> None:
    host, policy = begun(capabilities=("snapshot",))
    message = policy.restore(ids(0, 1), [b"abc", b"de"], 0.0)
    frames = [bytes(frame) for frame in message.frames()]
    assert host.receive(host.codec.decode_frames(frames), 0.0).events[0].states == [b"abc", b"de"]
    with pytest.raises(ProtocolError, match="frames of"):
        host.codec.decode_frames([*frames[:-1], frames[-1] + bytes(8)])
