"""GSM8K (arXiv:2110.14168) from a local copy, in the run's format.

Invariant: `answer` is the number behind the last `####` of the worked solution, without commas and currency signs.
Deliberately not here: downloads, and grading (`verl_ray/rewards`).

Beside the problems the data set has solutions that four models wrote to those of test.jsonl, each marked right or
wrong: pairs for a reward model. A policy that learns from such a reward model is to be judged on other problems.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from verl_ray.data.files import DataFiles, Fields, Message, read_jsonl, require_text, write_records
from verl_ray.errors import DataError

DATA_SOURCE = "gsm8k"
INSTRUCTION = "Work it out step by step. Write the final number on a line of its own, after ####."
SOURCE_FILES = {"train": "train.jsonl", "validation": "test.jsonl"}
SOLUTIONS_FILE = "example_model_solutions.jsonl"

PromptFormat = Literal["chat", "text"]

_CALCULATION = re.compile(r"<<[^<>]*>>")  # the data set marks each calculation: 2+3=<<2+3=5>>5
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Gsm8kFiles:
    """Where the two sets are, and how many records each has."""

    train: DataFiles
    validation: DataFiles
    num_train: int
    num_validation: int


def convert(source: Path, directory: Path, prompt_format: PromptFormat = "chat") -> Gsm8kFiles:
    """Write `train` and `validation` under `directory` from train.jsonl and test.jsonl in `source`.

    Each record serves reinforcement learning (`answer`) and supervision (`response`: the worked solution without the
    calculation marks) alike.

    Raises:
        DataError: a file, a line or an answer is not what it should be.
    """
    # Both are read before either is written: a bad test file leaves nothing half done.
    train, validation = (read_problems(source / name, prompt_format) for name in SOURCE_FILES.values())
    return Gsm8kFiles(
        train=write_records(train, directory, "train"),
        validation=write_records(validation, directory, "validation"),
        num_train=len(train),
        num_validation=len(validation),
    )


def convert_pairs(
    source: Path, directory: Path, prompt_format: PromptFormat = "chat", *, validation_fraction: float, seed: int
) -> Gsm8kFiles:
    """Write `train` and `validation` under `directory`: a right and a wrong solution of a problem in `source` each.

    `validation_fraction` of the problems are held out, with all their solutions. For every two models each set has as
    many pairs in which the one is right as in which the other is, drawn from all combinations: who wrote a solution
    says nothing about whether it is right. (Of all 2,422 combinations, "the better model is right" decides 79 %.)

    Raises:
        DataError: the file or a line is not what it should be; a set would be empty.
    """
    path = source / SOLUTIONS_FILE
    _require_file(path, SOLUTIONS_FILE)
    problems = [_solved(where, fields, prompt_format) for where, fields in read_jsonl(path)]
    random = np.random.default_rng(seed)
    order = [problems[index] for index in random.permutation(len(problems))]
    held_out = round(validation_fraction * len(problems))
    train, validation = _balanced(order[held_out:], random), _balanced(order[:held_out], random)
    if not train or not validation:
        raise DataError(
            f"{path}: found {len(train)} pairs for training and {len(validation)} held out, expected some of both; two "
            "problems give two pairs where one model solved the one and another model the other"
        )
    return Gsm8kFiles(
        train=write_records(train, directory, "train"),
        validation=write_records(validation, directory, "validation"),
        num_train=len(train),
        num_validation=len(validation),
    )


def read_problems(path: Path, prompt_format: PromptFormat) -> list[Fields]:
    """The problems of one file with a question and an answer per line."""
    _require_file(path, " and ".join(SOURCE_FILES.values()))
    return [_record(where, fields, prompt_format) for where, fields in read_jsonl(path)]


def final_number(solution: str, where: str) -> str:
    """The number behind the last `####`, as digits: "72", "-3.5".

    Raises:
        DataError: there is no `####`, or no number behind it.
    """
    number = _number(solution.rpartition("####"))
    if number is None:
        raise DataError(f"{where}: answer ends in {solution[-40:]!r}, expected a line '#### NUMBER'")
    return number


def _require_file(path: Path, expected: str) -> None:
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in path.parent.glob("*"))) or "nothing"
        raise DataError(f"{path} does not exist; {path.parent} holds {found}, expected {expected} of GSM8K")


def _number(parts: tuple[str, str, str]) -> str | None:
    """The digits of the number behind a mark; None where one of them is missing."""
    _, mark, tail = parts
    number = tail.strip().replace(",", "").replace("$", "").rstrip(".")
    return number if mark and _NUMBER.fullmatch(number) else None


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
    return [{"role": "user", "content": text}] if prompt_format == "chat" else text + "\n"


@dataclass(frozen=True)
class _Solved:
    """A problem, and what each model wrote: (model, solution)."""

    prompt: str | list[Message]
    right: list[tuple[str, str]]
    wrong: list[tuple[str, str]]


def _solved(where: str, fields: Fields, prompt_format: PromptFormat) -> _Solved:
    problem = _Solved(_prompt(require_text(fields, "question", where), prompt_format), [], [])
    for model, value in fields.items():
        if not isinstance(value, dict):
            continue  # the question, and the worked solution
        place = f"{where}, {model}"
        solution, is_correct = _finished(require_text(value, "solution", place)), value.get("is_correct")
        if not isinstance(is_correct, bool):
            raise DataError(f"{place}: is_correct is {is_correct!r}, expected true or false")
        if solution is not None:
            (problem.right if is_correct else problem.wrong).append((model, solution))
    return problem


def _finished(solution: str) -> str | None:
    """A model's solution in the form of the data set's own; None where it breaks off, which would give it away.

    The models end in `A: 1,234` where the data set has `#### 1,234`; some write the commas, others do not.
    """
    parts = _CALCULATION.sub("", solution).rpartition("\nA:")
    number = _number(parts)
    return None if number is None or "<<" in parts[0] else f"{parts[0]}\n#### {number}"


def _balanced(problems: Sequence[_Solved], random: np.random.Generator) -> list[Fields]:
    found: dict[tuple[str, str], list[Fields]] = defaultdict(list)
    for problem in problems:
        for (right, chosen), (wrong, rejected) in itertools.product(problem.right, problem.wrong):
            found[right, wrong].append({"prompt": problem.prompt, "chosen": chosen, "rejected": rejected})
    pairs = [pair for (a, b), some in found.items() for pair in some[: len(found.get((b, a), ()))]]
    return [pairs[index] for index in random.permutation(len(pairs))]
