"""Estimators of a divergence between two policies, token by token.

They use the log-probs of tokens that the first policy sampled.

Invariant: one formula serves NumPy arrays (the data plane) and torch tensors (the
loss), element by element. All functions take (log_probs, ref_log_probs), two arrays of
one shape, dtype and kind, and return one estimate per element. torch is imported when
a function is called: the configuration names these functions.

Source: J. Schulman, "Approximating KL divergence" (2020). With x sampled from p, KL(p
|| q) = E[log p(x) - log q(x)].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[np.float32], NDArray[np.float64], "torch.Tensor")

MAX_EXPONENT = 20.0
"""Exponents stop here. exp overflows float32 past 88, and one token at e^20 already
outweighs any batch."""

MAX_K3 = 10.0
"""The bound of `bounded_k3`."""


def k1(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return log p - log q, which is unbiased and may be negative.

    As a loss its expected gradient is zero, so it serves for rewards only.
    """
    return log_probs - ref_log_probs


def k2(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return (log p - log q)^2 / 2, which is biased and never negative.

    Its gradient is the unbiased gradient of KL(p || q).
    """
    difference = log_probs - ref_log_probs
    return 0.5 * difference * difference


def k3(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return q/p - 1 - log(q/p), which is unbiased and never negative.

    Deviation: log(q/p) is clamped to at most MAX_EXPONENT, so a token that p all but
    excludes counts e^20 and has no gradient. Towards minus infinity exp cannot
    overflow, and nothing is clamped.
    """
    import torch

    # expm1, because exp(x) - 1 loses all digits at the small differences of a policy
    # that has barely moved.
    log_ratio = (ref_log_probs - log_probs).clip(max=MAX_EXPONENT)
    if isinstance(log_ratio, torch.Tensor):
        return torch.expm1(log_ratio) - log_ratio
    return cast(Array, np.expm1(log_ratio) - log_ratio)


def bounded_k3(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return k3, at most MAX_K3: one token cannot outweigh a batch.

    Past the bound a token has no gradient. k3 itself is 10 where q/p is 14.5.

    Source of the bound: the implementations of the field, which agree on 10.
    """
    return k3(log_probs, ref_log_probs).clip(max=MAX_K3)


def straight_through_k1(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return the value of k1 with the gradient of k2.

    The value is unbiased, and so is the gradient.
    """
    return with_gradient_of_k2(k1(log_probs, ref_log_probs), log_probs, ref_log_probs)


def straight_through_k3(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return the value of `bounded_k3` with the gradient of k2.

    k3 has the gradient of KL(q || p) in expectation; k2 has that of KL(p || q).
    """
    value = bounded_k3(log_probs, ref_log_probs)
    return with_gradient_of_k2(value, log_probs, ref_log_probs)


def with_gradient_of_k2(value: Array, log_probs: Array, ref_log_probs: Array) -> Array:
    """Return an estimate with the gradient of k2 in place of its own."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    gradient = k2(log_probs, ref_log_probs)
    return value.detach() + (gradient - gradient.detach())


def absolute(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return |log p - log q|, which is biased and in the mean bounds |k1|."""
    return abs(log_probs - ref_log_probs)
