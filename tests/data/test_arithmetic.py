"""The sums: right, disjoint in either order, the same for the same seed, and refused
when there are too few.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.reading import read_supervised
from verl_ray.data.arithmetic import (
    ALPHABET,
    draw_sums,
    write_arithmetic,
)
from verl_ray.data.records import (
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
