"""The data in the output of `check`: schemas, lengths, two rows, and trial scores.

Invariant: rows are shown as the model will see them, special tokens included.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

import numpy as np
from rich.table import Table

from verl_ray.config.agent import ENVIRONMENT
from verl_ray.config.data import RowFormat
from verl_ray.config.schema import Config
from verl_ray.data.schemas import OWN_SCHEMA
from verl_ray.preflight.data_files import NUM_EXAMPLES, DataFile
from verl_ray.preflight.reward_trial import Trial
from verl_ray.preflight.tables import print_tables
from verl_ray.rewards.health import Score, ScoreHealth

SHOWN_CHARACTERS = 800
"""Characters of a row that are shown."""

SHOWN_SOURCES = 3
"""Data sources that are shown of those which a function scores alike."""

_QUANTILES = {"min": 0.0, "median": 0.5, "99 %": 0.99, "max": 1.0}
_UNITS = {"prompt": "prompt"}
"""What a record becomes, by its kind; a row where it is not listed."""


def print_readings(files: Sequence[DataFile], stream: TextIO) -> None:
    """Print which columns were taken for what, and what each of several sets gives.

    Nothing is printed of a single set with our own names.
    """
    for file in files:
        for path, schema in zip(file.names, file.read_as, strict=True):
            name = file.key if len(file.names) == 1 else f"{file.key}: {path}"
            if schema != OWN_SCHEMA:
                print(f"{name} read as {schema}", file=stream, flush=True)
        for share in file.shares:
            print(f"{file.key}: {share}", file=stream, flush=True)
        if file.is_streamed:
            print(
                f"{file.key} is streamed from disk (see data.stream_above_gib): records"
                " that cannot be used are passed over",
                file=stream,
                flush=True,
            )


def print_data(
    config: Config,
    files: Sequence[DataFile],
    trials: Sequence[Trial],
    openings: Sequence[tuple[str, int, str]],
) -> None:
    """Print the lengths of the rows, the first rows, and the trial scores.

    Args:
        openings: Key of each environment, number of tokens and text of the first
            prompt of an episode in it; these are shown in place of the records.
    """
    row_format = config.row_format
    if row_format is None or not files:
        return

    print_readings(files, sys.stdout)
    _print_openings(openings)
    for file in [] if openings else files[:1]:
        unit = _UNITS.get(row_format.kind, "row")
        for number, example in enumerate(file.examples, start=1):
            name = f"{unit} {number} of {file.key}"
            _print_row(name, file.lengths[number - 1], example)

    print_tables(_length_table(config, files, row_format, openings))
    if trials:
        print_tables(_trial_table(trials))


def _print_openings(openings: Sequence[tuple[str, int, str]]) -> None:
    """Print each first prompt once, and of several ones less."""
    keys_by_prompt: dict[tuple[int, str], list[str]] = {}
    for key, num_tokens, text in openings:
        keys_by_prompt.setdefault((num_tokens, text), []).append(key)

    most = NUM_EXAMPLES * SHOWN_CHARACTERS // max(NUM_EXAMPLES, len(keys_by_prompt))
    for (num_tokens, text), keys in keys_by_prompt.items():
        name = f"first prompt of an episode in {', '.join(keys)}"
        _print_row(name, num_tokens, text, most)


def _print_row(
    name: str, num_tokens: int, text: str, most: int = SHOWN_CHARACTERS
) -> None:
    """Print a row, indented, of a long one the first `most` characters."""
    print(f"{name}, as the model sees it ({num_tokens} tokens):")

    width = max(40, shutil.get_terminal_size().columns - 4)
    shown = text[:most]
    for line in shown.splitlines():
        for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]:
            print(f"  | {part}")
    if len(text) > most:
        print(f"  ... and {len(text) - most} more characters")
    print()


def _length_table(
    config: Config,
    files: Sequence[DataFile],
    row_format: RowFormat,
    openings: Sequence[tuple[str, int, str]],
) -> Table:
    """Return the distribution of the lengths, a row per file and environment."""
    unit = _UNITS.get(row_format.kind, "row")
    limit = f"{row_format.max_tokens_key} = {row_format.max_tokens}"
    table = Table(
        title=f"tokens of a {unit} ({limit})",
        title_justify="left",
        caption=_passes(config, files),
        caption_justify="left",
    )
    table.add_column("file", overflow="fold")
    for heading in ("read", "left out", *_QUANTILES):
        table.add_column(heading, justify="right", overflow="fold")

    for file in files:
        count = str(file.num_examples)
        if not file.is_whole:
            count = f"first {count}"
        quantiles = np.quantile(file.lengths, list(_QUANTILES.values()))
        cells = [f"{quantile:.0f}" for quantile in quantiles]
        table.add_row(file.key, count, str(file.skipped), *cells)
    # Of an environment the first prompt is known on one record.
    for key, num_tokens, _ in openings:
        table.add_row(key, "first 1", "-", *[str(num_tokens)] * len(_QUANTILES))
    return table


def _passes(config: Config, files: Sequence[DataFile]) -> str | None:
    """Return how often the run uses its data, in words."""
    train = files[0]
    if not train.is_whole or train.key != "data.train_path":
        return None
    steps = config.run.total_steps
    if steps is None:
        return None
    total = steps * config.examples_per_step
    return (
        f"{steps} steps of {config.examples_per_step} are"
        f" {total / train.num_examples:.3g} passes over {train.num_examples}"
    )


def _trial_table(trials: Sequence[Trial]) -> Table:
    """Return the scores of a record's own answer and of an empty response.

    A record without an answer was tried with its prompt as the response.
    """
    table = Table(
        title="rewards, tried on a record of each data source", title_justify="left"
    )
    for heading in ("data source", "function"):
        table.add_column(heading, overflow="fold")
    for heading in ("its own answer", "empty response"):
        table.add_column(heading, justify="right", overflow="fold")

    # Data sources that a function scores alike share a line.
    sources: dict[tuple[str, str, str], list[str]] = {}
    for trial in trials:
        own = _cell(trial.own)
        if not trial.has_answer:
            own = f"none; its prompt: {own}"
        cells = (trial.function, own, _cell(trial.empty))
        # What the environment pays stands with its episodes.
        if trial.function == ENVIRONMENT:
            cells = (trial.function, "of the environment", "of the environment")
        sources.setdefault(cells, []).append(trial.data_source)

    for cells, names in sources.items():
        shown = ", ".join(names[:SHOWN_SOURCES])
        if len(names) > SHOWN_SOURCES:
            shown += f" and {len(names) - SHOWN_SOURCES} more"
        table.add_row(shown, *cells)
    return table


def _cell(score: Score) -> str:
    if score.health == ScoreHealth.OK:
        return f"{score.value:g}"
    return score.health.name.lower()
