"""Producing experience: responses to prompts, each scored while others are still being generated.

Invariant: what a buffer gets is scored; which rows it gets when depends on timing, and what is taken from it does not.
Used for training and for evaluation alike; they differ in sampling and in the random streams of their seeds.
Deliberately not here: which replica draws what (`replicas.py`), and when groups are drawn (`controllers/trainers`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controllers.rollouts.drawing import Drawing
from controllers.rollouts.graders import EVALUATION, TRAINING, Graders, Piece
from controllers.rollouts.replicas import Replicas
from verl_ray.cluster.calls import look_after
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.stages import Prompts
from verl_ray.profiling.timers import Timers
from verl_ray.rollout.requests import Sampling
from workers.grader import Grader
from workers.rollout import Generation


@dataclass
class _Production:
    """Groups that are being drawn and scored."""

    drawing: Drawing
    buffer: RolloutBuffer
    scoring: list[Piece] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.is_drawn and not self.scoring

    @property
    def is_drawn(self) -> bool:
        return not self.drawing.owed and not self.drawing.finished


class Producer:
    """Advanced wherever the driver waits (`Background`)."""

    def __init__(self, config: RLConfig, replicas: Replicas, graders: Mapping[str, WorkerGroup[Grader]]) -> None:
        self._config, self._replicas = config, replicas
        self._graders = Graders(config, graders)
        self._open: list[_Production] = []
        self._looked_s = 0.0

    def begin(self, prompts: Prompts, what: Generation, buffer: RolloutBuffer) -> None:
        """Draw and score these groups; they are reserved in the buffer, and go there piece by piece."""
        buffer.reserve(prompts.group_id)
        self._open.append(_Production(self._replicas.draw(prompts, what), buffer))

    def take(self, prompts: Prompts, buffer: RolloutBuffer, policy_version: int, timers: Timers) -> Experience:
        """The groups of these prompts, for the policy that learns next; waits until all are there. Whatever ends the
        wait early ends the drawing, too.

        Raises:
            RewardError: more scores failed than max_failed_fraction allows.
            DataError: they were drawn from a policy that is too old.
        """
        ordinals = prompts.group_id
        try:
            with timers("gen"), timers.waiting():
                while buffer.missing(ordinals) and not all(one.is_drawn for one in self._open):
                    self.advance(TICK_S)
            with timers("reward"), timers.waiting():
                experience = buffer.take(ordinals, policy_version, lambda: self.advance(TICK_S))
        except BaseException:
            self._replicas.stop_drawing()
            self._open.clear()
            buffer.drop(ordinals)
            raise
        self._graders.refuse_broken(experience.scores)
        return experience

    # --------------------------------------------------------------------------------------------------- background

    def references(self) -> list[Any]:
        """Pieces to come, and scores to come."""
        return [*self._replicas.references(), *self._scores_to_come()]

    def advance(self, timeout_s: float = 0.0) -> None:
        """Hand on what is finished: responses to the graders, and scored ones to their buffers. Waits for something to
        hand on up to `timeout_s` seconds."""
        if timeout_s and any(one.scoring for one in self._open):
            wait(self.references(), 1, timeout_s)  # of both kinds, whichever comes first
            timeout_s = 0.0
        self._replicas.advance(timeout_s)
        for one in self._open:
            while one.drawing.finished:
                piece = one.drawing.finished.popleft()
                one.scoring.append(self._graders.score(piece, one.drawing.generation.purpose))
        self._hand_on_scored()
        self._open = [one for one in self._open if not one.is_over]

        if time.monotonic() - self._looked_s >= TICK_S:
            self._looked_s = time.monotonic()
            look_after([call for one in self._open for piece in one.scoring for call in piece.calls])

    def _hand_on_scored(self) -> None:
        """To their buffers."""
        coming = self._scores_to_come()
        there = set(wait(coming, len(coming), 0.0)) if coming else set()
        for one in self._open:
            ready = [piece for piece in one.scoring if not there.isdisjoint(piece.references())]
            for piece in ready:
                scored = piece.poll()
                if scored is not None:
                    one.buffer.put(scored)
                    one.scoring.remove(piece)

    def _scores_to_come(self) -> list[Any]:
        return [reference for one in self._open for piece in one.scoring for reference in piece.references()]

    # ------------------------------------------------------------------------------------------------- what to draw

    def training(self) -> Generation:
        """What is drawn for each prompt to learn from."""
        rollout = self._config.rollout
        return self._generation(TRAINING, rollout.group_size, rollout.temperature, rollout.top_p, rollout.top_k)

    def evaluation(self) -> Generation:
        """What is drawn for each held-out problem."""
        wanted = self._config.evaluation
        return self._generation(EVALUATION, wanted.group_size, wanted.temperature, 1.0, -1)

    def _generation(self, purpose: str, group_size: int, temperature: float, top_p: float, top_k: int) -> Generation:
        rollout = self._config.rollout
        sampling = Sampling(temperature, top_p, top_k, rollout.max_response_tokens)
        return Generation(purpose, group_size, sampling, self._config.run.seed, rollout.stream_rows)
