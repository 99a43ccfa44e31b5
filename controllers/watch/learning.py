"""The warning about a run that learns nothing, printed while it goes on.

Invariant: what is printed follows from recorded lines and the configuration alone, so
a resumed run prints the same as one that never stopped. The causes themselves are those
of `verl_ray/report/findings.py`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence

from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.report.findings import FAILED_SCORES, PATIENCE, learns_nothing
from verl_ray.report.lines import Line
from verl_ray.tracking.base import Sample, Tracker


class LearningWatch(Tracker):
    """Prints a warning when the newest steps have a cause to learn nothing."""

    def __init__(self, config: Config, recorded: Sequence[Line]) -> None:
        """Take the configuration and the lines of the steps before.

        Args:
            config: Configuration of the run.
            recorded: Lines of metrics.jsonl that a resumed run continues.
        """
        self._config = to_tree(config)
        self._lines: deque[Line] = deque(recorded, maxlen=PATIENCE)
        self._printed: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the causes that the newest steps show and that were not printed."""
        self._lines.append(metrics)
        for cause in learns_nothing(list(self._lines), self._config):
            # Failed scores are in the line of each step, and were reported before.
            is_new = cause.kind not in self._printed | {FAILED_SCORES}
            if is_new and cause.last_step == step:
                self._printed.add(cause.kind)
                print(f"warning: {cause}", file=sys.stderr, flush=True)

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}
