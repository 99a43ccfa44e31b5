"""Production of experience: responses to prompts, scored while others are generated.

Invariant: a buffer only gets scored rows. Which rows it gets when depends on timing;
what is taken from it does not. Training and evaluation share this code, with different
sampling parameters and separate random streams.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controllers.rollouts.generation import GenerationJob
from controllers.rollouts.graders import (
    EVALUATION,
    TRAINING,
    Graders,
    PendingScores,
    ScoreFailures,
)
from controllers.rollouts.replicas import Replicas
from verl_ray.agents.contract import End, Episode
from verl_ray.agents.tasks import environments_of
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import InPlaceRestarts
from verl_ray.cluster.signals import give_up_work, stop_requested
from verl_ray.cluster.waiting import TICK_S, put, read, wait
from verl_ray.config.agent import AgentConfig
from verl_ray.config.reward import EvaluationConfig
from verl_ray.config.rollout import RolloutConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Int64
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.prompts import prompt_text
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Finish, Prompts, Rollouts
from verl_ray.errors import RewardError, VerlRayError
from verl_ray.profiling.phases import OpenPhase, Timers, phase
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rollout.requests import Chunk, Sampling
from workers.episodes import beside_episodes, episode_rollouts
from workers.reward import Grader, scores_of
from workers.rollout import (
    Generation,
    GenerationWithGreedyRow,
    whole_rollouts,
)

# ------------------------------------------------------------------------------- groups

# Whole groups, collected from the pieces in which rollouts arrive.
#
# A batched reward function scores all responses to a prompt in one call, so its
# result must not depend on which of them finished together.
#
# Invariant: a group is returned once, whole, with its rows in the order of their row
# ids.


class GroupCollector:
    """Rollouts of groups that are not whole yet."""

    def __init__(self, group_size: int) -> None:
        """Start without rollouts; a group has `group_size` trajectories."""
        self._group_size = group_size
        self._parts: list[Sharded[Rollouts]] = []

    def add(self, piece: Sharded[Rollouts]) -> Sharded[Rollouts] | None:
        """Add a piece, and return the groups that it completes; None without any."""
        held = Sharded.concat([*self._parts, piece])
        group = held.row("group_id")
        _, first_rows = np.unique(held.row("trajectory_id"), return_index=True)
        groups, sizes = np.unique(group[first_rows], return_counts=True)
        is_whole = np.isin(group, groups[sizes == self._group_size])
        remaining = np.flatnonzero(~is_whole)
        self._parts = [held.select(remaining)] if len(remaining) else []

        whole = np.flatnonzero(is_whole)
        if not len(whole):
            return None
        order = np.argsort(held.row("row_id")[whole], kind="stable")
        return held.select(whole[order])


# ------------------------------------------------------------------------- the producer


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
            failures.add_earlier(finished.of_trajectories(), self.given_up)
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
            phase(lambda: self._in_words(awaited(), buffer)) as waiting,
            timers("gen"),
            timers.waiting(),
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
            with phase(in_words) as generating, timers("gen"), timers.waiting():
                while buffer.missing(ordinals) and not self._is_generated(
                    ordinals, buffer
                ):
                    advance(generating)

            with phase(in_words) as scoring, timers("reward"), timers.waiting():
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
            production.failures.add(scored.of_trajectories())
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


# -------------------------------------------------------------------- what is generated

# Generations: of responses to learn from, and to evaluate.


def generation_to_learn_from(config: RLConfig) -> Generation:
    """Return what is generated for each prompt to learn from."""
    advantage = ADVANTAGES[config.algorithm.advantage]
    kind = GenerationWithGreedyRow if advantage.reads_greedy else Generation
    return _generation(config, config.rollout, TRAINING, kind)


def generation_to_evaluate(config: RLConfig) -> Generation:
    """Return what is generated for each held-out problem."""
    return _generation(config, config.evaluation, EVALUATION, Generation)


def _generation(
    config: RLConfig,
    section: RolloutConfig | EvaluationConfig,
    purpose: str,
    kind: type[Generation],
) -> Generation:
    """Return the generation of groups as a section of the configuration has them."""
    rollout = config.rollout
    sampling = Sampling(
        section.temperature,
        section.top_p,
        section.top_k,
        rollout.max_response_tokens,
        stop=tuple(rollout.stop),
    )
    return kind(
        purpose, section.group_size, sampling, config.run.seed, rollout.stream_rows
    )


# --------------------------------------------------------------------- what is produced

# Groups that are generated and scored for one buffer, and how far they are.


@dataclass
class Production:
    """Groups that are generated and scored for a buffer."""

    ordinals: Int64
    """The groups, int64 [groups]."""
    job: GenerationJob
    buffer: RolloutBuffer
    failures: ScoreFailures
    num_responses: int
    step: int
    """The training step that is made; in an evaluation the last step of the policy."""
    groups: GroupCollector | None
    """Responses whose graders need whole groups; None where they need none."""
    scoring: list[PendingScores] = field(default_factory=list)
    """Pieces whose scores are pending, the oldest first."""
    num_scored: int = 0
    """Number of responses that are in the buffer."""
    failure: RewardError | None = None
    """Too many scores have failed; raised for whoever takes the groups."""

    given_up: set[int] = field(default_factory=set)
    """Ordinals of groups whose prompts were given up."""

    def put(self, scored: Experience) -> None:
        """Put responses into the buffer, but for those of groups that were given up."""
        if self.given_up:
            is_kept = ~np.isin(scored.rollouts.row("group_id"), list(self.given_up))
            scored = scored.select(np.flatnonzero(is_kept))
        if len(scored.rollouts):
            self.buffer.put(scored)

    def give_up(self, ordinal: int, aborted: Experience) -> None:
        """Put a whole group of aborted responses in the place of a group."""
        self.given_up.add(ordinal)
        group = np.array([ordinal])
        self.buffer.discard(group)
        # Nothing is in the buffer of a production that has failed.
        if self.failure is None:
            self.buffer.reserve(group)
            self.buffer.put(aborted)

    def in_words(self, deadlines: str) -> str:
        """Return how far it is; `deadlines` are those of what scores, in words."""
        scored = f"{self.num_scored}/{self.num_responses}"
        if self.job.generation.purpose == EVALUATION:
            text = f"evaluating {scored}"
        elif self.is_generated:
            text = f"scoring {scored}"
        else:
            total = self.num_responses
            text = f"generating {self._num_generated}/{total} responses"
            text += f", scoring {scored}"

        if self.scoring:
            oldest_s = time.monotonic() - self.scoring[0].since
            text += f", slowest {oldest_s:.0f} s{deadlines}"
            waits = [call.outside_wait() for call in self.scoring[0].calls]
            text = ", ".join(filter(None, (text, *waits)))
        return text

    @property
    def count(self) -> tuple[int, int, str]:
        """How many responses are done, of how many, and what they are."""
        if self.job.generation.purpose == EVALUATION:
            return self.num_scored, self.num_responses, "held-out responses scored"
        if self.is_generated:
            return self.num_scored, self.num_responses, "responses scored"
        return self._num_generated, self.num_responses, "responses generated"

    @property
    def _num_generated(self) -> int:
        return self.num_responses - self.job.num_pending

    @property
    def is_generated(self) -> bool:
        """Whether every response is generated, and passed on to the graders."""
        job = self.job
        return not (job.num_pending or job.finished or job.given_up)

    @property
    def is_finished(self) -> bool:
        """Whether every response is generated, scored and in the buffer."""
        return self.is_generated and not self.scoring


# ---------------------------------------------------------- prompts that are given up

# Groups of prompts that ended the replicas which generated for them.
#
# Invariant: such a group has aborted responses without tokens and without scores. So a
# batch keeps its size, nothing is learned from the group, and a held-out problem counts
# as one without a score.


ENDS_REPLICAS = "replicas were lost twice with its rows, the last time with no others"
"""Why a prompt is given up, also in the ledger."""

_SHOWN = 80  # characters of a prompt in the warning


def aborted_group(
    stored: Sharded[Prompts],
    group_size: int,
    graders: Iterable[str],
    *,
    purpose: str,
    stall_s: float,
    agent: AgentConfig | None = None,
) -> Experience:
    """Return the aborted responses to a prompt, and warn of it.

    Args:
        stored: The prompt, one row.
        group_size: Number of its responses.
        graders: What would have scored them.
        purpose: Their purpose.
        stall_s: Limit in seconds of reading the prompt.
        agent: The environments of episodes; None where responses are single ones.
    """
    prompts = read(stored, stall_s)
    (ordinal,) = prompts.group_id.tolist()
    (messages,) = prompts.messages.texts()
    (source,) = prompts.data_source.texts()
    print(
        f"warning: prompt {ordinal} ({purpose}, {source}) is given up:"
        f" {ENDS_REPLICAS}. It begins with {prompt_text(messages)[:_SHOWN]!r}",
        file=sys.stderr,
        flush=True,
    )

    first_row = ordinal * group_size
    rows = range(first_row, first_row + group_size)
    failed_episode = Episode([], End.ENVIRONMENT_FAILED, 0.0, ENDS_REPLICAS)
    chunks = [
        Chunk(
            request_id=row,
            tokens=np.empty(0, np.int32),
            log_probs=np.empty(0, np.float32),
            finish=Finish.ABORTED,
            first_token=0,
            version_spans=(),
        )
        for row in rows
    ]
    prompt_of = dict.fromkeys(rows, 0)
    if agent is None:
        rollouts = put(whole_rollouts(prompts, prompt_of, chunks))
    elif environments_of(prompts, agent.environments) == [None]:
        rollouts = put(beside_episodes(whole_rollouts(prompts, prompt_of, chunks)))
    else:
        episodes = [(row, failed_episode) for row in rows]
        rollouts = put(episode_rollouts(prompts, prompt_of, episodes, agent.treatments))
    failed = Score(math.nan, ScoreHealth.EXCEPTION, ENDS_REPLICAS)
    scores = {name: put(scores_of([failed] * group_size)) for name in graders}
    return Experience(rollouts, scores)
