"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Limit in seconds of what takes a moment on a machine that does nothing else."""


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for a condition; it fails the test not to hold within the limit."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it does not hold after {seconds:g} s"
        time.sleep(0.01)
