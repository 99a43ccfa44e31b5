"""Prompts: the right tokens, lengths kept within the limit, and the same batches after
a resume.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_ray.agents.tasks import tasks_of
from verl_ray.agents.template import Renderer
from verl_ray.columns.stages import Prompts
from verl_ray.config.data import DataConfig, DataSet
from verl_ray.data.cursor import fingerprint
from verl_ray.data.files import write_records
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer, train_bpe
from verl_ray.errors import DataError

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), "0123456789+=")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_bpe(tmp_path_factory.mktemp("chat"), ["1+1?"], 270)


def config(**changes: object) -> DataConfig:
    values = {
        "train_path": "-",
        "validation_path": None,
        "prompts_per_step": 4,
        "max_prompt_tokens": 64,
    }
    values |= {
        "columns": None,
        "stream_above_gib": 1.0,
        "overlong": "refuse",
        "shuffle": True,
        "apply_chat_template": False,
        "chat_template": None,
        "chat_template_kwargs": {},
        "template_day": None,
        "special_tokens": "refuse",
        "curriculum": {
            "hard_to": 0.25,
            "hard_share": 1.0,
            "easy_from": 0.75,
            "easy_share": 1.0,
            "solved_from": None,
        },
        **changes,
    }
    return DataConfig.model_validate(values)


def write(tmp_path: Path, *records: dict[str, object]) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def sums(tmp_path: Path, count: int) -> str:
    return write(
        tmp_path,
        *(
            {"prompt": f"{i}+1=", "answer": str(i + 1), "extra": {"i": i}}
            for i in range(count)
        ),
    )


def texts(batch: Prompts, tokenizer: Any) -> list[str]:
    return [
        tokenizer.decode(batch.select([row]).tokens) for row in range(batch.num_rows)
    ]


def test_columns_stay_together_through_shuffling(
    tmp_path: Path, characters: Any
) -> None:
    source = PromptSource(sums(tmp_path, 150), characters, config(), seed=0)
    batch = source.next_batch(150)
    assert sorted(texts(batch, characters)) == sorted(f"{i}+1=" for i in range(150))
    assert texts(batch, characters) != [f"{i}+1=" for i in range(150)]
    for text, answer, extra in zip(
        texts(batch, characters), batch.answer.texts(), batch.extra.texts(), strict=True
    ):
        number = int(text.partition("+")[0])
        assert (answer, json.loads(extra)) == (str(number + 1), {"i": number})
    assert set(batch.data_source.texts()) == {"sums"}
    assert batch.tokens.dtype == np.int32


def test_group_ids_run_on_over_epochs_and_resumes(
    tmp_path: Path, characters: Any
) -> None:
    path = sums(tmp_path, 7)
    source = PromptSource(path, characters, config(), seed=5)
    whole = PromptSource(path, characters, config(), seed=5).next_batch(24)
    first = source.next_batch(5)
    state = json.loads(json.dumps(source.state()))
    rest = [source.next_batch(5), source.next_batch(14)]
    resumed = PromptSource(path, characters, config(), seed=5)
    resumed.load_state(state)
    again = [resumed.next_batch(5), resumed.next_batch(14)]
    for kept, repeated in zip(rest, again, strict=True):
        assert kept.group_id.tolist() == repeated.group_id.tolist()
        assert texts(kept, characters) == texts(repeated, characters)
    joined = Prompts.concat([first, *again])
    assert joined.group_id.tolist() == list(range(24))
    assert texts(joined, characters) == texts(whole, characters)
    assert (resumed.epoch, len(resumed)) == (3, 7)


def test_resuming_on_other_data_is_refused(tmp_path: Path, characters: Any) -> None:
    state = PromptSource(sums(tmp_path, 7), characters, config(), seed=0).state()
    changed = PromptSource(
        write(tmp_path, *[{"prompt": "1+1=", "answer": "3"}] * 7),
        characters,
        config(),
        seed=0,
    )
    with pytest.raises(DataError, match=r"the data differ .*records was"):
        changed.load_state(state)


def test_a_record_names_its_environment_and_its_tools(
    tmp_path: Path, characters: Any
) -> None:
    sum_ = {"prompt": "1+1=", "answer": "2"}

    def extras(
        *records: dict[str, object], environments: Any = ("game", "shop")
    ) -> list[Any]:
        path = write(tmp_path, *({**sum_, **record} for record in records))
        source = PromptSource(
            path, characters, config(), seed=0, environments=environments
        )
        return [json.loads(extra) for extra in source.all().extra.texts()]

    named = {"environment": "shop", "tools": ["buy", "sell"]}
    assert extras(named, {"environment": None, "tools": None})[0] == named
    assert extras({"environment": "field"}, environments=()) == [
        {"environment": "field"}
    ]
    for record, words in (
        ({"environment": "shopp"}, "line 2.*environment is str 'shopp'.*agent.environments.*Did you mean shop"),
        ({"environment": 3}, "line 2.*environment is int '3'"),
        ({"tools": "buy"}, "line 2.*tools is str 'buy'.*a list of names of tools"),
        ({"tools": [{"type": "function"}]}, "line 2.*tools is list.*a list of names"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"(?s){words}"):
            extras({}, record)
    # Without tools such a record gets a single response.
    assert extras({"tools": []}, {}) == [{"tools": []}, {}]
    with pytest.raises(DataError, match=r"line 2.*tools .*without an environment"):
        extras({}, {"tools": ["buy"]})
    for environment in ("default", "sums"):
        assert extras({"tools": ["buy"]}, environments=(environment,)) == [
            {"tools": ["buy"]}
        ]
    with pytest.raises(DataError, match="tools are not supported"):
        extras(named, environments=())


# Whole numbers beside fractions, objects of several fields, and fields that are absent:
# Arrow writes them as floats, with nulls, and in the order in which it saw them first.
VARIED: list[dict[str, object]] = [
    {
        "prompt": [{"role": "user", "content": "1+1="}],
        "answer": {"b": [{"c": 1}], "a": [1, 2.5]},
        "extra": {"level": 1, "tags": [{"a": 1}, {"b": 2, "a": 1}]},
        "number": 1,
    },
    {
        "prompt": [{"content": "2+1=", "name": "Ann", "role": "user"}],
        "answer": {"a": [3], "b": [{"d": 1}]},
        "extra": {"tags": [], "level": 1.5, "note": "1"},
    },
    {"prompt": [{"role": "user", "content": "3+1="}], "answer": {}, "number": 2**40},
]


def test_moved_and_converted_records_resume(tmp_path: Path, chat: Any) -> None:
    def source(path: Path | list[DataSet]) -> PromptSource:
        data_sets = path if isinstance(path, list) else str(path)
        settings = config(apply_chat_template=True, chat_template="chatml")
        return PromptSource(data_sets, chat, settings, seed=0)

    files = write_records(VARIED, tmp_path, "sums")
    first = source(files.jsonl)
    first.next_batch(2)
    state = json.loads(json.dumps(first.state()))
    expected = first.next_batch(7)

    moved = write_records(VARIED, tmp_path / "elsewhere", "others")
    halves = [
        DataSet(str(write_records(part, tmp_path, name).jsonl))
        for name, part in (("head", VARIED[:1]), ("tail", VARIED[1:]))
    ]
    for path in (moved.jsonl, moved.parquet, moved.folder, files.parquet, halves):
        again = source(path)
        again.load_state(state)
        assert again.next_batch(7).tokens.tolist() == expected.tokens.tolist()

    # What an earlier version saved depends on the name of the file.
    earlier = {
        **state,
        "fingerprint": fingerprint(first.all(), without=["template_arguments"]),
    }
    del earlier["records"]
    source(files.jsonl).load_state(earlier)
    with pytest.raises(DataError, match="fingerprint was"):
        source(moved.jsonl).load_state(earlier)


def test_the_digest_of_texts_is_that_of_earlier_versions(
    tmp_path: Path, characters: Any
) -> None:
    """A text that spells JSON is a text: old checkpoints go on."""
    answers = ["2", "[1, 2.0]", '{"b": null, "a": 1.0}', "", 2.0, '["a"]', " 1.0\n"]
    records = [
        {"prompt": f"{number}+1=", "answer": answer, "n": number}
        for number, answer in enumerate(answers)
    ]
    source = PromptSource(write(tmp_path, *records), characters, config(), seed=3)
    assert source.state()["records"] == "cd2ab88a970d192062dfcaa6ff7b51b7"


@pytest.mark.parametrize(
    "changed",
    [
        [VARIED[1], VARIED[0], VARIED[2]],
        VARIED[:2],
        [*VARIED, VARIED[0]],
        [{**VARIED[0], "answer": {"b": [{"c": 1}], "a": [1, 2]}}, *VARIED[1:]],
        [{**VARIED[0], "extra": {"level": 2}}, *VARIED[1:]],
        [{**VARIED[0], "data_source": "sums"}, *VARIED[1:]],
        [{**VARIED[0], "prompt": [{"role": "system", "content": "1+1="}]}, *VARIED[1:]],
    ],
)
def test_changed_records_are_refused_under_any_path(
    tmp_path: Path, chat: Any, changed: list[dict[str, object]]
) -> None:
    settings = config(apply_chat_template=True, chat_template="chatml")
    files = write_records(VARIED, tmp_path, "sums")
    state = PromptSource(str(files.jsonl), chat, settings, seed=0).state()
    others = write_records(changed, tmp_path / "elsewhere", "sums")
    for path in (others.jsonl, others.parquet):
        source = PromptSource(str(path), chat, settings, seed=0)
        with pytest.raises(DataError, match=r"the data differ .*same records"):
            source.load_state(state)


def test_evaluation_reads_in_file_order_and_moves_nothing(
    tmp_path: Path, characters: Any
) -> None:
    source = PromptSource(sums(tmp_path, 9), characters, config(), seed=0)
    before = source.state()
    assert texts(source.all(), characters) == [f"{i}+1=" for i in range(9)]
    assert source.all(4).answer.texts() == ["1", "2", "3", "4"]
    assert source.all(100).num_rows == 9
    assert source.state() == before


def test_overlong_prompts_are_refused_or_counted(
    tmp_path: Path, characters: Any
) -> None:
    path = write(
        tmp_path,
        *(
            {"prompt": text, "answer": "0"}
            for text in ("1+1=", "123+456=", "12+12=", "1+2=")
        ),
    )
    with pytest.raises(DataError) as caught:
        PromptSource(path, characters, config(max_prompt_tokens=4), seed=0)
    assert (
        "2 of 4 rows are longer than data.max_prompt_tokens = 4; the longest has 8 tokens"
        in str(caught.value)
    )
    assert "line 2" in str(caught.value)
    assert "data.max_prompt_tokens=8, or set data.overlong=skip" in str(caught.value)
    source = PromptSource(
        path, characters, config(max_prompt_tokens=4, overlong="skip"), seed=0
    )
    assert (source.skipped, len(source)) == ({"too_long": 2}, 2)
    assert texts(source.all(), characters) == ["1+1=", "1+2="]
    assert PromptSource(
        path, characters, config(max_prompt_tokens=8), seed=0
    ).skipped == {"too_long": 0}
    with pytest.raises(
        DataError, match=r"4 of 4 rows are longer .*Set data\.max_prompt_tokens=8$"
    ):
        PromptSource(
            path, characters, config(max_prompt_tokens=3, overlong="skip"), seed=0
        )


def test_chat_template_is_applied_as_asked(tmp_path: Path, chat: Any) -> None:
    path = write(
        tmp_path, {"prompt": CHAT, "answer": "2"}, {"prompt": "1+1?", "answer": "2"}
    )
    both = PromptSource(path, chat, config(apply_chat_template=True), seed=0).all()
    # A plain text is what a user says; the template's specials stand once, as single
    # tokens.
    assert (
        texts(both, chat)
        == ["<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"] * 2
    )
    plain = write(tmp_path, {"prompt": "1+1?", "answer": "2"})
    assert texts(
        PromptSource(plain, chat, config(apply_chat_template=False), seed=0).all(), chat
    ) == ["1+1?"]


SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_a_chat_template_gets_the_arguments_of_run_and_record(
    tmp_path: Path, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a record go before those of the run."""
    monkeypatch.setattr(
        chat, "chat_template", f"{chat.chat_template}{SWITCH}{{{{ tone }}}}"
    )
    record = {"prompt": CHAT, "answer": "2"}
    path = write(
        tmp_path,
        record,
        {**record, "chat_template_kwargs": {"enable_thinking": False, "tone": "calm"}},
        # Arrow adds such nulls.
        {**record, "chat_template_kwargs": {"enable_thinking": None, "tone": "calm"}},
        {**record, "enable_thinking": False, "chat_template_kwargs": None},
        {**record, "enable_thinking": True},
    )

    def endings(**settings: object) -> list[str]:
        arguments = config(apply_chat_template=True, chat_template_kwargs=settings)
        prompts = PromptSource(path, chat, arguments, seed=0).all()
        return [text.partition("assistant\n")[2] for text in texts(prompts, chat)]

    # An episode begins with the same tokens.
    renderer = Renderer(chat)
    prompts = PromptSource(path, chat, config(apply_chat_template=True), seed=0).all()
    for number, task in enumerate(tasks_of(prompts)):
        own = renderer.of_record(task.template_arguments)
        bounds = slice(*prompts.offsets[number : number + 2])
        assert own.begin(task.messages) == prompts.tokens[bounds].tolist()

    off = "<think></think>"
    assert endings() == ["", f"{off}calm", "calm", off, ""]
    run_endings = endings(enable_thinking=False, tone="loud")
    calm, loud = f"{off}calm", f"{off}loud"
    assert run_endings == [loud, calm, calm, loud, "loud"]

    for wrong, says in (
        ({"enable_thinking": "False"}, "is str 'False', expected true or false"),
        ({"chat_template_kwargs": "no"}, "chat_template_kwargs is str 'no'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "has 'tokenize', which the run"),
        (
            {
                "chat_template_kwargs": {"enable_thinking": True},
                "enable_thinking": False,
            },
            "enable_thinking is False, and True in chat_template_kwargs",
        ),
        (
            {"chat_template_kwargs": {"tone": ["<|im_end|>"]}},
            r"line 1, tone, .* special token '<\|im_end\|>'",
        ),
    ):
        path = write(tmp_path, {**record, **wrong})
        with pytest.raises(DataError, match=says):
            endings()


def test_the_day_of_a_run_is_the_day_that_a_template_writes(
    tmp_path: Path, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "chat_template", "{{ strftime_now('%d %b %Y') }}")
    path = write(tmp_path, {"prompt": CHAT, "answer": "2"})
    day = config(apply_chat_template=True, template_day="2025-02-01")
    assert texts(PromptSource(path, chat, day, seed=0).all(), chat) == ["01 Feb 2025"]
    with pytest.raises(ValueError, match="template_day"):
        config(template_day="1 May")


def test_messages_without_a_template_are_refused(
    tmp_path: Path, characters: Any, chat: Any
) -> None:
    path = write(tmp_path, {"prompt": CHAT, "answer": "2"})
    for tokenizer in (characters, chat):
        with pytest.raises(
            DataError,
            match="line 1: found chat messages, but no chat template is applied",
        ):
            PromptSource(path, tokenizer, config(apply_chat_template=False), seed=0)


def test_nothing_to_draw_is_refused(tmp_path: Path, characters: Any) -> None:
    with pytest.raises(DataError, match=r"sums\.jsonl holds no records"):
        PromptSource(write(tmp_path), characters, config(), seed=0)
    with pytest.raises(DataError, match="line 1: no tokens"):
        PromptSource(
            write(tmp_path, {"prompt": "", "answer": "2"}), characters, config(), seed=0
        )
    # The name of a special token is one token, whatever its characters.
    for prompt, spelled in (("1-1=", "escape"), ("<eos>1-1=", "allow")):
        with pytest.raises(
            DataError,
            match=rf"line 2: .* cannot encode '{prompt}' \(it has no token for '-' \(U\+002D\)\)",
        ):
            path = write(
                tmp_path,
                {"prompt": "1+1=", "answer": "2"},
                {"prompt": prompt, "answer": "0"},
            )
            settings = config(special_tokens=spelled)
            PromptSource(path, characters, settings, seed=0)
