"""The command by which a mixture of experts learns on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.experts import imitate, learn


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.vllm
def test_whole_experts_go_from_two_ranks_to_two_ranks(tmp_path: Path) -> None:
    numbers = learn("megatron", tmp_path, imitate(tmp_path, 40), steps=4)
    # Every sync was compared with what the trainers compute.
    assert 0 < numbers["probe_difference"] < 1e-4
