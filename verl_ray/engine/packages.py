"""Whether what a backend needs beside this project's own packages is installed.

Invariant: to look for a package imports nothing of it, nor torch. Deliberately not here: which it needs
(`verl_ray/backends`), and versions (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

INSTALL = "pip install 'verl_ray[megatron]'"
"""What brings all of them."""


def missing_packages(needed: Iterable[str]) -> list[str]:
    """Those that this Python does not find."""
    return [name for name in needed if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False
