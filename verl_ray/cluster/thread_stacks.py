"""Stacks of this process's threads, and what they show.

Invariant: reading the stacks disturbs no thread and takes no lock. Only Python frames
are visible: work that runs on a device is not. Deliberately not here: stacks of
processes whose interpreter does not run (`process_control.py`).
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
# Innermost frames of a thread in a collective: torch's operator, the function of
# torch.distributed, and the function's decorator.
_INNERMOST_FRAMES = 3


def thread_stacks(first_file: str) -> str:
    """Python stacks of all threads but the calling one.

    Threads that run code of `first_file` come first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own_ident = threading.get_ident()

    stacks = []
    for ident, frame in sys._current_frames().items():
        if ident != own_ident:
            name = names.get(ident, ident)
            lines = "".join(traceback.format_stack(frame))
            stacks.append(f"thread {name}:\n{lines}")

    stacks.sort(key=lambda stack: f'"{first_file}"' not in stack)
    return "\n".join(stacks)


def is_in_collective() -> bool:
    """Whether a thread of this process is in one of torch's collectives."""
    return any(map(_shows_collective, sys._current_frames().values()))


def _shows_collective(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    for _ in range(_INNERMOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_COLLECTIVES):
            return True
        frame = frame.f_back
    return False
