"""The rows of a proof."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import TrainingBatch
from verl_ray.proofs.cut_model import VOCABULARY

LENGTHS = (21, 34, 13, 13)
"""Tokens of the rows: longer than a window, two alike, in two buckets of attention."""


def random_rows() -> list[Tensor]:
    """Return int64 tokens of each row."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator)
        for length in LENGTHS
    ]


def batch_of(rows: Sequence[Tensor]) -> TrainingBatch:
    """Return rows to learn from: every token after the first, with weight 1."""
    offsets = offsets_of([len(row) for row in rows])
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False
    return TrainingBatch(
        offsets=offsets,
        tokens=torch.cat(list(rows)).numpy().astype(np.int32),
        response_mask=mask,
        loss_weight=np.ones(len(rows), np.float32),
    )
