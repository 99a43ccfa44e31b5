"""Responses with labels: rows as rollouts would be, and prompts with other responses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_preferences import FILES, spelt
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.data import DataSet, PreferenceDataConfig
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.records import read_records, unpaired_reading
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.data.unpaired import UnpairedSource, with_next_responses
from verl_ray.errors import DataError

GOOD = {"prompt": "1+1=", "response": "2", "label": True}
BAD = {"prompt": "9+9=", "response": "19", "label": False}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
EMPTY = {**BAD, "response": " "}
USER, AGAIN = ({"role": "user", "content": text} for text in ("1+1?", "And 2+2?"))
TWO, FOUR = ({"role": "assistant", "content": text} for text in ("2", "4"))


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), ALPHABET)


def source(
    folder: Path,
    tokenizer: Any,
    *records: dict[str, object],
    max_tokens: int = 64,
    may_stream: bool = False,
    **data: object,
) -> UnpairedSource:
    path = folder / "responses.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        **FILES,
        "apply_chat_template": False,
        "special_tokens": "allow",
        "unusable": "refuse",
        **data,
    }
    config = PreferenceDataConfig.model_validate(values)
    return UnpairedSource(
        str(path),
        tokenizer,
        config,
        max_tokens=max_tokens,
        seed=0,
        may_stream=may_stream,
    )


def test_each_response_is_a_row_of_the_same_weight(
    tmp_path: Path, characters: Any
) -> None:
    responses = source(tmp_path, characters, GOOD, BAD)
    rows = responses.next_batch(2)
    assert spelt(rows, characters) == ["1+1=2<eos>", "9+9=19<eos>"]
    assert np.flatnonzero(rows.response_mask).tolist() == [4, 5, 10, 11, 12]
    assert rows.desirable is not None and rows.desirable.tolist() == [True, False]
    assert (rows.loss_weight.tolist(), rows.unit) == ([0.5, 0.5], None)
    assert responses.next_batch(1).loss_weight.tolist() == [1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pair_is_a_response_of_either_label(
    tmp_path: Path, characters: Any, shuffle: bool
) -> None:
    """Also of a set that stays on disk, which draws the same rows."""
    pairs = [PAIR, {"prompt": "9+9=", "chosen": "18", "rejected": "19"}]
    whole = source(tmp_path, characters, *pairs, shuffle=shuffle)
    streamed = source(
        tmp_path, characters, *pairs, shuffle=shuffle, may_stream=True, stream_above_gib=0.0
    )  # fmt: skip
    assert streamed.is_streamed and len(whole) == len(streamed) == 4
    rows, same = whole.next_batch(4), streamed.next_batch(4)
    assert rows.desirable is not None and same.desirable is not None
    labelled = dict(zip(spelt(rows, characters), rows.desirable.tolist(), strict=True))
    expected = [("1+1=2<eos>", True), ("1+1=11<eos>", False), ("9+9=18<eos>", True), ("9+9=19<eos>", False)]  # fmt: skip
    assert labelled == dict(expected)
    assert (list(labelled.items()) == expected) == (not shuffle)
    assert spelt(same, characters) == spelt(rows, characters)
    assert same.desirable.tolist() == rows.desirable.tolist()
    with pytest.raises(DataError, match="line 2, rejected: the tokenizer"):
        source(tmp_path, characters, PAIR, {**PAIR, "rejected": "two"})


def test_unusable_responses_are_counted_or_refused(
    tmp_path: Path, characters: Any
) -> None:
    message = (
        r"1 of 3 responses are empty; the first is .*, line 2\. .*data\.unusable=skip"
    )
    with pytest.raises(DataError, match=message):
        source(tmp_path, characters, GOOD, EMPTY, BAD)
    long = {**GOOD, "response": "1111"}
    records = (GOOD, EMPTY, BAD, long)
    kept = source(
        tmp_path, characters, *records, max_tokens=7, unusable="skip", overlong="skip"
    )
    assert (len(kept), kept.skipped) == (2, {"empty": 1, "too_long": 1})
    with pytest.raises(DataError, match="1 of 1 responses are empty") as caught:
        source(tmp_path, characters, EMPTY, unusable="skip")
    assert "unusable=skip" not in str(caught.value)


def test_one_label_alone_is_refused(tmp_path: Path, characters: Any) -> None:
    with pytest.raises(DataError, match="all 1 responses are undesirable"):
        source(tmp_path, characters, BAD, EMPTY, unusable="skip")
    responses = source(tmp_path, characters, GOOD, GOOD, BAD)
    with pytest.raises(DataError, match=r"all 2 .* desirable.*evaluation\.num_pairs"):
        responses.all(2)
    assert responses.all(3).num_rows == 3


# ------------------------------------------------------------------------------ records


def read(folder: Path, *records: dict[str, object], **columns: str) -> list[Any]:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_records(DataSet(str(path), columns=columns), unpaired_reading)


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", "1"])
def test_labels(tmp_path: Path, label: object) -> None:
    (record,) = read(tmp_path, {**GOOD, "label": label})
    assert record.is_desirable is True
    (record,) = read(tmp_path, {**BAD, "good": 0}, label="good")
    assert record.is_desirable is False


@pytest.mark.parametrize("label", [-1, 2, 0.5, "yes", [True], None])
def test_what_is_no_label_is_refused(tmp_path: Path, label: object) -> None:
    with pytest.raises(DataError, match=r"line 2: label is .*"):
        read(tmp_path, GOOD, {**GOOD, "label": label})


def test_the_response_is_the_last_message(tmp_path: Path) -> None:
    """However the messages are shared out, and with several turns before it."""
    turns = [USER, TWO, AGAIN, FOUR]
    for record in (
        {"prompt": turns[:3], "completion": [FOUR]},
        {"prompt": turns[:3], "completion": "4"},
        {"prompt": [USER], "completion": turns[1:]},
        {"prompt": turns[:3], "completion": turns},
        {"completion": turns},
        {"messages": turns},
    ):
        (found,) = read(tmp_path, {**record, "label": False})
        assert (found.content, found.is_desirable) == (turns, False)
    for pair in (
        {"prompt": turns[:3], "chosen": [FOUR], "rejected": [TWO]},
        {"chosen": turns, "rejected": [*turns[:3], TWO]},
    ):
        better, worse = read(tmp_path, pair)
        assert (better.content, better.is_desirable) == (turns, True)
        assert (worse.content, worse.is_desirable) == ([*turns[:3], TWO], False)
    with pytest.raises(DataError, match="messages ends with a message of 'user'"):
        read(tmp_path, {"messages": turns[:3], "label": True})


# ---------------------------------------------------------------------- other responses


def test_each_prompt_gets_the_response_of_the_next_row() -> None:
    """Prompts of 2, 1 and 3 tokens; responses of 1, 3 and 1."""
    lengths, prompts = [3, 4, 4], [2, 1, 3]
    rows = TrainingBatch(
        offsets=offsets_of(lengths),
        tokens=np.array([1, 2, 10, 3, 20, 21, 22, 4, 5, 6, 30], np.int32),
        response_mask=np.concatenate(
            [np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
        ),
        loss_weight=np.full(3, 1 / 3, np.float32),
        desirable=np.array([True, False, True]),
    )
    others = with_next_responses(rows, 5)
    assert [others.select([row]).tokens.tolist() for row in range(others.num_rows)] == [
        [1, 2, 20, 21, 22],
        [3, 30],
        [4, 5, 6, 10],
    ]
    assert np.flatnonzero(others.response_mask).tolist() == [2, 3, 4, 6, 10]
    # A response is cut where the row would be too long; the prompt is whole.
    cut = with_next_responses(rows, 4)
    assert cut.select([0]).tokens.tolist() == [1, 2, 20, 21]
    assert cut.lengths.tolist() == [4, 2, 4]
