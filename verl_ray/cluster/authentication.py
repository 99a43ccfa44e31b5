"""The token of a cluster that a session starts.

Invariant: the token is in the environment of the session's process alone, never in a
file. Deliberately not here: tokens of clusters that the session connects to, which the
user sets.
"""

from __future__ import annotations

import os
import secrets

from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]


def set_own_token() -> dict[str, str | None]:
    """Give this process a token for a cluster of its own, unless the user has set one.

    Without it, Ray would save a token in the home directory. A later `ray start` would
    adopt that token and refuse `ray job submit` from shells that do not know it.

    Returns:
        Previous values of the environment variables that were set, for `restore`.
    """
    changes: dict[str, str] = {}
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
        changes["RAY_AUTH_MODE"] = "token"
        user_settings = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
        if not user_settings:
            changes["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    _reload()
    return previous


def restore(previous: dict[str, str | None]) -> None:
    """Restore environment variables; None stands for a variable that was not set."""
    for name, value in previous.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if previous:
        _reload()


def _reload() -> None:
    # Ray reads RAY_AUTH_* once per process. The configuration comes first, since
    # threads reload the token by it.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
