"""Several rows as one sequence: the same as one row with all of their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.learning.test_normalised_weights import correction_of, credit_of, itself
from tests.learning.test_objectives import algorithm
from tests.rows import log_probs_of, on_responses, rollouts_of
from verl_ray.columns.stages import TrainingBatch
from verl_ray.engine.micro_batches import MicroBatch, to_learn
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective, mean_weight
from verl_ray.ops.outputs import TokenOutputs

RATIOS = [1.5, 0.5, 2.0, 0.8]


def losses(row: list[int], **settings: Any) -> list[float]:
    log_probs = torch.log(torch.tensor(RATIOS)) - 2
    objective = PolicyObjective(algorithm(**settings), 1.0, 0.0)
    inputs = LossInputs(
        torch.tensor(row), advantages=torch.tensor([1.0, 1.0, 1.0, -1.0]),
        old_log_probs=torch.full((4,), -2.0), rollout_log_probs=torch.full((4,), -2.0),
    )  # fmt: skip
    outputs = TokenOutputs(log_probs=log_probs, entropy=torch.zeros(4))
    found: list[float] = objective(outputs, inputs).loss.tolist()
    return found


def test_the_ratio_of_a_trajectory_by_hand() -> None:
    """GSPO's ratio is the geometric mean over all tokens with one number."""
    gspo: dict[str, Any] = {
        "policy_loss": "gspo", "clip_low": 0.9, "clip_high": 9.0, "aggregation": "seq_mean_token_mean",
    }  # fmt: skip
    rows = losses([0, 0, 1, 2], **gspo)
    assert rows == pytest.approx([-(0.75**0.5), -(0.75**0.5), -2.0, 0.8])
    trajectories = losses([0, 0, 0, 1], **gspo)
    mean = (1.5 * 0.5 * 2.0) ** (1 / 3)
    assert trajectories == pytest.approx([-mean] * 3 + [0.8])


def test_a_correction_of_a_trajectory_by_hand() -> None:
    """The products are 0.75, 2 and 0.8 of rows, and 1.5 and 0.8 of trajectories."""
    weighted: dict[str, Any] = {
        "policy_loss": "reinforce", "clip_low": None, "clip_high": None,
        "correction": correction_of("tis", "sequence").model_copy(
            update={"form": "two_policy", "normalise": False}
        ),
    }  # fmt: skip
    plain = losses([0, 0, 1, 2], **weighted | {"correction": algorithm().correction})
    rows = np.divide(losses([0, 0, 1, 2], **weighted), plain)
    assert rows == pytest.approx([0.75, 0.75, 2, 0.8])
    trajectories = np.divide(losses([0, 0, 0, 1], **weighted), plain)
    assert trajectories == pytest.approx([1.5, 1.5, 1.5, 0.8])


def test_the_mean_weight_is_over_trajectories() -> None:
    """Rows 0 and 2 are one: its product is 4 * 0.5 * 0.25 = 0.5, the other one 1."""
    rows = rollouts_of([1, 1, 2])
    rows = rows.replace(trajectory_id=np.array([6, 5, 6]))
    rows = rows.replace(rollout_log_probs=on_responses(rows, [-2.0] * 4))
    ratios = [4.0, 1.0, 0.5, 0.25]
    old = log_probs_of(rows, [-2.0 + float(np.log(ratio)) for ratio in ratios])
    for sequence, expected in (("row", (2 + 1 + 0.125) / 3), ("trajectory", 1.5 / 2)):
        config = algorithm(
            correction=correction_of("tis", "sequence"), sequence=sequence
        )
        credit = credit_of(rows, [True] * 3)
        found = mean_weight(config, rows, credit, old, itself)
        assert found == pytest.approx(expected)


def test_a_micro_batch_numbers_its_units() -> None:
    rows = rollouts_of([1] * 5)
    batch = TrainingBatch(
        offsets=rows.offsets, tokens=rows.tokens, response_mask=rows.response_mask,
        loss_weight=np.arange(5, dtype=np.float32), unit=np.array([70, 5, 70, 5, 9]),
    )  # fmt: skip
    indices = np.array([1, 3, 0, 2])
    row_of_token = torch.arange(4)
    packed: Any = None
    whole = MicroBatch(packed, indices, indices, row_of_token)
    learned = to_learn(whole, batch, "unit")
    assert learned.row_weights is not None and learned.unit is not None
    assert learned.row_weights.tolist() == [1, 3, 0, 2]
    assert learned.unit.tolist() == [0, 0, 1, 1]
    assert learned.row_of_loss is not None and learned.losses_of_rows is not None
    assert learned.row_of_loss.tolist() == [0, 2]
    assert learned.losses_of_rows.tolist() == [0.5] * 4
