"""The live warning of a run that learns nothing.

Invariant: a cause is printed once per process, after the step that shows it.
Deliberately not here: the causes (`learning.py`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence

from controllers.watch.learning import FAILED_SCORES, PATIENCE, Line, diagnoses
from verl_ray.config.schema import Config
from verl_ray.tracking.base import Sample, Tracker


class LearningWatch(Tracker):
    """Prints a warning when the newest steps have a cause to learn nothing."""

    def __init__(self, config: Config, recorded: Sequence[Line]) -> None:
        """Take the configuration and the lines of the steps before.

        Args:
            config: Configuration of the run.
            recorded: Lines of metrics.jsonl that a resumed run continues.
        """
        self._config = config
        self._lines: deque[Line] = deque(recorded, maxlen=PATIENCE)
        self._printed: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the causes that the newest steps show and that were not printed."""
        self._lines.append(metrics)
        for diagnosis in diagnoses(list(self._lines), self._config):
            # Failed scores are in the line of each step, and were reported before.
            is_new = diagnosis.cause not in self._printed | {FAILED_SCORES}
            if is_new and diagnosis.last_step == step:
                self._printed.add(diagnosis.cause)
                print(f"warning: {diagnosis}", file=sys.stderr, flush=True)

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}
