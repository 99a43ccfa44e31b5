"""The sizes and numbers that vLLM takes.

Invariant: each of them was found in vLLM's own code. Deliberately not here: the names
of its arguments, and which of them a user may set (`rules/vllm_args.py`).
"""

ATTENTION_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the rollout engine's attention takes on a CPU."""

EXPERTS_HIDDEN_MULTIPLE = 32
"""Divisor of the hidden sizes that the rollout engine's experts take on a CPU."""

SILU_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families of models that the rollout engine computes with one activation alone."""

VLLM_LEAST_TEMPERATURE = 0.01
"""The lowest temperature of the sampler above 0, which is greedy."""
