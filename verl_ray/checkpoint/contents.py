"""The comparison of a checkpoint's files with their checksums, while others start.

Invariant: a check never holds up the end of this process. Deliberately not here: who
waits for it, and what follows (`controllers/run/resumption.py`).
"""

from __future__ import annotations

import queue
import threading

from verl_ray.checkpoint.manifest import HASHING_THREADS, Checkpoint, difference


class ContentsCheck:
    """Reads every file of a checkpoint in threads of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Begin to read.

        Args:
            checkpoint: The checkpoint.
        """
        self.checkpoint = checkpoint
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in checkpoint.files:
            self._names.put(name)
        self._differences: list[str] = []
        # Those of an executor would be waited for at the end of the process.
        self._threads = [
            threading.Thread(target=self._compare, name="checkpoint", daemon=True)
            for _ in range(HASHING_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def has_ended_within(self, seconds: float) -> bool:
        """Wait for the end of the check, at most for some seconds."""
        for thread in self._threads:
            thread.join(seconds)
            if thread.is_alive():
                return False
        return True

    def differences(self) -> list[str]:
        """Return how the files differ from the manifest, once the check has ended."""
        return sorted(self._differences)

    def _compare(self) -> None:
        # Consumes the names of files. Ends when none is left.
        while True:
            try:
                name = self._names.get_nowait()
            except queue.Empty:
                return
            reason = difference(self.checkpoint, name, verify=True)
            if reason is not None:
                self._differences.append(reason)
