"""Requests that arrive together are acted on as one batch: a forward pass costs the same for one row and for many."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from raynforce.errors import UsageError
from raynforce.ops.serving.keeping import Served, all_allowed, zeros
from raynforce.ops.serving.metrics import Metrics
from raynforce.ops.serving.reading import Asked, Reader
from raynforce.policy import Policy
from raynforce.spaces import MASK

ROWS = 1024  # observations of one forward pass, at most
WAITING = 4096  # observations that may wait; more are refused
SLOW = 1e-3  # seconds of a forward pass from which on it has a thread, so that requests are read meanwhile
Answer = bytes | BaseException


class Batcher:
    """Acts with one policy; whoever asks gets a future of the answer's body. Belongs to one event loop."""

    def __init__(self, served: Served, policy: Policy, reader: Reader, metrics: Metrics, *, greedy: bool) -> None:
        self.served = served
        self._policy, self._reader, self._metrics, self._greedy = policy, reader, metrics, greedy
        self._tail = b',"version":%d,"policy":"%s"}' % (served.number, served.name.encode())
        self._waiting: list[tuple[Asked, asyncio.Future[bytes]]] = []
        self._rows = 0
        self._due = False
        self._thread = ThreadPoolExecutor(1, "raynforce-act") if _seconds(policy) > SLOW else None

    def act(self, asked: Asked) -> asyncio.Future[bytes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting.append((asked, future))
        self._rows += asked.lanes
        if not self._due:
            self._due = True
            loop.call_soon(self._flush)  # after all requests that have arrived by now
        return future

    @property
    def full(self) -> bool:
        return self._rows >= WAITING

    def _flush(self) -> None:
        waiting, self._waiting, self._rows = self._waiting, [], 0
        if self._thread is None:
            self._due = False
            self._tell(waiting, self._answers([asked for asked, _ in waiting]))
            return
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, self._answers, [asked for asked, _ in waiting])
        done.add_done_callback(lambda answers: self._told(waiting, answers))

    def _told(self, waiting: Sequence[tuple[Asked, asyncio.Future[bytes]]], answers: asyncio.Future) -> None:
        self._tell(waiting, answers.result())
        if self._waiting:
            self._flush()
        else:
            self._due = False

    @staticmethod
    def _tell(waiting: Sequence[tuple[Asked, asyncio.Future[bytes]]], answers: Sequence[Answer]) -> None:
        for (_, future), answer in zip(waiting, answers, strict=True):
            if future.done():  # whoever asked has gone
                continue
            if isinstance(answer, bytes):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    def _answers(self, asked: Sequence[Asked]) -> list[Answer]:
        """The bodies of answers, or errors, in order; the mistake of one does not concern the others."""
        answers: list[Answer] = [b""] * len(asked)
        groups: dict[bool, list[int]] = {}
        for index, one in enumerate(asked):
            greedy = self._greedy if one.greedy is None else one.greedy
            if one.mask is not None or one.state is not None or self._policy.recurrent:
                answers[index] = self._alone(one, greedy)
            else:
                groups.setdefault(greedy, []).append(index)
        for greedy, indices in groups.items():
            for part in _parts(indices, asked):
                self._together(asked, part, greedy, answers)
        return answers

    def _together(self, asked: Sequence[Asked], indices: Sequence[int], greedy: bool, answers: list[Answer]) -> None:
        leaves = asked[indices[0]].leaves
        if len(indices) > 1:
            leaves = {path: np.concatenate([asked[index].leaves[path] for index in indices]) for path in leaves}
        leaves = self._reader.settled(leaves)
        if not self._reader.finite(leaves):
            fine = []
            for index in indices:
                if self._reader.finite(self._reader.settled(asked[index].leaves)):
                    fine.append(index)
                else:
                    answers[index] = UsageError("the observation has a value that is not finite")
            if fine:
                self._together(asked, fine, greedy, answers)
            return
        try:
            actions = self._policy.act(self._reader.nested(leaves), mask=leaves.get(MASK), greedy=greedy)
        except Exception as error:
            for index in indices:
                answers[index] = error
            return
        self._metrics.acted(self.served.name, len(actions))
        rows, begin = actions.tolist(), 0
        for index in indices:
            one = asked[index]
            if one.npy:
                answers[index] = _npy(actions[begin] if one.single else actions[begin : begin + one.lanes])
            else:
                answers[index] = self._json(rows[begin] if one.single else rows[begin : begin + one.lanes])
            begin += one.lanes

    def _alone(self, one: Asked, greedy: bool) -> Answer:
        """With a mask or a state, which `act` checks."""
        leaves = self._reader.settled(one.leaves)
        if not self._reader.finite(leaves):
            return UsageError("the observation has a value that is not finite")
        try:
            mask = leaves.get(MASK, one.mask)
            answer = self._policy.act(self._reader.nested(leaves), one.state, mask, greedy=greedy)
        except Exception as error:
            return error
        self._metrics.acted(self.served.name, one.lanes)
        actions, after = answer if self._policy.recurrent else (answer, None)
        told = self._json((actions[0] if one.single else actions).tolist())
        if after is None:
            return told
        states = json.dumps({name: state.tolist() for name, state in after.items()}, separators=(",", ":"))
        return told[:-1] + b',"state":' + states.encode() + b"}"

    def _json(self, action: object) -> bytes:
        if type(action) is int:
            return b'{"action":%d%b' % (action, self._tail)
        return b'{"action":%b%b' % (json.dumps(action, separators=(",", ":")).encode(), self._tail)


def _parts(indices: Sequence[int], asked: Sequence[Asked]) -> list[list[int]]:
    """Requests by forward pass: at most `ROWS` rows, or one request."""
    parts: list[list[int]] = [[]]
    rows = 0
    for index in indices:
        if rows and rows + asked[index].lanes > ROWS:
            parts.append([])
            rows = 0
        parts[-1].append(index)
        rows += asked[index].lanes
    return parts


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def _seconds(policy: Policy) -> float:
    """What a forward pass takes, the quickest of three."""
    obs, mask, times = zeros(policy.spec.env, 1), all_allowed(policy.spec.env), []
    for _ in range(3):
        began = time.perf_counter()
        policy.act(obs, {} if policy.recurrent else None, mask)
        times.append(time.perf_counter() - began)
    return min(times)
