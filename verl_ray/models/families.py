"""What is known of the supported models before anything of them is loaded, and without torch."""

from __future__ import annotations

FAMILIES = ("gemma", "llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of model_type in config.json. Others may scale, cap or mask where this project does not."""

IN_MEGATRON = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Those whose weights have a place in megatron-core's model."""

ACTIVATIONS_IN_MEGATRON = ("silu", "swish")
"""Values of hidden_act that its model computes: the two names of one function."""

WITH_EXPERTS = ("qwen3_moe",)
"""Those whose layers choose among experts."""

WITH_QUERY_NORM = ("qwen3", "qwen3_moe")
"""Those that norm the queries and keys of each head."""

EMBEDDINGS = "model.embed_tokens.weight"
VALUE_HEAD = "score.weight"  # the name it has in Hugging Face's sequence-classification models
LANGUAGE_HEAD = "lm_head.weight"  # a checkpoint with tied embeddings has none
