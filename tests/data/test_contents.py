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
from tests.data.reading import read_preferences, read_supervised
from verl_ray.data.files import write_records
from verl_ray.data.records import read_prompts
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


def read_prompt(folder: Path, **fields: object) -> object:
    path = folder / "set.jsonl"
    path.write_text(json.dumps({"answer": "2", **fields}))
    return read_prompts(path)[0].prompt


def read_shown(folder: Path, **fields: object) -> object:
    path = folder / "set.jsonl"
    path.write_text(json.dumps(fields))
    return read_supervised(path)[0].content


LIST = json.dumps(ASKED)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (json.dumps(LIST), ASKED),
        (json.dumps(json.dumps(LIST)), ASKED),
        (json.dumps({"messages": ASKED}), ASKED),
        (json.dumps({"conversations": ASKED, "tools": [], "id": None}), ASKED),
        (json.dumps({"prompt": ASKED}), ASKED),
        (json.dumps(QUESTION), [QUESTION]),
        (str(tuple(ASKED)), ASKED),
        (f"\ufeff {LIST}\n", ASKED),
        ('[{"role": "developer", "content": "a"}]', [{"role": "developer", "content": "a"}]),
        (
            json.dumps([user('[{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]')]),
            [QUESTION],
        ),
    ],
)  # fmt: skip
def test_every_spelling_of_messages_is_read(
    tmp_path: Path, text: str, messages: object
) -> None:
    assert read_prompt(tmp_path, prompt=text) == messages


def test_a_record_that_is_spelled_out_loses_nothing(tmp_path: Path) -> None:
    text = json.dumps({"messages": ASKED, "tools": [{"type": "function"}]})
    with pytest.raises(
        DataError, match="a whole record, with tools beside its messages"
    ):
        read_prompt(tmp_path, prompt=text)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[role] Who are you? [end]",
        '[{"role": "user", "content": "1+1="}] is what?',
        '{"role": "user", "content": "a"} is a message (of whom?)',
        '[Task] Which role has {"role": "user", "content": "a"}?',
        "\"[{'role': 'user', 'content': 'a'}]\" is what in Python?",
        'What is [{"role": "user", "content": "1+1="}]',
        '{"a": 1} is JSON. What is {"role": "user", "content": "b"',
        '[{"from": "Oslo", "to": "Rome"}]',
        '[{"from": "A", "to": "B", "value": 1}]',
        '[{"from": "user", "to": "system", "value": 1}]',
        '[{"role": "king", "name": "Harald"}]',
        '[{"role": "CEO", "content": "runs it"}]',
        '{"scene": 1, "lines": [{"role": "user", "content": "a"}]}',
        '[{"type": "text", "label": "Name"}]',
        '{"type": "text", "text": "a"}',
        "[{'x': 'a \"role\": b'}]",
        "[{'x': role, 'role': x}]",
    ],
)
def test_other_texts_with_brackets_stay_texts(tmp_path: Path, text: str) -> None:
    assert read_prompt(tmp_path, prompt=text) == text
    assert read_shown(tmp_path, prompt="1+1=", response=text) == ("1+1=", text)
    assert read_shown(tmp_path, text=text) == text


@pytest.mark.parametrize(
    "answer", ['[{"role": "CEO", "content": "runs it"}]', LIST, json.dumps(RIGHT), LIST[:-1]]
)  # fmt: skip
def test_a_text_to_compare_with_stays_one(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": answer}))
    assert read_prompts(path)[0].answer == answer
    # What ends with a user's message is no response.
    if answer != json.dumps(RIGHT):
        shown = read_shown(tmp_path, prompt="1+1=", response=answer)
        assert shown == ("1+1=", answer)


@pytest.mark.parametrize(
    "text",
    [
        # NumPy prints no commas.
        "[{'role': 'system', 'content': 'a'}\n {'role': 'user', 'content': 'b'}]",
        "[{'id': 1, 'content': 'a', 'role': 'user'}\n {'id': 2, 'content': 'b', 'role': 'user'}]",
        "array([{'role': 'user', 'content': 'a'}], dtype=object)",
        "[{'id': 1, 'role': 'user', 'content': nan}]",
        json.dumps(SYSTEM) + "\n" + json.dumps(QUESTION),
        LIST[:-1],
        LIST[:-6],
        json.dumps(LIST)[:-3],
        '[{"role": "user", "content": "a"}, {"role": "ipython", "content": "b"}]',
        "[{'type': 'image'}\n {'type': 'text', 'text': 'a'}]",
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read_back_are_refused(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "set.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), ("1+1=", "2"), (text, "2")])
    with pytest.raises(DataError, match=r"line 3: prompt looks like (chat|parts)"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "1+1=", "system": LIST}, "system is list"),
        ({"prompt": "1+1=", "system": LIST[:-1]}, "system looks like chat messages"),
        (
            {"prompt": json.dumps([user('[{"type": "image", "image": "a.png"}]')])},
            "message 1: content has a part of type 'image'",
        ),
        ({"prompt": '[{"type": "image_url"}]'}, "a part of type 'image_url'"),
    ],
)
def test_what_messages_hide_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=rf"line 1.*{message}"):
        read_prompt(tmp_path, **fields)


def test_a_whole_text_of_messages_says_which_column_they_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set 'data.columns=\{messages: text\}'"):
        read_shown(tmp_path, text=json.dumps(RIGHT))


def test_an_answer_may_be_a_decimal_number(tmp_path: Path) -> None:
    path = tmp_path / "sums.parquet"
    answers = [Decimal("1.50"), Decimal("72.00")]
    table = pa.table({"prompt": ["a", "b"], "answer": answers})
    pyarrow.parquet.write_table(table, path)
    assert [record.answer for record in read_prompts(path)] == ["1.5", "72"]
