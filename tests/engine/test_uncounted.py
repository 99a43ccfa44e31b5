"""A row of weight 0 in an engine: NaN and infinities in it do not change a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.inputs import ENGINE, OPTIMIZER, POLICY, VALUE, rows_of
from verl_ray.backends.engine import EngineBackend
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.base import EngineSpec, LossReport, StepReport
from verl_ray.engine.build import build_engine
from verl_ray.learning.objectives import Objective
from verl_ray.models.role_model import HeadKind
from verl_ray.models.tiny import make_tiny

COLUMNS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "old_values",
    "returns",
    "teacher_log_probs",
)
SIZES = TinyModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    intermediate_size=16,
    tie_embeddings=True,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uncounted")
    character_tokenizer(folder / "tokenizer", "0123456789+=")
    make_tiny("qwen3", folder / "model", folder / "tokenizer", SIZES, seed=0)
    return folder / "model"


def one_step(
    model: Path, head: HeadKind, objective: Objective, rows: TrainingBatch
) -> tuple[LossReport, StepReport, list[torch.Tensor]]:
    """Return the report of one optimizer step, and the parameters after it."""
    backend = EngineBackend(**ENGINE | {"micro_batch_tokens_per_rank": 40})
    spec = EngineSpec("actor", str(model), head, backend, OPTIMIZER, 10, seed=3)
    engine = build_engine(spec, device=torch.device("cpu"), rank=0, world_size=1)
    report = engine.forward_backward(rows, objective)
    step = engine.optimizer_step()
    names = [parameter.name for parameter in engine.manifest().sent]
    return report, step, [values.clone() for _, values in engine.shards(names)]


def rows_with(bad: float, row: int, weight: float) -> TrainingBatch:
    """Return rows, one of which has this weight and this value in every loss column."""
    rows = rows_of((3, 9, 17, 5))
    place = slice(rows.offsets[row], rows.offsets[row + 1])
    changed = {name: np.array(getattr(rows, name)) for name in COLUMNS}
    for column in changed.values():
        column[place] = bad
    loss_weight = np.array(rows.loss_weight)
    loss_weight[row] = weight
    return rows.replace(**changed, loss_weight=loss_weight)


@pytest.mark.parametrize(("head", "objective"), [("policy", POLICY), ("value", VALUE)])
def test_a_row_of_weight_zero_may_hold_anything(
    model: Path, head: HeadKind, objective: Objective
) -> None:
    report, step, weights = one_step(model, head, objective, rows_with(0.5, 2, 0.0))
    for bad in (np.nan, np.inf):
        found, other_step, others = one_step(
            model, head, objective, rows_with(bad, 2, 0.0)
        )
        assert (found, other_step) == (report, step) and step.skipped is None
        assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


@pytest.mark.parametrize(("head", "objective"), [("policy", POLICY), ("value", VALUE)])
def test_a_nan_in_a_row_that_counts_skips_the_step(
    model: Path, head: HeadKind, objective: Objective
) -> None:
    report, step, _ = one_step(model, head, objective, rows_with(np.nan, 2, 0.25))
    assert step.skipped is not None and "is not finite on rank 0" in step.skipped
    assert np.isnan(report.loss)
