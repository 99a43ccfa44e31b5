"""Assignment of credit: from the scores of a step to the advantages of its tokens.

Invariant: rewards per response and baselines of rows are computed on the driver, from
one number per row; everything per token is computed where the tokens are. Deliberately
not here: the formulas (`verl_ray/algorithms`), and what learns from the credit
(`learner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from controllers.system.build import System
from controllers.trainers.units import assignment_of_units
from controllers.trainers.updates import ModelOutputs
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.agent_baselines import AgentBaselines
from verl_ray.algorithms.credit import response_rewards
from verl_ray.algorithms.estimators import (
    AgentBaseline,
    GroupTokenBaseline,
    ResponseColumns,
)
from verl_ray.algorithms.groups import is_last_of_group
from verl_ray.cluster.restarts import Pending
from verl_ray.cluster.store import put
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Credit, Divergence, Float32, Rollouts
from verl_ray.rewards.shaping import ResponseScores
from workers.actor import ActorWorker

T = TypeVar("T")


class WaitFor(Protocol):
    """Waits for a call; its time counts under the name of a timer."""

    def __call__(self, timer: str, call: Pending[Any]) -> Any: ...


class CreditAssignment:
    """Turns scores into rewards, and rewards into advantages and returns."""

    def __init__(self, config: RLConfig, system: System, wait_for: WaitFor) -> None:
        self._config = config
        self._system = system
        self._wait_for = wait_for
        self._baselines = AgentBaselines()

    def state(self) -> dict[str, float]:
        """Return the baselines of agents, as JSON."""
        return self._baselines.state()

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue with the baselines of `state`."""
        self._baselines.load_state(state)

    def assign(
        self,
        rollouts: Sharded[Rollouts],
        scores: ResponseScores,
        outputs: ModelOutputs,
        kl_coefficient: float,
    ) -> Sharded[Credit]:
        """Return the credit of all rollouts of a step.

        Args:
            rollouts: The rollouts.
            scores: Their shaped scores.
            outputs: What the models computed for them.
            kl_coefficient: The present cost of a nat of divergence.
        """
        algorithm = self._config.algorithm
        actor = self._system.actor

        # A KL penalty per token is applied on the ranks, with the credit.
        charge = None
        if algorithm.charges_whole_responses:
            charge = (kl_coefficient, self._response_divergences(rollouts, outputs))

        # The responses of a group are on several ranks; only the driver has the scores
        # of all of them.
        columns = response_columns(rollouts, self._config.rollout.group_size)
        graded = scores.as_graded
        rewards = response_rewards(
            algorithm, scores.score, scores.ok, columns, charge, scores.parts, graded
        )

        estimator = ADVANTAGES[algorithm.advantage]
        if isinstance(estimator, AgentBaseline):
            settings = estimator.settings(algorithm)
            agents = self._agents(rollouts)
            rewards = self._baselines.with_advantages(
                estimator, settings, rewards, columns, agents
            )

        # Baselines of tokens compare the tokens of a group, so that is on one rank.
        assignment = None
        if isinstance(estimator, GroupTokenBaseline):
            group = rollouts.row("group_id")
            assignment = assignment_of_units(actor.partition, rollouts.lengths, group)
        call = actor.scatter(
            ActorWorker.assign_credit,
            rollouts,
            put(rewards),
            outputs.old_log_probs,
            outputs.reference_log_probs,
            outputs.values,
            algorithm,
            kl_coefficient,
            assignment=assignment,
        )
        credit: Sharded[Credit] = self._wait_for("adv", call)
        return credit

    def _agents(self, rollouts: Sharded[Rollouts]) -> list[str]:
        """Return the name of each row's agent, which is its data source."""
        actor = self._system.actor
        assignment = actor.partition(rollouts.lengths)
        call = actor.scatter(ActorWorker.data_sources, rollouts, assignment=assignment)
        of_ranks: list[list[str]] = self._wait_for("adv", call)
        sources = np.array([name for names in of_ranks for name in names], object)
        in_order = np.empty_like(sources)
        in_order[np.concatenate(assignment)] = sources
        return list(in_order)

    def _response_divergences(
        self, rollouts: Sharded[Rollouts], outputs: ModelOutputs
    ) -> Float32:
        """Return the divergence of each response from the reference, float32 [rows]."""
        call = self._system.actor.scatter(
            ActorWorker.compute_divergence,
            rollouts,
            outputs.old_log_probs,
            outputs.reference_log_probs,
            self._config.algorithm,
        )
        stage: Sharded[Divergence] = self._wait_for("adv", call)
        divergence: Float32 = stage.row("kl")
        return divergence


# ----------------------------------------------------------------- columns of responses

# Columns of the responses of a step, which are all that the driver knows of them.


def response_columns(rollouts: Sharded[Rollouts], group_size: int) -> ResponseColumns:
    """Return the columns of some rollouts."""
    return ResponseColumns(
        finish=rollouts.row("finish"),
        group_id=rollouts.row("group_id"),
        trajectory_id=rollouts.row("trajectory_id"),
        length=rollouts.row("response_length"),
        is_last=is_last_of_group(rollouts.row("row_id"), group_size),
    )
