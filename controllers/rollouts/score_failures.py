"""Failed scores of a step or an evaluation: counted, reported and limited.

A few failed scores are left out. With more than max_failed_fraction of them the scores
are no measurement of the policy, and the run stops as soon as that can be known.

Invariant: the first failure of each kind is reported in the grader's own words, once
per grader, as soon as its piece is scored.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verl_ray.cluster.store import read
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Scores
from verl_ray.errors import RewardError
from verl_ray.rewards.failure_limit import FailureLimit
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.tracebacks import last_cause


@dataclass
class FailureHistory:
    """The graders of a run as earlier steps and evaluations have shown them."""

    proven: set[str] = field(default_factory=set)
    """Graders that have completed a step or an evaluation within their limit."""

    reported: set[tuple[str, ScoreHealth]] = field(default_factory=set)
    """Kinds of failures that were reported, by grader."""


class ScoreFailures:
    """The failed scores of the rollouts of one step or evaluation."""

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
            num_responses: Number of rollouts.
            history: What earlier steps have shown; it is updated.
            stall_s: Limit in seconds of reading a failure's words from the store.
            of_held_out: Whether the rollouts are of held-out problems.
        """
        self._num_responses = num_responses
        self._scores_in_words = "held-out scores" if of_held_out else "scores"
        self._history = history
        self._stall_s = stall_s
        self._limits = limits
        self._watched = {
            name: FailureLimit(limit, num_responses, proven=name in history.proven)
            for name, limit in limits.items()
        }
        self._kinds: dict[str, Counter[ScoreHealth]] = {
            name: Counter() for name in limits
        }
        self._first_details: dict[str, str] = {}

    def expect(self, num_responses: int) -> None:
        """Note that there will be further rollouts."""
        self._num_responses += num_responses
        for watched in self._watched.values():
            watched.expect(num_responses)

    def add_earlier(self, experience: Experience) -> None:
        """Count scores of an earlier process of the run, which went on with them.

        Responses without tokens, of prompts that were given up, had no grader.
        """
        has_tokens = experience.rollouts.row("response_length") > 0
        experience = experience.select(np.flatnonzero(has_tokens))
        groups = experience.rollouts.row("group_id")
        for name, watched in self._watched.items():
            scores = experience.scores[name]
            watched.add(groups, scores.row("health") != ScoreHealth.OK)
            self._count_kinds(name, scores)

    def add(self, experience: Experience) -> None:
        """Count the scores of a piece of rollouts.

        Raises:
            RewardError: A grader fails more often than its max_failed_fraction allows.
        """
        groups = experience.rollouts.row("group_id")
        for name, watched in self._watched.items():
            scores = experience.scores[name]
            health = scores.row("health")
            watched.add(groups, health != ScoreHealth.OK)
            first_rows = self._count_kinds(name, scores)

            if watched.is_exceeded:
                raise self._error(name, watched)
            # An error has the words of the first failure, so they come only now.
            for kind, row in first_rows.items():
                self._report_once(name, kind, scores, row)
            if watched.scored == self._num_responses:
                self._history.proven.add(name)

    def _count_kinds(
        self, name: str, scores: Sharded[Scores]
    ) -> dict[ScoreHealth, int]:
        """Count a piece's failures by kind; return the first row of each kind."""
        values, rows, counts = np.unique(
            scores.row("health"), return_index=True, return_counts=True
        )
        first_rows: dict[ScoreHealth, int] = {}
        for value, row, count in zip(values, rows, counts, strict=True):
            kind = ScoreHealth(value)
            if kind is not ScoreHealth.OK:
                self._kinds[name][kind] += int(count)
                first_rows[kind] = int(row)

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
