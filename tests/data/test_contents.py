"""Contents of records: a prompt keeps its system message, whatever stands beside it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.original_schemas import assistant, user
from tests.data.reading import read_preferences
from verl_ray.data.files import write_records
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


ASKED = [SYSTEM, QUESTION]
RIGHT, WRONG = [*ASKED, assistant("2")], [*ASKED, assistant("3")]


@pytest.mark.parametrize("write", [json.dumps, str])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_messages_that_were_written_as_a_text_are_messages(
    tmp_path: Path, suffix: str, write: Callable[[object], str]
) -> None:
    """A list becomes a text where it goes through a CSV file or `json.dumps`."""

    def written(**fields: object) -> Path:
        texts = {
            name: write(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        path = tmp_path / f"set{suffix}"
        if suffix == ".csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([texts.keys(), texts.values()])
            return path
        files = write_records([texts], tmp_path, "set")
        return files.jsonl if suffix == ".jsonl" else files.parquet

    (prompt,) = read_prompts(written(prompt=ASKED, answer="2"))
    assert (prompt.prompt, prompt.answer) == (ASKED, "2")
    (prompt,) = read_prompts(written(prompt=ASKED, completion=[assistant("2")]))
    assert (prompt.prompt, prompt.answer) == (ASKED, "2")
    for fields in (
        {"messages": RIGHT},
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in RIGHT]},
        {"prompt": ASKED, "response": "2"},
        {"prompt": ASKED, "completion": [assistant("2")]},
    ):
        (shown,) = read_supervised(written(**fields))
        contents = [message["content"] for message in shown.content]
        assert contents == ["Calculate.", "1+1=", "2"]
    (pair,) = read_preferences(written(chosen=RIGHT, rejected=WRONG))
    assert (pair.chosen, pair.rejected) == (RIGHT, WRONG)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[role] Who are you? [end]",
        '[{"role": "user", "content": "1+1="}] is what?',
        '[{"from": "Oslo", "to": "Rome"}]',
        '[{"role": "king", "name": "Harald"}]',
        "[{'x': 'a \"role\": b'}]",
        "[{'x': role, 'role': x}]",
    ],
)
def test_other_texts_with_brackets_stay_texts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"prompt": text, "answer": "2"}))
    assert read_prompts(path)[0].prompt == text


def test_messages_that_cannot_be_read_back_are_refused(tmp_path: Path) -> None:
    # NumPy prints no commas.
    text = "[{'role': 'system', 'content': 'a'}\n {'role': 'user', 'content': 'b'}]"
    path = tmp_path / "set.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), ("1+1=", "2"), (text, "2")])
    with pytest.raises(DataError, match=r"line 3: prompt looks like chat messages"):
        read_prompts(path)


def test_an_answer_may_be_a_decimal_number(tmp_path: Path) -> None:
    path = tmp_path / "sums.parquet"
    answers = [Decimal("1.50"), Decimal("72.00")]
    table = pa.table({"prompt": ["a", "b"], "answer": answers})
    pyarrow.parquet.write_table(table, path)
    assert [record.answer for record in read_prompts(path)] == ["1.5", "72"]
