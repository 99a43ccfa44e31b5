"""Generations to learn from and to evaluate, and how far they are.

Invariant: a production holds the groups of one buffer, each requested once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from controllers.rollouts.generation import GenerationJob
from controllers.rollouts.graders import PendingScores
from controllers.rollouts.score_failures import ScoreFailures
from controllers.rollouts.whole_groups import GroupCollector
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.columns.batch import Int64
from verl_ray.config.reward import EvaluationConfig
from verl_ray.config.rollout import RolloutConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.errors import RewardError
from verl_ray.rollout.requests import Sampling
from workers.generation import (
    EVALUATION,
    TRAINING,
    Generation,
    GenerationWithGreedyRow,
)


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
        purpose,
        section.group_size,
        sampling,
        config.run.seed,
        rollout.stream_rows,
        # Nothing is computed with responses that are only graded.
        keeps_routing=purpose == TRAINING and rollout.routing_replay,
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
