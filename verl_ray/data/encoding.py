"""Texts as tokens: many texts at a time, with the places where the tokens begin.

Invariant: a token that the tokenizer puts around a text stands there once, whether or
not the text has it already. Unless data.special_tokens = allow, special tokens of a row
come from the tokenizer and its chat template alone, and never from a text. A text that
spells none has the same tokens under every setting. Added tokens that are not special,
such as `<think>` of some models, are texts in this sense.

A chat template may change a text, and joins it with special tokens of its own, so both
have to be told apart in what it writes. For `escape`, each name in a text is replaced
by a stand-in before the template sees it. Afterwards the names that are left are the
template's. They become aliases, the stand-ins become names again, and a copy of the
tokenizer encodes the result: it knows the aliases as tokens, and names as text. All
other rules of the tokenizer apply to the whole row as ever.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from verl_ray.columns.batch import Array, Int64, Ragged, offsets_of
from verl_ray.config.data import SpecialTokens
from verl_ray.data.fields import Message, texts_in
from verl_ray.errors import DataError
from verl_ray.profiling.phases import PHASES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bounds the memory of intermediate encodings; the throughput is flat from 4,096 on.
_TEXTS_AT_ONCE = 16_384
_SHOWN = 80  # characters of a text that an error shows
_NAMED = 3  # characters that it says have no token
_SEARCHED = 10_000  # characters of a text in which those are searched


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    special: bool,
    where: Callable[[int], str],
) -> Ragged:
    """Return the token ids of each text, int32.

    Args:
        special: Whether to add the special tokens that the tokenizer puts around a
            plain text.
        where: Returns the name of a text by its number, for errors.

    Raises:
        DataError: the tokenizer has no tokens for a text.
    """
    (tokens,) = _encode(tokenizer, texts, where, partial(_chunk, special=special))
    return tokens


def encode_located(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    special: bool,
    where: Callable[[int], str],
) -> tuple[Ragged, Ragged]:
    """Return the token ids of each text as `encode` does, and where each token begins.

    Returns:
        The token ids, int32, and the number of the character of its text with which
        each token begins, int64. Tokens that the tokenizer puts in front have -1.

    Raises:
        DataError: the tokenizer has no tokens for a text, or does not know where they
            begin.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer in {tokenizer.name_or_path} does not say which characters"
            " a token stands for, by which responses are found",
            fix="expected a tokenizer.json in that directory; save the tokenizer as a"
            " fast one",
        )
    chunk = partial(_chunk, special=special, located=True)
    tokens, starts = _encode(tokenizer, texts, where, chunk)
    return tokens, starts


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    where: Callable[[int], str],
    encode_chunk: Callable[[PreTrainedTokenizerBase, list[str]], list[Ragged]],
) -> list[Ragged]:
    """Return the columns that `encode_chunk` makes of all texts."""
    # One chunk at a time bounds the memory of the encodings; no text is a chunk, too.
    parts = []
    for start in range(0, max(1, len(texts)), _TEXTS_AT_ONCE):
        PHASES.tick()
        chunk = list(texts[start : start + _TEXTS_AT_ONCE])
        try:
            parts.append(encode_chunk(tokenizer, chunk))
        # The Rust library raises bare Exception, which does not name the text.
        except Exception:
            for index, text in enumerate(chunk):
                error = _failure(encode_chunk, tokenizer, text)
                if error is not None:
                    reason, fix = _unknown_characters(encode_chunk, tokenizer, text)
                    raise DataError(
                        f"the tokenizer in {tokenizer.name_or_path} cannot encode"
                        f" {text[:_SHOWN]!r} ({reason or error})",
                        fix=fix,
                        place=where(start + index),
                    ) from None
            raise
    return [Ragged.concat(column) for column in zip(*parts, strict=True)]


def _failure(
    encode_chunk: Callable[[PreTrainedTokenizerBase, list[str]], list[Ragged]],
    tokenizer: PreTrainedTokenizerBase,
    text: str,
) -> Exception | None:
    """Return what encoding a text raises; None if it can be encoded."""
    try:
        encode_chunk(tokenizer, [text])
    except Exception as error:
        return error
    return None


def _unknown_characters(
    encode_chunk: Callable[[PreTrainedTokenizerBase, list[str]], list[Ragged]],
    tokenizer: PreTrainedTokenizerBase,
    text: str,
) -> tuple[str, str]:
    """Return which characters of a text have no token, and what to do about it.

    Both are empty if each has one.
    """
    # The name of a special token, such as <eos>, is one token.
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    for name in names:
        text = text.replace(name, "")
    # Those of a long text in another script say no more than the first ones.
    unknown = [
        character
        for character in dict.fromkeys(text[:_SEARCHED])
        if _failure(encode_chunk, tokenizer, character)
    ]
    if not unknown:
        return "", ""
    named = ", ".join(f"{each!r} (U+{ord(each):04X})" for each in unknown[:_NAMED])
    more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
    return (
        f"it has no token for {named}{more}",
        "Leave such characters out of the texts, or take a model whose tokenizer"
        " has a token for unknown ones, or for bytes.",
    )


def _chunk(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    *,
    special: bool,
    located: bool = False,
) -> list[Ragged]:
    """Return the token ids of some texts; and where they begin, if `located`."""
    # Lists of lists are not empty for the library.
    if not texts:
        kinds = (np.int32, np.int64)[: 1 + located]
        return [Ragged.of_rows([], kind) for kind in kinds]

    encoded = tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=located,
        return_special_tokens_mask=special,
        verbose=False,
    )
    rows: list[list[int]] = encoded["input_ids"]
    offsets = offsets_of([len(row) for row in rows])
    total = int(offsets[-1])
    # np.fromiter allocates once; an array of nested lists would need many objects
    tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)
    columns: list[Array] = [tokens]
    if located:
        bounds = chain.from_iterable(chain.from_iterable(encoded["offset_mapping"]))
        columns.append(np.fromiter(bounds, dtype=np.int64, count=2 * total)[::2])

    if special:
        masks = encoded["special_tokens_mask"]
        front, back = next(
            ((mask.index(0), mask[::-1].index(0)) for mask in masks if not all(mask)),
            (0, 0),
        )
        if located:
            columns[1][_positions(offsets[:-1], front)] = -1
        return _without_repeats(columns, offsets, front, back)
    return [Ragged(column, offsets) for column in columns]


def _without_repeats(
    columns: list[Array], offsets: Int64, front: int, back: int
) -> list[Ragged]:
    """Return rows of tokens in which what a tokenizer puts around a text stands once.

    Texts that a chat template has written already begin, and may end, with it.

    Args:
        columns: Values of each token; the first ones are token ids.
        offsets: Offsets of the rows, int64 [rows + 1].
        front: Number of tokens that the tokenizer has put in front of each text.
        back: Number of tokens that it has put behind each text.
    """
    tokens = columns[0]
    remains = np.ones(len(tokens), np.bool_)
    own = np.diff(offsets) - front - back
    for places, width, step in ((offsets[:-1], front, 1), (offsets[1:], back, -1)):
        rows = np.flatnonzero(own >= width)
        first = places[rows] - (width if step < 0 else 0)
        added = _positions(first, width)
        is_repeat = (tokens[added] == tokens[added + step * width]).all(axis=1)
        remains[added[is_repeat]] = False
        own[rows] -= is_repeat * width

    rest = offsets_of(remains)[offsets]
    return [Ragged(column[remains], rest) for column in columns]


def _positions(first: Int64, width: int) -> Int64:
    """Return positions of neighbours, int64 [places, width]: first, first + 1, ..."""
    return first[:, np.newaxis] + np.arange(width, dtype=np.int64)


# -------------------------------------------------- special tokens that texts spell out


Int32 = npt.NDArray[np.int32]
Texts = TypeVar("Texts", str, list[Message], str | list[Message])
"""A text, or chat messages."""

# Unicode promises that these two are never characters of a text.
_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"
_NEAR_END = 200  # characters
_MORE = 8
_JOINED = 4  # characters that NFC makes one
_KEEPING = ("ByteLevel", "Digits", "Split")
"""Rules of splitting that lose no character."""
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class SpelledTokens:
    """Guards the texts of a data set, and encodes them afterwards."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, setting: SpecialTokens
    ) -> None:
        self._tokenizer = tokenizer
        self._setting = setting

        added = tokenizer.added_tokens_decoder.items()
        special = {token.content: index for index, token in added if token.special}
        # A tokenizer takes the longest of the names that begin at a place.
        self._names = sorted(special, key=len, reverse=True)
        self._ids = [special[name] for name in self._names]
        self._numbers = {name: number for number, name in enumerate(self._names)}

        alternatives = "|".join(re.escape(name) for name in self._names)
        self._any_name = re.compile(alternatives)
        self._any_name_or_mark = re.compile(f"{alternatives}|{_OPEN}")

    def guard(self, value: Texts, where: str) -> Texts:
        """Return texts of a record, ready for the chat template or for `encode`.

        Args:
            where: The name of the record, for errors.

        Raises:
            DataError: a text spells a special token, which data.special_tokens refuses.
        """
        if self._setting == "allow" or not self._names:
            return value

        for place, text in _texts_of(value, where):
            if self._setting == "refuse":
                spelled = self._any_name.search(text)
                if spelled:
                    raise _refusal(place, spelled[0])
            elif self._any_name_or_mark.search(text):
                guarded: Texts = self._with_stand_ins(value, place)
                return guarded
        return value

    def encode(
        self, texts: Sequence[str], *, special: bool, where: Callable[[int], str]
    ) -> Ragged:
        """Return the token ids of each text, int32.

        It does what the function `encode` does, for texts that went through `guard`.
        """
        (tokens,) = self._encode(texts, special, where, _encoded)
        return tokens

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it.

        Args:
            text: It went through `guard`.
        """
        most = self._most_characters
        # Stand-ins have other lengths than the names that are encoded in their places.
        return 0 if most is None else len(_STAND_IN.sub("", text)) // most

    def end_of_tokens(self, text: str, count: int) -> int:
        """Return behind which character the first tokens of a text end.

        Args:
            text: A text of no template, as it is.
            count: Number of the tokens.
        """
        tokenizer = self._tokenizer
        if self._setting != "allow" and self._names and self._any_name.search(text):
            # It reads the names of special tokens as texts.
            tokenizer = self._with_aliases

        size = count
        # Each round reads more; ends with the text, or with more tokens than asked for.
        while True:
            size = min(len(text), size * _MORE)
            _, starts = encode_located(
                tokenizer, [text[:size]], special=False, where=lambda _: "a text"
            )
            if len(starts.values) > count:
                return int(starts.values[count])
            if size == len(text):
                return size

    @cached_property
    def _most_characters(self) -> int | None:
        """The characters that a token stands for at most; None if that is unknown.

        Known are byte-level tokenizers that change no character, or only join a letter
        with its marks, which four characters do at most.
        """
        if not self._tokenizer.is_fast:
            return None
        rules = json.loads(self._tokenizer.backend_tokenizer.to_str())
        normalizer = (rules["normalizer"] or {"type": "NFC"})["type"]
        splitter = rules["pre_tokenizer"] or {}
        parts = splitter.get("pretokenizers", [splitter])
        keeps_all = any(part.get("type") == "ByteLevel" for part in parts) and all(
            part["type"] in _KEEPING and part.get("behavior") != "Removed"
            for part in parts
        )
        strips = any(
            added["lstrip"] or added["rstrip"] for added in rules["added_tokens"]
        )
        if rules["model"]["type"] != "BPE" or normalizer != "NFC":
            return None
        if strips or not keeps_all or rules["model"]["unk_token"] is not None:
            return None
        longest = max(map(len, self._tokenizer.get_vocab()))
        return longest * (_JOINED if rules["normalizer"] else 1)

    def encode_pieces(
        self,
        pieces: Sequence[str],
        counts: Int64,
        *,
        special: bool,
        where: Callable[[int], str],
    ) -> Ragged:
        """Encode texts that come in pieces, each of them as a whole.

        Args:
            pieces: The pieces of all texts, in order; they went through `guard`.
            counts: The number of pieces of each text, int64 [texts].
            where: Returns the name of a text by its number, for errors.

        Returns:
            The token ids that begin in each piece, int32, one row per piece.
        """
        bounds = offsets_of(counts)
        pairs = itertools.pairwise(cast("list[int]", bounds.tolist()))
        slices = [slice(start, end) for start, end in pairs]
        texts = ["".join(pieces[part]) for part in slices]
        tokens, starts = self._encode(texts, special, where, encode_located)

        # Names and aliases of an escaped text have other lengths than its stand-ins.
        lengths = [len(piece) for piece in pieces]
        for row in self._escaped(texts):
            named = [len(self._with_names(piece)) for piece in pieces[slices[row]]]
            lengths[slices[row]] = named
        ends = np.cumsum(np.array(lengths, np.int64))
        text_starts = np.concatenate([[0], ends])[bounds[:-1]]

        # The texts stand one behind the other, and tokens never go back in them.
        row_of = np.repeat(np.arange(len(texts)), tokens.lengths)
        places = np.maximum.accumulate(starts.values + text_starts[row_of])
        piece_of = np.searchsorted(ends, places, side="right")
        piece_of = np.clip(piece_of, bounds[row_of], bounds[row_of + 1] - 1)
        counted = np.bincount(piece_of, minlength=len(pieces))
        return Ragged(tokens.values, offsets_of(counted))

    def last_special(self, text: str) -> tuple[int, int]:
        """Return start and end of the last special token in a text; 0, 0 if none is."""
        if not self._names:
            return 0, 0
        # It mostly stands near the end.
        for start in (max(0, len(text) - _NEAR_END), 0):
            spans = [match.span() for match in self._any_name.finditer(text, start)]
            if spans:
                return spans[-1]
        return 0, 0

    def _escaped(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of the texts that spell special tokens as texts."""
        if self._setting != "escape":
            return []
        return [index for index, text in enumerate(texts) if _OPEN in text]

    def _encode(
        self,
        texts: Sequence[str],
        special: bool,
        where: Callable[[int], str],
        encoder: Callable[..., tuple[Ragged, ...]],
    ) -> tuple[Ragged, ...]:
        """Return the columns that `encoder` makes; the first ones are token ids."""
        escaped = self._escaped(texts)
        if not escaped:
            return encoder(self._tokenizer, texts, special=special, where=where)

        others = np.setdiff1d(np.arange(len(texts)), escaped)
        plain = encoder(
            self._tokenizer,
            [texts[index] for index in others],
            special=special,
            where=lambda number: where(int(others[number])),
        )
        columns = self._encode_escaped(
            [texts[index] for index in escaped],
            special,
            lambda number: where(escaped[number]),
            encoder,
        )
        # Rows go back to the places of their texts.
        order = np.argsort(np.concatenate([others, np.array(escaped)]))
        pairs = zip(plain, columns, strict=True)
        return tuple(Ragged.concat(pair).select(order) for pair in pairs)

    def _encode_escaped(
        self,
        texts: Sequence[str],
        special: bool,
        where: Callable[[int], str],
        encoder: Callable[..., tuple[Ragged, ...]],
    ) -> tuple[Ragged, ...]:
        """Return the columns of texts with stand-ins."""
        named = [self._with_names(text) for text in texts]

        # The template's special tokens have other ids here, so any that is left comes
        # from a text: some models of a vocabulary build these tokens as they do others.
        columns = encoder(self._with_aliases, named, special=False, where=where)
        rows = columns[0]
        is_special = np.isin(rows.values, self._ids)
        if is_special.any():
            first = int(np.argmax(is_special))
            row = int(np.searchsorted(rows.offsets, first, side="right")) - 1
            name = self._names[self._ids.index(int(rows.values[first]))]
            raise DataError(
                f"the tokenizer has no other token for the text {name!r} than the"
                " special one, so that data.special_tokens=escape cannot keep it out",
                fix="correct the record, or set allow if the token is meant",
                place=where(row),
            )

        if special:
            columns = encoder(self._with_aliases, named, special=True, where=where)
        own = self._without_aliases(columns[0].values)
        return Ragged(own, columns[0].offsets), *columns[1:]

    def _with_stand_ins(self, value: Any, where: str) -> Any:
        """Return a value with a stand-in for each special token that a text spells."""
        if isinstance(value, str):
            return self._any_name_or_mark.sub(
                lambda match: self._stand_in(match[0], where), value
            )
        if isinstance(value, list):
            return [self._with_stand_ins(part, where) for part in value]
        if isinstance(value, dict):
            return {
                self._with_stand_ins(key, where): self._with_stand_ins(part, where)
                for key, part in value.items()
            }
        return value

    def _stand_in(self, name: str, where: str) -> str:
        if name == _OPEN:
            raise DataError(
                f"found the character {_OPEN!r}, which marks special tokens here"
                " (data.special_tokens = escape) and which Unicode keeps out of texts",
                fix="remove it",
                place=where,
            )
        return f"{_OPEN}{self._numbers[name]}{_CLOSE}"

    def _with_names(self, text: str) -> str:
        """Return a text as the copied tokenizer reads it.

        The special tokens of the template are aliases, and those of texts are names.
        """
        aliased = self._any_name.sub(lambda match: _alias(match[0]), text)
        return _STAND_IN.sub(lambda match: self._names[int(match[1])], aliased)

    @cached_property
    def _with_aliases(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer that knows special tokens by their aliases alone."""
        from tokenizers import AddedToken

        tokenizer = copy.deepcopy(self._tokenizer)
        aliases = []
        for index in self._ids:
            token = tokenizer.added_tokens_decoder[index]
            alias = AddedToken(
                _alias(token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=False,
            )
            aliases.append(alias)
        tokenizer.add_tokens(aliases)
        tokenizer.split_special_tokens = True
        return tokenizer

    def _without_aliases(self, tokens: Int32) -> Int32:
        """Return tokens of the copied tokenizer as those of the tokenizer, int32."""
        names = [_alias(name) for name in self._names]
        aliases = self._with_aliases.convert_tokens_to_ids(names)
        own = np.arange(len(self._with_aliases), dtype=np.int32)
        own[aliases] = self._ids
        return own[tokens]


def _encoded(*arguments: Any, **options: Any) -> tuple[Ragged]:
    return (encode(*arguments, **options),)


def _texts_of(value: str | list[Message], where: str) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each text in a prompt, or in a conversation."""
    if isinstance(value, str):
        yield where, value
        return
    for number, message in enumerate(value, start=1):
        yield from texts_in(message, f"{where}, message {number}")


def _refusal(place: str, name: str) -> DataError:
    return DataError(
        f"the text spells the special token {name!r}, with which it could end its turn"
        " or begin another (data.special_tokens = refuse)",
        fix="Set data.special_tokens=escape to encode it as ordinary text, or allow if"
        " the texts mean the token, as those do that a chat template has written"
        " already; or correct the record and keep refuse",
        place=place,
    )


def _alias(name: str) -> str:
    return f"{_OPEN}{name}{_CLOSE}"
