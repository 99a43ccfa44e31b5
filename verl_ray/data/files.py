"""Records on disk: .jsonl, .parquet, or a folder saved by Hugging Face datasets, read alike and written alike.

Invariant: a record is checked where it is read, so an error names the file, the line and the field; what leaves this
module is typed. Deliberately not here: tokens (`prompts.py`, `conversations.py`) and downloads of any kind.

A prompt record:      {"prompt": text or messages, "answer": text, "data_source": text?, "extra": object?}
A supervised record:  {"prompt": text or messages, "response": text}  or  {"messages": messages}
A preference record:  {"prompt": text or messages, "chosen": text, "rejected": text, "margin": number?}
                      or  {"chosen": messages, "rejected": messages, "margin": number?}
where messages is a list of {"role": text, "content": text}; those of chosen and rejected are the whole conversation and
differ in the last message alone, the response. Further fields are ignored, so one file can serve all three.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ray.errors import DataError

Message = dict[str, object]
Fields = dict[str, object]
Content = tuple[str, str] | list[Message]
"""A (prompt, response) pair of plain texts, or a conversation with assistant turns."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One problem: what the model is asked, and what its reward function compares the response with."""

    where: str
    prompt: str | list[Message]
    answer: str
    data_source: str
    extra: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class SupervisedRecord:
    """One demonstration of what the model should say."""

    where: str
    content: Content


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """Two responses to one prompt, of which the first is better; a conversation ends with its response."""

    where: str
    chosen: Content
    rejected: Content
    margin: float | None
    """By how much the score of the chosen one should at least exceed the other; None where the record says nothing."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The same records in every format that can be read."""

    jsonl: Path
    parquet: Path
    folder: Path


def read_prompts(path: str | Path) -> list[PromptRecord]:
    """All prompt records of a file or folder, in its order.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    source = Path(path).stem
    return [_prompt_record(where, fields, source) for where, fields in _rows(Path(path))]


def read_supervised(path: str | Path) -> list[SupervisedRecord]:
    """All supervised records of a file or folder, in its order.

    Raises:
        DataError: the path, a line or a field is not what it should be.
    """
    return [_supervised_record(where, fields) for where, fields in _rows(Path(path))]


def read_preferences(path: str | Path) -> list[PreferenceRecord]:
    """All preference records of a file or folder, in its order.

    Raises:
        DataError: the path, a line or a field is not what it should be; two conversations have different prompts.
    """
    return [_preference_record(where, fields) for where, fields in _rows(Path(path))]


def write_records(records: Sequence[Fields], directory: Path, name: str) -> DataFiles:
    """Write records as `<name>.jsonl`, `<name>.parquet` and a datasets folder `<name>/`, replacing what is there."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    directory.mkdir(parents=True, exist_ok=True)
    files = DataFiles(directory / f"{name}.jsonl", directory / f"{name}.parquet", directory / name)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    files.jsonl.write_text("".join(lines), encoding="utf-8")
    table = pa.Table.from_pylist(list(records))
    pyarrow.parquet.write_table(table, files.parquet)
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset(table).save_to_disk(str(files.folder))
    finally:
        if bars:
            datasets.enable_progress_bars()
    return files


def read_jsonl(path: Path) -> Iterator[tuple[str, Fields]]:
    """(place, object) of every line that is not blank."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:  # JSON and UTF-8 errors alike
                raise DataError(f"{where}: not JSON ({error}); expected one JSON object per line") from None
            if not isinstance(fields, dict):
                raise DataError(f"{where}: found {type(fields).__name__}, expected a JSON object")
            yield where, fields


def require_text(fields: Fields, name: str, where: str) -> str:
    """The text in a field that must be there; a DataError says what is there instead."""
    value = fields.get(name)
    if value is None:
        raise DataError(f"{where}: {_missing((name,), fields)}")
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {_shown(value)}, expected text (a JSON string)")
    return value


# ------------------------------------------------------------------------------------------------------- reading


def _rows(path: Path) -> Iterator[tuple[str, Fields]]:
    if not path.exists():
        raise DataError(f"{path} does not exist; set data.train_path and data.validation_path to {_FORMATS}")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(f"{path}: found a file with suffix {path.suffix!r}, expected {_FORMATS}")


_FORMATS = "a .jsonl file, a .parquet file, or a folder saved by Hugging Face datasets (save_to_disk)"


def _read_parquet(path: Path) -> Iterator[tuple[str, Fields]]:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = (fields for batch in batches for fields in batch.to_pylist())
        for number, fields in enumerate(rows, start=1):
            yield f"{path}, row {number}", fields
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error})") from None


def _read_folder(path: Path) -> Iterator[tuple[str, Fields]]:
    import datasets

    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        chosen = ", ".join(str(path / split) for split in splits)
        raise DataError(f"{path} holds several splits; point data.train_path at one of them: {chosen}")
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not {_FORMATS.rpartition('or ')[2]} ({error})") from None
    for number, fields in enumerate(rows.with_format(None), start=1):
        yield f"{path}, row {number}", fields


# ------------------------------------------------------------------------------------------------------ checking


def _prompt_record(where: str, fields: Fields, default_source: str) -> PromptRecord:
    _refuse_misspelt(where, tuple(fields), ("data_source", "extra"))
    prompt = _prompt(fields, where)
    extra = {} if fields.get("extra") is None else fields["extra"]
    if not isinstance(extra, dict):
        raise DataError(f"{where}: extra is {_shown(extra)}, expected an object (or no such field)")
    try:
        extra_text = json.dumps(extra, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: extra holds what JSON cannot ({error})") from None
    source = default_source if fields.get("data_source") is None else require_text(fields, "data_source", where)
    return PromptRecord(where, prompt, require_text(fields, "answer", where), source, extra_text)


def _supervised_record(where: str, fields: Fields) -> SupervisedRecord:
    if fields.get("messages") is not None:
        messages = _messages(fields["messages"], "messages", where)
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: messages has no assistant turn to learn from")
        return SupervisedRecord(where, messages)
    if fields.get("prompt") is None:
        raise DataError(f"{where}: {_missing(('prompt', 'messages'), fields)}")
    return SupervisedRecord(where, _content(_prompt(fields, where), require_text(fields, "response", where)))


def _preference_record(where: str, fields: Fields) -> PreferenceRecord:
    _refuse_misspelt(where, tuple(fields), ("margin",))
    margin = _margin(fields, where)
    if isinstance(fields.get("chosen"), list):
        before, chosen = _answered(fields, "chosen", where)
        other, rejected = _answered(fields, "rejected", where)
        if before != other:
            raise DataError(
                f"{where}: chosen and rejected differ before their last message; expected two responses to one prompt"
            )
        return PreferenceRecord(where, [*before, chosen], [*other, rejected], margin)
    better, worse = (require_text(fields, name, where) for name in ("chosen", "rejected"))
    prompt = _prompt(fields, where)
    return PreferenceRecord(where, _content(prompt, better), _content(prompt, worse), margin)


def _margin(fields: Fields, where: str) -> float | None:
    value = fields.get("margin")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(f"{where}: margin is {_shown(value)}, expected a finite number of at least 0")
    return float(value)


def _answered(fields: Fields, name: str, where: str) -> tuple[list[Message], Message]:
    """What came before a response, and the response."""
    if fields.get(name) is None:
        raise DataError(f"{where}: {_missing((name,), fields)}")
    *before, response = _messages(fields[name], name, where)
    if response["role"] != "assistant":
        raise DataError(f"{where}: {name} ends with a message of {response['role']!r}, expected one of the assistant")
    if not before:
        raise DataError(
            f"{where}: {name} holds the response alone, expected the whole conversation; put the messages of the "
            "prompt in front, or give chosen and rejected as texts beside it"
        )
    return before, response


def _content(prompt: str | list[Message], response: str) -> Content:
    if isinstance(prompt, str):
        return prompt, response
    return [*prompt, {"role": "assistant", "content": response}]


def _prompt(fields: Fields, where: str) -> str | list[Message]:
    if not isinstance(fields.get("prompt"), list):
        return require_text(fields, "prompt", where)
    messages = _messages(fields["prompt"], "prompt", where)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: prompt ends with an assistant message, expected the turn to be the model's")
    return messages


def _messages(value: object, name: str, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} is {_shown(value)}, expected a list of chat messages")
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise DataError(f"{where}: {name} holds {_shown(message)}, expected messages with role and content")
        require_text(message, "role", f"{where}, {name}")
        require_text(message, "content", f"{where}, {name}")
        # Parquet fills what other messages have with nulls, which a chat template would take for a value.
        messages.append({key: part for key, part in message.items() if part is not None})
    return messages


def _missing(names: tuple[str, ...], fields: Fields) -> str:
    expected = " or ".join(repr(name) for name in names)
    found = ", ".join(repr(name) for name in fields) or "none"
    close = [match for name in names for match in difflib.get_close_matches(name, fields, n=1)]
    hint = f"; rename {close[0]!r} if that is what you meant" if close and fields[close[0]] is not None else ""
    return f"no field {expected}; the fields found are {found}{hint}"


def _refuse_misspelt(where: str, found: tuple[str, ...], optional: tuple[str, ...]) -> None:
    if pair := _misspelt(found, optional):
        raise DataError(f"{where}: found field {pair[0]!r}, expected {pair[1]!r}; rename it, or it would be ignored")


@functools.lru_cache(maxsize=256)  # a file has few distinct sets of fields, and many rows
def _misspelt(found: tuple[str, ...], optional: tuple[str, ...]) -> tuple[str, str] | None:
    for name in optional:
        if name not in found and (close := difflib.get_close_matches(name, found, n=1, cutoff=0.85)):
            return close[0], name
    return None


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
