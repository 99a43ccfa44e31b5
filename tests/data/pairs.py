"""Preference pairs for sums: a right and a wrong number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.data.arithmetic import ArithmeticFiles, draw_sums
from verl_ray.data.fields import Fields
from verl_ray.data.files import write_records


def write_arithmetic_pairs(
    directory: Path,
    *,
    max_operand: int,
    num_train: int,
    num_validation: int,
    seed: int,
    wrong_per_sum: int = 1,
) -> ArithmeticFiles:
    """Write preference pairs for the sums that `write_arithmetic` draws.

    A pair is a right and a wrong number. Each training sum has `wrong_per_sum` pairs,
    each held-out sum has one.
    """
    random = np.random.default_rng([seed, max_operand, num_train])
    train, validation = draw_sums(max_operand, num_train, num_validation, seed)

    # The training pairs come first: both take their wrong numbers from one generator.
    repeated = np.repeat(train, wrong_per_sum, axis=0)
    train_pairs = _pairs(repeated, max_operand, random)
    train_files = write_records(train_pairs, directory, "train")
    validation_pairs = _pairs(validation, max_operand, random)
    validation_files = write_records(validation_pairs, directory, "validation")
    return ArithmeticFiles(train_files, validation_files)


def write_digits(folder: Path, seed: int) -> None:
    """Write problems, demonstrations and preferences about the first digit of numbers.

    Three of five demonstrations are one too high, so that a policy that imitates them
    is mostly wrong. The rejected answer of a pair is any wrong digit. Of the first, the
    third and so on of them the right answer is also without a partner, of the others the
    wrong one.
    """
    random = np.random.default_rng(seed)
    numbers = [f"{number:03}" for number in random.permutation(1000)]
    folder.mkdir()
    for kind, chosen in (("validation", numbers[:200]), ("train", numbers[200:])):
        records, pairs = [], []
        for number in chosen:
            right, prompt = int(number[0]), f"{number}="
            said = (right + int(random.random() < 0.6)) % 10
            records.append(
                {"prompt": prompt, "answer": str(right), "response": str(said)}
            )
            wrong = ((right + int(apart)) % 10 for apart in random.integers(1, 10, 4))
            pairs += [
                {"prompt": prompt, "chosen": str(right), "rejected": str(digit)}
                for digit in wrong
            ]
        unpaired = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": label}
            for number, pair in enumerate(pairs)
            for side, label in [(("chosen", True), ("rejected", False))[number % 2]]
        ]
        for name, lines in (
            (kind, records),
            (f"{kind}_pairs", pairs),
            (f"{kind}_unpaired", unpaired),
        ):
            (folder / f"{name}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )


def _wrong_numbers(right: Int64, largest: int, random: np.random.Generator) -> Int64:
    """Draw for each number >= 0 another number >= 0.

    A third is off by one to three, a third has one digit changed, and a third is any
    number up to `largest`.

    Args:
        right: int64 [numbers].

    Returns:
        int64 [numbers], different from `right` everywhere.
    """
    count = len(right)

    # Off by one to three; upwards where the result would need a sign, for which there
    # is no character.
    off = random.integers(1, 4, count) * random.choice([-1, 1], count)
    near = np.where(right + off < 0, right - off, right + off)

    # One digit changed; position 0 is the last digit.
    num_digits = np.char.str_len(right.astype(np.str_))
    position = random.integers(num_digits)
    unit = 10**position
    digit = right // unit % 10
    # A longer number keeps a first digit of 1 to 9, or it would lose more than one
    # digit.
    is_first = (position == num_digits - 1) & (num_digits > 1)
    least = is_first.astype(np.int64)
    # Moving on by 1 to (number of choices - 1) never comes back to the same digit.
    num_choices = 10 - least
    new_digit = least + (digit - least + random.integers(1, num_choices)) % num_choices
    changed = right + (new_digit - digit) * unit

    # Any other number: those from `right` on are shifted by one to leave it out.
    any_other = random.integers(0, largest, count)
    any_other += any_other >= right

    return np.choose(random.integers(3, size=count), [near, changed, any_other])


def _pairs(sums: Int64, max_operand: int, random: np.random.Generator) -> list[Fields]:
    right = sums.sum(axis=1)
    wrong = _wrong_numbers(right, 2 * max_operand, random)
    rows = zip(sums.tolist(), right.tolist(), wrong.tolist(), strict=True)
    return [
        {"prompt": f"{a}+{b}=", "chosen": str(chosen), "rejected": str(rejected)}
        for (a, b), chosen, rejected in rows
    ]
