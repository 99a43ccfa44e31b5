"""The settings that megatron-core gets for a model.

Invariant: every kernel of TransformerEngine or Apex is off, and no weight is
initialized, because all are read.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from verl_ray.backends.megatron import MegatronBackend
from verl_ray.models.role_model import RoleModel
from verl_ray.settings.section import resolved

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
