"""A proof holds for families that are computed, and names what is broken in others."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

from scripts.tiny_families import ALONE, PACKED, tiny_config
from verl_ray.columns.batch import offsets_of
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine import packed_engine
from verl_ray.engine.micro_batches import Packing, pack_rows
from verl_ray.engine.single import plain_engine
from verl_ray.errors import EngineError, ModelError
from verl_ray.models import attention, role_model
from verl_ray.models.conversions import checkpoint_names
from verl_ray.models.names import CheckpointNames
from verl_ray.models.state_kernels import installed_kernels, require_kernels
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.proofs import border_proof, rollout_proof
from verl_ray.proofs.border_proof import STATEMENTS
from verl_ray.proofs.claims import Claim
from verl_ray.proofs.cut_model import MOST_PARAMETERS, cut_model, random_model
from verl_ray.proofs.proof import Proof, config_of, prove
from verl_ray.proofs.rows import LENGTHS

SLOW = pytest.mark.slow
FAST = ("gemma3_text", "mixtral")


def proof_of(family: str, **changes: Any) -> Proof:
    return prove(tiny_config(family, **changes), rollouts=False)


def claim(proof: Proof, statement: str) -> Claim:
    (found,) = (each for each in proof.claims if each.statement == statement)
    return found


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in FAST else SLOW) for family in PACKED],
)
def test_packed_rows_are_computed_as_single_ones(family: str) -> None:
    proof = proof_of(family)
    assert [str(each) for each in proof.claims if not each.holds] == []
    engine = proof.engine
    assert engine.trains and engine.packs_rows and engine.has_values
    assert len(proof.claims) == 7 and json.dumps(proof.as_json())


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "lfm2" else SLOW) for each in ALONE],
)
def test_a_state_that_leaks_is_named_and_rows_of_one_length_are_computed(
    family: str,
) -> None:
    proof = proof_of(family)
    layer = {"lfm2": "conv", "qwen3_next": "linear_attn"}.get(family, "mamba")
    for statement in ("log-probs of packed rows", "no row sees another row"):
        broken = claim(proof, statement)
        assert broken.number is not None and broken.number > 0.5
        assert broken.where == f"layers.0.{layer}"
    assert not proof.engine.packs_rows and proof.engine.trains
    assert claim(proof, "log-probs of rows of one length").holds


def test_three_equal_positions_of_a_word_are_one_position() -> None:
    proof = proof_of("qwen3_vl")
    assert (proof.whole, proof.family) == ("qwen3_vl", "qwen3")
    assert proof.engine.trains and proof.engine.packs_rows
    assert claim(proof, "hidden states of qwen3_vl_text").holds


def test_logits_that_the_whole_model_makes_otherwise_are_named() -> None:
    """The class of Gemma 3 with a vision tower leaves out the cap of its text part."""
    config = tiny_config("gemma3")
    config.text_config.final_logit_softcapping = 5.0
    proof = prove(config, rollouts=False)
    assert (proof.whole, proof.family) == ("gemma3", "gemma3_text")
    (broken,) = (each for each in proof.claims if not each.holds)
    assert broken.statement == "logits of the whole model" and broken.number == 5.0
    assert not proof.engine.trains and "softcap=5.0" in broken.where


# ------------------------------------------------------------------ borders of rows


def row_by_row(function: Callable[..., Any], axis: int) -> Callable[..., Any]:
    """Return a function of torch that obeys borders, as kernels do on a GPU."""

    def computed(*tensors: Any, **others: Any) -> Any:
        index, bounds = others.pop("seq_idx", None), others.pop("cu_seqlens", None)
        if index is None and bounds is None:
            return function(*tensors, **others)
        if bounds is None:
            lengths = torch.bincount(index[0])
            assert index.dtype == torch.int32
            rows = np.repeat(range(len(lengths)), lengths)
            assert index.tolist() == [rows.tolist()]
            bounds = F.pad(lengths.cumsum(0), (1, 0))
        assert len(bounds) == 2 or sorted(bounds.diff().tolist()) == sorted(LENGTHS)

        def part(value: Any, row: slice) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() < 3:
                return value
            return value.transpose(axis, 0)[row].transpose(axis, 0)

        results = []
        for start, end in itertools.pairwise(bounds.tolist()):
            row = slice(start, end)
            named = {name: part(value, row) for name, value in others.items()}
            results.append(function(*(part(each, row) for each in tensors), **named))
        if isinstance(results[0], tuple):
            return torch.cat([result for result, _ in results], axis), None
        return torch.cat(results, axis)

    return computed


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("granitemoehybrid", {"causal_conv1d_fn": 2, "mamba2_chunk_scan": 1}),
        pytest.param(
            "qwen3_next",
            {"causal_conv1d_fn": 2, "torch_chunk_gated_delta_rule": 1},
            marks=SLOW,
        ),
    ],
)
def test_kernels_that_take_the_borders_of_rows_pack_them(
    family: str,
    kernels: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(tiny_config(family), seed=1)
    model.save_pretrained(tmp_path)
    character_tokenizer(tmp_path, "0123456789+=")

    def numbers() -> dict[str, float]:
        return border_proof.differences(tmp_path, has_experts=True, on_gpu=False)

    leaking = numbers()
    assert all(leaking[name] > bound for name, (_, bound) in STATEMENTS.items())

    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name, axis in kernels.items():
        monkeypatch.setattr(code, name, row_by_row(getattr(code, name), axis))
    assert max(numbers().values()) < 1e-5

    proof = proof_of(family)
    assert [str(each) for each in proof.claims if not each.holds] == []
    assert proof.packs_rows and proof.engine.packs_rows


@pytest.mark.processes
def test_a_driver_without_a_gpu_leaves_kernels_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fla.py").write_text("raise AssertionError('it needs a GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_kernels() == ("fla",)
    proof = proof_of("lfm2")
    assert not proof.packs_rows and proof.engine.trains
    assert proof.border_claims == []
    assert not importlib.util.find_spec("fla")

    # A rank that should pack rows by kernels has them, and a GPU, or does not start.
    require_kernels((), device="cpu", path="m")
    with pytest.raises(EngineError, match="this rank computes on a cpu"):
        require_kernels(("fla",), device="cpu", path="m")
    with pytest.raises(EngineError, match="mamba_ssm is not installed here"):
        require_kernels(("fla", "mamba_ssm"), device="cuda", path="m")


# --------------------------------------------------------------- broken on purpose


def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attention of layer 1 see all tokens before, whatever row they are of."""
    attend = attention.attend

    def leaking(module: Any, query: Any, *rest: Any, layout: Any, **others: Any) -> Any:
        if module.layer_idx == 1:
            tokens = offsets_of([query.shape[2]])
            layout = attention.plan_layout(tokens, query.device, query.dtype)
        return attend(module, query, *rest, layout=layout, **others)

    monkeypatch.setattr(attention, "attend", leaking)


def second_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the feed-forward of every layer read all tokens before, beside attention."""
    computed = Gemma3MLP.forward

    def mixing(self: Any, hidden: Any) -> Any:
        return computed(self, hidden) + 0.1 * hidden.cumsum(1)

    monkeypatch.setattr(Gemma3MLP, "forward", mixing)


def other_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin to count positions anew where no row begins.

    Counting on over rows would change nothing: rotary positions are relative.
    """

    def counted(*arguments: Any, **options: Any) -> Packing:
        packing = pack_rows(*arguments, **options)
        positions = np.arange(len(packing.tokens.tokens)) % 9
        return replace(packing, tokens=replace(packing.tokens, positions=positions))

    monkeypatch.setattr(packed_engine, "pack_rows", counted)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend
    monkeypatch.setattr(
        attention,
        "attend",
        lambda *tensors, sliding_window=None, **others: attend(*tensors, **others),
    )


def not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attention of layer 1 compute a NaN for the last token but one."""
    attend = attention.attend

    def broken(module: Any, *tensors: Any, **others: Any) -> Any:
        outputs, weights = attend(module, *tensors, **others)
        if module.layer_idx == 1:
            outputs = outputs.clone()
            outputs[:, -2] = float("nan")
        return outputs, weights

    monkeypatch.setattr(attention, "attend", broken)


def swapped_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give expert 0 the down projection of expert 1, and the other way round."""

    def swapped(model: Any) -> CheckpointNames:
        parts = dict(checkpoint_names(model).parts)
        name = "model.layers.0.mlp.experts.down_proj"
        first, second, *rest = parts[name]
        parts[name] = (
            replace(first, name=second.name),
            replace(second, name=first.name),
            *rest,
        )
        return CheckpointNames(parts)

    monkeypatch.setattr(role_model, "checkpoint_names", swapped)


def renamed_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(model: Any) -> CheckpointNames:
        parts = dict(checkpoint_names(model).parts)
        name = "model.layers.1.mlp.experts.down_proj"
        first, *rest = parts[name]
        parts[name] = (replace(first, name="model.layers.1.w2"), *rest)
        return CheckpointNames(parts)

    monkeypatch.setattr(role_model, "checkpoint_names", renamed)


def first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainer keep the weights of layer 1 that it has read first."""
    read = CheckpointReader.read
    kept: dict[str, Any] = {}

    def keeping(self: CheckpointReader, name: str, box: Any) -> Any:
        tensor = read(self, name, box)
        return kept.setdefault(name, tensor) if ".layers.1." in name else tensor

    monkeypatch.setattr(CheckpointReader, "read", keeping)


@pytest.mark.parametrize(
    ("family", "break_it", "statement", "where"),
    [
        ("gemma3_text", one_row, "no row sees another row", "layers.1.self_attn"),
        ("gemma3_text", second_path, "no row sees another row", "layers.0.mlp"),
        ("gemma3_text", other_borders, "log-probs of packed rows", "rotary_emb"),
        ("gemma3_text", not_a_number, "log-probs of packed rows", "layers.1.self_attn"),
        ("gemma3_text", no_window, "log-probs of packed rows", "layers.0.self_attn"),
        (
            "mixtral",
            swapped_experts,
            "log-probs of packed rows",
            "layers.0.mlp.experts",
        ),
        ("mixtral", renamed_tensor, "log-probs of packed rows", "model.layers.1.w2"),
        ("gemma3_text", first_weights, "an adapter", "layers.1.self_attn.q_proj"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_broken_is_named_with_its_layer(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    break_it: Callable[[pytest.MonkeyPatch], None],
    statement: str,
    where: str,
) -> None:
    break_it(monkeypatch)
    proof = proof_of(family)
    broken = claim(proof, statement)
    assert not broken.holds and where in broken.where, broken
    assert proof.engine.packs_rows == (statement == "an adapter")


def test_a_tie_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    built = role_model.build_role_model

    def untied(*arguments: Any, **settings: Any) -> role_model.RoleModel:
        model = built(*arguments, **settings)
        monkeypatch.setattr(model.hf, "tie_weights", lambda *_, **__: None)
        return model

    from verl_ray.engine import module_engine

    monkeypatch.setattr(module_engine, "build_role_model", untied)
    broken = claim(
        proof_of("gemma3_text", tie_word_embeddings=True), "log-probs of packed rows"
    )
    assert broken.number is None and "lm_head.weight" in broken.where


# --------------------------------------------------------------------- the cut model


def test_a_cut_model_has_two_layers_of_each_kind_and_few_words() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = tiny_config(
        "gemma3_text", num_hidden_layers=24, layer_types=kinds * 4, vocab_size=50_000,
        sliding_window=1024,
    )  # fmt: skip
    cut, model = cut_model(config, seed=1)
    assert cut.layer_types == [*kinds[:2], *kinds[-1:] * 2]
    assert (cut.vocab_size, cut.sliding_window, cut.hidden_size) == (256, 8, 128)
    assert len(model.model.layers) == cut.num_hidden_layers == 4


def test_where_two_layers_of_each_kind_are_too_large_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two of each end with the second layer of attention, the 13th.
    config = tiny_config("jamba", num_hidden_layers=16, attn_layer_period=8, attn_layer_offset=4)  # fmt: skip
    cut, model = cut_model(config, seed=1)
    assert cut.num_hidden_layers == 13
    parameters = sum(value.numel() for value in model.parameters())
    monkeypatch.setattr("verl_ray.proofs.cut_model.MOST_PARAMETERS", parameters - 1)
    cut, _ = cut_model(config, seed=1)
    assert cut.num_hidden_layers == 5
    monkeypatch.setattr("verl_ray.proofs.cut_model.MOST_PARAMETERS", 1)
    with pytest.raises(ModelError, match=r"with 5 of its 16 layers .* it has 0\.0 b"):
        cut_model(config, seed=1)


@pytest.mark.parametrize(
    ("family", "sizes", "heads"),
    [
        ("mistral", {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                     "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": None}, (16, 2, 128)),
        ("mixtral", {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
                     "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 64}, (12, 2, 32)),
    ],
)  # fmt: skip
def test_a_model_of_any_size_is_cut_to_one_that_fits(
    family: str, sizes: dict[str, Any], heads: tuple[int, int, int]
) -> None:
    cut, model = cut_model(tiny_config(family, **sizes), seed=1)
    assert cut.num_hidden_layers == 2 and cut.hidden_size == sizes["hidden_size"]
    assert (cut.num_attention_heads, cut.num_key_value_heads, cut.head_dim) == heads
    assert cut.intermediate_size == 256
    assert sum(value.numel() for value in model.parameters()) < MOST_PARAMETERS / 5


GRANITE_H_SMALL: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100_352,
    "num_local_experts": 72, "num_experts_per_tok": 10, "num_hidden_layers": 40,
    "mamba_n_heads": 128, "mamba_d_state": 128,
    "layer_types": (["linear_attention"] * 9 + ["full_attention"]) * 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "layers"),
    [
        # Two of each by their indices.
        ("granitemoehybrid", GRANITE_H_SMALL, 4),
        # One of each up to the first layer of attention: periods say where it is.
        ("jamba", {}, 5),
        # Each block counts as two layers.
        ("longcat_flash", {}, 4),
    ],
)
def test_a_hybrid_of_real_size_is_cut_to_one_that_fits(
    family: str, sizes: dict[str, Any], layers: int
) -> None:
    cut, model = cut_model(CONFIG_MAPPING[family](**sizes), seed=1)
    assert cut.num_hidden_layers == layers
    assert sum(value.numel() for value in model.parameters()) < MOST_PARAMETERS


@pytest.mark.slow
def test_the_rounding_of_a_wide_model_is_no_difference() -> None:
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
    # The range is that of published models.
    proof = proof_of("mistral", head_dim=128, initializer_range=0.02, **sizes)
    assert [str(each) for each in proof.claims if not each.holds] == []
    numbers = {each.statement: each.number for each in proof.claims}
    assert (numbers["an adapter"] or 1.0) < 3e-5  # 1e-5 here


def test_windows_and_chunks_are_shorter_than_the_rows() -> None:
    config = tiny_config(
        "llama4_text", attention_chunk_size=8192, num_experts_per_tok=1,
        intermediate_size_mlp=128, num_hidden_layers=4, interleave_moe_layer_step=2,
    )  # fmt: skip
    proof = prove(config, rollouts=False)
    assert not proof.engine.trains
    assert "layers.0.self_attn" in str(proof.engine.failure)


def test_an_error_of_a_family_is_named_with_its_layer_and_statement() -> None:
    """An indexer chooses tokens by a mask, which packed rows do not have."""
    proof = proof_of("deepseek_v32")
    assert not proof.engine.trains
    for word in ("layers.0.self_attn (DeepseekV32Attention)", "`attention_mask[:"):
        assert word in str(proof.engine.failure)


@pytest.mark.parametrize("family", ["t5", "qwen2_vl"])
def test_what_is_no_decoder_is_refused_in_words(family: str) -> None:
    with pytest.raises(ModelError, match=f"of a {family}|a {family} model"):
        prove(CONFIG_MAPPING[family](), rollouts=False)


def test_a_directory_without_a_configuration_that_is_known_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        config_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ModelError, match=r"transformers .* does not read"):
        config_of(str(tmp_path))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    [
        ("mixtral", "auto", "float32"),
        ("gemma3_text", "auto", "float32"),
        ("granitemoehybrid", "auto", "float32"),
        # Loaded past the count of a reload, or by loaders without a name.
        ("gpt_oss", "auto", "float32"),
        ("minimax_m2", "auto", "float32"),
        # Right since this project corrects what vLLM computes on a CPU.
        ("deepseek_v3", "auto", "float32"),
        ("lfm2", "auto", "float32"),
        ("ernie4_5_moe", "auto", "float32"),
        ("cohere2", "transformers", "float32"),
        ("qwen3_next", "auto", "bfloat16"),
    ],
)
def test_vllm_computes_the_same_load_after_load(
    family: str, implementation: str, dtype: str
) -> None:
    proof = prove(tiny_config(family), rollouts=True)
    assert proof.rollouts is not None
    assert proof.rollouts.model_impl == implementation
    assert proof.rollouts.dtype == dtype
    agreeing = proof.rollout_claims[-3:]
    assert all(each.statement.startswith("log-probs of vLLM") for each in agreeing)
    numbers = [each.number for each in agreeing if each.number is not None]
    assert len(numbers) == 3
    assert max(numbers) < (1e-4 if dtype == "float32" else 0.5)


def test_a_loader_that_keeps_the_first_weights_is_found_in_bfloat16_too(
    tmp_path: Path,
) -> None:
    _, model = cut_model(tiny_config("qwen3_next"), seed=1)
    model.save_pretrained(tmp_path)
    trainer = plain_engine(tmp_path, tokens=128, balance=0.0, packs_rows=False)
    first, second = (
        rollout_proof._publication(trainer, tmp_path, version, rounded=True)
        for version in (0, 1)
    )
    apart = np.abs(
        np.concatenate(first.probe.log_probs) - np.concatenate(second.probe.log_probs)
    ).mean()
    assert second.rounding is not None
    assert 0.01 < second.rounding < rollout_proof.ROUNDING * second.rounding < apart


def test_keys_that_transformers_does_not_know_stay_in_a_cut_model_and_in_an_export(
    tmp_path: Path,
) -> None:
    tiny_config("lfm2", num_hidden_layers=8, layer_types=["conv"] * 8).save_pretrained(
        tmp_path
    )
    file = tmp_path / "config.json"
    unknown = {"some_rule": "of vLLM", "some_pattern": [0, 1, 0, 1, 0, 1, 0, 1]}
    file.write_text(json.dumps(json.loads(file.read_text()) | unknown))
    cut, model = cut_model(config_of(str(tmp_path)), seed=1)
    assert cut.num_hidden_layers == 2
    model.save_pretrained(tmp_path / "cut")
    character_tokenizer(tmp_path / "cut", "0123456789")
    trainer = plain_engine(tmp_path / "cut", tokens=128, balance=None, packs_rows=False)
    trainer.export(str(tmp_path / "export"))
    kept = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (kept["some_rule"], kept["some_pattern"]) == ("of vLLM", [0, 1])
