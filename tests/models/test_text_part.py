"""A model that sees images trains as the language model in it, and stays what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.tiny_families import tiny_config
from tests.models.loading import load_role_model
from verl_ray.config.roles import LoraConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.plain import PlainEngine
from verl_ray.engine.single import plain_engine
from verl_ray.errors import ModelError
from verl_ray.models.export import plain_outputs
from verl_ray.models.names import is_adapter
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.proofs.cut_model import random_model
from verl_ray.proofs.rows import LENGTHS, batch_of, random_rows

BODY = "language_model.model."
"""What the names of Gemma 3's body begin with."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return directory_of("gemma3", tmp_path)


def directory_of(family: str, root: Path) -> Path:
    folder = root / family
    random_model(tiny_config(family), seed=1).save_pretrained(folder)
    character_tokenizer(folder, "0123456789+=")
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def difference(engine: PlainEngine, folder: Path) -> float:
    """The largest difference of log-probs from those of the whole class."""
    rows = batch_of(random_rows())
    outputs = engine.forward(rows, RequestedOutputs(log_probs=True))
    assert outputs.log_probs is not None
    right = plain_outputs(str(folder), rows, policy=True)
    return float(abs(outputs.log_probs - right)[rows.response_mask].max())


def engine_of(folder: Path) -> PlainEngine:
    return plain_engine(folder, tokens=sum(LENGTHS), balance=None)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gemma3", ("language_model.model.",)),
        # Its text part learns as a Qwen3 model.
        ("qwen3_vl", ("model.language_model.", "lm_head.")),
    ],
)
def test_what_is_learned_is_exported_between_the_other_parts_as_they_were(
    family: str, text: tuple[str, ...], tmp_path: Path
) -> None:
    directory = directory_of(family, tmp_path)
    exported = tmp_path / "exported"
    engine = engine_of(directory)
    assert difference(engine, directory) < 1e-5
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(0.1)
    engine.export(str(exported))

    assert difference(engine, exported) < 1e-5
    before, after = (
        load_file(folder / "model.safetensors") for folder in (directory, exported)
    )
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if not name.startswith(text)}
    assert any("vision" in name or "visual" in name for name in same)
    for name in ("config.json", "preprocessor_config.json"):
        assert (exported / name).read_bytes() == (directory / name).read_bytes()


def test_an_adapter_alone_is_one_of_the_language_model_in_the_whole(
    directory: Path, tmp_path: Path
) -> None:
    adapter = LoraConfig(rank=2, alpha=4, targets=("q_proj", "up_proj"))
    engine = plain_engine(directory, tokens=sum(LENGTHS), balance=None, adapter=adapter)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1)
    assert difference(engine, directory) > 0.1
    engine.export(str(tmp_path / "adapter"), adapter=True)
    assert difference(engine, tmp_path / "adapter") < 1e-5
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(written) == 2 * 2 * 2  # layers, targets, A and B


def test_names_of_a_later_version_are_read_and_written_as_they_are(
    directory: Path, tmp_path: Path
) -> None:
    later, exported = tmp_path / "later", tmp_path / "exported"
    shutil.copytree(directory, later)
    tensors = {
        name.replace(BODY, "model.language_model."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, later / "model.safetensors", metadata={"format": "pt"})
    engine = engine_of(later)
    assert difference(engine, directory) < 1e-5
    engine.export(str(exported))
    written = load_file(exported / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_a_value_model_is_a_model_of_text_alone(
    directory: Path, tmp_path: Path
) -> None:
    value = load_role_model(str(directory), "value", seed=0, device=torch.device("cpu"))
    assert not any("vision" in name for name, _ in value.hf.named_parameters())
    exported = tmp_path / "exported"
    plain_engine(directory, "value", tokens=sum(LENGTHS), balance=None).export(
        str(exported)
    )
    again = load_role_model(
        str(exported), "value", seed=1, device=torch.device("cpu"), new_head=False
    )
    for name, parameter in value.hf.named_parameters():
        assert torch.equal(parameter, again.hf.get_parameter(name)), name


def test_a_text_part_that_is_not_there_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    removed = f"{BODY}layers.1.mlp.up_proj.weight"
    save_file({name: tensors[name] for name in tensors if name != removed}, file)
    with pytest.raises(ModelError, match=r"missing \['model\.layers\.1\.mlp\.up_proj"):
        engine_of(directory)
