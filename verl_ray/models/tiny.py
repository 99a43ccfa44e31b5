"""Small untrained models with a tokenizer beside them: what quickstart trains, and what tests run on.

Invariant: the same arguments write the same bits, and the vocabulary is exactly the tokenizer's, so that no token
without a meaning can be sampled. Deliberately not here: training, and models of a useful size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ModelError

Architecture = Literal["gemma", "llama", "qwen2", "qwen3", "qwen3_moe"]

_MAX_POSITIONS = 4096
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
"""Of an architecture that has them; each as wide as the feed-forward layer of the others."""


def make_tiny_qwen3(directory: str | Path, tokenizer: str | Path, config: TinyModelConfig, seed: int) -> Path:
    """`make_tiny` for the architecture that quickstart trains."""
    return make_tiny("qwen3", directory, tokenizer, config, seed)


def make_tiny(
    architecture: Architecture, directory: str | Path, tokenizer: str | Path, config: TinyModelConfig, seed: int
) -> Path:
    """Write a float32 model with random parameters, and a copy of the tokenizer in directory `tokenizer`.

    The model directory holds config.json, model.safetensors, generation_config.json without sampling settings, and
    the tokenizer's files. The random state of the process stays as it was. Returns `directory`.

    Raises:
        ModelError: the tokenizer cannot be loaded, or the sizes do not fit the architecture.
    """
    loaded = load_tokenizer(tokenizer)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"prepare.model.num_kv_heads = {config.num_kv_heads} does not divide num_heads = {config.num_heads}"
        )
    if architecture == "qwen2" and config.num_heads * config.head_size != config.hidden_size:
        raise ModelError(
            f"prepare.model.head_size = {config.head_size}: qwen2 expects hidden_size / num_heads = "
            f"{config.hidden_size / config.num_heads:g}"
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    specials = {"bos_token_id": loaded.bos_token_id, "eos_token_id": loaded.eos_token_id}
    specials["pad_token_id"] = loaded.pad_token_id
    experts = _EXPERTS | {"moe_intermediate_size": config.intermediate_size} if architecture == "qwen3_moe" else {}
    settings = AutoConfig.for_model(
        architecture,
        vocab_size=len(loaded),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=_MAX_POSITIONS,
        # The usual 0.02 is made for wide models; at this width it leaves the logits all but equal, which would hide
        # errors from comparisons of log-probs.
        initializer_range=config.hidden_size**-0.5,
        dtype="float32",
        **specials,
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.generation_config = GenerationConfig(**specials)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(str(directory))
    finally:
        if bars:
            logging.enable_progress_bar()
    loaded.save_pretrained(str(directory))
    return Path(directory)
