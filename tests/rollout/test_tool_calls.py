"""Sampled tokens as actions, read by vLLM's own parsers."""

from __future__ import annotations

import copy
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from tests.agents.templates import PRESERVING, tokenizer_with
from verl_ray.agents.contract import Action, Sampled, ToolCall, message_of
from verl_ray.agents.template import Renderer
from verl_ray.agents.thoughts import PARSERS, PARSERS_WITHOUT_MARKS
from verl_ray.agents.wire import sampled_frame, sampled_of
from verl_ray.columns.stages import Finish
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import CallRefused, ConfigError, RolloutError
from verl_ray.processes.frames import FrameReader
from verl_ray.rollout.tool_calls import ActionReader

# vLLM looks at the machine as it is imported.
pytestmark = pytest.mark.processes

TOKENIZER = tokenizer_with(PRESERVING)
END = TOKENIZER.eos_token_id
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

OTHER = {"type": "function", "function": {"name": "take"}}


def read(
    text: str, parser: str | None = "hermes", tools: tuple[object, ...] = (TOOL,)
) -> Action:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ActionReader(TOKENIZER, parser)([*tokens, END], Finish.STOP, tools)


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_read_in_their_order() -> None:
    action = read("So:" + call('{"a": 1}') + "\n" + call('{"a": 2}'))
    assert action.tool_calls == [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})]
    assert (action.text, action.finish) == ("So:", "stop")
    assert action.parse_error is None
    assert action.tokens[-1] == END


@pytest.mark.parametrize("text", [call("{a: 1}"), "<tool_call>\nadd", call("[1, 2]")])
def test_what_cannot_be_read_is_no_call(text: str) -> None:
    action = read(text)
    assert not action.tool_calls
    assert action.parse_error


def test_words_are_no_calls() -> None:
    assert read("three") == Action([*TOKENIZER("three")["input_ids"], END], "three")
    # Without tools nothing is a call.
    assert read(call("{}"), tools=()).tool_calls == ()
    assert read("three", parser=None, tools=()).text == "three"


def test_tools_need_a_parser_that_vllm_has() -> None:
    with pytest.raises(ConfigError) as caught:
        read("three", parser=None)
    (problem,) = caught.value.problems
    assert problem.key == "agent.tool_parser"
    assert "offers tools (add)" in problem.rule
    with pytest.raises(RolloutError, match="no such parser"):
        read("three", parser="hermos")
    # It needs tokens of DeepSeek's models.
    with pytest.raises(RolloutError, match="does not work with the model's tokenizer"):
        read("three", parser="deepseek_v3")


def test_a_required_call_is_one_of_the_tools_named_behind_free_thoughts() -> None:
    def accepts(prompt: str, text: str, thoughts: str | None = "qwen3") -> bool:
        reader = ActionReader(TOKENIZER, "hermes", thoughts)
        tokens = TOKENIZER(prompt)["input_ids"]
        grammar = reader.grammar({"tools": ["add"]}, [TOOL, OTHER], tokens)
        tag = Grammar.from_structural_tag(grammar)
        return bool(_is_grammar_accept_string(tag, text))

    right, both = call('{"a": 1}'), call('{"a": 1}') + call('{"a": 2}')
    assert accepts("", right) and accepts("", both)
    assert accepts("", f"<think>I add{MAYBE}</think>\n\n{right}")
    assert accepts("<think>\n", f"I add</think>{right}")
    for text in ("", "words", f"words{right}", right.replace("add", "take")):
        assert not accepts("", text)
    # Arguments are those of the schema, or at least an object.
    assert not accepts("", call('{"a": "1"}')) and not accepts("", call("[1]"))
    assert not accepts("<think>\n", right)
    assert not accepts("", f"<think>I add</think>{right}", None)

    reader = ActionReader(TOKENIZER, "granite")
    for constraint, words in (
        ({"tools": ["add"]}, "vLLM has no grammar of the calls"),
        ({"tools": ["shout"]}, "none of the tools is shout"),
        ({"json": {"enum": ["x" * 70_000]}}, "expected at most 65536"),
    ):
        with pytest.raises(CallRefused, match=words):
            reader.grammar(constraint, [TOOL], ())


def test_turns_are_parsed_without_building_the_vocabulary_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    character_tokenizer(tmp_path, string.ascii_lowercase + string.digits + ' {}":,_')
    tokenizer = load_tokenizer(tmp_path)
    # The parser looks it up.
    tokenizer.add_tokens(["<|python_tag|>"])
    get_vocab = PreTrainedTokenizerFast.get_vocab
    built: list[int] = []

    def counted(tokenizer: Any) -> dict[str, int]:
        built.append(1)
        return get_vocab(tokenizer)

    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", counted)
    reader = ActionReader(tokenizer, "llama3_json")
    before = len(built)
    for number in range(3):
        text = f'{{"name": "add", "parameters": {{"of": {number}}}}}'
        tokens = tokenizer.encode(text)
        action = reader([*tokens, tokenizer.eos_token_id], Finish.STOP, [TOOL])
        assert action.tool_calls == [ToolCall("add", {"of": number})]
        assert action.parse_error is None and action.finish == "stop"
    assert len(built) == before


def test_an_error_of_the_tokenizer_is_not_taken_for_a_missing_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("this is no text")

    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", broken)
    with pytest.raises(TypeError, match="this is no text"):
        ActionReader(TOKENIZER, "hermes")


OPENED = PRESERVING.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
MAYBE, NOW = call('{"a": 7}'), call('{"a": 5}')


ENDS = {
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|content_thinking|>": "<|end_message|>",
}
MARKS = (
    "<think>", "</think>", "<seed:think>", "</seed:think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]",
    "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", "<|START_THINKING|>",
    "<|END_THINKING|>", "<|channel>", "<channel|>", "<mm:think>", "</mm:think>",
    "<ifm|think>", "</ifm|think>", "<|open|>", "<|close|>", "<|sep|>",
    "<|content_thinking|>", "<|end_message|>", "<|message_model|>", "<|content_text|>",
    "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>",
    "<|content_model_end_sampling|>", "<assistant>", "<response>", "</response>", "<0x0A>",
)  # fmt: skip


def thinking(text: str, template: str, parser: str | None = "auto") -> Action:
    tokenizer = tokenizer_with(template)
    reader = ActionReader(tokenizer, "hermes", parser)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    prompt = Renderer(tokenizer).begin([{"role": "user", "content": "1 + 3 = ?"}])
    tokens.append(tokenizer.eos_token_id)
    return reader.behind(prompt)(tokens, Finish.STOP, (TOOL,))


@pytest.mark.parametrize("begins", ["<think>\n", ""])
def test_a_call_in_thoughts_is_a_thought(begins: str) -> None:
    template = PRESERVING if begins else OPENED
    thought = f"{begins}Maybe {MAYBE}.\n</think>\n\n"
    action = thinking(thought + "It is 4.", template)
    assert (action.text, action.reasoning) == ("It is 4.", f"Maybe {MAYBE}.")
    assert (action.tool_calls, action.parse_error) == ((), None)
    assert message_of(action)["content"] == thought + "It is 4."

    action = thinking(thought + "So:" + NOW, template)
    assert action.tool_calls == [ToolCall("add", {"a": 5})]
    assert (action.text, action.reasoning) == ("So:", f"Maybe {MAYBE}.")
    assert message_of(action)["content"] == thought + "So:"

    # Nothing closes it.
    action = thinking(f"{begins}Maybe {MAYBE}", template)
    assert (action.text, action.tool_calls, action.parse_error) == ("", (), None)
    assert action.reasoning == f"Maybe {MAYBE}"

    # A thought between words.
    action = thinking(f"{begins}A.</think>Hm. <think>B {MAYBE}</think> No.", template)
    assert (action.text, action.tool_calls) == ("Hm.  No.", ())


@pytest.mark.parametrize(
    ("begun", "text", "thoughts", "words"),
    [
        ("", "<think>\nI < 2.\n</think>\n\nSo: ", "I < 2.", "So:"),
        ("<think>\n", "I ad", "I ad", ""),
        # The model writes the mark again; the words end with what may be one.
        ("<think>\n", "\n<think>A.</think>B. <thin", "A.", "B."),
        ("", "A.<think>B.</think>C.<think>D ", "B.\nD", "A.C."),
        # A call, the beginning of one, and a name of a special token.
        ("", "Both: " + NOW + " and more", "", "Both:"),
        ("", "Both: <tool_ca", "", "Both:"),
        ("", "Five<|im_end", "", "Five"),
        ("", "Five. Ob", "", "Five. "),
        ("", "Five. Obs: 3", "", "Five. "),
        # Whether white space in front stays depends on what follows.
        ("", " \nFive", "", ""),
        # Nothing has begun this thought, which was shown as words.
        ("", "Five</think>Six", "", "Five"),
    ],
)
def test_a_turn_is_shown_as_far_as_it_is_certain(
    begun: str, text: str, thoughts: str, words: str
) -> None:
    prompt = TOKENIZER.encode(f"Go. {begun}", add_special_tokens=False)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for size in (1, 2, len(tokens)):
        turn = ActionReader(TOKENIZER, "hermes").growing(prompt, [TOOL], ["Obs:"])
        parts = [
            part
            for at in range(0, len(tokens), size)
            for part in turn.add(tokens[at : at + size])
        ]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (
            thoughts, words,
        )  # fmt: skip


@pytest.mark.parametrize("begun", ["", "<think>\n"])
@pytest.mark.parametrize("piece", ["<", " "])
def test_a_turn_that_holds_much_back_shows_nothing_more(piece: str, begun: str) -> None:
    prompt = TOKENIZER.encode(f"Go. {begun}", add_special_tokens=False)
    (token,) = TOKENIZER.encode(piece, add_special_tokens=False)
    five, six = (
        TOKENIZER.encode(word, add_special_tokens=False) for word in ("5", "6")
    )
    for count, rest in ((256, piece * 256 + "6"), (257, "")):
        turn = ActionReader(TOKENIZER, "hermes").growing(prompt, [TOOL], ())
        tokens = [*five, *[token] * count, *six]
        parts = [part for each in tokens for part in turn.add([each])]
        assert "".join(thought + said for thought, said in parts) == "5" + rest


def test_a_record_that_turns_thoughts_off_has_none_to_close() -> None:
    """The template begins a thought, unless a record says otherwise."""
    tokenizer = tokenizer_with(
        OPENED.replace("<think>\n", "{% if enable_thinking is undefined %}<think>\n{% endif %}")
    )  # fmt: skip
    reader = ActionReader(tokenizer, "hermes")
    tokens = tokenizer.encode("It is 4." + NOW, add_special_tokens=False)
    messages = [{"role": "user", "content": "1 + 3 = <think>"}]
    for arguments, said in (({}, ""), ({"enable_thinking": False}, "It is 4.")):
        prompt = Renderer(tokenizer, arguments).begin(messages)
        action = reader.behind(prompt)(tokens, Finish.LENGTH, (TOOL,))
        assert (action.text, len(action.tool_calls)) == (said, len(said) > 0)


def test_thoughts_are_text_where_nothing_reads_them() -> None:
    text = f"<think>\n{MAYBE}</think>\n"
    assert thinking(text, PRESERVING, None).tool_calls == [ToolCall("add", {"a": 7})]
    # These marks are another model's.
    assert thinking(text, PRESERVING, "seed_oss").tool_calls
    with pytest.raises(RolloutError, match="no such parser"):
        thinking(text, PRESERVING, "qwen33")
    with pytest.raises(RolloutError, match="has no marks around thoughts"):
        thinking(text, PRESERVING, "openai_gptoss")


@cache
def with_marks() -> PreTrainedTokenizerBase:
    """Return a tokenizer with the tokens that parsers of thoughts look for."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens([*(AddedToken(mark, special=True) for mark in MARKS)])
    return tokenizer


def test_each_parser_of_thoughts_has_the_marks_that_are_known_of_it() -> None:
    from vllm.reasoning import ReasoningParserManager

    # What this one has stands in the configuration of a tokenizer.
    names = {*ReasoningParserManager.list_registered()} - {"hf"}
    starts = {
        name: ReasoningParserManager.get_reasoning_parser(name)(
            with_marks()
        ).reasoning_start_str
        for name in names
    }
    assert {name for name in names if not starts[name]} == PARSERS_WITHOUT_MARKS
    assert {mark for mark in starts.values() if mark} == {*PARSERS}
    assert all(starts[name] == mark for mark, name in PARSERS.items())


@pytest.mark.parametrize("start", PARSERS)
def test_the_marks_of_the_template_are_those_of_thoughts(start: str) -> None:
    end = ENDS.get(start) or start.replace("<", "</").replace("[", "[/")
    tokenizer = copy.deepcopy(with_marks())
    tokenizer.chat_template = f"{{# {start} #}}" + PRESERVING
    reader = ActionReader(tokenizer, "hermes")

    def acts(text: str) -> Action:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return reader([*tokens, END], Finish.STOP, (TOOL,))

    thought = f"{start}Secret 4: {MAYBE}{end}"
    action = acts(thought + "5")
    assert (action.text, action.tool_calls) == ("5", ())
    assert action.reasoning == f"Secret 4: {MAYBE}"
    # Its marks are special tokens, as those of most models are.
    assert message_of(action)["content"] == thought + "5"

    action = acts(thought + NOW)
    assert action.tool_calls == [ToolCall("add", {"a": 5})]
    assert message_of(action)["content"] == thought


def test_all_thoughts_of_a_call_stay_where_they_were() -> None:
    for text, content in (
        (f"<think>one</think>A<think>two</think>{NOW}", "<think>one</think>A<think>two</think>"),
        (f"A <think>one</think>\nB{NOW}<think>two</think>", "A <think>one</think>\nB<think>two</think>"),
        (f"<think>one</think>\n{NOW}<think>two</think>{MAYBE}", "<think>one</think>\n<think>two</think>"),
    ):  # fmt: skip
        action = thinking(text, PRESERVING)
        assert action.tool_calls[0] == ToolCall("add", {"a": 5})
        assert message_of(action)["content"] == content


def test_arguments_that_nest_too_deep_are_a_parse_error() -> None:
    def nested(levels: int) -> Action:
        return read(call('{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"))

    assert nested(64).parse_error is None
    for levels in (65, 600, 100_000):
        action = nested(levels)
        assert action.parse_error and not action.tool_calls


def test_a_template_that_takes_one_call_has_no_turn_with_two() -> None:
    one = PRESERVING.replace(
        "{% set content = message.content %}",
        "{% set content = message.content %}{% if (message.tool_calls or []) | length > 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}",
    )
    assert len(thinking(NOW, one).tool_calls) == 1
    action = thinking(MAYBE + NOW, one)
    assert action.tool_calls == ()
    assert action.parse_error
    assert "has 2 calls, and the model's chat template takes one" in action.parse_error
    assert len(thinking(MAYBE + NOW, PRESERVING).tool_calls) == 2


def test_thoughts_reach_the_process_of_an_episode() -> None:
    action = thinking("<think>\nI pay.\n</think>\n\n" + NOW, PRESERVING)
    tokens = list(action.tokens)
    sampled = Sampled(tokens, [0.0] * len(tokens), [(0, 1)], action)
    (frame,) = FrameReader().feed(sampled_frame(3, sampled))
    assert sampled_of(frame) == sampled
    assert (action.reasoning, action.content) == (
        "I pay.",
        "<think>\nI pay.\n</think>\n\n",
    )
