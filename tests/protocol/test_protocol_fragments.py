"""Hosts that choose actions themselves: POLICY and SAMPLE go out, FRAGMENT is read where it lies or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from protocol_worlds import CART, ROBOT, met

from raynforce.protocol.frame import HEADER, Message, Type
from raynforce.protocol.handshake import Hello, Inference, Offer
from raynforce.protocol.policy_session import Gathered, PolicySession
from raynforce.protocol.session import Ended
from raynforce.protocol.spaces import DTYPES, Spaces

T, ENVS = 4, 3


def acting(spaces: Spaces = CART) -> PolicySession:
    """A policy's side that has sent version 5 and asked for one fragment, its second message."""
    offer = Offer(session=7, inference=Inference(T, {"network": {}, "exploration": "policy", "values": "q"}))
    policy = PolicySession(offer, 0.0)
    hello = Hello(ENVS, spaces, ("same_step",), ("inference",))
    (welcome,) = policy.take(hello.message().to_bytes(), 0.0).send
    assert welcome.meta["fragment"] == T
    assert welcome.meta["capabilities"] == ["inference"]
    assert welcome.meta["policy"]["exploration"] == "policy"
    policy.policy(5, [np.zeros(10, np.float32)], {})
    policy.sample(12)
    return policy


def buffers(spaces: Spaces = CART, ended: int = 0) -> list[np.ndarray]:
    obs = [np.zeros((T + 1, ENVS, *leaf.shape), DTYPES[leaf.dtype]) for leaf in spaces.obs]
    kind = "<f4" if spaces.action.kind == "box" else "<i8"
    each = [np.zeros((T, ENVS), dtype) for dtype in ("<f4", "<f4", "u1")]
    rest = [*each, np.full((T, ENVS), 5, "<u4"), np.zeros(ended, "<f8"), np.ones(ended, "<u4")]
    final = [np.zeros((ended, *leaf.shape), DTYPES[leaf.dtype]) for leaf in spaces.obs]
    return [*obs, np.zeros((T, ENVS, *spaces.action.shape), kind), *rest, *final]


def fragment(columns: list[np.ndarray], ended: int = 0, **meta: Any) -> Message:
    return Message(Type.FRAGMENT, 7, 1, ENVS, ended, meta={"request": 2, **meta}, buffers=columns)


@pytest.mark.parametrize("spaces", [CART, ROBOT])
def test_a_fragment_is_read_where_it_lies(spaces: Spaces) -> None:
    columns = buffers(spaces, 2)
    leaves = len(spaces.obs)
    columns[leaves + 3][1, 2], columns[leaves + 3][3, 0], columns[leaves + 3][0, 1] = 1 + 4, 2, 8
    columns[leaves + 2][...] = np.arange(T * ENVS).reshape(T, ENVS)
    told = {"info": {"1": {"laps": 2}, "7": {"x": 1}}, "broken": {"1": {"code": "raised", "text": "jam"}, "9": {}}}
    (event,) = acting(spaces).take(fragment(columns, 2, skipped=9, **told).to_bytes(), 0.0).events
    assert isinstance(event, Gathered)
    assert list(event.obs) == [leaf.path for leaf in spaces.obs]
    found = [*event.obs.values(), event.action, event.logp, event.reward, event.status, event.version]
    for sent, got in zip(columns, [*found, event.episode_return, event.episode_length], strict=False):
        np.testing.assert_array_equal(sent, got)
        assert not got.flags.owndata
    assert (event.request, event.skipped, event.info) == (2, 9, {1: {"laps": 2}})
    assert event.broken == {1: ("raised", "jam")}


def changed(column: int, place: Any, value: Any) -> Callable[[list[np.ndarray]], Message]:
    def change(columns: list[np.ndarray]) -> Message:
        columns[column][place] = value
        return fragment(columns)

    return change


WRONG: dict[str, tuple[Callable[[list[np.ndarray]], Message], str, str]] = {
    "too short": (lambda c: fragment([*c[:1], c[1][:-1], *c[2:]]), "size", "its spaces make it"),
    "one buffer less": (lambda c: fragment(c[:-1]), "size", "its spaces make it"),
    "not of all envs": (lambda c: fragment(c)._replace(envs=2), "env", "it is of all 3"),
    "more ends than steps": (lambda c: fragment(c, 13), "env", "ended 13"),
    "ends that are not there": (lambda c: fragment(buffers(ended=1), 1), "status", "as many as said"),
    "an end too many": (changed(4, (0, 0), 1), "status", "as many as said"),
    "a status that cannot be": (changed(4, (0, 0), 9), "status", "or 8 alone"),
    "of no SAMPLE": (lambda c: fragment(c, request=3), "state", "not the oldest SAMPLE"),
    "no request": (lambda c: fragment(c, request=None), "field", "request"),
    "NaN seen": (changed(0, (T, 0, 0), np.nan), "value", "obs has a value"),
    "a reward of infinity": (changed(3, (0, 0), np.inf), "value", "a reward, return or log-probability"),
    "no log-probability": (changed(2, (0, 0), np.nan), "value", "a reward, return or log-probability"),
    "an action that is none": (changed(1, (0, 0), 2), "value", "action has a value"),
    "a version that was never sent": (changed(5, (0, 0), 6), "value", "the newest sent are [5]"),
    "steps skipped below zero": (lambda c: fragment(c, skipped=-1), "field", "skipped"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_ends_the_session(name: str) -> None:
    make, code, words = WRONG[name]
    policy = acting()
    (event,) = policy.take(make(buffers()).to_bytes(), 0.0).events
    assert isinstance(event, Ended)
    assert event.code == code
    assert words in event.reason


def test_each_sample_is_answered_once() -> None:
    policy = acting()
    data = fragment(buffers()).to_bytes()
    assert isinstance(policy.take(data, 0.0).events[0], Gathered)
    assert isinstance(policy.take(data, 0.0).events[0], Ended)


def test_without_the_capability_there_are_no_fragments() -> None:
    _, policy = met(CART, ENVS)
    (event,) = policy.take(fragment(buffers()).to_bytes(), 0.0).events
    assert (event.code, "came before" in event.reason) == ("state", True)


def test_its_length_is_known_from_the_header() -> None:
    """Before a byte of it is stored."""
    policy, data = acting(), fragment(buffers()).to_bytes()
    header = policy.codec.measure(data[: HEADER.size])
    assert header.whole == len(data)
