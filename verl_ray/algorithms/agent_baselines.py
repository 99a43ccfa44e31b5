"""Baselines of agents: the mean of an agent's own rewards so far, with decay.

Invariant: rewards enter in the order of ordinals, so a run that is resumed has the same
baselines, to the bit. A reward that is not finite enters none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from verl_ray.algorithms.declaration import Setting
from verl_ray.algorithms.discounting import Float64, discounted_sums
from verl_ray.algorithms.estimators import AgentBaseline, ResponseColumns
from verl_ray.algorithms.groups import GroupMembers
from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.columns.stages import RowRewards


def rae(
    rewards: Float64, counts: Int64, baseline: Float64, *, ema_decay: float
) -> tuple[Float64, Float64]:
    """Reward - exponential moving average of the same agent's rewards before it.

    With b_0 the baseline at the beginning, the advantage of reward R_k is R_k - b_k,
    and b_{k+1} = ema_decay * b_k + (1 - ema_decay) * R_k.

    Source: role-conditioned advantage estimation, SPIRAL (arXiv:2506.24119), with a
    decay of 0.95 and baselines that begin at 0. Groups of several agents, such as the
    two sides of a game, have no common mean. Deviation: the paper subtracts b_{k+1},
    which R_k has moved already, so its advantage is ema_decay * (R_k - b_k). Ours is
    1 / 0.95 = 1.05 times as large.

    Args:
        rewards: float64 [n], those of each agent one after another, in their order.
        counts: int64 [agents], rewards of each agent.
        baseline: float64 [agents], at the beginning.
        ema_decay: What is left of a baseline after a reward.

    Returns:
        Advantages, float64 [n], and the baselines at the end, float64 [agents].
    """
    offsets = offsets_of(counts)
    # Sums of the rewards so far with decay, each reward included.
    backwards = len(rewards) - offsets[::-1]
    sums = discounted_sums(rewards[::-1].copy(), backwards, ema_decay)[::-1]

    agent = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(rewards)) - offsets[agent]
    before = np.zeros(len(rewards))
    later = place > 0
    before[later] = sums[np.flatnonzero(later) - 1]
    expected = ema_decay**place * baseline[agent] + (1 - ema_decay) * before

    final = baseline.copy()
    has_rewards = counts > 0
    last = sums[offsets[1:][has_rewards] - 1]
    final[has_rewards] *= ema_decay ** counts[has_rewards]
    final[has_rewards] += (1 - ema_decay) * last
    return rewards - expected, final


EMA_DECAY = Setting(
    "ema_decay",
    Annotated[float, Field(ge=0, lt=1)],
    "Decay of the mean of an agent's rewards.",
)

RAE = AgentBaseline(
    name="rae",
    paper="SPIRAL (arXiv:2506.24119)",
    function=rae,
    reads={EMA_DECAY: 0.95},
)


class AgentBaselines:
    """The baselines of all agents of a run."""

    def __init__(self) -> None:
        self._baselines: dict[str, float] = {}

    def with_advantages(
        self,
        estimator: AgentBaseline,
        settings: Mapping[str, float],
        rewards: RowRewards,
        responses: ResponseColumns,
        agent_of_row: Sequence[str],
    ) -> RowRewards:
        """Return the rewards of a step with advantages; the baselines move on.

        A trajectory is one reward, the sum over its rows, and belongs to the agent of
        its first row. One without a reward has an advantage of 0 and moves nothing. A
        reward that is not finite shows as an advantage of NaN in its group, and moves
        nothing either: a baseline would never recover from it.

        Args:
            estimator: The estimator, such as that of `rae`.
            settings: Its settings.
            rewards: Rewards of all responses of a step.
            responses: What else is known of them.
            agent_of_row: The name of each row's agent.
        """
        members = GroupMembers(
            rewards.reward,
            responses.group_id,
            rewards.is_member,
            responses.trajectory_id,
        )
        number = members.number_of_rows
        _, first_row = np.unique(number, return_index=True)
        names, agent = np.unique(np.array(agent_of_row, str), return_inverse=True)
        agent = agent.reshape(-1)[first_row]

        # By agent, then in the order of ordinals, then of trajectories.
        order = np.lexsort((responses.group_id[first_row], agent))
        moves = members.is_member & np.isfinite(members.reward)
        order = order[moves[order]]
        begin = np.array([self._baselines.get(name, 0.0) for name in names.tolist()])
        advantages, end = estimator.function(
            members.reward[order],
            np.bincount(agent[order], minlength=len(names)),
            begin,
            **settings,
        )
        self._baselines |= dict(zip(names.tolist(), end.tolist(), strict=True))

        trajectory_values = np.zeros(len(first_row))
        trajectory_values[order] = advantages
        return rewards.replace(advantage=members.to_rows(trajectory_values))

    def state(self) -> dict[str, float]:
        """Return the baseline of each agent, as JSON."""
        return dict(self._baselines)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue with the baselines of `state`."""
        self._baselines = dict(state)
