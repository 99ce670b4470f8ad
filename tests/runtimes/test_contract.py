"""What every runtime promises: the same calls give the same answers, in the same order, wherever roles live."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from roles_for_tests import Sealed

from raynforce.errors import EnvError, RaynforceError, UsageError
from raynforce.runtimes.base import Handle, Pending, RemoteTraceback, RoleError, Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.process import ProcessRuntime

# A kind is made by the fixture `make_NAME`, here or in conftest.py.
KINDS = ["inline", "process", pytest.param("ray", marks=pytest.mark.slow)]
Make = Callable[[], Runtime]
DEADLINE = 15.0


@pytest.fixture
def make_inline() -> Make:
    return lambda: InlineRuntime({})


@pytest.fixture
def make_process() -> Make:
    return lambda: ProcessRuntime({}, lambda text: None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runtime(kind: str, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with request.getfixturevalue(f"make_{kind}")() as opened:
        yield opened


def notebook(runtime: Runtime, name: str = "notebook", *begin: object) -> Handle:
    return runtime.spawn("roles_for_tests:Notebook", *begin, name=name)


def failing(runtime: Runtime) -> Handle:
    return runtime.spawn("roles_for_tests:Failing", name="failing")


def answered(runtime: Runtime, *pendings: Pending) -> None:
    """All of them are there in time; a lost answer must not hang the tests."""
    began = time.monotonic()
    ready, rest = runtime.wait(pendings, timeout=DEADLINE)
    assert (len(ready), rest) == (len(pendings), [])
    assert time.monotonic() - began < DEADLINE, "it had to be woken by the clock"


# -- calls --------------------------------------------------------------------------------------------------


def test_a_role_gets_its_arguments_and_keeps_its_state(runtime: Runtime) -> None:
    role = notebook(runtime, "notebook", "a", 1)
    assert role.name == "notebook"
    assert role.call("note", "b").result() == 3
    pending = role.call("read")
    assert pending.name == "notebook"
    assert pending.result() == ["a", 1, "b"]
    assert pending.result() == ["a", 1, "b"], "a second look"


def test_calls_run_in_the_order_they_were_made(runtime: Runtime) -> None:
    role, other = notebook(runtime), notebook(runtime, "other")
    role.call("note_slowly", 0, 0.05)
    late = other.call("note_slowly", "late", 0.2)
    role.call("note", late)  # waits for the other role, and so does everything behind it
    role.call("note", 2)
    assert role.call("read").result() == [0, 1, 2]


def test_roles_of_the_same_class_are_apart(runtime: Runtime) -> None:
    one, other = notebook(runtime, "one", 1), notebook(runtime, "other", 2)
    one.call("note", "x")
    assert (one.call("read").result(), other.call("read").result()) == ([1, "x"], [2])


def test_600_calls_at_once(runtime: Runtime) -> None:
    role = notebook(runtime)
    calls = [role.call("array", 1000, float(n)) for n in range(600)]  # each answer takes shared memory
    answered(runtime, *calls)
    assert [c.result()[0] for c in calls] == list(range(600))


def test_600_long_messages_to_a_role_that_is_busy(runtime: Runtime) -> None:
    """More than the pipes between hold, in both directions."""
    role = notebook(runtime)
    role.call("sleep", 0.3)
    calls = [role.call("echo", "x" * 20_000 + str(n)) for n in range(600)]
    answered(runtime, *calls)
    assert [int(c.result().strip("x")) for c in calls] == list(range(600))


def test_a_large_array_there_and_back(runtime: Runtime) -> None:
    role = notebook(runtime)
    large = np.arange(12_500_000.0)  # 100 MB
    back = role.call("echo", large).result()
    assert back.dtype == large.dtype
    assert np.array_equal(back, large)


def test_a_method_that_is_not_there(runtime: Runtime) -> None:
    role = notebook(runtime)
    with pytest.raises((AttributeError, RoleError), match="no attribute 'nothing'"):
        role.call("nothing").result()
    assert role.call("read").result() == []


# -- answers as arguments -----------------------------------------------------------------------------------


def test_an_answer_goes_on_without_being_opened_here(runtime: Runtime) -> None:
    maker, user = notebook(runtime, "maker"), notebook(runtime, "user")
    value = maker.call("sealed", os.getpid())
    assert user.call("unseal", value).result() == Sealed.word


def test_answers_and_values_may_be_mixed(runtime: Runtime) -> None:
    one, other = notebook(runtime, "one"), notebook(runtime, "other")
    assert other.call("add", [0], one.call("echo", [1]), [2], one.call("echo", [3])).result() == [0, 1, 2, 3]


def test_an_answer_may_go_back_to_where_it_came_from(runtime: Runtime) -> None:
    role = notebook(runtime)
    assert role.call("note", role.call("echo", "x")).result() == 1
    assert role.call("read").result() == ["x"]


def test_one_answer_to_many(runtime: Runtime) -> None:
    maker, users = notebook(runtime, "maker"), [notebook(runtime, f"user {n}") for n in range(3)]
    value = maker.call("array", 10_000, 0.5)
    assert [user.call("total", value).result() for user in users] == [5000.0] * 3


def test_a_call_with_600_answers_as_arguments(runtime: Runtime) -> None:
    """More descriptors than the kernel takes at once."""
    maker, user = notebook(runtime, "maker"), notebook(runtime, "user")
    parts = [maker.call("array", 1000, float(n)) for n in range(600)]
    total = user.call("total", *parts)
    answered(runtime, total)
    assert total.result() == 1000 * sum(range(600))


def test_a_long_chain_through_many_roles(runtime: Runtime) -> None:
    roles = [notebook(runtime, f"role {n}") for n in range(3)]
    value = roles[0].call("echo", 0)
    for n in range(60):
        value = roles[n % 3].call("add", value, 1)
    answered(runtime, value)
    assert value.result() == 60


def test_share_gives_one_value_to_all(runtime: Runtime) -> None:
    roles = [notebook(runtime, f"role {n}") for n in range(2)]
    shared = runtime.share({"x": np.arange(10_000), "y": "text"})
    assert [role.call("echo", shared).result()["x"].sum() for role in roles] == [49_995_000] * 2
    assert shared.result()["y"] == "text"
    assert runtime.wait([shared], timeout=0) == ([shared], [])


# -- arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 10_000])
def test_arrays_are_read_only_for_whoever_receives_them(runtime: Runtime, kind: str, size: int) -> None:
    if kind == "inline":
        pytest.skip("inline gives the object itself: whoever makes it says whether it may be changed")
    role = notebook(runtime)
    with pytest.raises(ValueError, match="read-only"):
        role.call("array", size).result()[0] = 7.0
    with pytest.raises(RoleError, match="read-only"):
        role.call("scribble", np.zeros(size)).result()


def test_what_the_caller_changes_later_does_not_arrive(runtime: Runtime, kind: str) -> None:
    if kind == "inline":
        pytest.skip("inline gives the object itself")
    role, array = notebook(runtime), np.zeros(10_000)
    role.call("sleep", 0.2)
    total, shared = role.call("total", array), runtime.share(array)
    array[:] = 1
    assert total.result() == 0
    assert role.call("total", shared).result() == 0


# -- waiting ------------------------------------------------------------------------------------------------


def test_wait_for_nothing(runtime: Runtime) -> None:
    assert runtime.wait([]) == ([], [])
    assert runtime.wait([], 3, 0.1) == ([], [])


def test_wait_for_more_than_there_are(runtime: Runtime) -> None:
    calls = [notebook(runtime).call("read") for _ in range(2)]
    assert runtime.wait(calls, 5, DEADLINE) == (calls, [])


def test_wait_for_all_keeps_the_order_given(runtime: Runtime) -> None:
    slow, quick = notebook(runtime, "slow"), notebook(runtime, "quick")
    calls = [slow.call("sleep", 0.1), quick.call("sleep", 0.0)]
    assert runtime.wait(calls) == (calls, [])


def test_wait_for_some(runtime: Runtime, kind: str) -> None:
    slow, quick = notebook(runtime, "slow"), notebook(runtime, "quick")
    answered(runtime, slow.call("read"), quick.call("read"))
    calls = [slow.call("sleep", 6.0 if kind != "inline" else 0.1), quick.call("sleep", 0.0)]
    began = time.monotonic()
    ready, rest = runtime.wait(calls, 1, DEADLINE)
    if kind == "inline":
        assert (ready, rest) == (calls, [])
    else:
        assert (ready, rest) == (calls[1:], calls[:1])
        assert time.monotonic() - began < 5.9


def test_waiting_for_some_tells_of_all_that_are_there(runtime: Runtime) -> None:
    one, two = notebook(runtime, "one").call("read"), notebook(runtime, "two").call("read")
    answered(runtime, one, two)
    assert runtime.wait([one, two], 1, DEADLINE) == ([one, two], [])


def test_wait_not_longer_than_said(runtime: Runtime, kind: str) -> None:
    role = notebook(runtime)
    answered(runtime, role.call("read"))
    call = role.call("sleep", 1.5)
    began = time.monotonic()
    ready, rest = runtime.wait([call], timeout=0.1)
    if kind != "inline":
        assert (ready, rest) == ([], [call])
        assert 0.08 < time.monotonic() - began < 1.4
        assert runtime.wait([call], timeout=0) == ([], [call])
    assert call.result() == 1.5
    assert runtime.wait([call], timeout=0) == ([call], [])


def test_waiting_for_one_lets_the_others_go_on(runtime: Runtime) -> None:
    """A call that waits for an argument is sent as soon as that is there, whoever is waited for."""
    maker, user, watched = (notebook(runtime, name) for name in ("maker", "user", "watched"))
    answered(runtime, *(role.call("read") for role in (maker, user, watched)))
    used = user.call("note", maker.call("sleep", 0.1))
    answered(runtime, watched.call("sleep", 0.5))
    assert runtime.wait([used], timeout=0.1) == ([used], [])


# -- failures -----------------------------------------------------------------------------------------------


def test_what_a_role_raises(runtime: Runtime, kind: str) -> None:
    """Ours come as they are with the role's name; others as a `RoleError` with their traceback, inline as they are."""
    role = failing(runtime)
    call = role.call("fail", "plain")
    answered(runtime, call)  # failed is answered
    if kind == "inline":
        with pytest.raises(ValueError, match=r"^two\nlines$"):
            call.result()
    else:
        with pytest.raises(RoleError, match=r"^failing: ValueError: two$") as caught:
            call.result()
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "in fail" in str(caught.value.__cause__)
        assert "ValueError: two\nlines" in str(caught.value.__cause__)
    for how, expected in (("usage", UsageError), ("env", EnvError)):
        with pytest.raises(expected) as raised:
            role.call("fail", how).result()
        assert str(raised.value).count("failing: ") == (kind != "inline")
        assert len(str(raised.value).splitlines()) == 1
    assert role.call("fine").result() == "fine", "a failed call does no harm to those behind it"


@pytest.mark.parametrize("how", ["odd", "elsewhere", "memory", "recursion"])
def test_unusual_errors_arrive_too(runtime: Runtime, kind: str, how: str) -> None:
    role = failing(runtime)
    call, after = role.call("fail", how), role.call("fine")
    answered(runtime, call, after)
    words = {"odd": "out of range 7", "elsewhere": "cannot import", "memory": "1 EB", "recursion": "maximum recursion"}
    with pytest.raises(Exception, match=words[how]) as caught:
        call.result()
    if kind != "inline":
        assert isinstance(caught.value, RaynforceError)
        assert caught.value.exit_code == (2 if how == "elsewhere" else 1)
        assert "in fail" in str(caught.value.__cause__)
    assert after.result() == "fine"


def test_an_answer_that_cannot_travel(runtime: Runtime, kind: str) -> None:
    if kind != "process":
        pytest.skip("nothing travels, or Ray carries even what has no name")
    role = failing(runtime)
    with pytest.raises(RaynforceError, match="pickle"):
        role.call("unpicklable").result()
    assert role.call("fine").result() == "fine"


def test_an_argument_that_cannot_travel(runtime: Runtime, kind: str) -> None:
    if kind != "process":
        pytest.skip("nothing travels, or Ray carries even what has no name")
    role = notebook(runtime)
    with pytest.raises(Exception, match="pickle"):
        role.call("echo", lambda: None).result()
    assert role.call("read").result() == []


def test_a_failed_argument_fails_the_call_with_the_same_error(runtime: Runtime) -> None:
    role, user = failing(runtime), notebook(runtime, "user")
    used = user.call("note", role.call("fail", "usage"))
    after = user.call("note", "after")
    answered(runtime, used, after)
    with pytest.raises(UsageError, match=r"gamma = 7"):
        used.result()
    assert after.result() == 1, "the method was not called"
    with pytest.raises(UsageError, match=r"gamma = 7"):
        user.call("note", used).result()


def test_a_failure_goes_through_a_chain_of_roles(runtime: Runtime) -> None:
    users = [notebook(runtime, f"user {n}") for n in range(4)]
    value = failing(runtime).call("fail", "env")
    for user in reversed(users):
        value = user.call("echo", value)
    answered(runtime, value)
    with pytest.raises(EnvError, match="reward is NaN"):
        value.result()


@pytest.mark.parametrize(("how", "expected"), [("usage", UsageError), ("env", EnvError), ("plain", Exception)])
def test_a_role_that_cannot_be_built(runtime: Runtime, how: str, expected: type[Exception]) -> None:
    role = runtime.spawn("roles_for_tests:Unbuildable", how, name="broken")
    other = notebook(runtime)
    calls = [role.call("fine"), role.call("nothing"), other.call("note", role.call("fine"))]
    answered(runtime, *calls)
    words = {"usage": "gamma = 7", "env": "reward is NaN", "plain": "two"}
    for call in calls:
        with pytest.raises(expected, match=words[how]) as caught:
            call.result()
        assert str(caught.value).count("broken: ") <= 1
    assert other.call("read").result() == []


@pytest.mark.parametrize(
    ("role", "words"),
    [("no_such_module:Role", "no module named"), ("roles_for_tests:Nothing", "has no 'Nothing'"), ("what", "module:")],
)
def test_a_role_that_cannot_be_found(runtime: Runtime, role: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        runtime.spawn(role, name="lost").call("read").result()


def test_close_twice(kind: str, request: pytest.FixtureRequest) -> None:
    runtime = request.getfixturevalue(f"make_{kind}")()
    assert notebook(runtime).call("note", 1).result() == 1
    runtime.close()
    runtime.close()
    runtime.close(now=True)


def test_close_without_any_role(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"make_{kind}")().close()
