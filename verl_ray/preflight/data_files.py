"""The data files of a run, read as the run will read them.

Invariant: a file that is read here is read by the code of the run itself, so what is
refused here would be refused there, and with the same words. A large file is only read
at its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Prompts
from verl_ray.config.data import DataSet, RowFormat, in_words
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.cursor import shares_in_words
from verl_ray.data.files import size_bytes
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.prompts import PromptSource
from verl_ray.data.records import holds_pairs
from verl_ray.data.row_source import RowSource, are_large, refuse_unstreamable
from verl_ray.data.teacher_rows import TeacherSource
from verl_ray.data.unpaired import UnpairedSource
from verl_ray.errors import ConfigError, DataError, OverlongRows, Problem, file_problem
from verl_ray.preflight.tokenizer_trial import stop_warnings, tried_tokenizer

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
        names: Path of each data set.
        read_as: Schema of each data set, and which columns were taken for what.
        is_whole: Whether the whole file was read, and not only its beginning.
        is_streamed: Whether the run leaves the records on disk.
        shares: What each data set contributes to an epoch, in words; empty for one
            set that is used once.
        num_examples: Prompts, demonstrations, or pairs that the run can use.
        lengths: Tokens of each row, int64 [rows]; see `RowFormat` for what a row is.
        skipped: Records that the run leaves out.
        examples: The first rows as the model will see them.
        prompts: The rows themselves if they are prompts, else None.
    """

    key: str
    path: str
    names: tuple[str, ...]
    read_as: tuple[str, ...]
    is_whole: bool
    is_streamed: bool
    shares: tuple[str, ...]
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
        tokenizer = tried_tokenizer(config)
    except ConfigError as error:
        findings.problems += error.problems
        return findings

    findings.warnings += stop_warnings(config, tokenizer)
    overlong: dict[str, OverlongRows] = {}
    for key, data_sets in _data_sets(config, evaluates):
        try:
            file = _read(key, data_sets, tokenizer, row_format, config)
        except OverlongRows as error:
            overlong[in_words(data_sets)] = error
        except DataError as error:
            findings.problems.append(data_problem(key, data_sets, error))
        else:
            findings.files.append(file)
            if not evaluates:
                findings.warnings += _warnings(file, config)

    if overlong:
        # One value of the setting serves every file.
        path = max(overlong, key=lambda name: overlong[name].longest)
        findings.problems.append(file_problem("", path, overlong[path]))
    findings.warnings += _same_files(config, evaluates)
    return findings


def _same_files(config: Config, evaluates: bool) -> Iterator[str]:
    """Yield a warning if the problems to learn from are the held-out ones, too."""
    named = dict(_data_sets(config, evaluates))
    files = [
        {(Path(each.path).resolve(), each.subset, each.split) for each in data_sets}
        for data_sets in named.values()
    ]
    if len(files) > 1 and set.intersection(*files) and not evaluates:
        yield (
            f"{' and '.join(named)} name the same file, so the evaluation measures what"
            " the run has learned by heart"
        )


def _data_sets(
    config: Config, evaluates: bool
) -> Iterator[tuple[str, tuple[DataSet, ...]]]:
    """Yield each setting that names data which the run reads, with its data sets."""
    data = config.data
    # An evaluation without training data names its own in their place.
    if not evaluates or data.train_path != data.validation_path:
        yield "data.train_path", data.train_sets

    if data.validation_sets and (config.run.evaluate_every or evaluates):
        yield "data.validation_path", data.validation_sets


def _read(
    key: str,
    data_sets: Sequence[DataSet],
    tokenizer: PreTrainedTokenizerBase,
    row_format: RowFormat,
    config: Config,
) -> DataFile:
    """Read data sets, or their beginnings.

    Raises:
        DataError: The run would refuse one of them.
    """
    is_streamed = key == "data.train_path" and are_large(data_sets, config.data)
    if is_streamed:
        for data_set in data_sets:
            refuse_unstreamable(data_set)

    is_whole = sum(map(size_bytes, data_sets)) <= WHOLE_BYTES
    most = None if is_whole else SAMPLE_RECORDS
    # An evaluation measures pairs as pairs.
    is_held_out = key == "data.validation_path"
    if (
        row_format.kind == "unpaired"
        and is_held_out
        and all(map(holds_pairs, data_sets))
    ):
        row_format = replace(row_format, kind="preference")
    source = _source(data_sets, tokenizer, row_format, config, most)

    rows = source.all()
    examples = tuple(
        str(tokenizer.decode(rows.tokens[rows.offsets[i] : rows.offsets[i + 1]]))
        for i in range(min(NUM_EXAMPLES, rows.num_rows))
    )
    return DataFile(
        key=key,
        path=in_words(data_sets),
        read_as=tuple(source.read_as),
        names=tuple(data_set.path for data_set in data_sets),
        is_whole=is_whole,
        is_streamed=is_streamed,
        shares=_shares(source, data_sets, is_whole=is_whole),
        num_examples=len(source),
        lengths=rows.lengths,
        skipped=sum(source.skipped.values()),
        examples=examples,
        prompts=rows if isinstance(rows, Prompts) else None,
    )


def _shares(
    source: RowSource[Any, Any], data_sets: Sequence[DataSet], *, is_whole: bool
) -> tuple[str, ...]:
    is_plain = len(data_sets) == 1 and data_sets[0].weight == 1
    # Of the beginnings of large sets, the shares would mean nothing.
    if is_plain or not is_whole:
        return ()
    paths = [data_set.path for data_set in data_sets]
    return tuple(shares_in_words(source.mixture, paths))


def _source(
    data_sets: Sequence[DataSet],
    tokenizer: PreTrainedTokenizerBase,
    row_format: RowFormat,
    config: Config,
    most: int | None,
) -> (
    PromptSource | SupervisedSource | PreferenceSource | UnpairedSource | TeacherSource
):
    """Read the records of a file as the run's task does."""
    seed = config.run.seed
    data = config.data

    if row_format.kind == "prompt":
        assert isinstance(config, RolloutTaskConfig), "prompts are for rollouts"
        agent = config.episodes
        return PromptSource(
            data_sets,
            tokenizer,
            config.data,
            seed,
            most,
            environments=() if agent is None else agent.environments,
        )

    limits: dict[str, Any] = {
        "max_tokens": row_format.max_tokens,
        "seed": seed,
        "most_records": most,
    }
    if row_format.kind == "supervised":
        return SupervisedSource(data_sets, tokenizer, data, **limits)
    if row_format.kind == "teacher":
        limits["top_k"] = row_format.top_k
        return TeacherSource(data_sets, tokenizer, data, **limits)

    preference = row_format.preference
    assert preference is not None, "preferences have settings of their own"
    if row_format.kind == "unpaired":
        return UnpairedSource(data_sets, tokenizer, preference, **limits)
    limits["margin"] = row_format.margin
    return PreferenceSource(data_sets, tokenizer, preference, **limits)


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

    # Only a prompt that was trained has a score to be chosen by.
    steps = config.run.total_steps
    is_chosen = isinstance(config, RLConfig) and config.data.curriculum.is_on
    if is_chosen and steps is not None and steps * per_step <= num_examples:
        yield (
            f"{file.key} has {num_examples} examples, and {steps} steps of {per_step}"
            " draw none of them twice, so data.curriculum changes nothing"
        )


def data_problem(key: str, data_sets: Sequence[DataSet], error: DataError) -> Problem:
    """Return an error about one of several data sets as a problem of their setting."""
    paths = [data_set.path for data_set in data_sets if error.is_about(data_set.path)]
    return file_problem(key, paths[0] if paths else in_words(data_sets), error)
