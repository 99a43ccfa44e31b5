"""Streamed sets have the rows of sets in memory, in the same order, and resume."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_prompts import config as prompt_config
from verl_ray.config.data import DataSet
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.files import write_records
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import DataError, OverlongRows

RECORDS = [
    {
        "prompt": f"{i}+1=",
        "answer": str(i + 1),
        "response": str(i + 1),
        "chosen": str(i + 1),
        "rejected": str(i),
    }
    for i in range(30)
]


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), "0123456789+=")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_records(RECORDS, tmp_path_factory.mktemp("files"), "sums")


def config(**changes: object) -> Any:
    return prompt_config(**{"stream_above_gib": 0.0, **changes})


def prompts(data_sets: Any, tokenizer: Any, **changes: object) -> PromptSource:
    return PromptSource(
        data_sets, tokenizer, config(**changes), seed=3, may_stream=True
    )


def answers(source: PromptSource, count: int) -> list[str]:
    return source.next_batch(count).answer.texts()


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_the_same_rows_as_in_memory(form: str, files: Any, characters: Any) -> None:
    path = str(getattr(files, form))
    whole = prompts(path, characters, stream_above_gib=1.0)
    streamed = prompts(path, characters)
    assert (whole.is_streamed, streamed.is_streamed, len(streamed)) == (False, True, 30)

    # Across the end of an epoch, and with a resume in between.
    first = streamed.next_batch(25)
    again = prompts(path, characters)
    again.load_state(json.loads(json.dumps(streamed.state())))
    for expected, batch in (
        (whole.next_batch(25), first),
        (whole.next_batch(25), again.next_batch(25)),
    ):
        assert batch.tokens.tolist() == expected.tokens.tolist()
        assert batch.group_id.tolist() == expected.group_id.tolist()
        assert batch.answer.texts() == expected.answer.texts()


def test_demonstrations_and_pairs_are_streamed_too(files: Any, characters: Any) -> None:
    streamed = SupervisedSource(
        str(files.jsonl), characters, config(), max_tokens=64, seed=1, may_stream=True
    )
    whole = SupervisedSource(
        str(files.jsonl), characters, config(), max_tokens=64, seed=1
    )
    assert streamed.is_streamed and not whole.is_streamed
    for count in (4, 30):
        ours, theirs = streamed.next_batch(count), whole.next_batch(count)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.loss_weight.tolist() == theirs.loss_weight.tolist()

    settings = {"max_tokens": 64, "seed": 1, "margin": 0.0}
    pairs = [
        PreferenceSource(
            str(files.jsonl),
            characters,
            _pair_config(),
            **settings,
            may_stream=may_stream,
        ).next_batch(34)
        for may_stream in (True, False)
    ]
    assert pairs[0].tokens.tolist() == pairs[1].tokens.tolist()


def _pair_config() -> Any:
    from verl_ray.config.data import PreferenceDataConfig

    fields = set(PreferenceDataConfig.model_fields) - {"unusable"}
    values = config().model_dump(include=fields)
    return PreferenceDataConfig(**values, unusable="skip")


def test_records_without_use_are_passed_over(tmp_path: Path, characters: Any) -> None:
    # Every third problem is longer than the five tokens that are allowed.
    records = [
        {"prompt": f"{i}+1=" if i % 3 else f"{i}+1+1+1=", "answer": str(i)}
        for i in range(9)
    ]
    path = tmp_path / "sums.jsonl"
    # Blank lines are no records.
    path.write_text("\n".join(json.dumps(record) + "\n" for record in records))
    limits = {"max_prompt_tokens": 5, "overlong": "skip", "shuffle": False}

    source = prompts(str(path), characters, **limits)
    assert answers(source, 4) == ["1", "2", "4", "5"]
    assert (source.skipped, source.passed_over) == ({"too_long": 2}, 2)
    state = json.loads(json.dumps(source.state()))
    assert (state["drawn"], state["passed"], state["position"]) == (4, 2, 6)

    again = prompts(str(path), characters, **limits)
    again.load_state(state)
    batch = again.next_batch(4)
    assert batch.answer.texts() == ["7", "8", "1", "2"]
    assert batch.group_id.tolist() == [4, 5, 6, 7]
    assert again.epoch == 1

    # Refused where it is drawn, and where it stands.
    refusing = prompts(str(path), characters, max_prompt_tokens=5, shuffle=False)
    with pytest.raises(OverlongRows, match=r"line 1\b"):
        refusing.next_batch(1)
    with pytest.raises(DataError, match=r"none of the 9 records .* too long"):
        prompts(str(path), characters, **{**limits, "max_prompt_tokens": 2}).next_batch(
            1
        )


def test_several_sets_of_several_formats(files: Any, characters: Any) -> None:
    sets = [DataSet(str(files.jsonl), weight=2.0), DataSet(str(files.parquet))]
    whole = prompts(sets, characters, stream_above_gib=1.0)
    streamed = prompts(sets, characters)
    assert len(whole) == len(streamed) == 90
    expected = answers(whole, 90)
    assert answers(streamed, 90) == expected
    assert sorted(expected) == sorted(str(i + 1) for i in range(30) for _ in range(3))


def test_changed_files_are_noticed(tmp_path: Path, characters: Any) -> None:
    files = write_records(RECORDS, tmp_path, "sums")
    states = {
        path: prompts(str(path), characters).state()
        for path in (files.jsonl, files.parquet)
    }
    write_records([*RECORDS[:-1], {**RECORDS[-1], "answer": "123"}], tmp_path, "sums")
    for path, state in states.items():
        with pytest.raises(DataError, match="records was 'streamed: "):
            prompts(str(path), characters).load_state(state)


def test_moved_files_are_the_same(tmp_path: Path, characters: Any) -> None:
    files = write_records(RECORDS, tmp_path, "sums")
    moved = write_records(RECORDS, tmp_path / "elsewhere", "others")
    for path, other in ((files.jsonl, moved.jsonl), (files.parquet, moved.parquet)):
        source = prompts(str(path), characters)
        source.next_batch(4)
        again = prompts(str(other), characters)
        again.load_state(source.state())
        assert answers(again, 4) == answers(source, 4)


def test_memory_does_not_grow_with_the_records(tmp_path: Path, characters: Any) -> None:
    path = tmp_path / "long.jsonl"
    line = json.dumps({**RECORDS[0], "note": "x" * 100_000}) + "\n"
    path.write_text(line * 300)
    source = prompts(str(path), characters)
    source.next_batch(1)

    tracemalloc.start()
    source.next_batch(4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Four records of 100 kB and their copies, of 300.
    assert peak < 4 * 2**20
    assert np.array_equal(source.next_batch(2).has_answer, [True, True])
