"""The clock of a weight sync: what its seconds were spent on.

Invariant: every moment from the beginning to the last call counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

SyncPart = Literal["offload", "stream", "prove", "wake"]
"""A part of a sync.

- offload: training state leaves the GPUs, or returns to them.
- stream: the weights are sent, loaded and committed.
- prove: the log-probs of the probe are computed and compared.
- wake: the engines' KV caches wake.
"""


class SyncClock:
    """The seconds of one sync, by its parts.

    Args:
        clock: Function that returns a rising number of seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s = clock()
        self._seconds: dict[str, float] = dict.fromkeys(get_args(SyncPart), 0.0)

    def count_as(self, part: SyncPart) -> None:
        """Count the time since the last call, or the beginning, towards a part."""
        now_s = self._clock()
        self._seconds[part] += now_s - self._last_s
        self._last_s = now_s

    def metrics(self, fingerprints_s: float, nbytes: int) -> dict[str, float]:
        """Return the times of the sync, and the bytes per second.

        Args:
            fingerprints_s: Seconds that the fingerprints of both sides took; they are
                a part of the stream's.
            nbytes: Bytes that were sent.
        """
        # The other times are of offloading and waking, which send no weights.
        sending_s = self._seconds["stream"] + self._seconds["prove"]
        times = self._seconds | {"fingerprints": fingerprints_s}
        metrics = {f"timing_s/weight_sync/{part}": times[part] for part in times}
        return metrics | {"weight_sync/bytes_per_s": nbytes / sending_s}
