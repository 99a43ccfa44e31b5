"""Families that no list names learn in whole runs, and vLLM samples from what they learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.family_runs import SETTINGS, learn

FAST = ("mixtral", "granitemoehybrid")
"""Experts on two ranks, and layers with states, whose rows are of one length."""

IN_ALL = ("gemma3", "gpt_oss", "qwen3_next")
"""An adapter of a model that sees images, sinks, and gated delta nets, which vLLM
computes on a CPU in bfloat16 alone."""


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.parametrize(
    "family",
    [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in IN_ALL)],
)
def test_two_steps_are_learned_and_every_sync_is_verified(
    tmp_path: Path, family: str
) -> None:
    # A cluster of its own: no other test takes a part of its cores.
    replay = ("rollout.routing_replay=true",) if family == "mixtral" else ()
    steps = learn(family, tmp_path, *replay)
    assert len(steps) == 2
    for step in steps:
        rounding = 1.0 if family == "qwen3_next" else 1e-3
        assert step["weight_sync/probe_difference"] < rounding
        assert step["actor/grad_norm"] > 0
        # In float32 sampler and trainer choose and compute the same; the sampler of
        # Qwen3-Next is in bfloat16, and 0.10 nats were measured.
        assert step["rollout_corr/k3_kl"] < (0.2 if rounding == 1.0 else 1e-6)


def test_the_families_of_the_documents_are_those_of_the_command() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "models.md").read_text()
    table = page.partition("| vLLM after a sync |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == list(SETTINGS)
