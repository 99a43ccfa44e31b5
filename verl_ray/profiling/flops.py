"""How much arithmetic a decoder-only transformer needs, and which part of a device's peak that is.

Invariant: counts what the model's mathematics needs (a multiply-add is 2), whatever the implementation adds by
recomputation, padding or masked-out work. Pure arithmetic on the model's configuration; it measures nothing. Norms,
activations and rotary embeddings are left out: well under 1 % at any size that is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from verl_ray.errors import ModelError

if TYPE_CHECKING:
    import torch

BFLOAT16_PEAK_FLOPS_PER_S = {
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "H800": 989e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Part of the device's name -> dense products in bfloat16, from the makers' data sheets; the first match counts."""


def peak_flops_per_s(device: torch.device, dtype: str) -> float | None:
    """What this device can do in this type; None for a CPU, float32, or a device that is not in the table."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in BFLOAT16_PEAK_FLOPS_PER_S.items() if part in name), None)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama- or Qwen-like decoder with gated feed-forward layers; with experts, as much of them as a
    token passes through."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0

    @staticmethod
    def of(config: Mapping[str, object], head: Literal["policy", "value"]) -> ModelShape | None:
        """Of a model with this configuration and head; None where the arithmetic of its kind is not counted."""
        try:
            shape = ModelShape.from_config(config)
        except ModelError:
            return None
        return shape if head == "policy" else replace(shape, vocab_size=1)  # that head gives one number per token

    @staticmethod
    def from_config(config: Mapping[str, object]) -> ModelShape:
        """From the keys of a Hugging Face `config.json`. Of experts, those count that a token is given to, and the
        router beside them.

        Raises:
            ModelError: a size is missing, or layers differ from each other.
        """
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        intermediate, experts = _size(config, "intermediate_size"), 0
        if any("expert" in key for key in config):
            if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
                raise ModelError("FLOPs are counted for models whose layers are alike; here some have no experts")
            named = "num_experts" if "num_experts" in config else "num_local_experts"  # as transformers writes it today
            experts = _size(config, named)
            intermediate = _size(config, "num_experts_per_tok") * _size(config, "moe_intermediate_size")
        return ModelShape(
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_size(config, "num_key_value_heads", heads),
            head_size=_size(config, "head_dim", hidden // heads),
            intermediate_size=intermediate,
            vocab_size=_size(config, "vocab_size"),
            num_experts=experts,
        )

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply every token: attention, feed-forward and output head; embeddings are looked up."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size + self.hidden_size * self.num_experts
        return self.num_layers * (attention + feed_forward) + self.vocab_size * self.hidden_size

    @property
    def quadratic(self) -> float:
        """FLOPs of attention for a pair of tokens, as a fraction of a token's in matrix products."""
        return 4 * self.num_layers * self.num_heads * self.head_size / (2 * self.matmul_parameters)


def forward_flops(shape: ModelShape, lengths: NDArray[np.int64]) -> float:
    """FLOPs of one forward pass over whole sequences of these lengths [rows], in tokens.

    2 per parameter and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), plus attention scores and the
    weighted sum of values: 2 x 2 x heads x head size per layer and pair of tokens. Deviation from the model FLOPs of
    PaLM (arXiv:2204.02311, appendix B): a token attends to itself and those before it, n(n+1)/2 pairs instead of n^2.
    Generating a sequence token by token with a key-value cache needs the same.
    """
    tokens = lengths.astype(np.float64)
    pairs = float((tokens * (tokens + 1) / 2).sum())
    per_pair = 4 * shape.num_layers * shape.num_heads * shape.head_size
    return 2 * shape.matmul_parameters * float(tokens.sum()) + per_pair * pairs


def training_flops(shape: ModelShape, lengths: NDArray[np.int64], *, frozen: bool = False) -> float:
    """FLOPs of one forward and backward pass: the backward pass needs twice the forward pass (the same 6N), half for
    activations and half for weights. `frozen`: weights need none, and an adapter's own are left out."""
    return (2 if frozen else 3) * forward_flops(shape, lengths)


def _size(config: Mapping[str, object], key: str, otherwise: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = otherwise
    if not isinstance(value, int):
        raise ModelError(f"config.json: {key} is {value!r}; a size is expected there")
    return value
