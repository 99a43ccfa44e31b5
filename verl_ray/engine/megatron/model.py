"""A chunk of a role's model out of megatron-core's parts, the head on the last, and the
configuration of both.

Invariant: it computes what transformers computes with the same weights. megatron-core's
own modules are the layers; its module specifications let them contain the norm, the
attention and the router of this package. Logits are never gathered, and only exist for
selected tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn

from verl_ray.backends.megatron import MegatronBackend
from verl_ray.config.section import resolved
from verl_ray.engine.megatron.experts import ExpertLayer, RoutedRows, Router
from verl_ray.engine.megatron.layout import ParallelLayout
from verl_ray.models import attention
from verl_ray.models.role_model import HeadKind, PackedRows, RoleModel
from verl_ray.ops.log_probs import VocabularySlice, head_log_probs
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs


class Stage(GPTModel):
    """The layers of one chunk of one pipeline rank.

    The first chunk of the model has the embedding, and the last one has the head. The
    head is called by itself on what `forward` returns.
    """

    def __init__(
        self,
        model: RoleModel,
        config: TransformerConfig,
        layout: ParallelLayout,
        chunk: int,
    ) -> None:
        """Build the chunk without values.

        Args:
            model: The model as transformers has it, without values.
            config: megatron-core's configuration of the model.
            layout: The process groups.
            chunk: Index of the chunk among those of this rank.
        """
        hf = model.hf.config
        is_first = layout.pp.rank == 0 and chunk == 0
        is_last = layout.is_last_stage and chunk == layout.chunks - 1
        words = padded_vocabulary(hf.vocab_size, layout.tp.size)
        super().__init__(
            config,
            _block_spec(model, config, layout, chunk),
            vocab_size=words,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=has_tied_embeddings(model),
            # `forward` passes the angles itself: rows are packed.
            position_embedding_type="none",
            pg_collection=layout.groups,
            vp_stage=_virtual_stage(layout, chunk),
        )

        self.kind: HeadKind = model.kind
        if is_first:
            embedding = self.embedding.word_embeddings
            embedding.__class__ = WordEmbedding
            embedding.padding = model.hf.get_input_embeddings().padding_idx
        # megatron-core knows no value heads; it has built a head of the vocabulary.
        if is_last and model.kind == "value":
            del self.output_layer
            self.value_head = MegatronValueHead(config)

        self._tp_group = layout.groups.tp
        words_per_rank = words // layout.tp.size
        first_word = layout.tp.rank * words_per_rank
        self._vocabulary: VocabularySlice | None = None
        if layout.tp.size > 1:
            self._vocabulary = VocabularySlice(self._tp_group, first_word)
        # The words behind these only pad the vocabulary.
        self._own_words = max(0, min(words_per_rank, hf.vocab_size - first_word))

        frequencies = model.backbone.rotary_emb.inv_freq.detach().clone()
        self.register_buffer("_inverse_frequencies", frequencies, persistent=False)

    def forward(self, rows: PackedRows, routed: RoutedRows | None = None) -> Tensor:
        """Return hidden states for the next chunk or the head, [tokens, 1, hidden].

        Args:
            rows: The rows of a micro-batch.
            routed: The rows for routers, in a pass that is learned from.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(rows.input_ids, rows.position_ids)

        positions = rows.position_ids[0, :, None].float()
        angles = positions * self._inverse_frequencies.float()
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=PackedRowParams(layout=rows.layout, routed=routed),
        )

    def head(
        self, hidden: Tensor, rows: PackedRows, outputs: RequestedOutputs
    ) -> TokenOutputs:
        """Return the requested outputs, identical on all tensor-parallel ranks.

        Args:
            hidden: The last layer's hidden states, [tokens, 1, hidden].
            rows: The rows of the micro-batch.
            outputs: Which outputs, and the temperature.
        """
        is_policy = self.kind == "policy"
        hidden = hidden.squeeze(1)
        if self.config.sequence_parallel:
            # In a policy each rank computes the part of the gradient that belongs to
            # its words; in a value model every rank computes the whole gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=is_policy, group=self._tp_group
            )

        if is_policy:
            return self._policy_outputs(hidden, rows, outputs)

        values = None
        if outputs.values:
            values = self.value_head(hidden.index_select(0, rows.predecessors))
        scores = None
        if outputs.scores:
            scores = self.value_head(hidden.index_select(0, rows.last_tokens))
        return TokenOutputs(values=values, scores=scores)

    def _policy_outputs(
        self, hidden: Tensor, rows: PackedRows, outputs: RequestedOutputs
    ) -> TokenOutputs:
        """Return the outputs of the vocabulary's head; `hidden` is [tokens, hidden]."""
        selected = hidden.index_select(0, rows.predecessors)
        if not self.config.sequence_parallel:
            # Its backward pass sums the gradients of the ranks' words.
            selected = copy_to_tensor_model_parallel_region(
                selected, group=self._tp_group
            )

        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        head_outputs = head_log_probs(
            selected,
            weight[: self._own_words],
            rows.targets,
            vocabulary=self._vocabulary,
            temperature=outputs.temperature,
            with_entropy=outputs.entropy,
            with_greedy=outputs.greedy,
            with_squared_probs=outputs.squared_probs,
        )
        return TokenOutputs(
            log_probs=head_outputs.log_probs,
            entropy=head_outputs.entropy,
            greedy=head_outputs.greedy,
            squared_probs=head_outputs.squared_probs,
        )


def has_tied_embeddings(model: RoleModel) -> bool:
    """Return whether the head of a policy is the transposed embedding."""
    return model.kind == "policy" and model.hf.config.tie_word_embeddings


def _virtual_stage(layout: ParallelLayout, chunk: int) -> int | None:
    """Return megatron-core's number of a chunk; None if there is one per rank."""
    if layout.chunks == 1:
        return None
    return chunk


def _block_spec(
    model: RoleModel, config: TransformerConfig, layout: ParallelLayout, chunk: int
) -> TransformerBlockSubmodules:
    """Return the specification of a chunk's layers."""
    hf = model.hf.config
    count = get_num_layers_to_build(
        config, vp_stage=_virtual_stage(layout, chunk), pp_rank=layout.pp.rank
    )
    first_layer = (chunk * layout.pp.size + layout.pp.rank) * count

    layer_specs = []
    for layer in range(first_layer, first_layer + count):
        num_experts = None
        if config.num_moe_experts and has_experts(hf, layer):
            num_experts = hf.num_experts
        layer_specs.append(_layer_spec(config, num_experts))
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """Return the specification of a layer; `num_experts` is None if it has none."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )

    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    if num_experts:
        spec.module = ExpertLayer
        layer.mlp.submodules.router = Router

    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return spec


# ------------------------------------------------------------------------------ modules

# The modules that replace or complete megatron-core's own in a model.
#
# Invariant: they compute what transformers' modules compute, on a CPU and on a GPU.
# For a norm that may see slices of tokens, and for attention over packed rows,
# megatron-core needs TransformerEngine.


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
            self._scale,
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


# ------------------------------------------------------------------------ configuration

# Invariant: every kernel of TransformerEngine or Apex is off, and no weight is
# initialized, because all are read.

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""megatron-core's settings for each choice of `recompute`."""


def padded_vocabulary(words: int, ranks: int) -> int:
    """Return the vocabulary size that `ranks` ranks can share equally.

    The words that pad it come last, and are never computed.
    """
    return -(-words // ranks) * ranks


def has_experts(hf: Any, layer: int) -> bool:
    """Return whether a layer chooses among experts.

    Args:
        hf: The configuration of a model of a family with experts.
        layer: Index of the layer, from 0.
    """
    if not hf.num_experts or layer in hf.mlp_only_layers:
        return False
    has_turn: bool = (layer + 1) % hf.decoder_sparse_step == 0
    return has_turn


def transformer_config(
    model: RoleModel, backend: MegatronBackend, dtype: torch.dtype
) -> TransformerConfig:
    """Return the configuration from which megatron-core builds a model.

    Args:
        model: The model as transformers has it, without values.
        backend: The settings of the layout.
        dtype: Type of the weights that compute.
    """
    return TransformerConfig(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        # Gradients are summed: the weights of a loss hold the global denominators.
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        moe_permute_fusion=False,
        moe_grouped_gemm=False,
        **_layer_settings(model),
        **_layout_settings(backend),
        **_communication_settings(backend),
        **_expert_settings(model.hf.config),
        # megatron-core may change the list of modules, so each model has its own.
        **copy.deepcopy(_RECOMPUTE[resolved(backend.recompute)]),
    )


def _layer_settings(model: RoleModel) -> dict[str, Any]:
    """Return the settings that describe the layers of a model."""
    hf = model.hf.config
    attention: Any = model.layers[0].self_attn
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": attention.head_dim,
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": attention.q_proj.bias is not None,
        "qk_layernorm": hasattr(attention, "q_norm"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _layout_settings(backend: MegatronBackend) -> dict[str, Any]:
    """Return the settings that describe the layout."""
    virtual_stages = backend.virtual_stages if backend.virtual_stages > 1 else None
    return {
        "tensor_model_parallel_size": backend.tensor_parallel,
        "sequence_parallel": backend.sequence_parallel,
        "pipeline_model_parallel_size": backend.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "context_parallel_size": backend.context_parallel,
        "expert_model_parallel_size": backend.expert_parallel,
        "expert_tensor_parallel_size": backend.expert_tensor_parallel,
    }


def _communication_settings(backend: MegatronBackend) -> dict[str, Any]:
    """Return the settings of messages between ranks."""
    is_interleaved = backend.virtual_stages > 1
    return {
        # No two micro-batches of packed rows have the same number of tokens.
        "variable_seq_lengths": True,
        # Variable lengths require this dispatcher, even in models without experts.
        "moe_token_dispatcher_type": "alltoall",
        # Only overlapped messages between interleaved chunks are told apart: others
        # are swapped silently.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
    }


def _expert_settings(hf: Any) -> dict[str, Any]:
    """Return the settings that describe a model's experts.

    megatron-core's own balance loss is off; the engine adds its own.
    """
    if not getattr(hf, "num_experts", None):
        return {}

    layer_pattern = [
        int(has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)
    ]
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": layer_pattern,
    }
