"""The most memory that a process, or a tree of processes, holds within a block.

Invariant: a thread samples it, and a sample is taken at the end in any case. All
amounts are bytes. This module loads no torch.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import TracebackType

from verl_ray.profiling.memory import malloc_trim, tree_pss_bytes


def anonymous_bytes() -> int:
    """Memory of this process without a file behind it; on Linux alone.

    Pages of mapped files do not count: the kernel takes them back when it needs them.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status["RssAnon"].removesuffix("kB")) * 1024


class AnonymousGrowth:
    """Largest growth of this process's anonymous memory within a block.

    Use it as `with AnonymousGrowth() as growth:`; `peak_bytes` is set at the end.
    """

    peak_bytes = 0

    def __enter__(self) -> AnonymousGrowth:
        # Garbage of earlier work would hide growth that reuses its memory.
        gc.collect()
        malloc_trim()
        self._bytes_before = anonymous_bytes()
        self._most_bytes = self._bytes_before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # On a busy machine the thread may not have sampled at all.
        self._sample()
        self._ended.set()
        self._thread.join()
        self.peak_bytes = self._most_bytes - self._bytes_before

    def _watch(self) -> None:
        # Samples every 2 ms. Ends with the block.
        while not self._ended.wait(0.002):
            self._sample()

    def _sample(self) -> None:
        self._most_bytes = max(self._most_bytes, anonymous_bytes())


class TreeMemorySampler:
    """Peak memory of a process tree within a block, sampled by a thread.

    Use it as `with TreeMemorySampler() as memory:`. A sample takes milliseconds per
    process (5 measured with torch loaded), so a short interval disturbs the processes.
    One sample is taken at the start and one at the end in any case.

    Args:
        root_pid: Root of the tree; None for this process.
        interval_s: Pause between samples in seconds.
    """

    def __init__(self, root_pid: int | None = None, interval_s: float = 0.5) -> None:
        self.peak_bytes = 0
        if root_pid is None:
            root_pid = os.getpid()
        self._root_pid = root_pid
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="memory sampler", daemon=True
        )

    def __enter__(self) -> TreeMemorySampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        # Samples at regular intervals. Ends with the block.
        while not self._ended.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_pss_bytes(self._root_pid))
