"""Values between processes: what goes in comes out, however large, and no memory or descriptor stays behind."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from commands import shared_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from roles_for_tests import descriptors

from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.runtimes import messages
from raynforce.runtimes.messages import LARGE, LONGEST, Packed, pack, receive, send


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test gives back its shared memory and its descriptors."""
    if Packed.held:  # by a cycle of an earlier test, which may be collected at any time
        gc.collect()
    held, fds = Packed.held, descriptors()
    yield
    if descriptors() != fds:  # unless something is part of a cycle, nothing has to be collected
        gc.collect()
    assert Packed.held == held
    assert descriptors() == fds


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, type, dtype and shape included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bool(a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())
    return bool(a == b or (a != a and b != b))


def through(ends: tuple[socket.socket, socket.socket], head: tuple[Any, ...], *values: Any) -> tuple[Any, list[Any]]:
    """Send and receive at once, as a socket holds only so much."""
    packed = [pack(v) for v in values]
    sender = threading.Thread(target=send, args=(ends[0], head, packed))
    sender.start()
    message = receive(ends[1])
    sender.join()
    assert message is not None
    return message[0], [p.value() for p in message[1]]


# -- packing ------------------------------------------------------------------------------------------------

LARGE_ARRAYS: dict[str, Any] = {
    "C order": np.arange(60_000.0).reshape(200, 300),
    "F order": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "every other": np.arange(20_000)[::2],
    "backwards": np.arange(20_000)[::-1],
    "a column": np.arange(40_000).reshape(200, 200)[:, 3:70],
    "bool": np.arange(20_000) % 3 == 0,
    "half": np.arange(20_000, dtype=np.float16),
    "big-endian": np.arange(20_000, dtype=">i4"),
    "text": np.array(["ab", "c"] * 5000),
    "records": np.zeros(5000, [("x", "f4"), ("y", "i8")]),
    "times": np.arange("2000-01-01", "2030-01-01", dtype="datetime64[D]"),
    "objects": np.array([{"a": 1}, None, "x"] * 2000, object),
    "complex": np.full(5000, 1 + 2j),
    "bytes": b"x" * 100_000,
    "bytearray": bytearray(100_000),
    "broadcast": np.broadcast_to(np.float32(3), (100, 100)),
}
SMALL_ARRAYS: dict[str, Any] = {
    "empty": np.zeros(0),
    "no rows": np.zeros((0, 5), np.int64),
    "no columns": np.zeros((5, 0), bool),
    "no dimension": np.array(3.5),
    "scalar": np.float32(2.5),
    "bool": np.array([True, False]),
    "nan": np.array([np.nan, np.inf, -0.0]),
    "text": "ä\0b",
    "none": None,
}


@pytest.mark.parametrize("name", LARGE_ARRAYS)
def test_large_values(name: str) -> None:
    assert same(pack(LARGE_ARRAYS[name]).value(), LARGE_ARRAYS[name])


@pytest.mark.parametrize("name", SMALL_ARRAYS)
def test_small_values_alone_and_beside_large_ones(name: str) -> None:
    value, large = SMALL_ARRAYS[name], np.arange(5000)
    packed = pack(value)
    assert packed.fd < 0
    assert same(packed.value(), value)
    beside = {"before": value, "large": large, "after": [value, large, value]}
    assert same(pack(beside).value(), beside)


def test_order_in_memory_is_kept() -> None:
    assert pack(LARGE_ARRAYS["F order"]).value().flags.f_contiguous
    assert pack(LARGE_ARRAYS["C order"]).value().flags.c_contiguous


leaves = st.one_of(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
        fill=st.just(1),
    ),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=10),
    st.booleans(),
    st.none(),
    st.binary(max_size=10),
)
trees = st.recursive(leaves, lambda t: st.one_of(st.lists(t, max_size=4), st.dictionaries(st.text(max_size=5), t)))


@settings(max_examples=60, deadline=None)
@given(trees)
def test_any_tree(tree: Any) -> None:
    assert same(pack(tree).value(), tree)


@settings(max_examples=30, deadline=None)
@given(st.lists(trees, max_size=5))
def test_any_trees_as_one_message(values: list[Any]) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert same(through((one, other), (1, "x"), *values), ((1, "x"), values))


def test_arrays_lie_on_cache_lines_and_are_read_only() -> None:
    arrays = [np.full(n, n % 256, np.uint8) for n in (5000, 1, 63, 64, 65, 0, 7)]
    for array in pack(arrays).value():
        assert array.ctypes.data % 64 == 0 or array.size == 0
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_small_arrays_are_read_only_too() -> None:
    for value in (np.zeros(3), np.zeros(())):
        assert not pack(value).value().flags.writeable


def test_a_fragment_arrives_as_it_was() -> None:
    columns = {"reward": np.ones((64, 8), np.float32), "valid": np.ones((64, 8), bool), "obs": np.zeros((65, 8, 4))}
    fragment = Fragment(columns, version=3, sampler=1, sequence=9)
    back = pack(fragment).value()
    assert (back.version, back.sampler, back.sequence, back.steps) == (3, 1, 9, 512)
    assert same(dict(back.columns), columns)


def test_equal_arrays_are_sent_once_and_stay_one() -> None:
    array = np.arange(10_000)
    packed = pack([array, array])
    assert packed.nbytes == array.nbytes
    one, other = packed.value()
    assert one is other


def test_the_limit_between_socket_and_memory() -> None:
    assert pack(np.zeros(LARGE - 1, np.uint8)).fd < 0
    assert pack(np.zeros(LARGE, np.uint8)).fd >= 0


def test_many_buffers() -> None:
    """More than the kernel writes at once."""
    arrays = [np.full(20, n) for n in range(3000)]
    assert same(pack(arrays).value(), arrays)


def test_a_short_write_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take less than it is given, and cut anywhere."""
    writev = os.writev

    def short(fd: int, parts: Any) -> int:
        return writev(fd, [b"".join(parts)[:777]])

    monkeypatch.setattr(os, "writev", short)
    arrays = [np.arange(n) for n in (100, 0, 1, 999, 3)]
    assert same(pack(arrays).value(), arrays)


def test_a_full_memory_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, parts: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        pack(np.zeros(10_000))


# -- memory -------------------------------------------------------------------------------------------------


def test_memory_is_counted_while_it_is_held() -> None:
    before, fds = Packed.held, len(descriptors())
    packed = pack(np.zeros(10_000))
    assert Packed.held == before + 80_000
    assert len(descriptors()) == fds + 1
    del packed
    assert Packed.held == before
    assert len(descriptors()) == fds


def test_a_value_outlives_what_it_came_from() -> None:
    value = pack(np.arange(10_000)).value()
    part = value[10:20]
    del value
    gc.collect()
    assert part.tolist() == list(range(10, 20))


def test_opening_twice_gives_the_same_memory() -> None:
    packed = pack(np.arange(10_000))
    assert same(packed.value(), packed.value())


def test_shared_memory_has_no_name() -> None:
    before = shared_memory()
    packed = pack(np.zeros(10_000))
    assert shared_memory() <= before
    assert os.readlink(f"/proc/self/fd/{packed.fd}").startswith("/memfd:raynforce")


def test_descriptors_are_not_inherited(ends: tuple[socket.socket, socket.socket]) -> None:
    packed = pack(np.zeros(10_000))
    assert not os.get_inheritable(packed.fd)
    send(ends[0], (), [packed])
    message = receive(ends[1])
    assert message is not None
    assert not os.get_inheritable(message[1][0].fd)


# -- messages -----------------------------------------------------------------------------------------------


def test_a_message_without_values(ends: tuple[socket.socket, socket.socket]) -> None:
    assert through(ends, (3, True)) == ((3, True), [])


@pytest.mark.parametrize("size", [LONGEST - 200, LONGEST, LONGEST + 1, 3 * LONGEST, 10_000_000])
def test_a_message_longer_than_a_packet(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    value, array = "x" * size, np.arange(10_000)
    head, back = through(ends, (1,), value, array, value[:7])
    assert head == (1,)
    assert same(back, [value, array, value[:7]])


@pytest.mark.parametrize("count", [messages.FDS - 1, messages.FDS, messages.FDS + 1, 3 * messages.FDS, 600])
@pytest.mark.parametrize("text", ["", "x" * LONGEST])
def test_a_message_of_many_arrays(ends: tuple[socket.socket, socket.socket], count: int, text: str) -> None:
    """With a long text, the descriptor that carries the message itself comes before theirs."""
    arrays = [np.full(1000, n) for n in range(count)]
    head, back = through(ends, (count, text), *arrays)
    assert head == (count, text)
    assert same(back, arrays)


def test_messages_do_not_mix(ends: tuple[socket.socket, socket.socket]) -> None:
    values = [np.full(1000, 0), "x" * LONGEST, 2, np.full(10, 3), [np.full(1000, 4)] * 2]
    for number, value in enumerate(values):
        send(ends[0], (number,), [pack(value)])
    for number, value in enumerate(values):
        message = receive(ends[1])
        assert message is not None
        assert message[0] == (number,)
        assert same(message[1][0].value(), value)


def test_one_value_to_many(ends: tuple[socket.socket, socket.socket]) -> None:
    packed = pack(np.arange(10_000))
    for _ in range(3):
        send(ends[0], (), [packed])
    del packed
    for _ in range(3):
        message = receive(ends[1])
        assert message is not None
        assert message[1][0].value().sum() == 49_995_000


def test_the_other_side_has_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], (1,), [pack(np.zeros(10_000))])
    ends[0].close()
    message = receive(ends[1])
    assert message is not None
    assert message[0] == (1,), "what was sent before is still there"
    assert receive(ends[1]) is None
    with pytest.raises(ConnectionError):
        send(ends[1], (1,), [])


def test_the_other_side_dies_between_two_packets(ends: tuple[socket.socket, socket.socket]) -> None:
    """Half of a long message is none, and its descriptors are given back."""
    sent = 0
    real = messages._send

    def dies(*args: Any) -> None:
        nonlocal sent
        sent += 1
        if sent > 1:
            raise ConnectionResetError
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_send", dies)
        with pytest.raises(ConnectionResetError):
            send(ends[0], (), [pack(np.zeros(1000)) for _ in range(messages.FDS + 10)])
    ends[0].close()
    assert receive(ends[1]) is None


def test_the_other_side_dies_with_our_message_unread(ends: tuple[socket.socket, socket.socket]) -> None:
    """What it had sent before is still there."""
    send(ends[1], (1,), [])
    send(ends[0], (2,), [pack(np.arange(10_000))])
    ends[0].close()
    message = receive(ends[1])
    assert message is not None
    assert message[0] == (2,)
    assert receive(ends[1]) is None


def test_errors_travel() -> None:
    error = UsageError("gamma = 7")
    error.trace = "where"
    back = pack(error).value()
    assert (type(back), str(back), back.trace) == (UsageError, "gamma = 7", "where")
