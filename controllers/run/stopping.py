"""What a stop means for a run: which step it finishes or gives up, and what is saved.

Invariant: a step whose update has begun is finished, one whose update has not begun is given up, and after a stop the
newest checkpoint is of the newest finished step, unless the run writes none at all (`run.checkpoint_every=0`).
Deliberately not here: signals (`verl_ray/cluster/signals.py`), and how a checkpoint is written (`recovery.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from controllers.run.recovery import Recovery
from verl_ray.cluster.signals import Outlook, Work, all_or_nothing, heed_signals, telling
from verl_ray.config.schema import Config


class Stopping:
    """Follows the steps of a run, and says at any moment what a signal brings."""

    def __init__(self, config: Config, recovery: Recovery) -> None:
        self._saves = config.run.checkpoint_every > 0
        self._recovery = recovery
        self._step: int | None = None  # the one under way
        self._work = Work()
        self._closing_s: float | None = None  # from the update to the end of the last step

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Inside, signals are answered with what they bring to this run."""
        with telling(self.outlook):
            yield

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step, up to its commit. Its evaluation comes after it, and a stop leaves that to the resumed run."""
        heed_signals()
        with all_or_nothing() as work:
            self._work, self._step = work, number
            try:
                yield
            except BaseException:
                if work.since is not None and self._recovery.finished != number:
                    self._recovery.spoiled = number
                raise
            finally:
                self._step = None
        if work.since is not None:
            self._closing_s = time.monotonic() - work.since

    def outlook(self) -> Outlook:
        """What the first signal brings now, and which steps a second one would lose. Any thread may ask."""
        step, since = self._step, self._work.since
        finished = self._recovery.finished
        if step is not None and since is not None:
            then = ", then saved" if self._saves else ""
            return Outlook(f"step {step} is finished first ({self._left(since)}){then}", self._lost(step))
        if step is not None:
            given_up = f"step {step} is given up, its update has not begun"
        elif self._recovery.unrecorded is not None and self._saves:
            given_up = f"the evaluation of step {finished}, if it is not done by then, is made when the run goes on"
        else:
            given_up = "stopping"
        return Outlook(f"{given_up}; {self._kept(finished)}", self._lost(finished))

    def _kept(self, finished: int | None) -> str:
        if finished is None:
            return "no step is finished yet, so there is nothing to save"
        if finished == self._recovery.writing:
            return f"the checkpoint of step {finished} is written first"
        if finished == self._recovery.saved:
            return f"step {finished} is saved already"
        return f"step {finished} is saved first" if self._saves else "nothing is saved (run.checkpoint_every=0)"

    def _lost(self, last: int | None) -> str:
        """The finished or nearly finished steps that no checkpoint holds."""
        first = (self._recovery.saved or 0) + 1
        if last is None or last < first:
            return ""
        return f"step {last}" if first == last else f"steps {first} to {last}"

    def _left(self, since: float) -> str:
        """How long the rest of the step takes, by the last one; else how long it has taken."""
        taken_s = time.monotonic() - since
        expected_s = self._closing_s
        if expected_s is None or taken_s > expected_s:
            return f"it has taken {taken_s:.0f} s since its update began"
        return f"about {max(1.0, expected_s - taken_s):.0f} s left"
