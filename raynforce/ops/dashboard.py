"""The REST interface of a cluster's dashboard: jobs, their logs, and what is wrong when it does not answer."""

from __future__ import annotations

import http.client
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from raynforce.errors import RaynforceError, UsageError, summary

DEFAULT = "http://127.0.0.1:8265"
TALKATIVE = ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging")
SECONDS = 30.0  # that one answer may take


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token along, to wherever it leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class Unreachable(UsageError):
    """Nothing answers at the address, or not as Ray does."""


class Unknown(UsageError):
    """The cluster has no such job."""


class Taken(RaynforceError):
    """There is a job under this submission id already."""


class Dashboard:
    """The dashboard of a cluster at a URL. Nothing is asked before the first call."""

    def __init__(self, address: str | None = None) -> None:
        self.url = located(address)
        mode = (os.environ.get("RAY_AUTH_MODE") or "").lower()
        self._known = "" if mode == "disabled" else token()
        self._token = self._known if mode == "token" else ""  # else not shown to a server that does not ask for it

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def require_jobs(self) -> None:
        """Refuse a server that is no Ray's dashboard, wants another token, or takes no jobs."""
        about = self.ask("GET", "/api/version")
        if not isinstance(about, dict) or "ray_version" not in about:
            raise self._stranger("it has no /api/version of Ray")
        try:
            self.jobs()
        except (Unknown, RaynforceError) as error:
            if isinstance(error, UsageError) and not isinstance(error, Unknown):
                raise
            fix = "install 'ray[default]' there and start its head with `ray start --head --include-dashboard=true`"
            raise UsageError(f"Ray {about['ray_version']} at {self.url} takes no jobs: {fix}") from error

    def jobs(self) -> list[dict[str, Any]]:
        """All submitted jobs that the cluster knows, the newest first."""
        found = [job for job in self.ask("GET", "/api/jobs/") if job.get("type") == "SUBMISSION"]
        return sorted(found, key=lambda job: job.get("start_time") or 0, reverse=True)

    def job(self, submission: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/api/jobs/{quote(submission, safe='')}")
        return found

    def logs(self, submission: str) -> str:
        return str(self.ask("GET", f"/api/jobs/{quote(submission, safe='')}/logs")["logs"])

    def stop(self, submission: str) -> bool:
        return bool(self.ask("POST", f"/api/jobs/{quote(submission, safe='')}/stop")["stopped"])

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request; what the answer holds, or one line that says what is wrong."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with _OPENER.open(request, timeout=SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            if error.code == 401 and not self._token and self._known:
                self._token = self._known
                return self.ask(method, path, body)
            raise self._refused(error.code, text) from error
        except (OSError, http.client.HTTPException) as error:  # of which URLError is one
            why = getattr(error, "reason", None) or error
            fix = "check the address and that the head runs (`ray status` there); from elsewhere, forward its port: "
            fix += "ssh -L 8265:127.0.0.1:8265 HEAD"
            raise Unreachable(f"no Ray dashboard answers at {self.url}: {why}; {fix}") from error
        except ValueError as error:
            raise self._stranger("its answer is no JSON") from error

    def _refused(self, code: int, text: str) -> RaynforceError:
        """What an HTTP status means."""
        shown = "(`ray get-auth-token` on the head shows it)"
        fix = f"set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token {shown}"
        if code == 401 and not self._token:
            return UsageError(f"Ray at {self.url} wants a token, and there is none here: {fix}")
        if code in (401, 403):
            return UsageError(f"Ray at {self.url} refused the token: it is wrong, or has expired; {fix}")
        lines = [line for line in text.strip().splitlines() if line.strip(" .")]
        last = lines[-1][:300] if lines else ""
        if "already exists" in text:
            return Taken(last)
        if code == 404:
            return Unknown(f"{self.url}: {last or 'not found'}")
        return RaynforceError(f"Ray at {self.url} answered with status {code}: {last}")

    def _stranger(self, why: str) -> Unreachable:
        fix = "give the address of Ray's dashboard, such as http://127.0.0.1:8265"
        return Unreachable(f"what answers at {self.url} is no Ray dashboard ({why}): {fix}")

    def client(self) -> Any:
        """Ray's own client, which packs and uploads code, and follows logs."""
        from raynforce.runtimes.ray.private import ray_module
        from raynforce.runtimes.ray.state import environment

        with environment({"RAY_API_SERVER_ADDRESS": self.url}):  # which Ray prefers to what it is given
            kind = ray_module("job_submission").JobSubmissionClient
            for name in TALKATIVE:
                logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)  # each has set its own when it was imported
            return kind(self.url, headers=self.headers)

    def submit(self, request: Mapping[str, Any]) -> str:
        """Upload what `runtime_env` names, then hand in the job; the id is `Taken` if there is one under it."""
        try:
            return str(self.client().submit_job(**request))
        except (RaynforceError, KeyboardInterrupt):
            raise
        except Exception as error:
            if "already exists" in str(error):
                raise Taken(f"{request.get('submission_id')} already exists") from error
            raise RaynforceError(f"Ray at {self.url} did not take the job: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """Ray answers with tracebacks."""
    lines = [line for line in str(error).splitlines() if line.strip(" .")]
    return f"{type(error).__name__}: {lines[-1]}" if lines else summary(error)


def located(address: str | None) -> str:
    """The URL that an address stands for: the one given, that of Ray's variables, or the default."""
    named = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ""
    if address is None:
        address = named if named.startswith(("http://", "https://")) else DEFAULT
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    try:
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        right = False
    if not right or parts.query or any(c.isspace() for c in url) or parts.username:
        fix = "give the URL of Ray's dashboard, such as http://127.0.0.1:8265"
        raise UsageError(f"address {address!r} is none that jobs can be submitted to: {fix}")
    return url.rstrip("/")


def token() -> str:
    """The cluster's token, from where Ray looks for it; empty if there is none."""
    from raynforce.runtimes.ray.state import AUTH, token_file

    _, given, path = (os.environ.get(name) for name in AUTH)
    if given:
        return given.strip()
    file = Path(path) if path else token_file()
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if path:
            problem = f"RAY_AUTH_TOKEN_PATH = {path!r} cannot be read"
            raise UsageError(f"{problem}: point it to a file with the cluster's token") from error
        return ""
