"""Failed scores of a step or an evaluation: counted, reported and limited.

A few failed scores are left out. With more than max_failed_fraction of them the
scores are no measurement of the policy, and the run stops as soon as so many of a
batch have failed, whichever come first.

Invariant: the first failure of each kind is reported in the grader's own words, once
per grader, as soon as its piece is scored.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from verl_ray.cluster.waiting import read
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Bool, Scores
from verl_ray.errors import RewardError
from verl_ray.rewards.failure_limit import FailureLimit
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import failures
from verl_ray.user_files import last_cause


@dataclass
class FailureHistory:
    """The failures of a run's graders that were reported."""

    reported: set[tuple[str, ScoreHealth]] = field(default_factory=set)
    """Kinds of failures that were reported, by grader."""


class ScoreFailures:
    """The failed scores of the rollouts of one batch or evaluation."""

    def __init__(
        self,
        limits: Mapping[str, float],
        num_responses: int,
        history: FailureHistory,
        stall_s: float,
        *,
        of_held_out: bool = False,
    ) -> None:
        """Start without scores.

        Args:
            limits: Fraction of the scores that may fail, by grader. Graders that are
                not in it are not watched.
            num_responses: Number of rollouts of the whole batch.
            history: The failures that were reported; it is updated.
            stall_s: Limit in seconds of reading a failure's words from the store.
            of_held_out: Whether the rollouts are of held-out problems.
        """
        self._num_responses = num_responses
        self._scores_in_words = "held-out scores" if of_held_out else "scores"
        self._history = history
        self._stall_s = stall_s
        self._limits = limits
        self._watched = {
            name: FailureLimit(limit, num_responses) for name, limit in limits.items()
        }
        self._kinds: dict[str, Counter[ScoreHealth]] = {
            name: Counter() for name in limits
        }
        self._first_details: dict[str, str] = {}

    def add_earlier(self, experience: Experience, given_up: Set[int]) -> None:
        """Count scores of an earlier process of the run, which went on with them.

        Args:
            experience: The last row of each response.
            given_up: Ordinals of prompts that were given up, whose responses had no
                grader.
        """
        had_grader = ~np.isin(experience.rollouts.row("group_id"), list(given_up))
        experience = experience.select(np.flatnonzero(had_grader))
        failed = _failures(experience)
        for name, watched in self._watched.items():
            watched.add(failed[name])
            self._count_kinds(name, experience.scores[name], failed[name])

    def add(self, experience: Experience) -> None:
        """Count the scores of a piece of rollouts, the last row of each response.

        Raises:
            RewardError: More scores have failed than max_failed_fraction allows.
        """
        failed = _failures(experience)
        for name, watched in self._watched.items():
            scores = experience.scores[name]
            watched.add(failed[name])
            first_rows = self._count_kinds(name, scores, failed[name])

            if watched.is_exceeded:
                raise self._error(name, watched)
            # An error has the words of the first failure, so they come only now.
            for kind, row in first_rows.items():
                self._report_once(name, kind, scores, row)

    def _count_kinds(
        self, name: str, scores: Sharded[Scores], failed: Bool
    ) -> dict[ScoreHealth, int]:
        """Count a piece's failures by kind; return the first row of each kind."""
        places = np.flatnonzero(failed)
        values, firsts, counts = np.unique(
            scores.row("health")[places], return_index=True, return_counts=True
        )
        first_rows: dict[ScoreHealth, int] = {}
        for value, first, count in zip(values, firsts, counts, strict=True):
            kind = ScoreHealth(value)
            self._kinds[name][kind] += int(count)
            first_rows[kind] = int(places[first])

        if first_rows and name not in self._first_details:
            row = min(first_rows.values())
            self._first_details[name] = self._detail(scores, row)
        return first_rows

    def _report_once(
        self, name: str, kind: ScoreHealth, scores: Sharded[Scores], row: int
    ) -> None:
        """Report a kind of failure, unless it was reported before in this run."""
        if (name, kind) in self._history.reported:
            return
        self._history.reported.add((name, kind))

        count = self._kinds[name][kind]
        scored = self._watched[name].scored
        print(
            f"warning: {name}: {count} of the first {scored}"
            f" {self._scores_in_words} failed ({kind.name.lower()}); the run"
            f" stops above {name}.max_failed_fraction = {self._limits[name]:g} of"
            f" {self._num_responses} responses. The first:"
            f" {self._detail(scores, row)}",
            file=sys.stderr,
            flush=True,
        )

    def _detail(self, scores: Sharded[Scores], row: int) -> str:
        """Return the grader's words about a failed score."""
        # Only this row is read from the store.
        failed = read(scores.select(np.array([row])), self._stall_s)
        (detail,) = failed.detail.texts()
        return last_cause(detail)

    def _error(self, name: str, watched: FailureLimit) -> RewardError:
        kinds = ", ".join(
            f"{kind.name.lower()} {count}" for kind, count in self._kinds[name].items()
        )
        return RewardError(
            f"{name}: {watched.failed} of the first {watched.scored}"
            f" {self._scores_in_words} failed ({kinds}), more than"
            f" {name}.max_failed_fraction = {self._limits[name]:g} allows for"
            f" {self._num_responses} responses. Correct what scores, or raise the"
            f" limit. The first: {self._first_details[name]}"
        )


def _failures(experience: Experience) -> dict[str, Bool]:
    """Return which rows each grader has failed, bool [rows]."""
    return failures(
        {name: scores.row("health") for name, scores in experience.scores.items()}
    )
