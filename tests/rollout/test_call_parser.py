"""What each of vLLM's parsers of tool calls makes of whole, cut and malformed calls."""

from __future__ import annotations

import copy
import random
import re
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from tests.agents.templates import PRESERVING, tokenizer_with
from verl_ray.agents.contract import Action, ToolCall
from verl_ray.columns.stages import Finish
from verl_ray.rollout.call_parser import GrowingReply
from verl_ray.rollout.tool_calls import ActionReader

# vLLM looks at the machine as it is imported.
pytestmark = pytest.mark.processes

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

# fmt: off
CALLS = {
    "dots": '<dots_function_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</dots_function_call>',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    "ernie45": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "granite4": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3_json": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "glm45": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "ling3": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "granite-20b-fc": '<function_call> {"name": "add", "arguments": {"a": 1}}',
    "granite": '<|tool_call|> [{"name": "add", "arguments": {"a": 1}}]',
    "poolside_v1": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "hunyuan_a13b": '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>',
    "jamba": '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>',
    "hy_v3": "<tool_calls><tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value></tool_call></tool_calls>",
    "hy_v4": "<tool_calls><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call></tool_calls>",
    "internlm": '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>',
    "lfm2": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>add<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>1</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
    "llama4_json": '{"name": "add", "parameters": {"a": 1}}',
    "llama4_pythonic": "[add(a=1)]",
    "pythonic": "[add(a=1)]",
    "longcat": '<longcat_tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</longcat_tool_call>',
    "mimo": "<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "step3p5": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="add">\n<parameter name="a">1</parameter>\n</invoke></minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">\n]<]minimax[>[<a>1]<]minimax[>[</a>\n]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
    "minicpm5": '<function name="add"><param name="a">1</param></function>',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "olmo3": "<function_calls>add(a=1)</function_calls>",
    "plamo3": '<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>add<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": 1}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>',
    "muse_glimmer": ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1}}]',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add"><steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "inkling": '<|message_model|><|content_invoke_tool_json|>{"name": "add", "args": {"a": 1}}<|end_message|>',
    "xlam": '[{"name": "add", "arguments": {"a": 1}}]',
    "gigachat3": '<|function_call|>{"name": "add", "arguments": {"a": 1}}',
    "functiongemma": "<start_function_call>call:add{a:<escape>1<escape>}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "apertus": '<|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>',
}
# fmt: on
"""Name of a parser -> a call of add with a = 1, as its models write it."""

NOT_HERE = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "hf": "needs a response template in the tokenizer's configuration",
    "openai": "reads nothing by itself; vLLM has another parser of whole responses",
}

# They stream no words, so nothing is known of calls behind a whole one.
NOT_ASKED = {"muse_glimmer"}

# A call that has words in front of it is no call for these, or a text.
AT_THE_START = {
    "llama3_json", "llama4_json", "llama4_pythonic", "pythonic", "xlam",
    "phi4_mini_json",
}  # fmt: skip

# The words in front of a call that was read are lost.
DROPS_WORDS = {"llama3_json", "llama4_json", "minicpm5", "olmo3"}

# Their list of calls has no tag in front of it, and no name of a tool in it.
NAMELESS = {"llama4_pythonic", "pythonic", "muse_glimmer"}

SPECIAL = (
    "<think>", "</think>", "<tool_sep>", "<response>", "</response>", "<0x0A>",
    "<|python_tag|>",
    "<|eot|>", "<|start|>", "<|content_text|>", "<|content_thinking|>",
    "<|content_invoke_tool_text|>", "<|content_tool_error|>",
    "<|content_model_end_sampling|>", "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip


@cache
def vocabulary() -> PreTrainedTokenizerBase:
    """Return a tokenizer with the special tokens that the parsers look for."""
    tokenizer = copy.deepcopy(tokenizer_with(PRESERVING))
    marks = {mark for call in CALLS.values() for mark in marks_of(call)}
    tokens = [
        AddedToken(mark, special=True, normalized=False)
        for mark in sorted(marks | set(SPECIAL))
    ]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def marks_of(call: str) -> list[str]:
    return re.findall(r'</?[｜|a-z][^\s<>="]*>', call)


@cache
def reader_of(parser: str) -> ActionReader:
    """Return a reader whose template writes calls as the parser's models do."""
    before, _, after = CALLS[parser].rpartition("1")
    tokenizer = vocabulary()
    tokenizer.chat_template = (
        "{% if tools %}tools{% endif %}{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        f"{{% raw %}}{before}{{% endraw %}}{{{{ call.function.arguments.of }}}}"
        f"{{% raw %}}{after}{{% endraw %}}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return ActionReader(tokenizer, parser)


def read(parser: str, text: str) -> Action:
    tokenizer = vocabulary()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return reader_of(parser)([*tokens, tokenizer.eos_token_id], Finish.STOP, [ADD])


def test_the_table_has_each_parser() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert {*CALLS, *NOT_HERE} == set(ToolParserManager.list_registered())


@pytest.mark.parametrize("parser", CALLS)
def test_a_call_is_read_whole_or_is_a_parse_error(parser: str) -> None:
    call = CALLS[parser]
    cut = call[: call.index("1") + 1]
    malformed = call.replace("add", "", 1).replace("1", "", 1)

    whole = read(parser, call)
    assert whole.parse_error is None
    (only,) = whole.tool_calls
    assert only in (ToolCall("add", {"a": 1}), ToolCall("add", {"a": "1"}))

    broken = [cut, call + "\n" + cut]
    if parser not in NAMELESS:
        broken.append(malformed)
    if parser not in NOT_ASKED:
        broken.append(call + "\n" + malformed)
    if parser not in AT_THE_START:
        broken.append("So: " + cut)
    for text in broken:
        action = read(parser, text)
        assert action.parse_error is not None, text
        assert not action.tool_calls


PIECES = (
    "Hello", "world. ", " ", "\n", "<think>", "</think>", "1 < 2 ", "[a, b] ", "{x} ", "é五",
    "<b>bold</b>", "add", "<|im_end|>", "<", "</", "So:", '{"a": 1}', "```json\n{}\n```",
)  # fmt: skip


@pytest.mark.parametrize("parser", CALLS)
def test_what_is_shown_of_a_growing_turn_is_what_it_begins_with(parser: str) -> None:
    rng = random.Random(parser)
    tokenizer = vocabulary()
    pieces = [*PIECES, CALLS[parser], CALLS[parser][: len(CALLS[parser]) // 2]]
    num_shown = 0
    for _ in range(20):
        text = "".join(["Hello. ", *rng.choices(pieces, k=rng.randint(0, 7))])
        begun = rng.choice(["", "<think>\n"])
        first = re.search("</?think>", text)
        if not begun and first is not None and first[0] == "</think>":
            # Nothing has begun this thought.
            continue
        tokens = tokenizer.encode(text, add_special_tokens=False)
        prompt = tokenizer.encode(f"Go. {begun}", add_special_tokens=False)
        tools = rng.choice([(), (ADD,), (ADD,)])

        reader = reader_of(parser)
        stop = rng.choice([(), ("So:",)])
        turn = reader.growing(prompt, tools, stop)
        thoughts = words = ""
        for at in range(0, len(tokens), 2):
            for thought, said in turn.add(tokens[at : at + 2]):
                thoughts, words = thoughts + thought, words + said
                num_shown += 1
        action = reader.behind(prompt)(tokens, Finish.LENGTH, tools)
        assert action.reasoning.startswith(thoughts), text
        if not (parser in DROPS_WORDS and action.tool_calls):
            said = action.text.partition("So:")[0] if stop else action.text
            assert said.startswith(words), text
    assert num_shown > 20


def test_a_parser_that_withholds_much_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time it reads all that it withholds: 256 characters and the one behind."""
    num_asked = 0

    def add(reply: GrowingReply, piece: str, add: Any = GrowingReply.add) -> str:
        nonlocal num_asked
        num_asked += 1
        return str(add(reply, piece))

    monkeypatch.setattr(GrowingReply, "add", add)
    tokens = vocabulary().encode("[" + "1," * 500, add_special_tokens=False)
    turn = reader_of("pythonic").growing([], (ADD,), ())
    assert not any(turn.add([token]) for token in tokens)
    assert len(tokens) > 900 and 100 < num_asked <= 257


@pytest.mark.parametrize("parser", CALLS)
def test_words_with_brackets_are_an_answer(parser: str) -> None:
    for text in (
        "So {x} is [a, b] < c, and done.", "a <", "[1] says", '{"a": 1}',
        "<answer>3</answer>", "<b>bold</b>", '{"name": "Bob", "age": 3}',
        '[{"name": "Bob"}]', '```json\n{"a": 3}\n```', "See:\n```json\n[1, 2]\n```",
    ):  # fmt: skip
        action = read(parser, text)
        assert (action.parse_error, action.tool_calls, action.text) == (None, (), text)
