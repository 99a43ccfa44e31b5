"""TensorBoard event files under `<run dir>/tensorboard/`.

Invariant: one event per step with all its scalars; a continued run tells TensorBoard which steps it takes back. It
writes with TensorBoard's own writer, so neither torch nor TensorFlow is needed. Samples are not repeated here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_ray.tracking.base import Sample, Tracker


class TensorBoardTracker(Tracker):
    """Writes scalars for `tensorboard --logdir <run dir>`.

    Args:
        run_dir: holds the `tensorboard/` folder.
        committed_step: the step that the run continues from; later ones of an earlier process are taken back.
            None = from its beginning.
    """

    def __init__(self, run_dir: Path, committed_step: int | None = None) -> None:
        # Imported here so that runs without TensorBoard do not pay for it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._dir = run_dir / "tensorboard"
        self._writer = EventFileWriter(str(self._dir))
        first_step = 0 if committed_step is None else committed_step + 1
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Nothing: the samples are in `samples/` and in W&B's table, where they can be searched."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()

    def outputs(self) -> dict[str, str]:
        return {"TensorBoard": f"tensorboard --logdir {self._dir}"}
