"""The supported model families, known without loading a model or importing torch.

Invariant: constants alone, so that a configuration can be checked without importing a
framework.
"""

from __future__ import annotations

FAMILIES = ("gemma", "llama", "qwen2", "qwen3", "qwen3_moe")
"""Supported values of model_type.

Other models may scale, cap or mask where this project does not.
"""

IN_MEGATRON = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose weights have a place in the model of megatron-core."""

ACTIVATIONS_IN_MEGATRON = ("silu", "swish")
"""Values of hidden_act that megatron-core computes: two names of one function."""

WITH_EXPERTS = ("qwen3_moe",)
"""Families whose layers choose among experts."""

WITH_QUERY_NORM = ("qwen3", "qwen3_moe")
"""Families that normalize the queries and keys of each head."""

EMBEDDINGS = "model.embed_tokens.weight"

VALUE_HEAD = "score.weight"
"""The name of the head in Hugging Face's sequence-classification models."""

LANGUAGE_HEAD = "lm_head.weight"
"""The name of the language-model head. A checkpoint with tied embeddings lacks it."""
