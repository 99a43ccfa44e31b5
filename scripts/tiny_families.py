"""Tiny configurations of families of language models, by model_type."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.125,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "query_pre_attn_scalar": 48,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "logits_scaling": 2.0,
    "logit_scale": 0.25,
    "attention_multiplier": 0.1,
    "index_topk": 8,
    "index_n_heads": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 260,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_k": 2,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
"""A family gets the sizes that its configuration has."""

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "gemma3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
        },
    },
    "qwen3_vl": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 1,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        }
    },
    "olmo3": _WINDOWS,
    "gpt_oss": _WINDOWS,
    "exaone4": _WINDOWS,
    "cohere2": _WINDOWS,
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": 128,
        "conv_dim": 128,
        "block_dim": 128,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_d_ssm": 256},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "qwen3_next": {"num_hidden_layers": 4},
    "gemma4_text": _WINDOWS | {"num_experts": None, "moe_intermediate_size": None},
    "minimax_m2": {
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "deepseek_v2": {"topk_method": "greedy", "num_key_value_heads": 4},
    "deepseek_v32": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_key_value_heads": 4,
        "index_head_dim": 128,
    },
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_key_value_heads": 4,
    },
    "seed_oss": {"attention_dropout": 0.0},
}

PACKED = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "olmo3",
    ),
    *(
        "granite",
        "glm",
        "glm4",
        "exaone4",
        "smollm3",
        "cohere",
        "cohere2",
        "starcoder2",
        "helium",
        "arcee",
    ),
    *(
        "seed_oss",
        "phi",
        "olmo",
        "cwm",
        "nanochat",
        "gemma4_text",
        "ministral3",
        "hunyuan_v1_dense",
        "ernie4_5",
    ),
    *(
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "flex_olmo",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
    ),
    *("granitemoe", "minimax_m2", "dots1", "hunyuan_v1_moe", "ernie4_5_moe"),
)
"""Families that are computed with packed rows."""

ALONE = ("qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2", "bamba", "jamba")
"""Families that are computed with rows of one length alone."""

REFUSED = ("phimoe", "stablelm", "deepseek_v32")
"""Families whose proof fails."""


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Return a configuration of two layers."""
    kind = CONFIG_MAPPING[family]
    fields = {
        name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})
    }
    sizes = {
        name: size for name, size in _SIZES.items() if name in fields | {"head_dim"}
    }
    if {"kv_lora_rank", "qk_rope_head_dim"} <= fields:
        # Latent attention has sizes of its own.
        sizes.pop("head_dim")
    if "text_config" in fields:
        # The class of Gemma 3 with a vision tower computes no cap of logits. Without
        # it, samples differ only where weights are small.
        text = tiny_config(
            f"{family}_text", final_logit_softcapping=None, initializer_range=0.04
        )
        sizes["text_config"] = text.to_dict()
    return kind(**sizes | _OWN.get(family, {}) | changes)
