"""Prompts of a run: tokenized once, and drawn batch by batch.

Invariant: prompt number g of the run (its `group_id`) is the same whatever the batch
sizes and resumes before it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from verl_ray.columns.batch import Int64, Ragged
from verl_ray.columns.stages import Prompts
from verl_ray.config.data import DataConfig, DataSet
from verl_ray.data.encoding import SpelledTokens
from verl_ray.data.fields import (
    ENVIRONMENT,
    TOOLS,
    Fields,
    Message,
    as_messages,
    canonical_json,
    environment_of,
    excerpt,
)
from verl_ray.data.records import PromptRecord, Reading, prompt_reading
from verl_ray.data.row_source import DataSets, Encoded, RowSource
from verl_ray.data.tokenizers import (
    TemplateArguments,
    guarded_arguments,
    render,
    require_chat_template,
    template_arguments,
)
from verl_ray.errors import DataError, OverlongRows
from verl_ray.settings.section import resolved
from verl_ray.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptSource(RowSource[PromptRecord, Prompts]):
    """Data sets of prompts."""

    unit = "prompt"

    def __init__(
        self,
        data_sets: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        seed: int,
        most_records: int | None = None,
        *,
        may_stream: bool = False,
        environments: Collection[str] = (),
    ) -> None:
        """Read and tokenize the prompts, or open the sets that stay on disk.

        Args:
            environments: Names of the environments that a record may name; without any,
                the run has no episodes.
            most_records: Number of records to read of each set at most; None reads all
                of them.
            may_stream: Whether large sets may stay on disk.

        Raises:
            DataError: the records, the chat template or the lengths do not fit, or no
                prompt remains.
        """
        self.tokenizer = tokenizer
        self._config = config
        self._environments = environments
        super().__init__(
            data_sets, config, seed, most_records=most_records, may_stream=may_stream
        )

    def next_batch(self, count: int) -> Prompts:
        """Return the next `count` prompts.

        `group_id` is the running number of a prompt in the run.
        """
        # A resumed run continues the numbers, as the cursor does.
        first = self.drawn
        rows, numbers = self._draw(count)
        group_id = np.arange(first, first + count, dtype=np.int64)
        if self.curriculum is not None:
            self.curriculum.note_drawn(group_id, numbers)
        return rows.replace(group_id=group_id)

    def all(self, limit: int | None = None) -> Prompts:
        """Return the first `limit` prompts in the order of the files, for evaluation.

        `group_id` is the number of the record in the files. The cursor does not move.
        """
        return self._first_rows(limit)

    def _reading(
        self, data_set: DataSet, first: Fields, where: str
    ) -> Reading[PromptRecord]:
        has_episodes = bool(self._environments)
        return prompt_reading(data_set, first, where, has_episodes=has_episodes)

    def _encode(
        self, records: Sequence[PromptRecord], *, is_all: bool
    ) -> Encoded[Prompts]:
        if self._environments:
            for record in records:
                _require_environment(record, self._environments)

        config = self._config
        chat = resolved(config.apply_chat_template)
        spelled = SpelledTokens(self.tokenizer, config.special_tokens)
        record_arguments = [record.template_arguments for record in records]
        tokens = tokens_of_prompts(
            [record.prompt for record in records],
            [record.where for record in records],
            self.tokenizer,
            spelled,
            template_arguments(config, record_arguments) if chat else None,
        )
        fitting = fitting_rows(
            tokens.lengths,
            [record.where for record in records],
            limit=config.max_prompt_tokens,
            limit_key="data.max_prompt_tokens",
            overlong=config.overlong,
            may_be_empty=not is_all,
        )

        messages = [json.dumps(record.prompt, ensure_ascii=False) for record in records]
        prompts = Prompts(
            offsets=tokens.offsets,
            group_id=np.arange(len(records), dtype=np.int64),
            tokens=tokens.values,
            messages=Ragged.of_texts(messages),
            data_source=Ragged.of_texts(record.data_source for record in records),
            answer=Ragged.of_texts(record.answer or "" for record in records),
            has_answer=np.array(
                [record.answer is not None for record in records], np.bool_
            ),
            extra=Ragged.of_texts(record.extra for record in records),
            template_arguments=Ragged.of_texts(map(json.dumps, record_arguments)),
        )
        skipped = {"too_long": len(records) - len(fitting)}
        return Encoded(prompts.select(fitting), fitting, skipped)

    def _contents(self, rows: Prompts, records: Sequence[PromptRecord]) -> Prompts:
        # The tokens stay, so whatever the chat template sees counts as it is.
        messages = [canonical_json(record.prompt) for record in records]
        sources = [
            None if record.has_default_source else record.data_source
            for record in records
        ]
        extra = [canonical_json(json.loads(record.extra)) for record in records]
        answers = [
            canonical_json(json.loads(record.answer))
            if record.has_json_answer and record.answer is not None
            else record.answer or ""
            for record in records
        ]
        return rows.replace(
            messages=Ragged.of_texts(messages),
            answer=Ragged.of_texts(answers),
            # As JSON, an empty name differs from none.
            data_source=Ragged.of_texts(map(canonical_json, sources)),
            extra=Ragged.of_texts(extra),
            # What they change is in the tokens.
            template_arguments=None,
        )


def _require_environment(record: PromptRecord, names: Collection[str]) -> None:
    """Raise DataError if a record lacks the environment that it names, or needs."""
    extra = json.loads(record.extra)
    name = extra.get(ENVIRONMENT)
    if name is not None and name not in list(names):
        raise DataError(
            f"{ENVIRONMENT} is {excerpt(name)}",
            expected="the name of an entry of agent.environments",
            fix=did_you_mean(str(name), list(names), "environment"),
            place=record.where,
        )
    if extra.get(TOOLS) and environment_of(extra, record.data_source, names) is None:
        raise DataError(
            f"found {TOOLS} in a record without an environment, which would offer them",
            fix=f"name one in {ENVIRONMENT!r}, set agent.environments.default, or"
            f" remove {TOOLS!r}",
            place=record.where,
        )


def fitting_rows(
    lengths: Int64,
    where: Sequence[str],
    *,
    limit: int,
    limit_key: str,
    overlong: Literal["refuse", "skip"],
    may_be_empty: bool = False,
) -> Int64:
    """Return the numbers of the rows with at most `limit` tokens, int64.

    Args:
        lengths: Tokens of each row, int64 [rows].
        where: The name of each row, for errors.
        limit_key: The setting that `limit` comes from, for errors.
        overlong: Whether longer rows are refused or left out (data.overlong).
        may_be_empty: Whether no row may remain.

    Raises:
        DataError: a row has no tokens, rows are too long and may not be skipped, or no
            row remains.
    """
    if not lengths.all():
        shortest = int(np.argmin(lengths))
        raise DataError(
            "no tokens", fix="expected a text that is not empty", place=where[shortest]
        )

    # Skipping must leave a row, or there would be nothing to draw.
    rows = np.flatnonzero(lengths <= limit)
    num_too_long = len(lengths) - len(rows)
    leaves_none = not len(rows) and not may_be_empty
    if num_too_long and (overlong == "refuse" or leaves_none):
        longest = int(np.argmax(lengths))
        skip = ", or set data.overlong=skip to leave them out"
        if overlong == "skip":
            skip = ""
        raise OverlongRows(
            f"{num_too_long} of {len(lengths)} rows are longer than {limit_key} ="
            f" {limit}; the longest has {lengths[longest]} tokens ({where[longest]})",
            key=limit_key,
            limit=limit,
            longest=int(lengths[longest]),
            way_on=skip,
        )
    return rows


def tokens_of_prompts(
    prompts: Sequence[str | list[Message]],
    places: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    spelled: SpelledTokens,
    arguments: Sequence[TemplateArguments] | None,
) -> Ragged:
    """Return the tokens of prompts, int32.

    Args:
        places: The name of each, for errors.
        arguments: What the chat template gets with each record; None if none is
            applied.
    """

    def where(index: int) -> str:
        return places[index]

    prompts = [
        spelled.guard(prompt, f"{place}, prompt")
        for prompt, place in zip(prompts, places, strict=True)
    ]
    if arguments is not None:
        require_chat_template(tokenizer)
        conversations = [as_messages(prompt) for prompt in prompts]
        guarded = [
            guarded_arguments(own, place, spelled)
            for own, place in zip(arguments, places, strict=True)
        ]
        texts = render(
            tokenizer,
            conversations,
            add_generation_prompt=True,
            where=where,
            arguments=guarded,
        )
        # The template has written the special tokens already.
        return spelled.encode(texts, special=False, where=where)

    texts = [
        plain_text(prompt, place) for prompt, place in zip(prompts, places, strict=True)
    ]
    return spelled.encode(texts, special=True, where=where)


def prompt_text(messages: str) -> str:
    """Return a prompt as one text: a plain text, or the contents of its messages.

    Args:
        messages: A value of a `messages` column, JSON.
    """
    prompt = json.loads(messages)
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt)


def plain_text(prompt: str | list[Message], where: str) -> str:
    """Return a prompt that no chat template is applied to.

    Raises:
        DataError: the prompt is a list of messages, which needs a chat template.
    """
    if isinstance(prompt, str):
        return prompt
    raise DataError(
        "found chat messages, but no chat template is applied"
        " (data.apply_chat_template = false, or the tokenizer has none)",
        fix="expected plain text, or a chat template: data.chat_template=chatml, plain"
        " or a file",
        place=where,
    )
