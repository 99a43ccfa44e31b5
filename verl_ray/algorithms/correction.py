"""Corrections for tokens that another policy sampled than the one that learns.

A correction weights tokens, or leaves them out. These are the choices; what they make
of a section `algorithm.correction` is in `verl_ray/learning/correction_weights.py`.

Invariant: a weight is a constant for the gradient, and depends on its row alone. A
ratio that is NaN is beyond no bound: its token remains with a weight of NaN, so that
the step is skipped and reported. torch is imported when a function is called: the
configuration reads the choices at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.algorithms.declaration import Declaration, by_name
from verl_ray.ops.kl import MAX_EXPONENT
from verl_ray.ops.rows import row_lengths, row_maxima, row_sums

if TYPE_CHECKING:
    from torch import Tensor


# ------------------------------------------------------------------------------ levels


@dataclass(frozen=True, kw_only=True)
class CorrectionLevel(Declaration):
    """A choice of `algorithm.correction.level`.

    Attributes:
        function: Maps (log_ratio float32 [T], row int64 [T]) to the logarithm of the
            ratio that is bounded, float32 [T].
    """

    function: Callable[[Tensor, Tensor], Tensor]


def token_log_ratio(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the log ratio of each token by itself."""
    return log_ratio


def sequence_log_ratio(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the log ratio of each token's response.

    It is that of the product over the response's tokens, which alone is unbiased.
    """
    return row_sums(log_ratio, row)


def geometric_log_ratio(log_ratio: Tensor, row: Tensor) -> Tensor:
    """Return the log of the geometric mean over each token's response.

    It does not depend on the response's length.
    """
    return row_sums(log_ratio, row) / row_lengths(row)


# ------------------------------------------------------------------------------- kinds


@dataclass(frozen=True, kw_only=True)
class Correction(Declaration):
    """A choice of `algorithm.correction.kind`.

    Attributes:
        function: Maps (ratio float32 [T], lower, upper) to (weight float32 [T], mask
            bool [T]), where the mask is False at tokens that leave the loss.
        two_sided: True if there is a lower bound as well.
        may_have_lower: True if there may be one.
        weights_by_ratio: True if tokens are weighted by their ratio; False: by 1.
        drops_tokens: True if tokens beyond a bound leave the loss.
    """

    function: Callable[[Tensor, float | None, float], tuple[Tensor, Tensor]]
    two_sided: bool = False
    may_have_lower: bool = False
    weights_by_ratio: bool = True
    drops_tokens: bool = True


def tis(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return the ratio, at most upper: truncated importance sampling.

    No token is left out. With a lower bound, weights are at least that.

    E. L. Ionides, "Truncated importance sampling" (2008); per token, between a sampler
    and a trainer: F. Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training" (2025); per sequence: J. Liu et al., "When speed kills
    stability" (2025).
    """
    import torch

    weight = ratio.clamp(min=lower, max=upper)
    return weight, torch.ones_like(ratio, dtype=torch.bool)


def mis(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return ratio where ratio <= upper: masked importance sampling.

    Other tokens are left out.

    J. Liu et al., "When speed kills stability" (2025), there per sequence.
    """
    import torch

    # Not `ratio <= upper`, which would leave NaN out.
    mask = ~(ratio > upper)
    return torch.where(mask, ratio, 0.0), mask


def icepop(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return ratio where lower <= ratio <= upper: masked on two sides.

    Other tokens are left out.

    IcePop, in "Every step evolves" (arXiv:2510.18855): the function M of its objective,
    there per token. Deviation: a token that is left out bears no divergence from the
    reference either.
    """
    import torch

    mask = _is_within(ratio, lower, upper)
    return torch.where(mask, ratio, 0.0), mask


def reject(ratio: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """1 where lower <= ratio <= upper: a mask without weights.

    Other tokens are left out.

    With the geometric mean, the sequence mask of J. Liu et al., "When speed kills
    stability" (2025).
    """
    import torch

    mask = _is_within(ratio, lower, upper)
    # A NaN remains the weight, so that it reaches the loss.
    return torch.where(ratio.isnan(), ratio, mask.float()), mask


def _is_within(ratio: Tensor, lower: float | None, upper: float) -> Tensor:
    """Return a mask of the ratios within the bounds; NaN counts as within."""
    assert lower is not None, (
        "the configuration requires it of corrections with two bounds"
    )
    return ~((ratio < lower) | (ratio > upper))


# -------------------------------------------------------------------------- rejections

# Tokens that leave the loss because a statistic of theirs is too large.
#
# Several rejections may apply at once; a token counts if each of them lets it pass. The
# names are those of the field's rollout correction: where the statistic is taken, and
# of what. A statistic that is NaN is beyond no bound.

Bounds = Sequence[float | None]
"""Lower and upper bound; None: there is none."""


def rejections(
    bounds: Mapping[str, Bounds], log_ratio: Tensor, row: Tensor
) -> dict[str, Tensor]:
    """Return where each rejection leaves tokens out, bool [T] by name.

    Args:
        bounds: Bounds by names in `REJECTIONS`.
        log_ratio: float32 [T], log(p / p_sampler) of each sampled token.
        row: int64 [T], the row of each token.
    """
    import torch

    left_out = {}
    for name, (lower, upper) in bounds.items():
        rejection = REJECTIONS[name]
        token_statistic = rejection.statistic(log_ratio.detach())
        value = rejection.over(token_statistic, row)
        if rejection.two_sided:
            # Of k1 the ratio is bounded, so that 1 stands for no difference.
            value = value.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()

        beyond = torch.zeros_like(row, dtype=torch.bool)
        if lower is not None:
            beyond = beyond | (value < lower)
        if upper is not None:
            beyond = beyond | (value > upper)
        left_out[name] = beyond
    return left_out


@dataclass(frozen=True, kw_only=True)
class Rejection(Declaration):
    """A choice in `algorithm.correction.rejections`.

    Attributes:
        statistic: Maps log ratios to what is judged, float32 [T] each.
        over: Maps those and the rows, int64 [T], to a value at each token, float32 [T].
        two_sided: True if the ratio is bounded on both sides; False: there is an upper
            bound alone.
    """

    statistic: Callable[[Tensor], Tensor]
    over: Callable[[Tensor, Tensor], Tensor]
    two_sided: bool


def k1(log_ratio: Tensor) -> Tensor:
    """Return log r itself, r = p / p_sampler."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return (log r)^2 / 2."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r; log r is clamped at 20."""
    bounded = log_ratio.clamp(max=MAX_EXPONENT)
    return bounded.expm1() - bounded


def token(values: Tensor, row: Tensor) -> Tensor:
    """Return the value of each token by itself."""
    return values


def seq_sum(values: Tensor, row: Tensor) -> Tensor:
    """Return the sum over each token's row."""
    return row_sums(values, row)


def seq_mean(values: Tensor, row: Tensor) -> Tensor:
    """Return the mean over each token's row."""
    return row_sums(values, row) / row_lengths(row)


def seq_max(values: Tensor, row: Tensor) -> Tensor:
    """Return the maximum over each token's row."""
    return row_maxima(values, row)


# ------------------------------------------------------------------------- the choices

_LIU = "Liu et al., When speed kills stability (2025)"

CORRECTIONS = by_name(
    Correction(
        name="tis",
        paper="Ionides, 2008",
        function=tis,
        drops_tokens=False,
        may_have_lower=True,
    ),
    Correction(name="mis", paper=_LIU, function=mis),
    Correction(
        name="icepop",
        paper="IcePop (arXiv:2510.18855)",
        function=icepop,
        two_sided=True,
    ),
    Correction(
        name="reject",
        paper=_LIU,
        function=reject,
        two_sided=True,
        weights_by_ratio=False,
    ),
)

LEVELS = by_name(
    CorrectionLevel(
        name="token",
        paper="Yao et al., 2025",
        function=token_log_ratio,
    ),
    CorrectionLevel(
        name="sequence",
        paper=_LIU,
        function=sequence_log_ratio,
    ),
    CorrectionLevel(
        name="geometric",
        paper=_LIU,
        function=geometric_log_ratio,
    ),
)

_STATISTICS = {"k1": k1, "k2": k2, "k3": k3}

REJECTIONS = by_name(
    *(
        Rejection(
            name=f"{place}_{statistic}",
            paper=_LIU,
            statistic=_STATISTICS[statistic],
            over=over,
            two_sided=statistic == "k1",
        )
        for place, over, statistics in (
            ("token", token, ("k1", "k2", "k3")),
            ("seq_sum", seq_sum, ("k1", "k2", "k3")),
            ("seq_mean", seq_mean, ("k1", "k2", "k3")),
            ("seq_max", seq_max, ("k2", "k3")),
        )
        for statistic in statistics
    )
)
