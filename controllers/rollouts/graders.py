"""The graders of a run as the driver sees them: who scores what, and pending scores.

Invariant: every grader is called with the same method, and scores a piece of rollouts
as soon as it is generated, or as soon as its groups are whole where it needs groups.
What a lost grader owes is asked for again, once it has started again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import InPlaceRestarts
from verl_ray.cluster.waiting import read
from verl_ray.config.reward import HELD_OUT_GRADER
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Bool, Rollouts, Scores
from verl_ray.errors import RewardError, VerlRayError
from verl_ray.rewards.failure_limit import FailureLimit
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import failures
from verl_ray.user_files import last_cause
from workers.reward import Grader

TRAINING = "train"
"""Purpose of rollouts to learn from. The purpose is part of every seed."""
EVALUATION = "evaluate"
"""Purpose of rollouts to evaluate the policy with."""

OUTAGES = {
    TRAINING: "timing_s/outage/reward",
    EVALUATION: "timing_s/outage/testing",
}
"""Metrics of the seconds for which a service of graders was away, by purpose."""


class PendingScores:
    """A piece of rollouts, and the calls that score it."""

    def __init__(
        self,
        rollouts: Sharded[Rollouts],
        names: Iterable[str],
        step: int,
        *,
        is_held_out: bool,
    ) -> None:
        """Take the rollouts, which no grader has yet.

        Args:
            rollouts: The rollouts.
            names: The graders that score them.
            step: As in `Graders.score`.
            is_held_out: Whether they are of an evaluation.
        """
        self.rollouts = rollouts
        self.step = step
        self.is_held_out = is_held_out
        self._calls: dict[str, Call[Sharded[Scores]] | None] = dict.fromkeys(names)
        """By grader; None before it was asked."""
        self.since = time.monotonic()
        """Time at which scoring began, in seconds of the monotonic clock."""

    @property
    def unasked(self) -> list[str]:
        """The graders that were not asked, or were lost before they replied."""
        return [
            name for name, call in self._calls.items() if call is None or call.is_stale
        ]

    def ask(self, name: str, call: Call[Sharded[Scores]]) -> None:
        """Take the call of a grader."""
        self._calls[name] = call

    @property
    def calls(self) -> list[Call[Sharded[Scores]]]:
        """The calls of graders that have replied or will reply."""
        return [
            call
            for call in self._calls.values()
            if call is not None and not call.is_stale
        ]

    def references(self) -> list[Any]:
        """Return the object references that the calls still wait for."""
        return [reference for call in self.calls for reference in call.references()]

    def poll(self) -> Experience | None:
        """Return the rollouts with all of their scores, or None if some are pending.

        Returns at once.

        Raises:
            VerlRayError: A grader failed.
        """
        # Every call is polled, so that the failure of any of them is raised at once.
        finished = [call.poll() for call in self.calls]
        if self.unasked or not all(finished):
            return None
        scores = {
            name: call.result()
            for name, call in self._calls.items()
            if call is not None
        }
        return Experience(self.rollouts, scores)


class Graders:
    """The graders of a run."""

    def __init__(
        self,
        config: RLConfig,
        groups: Mapping[str, WorkerGroup[Grader]],
        restarts: InPlaceRestarts | None = None,
    ) -> None:
        """Take the configuration, and the workers of each grader, by name.

        Args:
            config: Configuration of the run.
            groups: The workers.
            restarts: Those that are starting again; None where the loss of one is an
                error.
        """
        self._config = config
        self._groups = groups
        self._restarts = restarts or InPlaceRestarts()
        self._num_started = self._restarts.num_started
        """How many groups had started again when they were asked for what they owe."""
        self.history = FailureHistory()
        self._group_needs: dict[str, bool] = {}
        """Whether a grader needs groups, for those that were asked."""

    def names(self, purpose: str) -> tuple[str, ...]:
        """Return the graders of rollouts with this purpose."""
        # An evaluation may have a grader of its own.
        if purpose == EVALUATION and HELD_OUT_GRADER in self._groups:
            return (HELD_OUT_GRADER,)
        return tuple(self._config.graders)

    def deadlines_in_words(self, purpose: str) -> str:
        """Return the deadlines of a response in brackets; empty if there are none."""
        graders = self._config.active_graders(learns=True)
        deadlines = [
            f"{name}.deadline_s = {graders[name].time_limit_s:g}"
            for name in self.names(purpose)
            if graders[name].time_limit_s is not None
        ]
        return f" ({', '.join(deadlines)})" if deadlines else ""

    def needs_groups(self, purpose: str, step: int) -> bool:
        """Return whether any grader scores all responses to a prompt in one call.

        Args:
            purpose: Purpose of the responses.
            step: As in `score`.
        """
        return any(self._needs_groups(name, step) for name in self.names(purpose))

    def _needs_groups(self, name: str, step: int) -> bool:
        """Return whether a grader needs groups, which does not change in a run."""
        if name not in self._group_needs:
            grader = self._config.active_graders(learns=True)[name]
            needs = False
            # Only functions compare responses; every rank has the same ones.
            if grader.named_functions is not None:
                group = self._groups[name]
                needs = self._restarts.call(
                    group, lambda: group.rank_zero(Grader.needs_groups), step
                ).result()
            self._group_needs[name] = needs
        return self._group_needs[name]

    def outage_metrics(self, purpose: str, step: int) -> dict[str, float]:
        """Return for how long services were away since this was last asked.

        Ranks and graders wait at the same time, so the longest wait of any counts. One
        that has not ended counts later; that of a lost grader is lost with it.

        Args:
            purpose: Purpose of the rollouts that were scored.
            step: As in `score`.

        Returns:
            The metric of this purpose; nothing where no grader asks a service.
        """
        graders = self._config.active_graders(learns=True)
        calls = []
        for name in self.names(purpose):
            if graders[name].kind == "http":
                group = self._groups[name]
                request = functools.partial(group.broadcast, Grader.take_outage_s)
                calls.append(self._restarts.call(group, request, step))
        if not calls:
            return {}
        return {OUTAGES[purpose]: max(max(call.result()) for call in calls)}

    def score(
        self, rollouts: Sharded[Rollouts], purpose: str, step: int
    ) -> PendingScores:
        """Start to score a piece of rollouts with all graders of this purpose.

        Args:
            rollouts: The rollouts.
            purpose: Their purpose.
            step: The training step that is made; in an evaluation the last step of the
                policy.
        """
        names = self.names(purpose)
        is_held_out = purpose == EVALUATION
        piece = PendingScores(rollouts, names, step, is_held_out=is_held_out)
        self._ask(piece)
        return piece

    def advance(self, pieces: Iterable[PendingScores]) -> None:
        """Ask graders that have started again for what they owe; return at once.

        Args:
            pieces: All pieces whose scores are pending.

        Raises:
            VerlRayError: A grader cannot be started again.
        """
        self._restarts.take_started()
        if self._restarts.num_started == self._num_started:
            return
        self._num_started = self._restarts.num_started
        for piece in pieces:
            self._ask(piece)

    def check(self, pieces: Iterable[PendingScores], step: int) -> None:
        """Check that every grader is there and makes progress; else start it again.

        Args:
            pieces: All pieces whose scores are pending.
            step: As in `restart`.

        Raises:
            WorkerError: A grader is lost or makes no progress, and does not start
                again.
        """
        calls = [call for piece in pieces for call in piece.calls]
        self._restarts.check(calls, step)

    def restart(self, error: VerlRayError, step: int) -> None:
        """Start the grader again that an error is about; return at once.

        What it owed is pending until `advance` asks for it again.

        Args:
            error: The error of a call.
            step: The oldest step that scores are pending for.

        Raises:
            VerlRayError: `error` itself, if no grader starts again because of it.
        """
        self._restarts.begin(error, step)

    def watch_failures(self, purpose: str, num_responses: int) -> ScoreFailures:
        """Return the watch over the scores of a batch of rollouts, as they come in.

        Args:
            purpose: Purpose of the rollouts.
            num_responses: How many the whole batch has.
        """
        # The held-out grader's failures are a metric of the evaluation.
        limits = {
            name: self._config.graders[name].max_failed_fraction
            for name in self.names(purpose)
            if name != HELD_OUT_GRADER
        }
        stall_s = self._config.run.stall_s
        return ScoreFailures(
            limits,
            num_responses,
            self.history,
            stall_s,
            of_held_out=purpose == EVALUATION,
        )

    def _ask(self, piece: PendingScores) -> None:
        """Let those graders score a piece that were not asked and are there."""
        for name in piece.unasked:
            if self._restarts.is_available(self._groups[name]):
                piece.ask(name, self._call(name, piece))

    def _call(self, name: str, piece: PendingScores) -> Call[Sharded[Scores]]:
        group = self._groups[name]
        more = piece.step, piece.is_held_out
        # The ranks of a model on a backend may have collectives, so all of them are
        # called. Other graders have independent replicas.
        if name in self._config.model_roles:
            return group.scatter(Grader.score, piece.rollouts, *more)
        return group.route(Grader.score, piece.rollouts, *more)


# ---------------------------------------------------------------------- failed scores

# Failed scores of a step or an evaluation: counted, reported and limited.
#
# A few failed scores are left out. With more than max_failed_fraction of them the
# scores are no measurement of the policy, and the run stops as soon as so many of a
# batch have failed, whichever come first.
#
# Invariant: the first failure of each kind is reported in the grader's own words, once
# per grader, as soon as its piece is scored.


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
