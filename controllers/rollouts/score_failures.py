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
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from verl_ray.agents.contract import FAULTS, End
from verl_ray.agents.specs import KEY
from verl_ray.agents.tasks import environments_of
from verl_ray.cluster.waiting import read
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import NO_EPISODE, Bool, Finish, Rollouts, Scores
from verl_ray.data.buffer import Experience
from verl_ray.errors import RewardError
from verl_ray.rewards.failure_limit import FailureLimit
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import failures
from verl_ray.user_files import last_cause, places_in


@dataclass
class FailureHistory:
    """The failures of a run's graders that were reported."""

    reported: set[tuple[str, ScoreHealth]] = field(default_factory=set)
    """Kinds of failures that were reported, by grader."""


class TooManyFailures(RewardError):
    """More scores of a batch or an evaluation have failed than max_failed_fraction.

    Attributes:
        failed: The responses that have failed, with all of their rows.
    """

    def __init__(self, message: str, failed: Experience) -> None:
        """Take what is said, and the responses."""
        super().__init__(message)
        self.failed = failed


class ScoreFailures:
    """The failed scores of the rollouts of one batch or evaluation."""

    def __init__(
        self,
        limits: Mapping[str, float],
        num_responses: int,
        history: FailureHistory,
        stall_s: float,
        *,
        held_out: bool = False,
        environments: Collection[str] = (),
    ) -> None:
        """Start without scores.

        Args:
            limits: Fraction of the scores that may fail, by grader. Graders that are
                not in it are not watched.
            num_responses: Number of rollouts of the whole batch.
            history: The failures that were reported; it is updated.
            stall_s: Limit in seconds of reading a failure's words from the store.
            held_out: Whether the rollouts are of held-out problems.
            environments: Names of the environments of the run.
        """
        self._num_responses = num_responses
        self._scores_in_words = "held-out scores" if held_out else "scores"
        self._history = history
        self._stall_s = stall_s
        self._limits = limits
        self._watched = {
            name: FailureLimit(limit, num_responses) for name, limit in limits.items()
        }
        self._kinds: dict[str, Counter[ScoreHealth]] = {
            name: Counter() for name in limits
        }
        self._environments = environments
        self._failed: dict[str, list[Experience]] = {name: [] for name in limits}
        """The responses that have failed, with all of their rows, by grader."""

    def add_earlier(self, experience: Experience, given_up: Set[int]) -> None:
        """Count scores of an earlier process of the run, which went on with them.

        Args:
            experience: Responses with their scores.
            given_up: Ordinals of prompts that were given up, whose responses had no
                grader.
        """
        had_grader = ~np.isin(experience.rollouts.row("group_id"), list(given_up))
        self._count(experience.select(np.flatnonzero(had_grader)))

    def add(self, experience: Experience) -> None:
        """Count the scores of a piece of rollouts.

        Raises:
            TooManyFailures: More scores have failed than max_failed_fraction allows.
        """
        first_rows = self._count(experience)
        responses = experience.of_trajectories()
        for name, watched in self._watched.items():
            if watched.is_exceeded:
                raise self._error(name, watched)
            # An error has words of its own, so those of a warning come only now.
            for kind, row in first_rows[name].items():
                self._report_once(name, kind, responses.scores[name], row)

    def _count(self, experience: Experience) -> dict[str, dict[ScoreHealth, int]]:
        """Count a piece's failures; return the first row of each kind, by grader."""
        responses = experience.of_trajectories()
        failed = _failures(responses)
        first_rows = {}
        for name, watched in self._watched.items():
            watched.add(failed[name])
            scores = responses.scores[name]
            first_rows[name] = self._count_kinds(name, scores, failed[name])

            trajectories = responses.rollouts.row("trajectory_id")[failed[name]]
            is_failed = np.isin(experience.rollouts.row("trajectory_id"), trajectories)
            if is_failed.any():
                rows = np.flatnonzero(is_failed)
                self._failed[name].append(experience.select(rows))
        return first_rows

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

    def _error(self, name: str, watched: FailureLimit) -> TooManyFailures:
        failed = Experience.concat(self._failed[name])
        assert failed is not None, "failures exceed the limit"
        responses = failed.of_trajectories()
        kinds = ", ".join(
            f"{kind.name.lower()} {count}" for kind, count in self._kinds[name].items()
        )

        # Those of the same frames are the same failure, whatever the message names.
        details = read(responses.scores[name], self._stall_s).detail.texts()
        origins = [places_in(detail) or detail for detail in details]
        ((most_frequent, count),) = Counter(origins).most_common(1)
        detail = details[origins.index(most_frequent)]

        advice = self._advice(read(responses.rollouts, self._stall_s))
        return TooManyFailures(
            f"{name}: {watched.failed} of the first {watched.scored}"
            f" {self._scores_in_words} failed ({kinds}), more than"
            f" {name}.max_failed_fraction = {self._limits[name]:g} allows for"
            f" {self._num_responses} responses. {advice}, or raise the limit. The most"
            f" frequent failure ({count} of {len(details)}): {detail}",
            failed,
        )

    def _advice(self, rows: Rollouts) -> str:
        """Return what to correct where these responses have failed.

        No grader has seen an episode that is dropped because of a fault.
        """
        if rows.end is None:
            return "Correct what scores"
        names = environments_of(rows, self._environments)
        ends = [None if number == NO_EPISODE else [*End][number] for number in rows.end]
        faults = Counter(
            (name, end)
            for name, end, finish in zip(names, ends, rows.finish, strict=True)
            if end in FAULTS and finish == Finish.ABORTED
        )
        if not faults:
            return "Correct what scores"
        counts = ", ".join(
            f"{count} in {KEY}.{name} as {end}"
            for (name, end), count in faults.most_common()
        )
        is_all = faults.total() == rows.num_rows
        others = "" if is_all else " and what scores the others"
        return f"Episodes ended: {counts}. Correct the environment{others}"


def _failures(experience: Experience) -> dict[str, Bool]:
    """Return which rows each grader has failed, bool [rows]."""
    return failures(
        {name: scores.row("health") for name, scores in experience.scores.items()}
    )
