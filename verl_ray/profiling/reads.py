"""Progress of a library that reads files but counts nothing itself.

An example is a rollout engine that reads its weights.

Invariant: only bytes that were read count as progress, so a library that stands still
is seen to. Deliberately not here: compilation, which reads and writes nothing for
minutes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil

from verl_ray.profiling.progress import advance

_INTERVAL_S = 5.0
# Logs and sockets of an idle process read far less in one interval.
_LEAST_BYTES = 1 << 20


@contextlib.contextmanager
def counting_reads(interval_s: float = _INTERVAL_S) -> Iterator[None]:
    """Count bytes that are read within the block as progress.

    Reads of this process and of its descendants count.

    Args:
        interval_s: Seconds between two looks at the counters.
    """
    ended = threading.Event()
    counter = threading.Thread(
        target=_count, args=(ended, interval_s), name="reads", daemon=True
    )
    counter.start()
    try:
        yield
    finally:
        ended.set()
        counter.join()


def _count(ended: threading.Event, interval_s: float) -> None:
    # Looks at the counters at regular intervals. Ends with the block.
    counted = _read_bytes()
    while not ended.wait(interval_s):
        total = _read_bytes()
        if total - counted >= _LEAST_BYTES:
            advance(total - counted, "bytes read")
            counted = total


def _read_bytes() -> int:
    """Bytes that this process and its descendants have read so far."""
    this_process = psutil.Process()
    total = 0
    for process in [this_process, *this_process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            counters = process.io_counters()
            # A file that is mapped into memory is read from the disk without calls.
            total += counters.read_chars + counters.read_bytes
    return total
