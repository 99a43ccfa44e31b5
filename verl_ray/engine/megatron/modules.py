"""The modules that replace or complete megatron-core's own in a model.

Invariant: they compute what transformers' modules compute, on a CPU and on a GPU.
For a norm that may see slices of tokens, and for attention over packed rows,
megatron-core needs TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from verl_ray.engine.megatron.experts import RoutedRows
from verl_ray.models import attention
from verl_ray.models.routing_replay import RecordedRouting


class RMSNorm(nn.RMSNorm):
    """A norm whose input may be a slice of the tokens.

    megatron-core's own norm refuses slices. All that slices require is the mark by
    which the weight's gradient is summed over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class UnitRMSNorm(RMSNorm):
    """A norm that multiplies by 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        precise = x.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + self.eps)
        return (precise * scale * (1.0 + self.weight.float())).type_as(x)


class NormedAdd(MegatronModule):
    """The norm behind attention or a feed-forward layer, and the sum with its input.

    It takes the place of megatron-core's function of bias, dropout and sum.
    """

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm]) -> None:
        super().__init__(config=config)
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the sum as a function of (output, bias), input and dropout."""
        return self._sum

    def _sum(
        self, output_with_bias: tuple[Tensor, None], residual: Tensor, _: float
    ) -> Tensor:
        output, _bias = output_with_bias
        # megatron-core enables gradients here, in passes without any as well.
        with torch.set_grad_enabled(output.requires_grad):
            return residual + self.norm(output)


@dataclass
class PackedRowParams(PackedSeqParams):
    """Parameters that megatron-core's layers pass on to attention and to routers.

    Attributes:
        qkv_format: The usual form of tokens, so that positions are applied as they are
            given.
        layout: Where the rows begin.
        routed: The rows for routers, in a pass that is learned from.
        recorded: What the routers are to choose, of this rank's tokens.
        angles: float32 [tokens, 1, 1, size], the angles of the rotary positions, by the
            kind of layers.
    """

    qkv_format: str = "sbhd"
    layout: attention.PackedLayout | None = None
    routed: RoutedRows | None = None
    recorded: RecordedRouting | None = None
    angles: dict[str, Tensor] = field(default_factory=dict)


class PackedAttention(MegatronModule):
    """Attention over packed rows.

    Attributes:
        scores: How products of queries and keys become weights, which `PackedLayer`
            sets.
    """

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.scores = attention.PLAIN

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedRowParams,
        **__: Any,
    ) -> Tensor:
        """Return the attention's output, [tokens, 1, heads * value size].

        Args:
            query: [tokens, 1, heads, size] of this rank's heads, or without the 1.
            key: [tokens, 1, key-value heads, size], or without the 1.
            value: [tokens, 1, key-value heads, value size], or without the 1.
            packed_seq_params: Where the rows begin.
        """
        assert packed_seq_params.layout is not None
        output = attention.attend_packed(
            query.flatten(0, -3),
            key.flatten(0, -3),
            value.flatten(0, -3),
            packed_seq_params.layout,
            self.scores,
        )
        return output.flatten(1).unsqueeze(1)


@dataclass(frozen=True)
class LayerKind:
    """Properties of a layer beside those in megatron-core's settings.

    Attributes:
        scores: How products of queries and keys become weights.
        positions: The kind of layers whose rotary positions it has.
    """

    scores: attention.AttentionScores
    positions: str


class PackedLayer(TransformerLayer):
    """A layer that passes on what it needs of a call's rows.

    It does so as well when it is computed again for the backward pass, which may be
    after another micro-batch's forward pass.
    """

    def __init__(self, *args: Any, kind: LayerKind, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._positions = kind.positions
        self.self_attention.core_attention.scores = kind.scores

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        if self.is_moe_layer:
            self.mlp.router.rows = packed_seq_params.routed
            self.mlp.router.recorded = packed_seq_params.recorded

        angles = packed_seq_params.angles[self._positions]
        if self.config.multi_latent_attention:
            # It refuses angles, and takes them from `LatentPositions`.
            self.self_attention.rotary_pos_emb.angles = angles[:, 0]
        else:
            kwargs["rotary_pos_emb"] = angles
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


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

    `padding` is the id of that word, or None for a model that names none. `factor`
    multiplies the embeddings, rounded to their type.
    """

    padding: int | None
    factor: float

    def forward(self, ids: Tensor) -> Tensor:
        embedded = super().forward(ids)
        if self.factor != 1:
            embedded = embedded * embedded.new_tensor(self.factor)
        if self.padding is None:
            return embedded

        is_padding = (ids == self.padding)[..., None]
        if self.reduce_scatter_embeddings:
            # The output is this rank's slice of the tokens, [tokens, rows, hidden].
            slices = is_padding.transpose(0, 1).chunk(self.tp_group.size())
            is_padding = slices[self.tp_group.rank()]
        return torch.where(is_padding, embedded.detach(), embedded)
