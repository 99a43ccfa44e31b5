"""Log-probs of a vocabulary of which each rank has a slice.

Invariant: numbers per token travel, logits never do, and once per call whatever the
chunks are. Each rank summarizes its slice as if it were the whole vocabulary, so it
alone decides how it computes. The summaries are then weighted by the slices' shares
of the probability. Every rank combines the same numbers in the same order and gets
the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.ops.outputs import RequestedOutputs


@dataclass(frozen=True)
class MostProbable:
    """The most probable tokens, in descending order."""

    tokens: Tensor
    """int64 [T, K]: their ids, or rows of a slice."""

    log_probs: Tensor
    """float32 [T, K]; -inf where there are fewer tokens."""

    num_tokens: int
    """They are among this many, the first of the vocabulary or of the slice."""


@dataclass(frozen=True)
class VocabularySummary:
    """Results for T places from the logits of one slice, or of all of them."""

    log_probs: Tensor
    """float32 [T, C]: log-probability of each target of a place among these logits,
    -inf if the target is not one of them."""

    entropy: Tensor | None
    """float32 [T]: entropy of the distribution over these logits."""

    best: Tensor | None
    """int64 [T]: the most probable token among them, the first of equals."""

    squared_probs: Tensor | None
    """float32 [T]: sum of squared probabilities over these logits."""

    top: MostProbable | None
    """The most probable tokens among them."""

    @classmethod
    def empty(
        cls, targets: Tensor, requested: RequestedOutputs, first: int
    ) -> VocabularySummary:
        """Return one without values, for these outputs.

        Args:
            targets: int64 [T, C].
            requested: The outputs.
            first: Index of the slice's first token in the vocabulary.
        """
        log_probs = torch.empty_like(targets, dtype=torch.float32)
        token, number = targets[:, 0], log_probs[:, 0]
        top = None
        if requested.top is not None:
            shape = len(targets), requested.top.count
            top = MostProbable(
                targets.new_zeros(shape),
                log_probs.new_full(shape, -torch.inf),
                max(requested.top.num_tokens - first, 0),
            )
        return cls(
            log_probs,
            torch.empty_like(number) if requested.entropy else None,
            torch.empty_like(token) if requested.greedy else None,
            torch.empty_like(number) if requested.squared_probs else None,
            top,
        )

    def fill(self, part: slice, log_p: Tensor, places: Tensor) -> None:
        """Fill in all but `best` of some places; their log_p is overwritten.

        Args:
            part: The places.
            log_p: float32 [places, tokens], log-probs of all tokens.
            places: int64 [places, C], the column of each target.
        """
        self.log_probs[part] = log_p.gather(1, places)
        if self.top is not None:
            possible = log_p[:, : self.top.num_tokens]
            # A slice may have fewer tokens than are asked for, or none.
            count = min(self.top.tokens.shape[1], possible.shape[1])
            values, tokens = possible.topk(count, dim=1)
            self.top.log_probs[part, :count] = values
            self.top.tokens[part, :count] = tokens
        if self.entropy is not None:
            # No vecdot: it is a matrix product, which autocast turns to bfloat16.
            self.entropy[part] = -log_p.exp().mul_(log_p).sum(dim=-1)
        if self.squared_probs is not None:
            self.squared_probs[part] = log_p.mul_(2).exp_().sum(dim=-1)


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
        """Return the row of this slice that holds each target, int64 [T, C].

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
            own: The summary of this slice. Its `best` and `top` are rows of the slice.
            top_logit: float32 [T], the slice's largest logit.
            top_log_prob: float32 [T], the log-probability of that logit within the
                slice.

        Returns:
            The summary of the whole vocabulary, and the log-probability of this slice,
            float32 [T].
        """
        # [ranks, T, width] each
        gathered = self._gathered(self._columns(own, top_logit, top_log_prob))

        # A slice's log-sum-exp is its top logit minus that logit's log-probability. The
        # largest logit is subtracted so that nothing overflows.
        top_logits = gathered["top_logits"]
        highest = top_logits.amax(dim=0)
        log_shares = torch.log_softmax(
            top_logits - highest - gathered["top_log_probs"], dim=0
        )

        # Only the slice with a target has a log-probability above -inf.
        log_probs = (gathered["log_probs"] + log_shares).amax(dim=0)

        entropy = None
        if own.entropy is not None:
            terms = log_shares.exp() * (gathered["entropy"] - log_shares)
            entropy = terms.sum(dim=0)[:, 0]

        squared = None
        if own.squared_probs is not None:
            terms = (2 * log_shares).exp() * gathered["squared_probs"]
            squared = terms.sum(dim=0)[:, 0]

        best = None
        if own.best is not None:
            candidates = torch.where(top_logits == highest, gathered["best"], torch.inf)
            best = candidates.amin(dim=0)[:, 0].long()

        top = None
        if own.top is not None:
            top = self._most_probable(own.top, gathered, log_shares)

        summary = VocabularySummary(log_probs, entropy, best, squared, top)
        return summary, log_shares[dist.get_rank(self.group), :, 0]

    def _columns(
        self, own: VocabularySummary, top_logit: Tensor, top_log_prob: Tensor
    ) -> dict[str, Tensor]:
        """Return what the ranks tell each other, float32 [T, width] each."""
        columns = {
            "log_probs": own.log_probs,
            "top_logits": top_logit[:, None],
            "top_log_probs": top_log_prob[:, None],
        }
        if own.entropy is not None:
            columns["entropy"] = own.entropy[:, None]
        if own.squared_probs is not None:
            columns["squared_probs"] = own.squared_probs[:, None]
        if own.best is not None:
            columns["best"] = (own.best + self.first).float()[:, None]
        if own.top is not None:
            columns["tokens"] = (own.top.tokens + self.first).float()
            columns["token_log_probs"] = own.top.log_probs
        return columns

    def _most_probable(
        self, own: MostProbable, gathered: Mapping[str, Tensor], log_shares: Tensor
    ) -> MostProbable:
        """Return the most probable tokens of all slices, from those of each."""
        # [T, ranks * K]
        tokens = gathered["tokens"].movedim(0, 1).flatten(1)
        log_probs = gathered["token_log_probs"] + log_shares
        log_probs = log_probs.movedim(0, 1).flatten(1)

        most, places = log_probs.topk(own.tokens.shape[1], dim=1)
        chosen = tokens.gather(1, places).long()
        return MostProbable(chosen, most, own.num_tokens + self.first)

    def _gathered(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return columns, float32 [T, width], as those of all ranks, with these first.

        One collective.
        """
        packed = torch.cat(list(columns.values()), dim=1)[None]
        gathered = packed.new_empty(dist.get_world_size(self.group), *packed.shape[1:])
        dist.all_gather_into_tensor(gathered, packed, group=self.group)
        widths = [column.shape[1] for column in columns.values()]
        parts = torch.split(gathered, widths, dim=2)
        return dict(zip(columns, parts, strict=True))
