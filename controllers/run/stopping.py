"""The effect of a stop on a run: which step it finishes or gives up, and what is saved.

Invariant: a step whose update has begun is finished, and one whose update has not
begun is given up. After a stop the newest checkpoint is that of the newest finished
step, unless the run writes none at all (`run.checkpoint_every=0`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from controllers.run.recovery import Recovery
from verl_ray.cluster.signals import (
    AtomicWork,
    Outlook,
    all_or_nothing,
    announcing,
    heed_signals,
)
from verl_ray.config.schema import Config


class Stopping:
    """Follows the steps of a run and announces at any moment what a signal would do."""

    def __init__(self, config: Config, recovery: Recovery) -> None:
        self._saves = config.run.checkpoint_every > 0
        self._recovery = recovery
        self._work = AtomicWork()

        # Number of the current step; None between steps.
        self._step: int | None = None

        # Seconds from the start of the update to the end of the last finished step.
        self._closing_s: float | None = None

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Answer the signals that arrive in this block with their effect on the run."""
        with announcing(self.outlook):
            yield

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run a step in this block, up to its commit.

        The evaluation of the step comes after the block. A stop leaves it to the
        resumed run.
        """
        heed_signals()

        with all_or_nothing() as work:
            self._work = work
            self._step = number
            work.can_be_redone = lambda: self._recovery.can_come_back
            try:
                yield
            except BaseException:
                # The update has begun and was not committed, so the roles may hold
                # half of it.
                update_begun = work.committed_at is not None
                if update_begun and self._recovery.finished_step != number:
                    self._recovery.spoiled_step = number
                raise
            finally:
                self._step = None

        if work.committed_at is not None:
            self._closing_s = time.monotonic() - work.committed_at

    def outlook(self) -> Outlook:
        """Return the effect of a signal now, and the steps that a second one loses.

        This may be called from any thread.
        """
        # Another thread may change these at any moment, so each is read once.
        step = self._step
        since = self._work.committed_at
        finished_step = self._recovery.finished_step

        if step is not None and since is not None:
            then = ", then saved" if self._saves else ""
            remaining = self._describe_remaining(since)
            return Outlook(
                f"step {step} is finished first ({remaining}){then}",
                self._unsaved_steps(step),
            )

        if step is not None:
            given_up = f"step {step} is given up, its update has not begun"
        elif self._recovery.unrecorded is not None and self._saves:
            given_up = (
                f"the evaluation of step {finished_step}, if it is not done by then, is"
                " made when the run goes on"
            )
        else:
            given_up = "stopping"

        saved = self._describe_saving(finished_step)
        return Outlook(f"{given_up}; {saved}", self._unsaved_steps(finished_step))

    def _describe_saving(self, finished_step: int | None) -> str:
        """Return how the last finished step is saved if a signal arrives now."""
        if finished_step is None:
            return "no step is finished yet, so there is nothing to save"
        if finished_step == self._recovery.writing_step:
            return f"the checkpoint of step {finished_step} is written first"
        if finished_step == self._recovery.saved_step:
            return f"step {finished_step} is saved already"
        if self._saves:
            return f"step {finished_step} is saved first"
        return "nothing is saved (run.checkpoint_every=0)"

    def _unsaved_steps(self, last: int | None) -> str:
        """Return the steps up to `last` that no checkpoint holds, as text.

        `last` is a finished step, or one that a stop would finish. The text is empty if
        there are none.
        """
        first = (self._recovery.saved_step or 0) + 1
        if last is None or last < first:
            return ""
        if first == last:
            return f"step {last}"
        return f"steps {first} to {last}"

    def _describe_remaining(self, since: float) -> str:
        """Return how long the rest of the step will take, judging by the last step.

        Where there was no such step, or it took less time, return how long the update
        has taken so far. `since` is the start of the update on the monotonic clock.
        """
        elapsed_s = time.monotonic() - since
        expected_s = self._closing_s

        if expected_s is None or elapsed_s > expected_s:
            return f"it has taken {elapsed_s:.0f} s since its update began"

        remaining_s = max(1.0, expected_s - elapsed_s)
        return f"about {remaining_s:.0f} s left"
