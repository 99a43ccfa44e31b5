"""Contents of records: a prompt keeps its system message, whatever stands beside it."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.original_schemas import assistant, user
from tests.data.reading import read_preferences
from verl_ray.data.records import read_prompts, read_supervised
from verl_ray.errors import DataError

SYSTEM = {"role": "system", "content": "Calculate."}
QUESTION = user("1+1=")


def test_a_whole_conversation_keeps_the_system_message_of_its_prompt(
    tmp_path: Path,
) -> None:
    right, wrong = [QUESTION, assistant("2")], [QUESTION, assistant("3")]
    record = {"prompt": [SYSTEM, QUESTION], "chosen": right, "rejected": wrong}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(record))
    (pair,) = read_preferences(path)
    assert (pair.chosen, pair.rejected) == ([SYSTEM, *right], [SYSTEM, *wrong])


def test_marks_of_earlier_turns_do_not_tell_pairs_apart(tmp_path: Path) -> None:
    earlier = [QUESTION, {**assistant("3"), "weight": 0}, user("again")]
    better = [*earlier, {**assistant("2"), "weight": 1}]
    worse = [QUESTION, assistant("3"), user("again"), {**assistant("4"), "weight": 0}]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"chosen": better, "rejected": worse}))
    (pair,) = read_preferences(path)
    plain = [QUESTION, assistant("3"), user("again")]
    assert pair.chosen == [*plain, assistant("2")]
    assert pair.rejected == [*plain, assistant("4")]

    path.write_text(json.dumps({"messages": better}))
    (prompt,) = read_prompts(path)
    assert (prompt.prompt, prompt.answer) == (plain, "2")


def test_a_conversation_with_another_prompt_is_refused(tmp_path: Path) -> None:
    record = {"prompt": [QUESTION], "completion": [user("2+2="), assistant("4")]}
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="does not begin with the messages of the"):
        read_supervised(path)


def test_an_answer_may_be_a_decimal_number(tmp_path: Path) -> None:
    path = tmp_path / "sums.parquet"
    answers = [Decimal("1.50"), Decimal("72.00")]
    table = pa.table({"prompt": ["a", "b"], "answer": answers})
    pyarrow.parquet.write_table(table, path)
    assert [record.answer for record in read_prompts(path)] == ["1.5", "72"]
