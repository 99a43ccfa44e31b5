"""Multi-head latent attention (MLA) over packed rows.

Invariant: megatron-core computes it. Only its matrices and its positions are replaced.
Without TransformerEngine it cuts the matrices into the latent space over the
tensor-parallel ranks and sums no gradient of the keys' positions; here every rank has
these small matrices whole, and its slice of the tokens. Its own positions would count
from the first token of a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MultiLatentAttention,
)
from torch import Tensor, nn

from verl_ray.engine.megatron.modules import RMSNorm

if not moe_utils.HAVE_TE:
    # This module of megatron-core 0.16.1 takes TransformerEngine for installed, and
    # asks for instances of a class that is none.
    multi_latent_attention.HAVE_TE = False


class WholeLinear(nn.Module):
    """A linear layer that each tensor-parallel rank has whole, for its own tokens."""

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype)
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the outputs, and None in place of a bias."""
        return F.linear(x, self.weight), None


class LatentPositions(nn.Module):
    """The angles of a call's tokens, where megatron-core asks for a row's positions.

    Attributes:
        angles: float32 [tokens, 1, size], which `PackedLayer` sets.
        factor: Factor of sines and cosines.
    """

    angles: Tensor

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def get_rotary_seq_len(self, *_: object) -> int:
        """Return the number of tokens."""
        return len(self.angles)

    def forward(self, length: int, *, packed_seq: bool) -> tuple[Tensor, float]:
        """Return the angles of the tokens, and the factor."""
        return self.angles, self.factor


class LatentAttention(MLASelfAttention):
    """megatron-core's latent attention with the matrices and positions above."""

    def __init__(
        self,
        config: MLATransformerConfig,
        *,
        epsilon: float,
        factor: float,
        pg_collection: Any,
        **settings: Any,
    ) -> None:
        """Build the layer without values.

        Args:
            config: megatron-core's configuration of the model.
            epsilon: Added to the variance in the norms of the latent vectors.
            factor: Factor of the sines and cosines of rotary positions.
            pg_collection: The process groups.
            settings: Arguments of megatron-core's class.
        """
        # The constructor between would build the matrices that are replaced.
        MultiLatentAttention.__init__(
            self,
            config=config,
            attention_type="self",
            pg_collection=pg_collection,
            **settings,
        )
        self.rotary_pos_emb = LatentPositions(factor)
        hidden, heads = config.hidden_size, config.num_attention_heads

        def per_head(inputs: int, size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs,
                heads * size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=pg_collection.tp,
            )

        query_rank, rank = config.q_lora_rank, config.kv_lora_rank
        if query_rank is None:
            self.linear_q_proj = per_head(hidden, self.q_head_dim)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, query_rank)
            self.q_layernorm = RMSNorm(config, query_rank, epsilon)
            self.linear_q_up_proj = per_head(query_rank, self.q_head_dim)

        self.linear_kv_down_proj = WholeLinear(
            config, hidden, rank + config.qk_pos_emb_head_dim
        )
        self.kv_layernorm = RMSNorm(config, rank, epsilon)
        self.linear_kv_up_proj = per_head(rank, config.qk_head_dim + config.v_head_dim)
