"""The tree of token paths: which turn continues which, and the rows that come of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.agents.templates import (
    MERGING,
    PRESERVING,
    ROLE_ENDED,
    STRIPPING,
    tokenizer_with,
)
from verl_ray.agents.contract import (
    Action,
    EpisodeRow,
    Message,
    Sampled,
    ToolCall,
    ToolSchema,
    message_of,
)
from verl_ray.agents.template import Renderer
from verl_ray.agents.transcript import SampledTurn, Transcript
from verl_ray.data.tokenizers import CHATML
from verl_ray.errors import DataError

ADD: ToolSchema = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


class Conversation:
    """A transcript, and turns that are sampled for it."""

    def __init__(self, template: str = PRESERVING) -> None:
        self.tokenizer = tokenizer_with(template)
        self.renderer = Renderer(self.tokenizer)
        self.transcript = Transcript(self.renderer)

    def say(
        self,
        messages: list[Message],
        text: str,
        *,
        finish: str = "stop",
        tools: tuple[ToolSchema, ...] = (),
        calls: tuple[ToolCall, ...] = (),
        versions: tuple[tuple[int, int], ...] = ((0, 0),),
    ) -> list[Message]:
        """The conversation after the policy has said something in it."""
        prompt = self.transcript.prompt(messages, tools)
        tokens = self.tokenizer(text)["input_ids"]
        if finish == "stop":
            tokens.append(self.tokenizer.eos_token_id)
        action = Action(tokens, text, calls, finish)
        number = len(self.transcript.turns) + 1
        sampled = Sampled(tokens, [-float(number)] * len(tokens), versions, action)
        self.transcript.record(prompt, sampled, 1000)
        return [*messages, message_of(action)]

    def learned(self) -> list[list[str]]:
        """The texts under the mask of each row, turn by turn."""
        return [
            [self.tokenizer.decode(part) for part in parts(row)]
            for row in self.transcript.rows()
        ]


def parts(row: EpisodeRow) -> list[list[int]]:
    """The runs of tokens under the mask."""
    runs: list[list[int]] = []
    before = False
    for token, is_learned in zip(row.tokens, row.mask, strict=True):
        if is_learned and not before:
            runs.append([])
        if is_learned:
            runs[-1].append(token)
        before = is_learned
    return runs


def test_a_conversation_that_goes_on_is_one_row() -> None:
    talk = Conversation()
    messages = talk.say([user("1?")], "one", versions=((0, 4), (1, 5)))
    messages = talk.say([*messages, user("2?")], "two", versions=((0, 5),))
    turns = talk.transcript.turns
    turns[0].reward, turns[1].reward = 0.25, 1.0
    (row,) = talk.transcript.rows()

    whole = talk.renderer.text(messages, add_generation_prompt=False)
    # The line break behind the last turn is not part of it.
    assert talk.tokenizer.decode(row.tokens) + "\n" == whole
    assert talk.learned() == [["one<|im_end|>", "two<|im_end|>"]]
    assert len(row.mask) == len(row.log_probs) == len(row.tokens)

    first, second = len(turns[0].sampled.tokens), len(turns[1].sampled.tokens)
    start = len(turns[0].context)
    later = start + first + len(turns[1].context)
    assert row.log_probs == [
        *[0.0] * start, *[-1.0] * first, *[0.0] * (later - start - first), *[-2.0] * second,
    ]  # fmt: skip
    assert row.versions == [(start, 4), (start + 1, 5), (later, 5)]
    assert row.rewards == [(start + first - 1, 0.25), (later + second - 1, 1.0)]
    assert row.tokens[start + first - 1] == talk.tokenizer.eos_token_id


def test_a_branch_has_what_was_before_as_context() -> None:
    talk = Conversation()
    messages = talk.say([user("1?")], "one")
    talk.say([*messages, user("2?")], "two")
    other = talk.say([*messages, user("3?")], "three")
    talk.say([*other, user("4?")], "four")

    rows = talk.transcript.rows()
    assert talk.learned() == [
        ["one<|im_end|>", "two<|im_end|>"],
        ["three<|im_end|>", "four<|im_end|>"],
    ]
    # The second row begins as the first one does, up to the end of the shared turn.
    shared = len(talk.transcript.turns[0].context) + 4
    assert rows[0].tokens[:shared] == rows[1].tokens[:shared]
    assert not any(rows[1].mask[:shared])
    assert not any(rows[1].log_probs[:shared])
    assert len(rows[1].rewards) == len(rows[1].versions) == len(rows[1].turns) == 2
    assert sorted(number for row in rows for number in row.turns) == list(
        range(sum(len(row.turns) for row in rows))
    )
    assert all(rows[1].mask[at] for at, _ in [*rows[1].rewards, *rows[1].versions])


def test_every_sampled_token_is_learned_once() -> None:
    talk = Conversation()
    trunk = talk.say([user("1?")], "one")
    for question in "abc":
        branch = talk.say([*trunk, user(question)], f"to {question}")
        for further in "de":
            talk.say([*branch, user(further)], f"to {question}{further}")

    rows = talk.transcript.rows()
    sampled = sum(len(turn.sampled.tokens) for turn in talk.transcript.turns)
    assert sum(sum(row.mask) for row in rows) == sampled
    assert [len(turns) for turns in talk.learned()] == [3, 1, 2, 1, 2, 1]
    assert all(len(row.mask) == len(row.tokens) for row in rows)


def test_rows_stand_in_the_order_of_their_last_turns() -> None:
    talk = Conversation()
    trunk = talk.say([user("1?")], "one")
    aside = talk.say([user("an aside?")], "aside")
    talk.say([*aside, user("more?")], "more")
    talk.say([*trunk, user("2?")], "two")
    assert talk.learned() == [
        ["aside<|im_end|>", "more<|im_end|>"],
        ["one<|im_end|>", "two<|im_end|>"],
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: [user("1?!"), *messages[1:]],
        lambda messages: [messages[0], {"role": "assistant", "content": "One"}, *messages[2:]],
        lambda messages: messages[1:],
        lambda messages: [{"role": "system", "content": "Be brief."}, *messages],
    ],
)  # fmt: skip
def test_a_conversation_with_another_past_begins_a_row(change) -> None:
    talk = Conversation()
    messages = [*talk.say([user("1?")], "one"), user("2?")]
    talk.say(change(messages), "two")
    assert talk.learned() == [["one<|im_end|>"], ["two<|im_end|>"]]


def test_other_tools_begin_a_row() -> None:
    talk = Conversation()
    messages = talk.say([user("1?")], "one", tools=(ADD,))
    talk.say([*messages, user("2?")], "two", tools=(ADD,))
    talk.say([*messages, user("2?")], "three")
    first, second, third = talk.transcript.turns
    assert (second.parent, third.parent) == (first, None)


def test_a_turn_that_was_cut_begins_a_row() -> None:
    talk = Conversation()
    messages = talk.say([user("1?")], "on", finish="length")
    talk.say([*messages, user("2?")], "two")
    assert talk.learned() == [["on"], ["two<|im_end|>"]]
    rows = talk.transcript.rows()
    assert "on<|im_end|>\n<|im_start|>user" in talk.tokenizer.decode(rows[1].tokens)


def test_thinking_that_is_left_out_begins_a_row() -> None:
    talk = Conversation(STRIPPING)
    messages = talk.say([user("1?")], "<think>\nhm\n</think>\n\none")
    talk.say([*messages, user("2?")], "two")
    rows = talk.transcript.rows()
    assert "hm" in talk.tokenizer.decode(rows[0].tokens)
    assert "hm" not in talk.tokenizer.decode(rows[1].tokens)
    assert [len(turns) for turns in talk.learned()] == [1, 1]


def test_an_agent_may_write_tool_calls_in_its_own_way() -> None:
    talk = Conversation()
    calls = (ToolCall("add", {"a": 1, "b": [2]}),)
    talk.say([user("1?")], "", calls=calls)
    theirs: Message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"b": [2], "a": 1}'},
            }
        ],
    }
    prompt = talk.transcript.prompt([user("1?"), theirs, user("2?")], ())
    assert prompt.parent is talk.transcript.turns[0]


def test_a_repeated_turn_is_continued_where_it_was_sampled_last() -> None:
    talk = Conversation()
    messages = talk.say([user("1?")], "one")
    talk.say([user("1?")], "one")
    talk.say([*messages, user("2?")], "two")
    assert talk.learned() == [["one<|im_end|>"], ["one<|im_end|>", "two<|im_end|>"]]
    assert isinstance(talk.transcript.turns[2].parent, SampledTurn)
    assert talk.transcript.turns[2].parent is talk.transcript.turns[1]


# ----------------------------------------------------------------- long conversations


class Whole(Renderer):
    """A renderer that writes the whole conversation in each turn."""

    def continuation(self, *arguments: Any, **options: Any) -> list[int] | None:
        options["outline"] = None
        return super().continuation(*arguments, **options)


class Counting(Renderer):
    """A renderer that counts the messages that it writes."""

    num_written = 0

    def text(self, messages: Sequence[Message], *arguments: Any, **options: Any) -> str:
        self.num_written += len(messages)
        return super().text(messages, *arguments, **options)


NUMBERED = PRESERVING.replace(
    "{{ message.role }}\n", "{{ message.role }} {{ loop.index }}\n"
)
"""What it writes behind a turn depends on the number of messages before it."""

THOUGHTS = (
    "",
    "",
    "<think>\nhm\n</think>\n\n",
    "<think>\n\n</think>\n\n",
    "<think>\nhm",
)


def random_turn(
    rng: random.Random, *, has_tools: bool
) -> tuple[str, tuple[ToolCall, ...], str, list[Message]]:
    """The text, the calls and the finish of a turn, and what comes after it."""
    words = rng.choice(("", "one", " two \n", "drei 漢"))
    text = rng.choice(THOUGHTS) * (rng.random() < 0.4) + words
    num_calls = rng.choice((0, 1, 1, 1, 2)) if has_tools else 0
    calls = tuple(ToolCall("add", {"a": rng.randrange(9)}) for _ in range(num_calls))
    new = [
        {"role": "tool", "name": "add", "content": rng.choice(("2", "", "<|im_end|>"))}
        for _ in calls
    ]
    if not calls or rng.random() < 0.1:
        new.append(user(rng.choice(("And?", "<tool_response>\nx</tool_response>"))))
    finish = "length" if rng.random() < 0.05 else "stop"
    return text, calls, finish, new


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "template", [PRESERVING, MERGING, STRIPPING, NUMBERED, ROLE_ENDED, CHATML]
)
def test_rows_are_those_of_whole_conversations(template: str, seed: int) -> None:
    rng = random.Random(seed)
    talks = Conversation(template), Conversation(template)
    has_tools = talks[0].renderer.writes_tools
    talks[1].renderer = Whole(talks[1].tokenizer)
    talks[1].transcript = Transcript(talks[1].renderer)

    tools = (ADD,) if has_tools else ()
    messages = [user("1?")]
    for number in range(30):
        text, calls, finish, new = random_turn(rng, has_tools=has_tools)
        # Nothing but the number of messages tells these turns from each other.
        if seed == 0:
            text, calls, finish, new = "one", (), "stop", [user("And?")]
        # A turn that was cut has a token at least.
        text += "." * (finish == "length")
        options = {"finish": finish, "tools": tools, "calls": calls}
        both = [talk.say(messages, text, **options) for talk in talks]
        assert both[0] == both[1]
        messages = [*both[0], *new]
        # An agent may leave something out.
        if number % 12 == 11:
            del messages[1:5]
    rows, expected = (talk.transcript.rows() for talk in talks)
    assert rows == expected


def test_a_turn_writes_no_more_messages_than_it_adds() -> None:
    talk = Conversation(STRIPPING)
    talk.renderer = Counting(talk.tokenizer)
    talk.transcript = Transcript(talk.renderer)
    messages = [user("1?")]
    counts = []
    for _ in range(80):
        before = talk.renderer.num_written
        messages = talk.say(messages, "", tools=(ADD,), calls=(ToolCall("add", {}),))
        counts.append(talk.renderer.num_written - before)
        messages.append({"role": "tool", "name": "add", "content": "2"})

    assert len(talk.transcript.rows()) == 1
    # Three texts, of the question and a unit of two, the turn, and its result.
    assert sorted(counts)[72] == 3 + 4 + 5
    # The whole is written where it is twice as long as when it was written last.
    assert sum(count > 12 for count in counts) == 5


@pytest.mark.parametrize("value", [2, True, 1.0])
def test_a_message_that_was_changed_in_place_begins_a_row(value: object) -> None:
    talk = Conversation()
    calls = (ToolCall("add", {"a": 1}),)
    messages = talk.say([user("1?")], "", calls=calls)
    messages = talk.say([*messages, user("2?")], "two")
    messages[1]["tool_calls"][0]["function"]["arguments"]["a"] = value
    talk.say([*messages, user("3?")], "three")
    assert [turn.parent for turn in talk.transcript.turns][2] is None


def test_a_refused_conversation_leaves_nothing_behind() -> None:
    talk = Conversation()
    messages = talk.say([user("1?")], "one")
    question = user("2?")
    with pytest.raises(DataError, match="message 4"):
        talk.transcript.prompt([*messages, question, {"role": "user"}], ())
    messages = talk.say([*messages, question], "two")
    talk.say([*messages, user("3?")], "three")
    assert talk.learned() == [["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]]


@pytest.mark.parametrize(
    "num_tokens, num_log_probs, words",
    [(0, 0, "a turn of 0 tokens"), (3, 3, "expected 1 to 2"), (2, 1, "2 tokens and 1 log-probs")],
)  # fmt: skip
def test_what_is_no_turn_is_refused(num_tokens, num_log_probs, words) -> None:
    talk = Conversation()
    prompt = talk.transcript.prompt([user("1?")], ())
    tokens = [5] * num_tokens
    sampled = Sampled(tokens, [0.0] * num_log_probs, [(0, 0)], Action(tokens, ""))
    with pytest.raises(ValueError, match=words):
        talk.transcript.record(prompt, sampled, 2)
