"""Masks for keys and passwords that stand in logs.

Invariant: a key in one of the forms below is shown by its first characters alone. One
of another form is not recognized, so a person still looks before a page is shared.
"""

from __future__ import annotations

import re

_MASK = "(masked)"

_KNOWN_KEY = re.compile(
    r"\b("
    r"sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|wandb_v1_"
    r")[\w-]{12,}"
)
"""Keys of model services, hubs, trackers and clouds, which begin with their kind."""

_NAMED_VALUE = re.compile(
    r"(\b\w*(?:api_?key|access_?key|secret|password|auth_?token|hf_token)\w*"
    r"(?:[\"']?\s*=\s*[\"']?|[\"']\s*:\s*[\"']))(?!None\b|null\b|\*)[^\s\"',;)}\]]{6,}",
    re.IGNORECASE,
)
"""Values that a name, as of an environment variable, calls secret."""

_IN_REQUEST = re.compile(r"(\b(?:Bearer|Basic) )[\w.+/=~-]{8,}", re.IGNORECASE)
"""Headers of HTTP requests."""

_IN_URL = re.compile(
    r"(\b[a-z][a-z0-9+.-]{0,15}://[^\s/:@]{0,99}:)[^\s/@]{1,299}(?=@)", re.IGNORECASE
)
"""Passwords in addresses."""


def without_credentials(text: str) -> str:
    """Return a text in which keys and passwords are masked."""
    for pattern in (_IN_URL, _IN_REQUEST, _KNOWN_KEY, _NAMED_VALUE):
        text = pattern.sub(rf"\1{_MASK}", text)
    return text
