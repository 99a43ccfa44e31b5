"""vLLM whose loader keeps the first weights is found out, and the weights are named."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.tiny_families import tiny_config
from verl_ray.processes.trial import try_in_child
from verl_ray.proofs import rollout_proof
from verl_ray.proofs.proof import prove


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "tensors", "where"),
    [
        ("llama", "layers.1.mlp.down_proj", "vLLM keeps model.layers.1.mlp.down_proj.weight of load 1"),
        ("mixtral", "experts", "vLLM keeps model.layers.*.mlp.experts.* of load 1"),
        ("llama", "", "those of version 0"),
    ],
)  # fmt: skip
def test_a_loader_that_keeps_the_first_weights_is_named(
    monkeypatch: pytest.MonkeyPatch, family: str, tensors: str, where: str
) -> None:
    def try_it(module: str, fields: dict[str, Any], deadline_s: float) -> Any:
        assert module == rollout_proof.__name__
        fields = fields | {"keep_first": tensors}
        return try_in_child("tests.proofs.broken_vllm", fields, deadline_s)

    monkeypatch.setattr(rollout_proof, "try_in_child", try_it)
    proof = prove(tiny_config(family), rollouts=True)
    first, second = proof.rollout_claims[:2]
    assert first.statement == "log-probs of vLLM after load 1" and first.holds
    assert not second.holds and where in second.where
    assert proof.rollouts is None
