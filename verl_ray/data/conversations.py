"""Prompts with their responses as rows of tokens, and the demonstrations of a run.

Invariant: the tokens before a response are those that a rollout of the same prompt
would start from, and a response ends with the token that ends a generation. A row is
encoded as a whole. The loss of a batch of demonstrations is the mean over all its
response tokens, whichever rows they are in. Pairs of responses are in
`preferences.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from verl_ray.columns.batch import Int64, Ragged, offsets_of
from verl_ray.columns.stages import Bool, TrainingBatch
from verl_ray.config.data import DataFilesConfig, DataSet, SpecialTokens
from verl_ray.data.encoding import Int32, SpelledTokens
from verl_ray.data.fields import Fields, Message, as_messages, is_learned, without_marks
from verl_ray.data.prompts import fitting_rows
from verl_ray.data.records import Content, Reading, SupervisedRecord, supervised_reading
from verl_ray.data.row_source import DataSets, Encoded, RowSource
from verl_ray.data.tokenizers import (
    TemplateArguments,
    end_names,
    guarded_arguments,
    render,
    require_chat_template,
    template_arguments,
)
from verl_ray.errors import DataError
from verl_ray.settings.section import resolved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Responses = Literal["all", "last", "graded"]

_REASONED = "</think>"
_SHOWN = 40  # characters of a text that an error shows


def tokenize(
    contents: Sequence[Content | str],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool,
    special_tokens: SpecialTokens,
    responses: Responses,
    arguments: Sequence[TemplateArguments] | None = None,
) -> tuple[Ragged, Bool]:
    """Turn contents into rows of prompt and response; a row ends with a response.

    A content that is a single text is a response from its second token on, since
    nothing predicts the first. No chat template is applied to it.

    Args:
        where: The name of each content, for errors.
        special_tokens: What happens to special tokens that a content spells out.
        responses: Which turns of the assistant are responses: all that are learned,
            or only the last message, to which all others are then the prompt. Of a
            graded one, the chat template may leave out the reasoning.
        arguments: What the chat template gets with each content.

    Returns:
        The tokens of each row, int32, and a mask, bool [tokens], True on responses.

    Raises:
        DataError: the tokenizer or its chat template does not fit a content, or a
            prompt has no tokens.
    """
    spelled = SpelledTokens(tokenizer, special_tokens)
    texts: dict[int, str] = {}
    answered: dict[int, Content] = {}
    for row, (content, place) in enumerate(zip(contents, where, strict=True)):
        if isinstance(content, str):
            texts[row] = spelled.guard(content, place)
        else:
            answered[row] = _guarded(content, place, spelled)

    tokens, mask = _tokenize_single(
        list(texts.values()), [where[row] for row in texts], tokenizer, spelled
    )
    if answered:
        guarded = list(answered.values())
        places = [where[row] for row in answered]
        if apply_chat_template:
            require_chat_template(tokenizer)
            row_arguments = [arguments[row] for row in answered] if arguments else None
            others = _tokenize_chat(
                guarded, places, tokenizer, spelled, responses, row_arguments
            )
        else:
            others = _tokenize_text(guarded, places, tokenizer, spelled)
        # Rows go back to the places of their contents.
        order = np.argsort([*texts, *answered])
        tokens, mask = _concat((tokens, mask), others, order)

    _require_contexts(tokens, mask, where)
    return tokens, mask


def _require_contexts(tokens: Ragged, mask: Bool, where: Sequence[str]) -> None:
    """Raise DataError if a row begins with its response."""
    # A model predicts a token from those before it: the first response token needs one.
    starts_with_response = mask[tokens.offsets[:-1]]
    if starts_with_response.any():
        first = where[int(np.argmax(starts_with_response))]
        raise DataError(
            "no token before the response",
            fix="expected a prompt that is not empty",
            place=first,
        )


def _guarded(content: Content, place: str, spelled: SpelledTokens) -> Content:
    if isinstance(content, list):
        return spelled.guard(content, place)
    prompt, response = content
    return (
        spelled.guard(prompt, f"{place}, prompt"),
        spelled.guard(response, f"{place}, response"),
    )


def _concat(
    first: tuple[Ragged, Bool], second: tuple[Ragged, Bool], order: Int64
) -> tuple[Ragged, Bool]:
    """Join rows of tokens with their masks, and put the rows in an order."""
    tokens = Ragged.concat([first[0], second[0]])
    mask = Ragged(np.concatenate([first[1], second[1]]), tokens.offsets)
    return tokens.select(order), mask.select(order).values


# -------------------------------------------------------------------------- plain texts


def _tokenize_single(
    texts: Sequence[str],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
) -> tuple[Ragged, Bool]:
    ends = end_names(tokenizer)
    ended = [_ended(text, ends) for text in texts]
    tokens = spelled.encode(ended, special=True, where=where.__getitem__)
    # Each row has its end at least, so that it has a first token.
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    return tokens, mask


def _tokenize_text(
    contents: Sequence[Content],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
) -> tuple[Ragged, Bool]:
    ends = end_names(tokenizer)
    turns = []
    for row, (content, place) in enumerate(zip(contents, where, strict=True)):
        prompt, response = _pair(content, place)
        turns.append(Turn(row, prompt, _ended(response, ends)))
    return rows_of(turns, where, tokenizer, spelled, special=True)


def _ended(text: str, ends: Sequence[str]) -> str:
    """Return a text up to the token that ends a response, which is added if need be."""
    # Some templates write a line break behind the end of a turn.
    written = text.rstrip()
    return written if written.endswith(tuple(ends)) else text + ends[0]


def _pair(content: Content, where: str) -> tuple[str, str]:
    if isinstance(content, tuple):
        return content
    raise DataError(
        "found chat messages, but no chat template is applied"
        " (data.apply_chat_template = false, or the tokenizer has none)",
        fix="expected plain texts as prompt and response, or a chat template:"
        " data.chat_template=chatml, plain or a file",
        place=where,
    )


# ------------------------------------------------------------------------ conversations


def _tokenize_chat(
    contents: Sequence[Content],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
    responses: Responses,
    arguments: Sequence[TemplateArguments] | None,
) -> tuple[Ragged, Bool]:
    conversations = [_conversation(content) for content in contents]
    answers = _answers(conversations, responses)
    messages = [without_marks(conversation) for conversation in conversations]
    row_arguments = [
        guarded_arguments(own, place, spelled)
        for own, place in zip(arguments or [{}] * len(where), where, strict=True)
    ]

    def answer_where(number: int) -> str:
        row, index = answers[number]
        return f"{where[row]}, message {index + 1}"

    # Each turn is written twice, without the response and with it: the difference is
    # what the model has to generate.
    befores = [messages[row][:index] for row, index in answers]
    up_to = [messages[row][: index + 1] for row, index in answers]
    answer_arguments = [row_arguments[row] for row, _ in answers]
    write = partial(render, tokenizer, where=answer_where, arguments=answer_arguments)
    openings = write(befores, add_generation_prompt=True)
    closings = write(up_to, add_generation_prompt=False)

    ends = end_names(tokenizer)
    turns: list[Turn] = []
    text_so_far = ""  # text of the current row's turns so far
    for number, (row, index) in enumerate(answers):
        if not turns or turns[-1].row != row:
            text_so_far = ""
        opening = openings[number]
        if not opening.startswith(text_so_far):
            raise _rewritten(answer_where(number), opening, text_so_far)

        answer = str(messages[row][index]["content"])
        written = _Written(opening, closings[number], answer, answer_where(number))
        response = written.response(ends, tokenizer)
        if responses != "graded":
            written.require_reasoning(response)
        turns.append(Turn(row, opening[len(text_so_far) :], response))
        text_so_far = opening + response

    return rows_of(turns, where, tokenizer, spelled, special=False)


def _answers(
    conversations: Sequence[list[Message]], responses: Responses
) -> list[tuple[int, int]]:
    """Numbers (row, message) of all responses, row by row."""
    answers = []
    for row, messages in enumerate(conversations):
        last = len(messages) - 1
        for index, message in enumerate(messages):
            is_response = is_learned(message) if responses == "all" else index == last
            if is_response:
                answers.append((row, index))
    return answers


def _conversation(content: Content) -> list[Message]:
    if isinstance(content, list):
        return content
    prompt, response = content
    return [*as_messages(prompt), {"role": "assistant", "content": response}]


@dataclass(frozen=True, slots=True)
class _Written:
    """An answer as the chat template writes it."""

    opening: str
    """Text that a rollout starts from, which ends with the generation prompt."""
    closing: str
    """Text of the messages up to the answer, itself included."""
    answer: str
    """Content of the answer."""
    where: str

    def response(self, ends: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
        """Return what the model has to generate, up to the end of its turn."""
        start = len(self.opening)
        if not self.closing.startswith(self.opening):
            raise DataError(
                f"a rollout starts from {_parted(self.opening, self.closing)}, and the"
                " chat template writes the answer behind"
                f" {_parted(self.closing, self.opening)}",
                fix="expected it behind what a rollout starts from; correct what the"
                " template does with add_generation_prompt, or set"
                " data.apply_chat_template=false and write prompts and responses"
                " as plain texts",
                place=self.where,
            )

        # The text behind the end of turn, such as a line break, is not generated.
        places = [(self.closing.find(end, start), len(end)) for end in ends]
        reached = [(place, -length) for place, length in places if place >= 0]
        if not reached:
            raise self._endless(ends, tokenizer)
        place, length = min(reached)
        return self.closing[start : place - length]

    def _endless(
        self, ends: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> DataError:
        expected = " or ".join(repr(end) for end in ends)
        behind = self.closing[len(self.opening) :].rpartition(self.answer.strip())[2]
        added = tokenizer.added_tokens_decoder.values()
        names = [token.content for token in added if token.content in behind]
        if names:
            return DataError(
                f"the chat template ends the turn with {names[0]!r}, at which no"
                f" rollout ends; the eos_token is {tokenizer.eos_token!r}",
                expected=expected,
                fix=f"add the number of {names[0]!r} to eos_token_id in the model's"
                " generation_config.json",
                place=self.where,
            )
        return DataError(
            "the chat template writes no end of turn behind the answer, but"
            f" {behind[:_SHOWN]!r}",
            fix=f"expected {expected}, of which the first is the eos_token; let the"
            " template write it behind each answer",
            place=self.where,
        )

    def require_reasoning(self, response: str) -> None:
        """Raise DataError if the template drops reasoning that is to be learned."""
        if _REASONED in self.answer and _REASONED not in response:
            raise DataError(
                "the chat template leaves out the reasoning of this answer, up to"
                f" {_REASONED!r}, so that it would not be learned",
                fix="take a template that writes it, or records without it",
                place=self.where,
            )


def _parted(text: str, other: str) -> str:
    """Return the end of a text from the place on where it parts from another."""
    pairs = enumerate(zip(text, other, strict=False))
    shortest = min(len(text), len(other))
    shared = next((at for at, (a, b) in pairs if a != b), shortest)
    start = max(0, shared - _SHOWN)
    return repr(text[start : shared + _SHOWN])


def _rewritten(where: str, opening: str, earlier: str) -> DataError:
    return DataError(
        "the chat template writes earlier turns otherwise once they are past, as"
        " templates do that leave out earlier reasoning: found"
        f" {_parted(opening, earlier)}",
        expected=_parted(earlier, opening),
        fix="One row cannot teach both answers: write a record for each of them, with"
        ' the messages before it, {"prompt": messages, "response": answer}; or mark'
        ' the earlier answers with "trainable": false',
        place=where,
    )


# ------------------------------------------------------------------------ rows of turns


@dataclass(frozen=True, slots=True)
class Turn:
    """A response, and the text of its row that stands before it."""

    row: int
    context: str
    """What stands between the response before and this one."""
    response: str


def rows_of(
    turns: Sequence[Turn],
    where: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
    *,
    special: bool,
) -> tuple[Ragged, Bool]:
    """Encode rows of context, response, context, response, ...

    Each row is encoded as a whole. What comes before a response has the tokens that a
    rollout starts from, also where a token of the whole would reach across the border:
    the text behind the last special token is encoded by itself to see that.

    Args:
        where: The name of each row, for errors.
        special: Whether a tokenizer adds its special tokens to a row.

    Returns:
        The tokens of each row, and a mask that is True on responses.
    """
    pieces, openings = _pieces(turns, spelled)
    turns_per_row = np.bincount([turn.row for turn in turns], minlength=len(where))
    turns_per_row = turns_per_row.astype(np.int64)
    parts = spelled.encode_pieces(
        pieces, 3 * turns_per_row, special=special, where=where.__getitem__
    )
    begun = spelled.encode_pieces(
        openings,
        np.full(len(turns), 2, np.int64),
        special=special,
        where=lambda number: where[turns[number].row],
    )

    numbers = 3 * np.arange(len(turns), dtype=np.int64)
    heads, rests, responses = (parts.select(numbers + part) for part in range(3))
    own_rests = begun.select(2 * np.arange(len(turns), dtype=np.int64) + 1)
    crossed = np.flatnonzero(~equal_rows(rests, own_rests))
    if len(crossed):
        continued = [
            _continuation(
                openings[2 * turn], openings[2 * turn + 1], turns[turn].response,
                responses[turn], tokenizer, spelled,
            )
            for turn in crossed.tolist()
        ]  # fmt: skip
        order = np.arange(len(turns), dtype=np.int64)
        order[crossed] = len(turns) + np.arange(len(crossed))
        responses = Ragged.concat(
            [responses, Ragged.of_rows(continued, np.int32)]
        ).select(order)

    segments = alternate(heads, own_rests, responses)
    mask = np.repeat(np.tile([False, False, True], len(turns)), segments.lengths)
    row_offsets = segments.offsets[3 * offsets_of(turns_per_row)]
    return Ragged(segments.values, row_offsets), mask


def _pieces(
    turns: Sequence[Turn], spelled: SpelledTokens
) -> tuple[list[str], list[str]]:
    """Return the pieces of all rows, and those of what is before each response.

    The first ones are three for each turn: the context up to its last special token,
    the rest of it, and the response. The others are that token and that rest. A context
    without a special token stands behind the one that ended the response before it.
    """
    pieces: list[str] = []
    openings: list[str] = []
    row, ended_by = -1, ""
    for turn in turns:
        start, end = spelled.last_special(turn.context)
        rest = turn.context[end:]
        anchor = turn.context[start:end]
        if not anchor and turn.row == row:
            anchor = ended_by
        pieces += [turn.context[:end], rest, turn.response]
        openings += [anchor, rest]

        start, end = spelled.last_special(turn.response)
        row, ended_by = turn.row, turn.response[start:end]
    return pieces, openings


def _continuation(
    name: str,
    rest: str,
    response: str,
    in_whole: Int32,
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
) -> Int32:
    """Return tokens of a response that stand behind the tokens of its opening, int32.

    Args:
        name: The last special token before the response, or nothing.
        rest: The text between it and the response.
        in_whole: The tokens that begin in the response when all is encoded as one.
    """

    def tokens_of(*pieces: str) -> Ragged:
        count = np.array([len(pieces)], dtype=np.int64)
        return spelled.encode_pieces(
            pieces, count, special=False, where=lambda _: "a response"
        )

    begun = tokens_of(name, rest).values
    expected = tokenizer.decode(tokens_of(name, rest, response).values)
    # Some tokenizers put a space before a text, and not behind another character.
    alone = tokens_of("", response)[1]
    candidates = [in_whole, alone]
    for before in (str(tokenizer.eos_token), "\n", "."):
        # A vocabulary need not have these.
        with contextlib.suppress(DataError):
            candidates.append(tokens_of(before, response)[1])
    for candidate in candidates:
        if tokenizer.decode(np.concatenate([begun, candidate])) == expected:
            return candidate
    return alone


def equal_rows(first: Ragged, second: Ragged) -> Bool:
    """Rows in which both columns hold the same values, bool [rows]."""
    equal: Bool = first.lengths == second.lengths

    # Only rows of equal length can be compared value by value.
    rows = np.flatnonzero(equal)
    candidates = first.select(rows)
    differs = candidates.values != second.select(rows).values
    differences = offsets_of(differs)[candidates.offsets]
    equal[rows] = np.diff(differences) == 0
    return equal


def alternate(*columns: Ragged) -> Ragged:
    """Rows of columns in turn: first 0, second 0, ..., first 1, second 1, ..."""
    count = len(columns[0])
    numbers = np.arange(len(columns) * count, dtype=np.int64)
    order = numbers.reshape(len(columns), count).T.ravel()
    return Ragged.concat(columns).select(order)


# ----------------------------------------------------------------------- demonstrations


RecordT = TypeVar("RecordT")


class ResponseSource(RowSource[RecordT, TrainingBatch]):
    """Data sets of responses whose tokens all weigh the same."""

    def __init__(
        self,
        data_sets: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        config: DataFilesConfig,
        *,
        max_tokens: int,
        seed: int,
        most_records: int | None = None,
        may_stream: bool = False,
    ) -> None:
        """Read the records, or open the sets that stay on disk.

        Args:
            max_tokens: Limit of prompt and response together (sft.max_tokens).
            most_records: Number of records to read of each set at most; None reads all
                of them.
            may_stream: Whether large sets may stay on disk.

        Raises:
            DataError: the records, the chat template or the lengths do not fit, or no
                record remains.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        super().__init__(
            data_sets, config, seed, most_records=most_records, may_stream=may_stream
        )

    def next_batch(self, count: int) -> TrainingBatch:
        """Return the next `count` rows.

        `loss_weight` makes the loss the mean over all response tokens of the batch.
        """
        rows, _ = self._draw(count)
        return _with_mean_weights(rows)

    def all(self, limit: int | None = None) -> TrainingBatch:
        """Return the first `limit` rows in the order of the files, equally weighted.

        The cursor does not move.
        """
        return _with_mean_weights(self._first_rows(limit))


class SupervisedSource(ResponseSource[SupervisedRecord]):
    """Data sets of demonstrations."""

    unit = "demonstration"

    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[SupervisedRecord]:
        return supervised_reading(data_set, first, where)

    def _encode(
        self, records: Sequence[SupervisedRecord], *, is_all: bool
    ) -> Encoded[TrainingBatch]:
        where = [record.where for record in records]
        tokens, mask = tokenize(
            [record.content for record in records],
            where,
            self._tokenizer,
            apply_chat_template=resolved(self._config.apply_chat_template),
            special_tokens=self._config.special_tokens,
            responses="all",
            arguments=template_arguments(
                self._config, [record.template_arguments for record in records]
            ),
        )
        # Every turn of the assistant is a response, so a row is one conversation.
        fitting = fitting_rows(
            tokens.lengths,
            where,
            limit=self._max_tokens,
            limit_key="sft.max_tokens",
            overlong=self._config.overlong,
            may_be_empty=not is_all,
        )

        demonstrations = TrainingBatch(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=mask,
            # A weight depends on the batch: `_with_mean_weights` sets it.
            loss_weight=np.zeros(len(records), dtype=np.float32),
        )
        skipped = {"too_long": len(records) - len(fitting)}
        return Encoded(demonstrations.select(fitting), fitting, skipped)


def _with_mean_weights(rows: TrainingBatch) -> TrainingBatch:
    """Return the rows with the weight of a mean over all their response tokens."""
    # A batch without response tokens has a loss of 0, and no division by 0.
    num_response_tokens = int(np.count_nonzero(rows.response_mask))
    weight = 1.0 / max(1, num_response_tokens)
    return rows.replace(loss_weight=np.full(rows.num_rows, weight, dtype=np.float32))
