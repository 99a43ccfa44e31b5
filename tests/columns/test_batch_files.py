"""A batch that is read from a file is the one that was written, bit by bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import log_probs_of, rollouts_of
from verl_ray.columns.batch import Batch, Ragged, read_batch, write_batch
from verl_ray.columns.stages import LogProbs, Rollouts, Scores, versions_of


def bits(batch: Batch) -> dict[str, object]:
    """Type, shape and bytes of every column."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(batch):
        column = getattr(batch, field.name)
        if isinstance(column, Ragged):
            parts = [column.values, column.offsets]
        else:
            parts = [] if column is None else [column]
        found[field.name] = [(part.dtype, part.shape, part.tobytes()) for part in parts]
    return found


def written(folder: Path, batch: Batch) -> Batch:
    path = folder / "00000.npz"
    write_batch(path, batch)
    return read_batch(path, type(batch))


def rich(*responses: int, seed: int = 0) -> Rollouts:
    """Rollouts with random numbers and texts in every column that may have any."""
    rng = np.random.default_rng(seed)
    rollouts = rollouts_of(
        responses, groups=[row // 2 for row in range(len(responses))]
    )
    spans = Ragged.of_rows(
        [
            np.array([[2, version], [2 + count // 2, version + 1]]) if count else np.empty((0, 2), int)
            for version, count in enumerate(responses)
        ],
        np.int64,
    )  # fmt: skip
    return rollouts.replace(
        tokens=rng.integers(0, 1 << 20, rollouts.num_tokens).astype(np.int32),
        rollout_log_probs=rng.normal(size=rollouts.num_tokens).astype(np.float32),
        version_spans=spans,
        **versions_of(spans),
        answer=Ragged.of_texts(["", "ä", "0\n"] * len(responses)).select(
            np.arange(len(responses))
        ),
    )


def test_every_column_comes_back(tmp_path: Path) -> None:
    rollouts = rich(3, 0, 5, 1)
    read = written(tmp_path, rollouts)
    assert isinstance(read, Rollouts) and bits(read) == bits(rollouts)
    assert read.answer.texts() == ["", "ä", "0\n", ""]
    assert read.version_spans.values.shape == (6, 2)


def test_odd_numbers_come_back(tmp_path: Path) -> None:
    numbers = np.array([np.nan, -0.0, np.inf, 1e-45, -3.5], np.float32)
    # This NaN has a payload of its own.
    numbers[0] = np.array([0x7FC12345], np.uint32).view(np.float32)[0]
    scores = Scores.ok(numbers)
    assert bits(written(tmp_path, scores)) == bits(scores)


def test_a_column_without_values_is_left_out(tmp_path: Path) -> None:
    log_probs = log_probs_of(rollouts_of([2, 1]), [-1.0, -2.0, -3.0])
    read = written(tmp_path, log_probs)
    assert isinstance(read, LogProbs) and read.entropy is None
    assert bits(read) == bits(log_probs)
    entropy = log_probs.log_probs + 1
    with_entropy = log_probs.replace(entropy=entropy)
    assert bits(written(tmp_path, with_entropy)) == bits(with_entropy)


def test_no_rows_are_rows_too(tmp_path: Path) -> None:
    none = rich(2, 3).select(np.array([], np.int64))
    assert bits(written(tmp_path, none)) == bits(none)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_any_rows_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, responses: list[int], data: st.DataObject
) -> None:
    rollouts = rich(*responses, seed=len(responses))
    rows = data.draw(st.lists(st.integers(0, len(responses) - 1), min_size=1))
    part = rollouts.select(rows)
    assert bits(written(tmp_path_factory.mktemp("batch"), part)) == bits(part)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "00000.npz"
    np.savez(path, score=np.array([print], object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read_batch(path, Scores)
