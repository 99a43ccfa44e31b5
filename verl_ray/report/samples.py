"""Prompts and responses of a run for its report: of training, and of evaluations.

Invariant: rows are chosen by their places alone, evenly over the steps and in whole
groups, and the first problems of every evaluation are the same ones, so a problem can
be followed over the steps. Files that cannot be read are named and left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl_ray.tracking.responses import recorded_responses
from verl_ray.tracking.rollouts import recorded_rollouts

if TYPE_CHECKING:
    import pyarrow as pa

TRAINING = "training"
HELD_OUT = "held out"

MOST_FILES = 100
"""Files of each kind that are read, chosen evenly over the steps."""

_TOKEN_COLUMNS = (
    "pieces",
    "mask",
    "rollout_log_probs",
    "log_probs",
    "advantages",
    "versions",
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenValues:
    """Tokens of a row, prompt included. Numbers are NaN where there is none."""

    pieces: Sequence[str]
    mask: npt.NDArray[np.bool_]
    """Whether the policy sampled the token, [tokens]."""

    rollout_log_probs: Floats
    log_probs: Floats
    advantages: Floats
    versions: Floats
    """Policy version that sampled the token, -1 for none, [tokens]."""


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
    trajectory: int = -1
    row: int = 0
    scores: Mapping[str, float | None] = field(default_factory=dict)
    finish: str = ""
    end: str = ""
    failure: str = ""
    num_turns: int = -1
    response_tokens: int = -1
    advantage: float = math.nan
    tokens: TokenValues | None = None


def read_rows(
    folder: Path, most_rows: int, damage: list[str]
) -> tuple[list[RecordedRow], int]:
    """Return some rows of a run, and how many are recorded in the files that were read.

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
    recorded = 0
    for paths in kinds:
        chosen = _evenly(sorted(paths), MOST_FILES)
        most_per_file = math.ceil(most_rows / len(kinds) / len(chosen))
        for step in chosen:
            source = TRAINING if paths is training else HELD_OUT
            try:
                rows, in_file = _rows_of(paths[step], source, step, most_per_file)
            # Parquet's own errors are OSError and ValueError.
            except (OSError, ValueError, KeyError, TypeError) as error:
                name = paths[step].relative_to(folder)
                damage.append(f"{name} cannot be read: {error}")
                continue
            by_step.append(_groups(rows))
            recorded += in_file

    rows = [
        row
        for groups in zip_longest(*by_step)
        for group in groups
        for row in group or ()
    ]
    return rows[:most_rows], recorded


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


def _rows_of(
    path: Path, source: str, step: int, most: int
) -> tuple[list[RecordedRow], int]:
    """Return the rows of the first groups of a file, and how many rows it has."""
    # Imported here, because it takes longer than all else of a small report.
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    group = "ordinal" if source == TRAINING else "problem"
    groups = np.asarray(file.read([group]).column(group))
    # A group that begins within the limit is whole.
    first = list(dict.fromkeys(groups[: max(1, most)].tolist()))
    places = np.flatnonzero(np.isin(groups, first))
    order = np.argsort(groups[places], kind="stable")
    table = file.read().take(places[order])
    return list(_table_rows(table, source, step, group)), len(groups)


def _table_rows(
    table: pa.Table, source: str, step: int, group: str
) -> Iterator[RecordedRow]:
    """Yield the rows of a table of rollouts or of held-out responses."""
    per_row = [name for name in table.column_names if name not in _TOKEN_COLUMNS]
    per_row = [name for name in per_row if name != "tokens"]
    tokens = list(_tokens(table))
    for place, fields in enumerate(table.select(per_row).to_pylist()):
        reward = fields.get("reward", fields.get("score"))
        yield RecordedRow(
            source=source,
            step=step,
            group=_whole(fields[group]),
            member=_whole(fields.get("member")),
            data_source=fields.get("data_source") or "",
            prompt=fields.get("prompt") or "",
            response=fields.get("response") or "",
            answer=fields.get("answer") or "",
            reward=_number(reward),
            trajectory=_whole(fields.get("trajectory")),
            row=max(0, _whole(fields.get("row"))),
            scores=dict(fields.get("scores") or ()),
            finish=fields.get("finish") or "",
            end=fields.get("end") or "",
            failure=fields.get("failure") or "",
            num_turns=_whole(fields.get("num_turns")),
            response_tokens=_whole(fields.get("response_tokens")),
            advantage=_number(fields.get("advantage")),
            tokens=tokens[place] if tokens else None,
        )


def _whole(value: Any) -> int:
    return -1 if value is None else int(value)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _tokens(table: pa.Table) -> Iterator[TokenValues]:
    """Yield the token columns of each row, where the table has them."""
    if not set(_TOKEN_COLUMNS) <= set(table.column_names):
        return
    offsets: npt.NDArray[np.int64] | None = None
    flat: dict[str, Any] = {}
    for name in _TOKEN_COLUMNS:
        column = table.column(name).combine_chunks()
        lengths = np.asarray(column.value_lengths().fill_null(0))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = column.flatten()
        if name == "pieces":
            flat[name] = [piece or "" for piece in values.to_pylist()]
        else:
            flat[name] = values.to_numpy(zero_copy_only=False).astype(np.float64)

    assert offsets is not None
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        row = {name: values[start:end] for name, values in flat.items()}
        yield TokenValues(**{**row, "mask": row["mask"] == 1})
