"""The `a+b=` task: sums that a small model can half do, so that a run has something to learn within minutes.

Invariant: no held-out sum appears among the training sums, in either order of its operands. Deliberately not here:
the tokenizer (`tokenizers.py`), the model (`verl_ray/models/tiny.py`) and the warm start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_ray.data.batch import Int64
from verl_ray.data.files import DataFiles, Fields, write_records
from verl_ray.data.stages import Bool
from verl_ray.errors import DataError

ALPHABET = "0123456789+="
"""Every character of a problem and its answer: what `character_tokenizer` needs."""

DATA_SOURCE = "arithmetic"


@dataclass(frozen=True)
class ArithmeticFiles:
    """Where the two sets are."""

    train: DataFiles
    validation: DataFiles


def draw_sums(max_operand: int, num_train: int, num_validation: int, seed: int) -> tuple[Int64, Int64]:
    """Operands [num_train, 2] and [num_validation, 2], each in [0, max_operand], all pairs distinct.

    Raises:
        DataError: there are not that many pairs once the held-out ones are taken out.
    """
    side = max_operand + 1
    # A held-out pair takes its mirror image b+a out of the training pairs; so many more are drawn to make up for it.
    wanted = min(side * side, num_train + 2 * num_validation)
    drawn = np.random.default_rng([seed, side]).choice(side * side, size=wanted, replace=False)
    pairs = np.stack([drawn // side, drawn % side], axis=1).astype(np.int64)
    validation, rest = pairs[:num_validation], pairs[num_validation:]
    mirrored = validation[:, 1] * side + validation[:, 0]
    train = rest[~np.isin(drawn[num_validation:], mirrored)][:num_train]
    if len(validation) < num_validation or len(train) < num_train:
        raise DataError(
            f"prepare.max_operand = {max_operand} gives {side * side} sums: found {len(validation)} held-out and "
            f"{len(train)} for training, expected prepare.num_validation = {num_validation} and prepare.num_train = "
            f"{num_train}; raise prepare.max_operand or lower the numbers"
        )
    return train, validation


def write_arithmetic(
    directory: Path, *, max_operand: int, num_train: int, num_validation: int, seed: int, wrong_fraction: float = 0.0
) -> ArithmeticFiles:
    """Write `train` and `validation` under `directory` as jsonl, Parquet and datasets folders.

    Each record serves reinforcement learning (`answer`) and supervision (`response`) alike.
    In a `wrong_fraction` of the training records the demonstrated response is one too many; the answer that a reward
    compares with is right everywhere. A model that imitates such demonstrations learns to add, and to be wrong.
    """
    train, validation = draw_sums(max_operand, num_train, num_validation, seed)
    wrong = np.random.default_rng([seed, num_train]).random(len(train)) < wrong_fraction
    return ArithmeticFiles(
        train=write_records(_records(train, wrong), directory, "train"),
        validation=write_records(_records(validation, np.zeros(len(validation), np.bool_)), directory, "validation"),
    )


def write_arithmetic_pairs(
    directory: Path, *, max_operand: int, num_train: int, num_validation: int, seed: int, wrong_per_sum: int = 1
) -> ArithmeticFiles:
    """Write `train` and `validation` as `write_arithmetic` does, of the same sums: a right and a wrong number each,
    `wrong_per_sum` times for each training sum."""
    random = np.random.default_rng([seed, max_operand, num_train])
    train, validation = draw_sums(max_operand, num_train, num_validation, seed)
    return ArithmeticFiles(
        train=write_records(_pairs(np.repeat(train, wrong_per_sum, axis=0), max_operand, random), directory, "train"),
        validation=write_records(_pairs(validation, max_operand, random), directory, "validation"),
    )


def wrong_numbers(right: Int64, largest: int, random: np.random.Generator) -> Int64:
    """For each number >= 0 another one, >= 0, int64 [numbers]: a third is off by one to three, a third has one digit
    changed, and a third is any number up to `largest`."""
    count = len(right)
    off = random.integers(1, 4, count) * random.choice([-1, 1], count)
    near = np.where(right + off < 0, right - off, right + off)  # there is no character for a sign
    num_digits = np.char.str_len(right.astype(np.str_))
    position = random.integers(num_digits)  # 0 = the last digit
    unit = 10**position
    digit = right // unit % 10
    # A longer number keeps a first digit of 1 to 9, or it would lose more than one digit.
    least = ((position == num_digits - 1) & (num_digits > 1)).astype(np.int64)
    turned = least + (digit - least + random.integers(1, 10 - least)) % (10 - least)
    any_other = random.integers(0, largest, count)
    any_other += any_other >= right
    return np.choose(random.integers(3, size=count), [near, right + (turned - digit) * unit, any_other])


def _pairs(sums: Int64, max_operand: int, random: np.random.Generator) -> list[Fields]:
    right = sums.sum(axis=1)
    rows = zip(sums.tolist(), right.tolist(), wrong_numbers(right, 2 * max_operand, random).tolist(), strict=True)
    return [{"prompt": f"{a}+{b}=", "chosen": str(chosen), "rejected": str(wrong)} for (a, b), chosen, wrong in rows]


def _records(pairs: Int64, wrong: Bool) -> list[Fields]:
    return [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b + off), "data_source": DATA_SOURCE}
        for (a, b), off in zip(pairs.tolist(), wrong.astype(int).tolist(), strict=True)
    ]
