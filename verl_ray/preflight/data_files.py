"""The data files of a run, read as the run will read them.

Invariant: a file that is read here is read by the code of the run itself, so what is
refused here would be refused there, and with the same words. A large file is only read
at its beginning.

Deliberately not here: whether the files exist (`findings.py`), and what the reward
makes of their records (`reward_trial.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.config.data import RowFormat
from verl_ray.config.schema import Config
from verl_ray.data.batch import Int64
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Prompts
from verl_ray.data.supervised import SupervisedSource
from verl_ray.errors import ConfigError, DataError, OverlongRows, Problem
from verl_ray.preflight.file_errors import problem_of
from verl_ray.preflight.tokenizer_trial import policy_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE_BYTES = 32 * 2**20
"""Largest file that is read as a whole."""

SAMPLE_RECORDS = 5_000
"""Records that are read of a larger file."""

NUM_EXAMPLES = 2
"""Rows that are shown as the model will see them."""


@dataclass(frozen=True)
class DataFile:
    """Contents of one data file.

    Attributes:
        key: Setting that names the file.
        path: Path of the file.
        is_whole: Whether the whole file was read, and not only its beginning.
        num_examples: Prompts, demonstrations, or pairs that the run can use.
        lengths: Tokens of each row, int64 [rows]; see `RowFormat` for what a row is.
        skipped: Records that the run leaves out.
        examples: The first rows as the model will see them.
        prompts: The rows themselves if they are prompts, else None.
    """

    key: str
    path: str
    is_whole: bool
    num_examples: int
    lengths: Int64
    skipped: int
    examples: tuple[str, ...]
    prompts: Prompts | None


@dataclass
class DataFindings:
    """The files that could be read, and what is wrong with the others."""

    files: list[DataFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine_data(config: Config, *, evaluates: bool = False) -> DataFindings:
    """Read the data files of a run.

    Args:
        config: Configuration of the run, without `auto`.
        evaluates: Whether the command only evaluates.
    """
    findings = DataFindings()
    row_format = config.row_format
    # A task may read its files in a way of its own, and a run may make them.
    if row_format is None or config.preparation is not None:
        return findings

    try:
        tokenizer = policy_tokenizer(config)
    except ConfigError as error:
        findings.problems += error.problems
        return findings

    overlong: dict[str, OverlongRows] = {}
    for key, path in _paths(config, evaluates):
        try:
            file = _read(key, path, tokenizer, row_format, config)
        except OverlongRows as error:
            overlong[path] = error
        except DataError as error:
            findings.problems.append(problem_of(key, path, error))
        else:
            findings.files.append(file)
            if not evaluates:
                findings.warnings += _warnings(file, config)

    if overlong:
        # One value of the setting serves every file.
        path = max(overlong, key=lambda name: overlong[name].longest)
        findings.problems.append(problem_of("", path, overlong[path]))
    findings.warnings += _same_files(config, evaluates)
    return findings


def _same_files(config: Config, evaluates: bool) -> Iterator[str]:
    """Yield a warning if the problems to learn from are the held-out ones, too."""
    paths = dict(_paths(config, evaluates))
    files = {Path(path).resolve() for path in paths.values()}
    if len(files) < len(paths) and not evaluates:
        yield (
            f"{' and '.join(paths)} are the same file, so the evaluation measures what"
            " the run has learned by heart"
        )


def _paths(config: Config, evaluates: bool) -> Iterator[tuple[str, str]]:
    """Yield the setting and the path of each file that the run reads."""
    validation = config.data.validation_path
    # An evaluation without training data names its own in their place.
    if not evaluates or config.data.train_path != validation:
        yield "data.train_path", config.data.train_path

    if validation is not None and (config.run.evaluate_every or evaluates):
        yield "data.validation_path", validation


def _read(
    key: str,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    row_format: RowFormat,
    config: Config,
) -> DataFile:
    """Read a file, or its beginning.

    Raises:
        DataError: The run would refuse the file.
    """
    is_whole = _size_bytes(Path(path)) <= WHOLE_BYTES
    most = None if is_whole else SAMPLE_RECORDS
    source = _source(path, tokenizer, row_format, config, most)

    rows = source.all()
    examples = tuple(
        str(tokenizer.decode(rows.tokens[rows.offsets[i] : rows.offsets[i + 1]]))
        for i in range(min(NUM_EXAMPLES, rows.num_rows))
    )
    skipped = source.skipped
    if not isinstance(skipped, int):
        skipped = sum(skipped.values())

    return DataFile(
        key=key,
        path=path,
        is_whole=is_whole,
        num_examples=len(source),
        lengths=rows.lengths,
        skipped=skipped,
        examples=examples,
        prompts=rows if isinstance(rows, Prompts) else None,
    )


def _source(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    row_format: RowFormat,
    config: Config,
    most: int | None,
) -> PromptSource | SupervisedSource | PreferenceSource:
    """Read the records of a file as the run's task does."""
    seed = config.run.seed
    limit = row_format.max_tokens
    data = config.data

    if row_format.kind == "prompt":
        assert config.rollout_task is not None, "prompts are read to generate rollouts"
        return PromptSource(path, tokenizer, config.rollout_task.data, seed, most)

    if row_format.kind == "supervised":
        return SupervisedSource(
            path, tokenizer, data, max_tokens=limit, seed=seed, most_records=most
        )

    assert row_format.preference is not None, "pairs have settings of their own"
    return PreferenceSource(
        path,
        tokenizer,
        row_format.preference,
        max_tokens=limit,
        seed=seed,
        margin=row_format.margin,
        most_records=most,
    )


def _size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def _warnings(file: DataFile, config: Config) -> Iterator[str]:
    """Yield what makes a run learn little from a file that it can read."""
    if file.key != "data.train_path" or not file.is_whole:
        return

    num_examples = file.num_examples
    per_step = config.examples_per_step
    if num_examples < per_step:
        yield (
            f"{file.key} has {num_examples} examples and a step takes"
            f" {per_step}, so every step uses some of them more than once"
        )
    elif num_examples == per_step:
        yield (
            f"{file.key} has {num_examples} examples, as many as a step takes, so every"
            " step is a whole epoch"
        )
