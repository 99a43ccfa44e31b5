"""The graders of a run as the driver sees them: who scores what, and pending scores.

Invariant: every grader is called with the same method, and scores a piece of rollouts
as soon as it is generated, or as soon as its groups are whole where it needs groups.
Scores that a lost grader has not returned are requested again, once it has started
again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from controllers.rollouts.score_failures import FailureHistory, ScoreFailures
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.restarts import InPlaceRestarts
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rollouts, Scores
from verl_ray.config.reward import HELD_OUT_GRADER
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.errors import VerlRayError
from workers.generation import EVALUATION, TRAINING
from workers.reward import Grader

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
        """How many groups had started again when pending requests were last sent."""
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
        """Send pending requests to graders that have started again; return at once.

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

        Its requests are pending until `advance` sends them again.

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
            held_out=purpose == EVALUATION,
            environments=self._config.agent.environments,
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
