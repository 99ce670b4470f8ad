"""The token that clients send."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

from raynforce.errors import UsageError

VARIABLE, FILE = "RAYNFORCE_SERVE_TOKEN", "RAYNFORCE_SERVE_TOKEN_FILE"
SHORTEST = 16  # characters, where others than this machine can try


def token_from_environment() -> str | None:
    if token := os.environ.get(VARIABLE):
        return token
    if not (path := os.environ.get(FILE)):
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{FILE} = {path!r} cannot be read: {getattr(error, 'strerror', error)}") from None


def settled(token: str | None, host: str) -> str:
    """The token to ask for: the one that was given, or a new one on loopback."""
    token = token or token_from_environment()
    local = is_loopback(host)
    if token is None:
        if not local:
            fix = f"give one with --token, {VARIABLE} or {FILE}"
            raise UsageError(f"--host {host} can be reached from other machines, so it needs a token of yours: {fix}")
        return secrets.token_urlsafe(32)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the token has characters that a header cannot carry: use letters, digits, - and _")
    if not local and len(token) < SHORTEST:
        raise UsageError(f"the token has {len(token)} characters: for --host {host} it needs at least {SHORTEST}")
    return token


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
