"""The settings that megatron-core gets for a model.

Invariant: every kernel of TransformerEngine or Apex is off, and no weight is
initialized, because all are read.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from verl_ray.backends.megatron import MegatronBackend
from verl_ray.backends.megatron_families import (
    FAMILIES,
    Family,
    has_normalized_weights,
)
from verl_ray.engine.megatron.experts import RoutingRule
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


def family_of(model: RoleModel) -> Family:
    """Return the family of a model, which has a place in megatron-core."""
    return FAMILIES[model.hf.config.model_type]


def layers_with_experts(model: RoleModel) -> list[int]:
    """Return the indices of the layers that choose among experts."""
    return [
        number
        for number, layer in enumerate(model.layers)
        if hasattr(layer.mlp, "experts")
    ]


def num_experts(model: RoleModel) -> int:
    """Return the number of experts of the layers that have them."""
    layer = layers_with_experts(model)[0]
    experts: int = _mlp(model, layer).experts.down_proj.shape[0]
    return experts


def routing_rule(model: RoleModel) -> RoutingRule:
    """Return how the routers of a model with experts choose."""
    kind = family_of(model).experts
    assert kind is not None
    hf = model.hf.config
    has_groups = kind.best_of_group > 0 and (
        kind.group_method is None or hf.topk_method == kind.group_method
    )
    return RoutingRule(
        chosen=hf.num_experts_per_tok,
        sigmoid=kind.scores == "sigmoid",
        normalized=has_normalized_weights(kind, getattr(hf, "norm_topk_prob", None)),
        factor=hf.routed_scaling_factor if kind.scaled else 1.0,
        biased=kind.biased,
        groups=hf.n_group if has_groups else 1,
        chosen_groups=hf.topk_group if has_groups else 1,
        best_of_group=kind.best_of_group,
    )


def _mlp(model: RoleModel, layer: int) -> Any:
    return cast(Any, model.layers[layer]).mlp


def transformer_config(
    model: RoleModel, backend: MegatronBackend, dtype: torch.dtype
) -> TransformerConfig:
    """Return the configuration from which megatron-core builds a model.

    Args:
        model: The model as transformers has it, without values.
        backend: The settings of the layout.
        dtype: Type of the weights that compute.
    """
    kind = MLATransformerConfig if family_of(model).latent else TransformerConfig
    return kind(
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
        **_expert_settings(model),
        # megatron-core may change the list of modules, so each model has its own.
        **copy.deepcopy(_RECOMPUTE[resolved(backend.recompute)]),
    )


def _layer_settings(model: RoleModel) -> dict[str, Any]:
    """Return the settings that describe the layers of a model."""
    hf = model.hf.config
    mlp = _mlp(model, 0)
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": getattr(mlp, "experts", mlp).act_fn,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    } | _attention_settings(model)


def _attention_settings(model: RoleModel) -> dict[str, Any]:
    """Return the settings that describe the attention of a model."""
    hf = model.hf.config
    attention: Any = model.layers[0].self_attn
    if family_of(model).latent:
        return {
            "num_query_groups": hf.num_attention_heads,
            "kv_channels": hf.v_head_dim,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
        }
    return {
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.q_proj.bias is not None,
        "qk_layernorm": hasattr(attention, "q_norm"),
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


def _expert_settings(model: RoleModel) -> dict[str, Any]:
    """Return the settings that describe a model's experts.

    megatron-core's own choice of experts and its balance loss are off; the routers of
    `experts.py` have theirs.
    """
    layers = layers_with_experts(model)
    kind = family_of(model).experts
    if not layers or kind is None:
        return {}

    mlp = _mlp(model, layers[0])
    pattern = [int(layer in layers) for layer in range(len(model.layers))]
    settings: dict[str, Any] = {
        "num_moe_experts": num_experts(model),
        "moe_ffn_hidden_size": mlp.experts.down_proj.shape[-1],
        "moe_router_topk": model.hf.config.num_experts_per_tok,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32" if kind.float32_logits else None,
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": pattern,
    }
    if kind.shared is not None:
        inner = getattr(mlp, kind.shared).down_proj.weight.shape[-1]
        settings["moe_shared_expert_intermediate_size"] = inner
        settings["moe_shared_expert_gate"] = kind.shared_gate
    return settings
