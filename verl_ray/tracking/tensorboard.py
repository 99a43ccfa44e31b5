"""TensorBoard event files in `<run dir>/tensorboard/`.

Invariant: there is one event per step with all its scalars. A continued run marks the
steps that it takes back. The events are written with TensorBoard's own writer, so
neither torch nor TensorFlow is needed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_ray.paths import program
from verl_ray.shell import for_shell
from verl_ray.tracking.base import Sample, Tracker


class TensorBoardTracker(Tracker):
    """Writes scalars for `tensorboard --logdir <run dir>`."""

    def __init__(self, run_dir: Path, committed_step: int | None = None) -> None:
        """Open an event file.

        Args:
            run_dir: Folder of the run, which holds `tensorboard/`.
            committed_step: Step that the run continues from; None if it starts from the
                beginning. Later steps of an earlier process are taken back.
        """
        # Imported here so that runs without TensorBoard do not pay for it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._dir = run_dir / "tensorboard"
        self._writer = EventFileWriter(str(self._dir))

        # TensorBoard discards what it has of this step and later ones.
        first_step = 0
        if committed_step is not None:
            first_step = committed_step + 1
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(
            Event(wall_time=time.time(), step=first_step, session_log=start)
        )

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing: responses are in `evaluations/`, and samples in W&B."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()

    def outputs(self) -> dict[str, str]:
        command = [program("tensorboard"), "--logdir", str(self._dir)]
        return {"TensorBoard": for_shell(command)}
