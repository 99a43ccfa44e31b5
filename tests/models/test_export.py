"""A checkpoint written tensor by tensor is one that safetensors reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from verl_ray.data.tokenizers import CHATML, train_bpe
from verl_ray.hub.model_folders import INDEX
from verl_ray.models.export import write_directory, write_tensors
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.profiling.progress import begin, progress
from verl_ray.weight_sync.manifest import Parameter

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.arange(5).to(torch.bfloat16),
    "c": torch.full((4, 1, 2), 7.0),
    "scalar": torch.tensor(3.0),
}
PARAMETERS = [
    Parameter(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), None)
    for name, t in TENSORS.items()
]


def test_one_file(tmp_path: Path) -> None:
    write_tensors(tmp_path, PARAMETERS, TENSORS.values())
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in TENSORS.items()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_several_files_with_an_index(tmp_path: Path) -> None:
    begin()
    write_tensors(
        tmp_path, PARAMETERS, TENSORS.values(), max_file_bytes=34
    )  # 24 + 10, 32 and 4 bytes
    assert str(progress()) == "70 of 70 bytes"
    index = json.loads((tmp_path / INDEX).read_text())
    assert {name: file[6:11] for name, file in index["weight_map"].items()} == {
        "a": "00001", "b.weight": "00001", "c": "00002", "scalar": "00003",
    }  # fmt: skip
    assert set(index["weight_map"].values()) == {
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    }
    assert index["metadata"]["total_size"] == 24 + 10 + 32 + 4
    reader = CheckpointReader(str(tmp_path))
    assert all(torch.equal(reader[name], value) for name, value in TENSORS.items())


def test_a_template_of_the_run_is_exported_with_the_tokens_that_it_ends_by(
    tmp_path: Path,
) -> None:
    model, folder = tmp_path / "model", tmp_path / "exported"
    tokenizer = train_bpe(model, ["1+1="], 280, "{{ messages }}")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(str(model))
    settings = {"eos_token_id": tokenizer.eos_token_id, "top_k": 7}
    (model / "generation_config.json").write_text(json.dumps(settings))

    def configure(directory: Path) -> None:
        (directory / "config.json").write_text("{}")

    write_directory(
        folder, configure, PARAMETERS, iter(TENSORS.values()),
        stem="model", tokenizer_from=model, chat_template=CHATML,
    )  # fmt: skip
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    ends = sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"eos_token_id": ends, "top_k": 7}
    assert load_file(folder / "model.safetensors").keys() == TENSORS.keys()


def test_a_writer_that_dies_leaves_no_file_under_its_name(tmp_path: Path) -> None:
    def dying() -> Iterator[Tensor]:
        yield TENSORS["a"]
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_tensors(tmp_path, PARAMETERS, dying())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors.partial"]
