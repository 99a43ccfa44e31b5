"""Kinds of estimators of advantages: what each takes, and what it needs.

Invariant: the kind of an estimator tells how to call its function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.declaration import Declaration
from verl_ray.algorithms.discounting import Float64
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Float32

RewardPart = tuple[float, Float32]
"""A weight, and the rewards that it weights: float32 [rows]."""


@dataclass(frozen=True, eq=False)
class ResponseColumns:
    """Columns of responses that are known without their tokens; [rows] each.

    Attributes:
        finish: int8, a `Finish` each.
        group_id: int64.
        trajectory_id: int64.
        length: int64, response tokens.
        is_last: bool, whether it is the last one of its group.
        is_masked: bool, whether it is a member of its group that is not learned from;
            None if none is.
    """

    finish: npt.NDArray[np.int8]
    group_id: Int64
    trajectory_id: Int64
    length: Int64
    is_last: Bool
    is_masked: Bool | None = None


@dataclass(frozen=True, kw_only=True)
class Estimator(Declaration):
    """A choice of `algorithm.advantage`.

    Attributes:
        divides_by_spread: True if the scale of a group's rewards changes nothing, since
            it divides by their spread or compares their order alone.
        needs_positive_scores: True if it learns nothing from scores around 0.
        chooses_rows: True if only rows whose advantage is not 0 are learned from. It
            chooses from those that may be.
        reads_parts: True if it also takes parts=..., what the rewards consist of.
        reads_greedy: True if it also takes is_greedy=..., the last row of each group,
            which is then decoded greedily and not learned from.
        level: Whether rows have an advantage each, or tokens.
        needs_group: True if it compares the responses to one prompt.
        needs_critic: True if it reads values.
        reads_probabilities: True if it reads log-probs of the policy, and sums of its
            squared probabilities.
        rewards_whole_trajectories: True if it takes one reward per trajectory, and
            none of those that lack the reward of a row.
    """

    divides_by_spread: bool = False
    needs_positive_scores: bool = False
    chooses_rows: bool = False
    reads_parts: bool = False
    reads_greedy: bool = False
    level: ClassVar[Literal["row", "token"]]
    needs_group: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    reads_probabilities: ClassVar[bool] = False
    rewards_whole_trajectories: ClassVar[bool] = False

    def compared(self, parts: Sequence[RewardPart]) -> Sequence[RewardPart] | None:
        """Return the parts of rewards if it compares those; None for their sum."""
        return parts if self.reads_parts else None


@dataclass(frozen=True, kw_only=True)
class GroupBaseline(Estimator):
    """An advantage per row, compared with the other responses to the same prompt.

    Attributes:
        function: Takes (rewards, group, valid, trajectory=...) and its settings, as
            `grpo` does.
        reads_length: True if it also takes length=..., the response tokens of each row.
        reads_trajectory: False if it takes no trajectory=...: every row is then one.
    """

    function: Callable[..., Float32]
    reads_length: bool = False
    reads_trajectory: bool = True
    level: ClassVar[Literal["row", "token"]] = "row"
    needs_group: ClassVar[bool] = True
    rewards_whole_trajectories: ClassVar[bool] = True

    def columns(
        self,
        valid: Bool,
        responses: ResponseColumns,
        parts: Sequence[RewardPart],
    ) -> dict[str, Any]:
        """Return what the function takes besides rewards, group and valid."""
        # Rewards that failed are 0, and so are their parts. Others are NaN where their
        # grader left a response to others.
        masked = [
            (weight, np.where(valid, values, 0).astype(np.float32))
            for weight, values in parts
        ]
        columns = {
            "trajectory": (self.reads_trajectory, responses.trajectory_id),
            "length": (self.reads_length, responses.length),
            "parts": (self.reads_parts, masked),
            "is_greedy": (self.reads_greedy, responses.is_last),
        }
        return {name: values for name, (reads, values) in columns.items() if reads}


@dataclass(frozen=True, kw_only=True)
class GroupTokenBaseline(Estimator):
    """An advantage per token, compared with the other responses to the same prompt.

    All rows of a group have to be at hand.

    Attributes:
        function: Takes (rewards, group, valid, energy, offsets, trajectory=...) and
            its settings, as `optimal_token_baseline` does.
    """

    function: Callable[..., Float32]
    level: ClassVar[Literal["row", "token"]] = "token"
    needs_group: ClassVar[bool] = True
    reads_probabilities: ClassVar[bool] = True
    rewards_whole_trajectories: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class AgentBaseline(Estimator):
    """An advantage per row, compared with earlier rewards of the same agent.

    Attributes:
        function: Takes (rewards, counts, baseline) and its settings, as `rae` does. It
            also returns the baselines of the agents after these rewards.
    """

    function: Callable[..., tuple[Float64, Float64]]
    level: ClassVar[Literal["row", "token"]] = "row"
    rewards_whole_trajectories: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class CriticBaseline(Estimator):
    """An advantage per token, compared with a critic's values.

    Attributes:
        function: Takes (rewards, values, offsets, bootstrap) and its settings, as `gae`
            does. It also returns the targets of the critic.
    """

    function: Callable[..., tuple[Float32, Float32]]
    level: ClassVar[Literal["row", "token"]] = "token"
    needs_critic: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class NoBaseline(Estimator):
    """An advantage per token, from its rewards alone.

    Attributes:
        function: Takes (rewards, offsets) and its settings, as `discounted_returns`
            does.
    """

    function: Callable[..., Float32]
    level: ClassVar[Literal["row", "token"]] = "token"


Advantage = (
    GroupBaseline | GroupTokenBaseline | AgentBaseline | CriticBaseline | NoBaseline
)
