"""What a library reads from files while it counts nothing itself, such as a rollout engine with its weights.

Invariant: only bytes that were read move the process's clock, so what stands still does so here, too. Deliberately not
here: compiling, which reads and writes nothing for minutes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil

from verl_ray.profiling.progress import advance

_EVERY_S = 5.0
_LEAST_BYTES = 1 << 20  # what logs and sockets of an idle process read in that time is far less


@contextlib.contextmanager
def counting_reads(every_s: float = _EVERY_S) -> Iterator[None]:
    """Inside, what this process and those that it has started read from files counts as progress, in bytes."""
    ended = threading.Event()
    counter = threading.Thread(target=_count, args=(ended, every_s), name="reads", daemon=True)
    counter.start()
    try:
        yield
    finally:
        ended.set()
        counter.join()


def _count(ended: threading.Event, every_s: float) -> None:
    known = _read_bytes()
    while not ended.wait(every_s):
        now = _read_bytes()
        if now - known >= _LEAST_BYTES:
            advance(now - known, "bytes read")
            known = now


def _read_bytes() -> int:
    """By calls, and from disks: a file that is mapped into memory is read without calls."""
    process, total = psutil.Process(), 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            counters = one.io_counters()
            total += counters.read_chars + counters.read_bytes
    return total
