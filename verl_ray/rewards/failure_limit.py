"""The limit on failed scores: whether a grader is broken.

A run stops once more scores have failed than a whole batch may have. The one exception
needs no count: a grader that has never given a score, and whose responses each cost a
whole deadline or two processes (`FruitlessRun`).

Invariant: whether the limit is exceeded in the end depends on which scores failed, and
on no order in which they arrive.
"""

from __future__ import annotations

from verl_ray.columns.stages import Bool

FRUITLESS_CHANCE = 0.02
"""The chance below which a grader is called broken that has never given a score.

It is large, because a grader that is broken usually is so from the beginning.
"""


class FailureLimit:
    """The scores of one grader in a batch, compared with its limit as they come in."""

    def __init__(self, limit: float, num_responses: int) -> None:
        """Start without scores.

        Args:
            limit: Fraction of the batch's scores that may fail.
            num_responses: Number of responses of the whole batch.
        """
        self.scored = 0
        """Number of scores so far, the failed ones included."""
        self.failed = 0
        """Number of failed scores so far."""
        self._limit = limit
        self._num_responses = num_responses

    def add(self, failures: Bool) -> None:
        """Count some scores; bool [rows], whether each failed."""
        self.scored += len(failures)
        self.failed += int(failures.sum())

    @property
    def is_exceeded(self) -> bool:
        """Whether more scores have failed than the whole batch may have."""
        return self.failed / self._num_responses > self._limit


class FruitlessRun:
    """Responses that cost their whole deadline, or two processes, before any score.

    A worker that scores knows of these long before the driver: a piece of 16 responses
    that all miss a deadline of 10 s takes minutes. There are enough of them once all
    their prompts would fail with less than the chance above, if failures were within
    the limit. Prompts are the independent units, not responses: one bad record fails
    with every response to its prompt. Any score ends this for good.
    """

    def __init__(self, limit: float) -> None:
        """Start with no response; `limit` is the fraction of scores that may fail."""
        self._limit = limit
        self.prompts: set[str] = set()
        """The prompts whose responses got no score."""
        self.responses = 0
        """Number of these responses."""
        self._has_scored = False

    def end(self) -> None:
        """Note that a response has a score."""
        self._has_scored = True
        self.prompts.clear()

    def add(self, prompt: str) -> None:
        """Note that a response to this prompt has none."""
        if not self._has_scored:
            self.prompts.add(prompt)
            self.responses += 1

    @property
    def is_too_long(self) -> bool:
        """Whether the grader is broken, as far as these responses tell."""
        chance: float = self._limit ** len(self.prompts)
        return chance < FRUITLESS_CHANCE
