"""The limit on failed scores: whether a grader is broken, from its scores so far.

Two rules end a step early. The exact one counts: more scores have failed than the whole
step may have. The statistical one finds a broken grader within a few prompts: if scores
failed as often as the limit allows, so many failures would almost never be seen.

Prompts are the independent units of the statistical rule, not responses. One bad record
fails with every response to its prompt, and many such failures in a row say nothing
about the grader. The fractions of failed scores per prompt are independent numbers from
0 to 1, whatever the responses to one prompt have in common, so the bound of Hoeffding
(1963, theorem 1) holds for their mean.

Invariant: pure arithmetic. A step whose failures are all within the limit passes the
exact rule in any order of its scores.
"""

from __future__ import annotations

import math

import numpy as np

from verl_ray.data.batch import Int64
from verl_ray.data.stages import Bool

UNPROVEN_CHANCE = 0.02
"""The chance below which a grader is called broken that has not completed a step.

It is large, because a grader that is broken usually is so from the beginning.
"""
PROVEN_CHANCE = 1e-6
"""The same chance for a grader that has completed a step or an evaluation.

It is small, because a long run looks at it thousands of times, and because the scores
that come first are no random sample: short responses finish before long ones.
"""


def chance_at_limit(mean: float, count: int, limit: float) -> float:
    """Return a bound on how probable such a mean is if failures are within the limit.

    The bound is exp(-count * KL), where KL is the divergence of a coin of probability
    `mean` from one of probability `limit`.

    Args:
        mean: Mean over prompts of the fraction of their scores that failed.
        count: Number of prompts.
        limit: Fraction of scores that may fail.

    Returns:
        The bound; 1 where the mean is within the limit.
    """
    if mean <= limit:
        return 1.0
    if limit == 0:
        return 0.0

    divergence = mean * math.log(mean / limit)
    if mean < 1:
        divergence += (1 - mean) * math.log((1 - mean) / (1 - limit))
    return math.exp(-count * divergence)


class FailureLimit:
    """The scores of one grader in one step, compared with its limit as they come in."""

    def __init__(self, limit: float, num_responses: int, *, proven: bool) -> None:
        """Start without scores.

        Args:
            limit: Fraction of the step's scores that may fail.
            num_responses: Number of responses of the step.
            proven: Whether the grader has completed a step before.
        """
        self.scored = 0
        """Number of scores so far, the failed ones included."""
        self.failed = 0
        """Number of failed scores so far."""
        self._limit = limit
        self._num_responses = num_responses
        self._chance = PROVEN_CHANCE if proven else UNPROVEN_CHANCE
        self._groups: list[Int64] = []
        self._failures: list[Bool] = []

    def expect(self, num_responses: int) -> None:
        """Note that the step has further responses."""
        self._num_responses += num_responses

    def add(self, groups: Int64, failures: Bool) -> None:
        """Count some scores.

        Args:
            groups: The prompt's number of each response, int64 [rows].
            failures: Whether each score failed, bool [rows].
        """
        self.scored += len(failures)
        self.failed += int(failures.sum())
        self._groups.append(groups)
        self._failures.append(failures)

    @property
    def is_exceeded(self) -> bool:
        """Whether more scores fail than the limit allows."""
        if self.failed / self._num_responses > self._limit:
            return True
        if self.failed / self.scored <= self._limit:
            return False

        _, prompt = np.unique(np.concatenate(self._groups), return_inverse=True)
        failures = np.concatenate(self._failures)
        failed = np.bincount(prompt, weights=failures)
        fractions = failed / np.bincount(prompt)
        chance = chance_at_limit(float(fractions.mean()), len(fractions), self._limit)
        return chance < self._chance


class FruitlessRun:
    """Responses in a row that cost their whole deadline, or two processes, for nothing.

    A worker that scores knows of these long before the driver: a piece of 16 responses
    that all miss a deadline of 10 s takes minutes. The run of responses ends with any
    score. It is long enough once it covers so many prompts that all of them would fail
    with less than the chance above, if failures were within the limit.
    """

    def __init__(self, limit: float) -> None:
        """Start with no response; `limit` is the fraction of scores that may fail."""
        self._limit = limit
        self.prompts: set[str] = set()
        """The prompts whose responses got no score in this run."""
        self.responses = 0
        """Number of these responses."""
        self.has_scored = False
        """Whether any response has had a score."""

    def end(self) -> None:
        """Note that a response has a score."""
        self.has_scored = True
        self.prompts.clear()
        self.responses = 0

    def add(self, prompt: str) -> None:
        """Note that a response to this prompt has none."""
        self.prompts.add(prompt)
        self.responses += 1

    @property
    def is_too_long(self) -> bool:
        """Whether the grader is broken, as far as this run tells."""
        chance = PROVEN_CHANCE if self.has_scored else UNPROVEN_CHANCE
        return chance_at_limit(1.0, len(self.prompts), self._limit) < chance
