"""Rules of the data: the columns that are named, and what a chat template gets.

Invariant: a field that no record of the task has is refused. Deliberately not here:
whether the files exist (`verl_ray/preflight/findings.py`) and have these columns
(`verl_ray/data/schemas.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl_ray.config.data import (
    FIELDS_OF_KIND,
    RESERVED_ARGUMENTS,
    DataSetEntry,
    RecordKind,
)
from verl_ray.config.rules.rule import OverriddenKeys
from verl_ray.config.schema import Config
from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import Problem
from verl_ray.shell import table_override


def columns_are_of_fields(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each field with a column that no record has."""
    row_format = config.row_format
    if row_format is None:
        return

    data = config.data
    named = {"data.columns": data.columns or {}}
    for key, value in (
        ("data.train_path", data.train_path),
        ("data.validation_path", data.validation_path),
    ):
        entries = value if isinstance(value, list) else [value]
        for number, entry in enumerate(entries):
            if isinstance(entry, DataSetEntry):
                item = f".{number}" if isinstance(value, list) else ""
                named[f"{key}{item}.columns"] = entry.columns or {}

    for key, columns in named.items():
        yield from column_problems(key, columns, row_format.kind)


def template_settings_have_a_use(
    config: Config, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of the chat template without a use."""
    template = config.data.chat_template
    if template is not None and config.data.apply_chat_template is False:
        rule = "this setting would be ignored: data.apply_chat_template = false"
        fix = "Leave it out, or set data.apply_chat_template=auto."
        yield Problem("data.chat_template", template, rule, fix)
    elif template is not None and config.preparation is not None:
        rule = "the run makes its own problems and model, which have no turns"
        fix = "Leave it out, or set prepare=null with a model and data of yours."
        yield Problem("data.chat_template", template, rule, fix)

    for name, value in config.data.chat_template_kwargs.items():
        key = f"data.chat_template_kwargs.{name}"
        if name in RESERVED_ARGUMENTS:
            rule = "the run itself gives this to the chat template"
            yield Problem(key, value, rule, "Leave it out.")
        elif config.data.apply_chat_template is False:
            rule = "this setting would be ignored: data.apply_chat_template = false"
            fix = "Leave it out, or set data.apply_chat_template=auto."
            yield Problem(key, value, rule, fix)


def column_problems(
    key: str, columns: Mapping[str, str], kind: RecordKind
) -> Iterator[Problem]:
    """Yield a problem for each field of `columns` that records of a kind have not.

    Args:
        key: The setting that holds the columns.
    """
    fields = sorted(FIELDS_OF_KIND[kind])
    for field, path in columns.items():
        if field in fields:
            continue
        rule = f"records of this task have no field {field!r}"
        # The two are the same thing in two tasks.
        counterparts = {"answer": "response", "response": "answer"}
        meant = counterparts.get(field)
        if meant in fields:
            fix = f"Use {table_override(key, {meant: path})}."
        else:
            fix = did_you_mean(field, fields, "field")
        yield Problem(f"{key}.{field}", path, rule, fix)
