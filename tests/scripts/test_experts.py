"""The command by which a mixture of experts learns on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.experts import CLOSE, imitate, learn


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.vllm
def test_whole_experts_go_from_two_ranks_to_two_ranks(tmp_path: Path) -> None:
    numbers = learn("megatron", tmp_path, imitate(tmp_path, 40), steps=4)
    # Every sync was compared with what the trainers compute.
    assert 0 < numbers["probe_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.vllm
def test_replay_lowers_the_mismatch_where_rounding_changes_choices(
    tmp_path: Path,
) -> None:
    shared = imitate(tmp_path, 60, router_scale=CLOSE)
    rounded = ("rollout.dtype=bfloat16", "rollout.sync.probe_tolerance=8")
    chosen_anew, replayed = (
        learn("engine", tmp_path / name, shared, 8, *rounded, f"rollout.{replay}")
        for name, replay in (
            ("anew", "routing_replay=false"),
            ("again", "routing_replay=true"),
        )
    )
    assert 0 < replayed["k3"] < 0.75 * chosen_anew["k3"]
