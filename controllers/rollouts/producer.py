"""Production of experience: responses to prompts, scored while others are generated.

Invariant: a buffer only gets scored rows. Which rows it gets when depends on timing;
what is taken from it does not. Training and evaluation share this code, with different
sampling parameters and separate random streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from controllers.rollouts.given_up import aborted_group
from controllers.rollouts.graders import Graders, PendingScores
from controllers.rollouts.production import (
    Production,
    generation_to_evaluate,
    generation_to_learn_from,
)
from controllers.rollouts.replicas import Replicas
from controllers.rollouts.score_failures import ScoreFailures
from controllers.rollouts.whole_groups import GroupCollector
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.restarts import InPlaceRestarts
from verl_ray.cluster.signals import give_up_work, stop_requested
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.columns.batch import Int64
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Prompts, Rollouts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.errors import RewardError, VerlRayError
from verl_ray.profiling.phases import OpenPhase, Timers, phase
from workers.generation import EVALUATION, TRAINING, Generation
from workers.reward import Grader


class Producer:
    """Generates and scores groups, and fills buffers with them.

    `advance` is called wherever the driver waits (see `Background`).
    """

    def __init__(
        self,
        config: RLConfig,
        replicas: Replicas,
        graders: Mapping[str, WorkerGroup[Grader]],
        restarts: InPlaceRestarts | None = None,
    ) -> None:
        """Take the replicas, and the workers of each grader, by name.

        Args:
            config: Configuration of the run.
            replicas: The replicas.
            graders: The workers.
            restarts: Graders that are starting again in place; None where the loss of
                one is an error.
        """
        self._config = config
        self._replicas = replicas
        self._graders = Graders(config, graders, restarts)
        self._productions: list[Production] = []
        self.given_up: set[int] = set()
        """Ordinals that were given up, of groups to learn from."""
        self._last_check_s = 0.0

    def begin(
        self,
        prompts: Prompts,
        generation: Generation,
        buffer: RolloutBuffer,
        step: int,
        failures: ScoreFailures | None = None,
    ) -> None:
        """Begin to generate and score groups; reserve them in the buffer.

        They arrive there piece by piece.

        Args:
            prompts: The prompts of the groups.
            generation: What is generated for each prompt.
            buffer: Buffer that gets the groups.
            step: The training step that is made, for reward functions; in an evaluation
                the last step of the policy.
            failures: The failed scores of the whole batch, if these are not all of its
                groups.
        """
        num_responses = prompts.num_rows * generation.group_size
        if failures is None:
            failures = self._graders.watch_failures(generation.purpose, num_responses)
        buffer.reserve(prompts.group_id)
        groups = None
        if self._graders.needs_groups(generation.purpose, step):
            groups = GroupCollector(generation.group_size)
        # The run waits for an evaluation, and not yet for later training steps.
        is_urgent = generation.purpose == EVALUATION
        job = self._replicas.scheduler.open(prompts, generation, first=is_urgent)
        self._productions.append(
            Production(
                ordinals=prompts.group_id,
                job=job,
                buffer=buffer,
                failures=failures,
                num_responses=num_responses,
                step=step,
                groups=groups,
            )
        )

    def outage_metrics(self, purpose: str, step: int) -> dict[str, float]:
        """Return for how long services were away, as `Graders.outage_metrics` does."""
        return self._graders.outage_metrics(purpose, step)

    def failures_of_batch(
        self, num_responses: int, finished: Experience | None
    ) -> ScoreFailures:
        """Return the count of the failed scores of a batch to learn from.

        Args:
            num_responses: Number of responses of the whole batch.
            finished: Groups of it that an earlier process of the run has finished.
        """
        failures = self._graders.watch_failures(TRAINING, num_responses)
        if finished is not None:
            failures.add_earlier(finished, self.given_up)
        return failures

    def advance_until(
        self,
        is_enough: Callable[[], bool],
        awaited: Callable[[], Int64],
        buffer: RolloutBuffer,
        timers: Timers,
    ) -> None:
        """Advance until `is_enough`, which may begin more; it raises as `take` does.

        Args:
            is_enough: Whether the wait is over.
            awaited: Groups without which it cannot end, int64 [groups].
            buffer: The buffer of the groups.
            timers: See `take`.
        """
        with (
            self._abandoning_on_error(),
            timers.timed(
                lambda: self._in_words(awaited(), buffer), "gen", waits=True
            ) as waiting,
        ):
            while not is_enough():
                self._advance_for(awaited(), buffer, TICK_S)
                self._count(self._of(awaited(), buffer), waiting)

    def take(
        self,
        ordinals: Int64,
        buffer: RolloutBuffer,
        policy_version: int,
        timers: Timers,
    ) -> Experience:
        """Take groups out of the buffer, once all of them are there.

        If the wait is interrupted or fails, all generation is abandoned.

        Args:
            ordinals: Groups that `begin` was called with, or that were there already,
                int64 [groups].
            buffer: The buffer of that call.
            policy_version: Version of the policy that learns next.
            timers: Timers for the time until all is generated ("gen") and the time
                from there until all is scored ("reward").

        Raises:
            RewardError: More scores of these groups fail than max_failed_fraction
                allows.
            DataError: The policy that generated the responses is too old.
        """

        def in_words() -> str:
            return self._in_words(ordinals, buffer)

        def advance(waiting: OpenPhase) -> None:
            self._advance_for(ordinals, buffer, TICK_S)
            self._count(self._of(ordinals, buffer), waiting)

        with self._abandoning_on_error():
            # The replicas begin now, also where all of these groups are there already.
            self._advance_for(ordinals, buffer, 0.0)
            with timers.timed(in_words, "gen", waits=True) as generating:
                while buffer.missing(ordinals) and not self._is_generated(
                    ordinals, buffer
                ):
                    advance(generating)

            with timers.timed(in_words, "reward", waits=True) as scoring:
                return buffer.take(ordinals, policy_version, lambda: advance(scoring))

    def _advance_for(
        self, ordinals: Int64, buffer: RolloutBuffer, timeout_s: float
    ) -> None:
        """Advance all productions; raise the failure of one with some of these groups.

        Others fail nobody but who waits for them: training rows no evaluation, and
        those of a later step not this one, whichever comes first.
        """
        self.advance(timeout_s)
        for production in self._of(ordinals, buffer):
            if production.failure is not None:
                raise production.failure

    def _of(self, ordinals: Int64, buffer: RolloutBuffer) -> list[Production]:
        """Return the productions of some of these groups, int64 [groups]."""
        return [
            production
            for production in self._productions
            if production.buffer is buffer
            and np.isin(production.ordinals, ordinals).any()
        ]

    def finish(self) -> None:
        """Wait until everything that was begun is generated, scored and in its buffer.

        If the wait is interrupted or fails, all generation is abandoned. A stop that
        waits for the end of a step gives it up where a service is away and the step can
        be made again: the groups are of the version before, and no other makes them.

        Raises:
            Interrupted: The run is told to stop, and a service is away.
        """
        with self._abandoning_on_error(), phase(self._first_in_words) as waiting:
            while not all(production.is_finished for production in self._productions):
                self.advance(TICK_S)
                self._count(self._productions, waiting)
                if stop_requested() and self._lacks_a_service():
                    give_up_work()

    def _lacks_a_service(self) -> bool:
        """Return whether all is generated, and what scores waits for a service."""
        calls = [call for piece in self._pending_scores for call in piece.calls]
        for call in calls:
            call.request_activity(at_once=True)
        is_generated = all(production.is_generated for production in self._productions)
        return is_generated and any(call.outside_wait() for call in calls)

    @contextlib.contextmanager
    def _abandoning_on_error(self) -> Iterator[None]:
        """Let no replica continue with abandoned work, also after a stop of the run."""
        try:
            yield
        except BaseException:
            self._replicas.stop_generation()
            for production in self._productions:
                production.buffer.drop_unfinished()
            self._productions.clear()
            raise

    def _in_words(self, ordinals: Int64, buffer: RolloutBuffer) -> str:
        """Return how far these groups are, int64 [groups], for a person who waits."""
        return self._progress(self._of(ordinals, buffer))

    def _first_in_words(self) -> str:
        """Return how far the oldest production is that goes on."""
        return self._progress(self._productions)

    def _count(self, productions: Iterable[Production], waiting: OpenPhase) -> None:
        """Count the first of these productions that goes on in a phase."""
        for piece in self._pending_scores[:1]:
            for call in piece.calls:
                call.request_activity()
        for production in productions:
            if not production.is_finished:
                waiting.reach(*production.count)
                return

    def _progress(self, productions: Iterable[Production]) -> str:
        """Return how far the first of these productions is that goes on."""
        for production in productions:
            if not production.is_finished:
                purpose = production.job.generation.purpose
                return production.in_words(self._graders.deadlines_in_words(purpose))
        return ""

    def _is_generated(self, ordinals: Int64, buffer: RolloutBuffer) -> bool:
        """Return whether all responses of these groups, int64 [groups], are there."""
        return all(production.is_generated for production in self._of(ordinals, buffer))

    # ----------------------------------------------------------------------- background

    def references(self) -> list[Any]:
        """Return the object references of pending pieces and of pending scores."""
        return [*self._replicas.references(), *self._score_references()]

    def advance(self, timeout_s: float = 0.0) -> None:
        """Pass on what is finished: responses to graders, scored ones to buffers.

        Wait for something to pass on for up to `timeout_s` seconds.
        """
        if timeout_s and self._pending_scores:
            references = self.references()
            if references:
                # Responses and scores are waited for together, whichever come first.
                wait(references, 1, timeout_s)
            else:
                # Only graders that are starting again are waited for.
                time.sleep(min(timeout_s, TICK_S / 10))
            timeout_s = 0.0
        # With nothing to score, new responses are all there is to wait for.
        self._replicas.advance(timeout_s, self)

        self._replace_given_up()
        self._graders.advance(self._pending_scores)
        self._score_generated()
        self._buffer_scored()
        self._productions = [
            production
            for production in self._productions
            if production.failure is not None or not production.is_finished
        ]
        self._check_graders()

    def _replace_given_up(self) -> None:
        """Put aborted responses in the place of groups that were given up."""
        for production in self._productions:
            generation = production.job.generation
            while production.job.given_up:
                ordinal = production.job.given_up.popleft()
                aborted = aborted_group(
                    production.job.prompt(ordinal),
                    generation.group_size,
                    self._graders.names(generation.purpose),
                    purpose=generation.purpose,
                    stall_s=self._config.run.stall_s,
                    agent=self._config.episodes,
                )
                production.give_up(ordinal, aborted)
                if generation.purpose == TRAINING:
                    self.given_up.add(ordinal)

    def _score_generated(self) -> None:
        """Pass every finished response on to its graders, if need be with its group."""
        for production in self._productions:
            purpose = production.job.generation.purpose
            while production.job.finished:
                piece: Sharded[Rollouts] | None = production.job.finished.popleft()
                if production.groups is not None and piece is not None:
                    piece = production.groups.add(piece)
                if piece is not None:
                    scoring = self._graders.score(piece, purpose, production.step)
                    production.scoring.append(scoring)

    def _buffer_scored(self) -> None:
        """Move every piece whose scores are complete into its buffer."""
        references = self._score_references()
        if not references:
            return

        # One look at all references; only pieces with a new score are polled.
        available = set(wait(references, len(references), 0.0))
        failures: list[VerlRayError] = []
        for production in self._productions:
            updated = [
                piece
                for piece in production.scoring
                if not available.isdisjoint(piece.references())
            ]
            for piece in updated:
                try:
                    self._buffer_piece(production, piece)
                except VerlRayError as failure:
                    failures.append(failure)

        # A grader starts again only now, so that no reply that is here is asked for
        # again.
        for error in failures:
            self._graders.restart(error, self._oldest_step)

    def _buffer_piece(self, production: Production, piece: PendingScores) -> None:
        """Move a piece into its buffer, if its scores are complete."""
        try:
            scored = piece.poll()
            if scored is None:
                return
            production.failures.add(scored)
        except RewardError as failure:
            # Whoever waits for the groups fails, and nobody else. A checkpoint has none
            # of them, so that a resumed run asks what scores again: responses of the
            # version that it goes on from, where a later batch is concerned.
            production.failure = production.failure or failure
            production.buffer.discard(production.ordinals)
        else:
            production.num_scored += len(
                np.unique(scored.rollouts.row("trajectory_id"))
            )
            if production.failure is None:
                production.put(scored)
        production.scoring.remove(piece)

    def _check_graders(self) -> None:
        """Check now and then that every grader makes progress."""
        if time.monotonic() - self._last_check_s < TICK_S:
            return
        self._last_check_s = time.monotonic()
        if self._productions:
            self._graders.check(self._pending_scores, self._oldest_step)

    @property
    def _pending_scores(self) -> list[PendingScores]:
        """The pieces of all productions whose scores are pending."""
        return [
            piece for production in self._productions for piece in production.scoring
        ]

    @property
    def _oldest_step(self) -> int:
        """The first of the steps that groups are in production for."""
        return min(production.step for production in self._productions)

    def _score_references(self) -> list[Any]:
        """Return the object references of all pending scores."""
        references: list[Any] = []
        for piece in self._pending_scores:
            references += piece.references()
        return references

    # ---------------------------------------------------------------- what is generated

    def training_generation(self) -> Generation:
        """Return what is generated for each prompt to learn from."""
        return generation_to_learn_from(self._config)

    def evaluation_generation(self) -> Generation:
        """Return what is generated for each held-out problem."""
        return generation_to_evaluate(self._config)
