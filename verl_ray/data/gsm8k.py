"""GSM8K (arXiv:2110.14168) from a local copy, in the run's format.

Invariant: `answer` is the number behind the last `####` of the worked solution, without commas and currency signs.
Deliberately not here: downloads, and grading (`verl_ray/rewards`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_ray.data.files import DataFiles, Fields, read_jsonl, require_text, write_records
from verl_ray.errors import DataError

DATA_SOURCE = "gsm8k"
INSTRUCTION = "Work it out step by step. Write the final number on a line of its own, after ####."
SOURCE_FILES = {"train": "train.jsonl", "validation": "test.jsonl"}

PromptFormat = Literal["chat", "text"]

_CALCULATION = re.compile(r"<<[^<>]*>>")  # the data set marks each calculation: 2+3=<<2+3=5>>5
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Gsm8kFiles:
    """Where the two sets are, and how many problems each has."""

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


def read_problems(path: Path, prompt_format: PromptFormat) -> list[Fields]:
    """The problems of one file with a question and an answer per line."""
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in path.parent.glob("*"))) or "nothing"
        expected = " and ".join(SOURCE_FILES.values())
        raise DataError(f"{path} does not exist; {path.parent} holds {found}, expected {expected} of GSM8K")
    return [_record(where, fields, prompt_format) for where, fields in read_jsonl(path)]


def final_number(solution: str, where: str) -> str:
    """The number behind the last `####`, as digits: "72", "-3.5".

    Raises:
        DataError: there is no `####`, or no number behind it.
    """
    _, mark, tail = solution.rpartition("####")
    number = tail.strip().replace(",", "").replace("$", "").rstrip(".")
    if not mark or not _NUMBER.fullmatch(number):
        raise DataError(f"{where}: answer ends in {solution[-40:]!r}, expected a line '#### NUMBER'")
    return number


def _record(where: str, fields: Fields, prompt_format: PromptFormat) -> Fields:
    question = require_text(fields, "question", where)
    solution = require_text(fields, "answer", where)
    text = f"{question}\n{INSTRUCTION}"
    return {
        "prompt": [{"role": "user", "content": text}] if prompt_format == "chat" else text + "\n",
        "answer": final_number(solution, where),
        "response": _CALCULATION.sub("", solution),
        "data_source": DATA_SOURCE,
    }
