"""Data sets of other systems read unchanged, by the columns of the originals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.original_schemas import (
    SCHEMAS,
    assistant,
    user,
    write_file,
    write_schema,
)
from tests.data.reading import read_preferences, read_supervised
from verl_ray.config.data import DataSet
from verl_ray.data.conversations import tokenize
from verl_ray.data.files import read_rows
from verl_ray.data.further_fields import without_answer
from verl_ray.data.records import (
    Reading,
    preference_reading,
    prompt_reading,
    read_prompts,
    read_records,
    supervised_reading,
    unpaired_reading,
)
from verl_ray.data.tokenizers import character_tokenizer, train_bpe
from verl_ray.errors import DataError

PAIR = ("1+1=", "2")
TURNS = [user("1+1="), assistant("2")]
WORSE = [user("1+1="), assistant("3")]
SYSTEM = {"role": "system", "content": "Calculate."}

PROMPTS: dict[str, tuple[str, object, str | None]] = {
    "verl_rl": ("verl's schema: answer from reward_model.ground_truth", TURNS[:1], "2"),
    "verl_sft_messages": (
        "messages: answer from a last message of the assistant",
        TURNS[:1],
        "2",
    ),
    "trl_prompt_only": ("TRL's prompt alone: no answer", "1+1=", None),
    "trl_prompt_only_messages": ("TRL's prompt alone: no answer", TURNS[:1], None),
    "trl_solution": ("TRL's prompt and solution: answer from solution", TURNS[:1], "2"),
    "trl_prompt_completion": (
        "TRL's prompt and completion: answer from completion",
        "1+1=",
        "2",
    ),
    "trl_prompt_completion_messages": (
        "TRL's prompt and completion: answer from completion",
        TURNS[:1],
        "2",
    ),
    "trl_preference": ("preferences: prompt from prompt, answer from chosen", *PAIR),
    "trl_preference_messages": (
        "preferences: prompt from prompt, answer from chosen",
        TURNS[:1],
        "2",
    ),
    "trl_implicit": (
        "preferences: prompt from the beginning of chosen, answer from its end",
        *PAIR,
    ),
    "trl_implicit_messages": (
        "preferences: prompt from the beginning of chosen, answer from its end",
        TURNS[:1],
        "2",
    ),
    "ultrafeedback": (
        "preferences: prompt from prompt, answer from chosen",
        TURNS[:1],
        "2",
    ),
    "hh_rlhf": (
        "preferences: prompt from the beginning of chosen, answer from its end",
        "\n\nHuman: 1+1=\n\nAssistant:",
        " 2",
    ),
    "orca_pairs": (
        "preferences: prompt from question, answer from chosen, system message from system",
        [SYSTEM, *TURNS[:1]],
        "2",
    ),
    "alpaca": ("Alpaca's schema: answer from output", *PAIR),
    "gsm8k": ("columns question, answer", *PAIR),
    "problem_solution": ("columns problem, solution", *PAIR),
    "aime": ("columns Problem, Answer", *PAIR),
    "sharegpt": (
        "ShareGPT's conversations: answer from a last message of the assistant",
        TURNS[:1],
        "2",
    ),
}

DEMONSTRATIONS: dict[str, tuple[str, object]] = {
    "verl_rl": (
        "verl's schema: prompt from extra_info.question, response from extra_info.answer",
        ("1+1=", "1+1=2"),
    ),
    "verl_sft": (
        "verl's schema: prompt from extra_info.question, response from extra_info.answer",
        PAIR,
    ),
    "verl_sft_messages": ("verl_ray's schema", TURNS),
    "trl_solution": ("columns prompt, solution", TURNS),
    "trl_prompt_completion": (
        "TRL's prompt and completion: response from completion",
        PAIR,
    ),
    "trl_prompt_completion_messages": (
        "TRL's prompt and completion: response from completion",
        TURNS,
    ),
    "ultrafeedback": ("verl_ray's schema", TURNS),
    "alpaca": ("Alpaca's schema: response from output", PAIR),
    "gsm8k": ("columns question, answer", PAIR),
    "problem_solution": ("columns problem, solution", PAIR),
    "aime": ("columns Problem, Answer", PAIR),
    "sharegpt": ("ShareGPT's conversations", TURNS),
    "text": ("text: all of it is learned", "1+1=2"),
}

_IMPLICIT = "chosen and rejected: prompt from what both begin with"
PREFERENCES: dict[str, tuple[str, object, object]] = {
    "trl_preference": ("verl_ray's schema", PAIR, ("1+1=", "3")),
    "trl_preference_messages": ("verl_ray's schema", TURNS, WORSE),
    "trl_implicit": (_IMPLICIT, PAIR, ("1+1=", "3")),
    "trl_implicit_messages": (_IMPLICIT, TURNS, WORSE),
    "ultrafeedback": ("verl_ray's schema", TURNS, WORSE),
    "hh_rlhf": (
        _IMPLICIT,
        ("\n\nHuman: 1+1=\n\nAssistant:", " 2"),
        ("\n\nHuman: 1+1=\n\nAssistant:", " 3"),
    ),
    "orca_pairs": (
        "columns question, chosen, rejected, system message from system",
        [SYSTEM, *TURNS],
        [SYSTEM, *WORSE],
    ),
}

_TRL_UNPAIRED = "TRL's unpaired preferences: response from completion"
UNPAIRED: dict[str, tuple[str, object, object]] = {
    "trl_unpaired": (_TRL_UNPAIRED, PAIR, ("2+1=", "4")),
    "trl_unpaired_messages": (
        _TRL_UNPAIRED,
        TURNS,
        [user("2+1="), assistant("4")],
    ),
    **{
        name: (f"pairs ({how}): chosen is desirable, rejected is not", better, worse)
        for name, (how, better, worse) in PREFERENCES.items()
    },
}


READINGS: dict[str, Callable[[DataSet, Any, str], Reading[Any]]] = {
    "prompt": prompt_reading,
    "supervised": supervised_reading,
    "preference": preference_reading,
    "unpaired": unpaired_reading,
}


def read_as(data_set: DataSet, kind: str) -> str:
    """How the set is read, in words."""
    where, first = next(iter(read_rows(data_set)))
    return READINGS[kind](data_set, first, where).description


def test_every_original_is_read_as_all_that_it_can_be() -> None:
    readable = {
        "prompt": PROMPTS,
        "supervised": DEMONSTRATIONS,
        "preference": PREFERENCES,
        "unpaired": UNPAIRED,
    }
    for name, original in SCHEMAS.items():
        assert {kind for kind in readable if name in readable[kind]} == {
            *original.kinds
        }


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, tmp_path: Path) -> None:
    path = write_schema(name, tmp_path)
    description, prompt, answer = PROMPTS[name]
    assert read_as(DataSet(str(path)), "prompt") == description
    first, *others = read_prompts(path)
    assert (first.prompt, first.answer) == (prompt, answer)
    source = "openai/gsm8k" if name == "verl_rl" else name
    assert (first.data_source, len(others)) == (source, 11)


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstrations(name: str, tmp_path: Path) -> None:
    path = write_schema(name, tmp_path)
    description, content = DEMONSTRATIONS[name]
    assert read_as(DataSet(str(path)), "supervised") == description
    assert read_supervised(path)[0].content == content


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(name: str, tmp_path: Path) -> None:
    path = write_schema(name, tmp_path)
    description, chosen, rejected = PREFERENCES[name]
    assert read_as(DataSet(str(path)), "preference") == description
    first = read_preferences(path)[0]
    assert (first.chosen, first.rejected) == (chosen, rejected)


@pytest.mark.parametrize("name", UNPAIRED)
def test_responses_with_labels(name: str, tmp_path: Path) -> None:
    path = write_schema(name, tmp_path)
    description, desirable, other = UNPAIRED[name]
    assert read_as(DataSet(str(path)), "unpaired") == description
    first, second, *_ = read_records(path, unpaired_reading)
    assert (first.content, first.is_desirable) == (desirable, True)
    assert (second.content, second.is_desirable) == (other, False)


# ------------------------------------------------------------------------ data.columns


def sums(folder: Path, *records: Any) -> Path:
    path = folder / "sums.jsonl"
    write_file(path, records)
    return path


def test_columns_go_before_known_names(tmp_path: Path) -> None:
    record = {
        "question": "1+1=",
        "prompt": "9+9=",
        "answer": "18",
        "extra_info": {"truth": 2},
        "a.b": "here",
        "note": "x",
    }
    path = str(sums(tmp_path, record))
    columns = {"prompt": "question", "answer": "extra_info.truth", "data_source": "a.b"}
    data_set = DataSet(path, columns=columns)
    (read,) = read_prompts(data_set)
    assert (read.prompt, read.answer, read.data_source) == ("1+1=", "2", "here")
    assert json.loads(read.extra) == {
        "prompt": "9+9=",
        "answer": "18",
        "a.b": "here",
        "note": "x",
        "truth": 2,
    }
    assert read_as(data_set, "prompt") == (
        "data.columns: prompt from question, answer from extra_info.truth,"
        " data_source from a.b"
    )
    # What is not named is recognised, and the rest of a schema follows.
    (read,) = read_prompts(DataSet(path, columns={"prompt": "question"}))
    assert (read.prompt, read.answer) == ("1+1=", "18")

    # A demonstration may be a text as a whole although the file has a prompt.
    (demonstration,) = read_supervised(DataSet(path, columns={"text": "note"}))
    assert demonstration.content == "x"


def refusal(data_set: DataSet, kind: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_as(data_set, kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "record", "columns", "message"),
    [
        ("prompt", {"sum": "1+1=", "result": "2"}, {},
         "the columns 'sum', 'result' fit no schema that is known (as prompt and answer would);"
         " set 'data.columns={prompt: COLUMN, answer: COLUMN}'"),
        ("prompt", {"promt": "1+1=", "my_answer": "2"}, {}, "set 'data.columns={prompt: promt, answer: my_answer}'"),
        ("prompt", {"a": "1+1=", "b": "2"}, {"answer": "b"}, "set 'data.columns={answer: b, prompt: COLUMN}'"),
        ("prompt", {"text": "1+1=2"}, {}, "fit no schema"),
        ("supervised", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {}, "set 'data.columns={response: chosen}'"),
        ("supervised", {"chosen": TURNS, "rejected": WORSE}, {}, "set 'data.columns={messages: chosen}'"),
        ("preference", {"prompt": "1+1=", "winner": "2", "loser": "3"}, {},
         "set 'data.columns={prompt: prompt, chosen: winner, rejected: loser}'"),
        ("preference", {"prompt": "1+1=", "completion": "2", "label": True}, {},
         "use --config-name dpo preference.loss=kto, which learns from single responses with a label"),
        ("unpaired", {"prompt": "1+1=", "reply": "2", "is_good": True}, {},
         "set 'data.columns={prompt: prompt, response: COLUMN, label: is_good}'"),
        ("prompt", {"prompt": "1+1="}, {"answer": "truth"},
         "no column 'truth'; the columns are 'prompt'; take one of them for data.columns.answer"),
        ("prompt", {"prompt": "1+1=", "extra_info": {"index": 1}}, {"answer": "extra_info.truth"},
         "no column 'extra_info.truth'; the fields of extra_info are 'index'"),
    ],
)  # fmt: skip
def test_what_fits_no_schema_says_what_to_type(
    tmp_path: Path, kind: Any, record: Any, columns: dict[str, str], message: str
) -> None:
    path = sums(tmp_path, record)
    found = refusal(DataSet(str(path), columns=columns), kind)
    assert found.startswith(f"{path}, line 1: ") and message in found


def test_the_chosen_response_can_be_learned(tmp_path: Path) -> None:
    path = str(sums(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}))
    (record,) = read_supervised(DataSet(path, columns={"response": "chosen"}))
    assert record.content == PAIR
    path = str(write_schema("ultrafeedback", tmp_path))
    records = read_supervised(DataSet(path, columns={"messages": "rejected"}))
    assert records[0].content == WORSE


# ------------------------------------------------------------------------------- values


def first_prompt(folder: Path, record: Any, suffix: str = ".jsonl") -> Any:
    write_file(folder / f"sums{suffix}", [record])
    return read_prompts(folder / f"sums{suffix}")[0]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (72, "72"),
        (72.0, "72"),
        (0.5, "0.5"),
        (True, "true"),
        (["a", "b"], '["a", "b"]'),
        ({"x": "ä"}, '{"x": "ä"}'),
        # A null may be meant, as in a schema.
        ({"b": {"const": None}}, '{"b": {"const": null}}'),
        ([user("?"), assistant("72")], "72"),
    ],
)
def test_an_answer_is_text(tmp_path: Path, answer: object, text: str) -> None:
    record = {"prompt": "1+1=", "answer": answer}
    for suffix in (".jsonl", ".parquet"):
        assert first_prompt(tmp_path, record, suffix).answer == text


def test_what_stands_around_a_prompt(tmp_path: Path) -> None:
    alpaca = {"instruction": "Add:", "input": "1+1", "output": "2"}
    assert first_prompt(tmp_path, alpaca).prompt == "Add:\n\n1+1"
    spoken = {"problem": "1+1=", "answer": 2, "system_prompt": "Calculate."}
    assert first_prompt(tmp_path, spoken).prompt == [SYSTEM, user("1+1=")]
    both = {**spoken, "problem": [SYSTEM, user("1+1=")]}
    assert first_prompt(tmp_path, both).prompt == [SYSTEM, user("1+1=")]
    with pytest.raises(DataError, match="are different system messages"):
        first_prompt(tmp_path, {**both, "system_prompt": "Be brief."})

    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    in_parts = {"prompt": [{"role": "user", "content": parts}], "answer": "2"}
    assert first_prompt(tmp_path, in_parts, ".parquet").prompt == [user("1+1=")]

    open_end = {"messages": [*TURNS, user("2+2=")]}
    record = first_prompt(tmp_path, open_end)
    assert (record.prompt, record.answer) == (open_end["messages"], None)
    (own,) = read_prompts(sums(tmp_path, {"messages": TURNS, "answer": "two"}))
    assert (own.prompt, own.answer) == (TURNS[:1], "two")


VERL = {"prompt": TURNS[:1], "reward_model": {"ground_truth": "2"}}


def test_what_a_run_cannot_show_is_refused(tmp_path: Path) -> None:
    record = {"prompt": "1+1=", "answer": "2", "tools": [{"name": "sum"}]}
    with pytest.raises(DataError, match=r"'tools'.*not supported yet"):
        first_prompt(tmp_path, record)
    with pytest.raises(DataError, match=r"reward_model\.ground_truth is null"):
        list(
            read_prompts(
                sums(tmp_path, VERL, {**VERL, "reward_model": {"ground_truth": None}})
            )
        )
    unpaired = {"prompt": "1+1=", "completion": "3", "label": False}
    with pytest.raises(DataError, match="label is false"):
        read_supervised(sums(tmp_path, unpaired))
    with pytest.raises(DataError, match="from is 'observation', expected one of"):
        read_supervised(
            sums(tmp_path, {"conversations": [{"from": "observation", "value": "2"}]})
        )


STORED = {"bytes": b"\x89PNG", "path": None}
EMPTY = {"bytes": None, "path": None}


@pytest.mark.parametrize(
    "column",
    [
        {"images": [{"path": "a.png"}]},
        {"Image": "a.png"},
        {"image_2": STORED},
        {"image_url": "http://a/b.png"},
        {"videoPath": "a.mp4"},
        {"audio": {"path": "a.wav"}},
        {"audios": ["a.wav"]},
        {"multi_modal_data": {"image": ["a.png"]}},
        {"extra_info": {"image": "a.png"}},
        {"figure": STORED},
        {"notes": {"figures": [EMPTY, STORED]}},
        {"question_image": "a.png"},
        {"decoded_image": "a.png"},
        {"image_list": ["a.png"]},
        {"video_frames": ["a.png"]},
        {"frames": ["a.png"]},
        {"screenshot": "a.png"},
        {"pixel_values": [[0.5, 0.25]]},
        {"audio_array": [0.5]},
        {"metadata": {"image": "a.png"}},
        {"metadata.image": "a.png"},
        {"extra": {"a": [{"image": "a.png"}]}},
        {"figure": {"path": "a.png", "bytes": None}},
        {"figure": {"path": None, "bytes": "iVBO"}},
        {"speech": {"array": [0.5], "sampling_rate": 16000}},
        {"figure": "data:image/png;base64,iVBO"},
        {"figure": ["data:audio/wav;base64,UklGR"]},
        {"figure": "iVBORw0KGgo" + "A" * 60},
        {"figure": [b"\x89PNG\r\n"]},
        {"turns": [{"type": "text", "text": "1+1="}, {"type": "image_url"}]},
    ],
)
def test_columns_of_images_videos_and_sounds_are_refused(
    tmp_path: Path, column: dict[str, object]
) -> None:
    prompt = {"prompt": "1+1=", "answer": "2"}
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    for record, reading in (
        (prompt, prompt_reading),
        (prompt, supervised_reading),
        (pair, preference_reading),
    ):
        fields = {**record, **column}
        read = reading(DataSet("-"), fields, "line 1").record
        with pytest.raises(DataError, match=r"line 1: .* not supported yet"):
            read("line 1", fields)


@pytest.mark.parametrize(
    "columns",
    [
        {"image_id": 3, "imagery": "vivid", "audience": "all"},
        {"images": [], "videos": None, "audio": EMPTY, "image": [None], "img": ""},
        {"image": False, "images": 0, "video": "[]", "audio": "null", "img": "None"},
        {"image_id": "a1", "image_caption": "a cat", "num_images": 2, "has_image": True},
        {"docker_image": "a/b:1", "extra_info": {"containerImages": ["a/b:1"]}},
        {"path": "a.py", "file": {"path": "a.py", "bytes": 120}, "raw": b"\x00\x01"},
        {"note": "data: image", "url": "/9j/a", "node": {"type": "image"}},
    ],
)  # fmt: skip
def test_columns_about_images_are_no_images(
    tmp_path: Path, columns: dict[str, object]
) -> None:
    record = {"prompt": "1+1=", "answer": "2", **columns}
    assert first_prompt(tmp_path, record, ".parquet").answer == "2"
    if "raw" not in columns:
        assert first_prompt(tmp_path, record).answer == "2"


def test_an_answer_and_the_arguments_of_a_call_may_name_an_image(
    tmp_path: Path,
) -> None:
    call = {"function": {"name": "show", "arguments": {"image_url": "a.png"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    parts = '[{"type": "text", "text": "2"}]'
    tool = {"role": "tool", "content": parts}
    messages = [user("1+1="), turn, tool]
    answer = {"image": "a.png", "items": [{"type": "image"}]}
    read = first_prompt(tmp_path, {"prompt": messages, "answer": answer})
    assert (read.prompt, json.loads(read.answer)) == (messages, answer)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "text": ""},
        {"type": "image", "image": "a.png", "text": "Figure 1"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg=="}},
        {"type": "file", "file": {"file_id": "a"}},
        {"type": "text", "text": "Figure 1", "image": "a.png"},
        {"text": "Figure 1", "image": "a.png"},
    ],
)
def test_parts_that_are_no_text_are_refused(
    tmp_path: Path, part: dict[str, object]
) -> None:
    message = {"role": "user", "content": [part, {"type": "text", "text": "1+1="}]}
    record = {"prompt": [message], "answer": "2"}
    with pytest.raises(DataError, match=r"prompt, message 1: .* not supported yet"):
        first_prompt(tmp_path, record)
    beside = {"role": "user", "content": "1+1=", "images": ["a.png"]}
    with pytest.raises(DataError, match=r"message 1: found something in 'images'"):
        first_prompt(tmp_path, {"prompt": [beside], "answer": "2"})
    # Parquet gives each part the fields of all.
    text = {"type": "text", "text": "1+1=", "image": None, "video": {"path": None}}
    plain = {"role": "user", "content": [text]}
    read = first_prompt(tmp_path, {"prompt": [plain], "answer": "2"})
    assert read.prompt == [user("1+1=")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("1+1=12", "1+1=13", "1+1="),
        ("Q: 1+1\nAnswer: 2", "Q: 1+1\nAnswer: 3", "Q: 1+1\nAnswer:"),
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d e",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
        ),
    ],
)
def test_two_texts_are_parted_where_their_responses_begin(
    tmp_path: Path, chosen: str, rejected: str, prompt: str
) -> None:
    pair = {"chosen": chosen, "rejected": rejected}
    (record,) = read_preferences(sums(tmp_path, pair))
    assert record.chosen == (prompt, chosen.removeprefix(prompt))
    assert record.rejected == (prompt, rejected.removeprefix(prompt))


# -------------------------------------------------------------------------------- extra


def test_all_other_columns_are_for_the_reward(tmp_path: Path) -> None:
    extra = json.loads(read_prompts(write_schema("verl_rl", tmp_path))[0].extra)
    assert extra == {
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        # The fields of extra_info.
        "answer": "1+1=2",
        "index": 1,
        "question": "1+1=",
        "split": "train",
    }
    extra = json.loads(read_prompts(write_schema("trl_solution", tmp_path))[0].extra)
    assert extra == {"solution": "2"}
    record = {
        "prompt": "1+1=",
        "answer": "2",
        "data_source": "sums",
        "level": 1,
        "split": "a",
        "extra_info": {"split": "b", "index": 3},
        "extra": {"split": "c"},
    }
    extra = json.loads(first_prompt(tmp_path, record).extra)
    assert extra == {"level": 1, "split": "c", "index": 3}


def test_no_column_that_stays_without_the_answer_tells_it(tmp_path: Path) -> None:
    names = [name for name, each in SCHEMAS.items() if "prompt" in each.kinds]
    rest = {}
    for name in names:
        (record,) = read_prompts(write_schema(name, tmp_path, 1))
        rest[name] = without_answer(json.loads(record.extra), record.answer)
    # The problem is 1+1=, and its number 1.
    assert {name: fields for name, fields in rest.items() if fields} == {
        "verl_rl": {
            "ability": "math",
            "index": 1,
            "question": "1+1=",
            "split": "train",
        },
        "ultrafeedback": {"prompt_id": "1", "score_chosen": 8.5, "score_rejected": 6.0},
        "problem_solution": {"level": "1"},
        "aime": {"ID": "2024-I-1"},
        "sharegpt": {"id": "1"},
    }


def test_the_answer_is_left_out_under_any_name_and_nothing_else() -> None:
    tests = [{"in": "1 1", "out": "2"}]
    extra = {
        "gold": " 2\n", "meta": {"truth": 2, "level": 3}, "worked": [assistant("2")],
        "choices": ["1", "2"], "tests": tests, "about": "2 numbers", "Solution": "two",
        "reward_model": {"style": "rule"}, "note": None,
    }  # fmt: skip
    rest = {"choices": ["1", "2"], "tests": tests, "about": "2 numbers", "note": None}
    assert without_answer(extra, "2") == {"meta": {"level": 3}, **rest}
    assert without_answer({"list": [1, 2], "is_hard": True}, "[1, 2]") == {
        "is_hard": True
    }
    assert without_answer({"level": 3, "answer": ""}, None) == {"level": 3}


def test_what_json_cannot_hold_stops_no_run(tmp_path: Path) -> None:
    import datetime

    record = {
        "prompt": "1+1=",
        "answer": "2",
        "day": datetime.date(2026, 1, 2),
        "loss": float("nan"),
        "raw": b"ok",
        "binary": b"\xff",
        "nested": {"limits": [1.5, float("inf")]},
    }
    assert json.loads(first_prompt(tmp_path, record, ".parquet").extra) == {
        "day": "2026-01-02",
        "loss": None,
        "raw": "ok",
        "binary": None,
        "nested": {"limits": [1.5, None]},
    }


# --------------------------------------------------------------------------- whole texts


def test_a_whole_text_is_learned_from_its_second_token_on(tmp_path: Path) -> None:
    characters = character_tokenizer(tmp_path / "characters", "0123456789+=")
    contents: list[Any] = ["1+1=2", ("2+1=", "3"), "4"]
    tokens, mask = tokenize(
        contents, ["a", "b", "c"], characters, apply_chat_template=False,
        special_tokens="refuse", responses="all",
    )  # fmt: skip
    assert tokens.values.tolist() == [3, 12, 3, 13, 4, 1, 4, 12, 3, 13, 5, 1, 6, 1]
    learned = [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1]
    assert mask.astype(int).tolist() == learned

    # A chat template is for conversations alone.
    chat = train_bpe(tmp_path / "chat", ["1+1="], 270)
    tokens, mask = tokenize(
        ["1+1=", TURNS], ["a", "b"], chat, apply_chat_template=True,
        special_tokens="refuse", responses="all",
    )  # fmt: skip
    assert chat.decode(tokens[0]) == "1+1=<|im_end|>"
    assert chat.decode(tokens[1]).startswith("<|im_start|>user\n1+1=")
    with pytest.raises(DataError, match=r"special token '<\|im_end\|>'"):
        tokenize(
            ["1+1=2<|im_end|>"], ["a"], chat, apply_chat_template=True,
            special_tokens="refuse", responses="all",
        )  # fmt: skip
    tokens, _ = tokenize(
        ["1+1=2<|im_end|>"], ["a"], chat, apply_chat_template=True,
        special_tokens="allow", responses="all",
    )  # fmt: skip
    assert np.count_nonzero(tokens.values == chat.eos_token_id) == 1
