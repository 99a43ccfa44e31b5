"""Text that grows token by token.

Its pieces add up, and half characters and half stop strings are held back.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from verl_ray.data.tokenizers import train_bpe
from verl_ray.rollout.texts import GrowingText

TEXTS = st.text("ab \n.é漢🙂", max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and a few pairs of bytes.

    Most characters outside of ASCII take several of its tokens.
    """
    return train_bpe(tmp_path_factory.mktemp("bpe"), ["ab ab\n\n.", "ab. ab"] * 9, 266)


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


@given(TEXTS, st.lists(st.integers(1, 4), max_size=40))
def test_pieces_add_up_however_the_tokens_come(
    tokenizer: PreTrainedTokenizerBase, text: str, sizes: list[int]
) -> None:
    tokens, growing, said = ids(tokenizer, text), GrowingText(tokenizer), ""
    at = 0
    for size in [*sizes, len(tokens)]:
        part, at = tokens[at : at + size], at + size
        taken, piece = growing.add(part, last=at >= len(tokens))
        said += piece
        assert taken == len(part) and text.startswith(said)
        if at >= len(tokens):
            break
    assert said == text


@given(
    TEXTS,
    st.lists(st.text("ab \n.é", min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_text_ends_before_the_first_stop_string(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str], at_once: bool
) -> None:
    tokens, growing = ids(tokenizer, text), GrowingText(tokenizer, stop)
    parts = [tokens] if at_once else [[token] for token in tokens] or [[]]
    said, taken = "", 0
    for number, part in enumerate(parts, 1):
        count, piece = growing.add(part, last=number == len(parts))
        said, taken = said + piece, taken + count
        if growing.stopped:
            break
    assert growing.stopped == any(one in text for one in stop)
    if not growing.stopped:
        assert (said, taken) == (text, len(tokens))
        return
    assert any(one in tokenizer.decode(tokens[:taken]) for one in stop)
    assert not any(
        one in tokenizer.decode(tokens[: taken - 1]) for one in stop
    )  # the token that completes one is last
    seen = tokenizer.decode(tokens[:taken])
    assert said == seen[: min(seen.index(one) for one in stop if one in seen)]


def test_what_may_become_a_stop_string_is_held_back(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    growing = GrowingText(tokenizer, ["\n\n\n"])
    said = [
        growing.add([token], last=False)[1]
        for letter in "a\n\nb"
        for token in ids(tokenizer, letter)
    ]
    assert said == ["", "", "a", "\n"]
    assert growing.add([], last=True) == (0, "\nb")


def test_specials_have_no_text_and_a_character_that_stays_incomplete_is_marked(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    growing = GrowingText(tokenizer)
    smile = ids(tokenizer, "🙂")
    assert len(smile) == 4
    assert growing.add([tokenizer.eos_token_id, *smile[:2]], last=False) == (3, "")
    assert growing.add(smile[2:], last=False) == (2, "🙂")
    assert growing.add([*ids(tokenizer, "a"), *smile[:3]], last=True) == (4, "a\ufffd")


@given(st.lists(st.integers(0, 9), max_size=40))
def test_bytes_that_are_no_characters_are_marked_as_in_the_whole_text(
    tokenizer: PreTrainedTokenizerBase, places: list[int]
) -> None:
    single_bytes = ids(tokenizer, "🙂漢éa")
    assert len(single_bytes) == 10
    tokens = [single_bytes[place] for place in places]
    growing, whole = GrowingText(tokenizer), tokenizer.decode(tokens)
    said = "".join(growing.add([token], last=False)[1] for token in tokens)
    assert whole.startswith(said)
    assert said + growing.add([], last=True)[1] == whole


def test_bytes_that_are_no_characters_are_decoded_a_few_times_each(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, lengths = tokenizer.decode, list[int]()

    def counting(tokens: list[int], **options: bool) -> str:
        lengths.append(len(tokens))
        return str(decode(tokens, **options))

    monkeypatch.setattr(tokenizer, "decode", counting)
    growing = GrowingText(tokenizer, ["stop"], spells_special_tokens=True)
    growing.add(ids(tokenizer, "🙂")[:1] * 1000, last=False)
    assert max(lengths) < 10
