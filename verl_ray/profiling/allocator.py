"""Settings of torch's allocator of device memory.

Invariant: a setting of the user is never changed for a trainer. Nothing here imports
torch before it has to, since the settings are environment variables that torch reads
once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that torch 2.11 to 2.13 reads. The first that is set counts."""

EXPANDABLE = ("expandable_segments:true", "expandable_segments:1")


def trainer_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that a trainer on a GPU needs besides the inherited ones.

    A trainer uses expandable segments unless the user has set anything of the
    allocator. In segments of fixed size, rows of changing lengths leave holes that no
    later micro-batch fits into.

    Args:
        inherited: Variables that the process was started with.
    """
    if any(inherited.get(name) for name in VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Make device memory that is allocated in the block exportable to other processes.

    Memory of an expandable segment is exported as file descriptors, which the other
    process has to fetch from this one. Kernels before 5.6, and containers without the
    right to trace, cannot do that. While the setting is off, torch's allocator serves
    requests from segments of fixed size alone, also where an expandable one has
    available bytes.
    """
    settings = _current_settings()
    if not is_expandable(settings):
        yield
        return

    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        # All settings are restored: those that a call does not name may return to
        # their defaults.
        torch._C._accelerator_setAllocatorSettings(settings)


def _current_settings() -> str:
    for name in VARIABLES:
        value = os.environ.get(name)
        if value:
            return value
    return ""


def is_expandable(settings: str) -> bool:
    """Whether the value of such a variable requests expandable segments."""
    normalized = [setting.lower().replace(" ", "") for setting in settings.split(",")]
    return any(setting in EXPANDABLE for setting in normalized)
