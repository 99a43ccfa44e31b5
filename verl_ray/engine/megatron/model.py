"""One pipeline stage of a role's model, out of megatron-core's parts, and the head on the last.

Invariant: it computes what transformers computes with the same weights. megatron-core's own modules do the layers; put
in through its module specifications are the two that it only has with TransformerEngine (a norm that may see slices of
tokens, attention over packed rows), so CPU and GPU run the same ones. Logits are never gathered, and never held for
tokens that nobody asked about. Deliberately not here: which weight is which (`weight_map.py`), schedules, the loss.
"""

from __future__ import annotations

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
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from verl_ray.backends.megatron import MegatronBackend
from verl_ray.engine.megatron.experts import ExpertLayer, RoutedRows, Router
from verl_ray.engine.megatron.layout import Layout
from verl_ray.models import attention
from verl_ray.models.role_model import HeadKind, PackedRows, RoleModel
from verl_ray.ops.log_probs import head_log_probs
from verl_ray.ops.outputs import Outputs, TokenOutputs
from verl_ray.ops.vocab_parallel import VocabularySlice

if not moe_utils.HAVE_TE:
    # 0.16.1 leaves the name undefined where TransformerEngine is not installed, with or without a GPU, and reads it
    moe_utils.te_general_gemm = None


class RMSNorm(nn.RMSNorm):
    """megatron-core's own refuses slices of tokens; what that takes is the mark that the gradient is summed over."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


@dataclass
class PackedLayout(PackedSeqParams):
    """Where rows begin, on its way through megatron-core's layers to attention. `qkv_format` says that tokens come in
    the usual form, so that positions are applied as they are given."""

    qkv_format: str = "sbhd"
    layout: attention.Layout | None = None
    routed: RoutedRows | None = None
    """For routers, of rows that are learned from."""


class PackedAttention(MegatronModule):
    """Attention over packed rows: [tokens, 1, heads, size] of this rank's heads -> [tokens, 1, heads * size]."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedLayout, **__: Any
    ) -> Tensor:
        assert packed_seq_params.layout is not None
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        out = attention.attend_packed(query, key, value, packed_seq_params.layout, self._scale)
        return out.flatten(1).unsqueeze(1)


class ValueHead(nn.Module):
    """One number per token: of a critic, or of a reward model. The same on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> float32 [tokens]."""
        return hidden.float() @ self.weight.float()[0]


class WordEmbedding(VocabParallelEmbedding):
    """As transformers has it: the word that pads is not learned where it is read, if the model names one."""

    padding: int | None

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        if self.padding is None:
            return found
        pads = (ids == self.padding)[..., None]
        if self.reduce_scatter_embeddings:  # then this rank has a slice of the tokens, [tokens, rows, hidden]
            pads = pads.transpose(0, 1).chunk(self.tp_group.size())[self.tp_group.rank()]
        return torch.where(pads, found.detach(), found)


class Stage(GPTModel):
    """The layers of one chunk of one pipeline rank. The last chunk has the head, called by itself on what `forward`
    returns."""

    def __init__(self, described: RoleModel, config: TransformerConfig, layout: Layout, chunk: int) -> None:
        hf = described.hf.config
        first = layout.pp.rank == 0 and chunk == 0
        last = layout.is_last_stage and chunk == layout.chunks - 1
        super().__init__(
            config,
            _block(described, config, layout, chunk),
            vocab_size=padded_vocabulary(hf.vocab_size, layout.tp.size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=described.kind == "policy" and hf.tie_word_embeddings,
            position_embedding_type="none",
            pg_collection=layout.groups,
            vp_stage=chunk if layout.chunks > 1 else None,
        )
        self.kind: HeadKind = described.kind
        if first:
            self.embedding.word_embeddings.__class__ = WordEmbedding
            self.embedding.word_embeddings.padding = described.hf.get_input_embeddings().padding_idx
        if last and described.kind == "value":
            del self.output_layer
            self.value_head = ValueHead(config)
        self._tp = layout.groups.tp
        share = padded_vocabulary(hf.vocab_size, layout.tp.size) // layout.tp.size
        first_word = layout.tp.rank * share
        self._vocabulary = VocabularySlice(self._tp, first_word) if layout.tp.size > 1 else None
        self._own_words = max(0, min(share, hf.vocab_size - first_word))
        rotary = described.backbone.rotary_emb
        self.register_buffer("_inverse_frequencies", rotary.inv_freq.detach().clone(), persistent=False)

    def forward(self, rows: PackedRows, routed: RoutedRows | None = None) -> Tensor:
        """[tokens, 1, hidden]: what goes to the next chunk, or to the head."""
        hidden = self.embedding(rows.input_ids, rows.position_ids) if self.pre_process else None
        angles = rows.position_ids[0, :, None].float() * self._inverse_frequencies.float()
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=PackedLayout(layout=rows.layout, routed=routed),
        )

    def head(self, hidden: Tensor, rows: PackedRows, outputs: Outputs) -> TokenOutputs:
        """What is wanted of the hidden states behind the last layer, alike on all tensor-parallel ranks."""
        policy = self.kind == "policy"
        hidden = hidden.squeeze(1)
        if self.config.sequence_parallel:
            # with the vocabulary shared out, each rank has a part of the gradient; else all have the whole of it
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=policy, group=self._tp)
        if not policy:
            values, scores = (
                self.value_head(hidden.index_select(0, at)) if wanted else None
                for wanted, at in ((outputs.values, rows.before), (outputs.scores, rows.ends))
            )
            return TokenOutputs(values=values, scores=scores)
        read = hidden.index_select(0, rows.before)
        if not self.config.sequence_parallel:
            read = copy_to_tensor_model_parallel_region(read, group=self._tp)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        found = head_log_probs(
            read, weight[: self._own_words], rows.targets, vocabulary=self._vocabulary,
            temperature=outputs.temperature, with_entropy=outputs.entropy, with_greedy=outputs.greedy,
        )  # fmt: skip
        return TokenOutputs(log_probs=found.log_probs, entropy=found.entropy, greedy=found.greedy)


def padded_vocabulary(words: int, ranks: int) -> int:
    """Equal parts of the vocabulary for all ranks; the words that are none come last, and are never computed."""
    return -(-words // ranks) * ranks


def transformer_config(described: RoleModel, backend: MegatronBackend, dtype: torch.dtype) -> TransformerConfig:
    """What megatron-core must know of the model and its layout. Everything that is a kernel of TransformerEngine or
    apex is off; no weight is drawn, because all are read."""
    hf = described.hf.config
    of_recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    attention_module: Any = described.layers[0].self_attn
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=attention_module.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=attention_module.q_proj.bias is not None,
        qk_layernorm=hasattr(attention_module, "q_norm"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        tensor_model_parallel_size=backend.tensor_parallel,
        sequence_parallel=backend.sequence_parallel,
        pipeline_model_parallel_size=backend.pipeline_parallel,
        virtual_pipeline_model_parallel_size=backend.virtual_stages if backend.virtual_stages > 1 else None,
        context_parallel_size=backend.context_parallel,
        expert_model_parallel_size=backend.expert_parallel,
        expert_tensor_parallel_size=backend.expert_tensor_parallel,
        variable_seq_lengths=True,  # packed rows: no two micro-batches have the same number of tokens
        moe_token_dispatcher_type="alltoall",  # which varying lengths ask for, also of models without experts
        calculate_per_token_loss=True,  # gradients are summed: the weights of a loss hold the global denominators
        # messages between interleaved chunks are told apart only this way: elsewise they are swapped, silently
        overlap_p2p_comm=backend.virtual_stages > 1,
        batch_p2p_comm=backend.virtual_stages == 1,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        moe_permute_fusion=False,
        moe_grouped_gemm=False,
        **_expert_settings(hf),
        **of_recompute[backend.recompute],
    )


def _expert_settings(hf: Any) -> dict[str, Any]:
    """What megatron-core must know of a model's experts; their balance is a loss of the engine's own."""
    if not getattr(hf, "num_experts", None):
        return {}
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": [int(has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)],
    }


def has_experts(hf: Any, layer: int) -> bool:
    """Whether a layer of such a model chooses among experts."""
    return bool(hf.num_experts) and (layer + 1) % hf.decoder_sparse_step == 0 and layer not in hf.mlp_only_layers


def _block(described: RoleModel, config: TransformerConfig, layout: Layout, chunk: int) -> TransformerBlockSubmodules:
    hf = described.hf.config
    stage = chunk if layout.chunks > 1 else None
    count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=layout.pp.rank)
    first = (chunk * layout.pp.size + layout.pp.rank) * count
    layers = [
        _layer(config, hf.num_experts if config.num_moe_experts and has_experts(hf, first + i) else None)
        for i in range(count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedAttention
    if experts:
        spec.module = ExpertLayer
        parts.mlp.submodules.router = Router
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    return spec
