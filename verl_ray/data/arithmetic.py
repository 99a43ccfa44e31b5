"""Made-up problems that a small model learns within minutes, without a download.

They are sums like `12+7=`, or word problems in the format of GSM8K: a question in
words, the calculation, and the final number behind `####`.

Invariant: the two numbers of a held-out problem appear in no training problem, in
either order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool
from verl_ray.data.fields import Fields
from verl_ray.data.files import DataFiles, write_records
from verl_ray.errors import DataError

ALPHABET = "0123456789+="
"""Characters of all problems and answers: the argument of `character_tokenizer`."""


@dataclass(frozen=True)
class ArithmeticFiles:
    """Files of the two sets."""

    train: DataFiles
    validation: DataFiles


def draw_sums(
    max_operand: int, num_train: int, num_validation: int, seed: int
) -> tuple[Int64, Int64]:
    """Draw the operands of the training sums and of the held-out sums.

    Returns:
        int64 [num_train, 2] and [num_validation, 2], each operand in
        [0, max_operand], all pairs distinct.

    Raises:
        DataError: there are too few pairs once the held-out ones are taken out.
    """
    side = max_operand + 1
    num_pairs = side * side

    # A held-out pair takes its mirror image b+a out of the training pairs. One more
    # pair is drawn to make up for each.
    num_drawn = min(num_pairs, num_train + 2 * num_validation)
    random = np.random.default_rng([seed, side])
    drawn = random.choice(num_pairs, size=num_drawn, replace=False)
    pairs = np.stack([drawn // side, drawn % side], axis=1).astype(np.int64)

    validation = pairs[:num_validation]
    candidates = pairs[num_validation:]
    mirrored = validation[:, 1] * side + validation[:, 0]
    is_mirrored = np.isin(drawn[num_validation:], mirrored)
    train = candidates[~is_mirrored][:num_train]

    if len(validation) < num_validation or len(train) < num_train:
        raise DataError(
            f"prepare.max_operand = {max_operand} gives {num_pairs} sums: found"
            f" {len(validation)} held-out and {len(train)} for training",
            expected=f"prepare.num_validation = {num_validation} and prepare.num_train"
            f" = {num_train}",
            fix="raise prepare.max_operand or lower the numbers",
        )
    return train, validation


def write_arithmetic(
    directory: Path,
    *,
    max_operand: int,
    num_train: int,
    num_validation: int,
    seed: int,
    wrong_fraction: float = 0.0,
) -> ArithmeticFiles:
    """Write `train` and `validation` under `directory`, in every format.

    Each record serves both reinforcement learning (`answer`) and supervision
    (`response`).

    Args:
        wrong_fraction: In this fraction of the training records the demonstrated
            response is too large by 1. The answer that a reward compares with is right
            everywhere. A model that imitates such demonstrations learns to add, and to
            be wrong.
    """
    train, validation = draw_sums(max_operand, num_train, num_validation, seed)
    random = np.random.default_rng([seed, num_train])
    train_is_wrong = random.random(len(train)) < wrong_fraction
    validation_is_wrong = np.zeros(len(validation), np.bool_)

    return ArithmeticFiles(
        train=write_records(_records(train, train_is_wrong), directory, "train"),
        validation=write_records(
            _records(validation, validation_is_wrong), directory, "validation"
        ),
    )


def _records(pairs: Int64, is_wrong: Bool) -> list[Fields]:
    offs = is_wrong.astype(int).tolist()
    return [
        {
            "prompt": f"{a}+{b}=",
            "answer": str(a + b),
            "response": str(a + b + off),
            "data_source": "arithmetic",
        }
        for (a, b), off in zip(pairs.tolist(), offs, strict=True)
    ]


# ------------------------------------------------------------------------ word problems


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


WORD_VOCABULARY = 375
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

    train_records = _word_records(train, train_is_wrong, random)
    validation_records = _word_records(validation, validation_is_wrong, random)
    return ArithmeticFiles(
        train=write_records(train_records, directory, "train"),
        validation=write_records(validation_records, directory, "validation"),
    )


def _word_records(
    pairs: Int64, is_wrong: Bool, random: np.random.Generator
) -> list[Fields]:
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
                "data_source": "word_problems",
            }
        )
    return records
