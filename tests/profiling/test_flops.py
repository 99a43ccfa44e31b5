"""Arithmetic that fits on a page, and a published model."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from verl_ray.columns.packing import estimated_work
from verl_ray.errors import ModelError
from verl_ray.profiling.flops import (
    ModelShape,
    forward_flops,
    peak_flops_per_s,
    training_flops,
)

LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_the_parameters_of_a_published_model() -> None:
    shape = ModelShape.from_config(LLAMA_3_8B)
    embeddings_and_norms = 128256 * 4096 + (2 * 32 + 1) * 4096
    assert shape.matmul_parameters + embeddings_and_norms == 8_030_261_248


def test_a_layer_by_hand() -> None:
    shape = ModelShape(
        num_layers=1,
        hidden_size=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=3,
        intermediate_size=5,
        vocab_size=7,
    )
    # queries 2x6, keys and values 2x3 each, output 6x2; gate, up and down 2x5 each;
    # head 7x2
    assert shape.matmul_parameters == (12 + 6 + 6 + 12) + 30 + 14
    # 3 tokens see 1 + 2 + 3 tokens; for each pair 2 heads x 3 numbers, twice (scores,
    # values), 2 FLOPs each
    assert forward_flops(shape, np.array([3])) == 2 * 80 * 3 + 6 * (2 * 3 * 2 * 2)
    assert forward_flops(shape, np.array([3, 1])) == 2 * 80 * 4 + 7 * (2 * 3 * 2 * 2)
    assert forward_flops(shape, np.array([3])) == pytest.approx(
        160 * estimated_work(np.array([3]), shape.quadratic)[0]
    )
    assert training_flops(shape, np.array([3])) == 3 * forward_flops(
        shape, np.array([3])
    )


def test_equal_to_what_torch_counts() -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=50,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    tokens = 24
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    shape = ModelShape.from_config(config.to_dict())
    # The eager kernel multiplies the masked half of the pairs too, which the model does
    # not need.
    masked = 4 * 2 * 4 * 32 * (tokens * (tokens - 1) // 2)
    rotary = (
        counter.get_total_flops() - forward_flops(shape, np.array([tokens])) - masked
    )
    assert 0 <= rotary <= 0.001 * counter.get_total_flops()


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops_per_s(torch.device("cpu"), "bfloat16") is None


def test_of_experts_those_count_that_a_token_passes_through() -> None:
    qwen3_30b_a3b = {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip
    attention, chosen, router = 2048 * 128 * 2 * 36, 8 * 3 * 2048 * 768, 2048 * 128
    shape = ModelShape.from_config(qwen3_30b_a3b)
    assert shape.matmul_parameters == 48 * (attention + chosen + router) + 151936 * 2048
    # with the input embeddings these are the 3.3 billion activated ones of its name
    assert shape.matmul_parameters + 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    renamed = {
        "num_local_experts" if key == "num_experts" else key: value
        for key, value in qwen3_30b_a3b.items()
    }
    assert ModelShape.from_config(renamed) == shape
    mixed = {**qwen3_30b_a3b, "mlp_only_layers": [0]}
    assert ModelShape.of(mixed, "policy") is None
    with pytest.raises(ModelError, match="layers are alike"):
        ModelShape.from_config(mixed)


def test_a_value_head_is_one_number_and_frozen_weights_need_no_gradient() -> None:
    policy, value = (
        ModelShape.of(LLAMA_3_8B, "policy"),
        ModelShape.of(LLAMA_3_8B, "value"),
    )
    assert policy is not None and value is not None
    assert policy.matmul_parameters - value.matmul_parameters == 128255 * 4096
    assert training_flops(policy, np.array([3]), frozen=True) == 2 * forward_flops(
        policy, np.array([3])
    )


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ModelError, match="intermediate_size is None"):
        ModelShape.from_config(
            {
                key: value
                for key, value in LLAMA_3_8B.items()
                if key != "intermediate_size"
            }
        )


LONG, LONGER = np.array([512, 1024, 2048]), np.array([4096] * 3)
DENSE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")  # fmt: skip
EXPERTS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")


@pytest.mark.parametrize(
    ("names", "sizes", "long_flops", "longer_flops"),
    [
        (DENSE, (32000, 4096, 11008, 32, 32, 32, 128), 149226491215872, 536372695793664),
        (DENSE, (152064, 3584, 18944, 28, 28, 4, 128), 167073690943488, 591764889010176),
        (DENSE, (151936, 4096, 12288, 36, 32, 8, 128), 180997438046208, 648394032807936),
        (DENSE, (131072, 5120, 32768, 40, 32, 8, 128), 512303699066880, 1787393589903360),
        (DENSE + EXPERTS, (151936, 2048, 0, 48, 32, 4, 128, 768, 128, 8), 78593069678592, 306570470621184),
    ],
    ids=["Llama-2-7B", "Qwen2.5-7B", "Qwen3-8B", "Mistral-24B", "Qwen3-30B-A3B"],
)  # fmt: skip
def test_published_models_have_the_flops_that_verl_counts(
    names: tuple[str, ...], sizes: tuple[int, ...], long_flops: int, longer_flops: int
) -> None:
    """verl's tests hold these numbers.

    It counts the embedding as a second output head, and n^2 / 2 pairs of tokens for
    our n (n + 1) / 2.
    """
    config = dict(zip(names, sizes, strict=True))
    shape = ModelShape.from_config(config)
    for lengths, theirs in ((LONG, long_flops), (LONGER, longer_flops)):
        embedding = shape.vocab_size * shape.hidden_size
        own_pairs = shape.num_layers * shape.num_heads * shape.head_size
        difference = 6 * (own_pairs - embedding) * int(lengths.sum())
        assert training_flops(shape, lengths) == pytest.approx(
            theirs + difference, rel=1e-12
        )
