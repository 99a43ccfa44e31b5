"""Log-probabilities of chosen tokens, the entropy beside them, and their gradients, in bounded memory.

Invariant: the softmax is computed in float32 whatever the dtype of the inputs, over at most `chunk_tokens` tokens at
a time, so no float32 tensor of shape [tokens, vocabulary] ever exists. Forward and backward equal the naive formula.
The head may be a slice of a vocabulary that several ranks share; the formula is the same.
Not here: which tokens to look at (the engine selects the rows of `hidden`), and how slices become a whole
(`vocab_parallel.py`).
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
from verl_ray.ops.vocab_parallel import Summary, VocabularySlice


@with_tensors_found
@dataclass(frozen=True)
class HeadOutputs:
    """What a language-model head says about the chosen tokens."""

    log_probs: Tensor  # float32 [T], differentiable
    entropy: Tensor | None  # float32 [T] in nats, differentiable
    greedy: Tensor | None  # bool [T]: the token is the most probable one (the first of equals)


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    vocabulary: VocabularySlice | None = None,
    with_entropy: bool = False,
    with_greedy: bool = False,
    chunk_tokens: int | None = None,
) -> HeadOutputs:
    """log softmax(logits / temperature)[targets], where logits = hidden @ weight.T + bias, without holding all logits.

    `hidden` [T, H], `weight` [V, H], `bias` [V], `targets` int64 [T]; `temperature` > 0, one number or float [T] with
    one per token. Differentiable in hidden, weight and bias, through the log-probs and the entropy. The logits are
    computed in the dtype of `hidden` (of autocast, where that is on), then turned to float32. Raises EngineError on
    shapes that do not fit or a temperature that is not > 0.

    With `vocabulary`, `weight` and `bias` are this rank's slice of the head, `hidden` and `targets` (ids in the whole
    vocabulary) are the same on all ranks of its group, and so are the outputs; every rank must call this, and one
    collective runs. The backward pass runs none: weight and bias get the gradient of the slice, but `hidden` only this
    slice's PART of its gradient. The caller sums the parts over the group. A target in no slice has log-prob -inf.
    """
    _check(hidden, targets, weight.shape[-1])
    if not len(weight):
        raise EngineError(
            "this rank's slice of the language head has no rows; each rank needs one or more: "
            "use fewer tensor-parallel ranks"
        )
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    # Cast before the autograd function: its backward pass recomputes the logits outside autocast and must get the same.
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    divisor = _divisor(temperature, targets)
    chunk = chunk_tokens or _chunk_tokens(hidden, weight.shape[0])
    keep = len(targets) * weight.shape[0] <= KEPT_LOGITS
    head = (linear(hidden, weight, bias), None, None) if keep else (hidden, weight, bias)
    outputs = _LogProbs.apply(*head, targets, divisor, chunk, vocabulary, with_entropy, with_greedy)  # type: ignore[no-untyped-call]
    return HeadOutputs(*outputs)


def _check(rows: Tensor, targets: Tensor, width: int) -> None:
    if rows.dim() != 2 or rows.shape[1] != width or targets.shape != rows.shape[:1]:
        raise EngineError(
            f"log-probs need one row of width {width} per target; found rows of shape {tuple(rows.shape)} and targets "
            f"of shape {tuple(targets.shape)}"
        )


def _divisor(temperature: float | Tensor, targets: Tensor) -> Tensor | None:
    """The temperature as a float32 column [T, 1], or None for 1, which spares a pass over the logits."""
    if isinstance(temperature, Tensor):
        # Not compared with 0: that would make the host wait for the device in every micro-batch.
        return temperature.to(torch.float32).reshape(-1, 1)
    if not temperature > 0:
        raise EngineError(
            f"logits cannot be divided by temperature {temperature}; it must be > 0 (rollout.temperature)"
        )
    return None if temperature == 1 else torch.full((len(targets), 1), temperature, device=targets.device)


def _chunk_tokens(rows: Tensor, vocabulary: int) -> int:
    return max(1, CHUNK_LOGITS.get(rows.device.type, CHUNK_LOGITS["cuda"]) // vocabulary)


class _LogProbs(torch.autograd.Function):
    """(rows, weight, bias) -> (log_probs, entropy, greedy); without a weight the rows are the logits themselves.

    Keeps its inputs and recomputes the softmax. With p = softmax(z), H the entropy and z the scaled logits:
    d log p_target / dz = onehot - p, and dH / dz = -p (log p + H). In a slice of the vocabulary p is the softmax over
    the slice times the slice's share, and the onehot is there only for targets inside. torch's fused softmax kernels
    take half the time of exp(z - logsumexp(z)), measured on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        divisor: Tensor | None,
        chunk: int,
        vocabulary: VocabularySlice | None,
        with_entropy: bool,
        with_greedy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        width = rows.shape[1] if weight is None else weight.shape[0]
        places = targets if vocabulary is None else vocabulary.places(targets, width)
        log_probs = torch.empty(targets.shape, dtype=torch.float32, device=rows.device)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        best = torch.empty_like(targets) if with_greedy else None
        if vocabulary is not None:
            top_logit, top_log_prob = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            z = _scaled_logits(rows[part], weight, bias, divisor, part)
            log_p = torch.log_softmax(z, dim=-1)
            if best is not None:
                best[part] = z.argmax(dim=-1)
            if vocabulary is not None:
                top_logit[part], top_log_prob[part] = z.amax(dim=-1), log_p.amax(dim=-1)
            del z  # as large as log_p
            log_probs[part] = log_p.gather(1, places[part, None])[:, 0]
            if entropy is not None:
                # No vecdot: it is a matrix product, which autocast turns to bfloat16.
                entropy[part] = -log_p.exp().mul_(log_p).sum(dim=-1)
        inside = log_share = None
        if vocabulary is not None:
            inside = places + vocabulary.first == targets
            own = Summary(log_probs.masked_fill_(~inside, -torch.inf), entropy, best)
            whole, log_share = vocabulary.whole(own, top_logit, top_log_prob)
            log_probs, entropy, best = whole.log_probs, whole.entropy, whole.best
        greedy = None if best is None else best == targets
        ctx.save_for_backward(rows, weight, bias, places, inside, log_share, divisor, entropy)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing in the backward pass
        if greedy is not None:
            ctx.mark_non_differentiable(greedy)
        return log_probs, entropy, greedy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rows, weight, bias, places, inside, log_share, divisor, entropy = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.empty_like(rows) if needs_rows else None
        # Summed over chunks in float32: in bfloat16 the later chunks would be lost in the rounding of the sum.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(places.shape, device=rows.device)
        grad_targets = grad_log_probs  # what reaches the target's own logit, and what is spread over all
        if log_share is not None:
            share = log_share.exp()
            grad_targets, grad_log_probs = grad_log_probs * inside, grad_log_probs * share
            if grad_entropy is not None:
                grad_entropy, entropy = grad_entropy * share, entropy + log_share
        for start in range(0, len(places), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = _scaled_logits(rows[part], weight, bias, divisor, part)
            if grad_entropy is None:
                grad = torch.softmax(z, dim=-1).mul_(-grad_log_probs[part, None])
            else:
                log_p = torch.log_softmax(z, dim=-1)
                slope = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_probs[part, None])
                grad = log_p.exp_().mul_(slope.neg_())
            grad.scatter_add_(1, places[part, None], grad_targets[part, None])
            if divisor is not None:
                grad /= divisor[part]
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            if weight is None:
                if grad_rows is not None:
                    grad_rows[part] = grad
                continue
            grad = grad.to(weight.dtype)
            if grad_rows is not None:
                grad_rows[part] = grad @ weight
            if grad_weight is not None and grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.T, rows[part])  # without a product as large as the weight beside it
            elif grad_weight is not None:
                grad_weight += grad.T @ rows[part]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_rows, grad_weight, grad_bias, None, None, None, None, None, None


def _scaled_logits(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, divisor: Tensor | None, part: slice
) -> Tensor:
    """Float32 logits of one chunk, divided by its temperatures."""
    logits = (rows if weight is None else linear(rows, weight, bias)).float()
    return logits if divisor is None else logits / divisor[part]
