"""The outputs of a model over packed rows: what a caller requests, and what it gets.

Invariant: nothing here knows a model. Losses, and the code that partitions tokens over
ranks, read these classes and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# The driver requests outputs, and does without torch.
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopTokens:
    """A request for the most probable tokens."""

    count: int
    """How many, in descending order of probability."""

    num_tokens: int
    """The tokens are among the first of the vocabulary, this many; probabilities are
    those of the whole vocabulary."""


@dataclass(frozen=True)
class RequestedOutputs:
    """The outputs that a caller requests."""

    log_probs: bool = False
    entropy: bool = False
    greedy: bool = False
    squared_probs: bool = False
    values: bool = False
    scores: bool = False
    top: TopTokens | None = None

    temperature: float = 1.0
    """The logits are divided by this before the softmax."""

    base: bool = False
    """Compute without the adapter, if there is one: the model before training."""

    routing: bool = False
    """Also return the routing of a model with experts."""


@dataclass(frozen=True)
class Routing:
    """A summary of what the routers of one forward pass decided."""

    balance: Tensor
    """float32 [rows], differentiable: each row's balance loss, averaged over layers."""

    load: Tensor
    """float32 [layers, experts]: number of tokens that were routed to each expert."""


@dataclass(frozen=True)
class TokenOutputs:
    """The outputs of a model for some packed rows. Outputs not requested are None.

    All but `scores` and `routing` have one entry per selected token, float32
    [selected] unless noted. A selected token is the target of the one before it.
    """

    log_probs: Tensor | None = None
    """Log-probability of the target given all tokens before it, at the requested
    temperature."""

    entropy: Tensor | None = None
    """Entropy of the distribution that the target was sampled from, in nats."""

    greedy: Tensor | None = None
    """bool: whether the target is the most probable token."""

    squared_probs: Tensor | None = None
    """Sum over the vocabulary of squared probabilities, of that distribution."""

    candidate_log_probs: Tensor | None = None
    """float32 [selected, candidates]: log-probabilities of the tokens that stand beside
    the target as candidates, where rows have such."""

    top_tokens: Tensor | None = None
    """int64 [selected, count]: the most probable tokens in place of the target."""

    top_log_probs: Tensor | None = None
    """float32 [selected, count]: log-probabilities of these."""

    values: Tensor | None = None
    """The value head's output before the target."""

    scores: Tensor | None = None
    """float32 [rows]: the value head's output after the last token of each row."""

    routing: Routing | None = None
