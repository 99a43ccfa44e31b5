"""Records read alike from every format, and errors that name the file, the line and the
field.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.reading import read_preferences, read_supervised
from verl_ray.config.data import DataSet
from verl_ray.data.files import DataFiles, read_rows, write_records
from verl_ray.data.records import (
    PromptRecord,
    read_prompts,
)
from verl_ray.data.row_source import open_rows
from verl_ray.errors import DataError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def lines(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text(
        "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n",
        encoding="utf-8",
    )
    return path


def refusal(tmp_path: Path, *records: object) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(lines(tmp_path, *records))
    return str(caught.value)


def formats(files: DataFiles) -> list[Path]:
    return [files.jsonl, files.parquet, files.folder]


def test_all_formats_give_the_same_records(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"prompt": "1+1=", "answer": "2", "data_source": "sums", "extra": {"level": 3}},
        {
            "prompt": "ä+ñ=",
            "answer": "€",
            "data_source": "signs",
            "extra": {"level": 4},
        },
    ]
    for path in formats(write_records(records, tmp_path, "train")):
        found = read_prompts(path)
        assert [
            (r.prompt, r.answer, r.data_source, json.loads(r.extra)) for r in found
        ] == [
            ("1+1=", "2", "sums", {"level": 3}),
            ("ä+ñ=", "€", "signs", {"level": 4}),
        ]
        assert str(path) in found[1].where


def test_chat_messages_and_defaults_in_all_formats(tmp_path: Path) -> None:
    for path in formats(
        write_records([{"prompt": CHAT, "answer": "2"}], tmp_path, "chats")
    ):
        (record,) = read_prompts(path)
        assert record == PromptRecord(
            record.where, CHAT, "2", "chats", "{}", has_default_source=True
        )


def test_fields_of_other_messages_stay_absent(tmp_path: Path) -> None:
    named = [{"role": "user", "content": "1+1?", "name": "Ann"}]
    records: list[dict[str, object]] = [
        {"prompt": CHAT, "answer": "2"},
        {"prompt": named, "answer": "2"},
    ]
    for path in formats(write_records(records, tmp_path, "chats")):
        # Columnar formats store every message with every field, null where it has none.
        assert [record.prompt for record in read_prompts(path)] == [CHAT, named]


def test_arguments_of_other_tools_stay_absent(tmp_path: Path) -> None:
    """Nulls of Arrow are left out of messages alone, at every depth."""

    def conversation(**arguments: object) -> list[dict[str, object]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [*CHAT, turn, {"role": "tool", "content": "ok"}]

    calls = [
        conversation(city="Oslo"),
        conversation(query="maps", within={"km": 3}, tags=["a", None]),
        conversation(within={"miles": 2}),
    ]
    records: list[dict[str, object]] = [
        {"prompt": prompt, "answer": "2", "notes": {f"note{number}": "x"}}
        for number, prompt in enumerate(calls)
    ]
    files = write_records(records, tmp_path, "calls")
    streamed = open_rows(DataSet(str(files.folder))).read(np.arange(3))
    assert [fields["prompt"] for _, fields in streamed] == calls

    for path in formats(files):
        read = read_prompts(path)
        assert [record.prompt for record in read] == calls
        # A reward may name a note that its record lacks.
        is_columnar = path != files.jsonl
        assert ("note1" in json.loads(read[0].extra)["notes"]) == is_columnar

    # In JSON a null was written by somebody.
    null = conversation(city=None)
    path = lines(tmp_path, {"prompt": null, "answer": "2"})
    assert read_prompts(path)[0].prompt == null


def test_supervised_records(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "2"}
    path = lines(
        tmp_path,
        {"prompt": "1+1=", "response": "2"},
        {"prompt": CHAT, "response": "2"},
        {"messages": [*CHAT, turn]},
    )
    assert [r.content for r in read_supervised(path)] == [
        ("1+1=", "2"),
        [*CHAT, turn],
        [*CHAT, turn],
    ]
    with pytest.raises(
        DataError,
        match=r"line 2: no field 'response'; the fields found are 'prompt', 'reponse'; rename",
    ):
        pair = {"prompt": "1+1=", "response": "2"}
        read_supervised(lines(tmp_path, pair, {"prompt": "1+1=", "reponse": "2"}))
    with pytest.raises(DataError, match="no assistant turn"):
        read_supervised(lines(tmp_path, {"messages": CHAT}))


def test_preference_records(tmp_path: Path) -> None:
    two, three = ({"role": "assistant", "content": text} for text in ("2", "3"))
    texts = lines(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    (record,) = read_preferences(texts)
    assert (record.chosen, record.rejected, record.margin) == (
        ("1+1=", "2"),
        ("1+1=", "3"),
        None,
    )
    records: list[dict[str, object]] = [
        {"prompt": CHAT, "chosen": "2", "rejected": "3", "margin": 1.5},
        {"prompt": CHAT, "chosen": "", "rejected": "3", "margin": None},
    ]
    for path in formats(write_records(records, tmp_path, "mixed")):
        first, second = read_preferences(path)
        assert (first.chosen, first.rejected, first.margin) == (
            [*CHAT, two],
            [*CHAT, three],
            1.5,
        )
        assert (second.chosen, second.margin) == (
            [*CHAT, {"role": "assistant", "content": ""}],
            None,
        )
    listed: list[dict[str, object]] = [
        {"chosen": [*CHAT, two], "rejected": [*CHAT, three], "margin": 2, "source": "x"}
    ]
    for path in formats(write_records(listed, tmp_path, "lists")):
        (record,) = read_preferences(path)
        assert (record.chosen, record.rejected, record.margin) == (
            [*CHAT, two],
            [*CHAT, three],
            2.0,
        )
        assert str(path) in record.where


def test_what_is_no_preference(tmp_path: Path) -> None:
    def refusal(*records: object) -> str:
        with pytest.raises(DataError) as caught:
            read_preferences(lines(tmp_path, *records))
        return str(caught.value)

    two, three = ({"role": "assistant", "content": text} for text in ("2", "3"))
    text = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    listed = {"chosen": [*CHAT, two], "rejected": [*CHAT, three]}
    expected = "sums.jsonl, line 2: no field 'rejected'; the fields found are 'prompt', 'chosen', 'rejectd'; rename"
    assert expected in refusal(text, {"prompt": "1+1=", "chosen": "2", "rejectd": "3"})
    assert "line 1: chosen and rejected have no beginning in common" in refusal(
        {"chosen": "2", "rejected": "3"}
    )
    assert "line 1: rejected is str '3', expected a list of chat messages" in refusal(
        {**listed, "rejected": "3"}
    )
    assert "line 1: rejected is list" in refusal({**text, "rejected": [three]})
    assert "line 2: chosen and rejected differ before their last message" in refusal(
        listed, {**listed, "rejected": [CHAT[1], three]}
    )
    assert "line 1: chosen ends with a message of 'user'" in refusal(
        {**listed, "chosen": CHAT}
    )
    assert (
        "line 1: rejected holds the response alone, expected the whole conversation"
        in refusal({**listed, "rejected": [three]})
    )
    assert "line 1: found field 'margins', expected 'margin'" in refusal(
        {**text, "margins": 1}
    )
    for margin, shown in (
        ("1", "str '1'"),
        (True, "bool 'True'"),
        (-1, "int '-1'"),
        (float("nan"), "float 'nan'"),
    ):
        assert (
            f"line 1: margin is {shown}, expected a finite number of at least 0"
            in refusal({**text, "margin": margin})
        )


def test_misspelt_and_missing_fields(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "answer": "2"}
    message = refusal(tmp_path, good, {"promt": "1+1=", "answer": "2"})
    assert (
        "sums.jsonl, line 2: no field 'prompt'; the fields found are 'promt', 'answer'; rename 'promt'"
        in message
    )
    assert "found field 'data_sources', expected 'data_source'" in refusal(
        tmp_path, {**good, "data_sources": "x"}
    )
    assert "answer is nan, expected a text or a number" in refusal(
        tmp_path, {**good, "answer": float("nan")}
    )
    assert "extra is str 'x', expected an object" in refusal(
        tmp_path, {**good, "extra": "x"}
    )
    assert "prompt is list '[]', expected a list of chat messages" in refusal(
        tmp_path, {**good, "prompt": []}
    )
    assert "line 1, prompt, message 1: no field 'content'" in refusal(
        tmp_path, {**good, "prompt": [{"role": "user"}]}
    )
    ends = [*CHAT, {"role": "assistant", "content": "2"}]
    assert "ends with an assistant message" in refusal(
        tmp_path, {**good, "prompt": ends}
    )
    assert "line 2: found an answer, which the first record" in refusal(
        tmp_path, {"prompt": "1+1="}, good
    )


def test_a_null_is_named(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "answer": "2"}
    assert "sums.jsonl, line 2: answer is null" in refusal(
        tmp_path, good, {**good, "answer": None}
    )
    assert "line 2: prompt is null" in refusal(tmp_path, good, {**good, "prompt": None})
    spoken = [*CHAT, {"role": "user", "content": None}]
    assert "line 1, prompt, message 3: content is null" in refusal(
        tmp_path, {**good, "prompt": spoken}
    )
    # Parquet has nulls where a record lacks an optional field.
    absent = {**good, "data_source": None, "extra": None}
    (record,) = read_prompts(lines(tmp_path, absent))
    assert (record.data_source, record.extra) == ("sums", "{}")
    pair = {"prompt": "1", "chosen": "2", "rejected": "3"}
    with pytest.raises(DataError, match="line 2: rejected is null"):
        read_preferences(lines(tmp_path, pair, {**pair, "rejected": None}))


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    good = {"prompt": "é🙂", "answer": "2", "extra": {"é": ["🙂"]}}
    half = "ok \ud83d"
    expected = r"character 4 is '\ud83d', half of a surrogate pair"
    for change, place in (
        ({"prompt": half}, "prompt"),
        ({"answer": half}, "answer"),
        ({"data_source": half}, "data_source"),
        ({"extra": {"hints": ["fine", half]}}, "extra, hints, item 2"),
        ({"extra": {half: 1}}, "extra"),
        ({"prompt": [{"role": "user", "content": half}]}, "prompt, message 1, content"),
        (
            {"prompt": [{"role": "user", "content": "", "name": half}]},
            "prompt, message 1, name",
        ),
    ):
        message = refusal(tmp_path, good, good | change)
        assert f"sums.jsonl, line 2, {place}: {expected}" in message
    with pytest.raises(DataError, match="line 1, response: character 4 is"):
        read_supervised(lines(tmp_path, {"prompt": "1", "response": half}))
    pair = {"prompt": "1", "chosen": "2", "rejected": half}
    with pytest.raises(DataError, match="line 1, rejected: character 4 is"):
        read_preferences(lines(tmp_path, pair))
    # A whole pair is a character, however it is written.
    assert read_prompts(lines(tmp_path, good))[0].prompt == "é🙂"


def test_parquet_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32).tobytes())
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, offsets, pa.py_buffer(b"ok\xed\xa0")]
    )
    table = pa.table({"answer": ["1", "2"], "prompt": broken})
    pyarrow.parquet.write_table(table, tmp_path / "sums.parquet")
    assert "sums.parquet, row 2, prompt: not UTF-8" in refusal_of(
        tmp_path / "sums.parquet"
    )


def test_broken_lines(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "answer": "2"}
    assert "line 3: not JSON" in refusal(tmp_path, good, "", '{"prompt": "1')
    assert "line 1: found list, expected a JSON object" in refusal(tmp_path, "[1]")
    assert "sums.jsonl does not exist" in refusal_of(tmp_path / "none" / "sums.jsonl")


def test_a_broken_line_has_one_place(tmp_path: Path) -> None:
    for line, mistake in (
        ('{"prompt": ', "Expecting value at the end of the line"),
        ('{"prompt": x}', "Expecting value at column 12"),
        ('{"prompt": ' + "9" * 5_000 + "}", "a number has more than 4300 digits"),
        ('{"prompt": ' + "[" * 100_000, "it is nested too deeply"),
    ):
        message = refusal(tmp_path, {"prompt": "1", "answer": "1"}, line)
        expected = f"line 2: not JSON ({mistake}); expected one JSON object per line"
        assert message.endswith(expected)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    assert "not JSON (byte 13 is not UTF-8)" in refusal_of(tmp_path / "latin.jsonl")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"prompt": "1+1=" * 99, "answer": "2"}] * 99
    files = write_records(records, tmp_path, "sums")
    content = bytearray(files.parquet.read_bytes())
    # The pages come first, and the footer last.
    content[4:60] = b"\xff" * 56
    files.parquet.write_bytes(content)
    message = refusal_of(files.parquet)
    assert "cannot be read as Parquet" in message and "\n" not in message
    (files.folder / "state.json").write_text("{}")
    assert "sums: not a folder saved by Hugging Face" in refusal_of(files.folder)
    (files.folder / "dataset_dict.json").write_text("[]")
    assert "sums: not a folder saved by Hugging Face" in refusal_of(files.folder)


def refusal_of(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    return str(caught.value)


def test_what_cannot_be_read_says_what_can(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "sums.txt").write_text("1+1=2")
    assert "suffix '.txt', expected a .jsonl, .json, .csv or .parquet" in refusal_of(
        tmp_path / "sums.txt"
    )
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    assert "torn.parquet: cannot be read as Parquet" in refusal_of(
        tmp_path / "torn.parquet"
    )
    (tmp_path / "folder").mkdir()
    assert "folder holds no data files" in refusal_of(tmp_path / "folder")

    both = tmp_path / "both"
    split = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(both))
    choice = f"point data.train_path at one of them: {both / 'train'}"
    assert f"several splits; {choice}" in refusal_of(both)
    assert len(read_prompts(DataSet(str(both), split="test"))) == 1
    assert len(read_prompts(both / "train")) == 1
    for path, split, message in (
        (both, "dev", f"no split 'dev'; {choice}"),
        (both / "train", "test", "a single split; leave out split=test"),
        (tmp_path / "torn.parquet", "train", "leave out split=train"),
    ):
        with pytest.raises(DataError, match=message):
            read_prompts(DataSet(str(path), split=split))


SUMS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+1=", "answer": "3"}]


def pairs(path: Path | DataSet) -> list[tuple[object, str | None]]:
    return [(record.prompt, record.answer) for record in read_prompts(path)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", json.dumps(SUMS, indent=1)),
        ("lines.json", "".join(json.dumps(record) + "\n" for record in SUMS)),
        ("data.json", json.dumps({"version": "1", "data": SUMS})),
        ("sums.csv", "prompt,answer\n1+1=,2\n2+1=,3\n"),
        ("index.csv", '\ufeff,prompt,answer\r\n0,"1+1=",2\r\n\r\n1,2+1=,3\r\n'),
    ],
)
def test_forms_of_json_and_csv(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert pairs(tmp_path / name) == [("1+1=", "2"), ("2+1=", "3")]


def test_a_csv_value_may_have_lines_and_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text('prompt,answer,hint\n"1\n+1=",2,\n2+1=,,x\n')
    rows = list(read_rows(path))
    assert rows[0] == (
        f"{path}, line 2",
        {"prompt": "1\n+1=", "answer": "2", "hint": None},
    )
    assert refusal_of(path).startswith(f"{path}, line 4: answer is null")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "line 1: no values; expected the names of the columns"),
        ("a.csv", "1+1=,2\n", "value 2 is '2'; expected the names of the columns"),
        ("a.csv", "prompt,prompt\n", "'prompt' stands twice"),
        ("a.csv", "prompt,answer\n1,000,2\n", "line 2: found 3 values, expected 2"),
        ("a.csv", 'prompt,answer\n"1"+1=,2\n', "line 2: not CSV"),
        ("a.json", '[{"prompt": "1"\n', "Expecting ',' delimiter at the end of the file"),
        ("a.json", "[1]", "record 1: found int, expected a JSON object"),
        ("a.json", "3", "found int, expected a list of JSON objects"),
        ("a.json", '{"prompt": "1"}\n{"prompt"\n', "line 2: not JSON"),
    ],
)  # fmt: skip
def test_what_is_no_json_or_csv(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    assert message in refusal_of(tmp_path / name)


def test_folders_and_globs_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for number in (2, 1, 0):
        record = {"prompt": f"{number}+1=", "answer": str(number + 1)}
        path = tmp_path / "parts" / f"train-{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record) + "\n")
    expected = [("0+1=", "1"), ("1+1=", "2"), ("2+1=", "3")]
    assert pairs(tmp_path / "parts") == expected
    assert pairs(tmp_path / "parts" / "*.jsonl") == expected
    assert pairs(tmp_path / "**" / "train-[12].jsonl") == expected[1:]
    assert pairs(tmp_path / "parts" / "**1.jsonl") == expected[1:2]
    (record, _, _) = read_prompts(tmp_path / "parts" / "*.jsonl")
    assert record.data_source == "parts"
    assert "parts/*.json matches no file" in refusal_of(tmp_path / "parts" / "*.json")
    assert f"take one of its files: {tmp_path}/parts/train-0.jsonl" in refusal_of(
        tmp_path
    )

    # A held-out part in the same folder is not to be learned from.
    held_out = {"prompt": "9+1=", "answer": "10"}
    (tmp_path / "parts" / "test.jsonl").write_text(json.dumps(held_out))
    assert "parts holds several splits" in refusal_of(tmp_path / "parts")
    parts = str(tmp_path / "parts")
    assert pairs(DataSet(parts, split="test")) == [("9+1=", "10")]
    with pytest.raises(DataError, match="holds no file of the split 'dev'"):
        read_prompts(DataSet(parts, split="dev"))

    (tmp_path / "parts" / "test.jsonl").rename(tmp_path / "parts" / "more.json")
    assert "files of several formats (.json, .jsonl); take one" in refusal_of(
        tmp_path / "parts"
    )
