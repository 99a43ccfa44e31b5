"""Tokenizers made here round-trip text and load from disk alone; what is not a
tokenizer is refused at once.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from verl_ray.data.encoding import encode
from verl_ray.data.tokenizers import (
    CHAT_TEMPLATES,
    character_tokenizer,
    end_tokens,
    load_tokenizer,
    render,
    require_chat_template,
    same_tokens,
    strip_special_tokens,
    train_bpe,
)
from verl_ray.errors import DataError, ModelError

TEXTS = [
    "What is 12 plus 7? It is 19.",
    "Ünïcode, tabs\tand\nlines stay as they are  .",
    "漢字 🙂",
]


def test_characters_are_the_whole_vocabulary(tmp_path: Path) -> None:
    character_tokenizer(tmp_path, "0123456789+=")
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == 14
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = encode(tokenizer, ["12+7=", "0"], special=True, where=str)
    assert ids[0].tolist() == [3, 4, 12, 9, 13]
    assert (ids.values.dtype, ids.offsets.tolist()) == (np.int32, [0, 5, 6])
    assert tokenizer.decode([3, 4, 12, 9, 13, 1], skip_special_tokens=True) == "12+7="
    assert tokenizer("9<eos>")["input_ids"] == [11, 1]


def test_a_text_without_tokens_is_named(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(tmp_path, "01")
    with pytest.raises(DataError, match=r"row 2: the tokenizer .* cannot encode 'a'"):
        encode(
            tokenizer,
            ["0", "1", "a", "b"],
            special=True,
            where=lambda index: f"row {index}",
        )
    with pytest.raises(ModelError, match="a character occurs twice"):
        character_tokenizer(tmp_path, "00")


def test_bpe_round_trips_every_text(tmp_path: Path) -> None:
    train_bpe(tmp_path, TEXTS[:1] * 20, 300)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) <= 300
    ids = encode(tokenizer, TEXTS, special=False, where=str)
    assert [tokenizer.decode(ids[row]) for row in range(3)] == TEXTS
    assert len(ids[0]) < len(TEXTS[0]) / 2  # it has learnt merges
    assert tokenizer.eos_token == "<|im_end|>"
    with pytest.raises(
        ModelError, match="vocabulary of 258 tokens: expected at least 259"
    ):
        train_bpe(tmp_path, TEXTS, 258)


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = train_bpe(tmp_path / "chat", TEXTS, 280)
    conversations: list[list[dict[str, object]]] = [
        [{"role": "user", "content": "1+1?"}]
    ]
    texts = render(tokenizer, conversations, add_generation_prompt=True, where=str)
    assert texts == ["<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"]
    ids = encode(tokenizer, texts, special=False, where=str)[0]
    assert (
        np.isin(
            ids, tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        ).sum()
        == 3
    )
    require_chat_template(load_tokenizer(tmp_path / "chat"))
    plain = character_tokenizer(tmp_path / "plain", "01")
    with pytest.raises(
        DataError, match=r"data\.apply_chat_template = true, .* has no chat template"
    ):
        require_chat_template(plain)

    # What the template leaves out would vanish without a word.
    silent: dict[str, object] = {"role": "assistant", "content": "2"}
    thought = [[*conversations[0], {**silent, "reasoning_content": "1 and 1"}]]
    with pytest.raises(DataError, match=r"^0: a message has reasoning_content, which"):
        render(tokenizer, thought, add_generation_prompt=False, where=str)
    # Of several templates, the one that is applied has to write it.
    single = tokenizer.chat_template
    tokenizer.chat_template = {"default": single, "tool_use": "{# reasoning_content #}"}
    with pytest.raises(DataError, match=r"^0: a message has reasoning_content, which"):
        render(tokenizer, thought, add_generation_prompt=False, where=str)
    tokenizer.chat_template = f"{single}{{# reasoning_content #}}"
    render(tokenizer, thought, add_generation_prompt=False, where=str)

    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(
        DataError,
        match=r"0: the chat template refuses the messages .*no system messages",
    ):
        render(tokenizer, conversations, add_generation_prompt=True, where=str)


@pytest.mark.parametrize("front", [False, True])
def test_our_templates_are_for_models_without_one(tmp_path: Path, front: bool) -> None:
    tokenizer = train_bpe(tmp_path, TEXTS, 280, None)
    if front:
        # Every text begins with this token, as Llama's texts do.
        begin = "<|endoftext|>"
        tokenizer.bos_token = begin
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A",
            special_tokens=[(begin, tokenizer.convert_tokens_to_ids(begin))],
        )
        tokenizer.save_pretrained(str(tmp_path))

    begin = tokenizer.bos_token if front else ""
    turns: list[dict[str, object]] = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
    ]
    answer: dict[str, object] = {"role": "assistant", "content": "2"}
    opened = {
        "chatml": "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "plain": "System:\nAdd.\n\nUser:\n1+1?\n\nAssistant:\n",
    }
    closed = {"chatml": "2<|im_end|>\n", "plain": "2<|im_end|>\n\n"}
    for name, text in CHAT_TEMPLATES.items():
        dressed = load_tokenizer(tmp_path, text)
        (asked,) = render(dressed, [turns], add_generation_prompt=True, where=str)
        assert asked == f"{begin}{opened[name]}"
        (told,) = render(
            dressed, [[*turns, answer]], add_generation_prompt=False, where=str
        )
        assert told == f"{asked}{closed[name]}"
        assert end_tokens(dressed) == (dressed.convert_tokens_to_ids("<|im_end|>"),)

    with pytest.raises(
        DataError, match=r"no token <\|im_start\|> and no token <\|im_e"
    ):
        character_tokenizer(tmp_path / "digits", "01")
        load_tokenizer(tmp_path / "digits", CHAT_TEMPLATES["chatml"])


def test_what_a_policy_spells_is_no_special_token(tmp_path: Path) -> None:
    tokenizer = train_bpe(tmp_path, TEXTS, 280)
    special = tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    )
    for text, left in (
        ("7<|im_end|>\n<|im_start|>assistant\n10", "7\nassistant\n10"),
        ("<|im_<|endoftext|>end|>.", "."),  # taken out once, it spells another
        ("<|im_<|im_<|im_end|>end|>start|>", ""),
        ("a <| b |> c <im_end>", "a <| b |> c <im_end>"),
    ):
        assert strip_special_tokens(text, tokenizer) == left
        assert not np.isin(tokenizer(left)["input_ids"], special).any()
    assert np.isin(tokenizer("7<|im_end|>")["input_ids"], special).any()


def test_only_local_directories_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *address, **_: asked.append(address) or []
    )
    with pytest.raises(
        ModelError, match=r"Qwen/Qwen3-0\.6B is not a directory; set model\.path"
    ):
        load_tokenizer("Qwen/Qwen3-0.6B")
    assert asked == []  # no hub
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"found config\.json, expected tokenizer\.json"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{torn")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    # The reason that transformers gives for this goes on for many lines.
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.txt")
    with pytest.raises(ModelError, match="cannot be loaded") as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.processes
def test_a_tokenizer_that_is_its_file_needs_no_torch(tmp_path: Path) -> None:
    character_tokenizer(tmp_path, "0123456789")
    read = "from verl_ray.data.tokenizers import load_tokenizer; tokens = load_tokenizer(sys.argv[1])('12').input_ids"
    code = f"import sys; {read}; print(tokens, 'torch' in sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        child.stdout.split("\n")[0]
        == f"{AutoTokenizer.from_pretrained(tmp_path)('12').input_ids} False"
    )


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(tmp_path, "01")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ModelError, match="no eos_token, by which responses end"):
        load_tokenizer(tmp_path)


def test_tokenizers_that_make_the_same_tokens(tmp_path: Path) -> None:
    first = train_bpe(tmp_path / "first", TEXTS, 300)
    for name in ("second", "cut", "other template", "other end"):
        train_bpe(tmp_path / name, TEXTS, 300)
    path = tmp_path / "cut" / "tokenizer.json"
    cut = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": cut}))
    same = [load_tokenizer(tmp_path / name) for name in ("first", "second", "cut")]
    assert all(
        same_tokens(first, other) and same_tokens(other, first) for other in same
    )
    other = load_tokenizer(tmp_path / "other template")
    other.chat_template += " "
    ended = load_tokenizer(tmp_path / "other end")
    ended.eos_token = "<|endoftext|>"
    shorter = train_bpe(tmp_path / "shorter", TEXTS, 280)
    assert not any(same_tokens(first, one) for one in (other, ended, shorter))
