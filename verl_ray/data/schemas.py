"""Schemas of data sets: which columns hold the fields that a run reads.

Invariant: a schema is chosen from the first record alone and holds for the whole set,
so that one line can say how the set was read. `data.columns` goes before every name
that is known here.

A column is named by its path: a point leads into an object, as in
`reward_model.ground_truth`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_ray.config.data import FIELDS_OF_KIND, RecordKind
from verl_ray.data.fields import Fields
from verl_ray.errors import DataError
from verl_ray.shell import table_override

OWN_SCHEMA = "verl_ray's schema"
"""Description of sets in the fields of `records.py`."""

_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
_ANSWERS = (
    "answer", "solution", "ground_truth", "target", "final_answer", "completion",
    "response", "output",
)  # fmt: skip
_RESPONSES = ("response", "completion", "output", "solution", "answer", "target")
"""Usual names of columns, the first ones first."""

_OPTIONAL = {"data_source", "system", "margin", "input", "answer"}
"""Fields that no schema needs to have."""

_WITH_ANSWERS = {"answer", "response", "chosen", "rejected", "messages", "text"}
"""Fields that hold what a response is compared with, or would be learned from."""

_ALPACA = {"prompt": "instruction", "input": "input"}
_DOLLY = {"prompt": "instruction", "input": "context"}


@dataclass(frozen=True)
class Schema:
    """The columns of one data set.

    Attributes:
        description: How the set is read, in one line.
        columns: Our field -> the path of its column.
        needs: Our fields that every record has.
    """

    description: str
    columns: Mapping[str, str]
    needs: frozenset[str] = frozenset()

    def value(self, field: str, fields: Fields) -> object:
        """Return the value of our field in a record; None where there is none."""
        path = self.columns.get(field)
        return None if path is None else value_at(fields, path)


def value_at(fields: Fields, path: str) -> object:
    """Return the value at the path of a column; None where there is none."""
    value: object = fields
    # A column may have a point in its name.
    for part in (path,) if path in fields else path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def choose_schema(
    kind: RecordKind, columns: Mapping[str, str], first: Fields, where: str
) -> Schema:
    """Return the first known schema that a record fits.

    Args:
        columns: Our field -> the path of its column, as the user sets them.
        first: The first record of the set.
        where: Its place, for errors.

    Raises:
        DataError: the record has no such column, or fits no schema.
    """
    for field, path in columns.items():
        _require_column(field, path, first, where)

    schema = fitting_schema(kind, columns, first)
    if schema is None:
        raise _no_schema(kind, columns, first, where)
    return schema


def fitting_schema(
    kind: RecordKind, columns: Mapping[str, str], first: Fields
) -> Schema | None:
    """Return the first known schema that a record fits; None if it fits none.

    Args:
        columns: Our field -> the path of its column, as the user sets them.
        first: The first record of the set.
    """
    optional = FIELDS_OF_KIND[kind] & _OPTIONAL
    for known in _known_schemas(kind):
        if columns.keys() - known.columns.keys() - optional:
            continue
        names = {field: _spelling(path, first) for field, path in known.columns.items()}
        names |= columns
        if all(
            field in columns or _is_present(field, path, first)
            for field, path in names.items()
        ):
            others = _optional_columns(known, names, kind, first)
            description = _description(known, names, columns)
            if others.get("system") in first:
                description += f", system message from {others['system']}"
            return Schema(description, others | names, frozenset(names))
    return None


def _require_column(field: str, path: str, first: Fields, where: str) -> None:
    """Raise DataError if the user names a column that a record does not have."""
    section, _, name = path.rpartition(".")
    outer = value_at(first, section) if section else first
    if path in first or (isinstance(outer, dict) and name in outer):
        return

    place = "the columns"
    present = first
    if section and isinstance(outer, dict):
        place = f"the fields of {section}"
        present = outer
    raise DataError(
        f"no column {path!r}; {place} are {_listed(present)}",
        fix=f"take one of them for data.columns.{field}",
        place=where,
    )


def _optional_columns(
    known: Schema, names: Mapping[str, str], kind: RecordKind, first: Fields
) -> dict[str, str]:
    """Return the columns of fields that a record of the schema may have."""
    usual = FIELDS_OF_KIND[kind] & {"data_source", "system", "margin"}
    columns = {field: field for field in usual - names.keys()}
    if "system" in columns and "system" not in first and "system_prompt" in first:
        columns["system"] = "system_prompt"

    # A set may mix the two forms of our own schema: Parquet has nulls for the other.
    if known in _OWN_DEMONSTRATIONS and names == known.columns:
        columns |= {field: field for field in ("prompt", "response", "messages")}
    if known in _OWN_PREFERENCES:
        columns["prompt"] = "prompt"
    return columns


def _description(
    known: Schema, names: Mapping[str, str], columns: Mapping[str, str]
) -> str:
    """Return how a set is read, but for its system messages."""
    if not columns:
        return known.description.format(**names)
    pairs = ", ".join(f"{field} from {path}" for field, path in names.items())
    return f"data.columns: {pairs}"


def _is_present(field: str, path: str, first: Fields) -> bool:
    # The input of an instruction may be empty, in the first record too.
    if field == "input":
        return path in first
    return value_at(first, path) is not None


def _spelling(path: str, first: Fields) -> str:
    """Return the path as the record spells it: some sets have capitals."""
    if path in first or "." in path:
        return path
    return next((name for name in first if name.lower() == path), path)


# ----------------------------------------------------------------------- known schemas


def _known_schemas(kind: RecordKind) -> tuple[Schema, ...]:
    return {
        "prompt": _PROMPT_SCHEMAS,
        "supervised": _SUPERVISED_SCHEMAS,
        "preference": _PREFERENCE_SCHEMAS,
        "unpaired": _UNPAIRED_SCHEMAS,
    }[kind]


def _pairs(field: str, others: tuple[str, ...]) -> Iterator[Schema]:
    """Yield a schema for each pair of usual names of a prompt and of a field."""
    for other in others:
        for prompt in _PROMPTS:
            yield Schema(
                f"columns {{prompt}}, {{{field}}}", {"prompt": prompt, field: other}
            )


_PROMPT_SCHEMAS = (
    Schema(
        "verl's schema: answer from reward_model.ground_truth",
        {"prompt": "prompt", "answer": "reward_model.ground_truth"},
    ),
    Schema(OWN_SCHEMA, {"prompt": "prompt", "answer": "answer"}),
    Schema(
        "TRL's prompt and completion: answer from completion",
        {"prompt": "prompt", "answer": "completion"},
    ),
    Schema(
        "TRL's prompt and solution: answer from solution",
        {"prompt": "prompt", "answer": "solution"},
    ),
    Schema("Alpaca's schema: answer from output", {**_ALPACA, "answer": "output"}),
    Schema("Dolly's schema: answer from response", {**_DOLLY, "answer": "response"}),
    *_pairs("answer", _ANSWERS),
    *(
        Schema(
            "preferences: prompt from {prompt}, answer from chosen",
            {"prompt": prompt, "chosen": "chosen", "rejected": "rejected"},
        )
        for prompt in _PROMPTS
    ),
    Schema(
        "preferences: prompt from the beginning of chosen, answer from its end",
        {"chosen": "chosen", "rejected": "rejected"},
    ),
    *(
        Schema(
            f"messages: answer from {name}", {"messages": "messages", "answer": name}
        )
        for name in _ANSWERS[:3]
    ),
    Schema(
        "messages: answer from a last message of the assistant",
        {"messages": "messages"},
    ),
    Schema(
        "ShareGPT's conversations: answer from a last message of the assistant",
        {"messages": "conversations"},
    ),
    Schema("TRL's prompt alone: no answer", {"prompt": "prompt"}),
)

_OWN_DEMONSTRATIONS = (
    Schema(OWN_SCHEMA, {"messages": "messages"}),
    Schema(OWN_SCHEMA, {"prompt": "prompt", "response": "response"}),
)

_SUPERVISED_SCHEMAS = (
    *_OWN_DEMONSTRATIONS,
    Schema(
        "TRL's prompt and completion: response from completion",
        {"prompt": "prompt", "response": "completion"},
    ),
    Schema(
        "verl's schema: prompt from extra_info.question, response from"
        " extra_info.answer",
        {"prompt": "extra_info.question", "response": "extra_info.answer"},
    ),
    Schema(
        "verl's schema: response from extra_info.answer",
        {"prompt": "prompt", "response": "extra_info.answer"},
    ),
    Schema("ShareGPT's conversations", {"messages": "conversations"}),
    Schema("Alpaca's schema: response from output", {**_ALPACA, "response": "output"}),
    Schema(
        "Dolly's schema: response from response", {**_DOLLY, "response": "response"}
    ),
    *_pairs("response", _RESPONSES),
    Schema(
        "verl's schema: response from reward_model.ground_truth",
        {"prompt": "prompt", "response": "reward_model.ground_truth"},
    ),
    Schema("text: all of it is learned", {"text": "text"}),
)

_OWN_PREFERENCES = (
    Schema(
        OWN_SCHEMA,
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    ),
    Schema(
        "chosen and rejected: prompt from what both begin with",
        {"chosen": "chosen", "rejected": "rejected"},
    ),
)

_PREFERENCE_SCHEMAS = (
    _OWN_PREFERENCES[0],
    *(
        Schema(
            "columns {prompt}, {chosen}, {rejected}",
            {"prompt": prompt, "chosen": "chosen", "rejected": "rejected"},
        )
        for prompt in _PROMPTS[1:]
    ),
    _OWN_PREFERENCES[1],
)

_UNPAIRED_SCHEMAS = tuple(
    Schema(description, {**columns, "label": "label"})
    for description, columns in (
        (OWN_SCHEMA, {"prompt": "prompt", "response": "response"}),
        (
            "TRL's unpaired preferences: response from completion",
            {"prompt": "prompt", "response": "completion"},
        ),
        *(
            (f"{schema.description}, {{label}}", schema.columns)
            for schema in _pairs("response", _RESPONSES)
        ),
        ("messages: the last one is the response", {"messages": "messages"}),
        (
            "completion: prompt and response from its messages",
            {"response": "completion"},
        ),
    )
)


ANSWER_COLUMNS = frozenset(
    path.partition(".")[0]
    for schema in (*_PROMPT_SCHEMAS, *_SUPERVISED_SCHEMAS, *_PREFERENCE_SCHEMAS)
    for field, path in schema.columns.items()
    if field in _WITH_ANSWERS and not path.startswith("extra_info.")
)
"""Usual names of columns that hold the answer of a record, or begin a path to it: those
that some schema reads it from, whichever schema a set has."""


# ------------------------------------------------------------------------------- errors


def _no_schema(
    kind: RecordKind, columns: Mapping[str, str], first: Fields, where: str
) -> DataError:
    """Return the error about a record of no schema, with the setting to type."""
    table = table_override("data.columns", _guess(kind, columns, first))
    known = {
        "prompt": "prompt and answer",
        "supervised": "prompt and response, or messages",
        "preference": "prompt, chosen and rejected",
        "unpaired": "prompt, response and label, or prompt, chosen and rejected",
    }
    fix = f"set {table}"
    if kind == "preference" and fitting_schema("unpaired", {}, first) is not None:
        fix = (
            "take records of pairs, or use --config-name dpo preference.loss=kto,"
            " which learns from single responses with a label"
        )
    return DataError(
        f"the columns {_listed(first)} fit no schema that is known (as {known[kind]}"
        " would)",
        fix=fix,
        place=where,
    )


def _guess(
    kind: RecordKind, columns: Mapping[str, str], first: Fields
) -> dict[str, str]:
    """Return the value of data.columns that a user probably wants to type."""
    # Demonstrations may be meant to be the better half of pairs.
    if kind == "supervised" and first.get("chosen") is not None:
        if isinstance(first["chosen"], list):
            return {"messages": "chosen"}
        if isinstance(first.get("prompt"), str | list):
            return {"response": "chosen"}
        return {"text": "chosen"}

    usual: dict[RecordKind, dict[str, tuple[str, ...]]] = {
        "prompt": {"prompt": _PROMPTS, "answer": _ANSWERS},
        "supervised": {"prompt": _PROMPTS, "response": _RESPONSES},
        "preference": {
            "prompt": _PROMPTS,
            "chosen": ("chosen", "preferred", "winner", "better", "accepted"),
            "rejected": ("rejected", "dispreferred", "loser", "worse"),
        },
        "unpaired": {
            "prompt": _PROMPTS,
            "response": _RESPONSES,
            "label": ("label", "desirable", "good", "thumb", "liked", "feedback"),
        },
    }
    guess = dict(columns)
    for field, names in usual[kind].items():
        others = [name for name in first if name not in guess.values()]
        column = _similar(names, others)
        # Pairs may begin with their prompt.
        if column is not None or (kind, field) != ("preference", "prompt"):
            guess.setdefault(field, column or "COLUMN")
    return guess


def _similar(names: tuple[str, ...], columns: list[str]) -> str | None:
    """Return the column that resembles a usual name most."""
    for name in names:
        by_part = [column for column in columns if name in column.lower()]
        similar = difflib.get_close_matches(name, columns, n=1, cutoff=0.75)
        if similar or by_part:
            return [*similar, *by_part][0]
    return None


def _listed(fields: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in fields) or "none"
