"""Producing experience: responses to prompts, each scored while others are still being generated.

Invariant: rows come back in the order of their ids, whichever replica was faster, so what follows does not depend on
timing. Used for training and for evaluation alike; they differ in sampling and in the random streams of their seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from controllers.rollouts.replicas import RolloutServers
from verl_ray.cluster.calls import Call, look_after, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.store import read
from verl_ray.config.reward import HELD_OUT, ModelReward
from verl_ray.config.schema import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts, Scores
from verl_ray.errors import RewardError
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.health import Health
from verl_ray.rollout.base import Sampling
from workers.reward import RewardWorker
from workers.reward_model import RewardModelGrader
from workers.rollout import Generation

TRAINING, EVALUATION = "train", "evaluate"
"""What responses are drawn for: part of every seed."""


class Producer:
    def __init__(
        self,
        config: RLConfig,
        rollout: RolloutServers,
        graders: Mapping[str, WorkerGroup[Any]],
    ) -> None:
        self._config, self._rollout, self._groups = config, rollout, graders

    def produce(
        self, prompts: Prompts, policy_version: int, timers: Timers, generation: Generation | None = None
    ) -> Experience:
        """Responses to all prompts, with their scores. `generation`: what to draw; None = as for training."""
        what = generation or self.training()
        graders = self.graders(what.purpose)
        pieces: list[Sharded[Rollouts]] = []
        scoring: dict[str, list[Call[Sharded[Scores]]]] = {name: [] for name in graders}
        with timers("gen"), timers.waiting():
            for piece in self._rollout.generate(prompts, what, lambda: _look_after(scoring)):
                pieces.append(piece)
                for name, calls in scoring.items():
                    calls.append(self._score(name, piece))
        with timers("reward"), timers.waiting():
            wait_all([call for calls in scoring.values() for call in calls])  # whichever of them fails first
            scores = {name: Sharded.concat([call.result() for call in calls]) for name, calls in scoring.items()}
        rollouts = Sharded.concat(pieces)
        for name, graded in scores.items():
            self._refuse_broken_grader(name, graded)
        order = np.argsort(rollouts.row("row_id"), kind="stable")
        ordered = {name: graded.select(order) for name, graded in scores.items()}
        return Experience(rollouts.select(order), ordered, policy_version)

    def graders(self, purpose: str) -> tuple[str, ...]:
        """Who scores what is drawn for training, or for evaluation."""
        own = purpose == EVALUATION and HELD_OUT in self._groups
        return (HELD_OUT,) if own else tuple(self._config.graders)

    def _score(self, name: str, piece: Sharded[Rollouts]) -> Call[Sharded[Scores]]:
        group = self._groups[name]
        if isinstance(self._config.graders.get(name), ModelReward):
            return group.scatter(RewardModelGrader.score, piece)  # its ranks may have to meet
        return group.route(RewardWorker.score, piece)

    def training(self) -> Generation:
        rollout = self._config.rollout
        return self._generation(TRAINING, rollout.group_size, rollout.temperature, rollout.top_p, rollout.top_k)

    def evaluation(self) -> Generation:
        wanted = self._config.evaluation
        return self._generation(EVALUATION, wanted.group_size, wanted.temperature, 1.0, -1)

    def _refuse_broken_grader(self, name: str, scores: Sharded[Scores]) -> None:
        """A few failed scores are counted and left out; more than max_failed_fraction are no measurement."""
        if name == HELD_OUT:
            return  # counted among the metrics of the evaluation, which no training depends on
        health = scores.row("health")
        failed = np.flatnonzero(health != Health.OK)
        limit, found = self._config.graders[name].max_failed_fraction, len(failed) / len(health)
        if found > limit:
            names, counts = np.unique(health[failed], return_counts=True)
            kinds = {Health(kind).name.lower(): int(n) for kind, n in zip(names, counts, strict=True)}
            first = read(scores.select(failed[:1]), self._config.run.stall_s).detail.texts()[0]
            raise RewardError(
                f"{found:.0%} of the scores failed ({kinds}), more than {name}.max_failed_fraction = {limit}. "
                f"The first: {first}"
            )

    def _generation(self, purpose: str, group_size: int, temperature: float, top_p: float, top_k: int) -> Generation:
        rollout = self._config.rollout
        sampling = Sampling(temperature, top_p, top_k, rollout.max_response_tokens)
        return Generation(purpose, group_size, sampling, self._config.run.seed, rollout.stream_rows)


def _look_after(scoring: Mapping[str, Sequence[Call[Any]]]) -> None:
    """While responses are drawn: raise for a grader that makes no progress."""
    look_after([call for calls in scoring.values() for call in calls])
