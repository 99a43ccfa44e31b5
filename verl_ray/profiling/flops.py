"""FLOPs of a decoder-only transformer, and the peak FLOPs of devices.

Invariant: FLOPs count what the model's mathematics needs (a multiply-add is 2),
whatever the implementation adds by recomputation, padding or masked-out work. They are
pure arithmetic on the model's configuration; nothing is measured. Norms, activations
and rotary embeddings are left out: well under 1 % at any size that is trained.
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
"""Peak of dense matrix products in bfloat16 by part of a device's name.

The numbers are from the makers' data sheets. The first part that matches counts.
"""


def peak_flops_per_s(device: torch.device, dtype: str) -> float | None:
    """Peak FLOPs per second of a device in a dtype.

    Returns:
        The peak; None for a CPU, for another dtype than bfloat16, or for a device that
        is not in the table.
    """
    if device.type != "cuda" or dtype != "bfloat16":
        return None

    import torch

    return bfloat16_peak_of(torch.cuda.get_device_name(device))


def bfloat16_peak_of(device_name: str) -> float | None:
    """Return the peak of a device in bfloat16; None if it is not in the table."""
    for part, peak in BFLOAT16_PEAK_FLOPS_PER_S.items():
        if part in device_name:
            return peak
    return None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama- or Qwen-like decoder with gated feed-forward layers.

    For a model with experts, `intermediate_size` counts as much of the experts as a
    token passes through, and `num_experts` stands for the router.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def routing_bytes(self) -> int:
        """Bytes per token of the experts that routers chose, as rows hold them."""
        return 2 * self.num_layers * self.experts_per_token

    @staticmethod
    def of(
        config: Mapping[str, object], head: Literal["policy", "value"]
    ) -> ModelShape | None:
        """Shape of a model with this configuration and head.

        Returns:
            The shape; None where the arithmetic of the model's kind is not counted.
        """
        try:
            shape = ModelShape.from_config(config)
        except ModelError:
            return None
        if head == "policy":
            return shape
        # A value head returns one number per token.
        return replace(shape, vocab_size=1)

    @staticmethod
    def from_config(config: Mapping[str, object]) -> ModelShape:
        """Shape from the keys of a Hugging Face `config.json`.

        Of the experts, those count that a token is given to, and the router.

        Raises:
            ModelError: A size is missing, or layers differ from each other.
        """
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        if not num_heads:
            raise ModelError("FLOPs are counted for models with attention")
        intermediate_size = _size(config, "intermediate_size")
        num_experts = experts_per_token = 0
        if any("expert" in key for key in config):
            num_experts = _num_experts(config)
            experts_per_token = _size(config, "num_experts_per_tok")
            size_of_expert = _size(config, "moe_intermediate_size")
            intermediate_size = experts_per_token * size_of_expert

        return ModelShape(
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_size=_size(config, "head_dim", hidden_size // num_heads),
            intermediate_size=intermediate_size,
            vocab_size=_size(config, "vocab_size"),
            num_experts=num_experts,
            experts_per_token=experts_per_token,
        )

    @property
    def matmul_parameters(self) -> int:
        """Number of parameters that multiply every token.

        These are the parameters of attention, feed-forward layers and output head.
        Embeddings are looked up.
        """
        heads = self.num_heads + self.num_kv_heads
        attention = self.hidden_size * self.head_size * 2 * heads
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        router = self.hidden_size * self.num_experts
        output_head = self.vocab_size * self.hidden_size
        return self.num_layers * (attention + feed_forward + router) + output_head

    @property
    def quadratic(self) -> float:
        """FLOPs of attention for a pair of tokens, relative to a token's other FLOPs.

        The other FLOPs are those of the matrix products with parameters.
        """
        return _attention_flops_per_pair(self) / (2 * self.matmul_parameters)


def forward_flops(shape: ModelShape, lengths: NDArray[np.int64]) -> float:
    """FLOPs of one forward pass over whole sequences.

    The pass needs 2 FLOPs per parameter and token (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). Attention scores and the weighted sum of values add
    2 x 2 x heads x head size per layer and pair of tokens. Deviation from the model
    FLOPs of PaLM (arXiv:2204.02311, appendix B): a token attends to itself and those
    before it, so there are n(n+1)/2 pairs instead of n^2. Generation of a sequence
    token by token with a key-value cache needs the same.

    Args:
        shape: Sizes of the model.
        lengths: Lengths of the sequences in tokens, int64 [rows].
    """
    tokens = lengths.astype(np.float64)
    pairs = float((tokens * (tokens + 1) / 2).sum())
    matmul_flops = 2 * shape.matmul_parameters * float(tokens.sum())
    return matmul_flops + _attention_flops_per_pair(shape) * pairs


def training_flops(
    shape: ModelShape, lengths: NDArray[np.int64], *, frozen: bool = False
) -> float:
    """FLOPs of one forward and backward pass over whole sequences.

    The backward pass needs twice the forward pass (as in the same paper's 6N), half for
    activations and half for weights.

    Args:
        shape: Sizes of the model.
        lengths: Lengths of the sequences in tokens, int64 [rows].
        frozen: Whether the weights need no gradients. The parameters of an adapter are
            left out.
    """
    passes = 3
    if frozen:
        passes = 2
    return passes * forward_flops(shape, lengths)


def _attention_flops_per_pair(shape: ModelShape) -> int:
    return 4 * shape.num_layers * shape.num_heads * shape.head_size


def _num_experts(config: Mapping[str, object]) -> int:
    some_layers_have_none = config.get("mlp_only_layers")
    if some_layers_have_none or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            "FLOPs are counted for models whose layers are alike; here some have no"
            " experts"
        )
    if "num_experts" in config:
        return _size(config, "num_experts")
    # The name that transformers writes today.
    return _size(config, "num_local_experts")


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int):
        raise ModelError(f"config.json: {key} is {value!r}; a size is expected there")
    return value
