"""Production of experience: responses to prompts, scored while others are generated.

Invariant: a buffer only gets scored rows. Which rows it gets when depends on timing;
what is taken from it does not. Training and evaluation share this code, with different
sampling parameters and separate random streams. Deliberately not here: which replica
generates what (`generation.py`), and which prompts a step requests
(`controllers/trainers`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controllers.rollouts.generation import GenerationJob
from controllers.rollouts.graders import EVALUATION, TRAINING, Graders, PendingScores
from controllers.rollouts.groups import GroupCollector
from controllers.rollouts.replicas import Replicas
from controllers.rollouts.score_failures import ScoreFailures
from verl_ray.cluster.calls import check_progress
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.profiling.phases import phase
from verl_ray.profiling.timers import Timers
from verl_ray.rollout.requests import Sampling
from workers.grader import Grader
from workers.rollout import Generation


@dataclass
class _Production:
    """Groups that are generated and scored for a buffer."""

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

    @property
    def is_generated(self) -> bool:
        """Whether every response is generated, and passed on to the graders."""
        return not self.job.num_pending and not self.job.finished

    @property
    def is_finished(self) -> bool:
        """Whether every response is generated, scored and in the buffer."""
        return self.is_generated and not self.scoring


class Producer:
    """Generates and scores groups, and fills buffers with them.

    `advance` is called wherever the driver waits (see `Background`).
    """

    def __init__(
        self,
        config: RLConfig,
        replicas: Replicas,
        graders: Mapping[str, WorkerGroup[Grader]],
    ) -> None:
        """Take the replicas, and the workers of each grader, by name."""
        self._config = config
        self._replicas = replicas
        self._graders = Graders(config, graders)
        self._productions: list[_Production] = []
        self._last_check_s = 0.0

    def begin(
        self,
        prompts: Prompts,
        generation: Generation,
        buffer: RolloutBuffer,
        step: int,
    ) -> None:
        """Begin to generate and score groups; reserve them in the buffer.

        They arrive there piece by piece.

        Args:
            prompts: The prompts of the groups.
            generation: What is generated for each prompt.
            buffer: Buffer that gets the groups.
            step: The training step that is made, for reward functions; in an evaluation
                the last step of the policy.
        """
        buffer.reserve(prompts.group_id)
        num_responses = prompts.num_rows * generation.group_size
        failures = self._graders.watch_failures(generation.purpose, num_responses)
        groups = None
        if self._graders.needs_groups(generation.purpose):
            groups = GroupCollector(generation.group_size)
        job = self._replicas.generate(prompts, generation)
        production = _Production(job, buffer, failures, num_responses, step, groups)
        self._productions.append(production)

    def take(
        self,
        prompts: Prompts,
        buffer: RolloutBuffer,
        policy_version: int,
        timers: Timers,
    ) -> Experience:
        """Take the groups of these prompts out of the buffer, once all are there.

        If the wait is interrupted or fails, all generation is abandoned.

        Args:
            prompts: Prompts that `begin` was called with.
            buffer: The buffer of that call.
            policy_version: Version of the policy that learns next.
            timers: Timers for the time until all is generated ("gen") and the time
                from there until all is scored ("reward").

        Raises:
            RewardError: More scores fail than max_failed_fraction allows.
            DataError: The policy that generated the responses is too old.
        """
        ordinals = prompts.group_id
        try:
            with phase(self._phase), timers("gen"), timers.waiting():
                while buffer.missing(ordinals) and not self._all_generated():
                    self.advance(TICK_S)

            with phase(self._phase), timers("reward"), timers.waiting():
                experience = buffer.take(
                    ordinals, policy_version, lambda: self.advance(TICK_S)
                )
        # No replica may continue with abandoned work, also after a stop of the run.
        except BaseException:
            self._replicas.stop_generation()
            self._productions.clear()
            buffer.drop(ordinals)
            raise
        return experience

    def _phase(self) -> str:
        """Return how far the oldest production is, for a person who waits."""
        if not self._productions:
            return ""
        production = self._productions[0]
        purpose = production.job.generation.purpose
        total = production.num_responses
        scored = f"{production.num_scored}/{total}"

        if purpose == EVALUATION:
            text = f"evaluating {scored}"
        elif production.is_generated:
            text = f"scoring {scored}"
        else:
            generated = total - production.job.num_pending
            text = f"generating {generated}/{total} responses, scoring {scored}"

        if production.scoring:
            oldest_s = time.monotonic() - production.scoring[0].since
            deadlines = self._graders.deadlines_in_words(purpose)
            text += f", slowest {oldest_s:.0f} s{deadlines}"
        return text

    def _all_generated(self) -> bool:
        return all(production.is_generated for production in self._productions)

    # ----------------------------------------------------------------------- background

    def references(self) -> list[Any]:
        """Return the object references of pending pieces and of pending scores."""
        return [*self._replicas.references(), *self._score_references()]

    def advance(self, timeout_s: float = 0.0) -> None:
        """Pass on what is finished: responses to graders, scored ones to buffers.

        Wait for something to pass on for up to `timeout_s` seconds.
        """
        if timeout_s and any(production.scoring for production in self._productions):
            # Responses and scores are waited for together, whichever come first.
            wait(self.references(), 1, timeout_s)
            timeout_s = 0.0
        # With nothing to score, new responses are all there is to wait for.
        self._replicas.advance(timeout_s)

        self._score_generated()
        self._buffer_scored()
        self._productions = [
            production for production in self._productions if not production.is_finished
        ]
        self._check_graders()

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
        for production in self._productions:
            updated = [
                piece
                for piece in production.scoring
                if not available.isdisjoint(piece.references())
            ]
            for piece in updated:
                scored = piece.poll()
                if scored is not None:
                    production.failures.add(scored)
                    production.buffer.put(scored)
                    production.num_scored += len(scored.rollouts)
                    production.scoring.remove(piece)

    def _check_graders(self) -> None:
        """Check now and then that every grader makes progress."""
        if time.monotonic() - self._last_check_s < TICK_S:
            return
        self._last_check_s = time.monotonic()

        calls: list[Any] = []
        for production in self._productions:
            for piece in production.scoring:
                calls += piece.calls
        check_progress(calls)

    def _score_references(self) -> list[Any]:
        """Return the object references of all pending scores."""
        references: list[Any] = []
        for production in self._productions:
            for piece in production.scoring:
                references += piece.references()
        return references

    # ---------------------------------------------------------------- what is generated

    def training_generation(self) -> Generation:
        """Return what is generated for each prompt to learn from."""
        rollout = self._config.rollout
        sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.max_response_tokens,
        )
        return self._generation(TRAINING, rollout.group_size, sampling)

    def evaluation_generation(self) -> Generation:
        """Return what is generated for each held-out problem."""
        evaluation = self._config.evaluation
        # The whole distribution: neither top_p nor top_k cuts it.
        sampling = Sampling(
            evaluation.temperature,
            1.0,
            -1,
            self._config.rollout.max_response_tokens,
        )
        return self._generation(EVALUATION, evaluation.group_size, sampling)

    def _generation(
        self,
        purpose: str,
        group_size: int,
        sampling: Sampling,
    ) -> Generation:
        return Generation(
            purpose,
            group_size,
            sampling,
            self._config.run.seed,
            self._config.rollout.stream_rows,
        )
