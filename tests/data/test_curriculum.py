"""Prompts are chosen by the scores of earlier batches, whatever is finished when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.test_prompts import config, sums, write
from verl_ray.config.data import CurriculumConfig
from verl_ray.data.curriculum import Curriculum
from verl_ray.data.cursor import Cursor, Mixture
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import CheckpointError, DataError

OFF = {
    "hard_to": 0.25,
    "hard_share": 1.0,
    "easy_from": 0.75,
    "easy_share": 1.0,
    "solved_from": None,
}


def curriculum(num_rows: int, staleness: int = 0, **settings: float) -> Curriculum:
    chosen = CurriculumConfig.model_validate({**OFF, **settings})
    return Curriculum(chosen, num_rows, seed=1, staleness=staleness)


def train(of: Curriculum, batch: int, means: dict[int, float]) -> None:
    """Train a batch with two responses to each of these rows."""
    rows = np.array(list(means), np.int64)
    ordinals = 1000 * batch + np.arange(len(rows))
    of.note_drawn(ordinals, rows)
    score = np.array(list(means.values()), np.float32)
    group = np.concatenate([ordinals, ordinals])
    # One response scores 0.1 more than the mean, and one 0.1 less.
    both = np.concatenate([score - 0.1, score + 0.1]).astype(np.float32)
    of.note_scores(group, both, ~np.isnan(both))
    of.end_batch(batch)


def accepted(of: Curriculum, rows: int, place: int = 0) -> list[int]:
    return np.flatnonzero(of.accepts(np.arange(rows), place)).tolist()


def test_new_and_middling_prompts_are_always_drawn_and_solved_ones_never() -> None:
    chosen = curriculum(5, hard_share=1e-9, easy_share=1e-9, solved_from=0.9)
    assert accepted(chosen, 5) == [0, 1, 2, 3, 4]
    train(chosen, 0, {0: 0.25, 1: 0.26, 2: 0.75, 3: 0.95})
    chosen.begin_batch(1)
    assert accepted(chosen, 5) == [1, 4]
    assert chosen.metrics() == {
        "curriculum/new": 0.2,
        "curriculum/hard": 0.2,
        "curriculum/easy": 0.2,
        "curriculum/solved": 0.2,
    }
    # The last group of a prompt is the one that counts.
    train(chosen, 1, {3: 0.5, 1: 0.0})
    chosen.begin_batch(2)
    assert accepted(chosen, 5) == [3, 4]


def test_shares_are_those_of_the_settings_and_differ_between_epochs() -> None:
    rows = 20_000
    chosen = curriculum(rows, hard_share=0.2, easy_share=0.5)
    train(chosen, 0, {row: 0.0 if row % 2 else 1.0 for row in range(rows)})
    chosen.begin_batch(1)
    first, second = accepted(chosen, rows), accepted(chosen, rows, place=rows)
    # Six standard deviations of 10,000 draws are 0.024 and 0.03.
    assert sum(row % 2 for row in first) / 10_000 == pytest.approx(0.2, abs=0.024)
    assert sum(not row % 2 for row in first) / 10_000 == pytest.approx(0.5, abs=0.03)
    assert first != second


def test_a_batch_depends_on_scores_that_are_older_than_the_bound() -> None:
    """With a staleness of 2, batch 3 is chosen by the scores of batch 0 alone."""
    chosen = curriculum(4, staleness=2, solved_from=0.9)
    for batch in range(3):
        train(chosen, batch, {batch: 1.0})
    # A batch that is drawn again is chosen as before, whatever was drawn ahead.
    for batch, rows in ((3, [1, 2, 3]), (5, [3]), (4, [2, 3]), (3, [1, 2, 3])):
        chosen.begin_batch(batch)
        assert accepted(chosen, 4) == rows


def test_failed_scores_do_not_count() -> None:
    chosen = curriculum(2, solved_from=0.9)
    chosen.note_drawn(np.array([7, 8]), np.array([0, 1]))
    score = np.array([1, np.nan, np.nan, np.nan], np.float32)
    chosen.note_scores(np.array([7, 7, 8, 8]), score, ~np.isnan(score))
    chosen.end_batch(0)
    chosen.begin_batch(1)
    assert accepted(chosen, 2) == [1]
    assert chosen.metrics()["curriculum/new"] == 0.5


def test_files_and_copies_hold_what_counts_and_what_will(tmp_path: Path) -> None:
    chosen = curriculum(4, staleness=1, solved_from=0.9)
    train(chosen, 0, {0: 1.0})
    train(chosen, 1, {1: 1.0, 2: 0.5})
    chosen.begin_batch(2)
    chosen.write(tmp_path)
    copied = chosen.copy()
    # What happens later is in neither.
    train(chosen, 2, {2: 1.0, 3: 1.0})
    chosen.begin_batch(9)

    stored = curriculum(4, staleness=1, solved_from=0.9)
    stored.read(tmp_path)
    inherited = curriculum(4, staleness=1, solved_from=0.9)
    inherited.restore(copied)
    for other in (stored, inherited):
        assert accepted(other, 4) == [1, 2, 3]
        other.begin_batch(3)
        assert accepted(other, 4) == [2, 3]
    with pytest.raises(CheckpointError, match="scores of 4 rows, and the data have 5"):
        curriculum(5).read(tmp_path)


def test_a_checkpoint_without_scores_begins_anew(tmp_path: Path) -> None:
    chosen = curriculum(2, solved_from=0.9)
    chosen.read(tmp_path)
    assert accepted(chosen, 2) == [0, 1]


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [7, 0, 11, 12]])
def test_draws_depend_on_no_cut(cuts: list[int]) -> None:
    """Ten rows, of which every third is accepted in even epochs, all in odd ones."""

    def accepts(rows: np.ndarray, place: int) -> np.ndarray:
        return (rows % 3 == 0) | (place // 10 % 2 == 1)

    cursor = Cursor(Mixture((10,), (1.0,)), "-", seed=0, shuffle=False)
    drawn = np.concatenate([cursor.draw_accepted(count, accepts) for count in cuts])
    epoch = [0, 3, 6, 9, *range(10)]
    assert drawn.tolist() == (3 * epoch)[:30]
    # Two whole pairs of epochs, and rows 0 and 3 behind two that were passed over.
    assert (cursor.drawn, cursor.passed) == (30, 6 + 6 + 2)
    assert (cursor.epoch, cursor.position) == (4, 4)


def test_streamed_rows_without_use_are_not_waited_for(tmp_path: Path) -> None:
    """All others are solved, so nothing is left to draw."""
    tokenizer = character_tokenizer(tmp_path / "characters", "0123456789+= ")
    data = config(
        shuffle=False, stream_above_gib=0.0, overlong="skip", max_prompt_tokens=4
    )
    records = [
        {"prompt": prompt, "answer": "2"} for prompt in ("1+1=", "1+1+0=", "2+0=")
    ]
    source = PromptSource(
        write(tmp_path, *records), tokenizer, data, seed=0, may_stream=True
    )
    chosen = source.curriculum = curriculum(3, solved_from=0.9)
    drawn = source.next_batch(2)
    assert drawn.num_rows == 2 and source.passed_over == 1
    chosen.note_scores(drawn.group_id, np.ones(2, np.float32), np.ones(2, np.bool_))
    chosen.end_batch(0)
    chosen.begin_batch(1)
    with pytest.raises(DataError, match=r"all 3 rows of .* are solved or without use"):
        source.next_batch(1)


@pytest.mark.parametrize("streams", [False, True])
def test_a_source_passes_solved_prompts_over(tmp_path: Path, streams: bool) -> None:
    tokenizer = character_tokenizer(tmp_path / "characters", "0123456789+= ")
    data = config(shuffle=False, stream_above_gib=0.0 if streams else 1.0)
    source = PromptSource(
        sums(tmp_path, 6), tokenizer, data, seed=0, may_stream=streams
    )
    chosen = source.curriculum = curriculum(source.mixture.num_rows, solved_from=0.9)
    first = source.next_batch(6)
    score = np.array([1, 0, 1, 0, 0.5, 1], np.float32)
    chosen.note_scores(first.group_id, score, np.ones(6, np.bool_))
    chosen.end_batch(0)
    chosen.begin_batch(1)

    second = source.next_batch(4)
    assert second.group_id.tolist() == [6, 7, 8, 9]
    answers = first.answer.texts()
    assert second.answer.texts() == [answers[row] for row in (1, 3, 4, 1)]
    assert (source.drawn, source.passed_over) == (10, 4)

    chosen.note_scores(second.group_id, np.ones(4, np.float32), np.ones(4, np.bool_))
    chosen.end_batch(1)
    chosen.begin_batch(2)
    with pytest.raises(DataError, match="solved_from: all 6 rows of"):
        source.next_batch(1)
