"""What holds of every loss of the policy, with every aggregation.

Losses go through the objective and the sum as in an engine. Finite differences and
numbers by hand are in `test_policy_losses.py`; two ranks, and two that share out rows,
are in `tests/engine/test_contract.py`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.choices import with_loss
from verl_ray.algorithms.aggregation import aggregate
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS, row_weights
from verl_ray.learning.objectives import LossInputs, without_uncounted
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.ops.outputs import TokenOutputs

LENGTHS = np.array([3, 1, 4, 2, 5])
TRAINED = np.array([True, True, False, True, True])
"""Row 2 has tokens, and is not learned from."""
STARTS = np.cumsum([0, *LENGTHS])
NARROW = {"gspo": {"clip_low": 0.05, "clip_high": 0.1}}
"""Bounds that some rows keep and others do not."""

every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)
every_aggregation = pytest.mark.parametrize("mode", AGGREGATIONS)


@functools.cache
def objective_of(name: str) -> PolicyObjective:
    return PolicyObjective(with_loss(name, **NARROW.get(name, {})), 1.0, 0.0)


@functools.cache
def weights_of(mode: str) -> Tensor:
    trained = LENGTHS * TRAINED
    weights = row_weights(
        mode, trained, total_tokens=int(trained.sum()), total_rows=int(TRAINED.sum()), horizon=7
    )  # fmt: skip
    return torch.from_numpy(weights).double()


class Rows:
    """Log-probs that learn, and columns, float64; row 2 may hold anything."""

    def __init__(self, spread: float = 0.4, untrained: float | None = None) -> None:
        random = np.random.default_rng(5)
        count = int(LENGTHS.sum())
        self.old = torch.tensor(-random.uniform(0.2, 2.5, count))
        self.log_probs = self.old + torch.tensor(random.normal(0, spread, count))
        self.log_probs = self.log_probs.clamp(max=-0.01)
        if not spread:
            self.log_probs = self.old.clone()
        advantages = torch.tensor([1.5, -0.5, 1.0, 0.0, -2.0], dtype=torch.float64)
        self.row = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
        self.advantages = advantages[self.row]
        self.selected = torch.tensor(random.integers(0, 2, count)).double()
        if untrained is not None:
            for column in (self.old, self.log_probs, self.advantages, self.selected):
                column[STARTS[2] : STARTS[3]] = untrained
        self.log_probs.requires_grad_()

    def share(self, rows: list[int], name: str, mode: str) -> Tensor:
        """Return what a micro-batch of these rows adds to the loss."""
        token = torch.cat([torch.arange(STARTS[row], STARTS[row + 1]) for row in rows])
        # Rows are numbered within their micro-batch.
        row = torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor(LENGTHS[rows])
        )
        weights = weights_of(mode)[rows]
        outputs = TokenOutputs(
            log_probs=self.log_probs[token], entropy=torch.zeros(len(token))
        )
        inputs = LossInputs(
            row, old_log_probs=self.old[token], advantages=self.advantages[token], selected=self.selected[token]
        )  # fmt: skip
        found = objective_of(name)(*without_uncounted(outputs, inputs, weights != 0))
        return aggregate(found.loss, row, weights)

    def loss(self, parts: list[list[int]], name: str, mode: str) -> tuple[float, Tensor]:  # fmt: skip
        """Return the loss of these micro-batches together, and its gradient."""
        shares = [self.share(rows, name, mode) for rows in parts]
        total = torch.stack(shares).sum()
        (grad,) = torch.autograd.grad(total, self.log_probs)
        return total.item(), grad


ALL = [[0, 1, 2, 3, 4]]


@every_loss
@every_aggregation
def test_micro_batches_packing_and_order_do_not_matter(name: str, mode: str) -> None:
    rows = Rows()
    value, grad = rows.loss(ALL, name, mode)
    assert value != 0 and grad.isfinite().all()
    for parts in (
        [[4, 2, 0, 3, 1]],
        [[0], [1], [2], [3], [4]],
        [[3, 1], [4], [2, 0]],
        [[2], [1, 4, 3, 0]],
    ):
        other, other_grad = rows.loss(parts, name, mode)
        assert other == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(other_grad, grad, rtol=1e-12, atol=1e-15)


@every_loss
@every_aggregation
def test_at_the_old_policy_it_is_the_policy_gradient_times_its_weight(
    name: str, mode: str
) -> None:
    rows = Rows(spread=0.0)
    _, grad = rows.loss(ALL, name, mode)
    expected = -rows.advantages * weights_of(mode)[rows.row]
    # M2PO learns from the chosen tokens alone, and Clip-Cov from the others.
    if name == "m2po":
        expected = expected * rows.selected
    if name == "clip_cov":
        expected = expected * (1 - rows.selected)
    torch.testing.assert_close(grad, expected, rtol=1e-7, atol=1e-12)


@every_loss
@every_aggregation
def test_a_row_that_is_not_learned_from_is_exactly_nothing(
    name: str, mode: str
) -> None:
    """Whatever it holds: alone it gives 0, and among others the same bits as without."""
    without, grad = Rows().loss([[0, 1, 3, 4]], name, mode)
    for held in (0.0, 1e30, math.nan, math.inf, -math.inf):
        rows = Rows(untrained=held)
        alone, alone_grad = rows.loss([[2]], name, mode)
        assert alone == 0 and not alone_grad.any()

        among, among_grad = rows.loss(ALL, name, mode)
        assert among == without and torch.equal(among_grad, grad)


@every_loss
def test_a_micro_batch_without_tokens_is_exactly_nothing(name: str) -> None:
    """It has rows whose tokens are all of prompts."""
    nothing, no_rows = torch.zeros(0, requires_grad=True), torch.zeros(0).long()
    found = objective_of(name)(
        TokenOutputs(log_probs=nothing, entropy=torch.zeros(0)),
        LossInputs(no_rows, old_log_probs=nothing.detach(), advantages=torch.zeros(0), selected=torch.zeros(0)),
    )  # fmt: skip
    assert found.loss.shape == (0,)
    assert aggregate(found.loss, no_rows, torch.tensor([0.0, 0.0])).item() == 0
