"""The chat template of a run, and its arguments: what it gets besides the messages.

Invariant: the values of a record go before those of the run, and a text among them
cannot become a special token any more than a message can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_ray.config.data import RESERVED_ARGUMENTS, DataFilesConfig
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.data.encoding import SpelledTokens
from verl_ray.data.fields import Fields, excerpt, require_encodable, without_nulls
from verl_ray.data.tokenizers import CHAT_TEMPLATES, load_tokenizer
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateArguments = Mapping[str, object]
"""Name of a variable of the template -> its value."""

OF_RECORD = "chat_template_kwargs"
"""The column of a record with its arguments, as TRL calls it."""

PRESENT_TIME = "strftime_now"
"""The function that a template writes the day with."""

_OF_VERL = "enable_thinking"


def template_of(config: DataFilesConfig) -> str | None:
    """Return the text of the chat template of a run; None if it is the tokenizer's."""
    named = config.chat_template
    return None if named is None else CHAT_TEMPLATES.get(named, named)


def policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the data are read with, with the run's chat template.

    Raises:
        ModelError: It cannot be loaded.
        DataError: The chat template does not fit the tokenizer.
    """
    folder = config.model_roles[config.evaluated_role].model.folder
    return load_tokenizer(folder, template_of(config.data))


def arguments_of(fields: Fields, where: str) -> dict[str, object]:
    """Return what a record gives to the chat template.

    Args:
        where: The place of the record, for errors.

    Raises:
        DataError: They are no object, have a name that is not free, or contradict each
            other.
    """
    # Arrow gives each record the arguments of all others, with nulls.
    value = without_nulls(fields.get(OF_RECORD))
    if value is not None and not isinstance(value, dict):
        raise DataError(
            f"{OF_RECORD} is {excerpt(value)}",
            expected='an object such as {"enable_thinking": false}',
            place=where,
        )
    arguments: dict[str, object] = {**(value or {})}
    require_encodable(arguments, f"{where}, {OF_RECORD}")
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            raise DataError(
                f"{OF_RECORD} has {name!r}, which the run itself gives to the chat"
                " template",
                fix="leave it out",
                place=where,
            )

    thinks = fields.get(_OF_VERL)
    if thinks is None:
        return arguments
    # A template compares it with false, and a .csv holds texts.
    if not isinstance(thinks, bool):
        raise DataError(
            f"{_OF_VERL} is {excerpt(thinks)}",
            expected="true or false",
            fix="write it as .jsonl or Parquet, or in chat_template_kwargs",
            place=where,
        )
    if arguments.setdefault(_OF_VERL, thinks) != thinks:
        raise DataError(
            f"{_OF_VERL} is {thinks}, and {arguments[_OF_VERL]} in {OF_RECORD}",
            fix="leave one of them out",
            place=where,
        )
    return arguments


def of_run(config: DataFilesConfig) -> dict[str, object]:
    """Return what a run gives to the template with every record."""
    return {**day_of_run(config), **config.chat_template_kwargs}


def day_of_run(config: DataFilesConfig) -> dict[str, object]:
    """Return what a run gives to every template, those of its graders included."""
    day = resolved(config.template_day)
    return {} if day is None else {PRESENT_TIME: partial(_written, day)}


def _written(day: str, pattern: str) -> str:
    """Return the beginning of a day as a template wants the present time."""
    return datetime.fromisoformat(day).strftime(pattern)


def template_arguments(
    config: DataFilesConfig, of_records: Iterable[TemplateArguments]
) -> list[dict[str, object]]:
    """Return what the template gets with each record, in their order.

    Args:
        of_records: The arguments of the records themselves.
    """
    shared = of_run(config)
    return [{**shared, **of_record} for of_record in of_records]


def guarded_arguments(
    arguments: TemplateArguments, where: str, spelled: SpelledTokens
) -> dict[str, object]:
    """Return arguments whose texts are ready for the template.

    Args:
        where: The name of the record, for errors.

    Raises:
        DataError: A text spells a special token, which data.special_tokens refuses.
    """
    guarded: dict[str, object] = {}
    for name, value in arguments.items():
        place = f"{where}, {name}"
        guarded[name] = value
        if isinstance(value, str):
            guarded[name] = spelled.guard(value, place)
        elif isinstance(value, list | dict):
            parts: list[Any] = [value]
            (guarded[name],) = spelled.guard(parts, place)
    return guarded
