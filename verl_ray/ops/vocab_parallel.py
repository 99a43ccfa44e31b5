"""Log-probs of a vocabulary of which each rank has a slice.

Invariant: numbers per token travel, logits never do, and once per call whatever the
chunks are. Each rank summarizes its slice as if it were the whole vocabulary, so it
alone decides how it computes. The summaries are then weighted by the slices' shares
of the probability. Every rank combines the same numbers in the same order and gets
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularySummary:
    """Results for T targets from the logits of one slice, or of all of them."""

    log_probs: Tensor
    """float32 [T]: log-probability of the target among these logits, -inf if the target
    is not one of them."""

    entropy: Tensor | None
    """float32 [T]: entropy of the distribution over these logits."""

    best: Tensor | None
    """int64 [T]: the most probable token among them, the first of equals."""

    squared_probs: Tensor | None
    """float32 [T]: sum of squared probabilities over these logits."""


@dataclass(frozen=True)
class VocabularySlice:
    """The consecutive rows of a head that this rank of `group` holds.

    The slices of the group make up the vocabulary without gap or overlap. Ranks may be
    in any order, and slices of any size but 0. Token ids travel as float32 numbers,
    which are exact up to 2^24 tokens.
    """

    group: dist.ProcessGroup

    first: int
    """Index of the slice's first row in the whole head."""

    def places(self, targets: Tensor, num_rows: int) -> Tensor:
        """Return the row of this slice that holds each target, int64 [T].

        A target of another slice gets an arbitrary row.
        """
        return (targets - self.first).clamp(0, num_rows - 1)

    def combine(
        self, own: VocabularySummary, top_logit: Tensor, top_log_prob: Tensor
    ) -> tuple[VocabularySummary, Tensor]:
        """Combine the summaries of all slices. One collective.

        With s the log-probability of each slice,

            log p = s + (log p within its slice)
            H = sum over slices of exp(s) (H of the slice - s)
            sum p^2 = sum over slices of exp(2 s) (sum p^2 of the slice)

        where no terms cancel.

        Args:
            own: The summary of this slice. Its `best` is a row of the slice.
            top_logit: float32 [T], the slice's largest logit.
            top_log_prob: float32 [T], the log-probability of that logit within the
                slice.

        Returns:
            The summary of the whole vocabulary, and the log-probability of this slice,
            float32 [T].
        """
        columns = [own.log_probs, top_logit, top_log_prob]
        columns += [
            each for each in (own.entropy, own.squared_probs) if each is not None
        ]
        if own.best is not None:
            columns.append((own.best + self.first).float())

        log_probs, top_logits, top_log_probs, *optional = self._gathered(columns)

        # A slice's log-sum-exp is its top logit minus that logit's log-probability. The
        # largest logit is subtracted so that nothing overflows.
        highest = top_logits.amax(dim=0)
        log_shares = torch.log_softmax(top_logits - highest - top_log_probs, dim=0)

        entropy = None
        if own.entropy is not None:
            entropies = optional.pop(0)
            entropy = (log_shares.exp() * (entropies - log_shares)).sum(dim=0)

        squared = None
        if own.squared_probs is not None:
            squared = ((2 * log_shares).exp() * optional.pop(0)).sum(dim=0)

        best = None
        if own.best is not None:
            candidates = torch.where(top_logits == highest, optional[-1], torch.inf)
            best = candidates.amin(dim=0).long()

        # Only the slice with the target has a log-probability above -inf.
        log_prob = (log_probs + log_shares).amax(dim=0)
        combined = VocabularySummary(log_prob, entropy, best, squared)
        return combined, log_shares[dist.get_rank(self.group)]

    def _gathered(self, columns: list[Tensor]) -> tuple[Tensor, ...]:
        """Return each column, float32 [T], as that of all ranks, [ranks, T]."""
        gathered = columns[0].new_empty(
            dist.get_world_size(self.group), len(columns), len(columns[0])
        )
        packed = torch.stack(columns)[None]
        dist.all_gather_into_tensor(gathered, packed, group=self.group)
        return gathered.unbind(dim=1)
