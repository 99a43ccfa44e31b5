"""Log-probabilities, entropy and their gradients in bounded memory.

The log-probabilities are those that a language-model head gives to chosen tokens.

Invariant: the softmax is computed in float32 whatever the dtype of the inputs, over at
most `chunk_tokens` tokens at a time, so no float32 tensor of shape [tokens, vocabulary]
ever exists. The forward and backward passes equal the naive formula. The head may be a
slice of a vocabulary that several ranks share; the formula is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl_ray.errors import EngineError
from verl_ray.ops.chunks import CHUNK_LOGITS, KEPT_LOGITS
from verl_ray.ops.installed_torch import with_tensors_found
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.ops.vocab_parallel import VocabularySlice, VocabularySummary

LOG_PROBS = RequestedOutputs(log_probs=True)


@with_tensors_found
@dataclass(frozen=True)
class HeadOutputs:
    """The outputs of a language-model head for T chosen tokens."""

    log_probs: Tensor
    """float32 [T], differentiable."""

    entropy: Tensor | None
    """float32 [T] in nats, differentiable."""

    greedy: Tensor | None
    """bool [T]: the token is the most probable one (of equals, the first)."""

    squared_probs: Tensor | None
    """float32 [T]: sum over the vocabulary of squared probabilities."""

    top_tokens: Tensor | None = None
    """int64 [T, K]: the most probable tokens, in descending order."""

    top_log_probs: Tensor | None = None
    """float32 [T, K]."""

    candidate_log_probs: Tensor | None = None
    """float32 [T, C], differentiable."""


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    vocabulary: VocabularySlice | None = None,
    requested: RequestedOutputs = LOG_PROBS,
    candidates: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> HeadOutputs:
    """Compute log softmax(logits / temperature)[targets] without holding all logits.

    The logits are z = hidden @ weight.T + bias, or softcap * tanh(z / softcap). z is
    computed in the dtype of `hidden` (in that of autocast where it is enabled) and then
    converted to float32. The log-probs, of targets and of candidates, and the entropy
    are differentiable in hidden, weight and bias.

    With `vocabulary`, `weight` and `bias` are this rank's slice of the head. `hidden`
    and `targets` are the same on all ranks of the slice's group, and so are the
    outputs. Every rank must call this function, and one collective runs. The backward
    pass runs none: weight and bias get the gradient of the slice, but `hidden` gets
    only this slice's PART of its gradient, and the caller sums the parts over the
    group. A target in no slice has a log-prob of -inf.

    Args:
        hidden: [T, H], the hidden states that predict the targets.
        weight: [V, H], the head.
        targets: int64 [T], ids in the whole vocabulary.
        bias: [V], the bias of the head.
        softcap: The largest magnitude of a logit, or None.
        vocabulary: The part of the vocabulary that `weight` covers; None for all of it.
        requested: The temperature, and what is computed beside the log-probs.
        candidates: int64 [T, C], tokens whose log-probs are computed beside those of
            the targets.
        chunk_tokens: The number of tokens whose logits exist at once; None chooses one
            for the device.

    Raises:
        EngineError: The shapes do not fit, or the temperature is not > 0.
    """
    _check_inputs(hidden, targets, weight, requested)
    hidden, weight, bias = _cast(hidden, weight, bias)
    chunk = chunk_tokens or _chunk_tokens(hidden, len(weight))

    head: tuple[Tensor, Tensor | None, Tensor | None] = (hidden, weight, bias)
    if len(targets) * len(weight) <= KEPT_LOGITS:
        # There are few logits, so they are kept, and autograd differentiates the head.
        head = (linear(hidden, weight, bias), None, None)

    columns = (
        [targets[:, None]] if candidates is None else [targets[:, None], candidates]
    )
    log_probs, *optional = _LogProbs.apply(  # type: ignore[no-untyped-call]
        *head, torch.cat(columns, dim=1), requested, softcap, chunk, vocabulary
    )
    beside = None if candidates is None else log_probs[:, 1:]
    outputs = (log_probs[:, 0], *optional, beside)
    return HeadOutputs(*outputs)


def _check_inputs(
    rows: Tensor, targets: Tensor, weight: Tensor, requested: RequestedOutputs
) -> None:
    width = weight.shape[-1]
    if rows.dim() != 2 or rows.shape[1] != width or targets.shape != rows.shape[:1]:
        raise EngineError(
            f"log-probs need one row of width {width} per target; found rows of shape"
            f" {tuple(rows.shape)} and targets of shape {tuple(targets.shape)}"
        )

    if not len(weight):
        raise EngineError(
            "this rank's slice of the language head has no rows; each rank needs one or"
            " more: use fewer tensor-parallel ranks"
        )
    top, temperature = requested.top, requested.temperature
    if not temperature > 0:
        raise EngineError(
            f"logits cannot be divided by temperature {temperature}; it must be > 0"
            " (rollout.temperature)"
        )
    if top is not None and not 0 < top.count <= top.num_tokens:
        raise EngineError(
            f"the {top.count} most probable tokens of {top.num_tokens} were asked for"
            " (distill.top_k)"
        )


def _cast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs to the dtype of the logits.

    The cast comes before the autograd function, whose backward pass runs outside of
    autocast and must compute the same logits again.
    """
    dtype = hidden.dtype
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)

    if bias is not None:
        bias = bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias


def _chunk_tokens(rows: Tensor, vocabulary_size: int) -> int:
    """Return the number of tokens per chunk for the device of `rows`, at least 1."""
    logits = CHUNK_LOGITS.get(rows.device.type, CHUNK_LOGITS["cuda"])
    return max(1, logits // vocabulary_size)


class _LogProbs(torch.autograd.Function):
    """The map (rows, weight, bias) -> (log_probs, what is optional).

    There may be several targets in the place of one token, the columns of log_probs.
    Without a weight, the rows are the logits themselves.

    The function keeps its inputs and computes the softmax again in the backward pass.
    With z the scaled logits, p = softmax(z) and H the entropy:

        d log p_target / dz = onehot - p        dH / dz = -p (log p + H)

    Gradients of the columns add up: the onehots each, and p times their sum.

    In a slice of the vocabulary, p is the softmax over the slice times the slice's
    share of the probability, and the onehot exists only for targets in the slice.

    torch's fused softmax kernels take half the time of exp(z - logsumexp(z)), measured
    on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        requested: RequestedOutputs,
        softcap: float | None,
        chunk: int,
        vocabulary: VocabularySlice | None,
    ) -> tuple[Tensor | None, ...]:
        temperature = requested.temperature
        width = rows.shape[1] if weight is None else weight.shape[0]
        # [T, columns]: the place of each target's logit.
        places = targets if vocabulary is None else vocabulary.places(targets, width)

        first = 0 if vocabulary is None else vocabulary.first
        summary = VocabularySummary.empty(targets, requested, first)
        if vocabulary is not None:
            top_logit = torch.empty_like(summary.log_probs[:, 0])
            top_log_prob = torch.empty_like(top_logit)

        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            z = _scaled_logits(rows[part], weight, bias, temperature, softcap)
            log_p = torch.log_softmax(z, dim=-1)
            if summary.best is not None:
                summary.best[part] = z.argmax(dim=-1)
            if vocabulary is not None:
                top_logit[part] = z.amax(dim=-1)
                top_log_prob[part] = log_p.amax(dim=-1)
            # It is as large as log_p, and not needed any more.
            del z

            summary.fill(part, log_p, places[part])
            del log_p  # Otherwise it would stay while the next chunk is computed.

        inside = None
        log_share = None
        if vocabulary is not None:
            inside = places + vocabulary.first == targets
            summary.log_probs.masked_fill_(~inside, -torch.inf)
            summary, log_share = vocabulary.combine(summary, top_logit, top_log_prob)

        greedy = None if summary.best is None else summary.best == targets[:, 0]
        top = summary.top
        top_outputs = (None, None) if top is None else (top.tokens, top.log_probs)
        reported = (greedy, summary.squared_probs, *top_outputs)
        ctx.mark_non_differentiable(*(each for each in reported if each is not None))
        ctx.save_for_backward(
            rows, weight, bias, places, inside, log_share, summary.entropy
        )
        ctx.temperature, ctx.softcap, ctx.chunk = temperature, softcap, chunk
        # An entropy that is only reported then costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return summary.log_probs, summary.entropy, *reported

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        rows, weight, bias, places, inside, log_share, entropy = ctx.saved_tensors
        gradients = _HeadGradients.zeros(rows, weight, bias, ctx.needs_input_grad)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(places.shape, device=rows.device)

        # `grad_targets` reaches the logits of the targets alone. `grad_log_probs` is
        # spread over all logits, [T, 1].
        grad_targets = grad_log_probs
        grad_log_probs = grad_log_probs.sum(dim=1, keepdim=True)
        if log_share is not None:
            share = log_share.exp()
            grad_targets = grad_targets * inside
            grad_log_probs = grad_log_probs * share[:, None]
            if grad_entropy is not None:
                grad_entropy = grad_entropy * share
                entropy = entropy + log_share

        for start in range(0, len(places), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = _scaled_logits(rows[part], weight, bias, ctx.temperature, ctx.softcap)
            slope_of_cap = None
            if ctx.softcap is not None:
                slope_of_cap = 1 - (z * ctx.temperature / ctx.softcap).square()
            if grad_entropy is None:
                grad = torch.softmax(z, dim=-1).mul_(-grad_log_probs[part])
            else:
                grad = torch.log_softmax(z, dim=-1)
                slope = grad + entropy[part, None]
                slope.mul_(grad_entropy[part, None])
                slope.add_(grad_log_probs[part])
                grad.exp_().mul_(slope.neg_())
                del slope
            del z
            grad.scatter_add_(1, places[part], grad_targets[part])
            if ctx.temperature != 1:
                grad /= ctx.temperature
            if slope_of_cap is not None:
                grad *= slope_of_cap

            # The bias takes its share before the gradient is rounded to the dtype of
            # the head.
            gradients.add_to_bias(grad)
            if weight is not None:
                grad = grad.to(weight.dtype)
            gradients.add_to_head(part, grad, rows, weight)
            # Chunks are large: none stays while the next one is computed.
            del grad

        return (*gradients.rounded(weight, bias), *[None] * 5)


@dataclass
class _HeadGradients:
    """Gradients of the inputs of `_LogProbs`, which grow chunk by chunk.

    Those of weight and bias are sums over chunks. They are float32, because in bfloat16
    the rounding of the sum would swallow the later chunks.
    """

    rows: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(
        cls,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        needed: tuple[bool, ...],
    ) -> _HeadGradients:
        """Allocate the gradients that are needed: of rows, weight and bias."""
        needs_rows, needs_weight, needs_bias = needed[:3]
        gradients = cls(None, None, None)
        if needs_rows:
            gradients.rows = torch.empty_like(rows)
        if needs_weight and weight is not None:
            gradients.weight = torch.zeros_like(weight, dtype=torch.float32)
        if needs_bias and bias is not None:
            gradients.bias = torch.zeros_like(bias, dtype=torch.float32)
        return gradients

    def add_to_bias(self, grad_logits: Tensor) -> None:
        """Add the share of a chunk with these gradients, float32 [chunk, V]."""
        if self.bias is not None:
            self.bias += grad_logits.sum(dim=0)

    def add_to_head(
        self, part: slice, grad_logits: Tensor, rows: Tensor, weight: Tensor | None
    ) -> None:
        """Add the share of a chunk to the gradients of the rows and the weight.

        Args:
            part: The tokens of the chunk.
            grad_logits: [chunk, V] in the dtype of the weight.
            rows: [T, H], or the logits [T, V] if there is no weight.
            weight: [V, H].
        """
        if weight is None:
            if self.rows is not None:
                self.rows[part] = grad_logits
            return

        if self.rows is not None:
            self.rows[part] = grad_logits @ weight
        if self.weight is None:
            return
        if grad_logits.dtype == self.weight.dtype:
            # Without a product as large as the weight in addition to the sum.
            self.weight.addmm_(grad_logits.T, rows[part])
        else:
            self.weight += grad_logits.T @ rows[part]

    def rounded(
        self, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of rows, weight and bias in the dtypes of the inputs."""
        grad_weight = None
        if self.weight is not None and weight is not None:
            grad_weight = self.weight.to(weight.dtype)
        grad_bias = None
        if self.bias is not None and bias is not None:
            grad_bias = self.bias.to(bias.dtype)
        return self.rows, grad_weight, grad_bias


def _scaled_logits(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the float32 logits of one chunk, capped and divided by the temperature."""
    logits = rows if weight is None else linear(rows, weight, bias)
    logits = logits.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    # A temperature of 1 spares a pass over the logits.
    return logits if temperature == 1 else logits / temperature
