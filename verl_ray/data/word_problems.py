"""Word problems with two small numbers, in the format of GSM8K.

A small model learns them within minutes, without a download: a question in words, the
calculation, and the final number behind `####`.

Invariant: the two numbers of a held-out problem appear in no training problem, in
either order. Deliberately not here: GSM8K itself (`gsm8k.py`), the tokenizer
(`tokenizers.py`), the model (`verl_ray/models/tiny.py`) and the warm start.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from verl_ray.data.arithmetic import ArithmeticFiles, draw_sums
from verl_ray.data.batch import Int64
from verl_ray.data.fields import Fields
from verl_ray.data.files import write_records
from verl_ray.data.stages import Bool

DATA_SOURCE = "word_problems"

_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
_THINGS = ("apples", "books", "cards", "eggs", "pens", "shells", "stamps", "stones")

# Of a problem with the numbers a and b, `first` and `second` are those of the question.
_SUMS = (
    "{name} has {first} {things} and buys {second} more. How many {things} does {name}"
    " have now?",
    "{name} found {first} {things} on Monday and {second} on Tuesday. How many {things}"
    " did {name} find?",
)
_DIFFERENCES = (
    "{name} has {first} {things} and gives away {second}. How many {things} does {name}"
    " have left?",
)
_QUESTIONS = _SUMS + _DIFFERENCES


VOCABULARY = 375
"""Tokens of a byte-level tokenizer with one for each word of `sample_texts`."""


def sample_texts() -> list[str]:
    """Return texts with every word of the problems, to train a tokenizer on."""
    texts = ["1+2=3\n#### 3"]
    for question in _QUESTIONS:
        for name, things in itertools.product(_NAMES, _THINGS):
            texts.append(
                question.format(name=name, things=things, first=1, second=2) + "\n"
            )
    return texts


def write_word_problems(
    directory: Path,
    *,
    max_operand: int,
    num_train: int,
    num_validation: int,
    seed: int,
    wordings: int = 1,
    wrong_fraction: float = 0.0,
) -> ArithmeticFiles:
    """Write `train` and `validation` under `directory`, in every format.

    Each record serves both reinforcement learning (`answer`) and supervision
    (`response`). Two thirds of the problems are sums, the others differences.

    Args:
        max_operand: The largest of the two numbers that are added, or of the number
            that is taken away and the one that is left.
        wordings: Number of training problems with the same two numbers.
        wrong_fraction: In this fraction of the training records the demonstrated
            response is too large by 1, see `write_arithmetic`.

    Raises:
        DataError: there are too few problems with numbers up to `max_operand`.
    """
    num_pairs = -(-num_train // wordings)
    pairs, validation = draw_sums(max_operand, num_pairs, num_validation, seed)
    train = np.repeat(pairs, wordings, axis=0)[:num_train]

    random = np.random.default_rng([seed, num_train, len(_QUESTIONS)])
    train_is_wrong = random.random(len(train)) < wrong_fraction
    validation_is_wrong = np.zeros(len(validation), np.bool_)

    train_records = _records(train, train_is_wrong, random)
    validation_records = _records(validation, validation_is_wrong, random)
    return ArithmeticFiles(
        train=write_records(train_records, directory, "train"),
        validation=write_records(validation_records, directory, "validation"),
    )


def _records(pairs: Int64, is_wrong: Bool, random: np.random.Generator) -> list[Fields]:
    count = len(pairs)
    questions = random.integers(len(_QUESTIONS), size=count).tolist()
    names = random.choice(_NAMES, count).tolist()
    things = random.choice(_THINGS, count).tolist()

    records: list[Fields] = []
    for number, (a, b) in enumerate(pairs.tolist()):
        question = _QUESTIONS[questions[number]]
        if question in _SUMS:
            first, second, sign, result = a, b, "+", a + b
        else:
            first, second, sign, result = a + b, b, "-", a

        text = question.format(
            name=names[number], things=things[number], first=first, second=second
        )
        shown = result + int(is_wrong[number])
        records.append(
            {
                "prompt": f"{text}\n",
                "answer": str(result),
                "response": f"{first}{sign}{second}={shown}\n#### {shown}",
                "data_source": DATA_SOURCE,
            }
        )
    return records
