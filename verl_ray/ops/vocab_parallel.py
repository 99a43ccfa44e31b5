"""A vocabulary in slices, one per rank: what the slices say of each token, put together to what the whole says.

Invariant: numbers per token travel, logits never do, and once per call whatever the chunks: a slice is summed up as if
it were the whole vocabulary, so the rank alone decides how it computes, and the slices are then weighted by their
shares of the probability. Every rank puts together the same numbers in the same order and gets the same bits.
Not here: the formula of one slice and the gradients, which need no communication (`log_probs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Summary:
    """What the logits of a slice, or of the whole vocabulary, say of T tokens."""

    log_probs: Tensor  # float32 [T]: of the target among the tokens looked at; -inf where it is not one of them
    entropy: Tensor | None  # float32 [T]: of the distribution over them
    best: Tensor | None  # int64 [T]: the most probable of them, the first of equals


@dataclass(frozen=True)
class VocabularySlice:
    """The rows of a head that this rank of `group` holds: consecutive ones, from row `first` of the whole head on.

    The slices of the group make up the vocabulary, without gap or overlap, in any order of the ranks and of any sizes
    but 0. Ids travel as float32 numbers, which are exact up to 2^24 tokens.
    """

    group: dist.ProcessGroup
    first: int

    def places(self, targets: Tensor, rows: int) -> Tensor:
        """Which of the slice's rows hold the targets, int64 [T]; for a target of another slice, any row."""
        return (targets - self.first).clamp(0, rows - 1)

    def whole(self, own: Summary, top_logit: Tensor, top_log_prob: Tensor) -> tuple[Summary, Tensor]:
        """What all slices say together, and the log-probability of this slice, float32 [T]. One collective.

        `own` is what this slice says, its `best` a row of the slice; float32 [T] `top_logit` is the slice's largest
        logit, `top_log_prob` the log-probability of that one in the slice. With s the log-probabilities of the slices,
        log p = s + (log p in its slice), and H = sum of exp(s) (H of the slice - s), whose terms do not cancel.
        """
        told = [own.log_probs, top_logit, top_log_prob]
        if own.entropy is not None:
            told.append(own.entropy)
        if own.best is not None:
            told.append((own.best + self.first).float())
        everyone = own.log_probs.new_empty(dist.get_world_size(self.group), len(told), len(own.log_probs))
        dist.all_gather_into_tensor(everyone, torch.stack(told)[None], group=self.group)
        log_probs, top_logits, top_log_probs, *rest = everyone.unbind(dim=1)  # each [ranks, T]

        highest = top_logits.amax(dim=0)
        log_shares = torch.log_softmax(top_logits - highest - top_log_probs, dim=0)
        entropy = best = None
        if own.entropy is not None:
            entropy = (log_shares.exp() * (rest[0] - log_shares)).sum(dim=0)
        if own.best is not None:
            best = torch.where(top_logits == highest, rest[-1], torch.inf).amin(dim=0).long()
        together = Summary((log_probs + log_shares).amax(dim=0), entropy, best)
        return together, log_shares[dist.get_rank(self.group)]
