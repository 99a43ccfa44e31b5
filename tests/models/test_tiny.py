"""Tiny models: their size, equal bits for equal seeds, and their vocabulary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import ModelError
from verl_ray.models.tiny import Architecture, make_tiny, make_tiny_qwen3

SMALL = TinyModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=32,
    intermediate_size=96,
    tie_embeddings=True,
)
QUICKSTART = TinyModelConfig(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=512,
    tie_embeddings=True,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(folder, "0123456789+=")
    return folder


def test_about_a_million_parameters_and_no_token_too_many(
    tmp_path: Path, tokenizer: Path
) -> None:
    assert make_tiny_qwen3(tmp_path, tokenizer, QUICKSTART, seed=0) == tmp_path
    weights = load_file(tmp_path / "model.safetensors")
    # Per layer: q and o 128x128, k and v 64x128, three 128x512, two norms of 128 and
    # two of a head's 32.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 512 + 2 * 128 + 2 * 32
    assert (
        sum(weight.numel() for weight in weights.values())
        == 4 * layer + 14 * 128 + 128
        == 986_240
    )
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["dtype"]) == (
        14,
        1,
        "float32",
    )
    assert (
        load_tokenizer(tmp_path).decode([3, 12, 3], skip_special_tokens=True) == "1+1"
    )


def test_no_sampling_settings_are_left_behind(tmp_path: Path, tokenizer: Path) -> None:
    make_tiny_qwen3(tmp_path, tokenizer, SMALL, seed=0)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert set(settings) <= {"eos_token_id", "pad_token_id", "transformers_version"}


def test_the_seed_decides_every_bit_and_leaves_the_process_alone(
    tmp_path: Path, tokenizer: Path
) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        files.append(
            (
                make_tiny_qwen3(tmp_path / name, tokenizer, SMALL, seed)
                / "model.safetensors"
            ).read_bytes()
        )
    assert torch.equal(torch.rand(3), expected)
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_loads_and_tells_tokens_apart(
    tmp_path: Path, tokenizer: Path, architecture: Architecture, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    make_tiny(
        architecture,
        tmp_path,
        tokenizer,
        SMALL.model_copy(update={"tie_embeddings": tied}),
        seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), local_files_only=True)
    assert model.config.model_type == architecture
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    with torch.no_grad():
        logits = model(torch.arange(14)[None]).logits
    assert logits.shape == (1, 14, 14)
    assert (
        logits.std() > 0.3
    )  # far from uniform, so that a comparison of log-probs can fail


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(
        ModelError, match=r"num_kv_heads = 3 does not divide num_heads = 2"
    ):
        make_tiny_qwen3(
            tmp_path, tokenizer, SMALL.model_copy(update={"num_kv_heads": 3}), seed=0
        )
    with pytest.raises(
        ModelError, match="head_size = 48: qwen2 expects hidden_size / num_heads = 32"
    ):
        make_tiny(
            "qwen2",
            tmp_path,
            tokenizer,
            SMALL.model_copy(update={"head_size": 48}),
            seed=0,
        )
    with pytest.raises(ModelError, match="is not a directory"):
        make_tiny_qwen3(tmp_path, tmp_path / "none", SMALL, seed=0)


@pytest.mark.processes
def test_importing_is_light() -> None:
    code = "import sys, verl_ray.models.tiny, scripts.prepare_data, verl_ray.data.conversations\n"
    code += "print(sorted({'torch', 'transformers', 'datasets', 'ray', 'vllm'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip() == "[]", done.stderr
