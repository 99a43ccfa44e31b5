"""Estimators of a divergence between two policies from the log-probs of tokens that the first one sampled.

Invariant: one formula serves NumPy arrays (the data plane) and torch tensors (the loss), element by element.
All take (log_probs, ref_log_probs), two arrays of one shape, dtype and kind, and give one estimate per element.
Not here: where the divergence is charged (reward or loss) and how much (`algorithms/kl_control.py`).

Source: J. Schulman, "Approximating KL divergence" (2020). With x sampled from p, KL(p || q) = E[log p(x) - log q(x)].
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

Array = TypeVar("Array", NDArray[np.float32], NDArray[np.float64], torch.Tensor)

MAX_EXPONENT = 20.0
"""exp overflows float32 past 88, and one token at e^20 already outweighs any batch; exponents stop here."""


def k1(log_probs: Array, ref_log_probs: Array) -> Array:
    """log p - log q: unbiased, may be negative. As a loss its expected gradient is zero: for the reward only."""
    return log_probs - ref_log_probs


def k2(log_probs: Array, ref_log_probs: Array) -> Array:
    """(log p - log q)^2 / 2: biased, never negative; its gradient is the unbiased gradient of KL(p || q)."""
    difference = log_probs - ref_log_probs
    return 0.5 * difference * difference


def k3(log_probs: Array, ref_log_probs: Array) -> Array:
    """q/p - 1 - log(q/p): unbiased, never negative.

    Deviation: log(q/p) is clamped to at most MAX_EXPONENT, so a token that p all but excludes counts e^20 and has no
    gradient. Towards minus infinity exp cannot overflow, and nothing is clamped. Written with expm1, since exp(x) - 1
    loses all digits at the differences of a policy that has barely moved.
    """
    log_ratio = (ref_log_probs - log_probs).clip(max=MAX_EXPONENT)
    if isinstance(log_ratio, torch.Tensor):
        return torch.expm1(log_ratio) - log_ratio
    return cast(Array, np.expm1(log_ratio) - log_ratio)


def absolute(log_probs: Array, ref_log_probs: Array) -> Array:
    """|log p - log q|: an upper bound of |k1| in the mean; biased."""
    return abs(log_probs - ref_log_probs)
