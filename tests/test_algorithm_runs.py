"""Real runs of algorithms that choose tokens from whole mini-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.algorithm_runs import problem, run
from tests.controllers.runs import Inputs, make_inputs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

ADDITIONS = (
    "algorithm.entropy_share=0.5", "algorithm.positive_nll=0.1", "algorithm.advantage_clip=1.0",
    "algorithm.negative_drift=0.5", "algorithm.entropy_target=1.0", "algorithm.entropy_step=0.005",
    "algorithm.entropy_max=0.01", "algorithm.cov_share=0.1", "actor.mini_batch_size=16",
)  # fmt: skip
METRICS = (
    "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/selected", "actor/passed_over",
    "actor/positive_nll",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_two_ranks_choose_and_learn_as_one(inputs: Inputs, tmp_path: Path) -> None:
    alone = run(None, inputs, tmp_path / "alone", "kl_cov", "engine", *ADDITIONS)
    shared = run(
        None, inputs, tmp_path / "shared", "kl_cov", "fsdp", "actor.num_ranks=2", *ADDITIONS
    )  # fmt: skip
    for lines in (alone, shared):
        assert problem(lines, 2) is None
    # The second step samples from policies that differ by rounding.
    for name in METRICS:
        assert shared[0][name] == pytest.approx(alone[0][name], rel=1e-3), name
    # A tenth of the tokens are chosen, and half of them bear the policy loss.
    assert alone[0]["actor/selected"] == pytest.approx(0.1, abs=0.02)
    assert alone[0]["actor/passed_over"] == pytest.approx(0.5, abs=0.02)
    # The entropy of an untrained model is above the target, so the bonus is off then.
    assert alone[1]["actor/entropy_coefficient"] == 0
