"""The modules that replace or complete megatron-core's own in a model.

Invariant: they compute what transformers' modules compute, on a CPU and on a GPU.
For a norm that may see slices of tokens, and for attention over packed rows,
megatron-core needs TransformerEngine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn

from verl_ray.engine.megatron.experts import RoutedRows
from verl_ray.models import attention


class RMSNorm(nn.RMSNorm):
    """A norm whose input may be a slice of the tokens.

    megatron-core's own norm refuses slices. All that slices require is the mark by
    which the weight's gradient is summed over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


@dataclass
class PackedRowParams(PackedSeqParams):
    """Parameters that megatron-core's layers pass on to attention and to routers.

    Attributes:
        qkv_format: The usual form of tokens, so that positions are applied as they are
            given.
        layout: Where the rows begin.
        routed: The rows for routers, in a pass that is learned from.
    """

    qkv_format: str = "sbhd"
    layout: attention.PackedLayout | None = None
    routed: RoutedRows | None = None


class PackedAttention(MegatronModule):
    """Attention over packed rows."""

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedRowParams,
        **__: Any,
    ) -> Tensor:
        """Return the attention's output, [tokens, 1, heads * size].

        Args:
            query: [tokens, 1, heads, size] of this rank's heads.
            key: [tokens, 1, key-value heads, size].
            value: [tokens, 1, key-value heads, size].
            packed_seq_params: Where the rows begin.
        """
        assert packed_seq_params.layout is not None
        output = attention.attend_packed(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.layout,
            attention.AttentionScores(self._scale),
        )
        return output.flatten(1).unsqueeze(1)


class MegatronValueHead(nn.Module):
    """The head of a critic or a reward model, with one number per token.

    Its weight is the same on all tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 [tokens] for hidden states [tokens, hidden] of any dtype."""
        return hidden.float() @ self.weight.float()[0]


class WordEmbedding(VocabParallelEmbedding):
    """An embedding whose padding word is not learned, as in transformers.

    `padding` is the id of that word, or None for a model that names none.
    """

    padding: int | None

    def forward(self, ids: Tensor) -> Tensor:
        embedded = super().forward(ids)
        if self.padding is None:
            return embedded

        is_padding = (ids == self.padding)[..., None]
        if self.reduce_scatter_embeddings:
            # The output is this rank's slice of the tokens, [tokens, rows, hidden].
            slices = is_padding.transpose(0, 1).chunk(self.tp_group.size())
            is_padding = slices[self.tp_group.rank()]
        return torch.where(is_padding, embedded.detach(), embedded)
