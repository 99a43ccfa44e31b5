"""The graders of a run as the driver sees them: who scores what, and pending scores.

Invariant: every grader is called with the same method, and scores a piece of rollouts
as soon as it is generated, or as soon as its groups are whole where it needs groups.
Deliberately not here: how responses are scored (`workers`), which groups are whole
(`groups.py`),
how many scores may fail (`score_failures.py`), and what is made of the scores
(`verl_ray/rewards/shaping.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from controllers.rollouts.score_failures import FailureHistory, ScoreFailures
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.reward import HELD_OUT_GRADER
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts, Scores
from workers.grader import Grader

TRAINING = "train"
"""Purpose of rollouts to learn from. The purpose is part of every seed."""
EVALUATION = "evaluate"
"""Purpose of rollouts to evaluate the policy with."""


class PendingScores:
    """A piece of rollouts, and the calls that score it."""

    def __init__(
        self,
        rollouts: Sharded[Rollouts],
        calls: Mapping[str, Call[Sharded[Scores]]],
    ) -> None:
        """Take the rollouts, and one call per grader, by name."""
        self._rollouts = rollouts
        self._calls = calls
        self.since = time.monotonic()
        """Time at which scoring began, in seconds of the monotonic clock."""

    @property
    def calls(self) -> list[Call[Any]]:
        """The calls, one per grader."""
        return list(self._calls.values())

    def references(self) -> list[Any]:
        """Return the object references that the calls still wait for."""
        return [
            reference
            for call in self._calls.values()
            for reference in call.references()
        ]

    def poll(self) -> Experience | None:
        """Return the rollouts with all of their scores, or None if some are pending.

        Returns at once.

        Raises:
            VerlRayError: A grader failed.
        """
        # Every call is polled, so that the failure of any of them is raised at once.
        finished = [call.poll() for call in self._calls.values()]
        if not all(finished):
            return None
        scores = {name: call.result() for name, call in self._calls.items()}
        return Experience(self._rollouts, scores)


class Graders:
    """The graders of a run."""

    def __init__(
        self,
        config: RLConfig,
        groups: Mapping[str, WorkerGroup[Grader]],
    ) -> None:
        """Take the configuration, and the workers of each grader, by name."""
        self._config = config
        self._groups = groups
        self._history = FailureHistory()
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

    def needs_groups(self, purpose: str) -> bool:
        """Return whether any grader scores all responses to a prompt in one call."""
        return any(self._needs_groups(name) for name in self.names(purpose))

    def _needs_groups(self, name: str) -> bool:
        """Return whether a grader needs groups, which does not change in a run."""
        if name not in self._group_needs:
            grader = self._config.active_graders(learns=True)[name]
            needs = False
            # Only functions compare responses; every rank has the same ones.
            if grader.named_functions is not None:
                needs = self._groups[name].rank_zero(Grader.needs_groups).result()
            self._group_needs[name] = needs
        return self._group_needs[name]

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
        calls = {name: self._call(name, rollouts, step) for name in self.names(purpose)}
        return PendingScores(rollouts, calls)

    def watch_failures(self, purpose: str, num_responses: int) -> ScoreFailures:
        """Return the watch over the scores of some rollouts, as they come in.

        Args:
            purpose: Purpose of the rollouts.
            num_responses: How many there will be.
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
            self._history,
            stall_s,
            of_held_out=purpose == EVALUATION,
        )

    def _call(
        self, name: str, rollouts: Sharded[Rollouts], step: int
    ) -> Call[Sharded[Scores]]:
        group = self._groups[name]
        # The ranks of a model on a backend may have collectives, so all of them are
        # called. Other graders have independent replicas.
        if name in self._config.model_roles:
            return group.scatter(Grader.score, rollouts, step)
        return group.route(Grader.score, rollouts, step)
