"""What a backend needs beside this project's own packages.

Invariant: to look for a package imports nothing of it, nor torch. Deliberately not here: versions (pyproject.toml).
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = {"megatron": ("megatron.core",), "megatron_fsdp": ("megatron.core", "megatron_fsdp")}
"""By the name of a backend; others need none."""

INSTALL = "pip install 'verl_ray[megatron]'"
"""What brings all of them."""


def missing_packages(backend: str) -> list[str]:
    """Those of a backend that this Python does not find."""
    return [name for name in NEEDED.get(backend, ()) if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False
