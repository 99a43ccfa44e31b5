"""Command behind `scripts/prepare_data`: converts a data set to the run's format.

Invariant: the command reads and writes local files only.

GSM8K (arXiv:2110.14168): `answer` is the number behind the last `####` of the worked
solution, without commas and currency signs. The data set also has solutions that four
models wrote to the problems of test.jsonl, each marked right or wrong: pairs for a
reward model. A policy that learns from such a reward model has to be evaluated on other
problems.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.fields import Fields, Message, require_text
from verl_ray.data.files import DataFiles, read_jsonl, write_records
from verl_ray.data.records import read_prompts
from verl_ray.data.tokenizers import CHATML, train_bpe
from verl_ray.errors import DataError, VerlRayError
from verl_ray.shell import for_shell

DATA_SOURCE = "gsm8k"
INSTRUCTION = (
    "Work it out step by step. Write the final number on a line of its own, after ####."
)
SOURCE_FILES = {"train": "train.jsonl", "validation": "test.jsonl"}
SOLUTIONS_FILE = "example_model_solutions.jsonl"

PromptFormat = Literal["chat", "text"]

# The data set marks each calculation: 2+3=<<2+3=5>>5.
_CALCULATION = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

_MODEL = TinyModelConfig(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=512,
    tie_embeddings=True,
)
_VOCABULARY = 2048
_PAIRS_HELD_OUT_FRACTION = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    source: Path = options.source
    out: Path = options.out
    # Without a vocabulary no model is made.
    vocabulary: int | None = options.tokenizer_vocab if options.model else None

    try:
        model = _prepare_gsm8k(source, out, options.prompt, vocabulary)
        if options.pairs:
            _prepare_gsm8k_pairs(source, out / "pairs", options.prompt, model)
    except VerlRayError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data", description="Turn a local data set into the run's format."
    )
    commands = parser.add_subparsers(required=True, metavar="DATA_SET")
    command = commands.add_parser(
        "gsm8k",
        help="grade-school word problems",
        description=(
            "Reads SOURCE/train.jsonl and SOURCE/test.jsonl (question, answer), writes"
            " OUT/train and OUT/validation as .jsonl, .parquet and datasets folders."
        ),
    )
    command.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder of a local copy of GSM8K"
    )
    command.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    command.add_argument(
        "--prompt",
        choices=["chat", "text"],
        default="chat",
        help="chat messages (default), or plain text",
    )
    command.add_argument(
        "--pairs",
        action="store_true",
        help=(
            "also write OUT/pairs: a right and a wrong solution of the same problem,"
            f" from SOURCE/{SOLUTIONS_FILE}, for a reward model; the problems are"
            " those of SOURCE/test.jsonl"
        ),
    )
    command.add_argument(
        "--model",
        action="store_true",
        help=(
            "also write OUT/model: a BPE tokenizer trained on these texts and a small"
            " untrained model, enough to try a whole run without a download"
        ),
    )
    command.add_argument(
        "--tokenizer-vocab",
        type=int,
        default=_VOCABULARY,
        metavar="N",
        help=f"tokens of the tokenizer that --model trains (default {_VOCABULARY})",
    )
    return parser


def _prepare_gsm8k(
    source: Path, out: Path, prompt_format: PromptFormat, vocabulary: int | None
) -> str:
    """Convert the problems, and make a small model where `vocabulary` has a size.

    Returns:
        The path of the model in the command that the user is to run next.
    """
    files = convert(source, out, prompt_format)
    print(f"train       {files.num_train:>6} problems  {files.train.parquet}")
    print(f"validation  {files.num_validation:>6} problems  {files.validation.parquet}")

    model = "PATH_OF_A_MODEL"
    if vocabulary is not None:
        model = str(out / "model")
        _make_model(model, files, prompt_format, vocabulary)

    print(_next("gsm8k", model, files))
    return model


def _make_model(
    model: str,
    files: Gsm8kFiles,
    prompt_format: PromptFormat,
    vocabulary: int,
) -> None:
    """Train a tokenizer on the prompts, and write an untrained model that fits it."""
    # Imported here, because it imports torch, which the conversion does not need.
    from verl_ray.models.tiny import make_tiny_qwen3

    records = read_prompts(files.train.jsonl)
    texts = [_text(record.prompt) for record in records]
    # Plain texts have no turns to delimit.
    chat_template = CHATML if prompt_format == "chat" else None
    tokenizer = train_bpe(model, texts, vocabulary, chat_template)
    make_tiny_qwen3(model, model, _MODEL, seed=0)
    print(f"model       {len(tokenizer):>6} tokens    {model}")


def _prepare_gsm8k_pairs(
    source: Path, out: Path, prompt_format: PromptFormat, model: str
) -> None:
    files = convert_pairs(
        source, out, prompt_format, validation_fraction=_PAIRS_HELD_OUT_FRACTION, seed=0
    )
    print(f"train       {files.num_train:>6} pairs     {files.train.parquet}")
    print(f"validation  {files.num_validation:>6} pairs     {files.validation.parquet}")
    print(_next("reward_model", model, files))


def _next(config_name: str, model: str, files: Gsm8kFiles) -> str:
    command = for_shell(
        [
            *("verl-ray", "train", "--config-name", config_name),
            ("model.path", model),
            ("data.train_path", str(files.train.parquet)),
            ("data.validation_path", str(files.validation.parquet)),
        ]
    )
    return f"next: {command}"


def _text(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


# -------------------------------------------------------------------------------- GSM8K


@dataclass(frozen=True)
class Gsm8kFiles:
    """Files of the two sets, and how many records each has."""

    train: DataFiles
    validation: DataFiles
    num_train: int
    num_validation: int


def convert(
    source: Path, directory: Path, prompt_format: PromptFormat = "chat"
) -> Gsm8kFiles:
    """Write `train` and `validation` from train.jsonl and test.jsonl in `source`.

    Each record serves both reinforcement learning (`answer`) and supervision
    (`response`: the worked solution without the calculation marks).

    Raises:
        DataError: a file, a line or an answer is not what it should be.
    """
    # Both are read before either is written: a bad test file leaves nothing half done.
    train = read_problems(source / SOURCE_FILES["train"], prompt_format)
    validation = read_problems(source / SOURCE_FILES["validation"], prompt_format)
    return _write_both(train, validation, directory)


def read_problems(path: Path, prompt_format: PromptFormat) -> list[Fields]:
    """Read the problems of one file, which has a question and an answer per line.

    Raises:
        DataError: the file, a line or an answer is not what it should be.
    """
    _require_file(path, " and ".join(SOURCE_FILES.values()))
    return [_record(where, fields, prompt_format) for where, fields in read_jsonl(path)]


def final_number(solution: str, where: str) -> str:
    """Return the number behind the last `####`, as digits: "72", "-3.5".

    Raises:
        DataError: there is no `####`, or no number behind it.
    """
    number = _number_behind(solution.rpartition("####"))
    if number is None:
        raise DataError(
            f"answer ends in {solution[-40:]!r}",
            expected="a line '#### NUMBER'",
            place=where,
        )
    return number


def _record(where: str, fields: Fields, prompt_format: PromptFormat) -> Fields:
    question = require_text(fields, "question", where)
    solution = require_text(fields, "answer", where)
    return {
        "prompt": _prompt(question, prompt_format),
        "answer": final_number(solution, where),
        "response": _CALCULATION.sub("", solution),
        "data_source": DATA_SOURCE,
    }


def _prompt(question: str, prompt_format: PromptFormat) -> str | list[Message]:
    text = f"{question}\n{INSTRUCTION}"
    if prompt_format == "chat":
        return [{"role": "user", "content": text}]
    return text + "\n"


def _number_behind(parts: tuple[str, str, str]) -> str | None:
    """Return the digits of the number behind a mark.

    Args:
        parts: Text before the mark, the mark, and the text behind it; the mark is empty
            where the text has none.

    Returns:
        None where the mark or the number is missing.
    """
    _, mark, tail = parts
    # "$1,234." is the number 1234
    number = tail.strip().replace(",", "").replace("$", "").rstrip(".")
    if mark and _NUMBER.fullmatch(number):
        return number
    return None


def _require_file(path: Path, expected: str) -> None:
    if path.is_file():
        return
    folder = path.parent
    present = ", ".join(sorted(file.name for file in folder.glob("*"))) or "nothing"
    raise DataError(
        f"does not exist; {folder} holds {present}",
        expected=f"{expected} of GSM8K",
        subject=path,
    )


def _write_both(
    train: Sequence[Fields], validation: Sequence[Fields], directory: Path
) -> Gsm8kFiles:
    return Gsm8kFiles(
        train=write_records(train, directory, "train"),
        validation=write_records(validation, directory, "validation"),
        num_train=len(train),
        num_validation=len(validation),
    )


# -------------------------------------------------------------------------------- pairs


def convert_pairs(
    source: Path,
    directory: Path,
    prompt_format: PromptFormat = "chat",
    *,
    validation_fraction: float,
    seed: int,
) -> Gsm8kFiles:
    """Write `train` and `validation`: pairs of a right and a wrong solution.

    Both solutions of a pair are to the same problem. A set has, for every two models,
    as many pairs in which the first is right as in which the second is, drawn from all
    combinations. The author of a solution therefore says nothing about whether it is
    right. (Of all 2,422 combinations, "the better model is right" decides 79 %.)

    Args:
        validation_fraction: This fraction of the problems is held out, with all their
            solutions.

    Raises:
        DataError: the file or a line is not what it should be, or a set would be empty.
    """
    path = source / SOLUTIONS_FILE
    _require_file(path, SOLUTIONS_FILE)
    problems = [
        _read_solved_problem(where, fields, prompt_format)
        for where, fields in read_jsonl(path)
    ]

    # Split by problem: no held-out problem has a solution among the training pairs.
    random = np.random.default_rng(seed)
    shuffled = [problems[index] for index in random.permutation(len(problems))]
    num_held_out = round(validation_fraction * len(problems))
    train = _balanced_pairs(shuffled[num_held_out:], random)
    validation = _balanced_pairs(shuffled[:num_held_out], random)

    if not train or not validation:
        raise DataError(
            f"found {len(train)} pairs for training and {len(validation)} held out",
            expected="some of both; two problems give two pairs where one model solved"
            " the one and another model the other",
            place=path,
        )
    return _write_both(train, validation, directory)


@dataclass(frozen=True)
class _SolvedProblem:
    """A problem, and what each model wrote: (model, solution)."""

    prompt: str | list[Message]
    right: list[tuple[str, str]]
    wrong: list[tuple[str, str]]


def _read_solved_problem(
    where: str, fields: Fields, prompt_format: PromptFormat
) -> _SolvedProblem:
    question = require_text(fields, "question", where)
    problem = _SolvedProblem(_prompt(question, prompt_format), [], [])

    for model, value in fields.items():
        # The question and the worked solution are texts; each model has an object.
        if not isinstance(value, dict):
            continue

        place = f"{where}, {model}"
        solution = _to_reference_format(require_text(value, "solution", place))
        is_correct = value.get("is_correct")
        if not isinstance(is_correct, bool):
            raise DataError(
                f"is_correct is {is_correct!r}", expected="true or false", place=place
            )

        # Without a final number it would be easy to see which solution is wrong.
        if solution is None:
            continue
        if is_correct:
            problem.right.append((model, solution))
        else:
            problem.wrong.append((model, solution))

    return problem


def _to_reference_format(solution: str) -> str | None:
    """Return a model's solution in the form of the data set's own solutions.

    The models end in `A: 1,234` where the data set has `#### 1,234`; some write the
    commas, others do not.

    Returns:
        None where the solution breaks off, which would show that it is wrong.
    """
    parts = _CALCULATION.sub("", solution).rpartition("\nA:")
    number = _number_behind(parts)
    text = parts[0]
    if number is None or "<<" in text:
        return None
    return f"{text}\n#### {number}"


def _balanced_pairs(
    problems: Sequence[_SolvedProblem], random: np.random.Generator
) -> list[Fields]:
    """Draw pairs in which each of two models is right as often as the other."""
    # Pairs by (model that is right, model that is wrong).
    pairs_of: dict[tuple[str, str], list[Fields]] = defaultdict(list)
    for problem in problems:
        combinations = itertools.product(problem.right, problem.wrong)
        for (right, chosen), (wrong, rejected) in combinations:
            pair: Fields = {
                "prompt": problem.prompt,
                "chosen": chosen,
                "rejected": rejected,
            }
            pairs_of[right, wrong].append(pair)

    pairs = []
    for (right, wrong), candidates in pairs_of.items():
        # `get` adds no key, as the dictionary may not grow in this loop
        num_reversed = len(pairs_of.get((wrong, right), ()))
        pairs += candidates[:num_reversed]
    return [pairs[index] for index in random.permutation(len(pairs))]


if __name__ == "__main__":
    sys.exit(main())
