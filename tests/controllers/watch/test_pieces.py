"""Texts of single tokens, which joined are the text of the row."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from controllers.watch.token_texts import Pieces


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per byte, as byte-level BPE begins."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = byte_tokenizer()
    pieces = Pieces(tokenizer)
    plain = tokenizer.encode("a b")
    assert pieces.of(plain) == ["a", " ", "b"] and pieces.of([]) == []

    tokens = tokenizer.encode("xé€")
    assert pieces.of(tokens) == ["x", "", "é", "", "", "€"]
    # The last character is cut.
    assert pieces.of(tokens[:-1]) == ["x", "", "é", "", "\ufffd"]
    assert pieces.of(tokens[1:] + plain) == ["", "é", "", "", "€", "a", " ", "b"]


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose first word loses its space, as those of SentencePiece do."""
    vocabulary = {"▁a": 0, "▁b": 1, "c": 2}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_space_that_only_the_first_word_loses_stays_between_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = words_tokenizer()
    pieces = Pieces(tokenizer)
    assert pieces.of([0, 1, 2, 1]) == ["a", " b", "c", " b"]
    assert pieces.of([1, 0, 1]) == ["b", " a", " b"]

    # From here on a row costs one decoding, however long it is.
    decode = tokenizer.decode
    lengths: list[int] = []

    def counted(tokens: list[int], **settings: bool) -> str:
        lengths.append(len(tokens))
        return str(decode(tokens, **settings))

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert pieces.of([1, 0, 1] * 100) == ["b", " a", " b"] + [" b", " a", " b"] * 99
    assert lengths == [300]
