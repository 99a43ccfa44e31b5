"""Prompts and responses of a run for its report: of training, and of evaluations.

Invariant: rows are chosen by their places alone, evenly over the steps and in whole
groups, and the first problems of every evaluation are the same ones, so a problem can
be followed over the steps. Files that cannot be read are named and left out. What is in
memory is bounded, however many rows a file has and however long they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl_ray.tracking.held_out_responses import recorded_responses
from verl_ray.tracking.rollouts import TURN_COLUMNS, recorded_rollouts

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

TRAINING = "training"
HELD_OUT = "held out"

MOST_FILES = 100
"""Files of each kind that are read, chosen evenly over the steps."""

MOST_CHARACTERS = 32_000_000
"""Characters of all texts that are read, but for the first row of each file."""

MOST_TOKENS = 1_000_000
"""Tokens of all rows of each kind that are read, but for the first row of each file."""

MOST_TOKENS_OF_ROW = 4_000
"""Tokens that are read of a row, from its beginning."""

_ROWS_AT_ONCE = 64
_TOKEN_ROWS_AT_ONCE = 8
_BUFFER_BYTES = 1 << 20

_TOKEN_NUMBERS = (
    "rollout_log_probs",
    "log_probs",
    "advantages",
    "versions",
    "losses",
)
"""Columns per token beside text and mask, of which a file has some."""

_TOKEN_COLUMNS = ("pieces", "mask", *_TOKEN_NUMBERS)

_TEXTS = ("prompt", "response", "answer", "output")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenValues:
    """Tokens of a row, prompt included. Numbers are NaN where there is none."""

    pieces: Sequence[str]
    mask: npt.NDArray[np.bool_]
    """Whether the policy sampled the token, or learned from it, [tokens]."""

    rollout_log_probs: Floats
    log_probs: Floats
    advantages: Floats
    versions: Floats
    """Policy version that sampled the token, -1 for none, [tokens]."""

    losses: Floats
    total: int
    """Tokens of the row, of which the first are here."""


@dataclass(frozen=True, eq=False)
class RecordedRow:
    """A prompt and a response. A number that is not known is NaN or -1."""

    source: str
    """`TRAINING` or `HELD_OUT`."""

    step: int
    group: int
    """Number of the prompt in the run, or of the problem."""

    member: int
    data_source: str
    prompt: str
    response: str
    answer: str
    reward: float
    row: int = 0
    scores: Mapping[str, float | None] = field(default_factory=dict)
    finish: str = ""
    end: str = ""
    failure: str = ""
    output: str = ""
    """What the command of the episode has printed, on its last row."""

    num_turns: int = -1
    response_tokens: int = -1
    advantage: float = math.nan
    label: str = ""
    """Of a data set's row: chosen or rejected; empty without labels."""

    loss: float = math.nan
    """Mean over the tokens that are learned from, or of the pair."""

    margin: float = math.nan
    """Reward of a pair's chosen response less that of the rejected one."""

    turns: Sequence[tuple[int, int, float]] = ()
    """Number in the episode, place of the last token, and reward of each turn."""

    tokens: TokenValues | None = None

    @property
    def num_characters(self) -> int:
        """Characters of its texts."""
        return sum(len(getattr(self, name)) for name in _TEXTS)


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Some of the prompts and responses of a run, and how many there are."""

    rows: Sequence[RecordedRow] = ()

    num_rows: int = 0
    """Rows of the files that were read."""

    num_steps: int = 0
    """Files that were read, each of a step or of an evaluation."""

    recorded_steps: int = 0
    """Files that there are."""


def read_rows(folder: Path, most_rows: int, damage: list[str]) -> SampledRows:
    """Return some rows of a run.

    They are in the order in which they should be dropped from the end: the first group
    of each step, then the second one of each, and so on.

    Args:
        folder: Folder of the run.
        most_rows: Number of rows at most.
        damage: Receives a sentence for each file that cannot be read.
    """
    training = recorded_rollouts(folder)
    kinds = [paths for paths in (training, recorded_responses(folder)) if paths]
    by_step = []
    num_rows = num_steps = 0
    for paths in kinds:
        chosen = _evenly(sorted(paths), MOST_FILES)
        num_files = len(kinds) * len(chosen)
        limits = _Limits(
            rows=math.ceil(most_rows / num_files),
            characters=MOST_CHARACTERS // num_files,
            tokens=MOST_TOKENS // len(chosen),
        )
        for step in chosen:
            source = TRAINING if paths is training else HELD_OUT
            try:
                rows, in_file = _rows_of(paths[step], source, step, limits)
            # Parquet's own errors are OSError and ValueError.
            except (OSError, ValueError, KeyError, TypeError) as error:
                name = paths[step].relative_to(folder)
                damage.append(f"{name} cannot be read: {error}")
                continue
            by_step.append(_groups(rows))
            num_rows += in_file
            num_steps += 1

    rows = [
        row
        for groups in zip_longest(*by_step)
        for group in groups
        for row in group or ()
    ]
    recorded_steps = sum(map(len, kinds))
    return SampledRows(rows[:most_rows], num_rows, num_steps, recorded_steps)


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most so many steps, the first and the last one among them."""
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[place] for place in dict.fromkeys(places.tolist())]


def _groups(rows: Sequence[RecordedRow]) -> list[list[RecordedRow]]:
    groups: dict[int, list[RecordedRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


@dataclass(frozen=True)
class _Limits:
    """Limits of what is read of a file; a first row is read whatever its size."""

    rows: int
    characters: int
    tokens: int


def _rows_of(
    path: Path, source: str, step: int, limits: _Limits
) -> tuple[list[RecordedRow], int]:
    """Return the rows of the first groups of a file, and how many rows it has."""
    # Imported here, because it takes longer than all else of a small report.
    import pyarrow.parquet

    # A buffer in place of whole columns, which may be larger than memory.
    file = pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES)
    group = "ordinal" if source == TRAINING else "problem"
    groups = np.asarray(file.read([group]).column(group))
    # A group that begins within the limit is whole.
    first = list(dict.fromkeys(groups[: max(1, limits.rows)].tolist()))
    places = np.flatnonzero(np.isin(groups, first))

    rows: dict[int, RecordedRow] = {}
    for place, fields in _texts(file, places.tolist(), limits.characters):
        rows[place] = _row(fields, source, step, group)
    rows = _within(rows, limits.characters)
    if {"pieces", "mask"} <= set(file.schema_arrow.names):
        tokens = _tokens(file, sorted(rows), limits.tokens)
        rows = {
            place: replace(row, tokens=tokens.get(place)) for place, row in rows.items()
        }
    in_order = sorted(rows, key=lambda place: (groups[place], place))
    return [rows[place] for place in in_order], len(groups)


def _batches(
    file: pq.ParquetFile, columns: Sequence[str], places: Sequence[int], size: int
) -> Iterator[tuple[Sequence[int], pa.RecordBatch]]:
    """Yield the rows at some places, which rise, in parts, with their places.

    What comes behind the last of them is not read.
    """
    start = 0
    for batch in file.iter_batches(size, columns=list(columns)):
        end = start + batch.num_rows
        inside = [place for place in places if start <= place < end]
        if inside:
            yield inside, batch.take([place - start for place in inside])
        start = end
        if not places or end > places[-1]:
            return


def _texts(
    file: pq.ParquetFile, places: Sequence[int], most_characters: int
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows at some places without their tokens, until they are too long."""
    names = file.schema_arrow.names
    per_row = [name for name in names if name not in (*_TOKEN_COLUMNS, "tokens")]
    characters = 0
    for inside, batch in _batches(file, per_row, places, _ROWS_AT_ONCE):
        for place, fields in zip(inside, batch.to_pylist(), strict=True):
            yield place, fields
            texts = (fields.get(name) for name in _TEXTS)
            characters += sum(len(text or "") for text in texts)
            if characters > most_characters:
                return


def _within(
    rows: Mapping[int, RecordedRow], most_characters: int
) -> dict[int, RecordedRow]:
    """Return the first groups of a file whose texts are not too long together."""
    within: dict[int, RecordedRow] = {}
    characters = 0
    in_order = sorted(rows, key=lambda place: (rows[place].group, place))
    for place in in_order:
        row = rows[place]
        characters += row.num_characters
        if within and characters > most_characters:
            # Only the first group may be cut short.
            first = rows[in_order[0]].group
            return {
                other: shown
                for other, shown in within.items()
                if shown.group != row.group or shown.group == first
            }
        within[place] = row
    return within


def _row(fields: Mapping[str, Any], source: str, step: int, group: str) -> RecordedRow:
    """Return a line of a file of rollouts or of held-out responses."""
    # Files of earlier versions have no columns of turns.
    turn_fields = [fields.get(name) or () for name in TURN_COLUMNS]
    return RecordedRow(
        source=source,
        step=step,
        group=_whole(fields[group]),
        member=_whole(fields.get("member")),
        data_source=fields.get("data_source") or "",
        prompt=fields.get("prompt") or "",
        response=fields.get("response") or "",
        answer=fields.get("answer") or "",
        reward=_number(fields.get("reward", fields.get("score"))),
        row=max(0, _whole(fields.get("row"))),
        scores=dict(fields.get("scores") or ()),
        finish=fields.get("finish") or "",
        end=fields.get("end") or "",
        failure=fields.get("failure") or "",
        output=fields.get("output") or "",
        num_turns=_whole(fields.get("num_turns")),
        response_tokens=_whole(fields.get("response_tokens")),
        advantage=_number(fields.get("advantage")),
        label=fields.get("label") or "",
        loss=_number(fields.get("loss")),
        margin=_number(fields.get("margin")),
        turns=list(zip(*turn_fields, strict=True)),
    )


def _whole(value: Any) -> int:
    return -1 if value is None else int(value)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _tokens(
    file: pq.ParquetFile, places: Sequence[int], most_tokens: int
) -> dict[int, TokenValues]:
    """Return the tokens of the first rows among some places, by their places."""
    tokens: dict[int, TokenValues] = {}
    num_tokens = 0
    names = [name for name in _TOKEN_COLUMNS if name in file.schema_arrow.names]
    for inside, batch in _batches(file, names, places, _TOKEN_ROWS_AT_ONCE):
        for place, values in zip(inside, _token_values(batch), strict=True):
            num_tokens += 0 if values is None else len(values.pieces)
            if tokens and num_tokens > most_tokens:
                return tokens
            if values is not None:
                tokens[place] = values
    return tokens


def _token_values(batch: pa.RecordBatch) -> Iterator[TokenValues | None]:
    """Yield the first tokens of each row; None for a row without any."""
    for place in range(batch.num_rows):
        columns = {
            name: batch.column(name)[place].values for name in batch.schema.names
        }
        if not columns["mask"]:
            yield None
            continue
        first = {name: values[:MOST_TOKENS_OF_ROW] for name, values in columns.items()}
        pieces = [piece or "" for piece in first.pop("pieces").to_pylist()]
        missing = np.full(len(pieces), math.nan)
        numbers = dict.fromkeys(_TOKEN_NUMBERS, missing) | {
            name: values.to_numpy(zero_copy_only=False).astype(np.float64)
            for name, values in first.items()
        }
        mask = numbers.pop("mask") == 1
        yield TokenValues(
            pieces=pieces, mask=mask, total=len(columns["mask"]), **numbers
        )
