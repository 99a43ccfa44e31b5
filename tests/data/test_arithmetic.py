"""The sums: right, disjoint in either order, the same for the same seed, and refused
when there are too few.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.reading import read_preferences, read_supervised
from verl_ray.data.arithmetic import (
    ALPHABET,
    draw_sums,
    write_arithmetic,
    write_arithmetic_pairs,
    wrong_numbers,
)
from verl_ray.data.records import (
    PreferenceRecord,
    read_prompts,
)
from verl_ray.errors import DataError


@given(operand=st.integers(5, 30), seed=st.integers(0, 100), data=st.data())
def test_sets_are_distinct_and_disjoint_in_either_order(
    operand: int, seed: int, data: st.DataObject
) -> None:
    side = operand + 1
    held_out = data.draw(st.integers(1, side * side // 4))
    count = data.draw(st.integers(1, side * side - 2 * held_out))
    train, validation = draw_sums(operand, count, held_out, seed)
    seen, kept = set(map(tuple, train.tolist())), set(map(tuple, validation.tolist()))
    assert (len(seen), len(kept)) == (count, held_out)
    assert not seen & (kept | {(b, a) for a, b in kept})
    assert all(0 <= x <= operand for pair in seen | kept for x in pair)


def test_the_seed_decides() -> None:
    first, second, other = (draw_sums(99, 100, 20, seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert (first[0] != other[0]).any()


def test_large_operands_need_no_table_of_all_pairs() -> None:
    train, validation = draw_sums(10**8, 1000, 100, 0)
    assert train.shape == (1000, 2)
    assert validation.max() > 10**7


def test_too_few_sums_are_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"prepare\.max_operand = 3 gives 16 sums: found 4 held-out and .* for training",
    ):
        draw_sums(3, 13, 4, 0)


def test_records_of_every_format(tmp_path: Path) -> None:
    files = write_arithmetic(
        tmp_path, max_operand=9, num_train=30, num_validation=10, seed=0
    )
    for path in (files.train.jsonl, files.train.parquet, files.train.folder):
        problems = read_prompts(path)
        assert len(problems) == 30
        for problem in problems:
            assert isinstance(problem.prompt, str)
            assert set(problem.prompt + problem.answer) <= set(ALPHABET)
            a, b = problem.prompt.removesuffix("=").split("+")
            assert (int(problem.answer), problem.data_source) == (
                int(a) + int(b),
                "arithmetic",
            )
        demonstrations = read_supervised(path)
        assert [d.content for d in demonstrations] == [
            (p.prompt, p.answer) for p in problems
        ]
    assert len(read_prompts(files.validation.folder)) == 10
    first = json.loads(files.train.jsonl.read_text().splitlines()[0])
    assert list(first) == ["prompt", "answer", "response", "data_source"]


def test_wrong_numbers_are_near_one_digit_off_or_anything() -> None:
    right = np.repeat(np.array([0, 7, 10, 105, 199_998]), 600)
    wrong = wrong_numbers(right, 199_998, np.random.default_rng(0))
    assert (wrong >= 0).all() and (wrong <= 999_998).all() and (wrong != right).all()
    near = abs(wrong - right) <= 3
    digit = np.array([
        len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) == 1
        for a, b in zip(right.astype(str), wrong.astype(str), strict=True)
    ])  # fmt: skip
    large = (
        right == 199_998
    )  # where a number drawn from all is hardly ever near, or one digit off
    for kind, least in ((near, 1 / 3), (digit & ~near, 1 / 4), (~near & ~digit, 1 / 3)):
        assert least - 0.07 < kind[large].mean() < least + 0.12
    assert set(abs(wrong - right)[near].tolist()) == {1, 2, 3}


def test_pairs_of_the_same_sums(tmp_path: Path) -> None:
    numbers = {"max_operand": 9, "num_train": 30, "num_validation": 10, "seed": 0}
    sums = write_arithmetic(tmp_path / "sums", **numbers)
    pairs = write_arithmetic_pairs(tmp_path / "pairs", **numbers)
    for problems, files in (
        (sums.train, pairs.train),
        (sums.validation, pairs.validation),
    ):
        answers = [
            (problem.prompt, problem.answer) for problem in read_prompts(problems.jsonl)
        ]
        for path in (files.jsonl, files.parquet, files.folder):
            records = read_preferences(path)
            assert [record.chosen for record in records] == answers
            for record in records:
                assert (
                    record.rejected[0] == record.chosen[0]
                    and record.rejected[1] != record.chosen[1]
                )
                assert set(str(record.rejected[1])) <= set(ALPHABET)
    several = write_arithmetic_pairs(tmp_path / "several", **numbers, wrong_per_sum=3)
    chosen = [record.chosen for record in read_preferences(several.train.jsonl)]
    assert chosen == [
        record.chosen
        for record in read_preferences(pairs.train.jsonl)
        for _ in range(3)
    ]
    assert len(read_preferences(several.validation.jsonl)) == 10
    again = write_arithmetic_pairs(tmp_path / "again", **numbers)
    other = write_arithmetic_pairs(tmp_path / "other", **{**numbers, "seed": 1})
    assert (
        again.train.jsonl.read_text()
        == pairs.train.jsonl.read_text()
        != other.train.jsonl.read_text()
    )
    # In either order of its operands, what is held out is not trained on.
    train, validation = (
        _operands(read_preferences(files.jsonl))
        for files in (pairs.train, pairs.validation)
    )
    assert (len(train), len(validation)) == (30, 10)
    assert not train & (validation | {(b, a) for a, b in validation})


def _operands(records: list[PreferenceRecord]) -> set[tuple[str, ...]]:
    return {
        tuple(str(record.chosen[0]).removesuffix("=").split("+")) for record in records
    }
