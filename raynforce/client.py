"""A served policy, asked over HTTP: `act` as of a policy that was loaded. Standard library and numpy alone."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from raynforce.errors import RaynforceError, UsageError

NPY = "application/x-npy"
PAUSES = (0.0, 0.05, 0.2, 0.5)  # seconds before each further attempt, where a connection was lost
LOST = (ConnectionError, http.client.RemoteDisconnected, http.client.BadStatusLine, http.client.CannotSendRequest)


class ServerError(RaynforceError):
    """The server refused a request, or could not answer it; `status` is the HTTP code."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"{why} (HTTP {status})")
        self.status = status


class Client:
    """A policy that `raynforce serve` serves. Keeps its connection, one for each thread, and opens it again if lost."""

    def __init__(self, url: str, token: str, *, timeout: float = 30.0) -> None:
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise UsageError(f"{url!r} is not the URL of a server: give http://HOST:PORT")
        self.url = url.rstrip("/")
        self._kind = http.client.HTTPSConnection if found.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._path = found.hostname, found.port, found.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = timeout
        self._mine = threading.local()
        self._all: list[http.client.HTTPConnection] = []

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def act(
        self, obs: Any, state: Any = None, mask: np.ndarray | None = None, *, greedy: bool | None = None
    ) -> np.ndarray | Any:
        """Choose an action for one observation, or actions for a batch, as `load(run).act`.

        Without `greedy` the server decides, which is greedy unless it was started with `--sample`. A policy with memory
        wants a `state`, `{}` where an episode begins, and then `action, state` is returned.
        """
        if isinstance(obs, np.ndarray) and state is None and mask is None and greedy is None:
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, obs, allow_pickle=False)
            answer = np.load(io.BytesIO(self._ask("POST", "/act", buffer.getvalue(), NPY)), allow_pickle=False)
            return answer[()] if answer.ndim == 0 else answer
        asked = {"obs": plain(obs), "greedy": greedy, "mask": None if mask is None else plain(np.asarray(mask))}
        if state is not None:
            asked["state"] = {name: plain(np.asarray(array)) for name, array in state.items()}
        body = json.dumps({name: value for name, value in asked.items() if value is not None}).encode()
        answer = json.loads(self._ask("POST", "/act", body))
        array = np.asarray(answer["action"])
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        action = array[()] if array.ndim == 0 else array
        if "state" not in answer:
            return action
        return action, {name: np.asarray(found, np.float32) for name, found in answer["state"].items()}

    def info(self) -> dict[str, Any]:
        """Spaces, policies, limits."""
        found: dict[str, Any] = json.loads(self._ask("GET", "/info"))
        return found

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ask("GET", "/health"))
        return found

    def metrics(self) -> str:
        """What Prometheus reads."""
        return self._ask("GET", "/metrics").decode()

    def reload(self) -> list[dict[str, Any]]:
        """Have the server take the newest checkpoint; what has changed."""
        found: list[dict[str, Any]] = json.loads(self._ask("POST", "/reload"))["taken"]
        return found

    def rollback(self, policy: str = "main") -> dict[str, Any]:
        """Have the server go back to the policy before."""
        body = json.dumps({"policy": policy}).encode()
        found: dict[str, Any] = json.loads(self._ask("POST", "/rollback", body))["taken"][0]
        return found

    def close(self) -> None:
        while self._all:
            self._all.pop().close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        headers = self._headers if body is None else {**self._headers, "Content-Type": kind}
        pauses = PAUSES if path != "/rollback" else ()  # which is not the same when it is done twice
        for pause in (*pauses, None):
            connection = self._connection()
            try:
                connection.request(method, f"{self._path}{path}", body, headers)
                response = connection.getresponse()
                answer = response.read()
            except LOST as error:
                connection.close()
                if pause is None:
                    raise RaynforceError(f"the server at {self.url} cannot be reached: {error}") from error
                time.sleep(pause)
                continue
            except OSError as error:
                connection.close()
                raise RaynforceError(f"the server at {self.url} does not answer: {error}") from error
            if response.status == 200:
                return answer
            raise _refusal(response.status, answer)
        raise AssertionError("the last attempt returns or raises")

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if found is None:
            found = self._mine.connection = self._kind(self._host, self._port, timeout=self._timeout)
            self._all.append(found)
        return found


def _refusal(status: int, answer: bytes) -> RaynforceError:
    try:
        why = str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        why = answer.decode(errors="replace").strip()[:200] or "the server answered without a word"
    return UsageError(why) if status == 422 else ServerError(status, why)


def plain(obs: Any) -> Any:
    """Arrays in an observation as lists, which JSON can hold; tuples too."""
    if isinstance(obs, dict):
        return {name: plain(value) for name, value in obs.items()}
    if isinstance(obs, tuple | list):
        return [plain(value) for value in obs]
    return obs.tolist() if isinstance(obs, np.ndarray | np.generic) else obs
