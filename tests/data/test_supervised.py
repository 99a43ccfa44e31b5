"""Demonstrations: the mask covers the response and its end, behind the tokens that a
rollout would start from.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_ray.config.data import DataConfig
from verl_ray.data.prompts import PromptSource
from verl_ray.data.supervised import SupervisedSource
from verl_ray.data.tokenizers import character_tokenizer, train_bpe
from verl_ray.errors import DataError

USER, AGAIN = (
    {"role": "user", "content": "1+1?"},
    {"role": "user", "content": "and 2+2?"},
)
TWO, FOUR = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "4"}


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), "0123456789+=")


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    return train_bpe(tmp_path / "chat", ["1+1?"], 270)


def config(**changes: object) -> DataConfig:
    values = {
        "train_path": "-",
        "validation_path": None,
        "prompts_per_step": 4,
        "max_prompt_tokens": 64,
    }
    values |= {
        "columns": None,
        "stream_above_gib": 1.0,
        "overlong": "refuse",
        "shuffle": False,
        "apply_chat_template": False,
        "special_tokens": "refuse",
        **changes,
    }
    return DataConfig.model_validate(values)


def source(
    tmp_path: Path,
    tokenizer: Any,
    *records: dict[str, object],
    max_tokens: int = 64,
    **data: object,
) -> Any:
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"apply_chat_template": bool(tokenizer.chat_template)} | data
    return SupervisedSource(
        str(path), tokenizer, config(**data), max_tokens=max_tokens, seed=0
    )


def spelt(rows: Any, tokenizer: Any, row: int) -> tuple[str, str]:
    """A row's text, and the part of it under the mask."""
    one = rows.select([row])
    return tokenizer.decode(one.tokens), tokenizer.decode(one.tokens[one.response_mask])


def test_text_pairs(tmp_path: Path, characters: Any) -> None:
    rows = source(
        tmp_path,
        characters,
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "9+9=", "response": "18"},
    ).next_batch(2)
    assert rows.tokens.tolist() == [3, 12, 3, 13, 4, 1, 11, 12, 11, 13, 3, 10, 1]
    assert rows.response_mask.astype(int).tolist() == [
        0,
        0,
        0,
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    assert rows.offsets.tolist() == [0, 6, 13]
    # Mean over the 5 response tokens of the batch, whichever rows they are in.
    np.testing.assert_allclose(rows.loss_weight, [0.2, 0.2])
    assert rows.advantages is None


def test_a_chat_turn_follows_what_a_rollout_starts_from(
    tmp_path: Path, chat: Any
) -> None:
    records = [
        {"prompt": [USER], "response": "2"},
        {"prompt": "1+1?", "response": "2"},
        {"messages": [USER, TWO]},
    ]
    rows = source(tmp_path, chat, *records).all()
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": [USER], "answer": "2"})
    )
    prompt = PromptSource(
        str(tmp_path / "prompts.jsonl"), chat, config(apply_chat_template=True), seed=0
    ).all()
    for row in range(3):
        one = rows.select([row])
        assert one.tokens[~one.response_mask].tolist() == prompt.tokens.tolist()
        assert spelt(rows, chat, row)[1] == "2<|im_end|>"
        assert one.tokens[-1] == chat.eos_token_id


def test_the_first_token_of_a_text_stands_once(tmp_path: Path, chat: Any) -> None:
    """A tokenizer that opens every text with a token of its own: in front of a row,
    never in the middle.
    """
    from tokenizers.processors import TemplateProcessing

    opening = chat.convert_tokens_to_ids("<|endoftext|>")
    chat.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", opening)]
    )
    pair = {"prompt": "1+1=", "response": "2"}
    text = source(tmp_path, chat, pair, apply_chat_template=False).all()
    assert spelt(text, chat, 0) == ("<|endoftext|>1+1=2<|im_end|>", "2<|im_end|>")
    assert (
        opening not in source(tmp_path, chat, pair).all().tokens
    )  # the template writes its own
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    for choice, count in ((False, 1), (True, 0)):
        drawn = PromptSource(
            str(prompts), chat, config(apply_chat_template=choice), seed=0
        ).all()
        assert drawn.tokens.tolist().count(opening) == count


def test_every_assistant_turn_is_learnt(tmp_path: Path, chat: Any) -> None:
    rows = source(
        tmp_path,
        chat,
        {"messages": [USER, TWO, AGAIN, FOUR]},
        {"messages": [USER, TWO]},
    ).all()
    assert spelt(rows, chat, 0) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>",
        "2<|im_end|>4<|im_end|>",
    )
    assert spelt(rows, chat, 1)[1] == "2<|im_end|>"


def test_a_template_that_rewrites_turns_is_refused(tmp_path: Path, chat: Any) -> None:
    chat.chat_template = chat.chat_template.replace(
        "{% endfor %}", "{{ messages | length }}{% endfor %}"
    )
    with pytest.raises(
        DataError,
        match="line 1, message 2: the chat template does not write this assistant turn",
    ):
        source(tmp_path, chat, {"messages": [USER, TWO]})
    chat.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"the end of turn '<\|im_end\|>'"):
        source(tmp_path, chat, {"messages": [USER, TWO]})


def test_same_cursor_contract(tmp_path: Path, characters: Any) -> None:
    records = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(7)]
    first = source(tmp_path, characters, *records, shuffle=True)
    first.next_batch(5)
    state, kept = json.loads(json.dumps(first.state())), first.next_batch(9)
    second = source(tmp_path, characters, *records, shuffle=True)
    second.load_state(state)
    assert second.next_batch(9).tokens.tolist() == kept.tokens.tolist()
    assert (second.epoch, len(second), second.skipped) == (2, 7, {"too_long": 0})
    with pytest.raises(DataError, match="the data differ"):
        source(tmp_path, characters, *records[:6], shuffle=True).load_state(state)


def test_length_limit_counts_prompt_and_response(
    tmp_path: Path, characters: Any
) -> None:
    records = [
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "9+9=", "response": "18"},
    ]
    with pytest.raises(
        DataError,
        match=r"1 of 2 rows are longer than sft\.max_tokens = 6; the longest has 7 tokens",
    ):
        source(tmp_path, characters, *records, max_tokens=6)
    kept = source(tmp_path, characters, *records, max_tokens=6, overlong="skip")
    assert (len(kept), kept.skipped) == (1, {"too_long": 1})


def test_what_cannot_be_learnt_is_refused(tmp_path: Path, characters: Any) -> None:
    with pytest.raises(DataError, match="line 2: no token before the response"):
        source(
            tmp_path,
            characters,
            {"prompt": "1", "response": "1"},
            {"prompt": "", "response": "2"},
        )
    with pytest.raises(
        DataError, match="line 1: found chat messages, but no chat template"
    ):
        source(tmp_path, characters, {"messages": [USER, TWO]})
    with pytest.raises(DataError, match="holds no records"):
        source(tmp_path, characters)
