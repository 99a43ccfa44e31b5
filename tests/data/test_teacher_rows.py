"""A teacher's responses as rows: its own tokens, and what it says in their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.configuration import compose
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.teacher_rows import TeacherSource
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import DataError


def record(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": [5, 6],
        "response_tokens": [7, 1],
        "top_tokens": [[7, 3, 4], [1, 7, 2]],
        "top_log_probs": [[-0.5, -1.5, -3], [-0.25, -2, -4]],
        **changes,
    }


def source(tmp_path: Path, *records: dict[str, Any], top_k: int = 2) -> TeacherSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    character_tokenizer(tmp_path / "tokenizer", ALPHABET)
    config = compose("sft", ["model.path=m", f"data.train_path={path}", "data.validation_path=null",
                             "data.shuffle=false", "run.evaluate_every=0"])  # fmt: skip
    return TeacherSource(
        str(path), load_tokenizer(tmp_path / "tokenizer"), config.data, max_tokens=8, top_k=top_k, seed=0
    )  # fmt: skip


def test_rows_have_the_teachers_tokens_in_the_places_of_the_response(
    tmp_path: Path,
) -> None:
    short = record(response_tokens=[2], top_tokens=[[2, 9]], top_log_probs=[[-1, -2]])
    rows = source(tmp_path, record(), short).next_batch(2)
    assert rows.tokens.tolist() == [5, 6, 7, 1, 5, 6, 2]
    assert rows.offsets.tolist() == [0, 4, 7]
    response = [False, False, True, True, False, False, True]
    assert rows.response_mask.tolist() == response
    assert rows.candidates is not None and rows.teacher_log_probs is not None
    assert rows.candidates[response].tolist() == [[7, 3], [1, 7], [2, 9]]
    np.testing.assert_array_equal(
        rows.teacher_log_probs[response], np.float32([[-0.5, -1.5], [-0.25, -2], [-1, -2]])
    )  # fmt: skip
    assert not rows.candidates[~np.array(response)].any()
    # The loss is the mean over all response tokens.
    np.testing.assert_allclose(rows.loss_weight, 1 / 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_tokens": None}, "top_tokens is null"),
        ({"response_tokens": []}, "at least one of each"),
        ({"prompt_tokens": ["a"]}, "prompt_tokens is list"),
        ({"prompt_tokens": [0.5]}, "prompt_tokens is list"),
        ({"top_tokens": [[7, 3, 4], [1]]}, "equally many each"),
        ({"top_tokens": [[7, 3, 4]]}, "same length for each response token"),
        ({"top_log_probs": [[-1], [-1]]}, "same length for each response token"),
        ({"response_tokens": [7, 2**32 + 5]}, "response_tokens has 7 to 4294967301"),
        ({"top_log_probs": [[0.5, 0.2, 0.1], [-1, -2, -3]]}, "top_log_probs has 0.5"),
        ({"top_log_probs": [[float("nan"), -1, -2], [-1, -2, -3]]}, "top_log_probs has nan"),
        ({"top_log_probs": [[-2, -1, -3], [-1, -2, -3]]}, "are not sorted"),
        ({"response_tokens": [7, 900]}, "token 900, where the tokenizer .* another vocabulary"),
        ({"response": "something else"}, "of 'something else', where .* another vocabulary"),
    ],
)  # fmt: skip
def test_a_record_that_fits_no_student_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        source(tmp_path, record(**changes))


def test_a_file_with_fewer_tokens_than_are_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sft.top_k=3, or generate --top-logprobs 5"):
        source(tmp_path, record(), top_k=5)
