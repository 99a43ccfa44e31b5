"""Pairs: chosen and rejected in turn, each as a rollout would be; what cannot be
compared is counted or refused.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_ray.config.data import DataFilesConfig, PreferenceDataConfig
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.tokenizers import character_tokenizer, train_bpe
from verl_ray.errors import DataError

USER = {"role": "user", "content": "1+1?"}
TWO, THREE, NOTHING = (
    {"role": "assistant", "content": text} for text in ("2", "3", " \n")
)
FILES = {
    "train_path": "-",
    "validation_path": None,
    "columns": None,
    "stream_above_gib": 1.0,
    "overlong": "refuse",
    "chat_template": None,
    "chat_template_kwargs": {},
    "template_day": None,
    "shuffle": False,
}
SUM: dict[str, object] = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
# With "0" as token 2, "+" is 12, "=" is 13 and the end of a text 1.
SUM_TOKENS = [3, 12, 3, 13, 4, 1, 3, 12, 3, 13, 3, 3, 1]


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), ALPHABET)


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    return train_bpe(tmp_path / "chat", ["1+1?"], 270)


def source(
    tmp_path: Path,
    tokenizer: Any,
    *records: dict[str, object],
    max_tokens: int = 64,
    margin: Any = 0.0,
    **data: object,
) -> PreferenceSource:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        **FILES,
        "apply_chat_template": bool(tokenizer.chat_template),
        "special_tokens": "allow",
        "unusable": "refuse",
        **data,
    }
    config = PreferenceDataConfig.model_validate(values)
    return PreferenceSource(
        str(path), tokenizer, config, max_tokens=max_tokens, seed=0, margin=margin
    )


def spelt(rows: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(rows.select([row]).tokens) for row in range(rows.num_rows)]


def test_the_rows_of_a_text_pair(tmp_path: Path, characters: Any) -> None:
    pairs = source(
        tmp_path,
        characters,
        SUM,
        {"prompt": "9+9=", "chosen": "18", "rejected": "19"},
        margin=0.5,
    )
    rows = pairs.next_batch(1)
    assert rows.tokens.tolist() == SUM_TOKENS
    assert rows.offsets.tolist() == [0, 6, 13]
    # "2" and "11", each with the end that a generation has.
    assert np.flatnonzero(rows.response_mask).tolist() == [4, 5, 10, 11, 12]
    assert rows.loss_weight.tolist() == [1, 1]
    assert rows.unit is not None and rows.unit.tolist() == [0, 0]
    assert rows.margin is not None and rows.margin.tolist() == [0.5, 0.5]
    assert rows.advantages is None
    both = pairs.all()
    assert spelt(both, characters) == [
        "1+1=2<eos>",
        "1+1=11<eos>",
        "9+9=18<eos>",
        "9+9=19<eos>",
    ]
    assert both.loss_weight.tolist() == [0.5] * 4
    assert both.unit is not None and both.unit.tolist() == [0, 0, 1, 1]
    assert (
        both.margin is not None
        and both.margin.tolist() == [0.5] * 4
        and both.margin.dtype == np.float32
    )
    assert (len(pairs), pairs.all(1).num_rows, pairs.all(0).num_rows) == (2, 2, 0)


def test_a_chat_pair_is_what_rollouts_would_be(tmp_path: Path, chat: Any) -> None:
    listed = {"chosen": [USER, TWO], "rejected": [USER, THREE]}
    mixed = {"prompt": [USER], "chosen": "2", "rejected": "3"}
    plain = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    rows = source(tmp_path, chat, listed, mixed, plain).all()
    opening = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert spelt(rows, chat) == [f"{opening}2<|im_end|>", f"{opening}3<|im_end|>"] * 3
    assert (rows.tokens[rows.offsets[1:] - 1] == chat.eos_token_id).all()
    (tmp_path / "turns.jsonl").write_text(
        "".join(json.dumps({"messages": [USER, x]}) + "\n" for x in (TWO, THREE))
    )
    config = DataFilesConfig.model_validate(
        {**FILES, "apply_chat_template": True, "special_tokens": "refuse"}
    )
    demonstrations = SupervisedSource(
        str(tmp_path / "turns.jsonl"), chat, config, max_tokens=64, seed=0
    ).all()
    assert rows.tokens.tolist() == demonstrations.tokens.tolist() * 3


def test_earlier_turns_are_the_prompt(tmp_path: Path, chat: Any) -> None:
    """Also where the template writes them otherwise once they are past: no rollout had
    to say them.
    """
    chat.chat_template = chat.chat_template.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if loop.last else message['content'] | lower }}",
    )
    before = [USER, {"role": "assistant", "content": "TWO"}, USER]
    rows = source(
        tmp_path, chat, {"chosen": [*before, TWO], "rejected": [*before, THREE]}
    ).all()
    assert spelt(rows, chat)[0] == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )


def test_margins_of_the_records(tmp_path: Path, characters: Any) -> None:
    records = [{**SUM, "margin": 1}, {**SUM, "margin": 0.25}]
    rows = source(tmp_path, characters, *records, margin="record").all()
    assert rows.margin is not None and rows.margin.tolist() == [1.0, 1.0, 0.25, 0.25]
    ignored = source(tmp_path, characters, *records, margin=2.0).all()
    assert ignored.margin is not None and ignored.margin.tolist() == [2.0] * 4
    with pytest.raises(
        DataError,
        match=r"line 2: no field 'margin', which preference\.margin = record takes",
    ):
        source(tmp_path, characters, {**SUM, "margin": 1}, SUM, margin="record")


def test_same_cursor_contract(tmp_path: Path, characters: Any) -> None:
    records = [
        {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(7)
    ]
    first = source(tmp_path, characters, *records, shuffle=True)
    first.next_batch(5)
    state, kept = json.loads(json.dumps(first.state())), first.next_batch(9)
    assert (state["rows"], state["drawn"], kept.num_rows) == (7, 5, 18)
    second = source(tmp_path, characters, *records, shuffle=True)
    second.load_state(state)
    assert second.next_batch(9).tokens.tolist() == kept.tokens.tolist()
    assert (second.epoch, len(second)) == (2, 7)
    for changed in (records[:6], [*records[:6], {**records[6], "rejected": "1"}]):
        with pytest.raises(DataError, match="the data differ"):
            source(tmp_path, characters, *changed, shuffle=True).load_state(state)


def test_margins_of_the_records_are_data(tmp_path: Path, characters: Any) -> None:
    state = source(tmp_path, characters, {**SUM, "margin": 1}, margin="record").state()
    with pytest.raises(DataError, match="the data differ"):
        source(tmp_path, characters, {**SUM, "margin": 2}, margin="record").load_state(
            state
        )
    state = source(tmp_path, characters, SUM, margin=1.0).state()
    source(tmp_path, characters, SUM, margin=2.0).load_state(
        state
    )  # one for all is a setting


def test_unusable_pairs_are_counted_or_refused(
    tmp_path: Path, characters: Any, chat: Any
) -> None:
    equal, empty = {**SUM, "rejected": "2"}, {**SUM, "rejected": " "}
    long = {**SUM, "rejected": "111"}
    records = [SUM, equal, empty, equal, {**SUM, "chosen": ""}, long, equal]
    message = (
        r"5 of 7 pairs are unusable: 3 with equal responses, 2 with an empty one; the first is .*pairs\.jsonl, line 2"
        r"\. .*data\.unusable=skip"
    )
    with pytest.raises(DataError, match=message):
        source(tmp_path, characters, *records)
    kept = source(
        tmp_path, characters, *records, max_tokens=7, unusable="skip", overlong="skip"
    )
    assert (len(kept), kept.skipped) == (1, {"equal": 3, "empty": 2, "too_long": 1})
    assert kept.all().tokens.tolist() == SUM_TOKENS
    listed = {"chosen": [USER, TWO], "rejected": [USER, THREE]}
    spoken = source(
        tmp_path, chat, listed, {**listed, "rejected": [USER, NOTHING]}, unusable="skip"
    )
    assert (len(spoken), spoken.skipped) == (1, {"equal": 0, "empty": 1, "too_long": 0})
    # The margins stay with their pairs.
    marked = [
        {**record, "margin": index}
        for index, record in enumerate([empty, equal, SUM, long, SUM])
    ]
    rows = source(
        tmp_path,
        characters,
        *marked,
        max_tokens=7,
        margin="record",
        unusable="skip",
        overlong="skip",
    ).all()
    assert rows.margin is not None and rows.margin.tolist() == [2.0, 2.0, 4.0, 4.0]


def test_the_longer_side_counts(tmp_path: Path, characters: Any) -> None:
    swapped = {**SUM, "chosen": "11", "rejected": "2"}
    for pair in (SUM, swapped):  # 6 tokens on one side, 7 on the other
        assert len(source(tmp_path, characters, pair, max_tokens=7)) == 1
        with pytest.raises(
            DataError,
            match=r"1 of 1 rows .* preference\.max_tokens = 6; .* has 7 tokens .*overlong=skip",
        ):
            source(tmp_path, characters, pair, max_tokens=6)


def test_nothing_left_is_refused(tmp_path: Path, characters: Any) -> None:
    equal, empty = {**SUM, "rejected": "2"}, {**SUM, "rejected": ""}
    for records in ([equal], [empty], [equal, empty]):
        with pytest.raises(
            DataError, match=f"{len(records)} of {len(records)} pairs are unusable"
        ) as caught:
            source(tmp_path, characters, *records, unusable="skip")
        assert "unusable=skip" not in str(caught.value)
    with pytest.raises(DataError, match=r"Set preference\.max_tokens=7$"):
        source(
            tmp_path,
            characters,
            SUM,
            equal,
            max_tokens=6,
            unusable="skip",
            overlong="skip",
        )
    with pytest.raises(DataError, match="holds no records"):
        source(tmp_path, characters)


def test_what_a_rollout_could_not_be_is_refused(
    tmp_path: Path, characters: Any
) -> None:
    with pytest.raises(DataError, match="line 2, chosen: no token before the response"):
        source(tmp_path, characters, SUM, {**SUM, "prompt": ""})
    with pytest.raises(
        DataError, match="line 1, chosen: found chat messages, but no chat template"
    ):
        source(tmp_path, characters, {"chosen": [USER, TWO], "rejected": [USER, THREE]})
    with pytest.raises(
        DataError, match=r"line 1, rejected: the tokenizer .* cannot encode '1\+1=two"
    ):
        source(tmp_path, characters, {**SUM, "rejected": "two"})
