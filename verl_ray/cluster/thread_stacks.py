"""Stacks of this process's threads, and what they show.

Invariant: reading the stacks disturbs no thread and takes no lock. Only Python frames
are visible: work that runs on a device is not. Deliberately not here: stacks of
processes whose interpreter does not run (`process_control.py`).
"""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType

from verl_ray.profiling.progress import Progress, progress

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("verl_ray", "workers", "controllers")
_WAITING = "verl_ray/cluster/"

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


def own_line(thread: int, first_file: str) -> str:
    """Innermost line of our own code in a thread: "workers/actor.py:88 update".

    Where a call has left our code for good, it is the line of the called method.

    Args:
        thread: Identity of the thread.
        first_file: File whose frame calls the method; it is not our own here.

    Returns:
        The line; empty if the thread runs no code of `first_file`.
    """
    called: FrameType | None = None
    own: FrameType | None = None
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != first_file:
        called = frame
        if own is None and _own_path(frame) is not None:
            own = frame
        frame = frame.f_back
    if frame is None or called is None:
        return ""

    return _line_of(own or called)


def innermost_own_line(thread: int | None) -> str:
    """Innermost line of our own code in a thread, apart from code that only waits.

    Returns:
        The line as of `own_line`; empty if the thread runs none of our code.
    """
    if thread is None:
        return ""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = _own_path(frame)
        if path is not None and not path.startswith(_WAITING):
            return _line_of(frame)
        frame = frame.f_back
    return ""


def _line_of(frame: FrameType) -> str:
    path = _own_path(frame) or Path(frame.f_code.co_filename).name
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


def _own_path(frame: FrameType) -> str | None:
    """Path of a frame's file below our packages' folder; None if it is not ours."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(_ROOT):
        return None
    relative = path.relative_to(_ROOT)
    return str(relative) if relative.parts[0] in _PACKAGES else None


def progress_and_waits() -> Progress:
    """Return the progress of this process, and whether it waits for others.

    Workers report their waits on a wire; a wait in a collective is visible on the stack
    alone.
    """
    done = progress()
    waits_for_others = done.waits_for_others or _is_in_collective()
    return replace(done, waits_for_others=waits_for_others)


def _is_in_collective() -> bool:
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
