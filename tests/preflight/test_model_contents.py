"""Directories whose config.json, weights and tokenizer are not of one model."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.configuration import compose
from tests.foreign_files import Planted
from tests.preflight.configs import BIG, ppo, problems_by_key, with_judge
from tests.preflight.models import LLAMA, write_model, write_tensors
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import ModelError
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.models.tiny import make_tiny
from verl_ray.preflight.findings import preflight
from verl_ray.settings.config_json import described_tensors


def test_damaged_weights_are_found_from_headers_and_sizes(
    model: Path, data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)

    def rule() -> str:
        return problems_by_key(preflight(ppo(copy, data), BIG))["model.path"]

    file, *others = copy.glob("*.safetensors")
    for other in others:
        other.unlink()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    size = len(whole)
    assert (
        f"{file.name} has {size - 1} bytes, and its header describes {size}" in rule()
    )

    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert f"{file.name} has no readable header" in rule()

    file.write_bytes(whole)
    weight_map = {"a": file.name, "b": "second.safetensors"}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "names second.safetensors, which is not there" in rule()

    index.write_text(json.dumps({"weight_map": {"a": []}}))
    assert "names [], which is not there" in rule()

    index.unlink()
    save_file({"weight": np.zeros(2, dtype=np.float64)}, file)
    assert "its weights are of type F64, which is not read" in rule()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_pickled_weights_are_refused_unread(
    model: Path, data: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / name).write_bytes(pickle.dumps(Planted(tmp_path / "made")))
    refusal = "this directory has no *.safetensors"
    scored = ppo(model, data, "reward=model", f"reward.model.path={copy}")
    for key, config in (
        ("model.path", ppo(copy, data)),
        ("reward.model.path", scored),
        ("reward.model.path", with_judge(model, data, copy)),
    ):
        assert problems_by_key(preflight(config, BIG))[key].startswith(refusal)
    with pytest.raises(ModelError, match=r"lacks any \.safetensors file"):
        CheckpointReader(str(copy))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": {"dtype": "F32", "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 0]}}',
        b'{"a": 1}',
        b"[" * 100_000,
    ],
)
def test_a_header_of_another_form_is_not_readable(
    model: Path, data: Path, tmp_path: Path, header: bytes
) -> None:
    write_model(tmp_path / "copy", model, LLAMA)
    file = tmp_path / "copy" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    message = problems_by_key(preflight(ppo(file.parent, data), BIG))["model.path"]
    assert "model.safetensors has no readable header" in message


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64', and would be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and would be a whole"),
        ({"head_dim": "32"}, "head_dim is '32', and would be a whole number above 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4', and would be"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, and would be"),
        ({"vocab_size": None}, "vocab_size is None, and would be a whole number"),
        ({"attention_bias": "no"}, "attention_bias is 'no', and would be true or"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, and would divide"),
        ({"head_dim": None, "num_attention_heads": 6}, "or there would be a head_dim"),
        ({"num_experts": "8"}, "num_experts is '8', and would be a whole number"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, and would be a list of"),
        ({"layer_types": [[]]}, "layer_types is [[]], and would be a list of names"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], which is no activation"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0, and would"),
        ({"model_type": None}, "it has no model_type"),
        ({"hidden_act": "sulu"}, "hidden_act is 'sulu', which is no activation"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_type is 'ntk', and would be one of"),
        ({"quantization_config": {}}, "quantization_config says that weights are"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and would be 0"),
    ],
)
def test_a_wrong_value_of_config_json_is_one_problem_that_names_it(
    model: Path, data: Path, tmp_path: Path, change: dict[str, object], rule: str
) -> None:
    folder = write_model(tmp_path / "model", model, LLAMA)
    assert preflight(ppo(folder, data), BIG).problems == []

    (folder / "config.json").write_text(json.dumps(LLAMA | change))
    (problem,) = preflight(ppo(folder, data), BIG).problems
    assert problem.key == "model.path"
    assert rule in problem.rule


def test_a_config_json_that_is_nested_too_deeply_is_not_readable(
    model: Path, data: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", model, LLAMA)
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000)
    message = problems_by_key(preflight(ppo(folder, data), BIG))["model.path"]
    assert message.startswith("this directory has no readable config.json")


def test_a_judge_may_have_what_vllm_alone_computes(
    model: Path, data: Path, tmp_path: Path
) -> None:
    quantized = LLAMA | {"quantization_config": {}, "rope_scaling": {"type": "ntk"}}
    judge = write_model(tmp_path / "judge", model, quantized)
    write_tensors(judge / "model.safetensors", [("layer.qweight", [8, 8])])
    assert preflight(with_judge(model, data, judge), BIG).problems == []

    (judge / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": "64"}))
    messages = problems_by_key(preflight(with_judge(model, data, judge), BIG))
    assert list(messages) == ["reward.model.path"]


def test_every_layer_has_the_tensors_that_config_json_describes(
    model: Path, data: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", model, LLAMA)
    file = folder / "model.safetensors"
    tensors = dict(described_tensors(LLAMA))

    def difference(changed: dict[str, list[int]], *overrides: str) -> str:
        write_tensors(file, changed.items())
        (problem,) = preflight(ppo(folder, data, *overrides), BIG).problems
        assert problem.key == "model.path"
        return problem.rule.partition("describes: ")[2]

    last = "model.layers.2.mlp.down_proj.weight"
    without_layer = {
        name: shape for name, shape in tensors.items() if ".1." not in name
    }
    for changed, expected in (
        (without_layer, "model.layers.1.input_layernorm.weight is absent, and would have shape [128]"),
        (tensors | {last: [128, 192]}, f"{last} has shape [128, 192], and would have shape [128, 96]"),
        ({"a": [1]}, "model.embed_tokens.weight is absent, and would have shape [20, 128]"),
        (tensors | {"model.visual": [1]}, "model.visual has shape [1], and would be absent"),
        (tensors | {"score.weight": [1, 128]}, "score.weight has shape [1, 128], and would be absent"),
    ):  # fmt: skip
        assert difference(changed) == expected


def test_a_head_belongs_to_its_role(model: Path, data: Path, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", model, LLAMA)
    tied = write_model(tmp_path / "tied", model, LLAMA | {"tie_word_embeddings": True})
    own = dict(described_tensors(LLAMA))
    write_tensors(tied / "model.safetensors", own.items())
    scores = write_model(tmp_path / "scores", model, LLAMA)
    del own["lm_head.weight"]
    write_tensors(
        scores / "model.safetensors", [*own.items(), ("score.weight", [1, 128])]
    )
    for directory, critic in ((policy, scores), (policy, tied), (tied, policy)):
        config = ppo(directory, data, f"critic.model.path={critic}")
        assert preflight(config, BIG).problems == []


def test_tensors_of_another_model_are_told_apart(tmp_path: Path, data: Path) -> None:
    """Each family's own directory, and what is said of it under the config.json of
    others.
    """
    sizes = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_size=32, intermediate_size=32,
        tie_embeddings=True,
    )  # fmt: skip
    character_tokenizer(tmp_path / "tokenizer", "0123456789")
    made = {
        family: make_tiny(
            family, tmp_path / family, tmp_path / "tokenizer", sizes, seed=0
        )  # type: ignore[arg-type]
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe")
    }
    of = {
        family: json.loads((path / "config.json").read_text())
        for family, path in made.items()
    }
    long = {"max_position_embeddings": 4096, "hidden_act": "silu"}

    def said(tensors: str, **settings: object) -> str | None:
        (made[tensors] / "config.json").write_text(json.dumps(settings | long))
        inputs = [
            f"model.path={made[tensors]}",
            f"data.train_path={data}/train.jsonl",
            "data.validation_path=null",
        ]
        findings = preflight(
            compose("sft", [*inputs, "run.evaluate_every=0", "backend=megatron"]), BIG
        )
        return (
            problems_by_key(findings)
            .get("model.path", "")
            .partition("describes: ")[2]
            .partition(" |")[0]
            or None
        )

    assert [said(family, **of[family]) for family in made] == [None] * 4
    layer = "model.layers.0."
    for tensors, told, expected in (
        ("llama", of["qwen3"], f"{layer}self_attn.q_norm.weight is absent, and would have shape [32]"),
        ("qwen3", of["llama"], f"{layer}self_attn.k_norm.weight has shape [32], and would be absent"),
        ("qwen3", of["qwen2"], f"{layer}self_attn.q_proj.bias is absent, and would have shape [64]"),
        ("qwen2", of["llama"], f"{layer}self_attn.k_proj.bias has shape [32], and would be absent"),
        ("qwen3_moe", of["qwen3"], f"{layer}mlp.gate_proj.weight is absent, and would have shape [32, 64]"),
        ("qwen3", of["qwen3_moe"], f"{layer}mlp.gate.weight is absent, and would have shape [4, 64]"),
        ("llama", of["llama"] | {"intermediate_size": 64}, f"{layer}mlp.gate_proj.weight has shape [32, 64], and would"
         " have shape [64, 64]"),
        ("llama", of["llama"] | {"num_key_value_heads": 2}, f"{layer}self_attn.k_proj.weight has shape [32, 64], and"
         " would have shape [64, 64]"),
        ("llama", of["llama"] | {"tie_word_embeddings": False}, "lm_head.weight is absent, and would have shape"
         " [12, 64]"),
        ("llama", of["llama"] | {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is absent, and would"
         " have shape [64]"),
        ("llama", of["llama"] | {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight has shape [64], and "
         "would be absent"),
        ("llama", of["llama"] | {"vocab_size": 99}, "model.embed_tokens.weight has shape [12, 64], and would have "
         "shape [99, 64]"),
        ("llama", of["llama"] | {"head_dim": 16}, f"{layer}self_attn.q_proj.weight has shape [64, 64], and would have "
         "shape [32, 64]"),
    ):  # fmt: skip
        assert said(tensors, **told) == expected


def test_a_tokenizer_has_no_more_tokens_than_its_model(
    model: Path, data: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", model, LLAMA)

    def problems(*added: dict[str, object]) -> dict[str, str]:
        tokens = {chr(97 + number): number for number in range(19)}
        tokenizer = {"model": {"vocab": tokens}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return problems_by_key(preflight(ppo(folder, data), BIG))

    # The model has 20 tokens.
    assert problems() == problems({"content": "<pad>", "id": 19}) == {}
    assert problems({"content": "<pad>", "id": 20}) == {
        "model.path": "its tokenizer has token 20 ('<pad>'), and the model has 20"
        " tokens (vocab_size) | Give the tokenizer that the model was trained with."
    }
    # It cannot be loaded, which is found where it is.
    assert problems({"id": "twenty"}) == {}
