"""The check of a checkpoint's contents.

Invariant: what has changed is noticed before anything loads it, and the next driver
passes that checkpoint over before it starts anything.
"""

from __future__ import annotations

from controllers.run.resumption import Resumption
from controllers.supervisor import reports
from verl_ray.checkpoint.manifest import (
    ContentsCheck,
    TornCheckpoint,
)
from verl_ray.checkpoint.store import torn_in_words
from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.waiting import TICK_S
from verl_ray.profiling.phases import PHASES, phase


class CheckpointCheck:
    """Compares the files of a checkpoint with their checksums, in the background."""

    def __init__(self, resumption: Resumption) -> None:
        """Begin, if there is a checkpoint."""
        self._resumption = resumption
        self._contents: ContentsCheck | None = None
        if resumption.checkpoint is not None:
            self._contents = ContentsCheck(resumption.checkpoint)

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            ConfigError: The contents of the checkpoint have changed.
        """
        contents = self._contents
        if contents is None:
            return
        total = len(contents.checkpoint.files)
        with phase("comparing the checkpoint with its checksums") as comparing:
            while not contents.has_ended_within(TICK_S):
                comparing.reach(contents.num_begun, total, "files")
                heed_signals()
                PHASES.tick()
        faults = contents.differences()
        if not faults:
            return

        error = TornCheckpoint(
            torn_in_words(contents.checkpoint, faults),
            fix="Restore it, or start the run again: with run.resume=auto it goes on"
            " from the checkpoint before, if there is one",
        )
        if self._resumption.is_in_run_dir:
            self._resumption.store.note_damaged(contents.checkpoint)
            if self._resumption.may_choose:
                reports().retry(str(error))
        raise self._resumption.as_problem(error) from error
