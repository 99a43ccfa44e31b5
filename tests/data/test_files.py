"""Records read alike from every format, and errors that name the file, the line and the
field.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from verl_ray.data.files import DataFiles, write_records
from verl_ray.data.records import (
    PromptRecord,
    read_preferences,
    read_prompts,
    read_supervised,
)
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
        assert record == PromptRecord(record.where, CHAT, "2", "chats", "{}")


def test_fields_of_other_messages_stay_absent(tmp_path: Path) -> None:
    named = [{"role": "user", "content": "1+1?", "name": "Ann"}]
    records: list[dict[str, object]] = [
        {"prompt": CHAT, "answer": "2"},
        {"prompt": named, "answer": "2"},
    ]
    for path in formats(write_records(records, tmp_path, "chats")):
        # Columnar formats store every message with every field, null where it has none.
        assert [record.prompt for record in read_prompts(path)] == [CHAT, named]


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
        match=r"line 1: no field 'response'; the fields found are 'prompt', 'reponse'; rename",
    ):
        read_supervised(lines(tmp_path, {"prompt": "1+1=", "reponse": "2"}))
    with pytest.raises(DataError, match="line 1: no field 'prompt' or 'messages'"):
        read_supervised(lines(tmp_path, {"response": "2"}))
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
    assert "line 1: no field 'prompt'" in refusal({"chosen": "2", "rejected": "3"})
    assert "line 1: rejected is str '3', expected a list of chat messages" in refusal(
        {**listed, "rejected": "3"}
    )
    assert (
        "line 1: no field 'rejected'; the fields found are 'chosen', 'rejectd'; rename 'rejectd'"
        in refusal({"chosen": [*CHAT, two], "rejectd": [*CHAT, three]})
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
        in refusal({"prompt": CHAT, **listed, "rejected": [three]})
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
    assert "answer is int '2', expected text" in refusal(
        tmp_path, {**good, "answer": 2}
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
    # A field that no one knows is somebody else's, and stays unread.
    assert read_prompts(lines(tmp_path, {**good, "level": 3}))[0].extra == "{}"


def test_a_null_is_named(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "answer": "2"}
    assert "sums.jsonl, line 2: answer is null" in refusal(
        tmp_path, good, {**good, "answer": None}
    )
    assert "line 1: prompt is null" in refusal(tmp_path, {**good, "prompt": None})
    spoken = [*CHAT, {"role": "user", "content": None}]
    assert "line 1, prompt, message 3: content is null" in refusal(
        tmp_path, {**good, "prompt": spoken}
    )
    # Parquet has nulls where a record lacks an optional field.
    absent = {**good, "data_source": None, "extra": None}
    (record,) = read_prompts(lines(tmp_path, absent))
    assert (record.data_source, record.extra) == ("sums", "{}")
    with pytest.raises(DataError, match="line 1: rejected is null"):
        read_preferences(
            lines(tmp_path, {"prompt": "1", "chosen": "2", "rejected": None})
        )


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


def test_a_folder_names_the_files_in_it(tmp_path: Path) -> None:
    files = write_records([{"prompt": "1", "answer": "2"}], tmp_path / "data", "sums")
    message = refusal_of(tmp_path)
    assert f"take one of its files: {files.jsonl}, {files.parquet}" in message


def test_names_of_other_data_sets(tmp_path: Path) -> None:
    for record, hint in (
        ({"question": "1", "answer": "2"}, "rename 'question' to 'prompt'"),
        ({"prompt": "1", "solution": "2"}, "rename 'solution' to 'answer'"),
        (
            {"prompt": "1", "reward_model": {"ground_truth": "2"}},
            "put reward_model.ground_truth into 'answer': these are verl's fields",
        ),
        ({"prompt": "1", "reward_model": "2"}, "add 'answer' to every record"),
        ({"prompt": [{"from": "user", "value": "2"}]}, "rename 'from' to 'role'"),
    ):
        assert refusal(tmp_path, record).endswith(f"; {hint}")


def refusal_of(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    return str(caught.value)


def test_what_cannot_be_read_says_what_can(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "sums.csv").write_text("prompt,answer\n")
    assert "suffix '.csv', expected a .jsonl file, a .parquet file" in refusal_of(
        tmp_path / "sums.csv"
    )
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    assert "torn.parquet: cannot be read as Parquet" in refusal_of(
        tmp_path / "torn.parquet"
    )
    (tmp_path / "folder").mkdir()
    assert "folder: not a folder saved by Hugging Face datasets" in refusal_of(
        tmp_path / "folder"
    )
    split = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(
        str(tmp_path / "both")
    )
    assert (
        f"several splits; point data.train_path at one of them: {tmp_path / 'both' / 'train'}"
        in refusal_of(tmp_path / "both")
    )
    assert len(read_prompts(tmp_path / "both" / "train")) == 1
