"""Weights of rows by hand, and a loss that does not depend on how a mini-batch was cut."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_ray.algorithms.aggregation import aggregate, surface_non_finite
from verl_ray.algorithms.losses import PolicyTokens
from verl_ray.algorithms.policy_losses import ppo_clip, reinforce
from verl_ray.algorithms.row_weights import AGGREGATIONS, row_weights
from verl_ray.columns.batch import offsets_of
from verl_ray.ops.kl import k3
from verl_ray.ops.log_probs import head_log_probs
from verl_ray.ops.outputs import RequestedOutputs

MODES = tuple(AGGREGATIONS)
HAND: dict[str, float] = {
    # token losses [1, 2, 3], [10] and an empty row
    "token_mean": (1 + 2 + 3 + 10) / 4,
    "token_sum": 16,
    "seq_mean_token_sum": (6 + 10) / 2,
    "seq_mean_token_sum_norm": (6 / 5 + 10 / 5) / 2,
    "seq_mean_token_mean": (2 + 10) / 2,
}


@pytest.mark.parametrize("mode", MODES)
def test_by_hand(mode: str) -> None:
    weights = row_weights(
        mode, np.array([3, 0, 1]), total_tokens=4, total_rows=2, horizon=5
    )
    assert weights.dtype == np.float32 and weights[1] == 0
    loss = aggregate(
        torch.tensor([1.0, 2, 3, 10]),
        torch.tensor([0, 0, 0, 2]),
        torch.from_numpy(weights),
    )
    assert loss.item() == pytest.approx(HAND[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_without_response_tokens_weighs_nothing(mode: str) -> None:
    weights = row_weights(
        mode, np.zeros(3, dtype=np.int64), total_tokens=0, total_rows=0, horizon=5
    )
    assert weights.tolist() == [0, 0, 0]
    assert row_weights(
        mode, np.zeros(0, dtype=np.int64), total_tokens=4, total_rows=2, horizon=5
    ).shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_weighs_nothing_may_be_anything(bad: float) -> None:
    losses = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    total = aggregate(losses, torch.tensor([0, 1, 2]), torch.tensor([0.5, 0.0, 0.25]))
    assert total.item() == 0.5 + 0.75
    assert torch.autograd.grad(total, losses)[0].tolist() == [0.5, 0.0, 0.25]


def test_a_nan_that_counts_has_no_finite_gradient() -> None:
    """A clamp passes a gradient of 0 on for a NaN.

    The step would then be made of the other tokens.
    """
    for values, clean in (([1.0, float("nan")], False), ([1.0, 0.5], True)):
        outputs = torch.tensor(values, requires_grad=True)
        share = aggregate(outputs.clamp(-2, 2), torch.tensor([0, 0]), torch.ones(1))
        (alone,) = torch.autograd.grad(share, outputs, retain_graph=True)
        assert alone.isfinite().all()
        (gradient,) = torch.autograd.grad(surface_non_finite(share, outputs), outputs)
        assert gradient.tolist() == [1.0, 1.0] if clean else gradient.isnan().all()


class _Rows:
    """A mini-batch of ragged rows, and a linear model that scores them."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.offsets = np.array(lengths), offsets_of(lengths)
        tokens = int(self.offsets[-1])
        self.hidden = torch.randn(tokens, 4, generator=generator)
        self.targets = torch.randint(7, (tokens,), generator=generator)
        self.weight = torch.randn(7, 4, generator=generator).requires_grad_()
        self.advantages, self.old, self.ref = torch.randn(
            3, tokens, generator=generator
        )
        self.old -= 2
        self.ref -= 2

    def share(
        self, rows: list[int], loss: str, mode: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a micro-batch of these rows contributes.

        This is the loss, the gradient, and the sum of a metric.
        """
        weights = row_weights(
            mode, self.lengths[rows], total_tokens=int(self.lengths.sum()), total_rows=int((self.lengths > 0).sum()),
            horizon=9,
        )  # fmt: skip
        token = torch.cat(
            [torch.arange(self.offsets[r], self.offsets[r + 1]) for r in rows]
        )
        row = torch.repeat_interleave(
            torch.arange(len(rows)), torch.from_numpy(self.lengths[rows])
        )
        outputs = head_log_probs(
            self.hidden[token],
            self.weight,
            self.targets[token],
            requested=RequestedOutputs(entropy=True),
        )
        function = (
            partial(ppo_clip, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
            if loss == "ppo_clip"
            else reinforce
        )
        assert outputs.log_probs is not None
        found = function(
            PolicyTokens(
                outputs.log_probs, self.old[token], self.advantages[token], row
            )
        )
        assert outputs.entropy is not None
        per_token = (
            found.loss
            + 0.1 * k3(outputs.log_probs, self.ref[token])
            - 0.01 * outputs.entropy
        )
        total = aggregate(per_token, row, torch.from_numpy(weights))
        (grad,) = torch.autograd.grad(total, self.weight)
        return total.detach(), grad, found.metrics["actor/ppo_kl"].sum()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=10).filter(any),
    seed=st.integers(0, 1000),
    mode=st.sampled_from(MODES),
    loss=st.sampled_from(["ppo_clip", "reinforce"]),
    data=st.data(),
)
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches_ranks_or_order(
    lengths: list[int], seed: int, mode: str, loss: str, data: st.DataObject
) -> None:
    rows = _Rows(lengths, seed)
    everything = list(range(len(lengths)))
    order = data.draw(st.permutations(everything))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)))
    # Micro-batches of one rank and those of several are the same thing: parts whose
    # shares are added.
    parts = [
        order[a:b]
        for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True)
        if b > a
    ]
    whole = rows.share(everything, loss, mode)
    shares = [rows.share(part, loss, mode) for part in parts]
    for index, expected in enumerate(whole):
        torch.testing.assert_close(
            sum(share[index] for share in shares), expected, rtol=1e-4, atol=1e-5
        )


def test_a_plain_mean_over_micro_batches_would_fail_the_property() -> None:
    """The test above would notice: the mean of two unequal micro-batches differs."""
    losses = torch.tensor([1.0, 2, 3, 10])
    assert (losses[:3].mean() + losses[3:].mean()).item() / 2 != pytest.approx(
        HAND["token_mean"]
    )
