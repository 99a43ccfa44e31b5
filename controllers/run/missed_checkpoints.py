"""Checkpoints that could not be written, and for how long a run goes on without them.

Invariant: each is said, and too many in a row stop the run.
"""

from __future__ import annotations

import sys

from verl_ray.errors import CheckpointError, TrackingError


class SaveFailures:
    """Counts the checkpoints in a row that a disk has prevented."""

    def __init__(self, limit: int) -> None:
        """Begin without failures.

        Args:
            limit: How many the run outlives, run.max_failed_checkpoints.
        """
        self._limit = limit
        self._in_a_row = 0

    def note(self, step: int, error: CheckpointError | TrackingError) -> None:
        """Note that the checkpoint of a step could not be written.

        Raises:
            CheckpointError | TrackingError: `error` itself: there were too many, or the
                ranks cannot go on after it.
        """
        if isinstance(error, CheckpointError) and not error.spares_worker:
            raise error

        self._in_a_row += 1
        limit = f"run.max_failed_checkpoints = {self._limit}"
        if self._in_a_row > self._limit:
            if self._limit:
                error.add_note(f"more than {limit} were not written in a row")
            raise error
        print(
            f"warning: the run goes on without the checkpoint of step {step}, and tries"
            f" again ({self._in_a_row} of at most {limit} in a row): {error}",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        """Note that a checkpoint is written."""
        self._in_a_row = 0
