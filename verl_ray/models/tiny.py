"""Small untrained models with a tokenizer, for the quickstart and for tests.

Invariant: the same arguments write the same bits, and the vocabulary is exactly the
tokenizer's, so that no token without a meaning can be sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Architecture = Literal["gemma", "llama", "qwen2", "qwen3", "qwen3_moe"]

_MAX_POSITIONS = 4096

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
"""Settings of an architecture with experts.

Each expert is as wide as the feed-forward layer of the other architectures.
"""


def make_tiny_qwen3(
    directory: str | Path, tokenizer: str | Path, config: TinyModelConfig, seed: int
) -> Path:
    """Write a model for the quickstart, as `make_tiny` does."""
    return make_tiny("qwen3", directory, tokenizer, config, seed)


def make_tiny(
    architecture: Architecture,
    directory: str | Path,
    tokenizer: str | Path,
    config: TinyModelConfig,
    seed: int,
) -> Path:
    """Write a float32 model with random parameters and a copy of a tokenizer.

    The model directory gets config.json, model.safetensors, generation_config.json
    without sampling settings, and the tokenizer's files. The random state of the
    process does not change.

    Args:
        architecture: The value of model_type in config.json.
        directory: The model directory to write.
        tokenizer: The directory of the tokenizer.
        config: The sizes of the model.
        seed: The seed of the parameters.

    Returns:
        `directory`.

    Raises:
        ModelError: The tokenizer cannot be loaded, or the sizes do not fit the
            architecture.
    """
    loaded_tokenizer = load_tokenizer(tokenizer)
    _check_sizes(architecture, config)

    # Imported late, since these take seconds.
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    special_tokens = {
        "bos_token_id": loaded_tokenizer.bos_token_id,
        "eos_token_id": loaded_tokenizer.eos_token_id,
        "pad_token_id": loaded_tokenizer.pad_token_id,
    }
    settings = model_settings(
        architecture, config, len(loaded_tokenizer), special_tokens
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.generation_config = GenerationConfig(**special_tokens)

    # Saving takes a moment; its progress bar would only be noise.
    showed_progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(str(directory))
    finally:
        if showed_progress_bars:
            logging.enable_progress_bar()
    loaded_tokenizer.save_pretrained(str(directory))
    return Path(directory)


def _check_sizes(architecture: Architecture, config: TinyModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"prepare.model.num_kv_heads = {config.num_kv_heads} does not divide"
            f" num_heads = {config.num_heads}"
        )

    heads_fill_width = config.num_heads * config.head_size == config.hidden_size
    if architecture == "qwen2" and not heads_fill_width:
        raise ModelError(
            f"prepare.model.head_size = {config.head_size}: qwen2 expects hidden_size /"
            f" num_heads = {config.hidden_size / config.num_heads:g}"
        )


def model_settings(
    architecture: Architecture,
    config: TinyModelConfig,
    vocab_size: int,
    special_tokens: dict[str, Any],
) -> PretrainedConfig:
    """Return the contents of the model's config.json."""
    from transformers import AutoConfig

    experts: dict[str, Any] = {}
    if architecture == "qwen3_moe":
        experts = _EXPERTS | {"moe_intermediate_size": config.intermediate_size}

    return AutoConfig.for_model(
        architecture,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=_MAX_POSITIONS,
        # The usual 0.02 is made for wide models. At this width it leaves the logits
        # almost equal, which would hide errors from comparisons of log-probs.
        initializer_range=config.hidden_size**-0.5,
        dtype="float32",
        **special_tokens,
        **experts,
    )
