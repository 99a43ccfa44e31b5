"""Demonstrations: the mask covers the response and its end, behind the tokens that a
rollout would start from.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.data.test_prompts import config as prompt_config
from verl_ray.config.data import DataFilesConfig
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import (
    character_tokenizer,
    end_tokens,
    load_tokenizer,
    train_bpe,
)
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


def config(**changes: object) -> DataFilesConfig:
    values = {
        "train_path": "-",
        "validation_path": None,
        "columns": None,
        "stream_above_gib": 1.0,
        "overlong": "refuse",
        "shuffle": False,
        "apply_chat_template": False,
        "chat_template": None,
        "chat_template_kwargs": {},
        "template_day": None,
        "special_tokens": "refuse",
        **changes,
    }
    return DataFilesConfig.model_validate(values)


def test_a_chat_template_gets_the_arguments_of_a_demonstration(
    tmp_path: Path, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "chat_template", "{{ tone }}:" + chat.chat_template)
    pair = {"prompt": "1+1=", "response": "2"}
    rows = source(
        tmp_path,
        chat,
        {**pair, "chat_template_kwargs": {"tone": "calm"}},
        pair,
        chat_template_kwargs={"tone": "loud"},
    ).all()
    texts = [
        chat.decode(rows.tokens[first:end]).partition(":")[0]
        for first, end in itertools.pairwise(rows.offsets)
    ]
    assert texts == ["calm", "loud"]


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
        str(tmp_path / "prompts.jsonl"),
        chat,
        prompt_config(apply_chat_template=True),
        seed=0,
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
            str(prompts),
            chat,
            prompt_config(apply_chat_template=choice, shuffle=False),
            seed=0,
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


def test_the_response_alone_is_learnt(tmp_path: Path, chat: Any) -> None:
    """Earlier answers are context: those of a prompt, and those that a file excludes."""
    whole = [USER, TWO, AGAIN, FOUR]
    records = [
        {"prompt": [USER, TWO, AGAIN], "response": "4"},
        {"prompt": [USER, TWO, AGAIN], "completion": [FOUR]},
        {"prompt": [USER, TWO, AGAIN], "completion": whole},
        *(
            {"messages": [USER, {**TWO, **mark}, AGAIN, {**FOUR, "weight": 1}]}
            for mark in (
                {"weight": 0},
                {"weight": 0.0},
                {"trainable": False},
                {"train": False},
                {"loss": False},
            )
        ),
        {
            "conversations": [
                {"from": "human", "value": "1+1?"},
                {"from": "gpt", "value": "2", "weight": 0},
                {"from": "human", "value": "and 2+2?"},
                {"from": "gpt", "value": "4", "weight": 1},
            ]
        },
    ]
    text = "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in whole
    )
    for record in records:
        rows = source(tmp_path, chat, record).all()
        assert spelt(rows, chat, 0) == (text.rstrip(), "4<|im_end|>")

    # Several turns of a completion are learned, but for those that it excludes; the
    # row ends with the last of them.
    later = [TWO, AGAIN, FOUR, AGAIN, {**TWO, "trainable": False}]
    rows = source(tmp_path, chat, {"prompt": [USER], "completion": later}).all()
    learned = "2<|im_end|>4<|im_end|>"
    assert spelt(rows, chat, 0) == (text.rstrip(), learned)


def test_marks_that_teach_nothing_are_refused(tmp_path: Path, chat: Any) -> None:
    for field, answer in (("messages", [USER, TWO]), ("completion", [TWO])):
        record = {"prompt": [USER], field: [*answer[:-1], {**TWO, "weight": 0}]}
        if field == "messages":
            del record["prompt"]
        expected = (
            f"line 1: {field} has no assistant turn to learn from that its weight"
        )
        with pytest.raises(DataError, match=expected):
            source(tmp_path, chat, record)
    for value in (0.5, "false"):
        record = {"messages": [USER, {**TWO, "weight": value}]}
        with pytest.raises(DataError, match=r"2: weight is .*, expected 0 or 1"):
            source(tmp_path, chat, record)
    # It says nothing about other turns, and null is no mark.
    marked = [{**USER, "weight": 0.5}, {**TWO, "weight": None, "train": True}]
    rows = source(tmp_path, chat, {"messages": marked}).all()
    assert spelt(rows, chat, 0)[1] == "2<|im_end|>"


def test_each_cause_of_an_unusable_template_has_its_message(
    tmp_path: Path, chat: Any
) -> None:
    content = "{{ message['content'] }}"
    whole = {"messages": [USER, TWO, AGAIN, FOUR]}
    # Earlier answers are shortened, as reasoning is by some models' templates.
    own = chat.chat_template
    shortened = (
        "{{ message['content'] if loop.last or message['role'] == 'user' else '' }}"
    )
    chat.chat_template = own.replace(content, shortened)
    with pytest.raises(DataError, match="message 4: the chat template writes earlier"):
        source(tmp_path, chat, whole)
    # What the message advises works: the context is what a rollout sees.
    split = {"prompt": [USER, TWO, AGAIN], "response": "4"}
    marked = {"messages": [USER, {**TWO, "trainable": False}, AGAIN, FOUR]}
    for record in (split, marked):
        assert spelt(source(tmp_path, chat, record).all(), chat, 0) == (
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
            "<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>",
            "4<|im_end|>",
        )

    for template, cause in (
        (own.replace("assistant\n", "assistant\n>"), "2: a rollout starts from"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "writes no end of turn"),
        (own.replace(content, "{{ message['content'][-1] }}"), "out the reasoning"),
    ):
        chat.chat_template = template
        thought = {"prompt": [USER], "response": "<think>so</think>2"}
        with pytest.raises(DataError, match=cause):
            source(tmp_path, chat, thought)


def test_the_end_of_a_turn_need_not_be_eos(tmp_path: Path, chat: Any) -> None:
    """It is what the template writes, and what generation_config.json names."""
    chat.eos_token = "<|endoftext|>"
    row = source(tmp_path, chat, {"messages": [USER, TWO]}).all()
    assert spelt(row, chat, 0)[1] == "2<|im_end|>"
    ends = ["<|endoftext|>", "<|im_end|>"]
    assert end_tokens(chat) == tuple(sorted(chat.convert_tokens_to_ids(ends)))

    # Some models have it as an added token that is not special.
    chat.add_tokens([AddedToken("<end>", special=False)])
    chat.chat_template = chat.chat_template.replace("<|im_end|>", "<end>")
    assert chat.convert_tokens_to_ids("<end>") in end_tokens(chat)

    chat.save_pretrained(str(tmp_path / "model"))
    config_path = tmp_path / "model" / "generation_config.json"
    config_path.write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert set(end_tokens(load_tokenizer(tmp_path / "model"))) >= {7, 8}


def test_a_conversation_is_encoded_as_a_whole(tmp_path: Path) -> None:
    """The template ends with a space, which a token of the whole text would take."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    texts = ["assistant: two"] * 20
    tokenizer = train_bpe(tmp_path / "spaced", texts, 300, template)
    answer = {"role": "assistant", "content": "two"}
    row = source(tmp_path, tokenizer, {"messages": [USER, answer]}).all()
    opening = tokenizer("user: 1+1?<|im_end|>assistant: ")["input_ids"]
    assert row.tokens.tolist()[: len(opening)] == opening
    assert spelt(row, tokenizer, 0)[1] == "two<|im_end|>"


def test_no_space_is_learned_before_a_response(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=["<unk>", "</s>"], show_progress=False,
        initial_alphabet=[chr(code) for code in range(32, 127)] + ["\n", "\u2581"],
    )  # fmt: skip
    model.train_from_iterator(["it is two", "and 4"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    row = source(tmp_path, tokenizer, {"messages": [USER, TWO, AGAIN, FOUR]}).all()
    text = "user\n1+1?</s>\nassistant\n2</s>\nuser\nand 2+2?</s>\nassistant\n4</s>"
    assert row.tokens.tolist() == tokenizer(text)["input_ids"]
    learned = tokenizer.convert_ids_to_tokens(row.tokens[row.response_mask])
    assert learned == ["2", "</s>", "4", "</s>"]


def test_a_turn_begins_behind_the_end_of_the_answer_before(tmp_path: Path) -> None:
    """This tokenizer puts a space before the first word of a text, and no other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=["<unk>", "</s>"], show_progress=False,
        initial_alphabet=[chr(code) for code in range(32, 127)] + ["\n", "\u2581"],
    )  # fmt: skip
    model.train_from_iterator(["it is two", "and 4"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}"
        "{{ '</s>' if m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    row = source(tmp_path, tokenizer, {"messages": [USER, TWO, AGAIN, FOUR]}).all()
    text = "user\n1+1?\nassistant\n2</s>user\nand 2+2?\nassistant\n4</s>"
    assert row.tokens.tolist() == tokenizer(text)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(row.tokens)
    assert tokens[0].startswith("\u2581") and tokens[tokens.index("</s>") + 1] == "u"


def test_a_text_that_a_template_has_written_has_one_end(tmp_path: Path) -> None:
    tokenizer = train_bpe(tmp_path / "chatml", ["1+1?"], 280)
    opening = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    for record in (
        {"text": f"{opening}2<|im_end|>\n"},
        {"prompt": opening, "response": "2<|im_end|>\n"},
    ):
        settings = {"special_tokens": "allow", "apply_chat_template": False}
        row = source(tmp_path, tokenizer, record, **settings).all()
        assert tokenizer.decode(row.tokens) == f"{opening}2<|im_end|>"


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
