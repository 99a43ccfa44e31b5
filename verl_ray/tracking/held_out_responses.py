"""Every response of an evaluation on the disk, as text, beside the scores.

A line of `evaluations/step_000010.parquet` is a response. Those of episodes also have
their tokens, in the columns of training rollouts. Lines stand in the order of the
problems and of their members.

Invariant: the file is whole or is not there. It is made in pieces, since not all
responses fit into the driver's memory.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ray.columns.batch import Array
from verl_ray.disk import step_files, step_path
from verl_ray.errors import TrackingError
from verl_ray.tracking.evaluations import FOLDER
from verl_ray.tracking.rollouts import (
    TOKEN_COLUMNS,
    TURN_COLUMNS,
    arrow_type,
    token_lists,
)

if TYPE_CHECKING:
    import pyarrow as pa

RESPONSE_COLUMNS = {
    "problem": "int32",
    "member": "int32",
    "data_source": "string",
    "prompt": "string",
    "response": "string",
    "answer": "string",
    "score": "float32",  # null where it failed
    "finish": "string",
    "end": "string",
    "failure": "string",
    "output": "string",
    "entries": "string",  # JSON; empty where there are none
    "response_tokens": "int32",
    "num_turns": "int32",
    **TURN_COLUMNS,
}
"""Columns of a file of responses, a line per response, and their types. It also has
`TOKEN_COLUMNS` of training rollouts, empty lists where no tokens are kept."""

ROWS_AT_ONCE = 256
"""Responses that are in memory at the same time while they are written."""


@dataclass(frozen=True)
class HeldOutResponse:
    """A response to a held-out problem."""

    problem: int
    """Number of the problem, which is that of its record in the file."""

    data_source: str
    prompt: str
    response: str
    answer: str

    score: float
    """Number from the grader; nan if it failed."""

    finish: str
    """Why the response ended: stop, length or aborted."""

    entries: Mapping[str, float | str] = field(default_factory=dict)
    """What the reward function returned beside the score."""

    member: int = 0
    """Place of the response among those to its problem, from 0."""

    end: str = ""
    """How the episode ended; empty for a single response."""

    failure: str = ""
    """What failed in the episode or in scoring; empty where nothing did."""

    output: str = ""
    """What the command of an episode has printed; empty where there is none."""

    response_tokens: int = 0
    """Tokens that the policy sampled."""

    num_turns: int = 1
    """Turns of the policy."""

    turns: Sequence[int] = field(default_factory=list)
    """Values of `TURN_COLUMNS` of an episode's last row, like the next two; none of a
    single response."""

    turn_ends: Sequence[int] = field(default_factory=list)
    turn_rewards: Sequence[float] = field(default_factory=list)

    tokens: Mapping[str, Sequence[Any] | Array] | None = None
    """Values of `TOKEN_COLUMNS`, [tokens] each, of an episode's last row; None of a
    single response, whose text says the same."""


def responses_path(run_dir: Path, step: int) -> Path:
    """Return the file for the responses of the evaluation after `step` of a run."""
    return step_path(run_dir / FOLDER, step, "parquet")


def recorded_responses(run_dir: Path) -> dict[int, Path]:
    """Return the files of responses by their steps, in increasing order."""
    return step_files(run_dir / FOLDER, "parquet")


def encoded_responses(responses: Iterable[HeldOutResponse]) -> bytes:
    """Return responses as the content of a Parquet file."""
    # Imported here, because most processes write none.
    import pyarrow as pa
    import pyarrow.parquet

    schema = _response_table([]).schema
    content = pa.BufferOutputStream()
    rows = iter(responses)
    with pyarrow.parquet.ParquetWriter(content, schema, compression="zstd") as writer:
        # Consumes the responses in pieces. Ends with the last one.
        while piece := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(_response_table(piece))
    encoded: bytes = content.getvalue().to_pybytes()
    return encoded


def _response_table(responses: Sequence[HeldOutResponse]) -> pa.Table:
    """Return some responses as `RESPONSE_COLUMNS` and `TOKEN_COLUMNS`."""
    import pyarrow as pa

    types = {name: arrow_type(type_) for name, type_ in RESPONSE_COLUMNS.items()}
    lines = []
    for response in responses:
        line: dict[str, object] = {
            name: getattr(response, name) for name in RESPONSE_COLUMNS
        }
        line["score"] = response.score if math.isfinite(response.score) else None
        line["entries"] = ""
        if response.entries:
            line["entries"] = json.dumps(dict(response.entries), ensure_ascii=False)
        lines.append(line)
    table = pa.Table.from_pylist(lines, pa.schema(types))

    rows = [response.tokens for response in responses if response.tokens is not None]
    lengths = [len((response.tokens or {}).get("mask", ())) for response in responses]
    offsets = np.cumsum([0, *lengths])
    tokens = {
        name: np.concatenate([row[name] for row in rows]) if rows else ()
        for name in TOKEN_COLUMNS
    }
    for name, lists in token_lists(offsets, tokens).items():
        table = table.append_column(name, lists)
    return table


def first_responses(path: Path, count: int) -> list[HeldOutResponse]:
    """Return the first responses in a file of `encoded_responses`.

    Raises:
        TrackingError: The file cannot be read, or holds something else.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        lines: list[dict[str, object]] = []
        for batch in file.iter_batches(max(count, 1), columns=list(RESPONSE_COLUMNS)):
            lines += batch.to_pylist()
            if len(lines) >= count:
                break
        return [_response(line) for line in lines[:count]]
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{path}: cannot be read as the responses of an evaluation ({error!r});"
            " remove it, and the run goes on without it"
        ) from error


def _response(line: Mapping[str, object]) -> HeldOutResponse:
    """Return a line of the file as a response."""
    fields = dict(line)
    if fields["score"] is None:
        fields["score"] = math.nan
    entries = str(fields["entries"])
    fields["entries"] = json.loads(entries) if entries else {}
    return HeldOutResponse(**fields)  # type: ignore[arg-type]
