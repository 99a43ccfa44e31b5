"""Ranks that share a model agree with transformers; what is broken in one is named."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from controllers.commands import prove as command
from scripts.tiny_families import tiny_config
from verl_ray.processes.trial import try_in_child
from verl_ray.proofs import rank_proof
from verl_ray.proofs.proof import Proof, prove

pytestmark = pytest.mark.ranks


def broken_in_children(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def try_it(module: str, fields: dict[str, Any], deadline_s: float) -> Any:
        assert module == rank_proof.__name__
        return try_in_child(
            "tests.proofs.broken_ranks", fields | {"broken": how}, deadline_s
        )

    monkeypatch.setattr(rank_proof, "try_in_child", try_it)


prove_with_ranks = functools.partial(prove, rollouts=False, ranks=True)


def failing(proof: Proof) -> dict[str, str]:
    return {each.statement: each.where for each in proof.claims if not each.holds}


def test_gradients_that_ranks_do_not_sum_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_in_children(monkeypatch, "averaged_gradients")
    tiny_config("gpt_oss").save_pretrained(tmp_path)
    assert command.main([str(tmp_path), "--no-rollouts"]) == 0
    printed = capsys.readouterr().out
    assert "ok   tensors on 2 ranks of fsdp: 0.0e+00 (at most 0e+00)" in printed
    assert "ok   log-probs on 2 ranks of fsdp: " in printed
    # The model can be trained all the same, on other ranks.
    (line,) = (line for line in printed.splitlines() if line.startswith("  no "))
    assert "gradients on 2 ranks of fsdp" in line and "model.layers.1." in line
    assert "Ranks of fsdp do not agree with it" in printed
    assert "megatron has no place for it: backend=megatron: the model is a" in printed


@pytest.mark.slow
def test_a_slice_that_a_rank_reads_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_in_children(monkeypatch, "other_slice")
    name = "model.layers.1.self_attn.o_proj.weight"
    found = failing(prove_with_ranks(tiny_config("llama")))
    assert found["tensors on 2 ranks of fsdp"] == name
    assert "log-probs on 2 ranks of fsdp" in found
    # One rank of megatron reads all rows, and two share the columns.
    assert not any("1 rank" in statement for statement in found)
    assert found["tensors on 2 ranks of megatron"] == name


@pytest.mark.slow
def test_the_rank_that_fails_first_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_in_children(monkeypatch, "dead_rank")
    found = failing(prove_with_ranks(tiny_config("mistral")))
    # The other one says that its peer has closed the connection.
    assert found["log-probs on 2 ranks of fsdp"].endswith("has no more memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid"],
)
def test_ranks_of_fsdp_agree(family: str) -> None:
    fsdp, megatron = prove_with_ranks(tiny_config(family)).ranks
    assert (fsdp.backend, megatron.backend) == ("fsdp", "megatron")
    assert fsdp.agrees and len(fsdp.claims) == 3
    assert megatron.agrees == (not megatron.no_place)


@pytest.mark.slow
def test_ranks_of_megatron_share_matrices_and_experts() -> None:
    proof = prove_with_ranks(tiny_config("qwen3_moe"))
    megatron = proof.ranks[1]
    assert megatron.agrees and len(megatron.claims) == 6 and not failing(proof)


@pytest.mark.slow
def test_a_model_that_two_ranks_cannot_share_has_a_place_on_one() -> None:
    proof = prove_with_ranks(tiny_config("llama", num_key_value_heads=1))
    megatron = proof.ranks[1]
    assert len(megatron.claims) == 3 and not failing(proof)
    assert megatron.no_place.startswith("tensor_parallel=2: it must divide")
