"""Detection of optional packages that a backend needs.

Invariant: looking for a package imports neither the package nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

INSTALL = "pip install 'verl_ray[megatron]'"
"""The command that installs every optional package."""


def missing_packages(needed: Iterable[str]) -> list[str]:
    """Return the packages that are not installed for this Python."""
    return [name for name in needed if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # `find_spec` imports the parents of a dotted name; one of them is missing.
        return False
