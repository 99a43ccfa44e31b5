"""The reward role as the driver sees it: who scores what, and what is waited for.

Invariant: every grader is asked by the same verb, and scores a piece of rollouts as soon as it is drawn. Deliberately
not here: how responses are scored (`workers`), and what is made of the scores (`verl_ray/rewards/shaping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.store import read
from verl_ray.config.reward import HELD_OUT
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.errors import RewardError
from verl_ray.rewards.health import Health
from workers.grader import Grader

TRAINING, EVALUATION = "train", "evaluate"
"""What responses are drawn for: part of every seed."""


class Piece:
    """Some rollouts, and their scores to come."""

    def __init__(self, rollouts: Sharded[Rollouts], calls: Mapping[str, Call[Sharded[Scores]]]) -> None:
        self._rollouts, self._calls = rollouts, calls

    @property
    def calls(self) -> list[Call[Any]]:
        """One of each grader."""
        return list(self._calls.values())

    def references(self) -> list[Any]:
        """What the scores are made of, as far as it is still to be waited for."""
        return [reference for call in self._calls.values() for reference in call.references()]

    def poll(self) -> Experience | None:
        """With all of its scores, once they are there; returns at once, and raises what a grader raised."""
        there = [call.poll() for call in self._calls.values()]
        if not all(there):
            return None
        return Experience(self._rollouts, {name: call.result() for name, call in self._calls.items()})


class Graders:
    """The graders of a run."""

    def __init__(self, config: RLConfig, groups: Mapping[str, WorkerGroup[Grader]]) -> None:
        self._config, self._groups = config, groups

    def of(self, purpose: str) -> tuple[str, ...]:
        """Who scores what is drawn for training, or for evaluation."""
        own = purpose == EVALUATION and HELD_OUT in self._groups
        return (HELD_OUT,) if own else tuple(self._config.graders)

    def score(self, rollouts: Sharded[Rollouts], purpose: str) -> Piece:
        """Ask all who score for this purpose."""
        return Piece(rollouts, {name: self._ask(name, rollouts) for name in self.of(purpose)})

    def refuse_broken(self, scores: Mapping[str, Sharded[Scores]]) -> None:
        """A few failed scores are counted and left out; more than max_failed_fraction are no measurement.

        Raises:
            RewardError: a grader of the training failed too often.
        """
        for name, graded in scores.items():
            if name != HELD_OUT:  # which is counted among the metrics of the evaluation
                self._refuse_broken(name, graded)

    def _refuse_broken(self, name: str, scores: Sharded[Scores]) -> None:
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

    def _ask(self, name: str, rollouts: Sharded[Rollouts]) -> Call[Sharded[Scores]]:
        group = self._groups[name]
        if name in self._config.model_roles:  # a model on a backend, whose ranks may have to meet
            return group.scatter(Grader.score, rollouts)
        return group.route(Grader.score, rollouts)
