"""Corrections of what vLLM computes wrongly on a CPU, in silence.

Three places of vLLM 0.32 are corrected:

- Its kernel of rotary positions takes queries [tokens, heads x size]. Of [tokens,
  heads, size], which its classes of DeepSeek and LFM2 pass, it takes the heads for
  tokens, and turns one of them per token: log-probs are off by 1 to 3 nats.
- Its router chooses experts without the bias of their selection, unless they are in
  groups, as those of ERNIE 4.5 are not: log-probs are off by 2 nats.
- Its experts, where each rank has some of them, take the number of an expert for its
  place on the rank, and read memory that is not theirs.

Invariant: `correct_computations` is called in each process of an engine before it
builds a model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

try:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
except ImportError:  # earlier versions choose experts elsewhere
    CPURouter = None

try:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )
except ImportError:
    CPUUnquantizedExperts = None

_turn = RotaryEmbedding.forward_cpu
_apply_experts: Any = getattr(CPUUnquantizedExperts, "apply", None)


def turned(
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn query and key, [tokens, ..., size], in place, and return them."""
    tensors = [query] if key is None else [query, key]
    flat = [tensor.flatten(1) for tensor in tensors]
    _turn(rotary, positions, *flat)
    for tensor, copy in zip(tensors, flat, strict=True):
        if copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy.view(tensor.shape))
    return query, key


def _in_one_group(router: Any) -> None:
    """Let a router choose as one of grouped experts does, which knows the bias."""
    if (
        not router.use_grouped_topk
        and router.custom_routing_function is None
        and router.e_score_correction_bias is not None
        and router.scoring_func in ("softmax", "sigmoid")
    ):
        router.use_grouped_topk = True
        router.num_expert_group = router.topk_group = 1


def _on_rank(experts: Any, *, topk_weights: Any, topk_ids: Any, **others: Any) -> None:
    """Compute a rank's part of the sum over the experts of each token.

    The experts of other ranks count as the first one of this rank, with a weight of 0.
    """
    places = others["expert_map"]
    if places is not None:
        topk_ids = places[topk_ids]
        is_here = topk_ids >= 0
        topk_ids = topk_ids.where(is_here, 0)
        topk_weights = topk_weights * is_here
        assert not others["apply_router_weight_on_input"], "the weight is in the sum"
    _apply_experts(experts, topk_weights=topk_weights, topk_ids=topk_ids, **others)


def correct_computations() -> None:
    """Correct the models that this process will build."""
    RotaryEmbedding.forward_cpu = turned
    if CPUUnquantizedExperts is not None:
        CPUUnquantizedExperts.apply = _on_rank
    if CPURouter is None:
        return

    begin = CPURouter.__init__

    def begin_in_one_group(router: Any, *arguments: Any, **options: Any) -> None:
        begin(router, *arguments, **options)
        _in_one_group(router)

    CPURouter.__init__ = begin_in_one_group
