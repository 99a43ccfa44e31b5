"""The settings of torch's allocator of device memory, as far as the project has a say in them.

Invariant: what a user set is never changed for a trainer. Nothing here imports torch before it has to: the settings are
environment variables, which torch reads once. Deliberately not here: rollout engines, which cannot use what trainers
can (`rollout/vllm_setup.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""All that torch 2.11 to 2.13 reads, in the order in which it looks: the first that is set counts."""

EXPANDABLE = ("expandable_segments:true", "expandable_segments:1")


def trainer_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a trainer on a GPU needs beside the variables that it was `given`: segments that grow, unless the user set
    anything of the allocator. Rows of changing lengths otherwise leave holes in fixed segments that no later
    micro-batch fits into."""
    if any(given.get(name) for name in VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Device memory that is allocated inside can be exported to another process.

    Memory of an expandable segment is exported as file descriptors, which the other process has to fetch from this one:
    kernels before 5.6 and containers without the right to trace cannot. While the setting is off, torch's allocator
    serves requests from segments of the fixed kind alone, also where an expandable one has room.
    """
    settings = next((value for name in VARIABLES if (value := os.environ.get(name))), "")
    if not is_expandable(settings):
        yield
        return
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        # all of them: those that a call does not name may go back to their defaults
        torch._C._accelerator_setAllocatorSettings(settings)


def is_expandable(settings: str) -> bool:
    """Whether such a variable asks for expandable segments."""
    return any(one.lower().replace(" ", "") in EXPANDABLE for one in settings.split(","))
