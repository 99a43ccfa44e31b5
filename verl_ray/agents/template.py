"""Conversations as token ids: the prompt of a turn, and what follows a sampled turn.

Invariant: ids that were sampled are never made again from a text. What follows them is
the difference of two texts that the chat template writes, and it is only taken where
the longer text begins with the shorter one.

Templates differ in what they do to earlier turns. Some leave out thinking once the user
writes again, and some write a date. A conversation to which that happens cannot be
continued: a new row begins with it, as it would in deployment.

There is one exception. Some templates write an empty thought, which is `<think>` and
`</think>` with white space between them, into the last turn alone. If the texts are the
same but for one empty thought in the turn of the policy, the row goes on, with the turn
as it was sampled behind the prompt that it was sampled behind. A thought with words
that is left out begins a new row.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ray.agents.contract import Message, ToolSchema
from verl_ray.agents.outline import EMPTY_THOUGHT, Outline
from verl_ray.config.data import SpecialTokens
from verl_ray.data.encoding import SpelledTokens
from verl_ray.data.fields import excerpt
from verl_ray.data.tokenizers import (
    TemplateArguments,
    applied_template,
    end_names,
    end_tokens,
    guarded_arguments,
    render,
    require_chat_template,
)
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Halves of surrogate pairs have no encoding. The other two mark special tokens.
_NO_CHARACTERS = re.compile("[\ud800-\udfff\ufdd0\ufdd1]")
_REPLACEMENT = "\ufffd"


class TextTooLong(Exception):
    """A text has more tokens than there are places for, so it was not encoded."""

    def __init__(self, least_tokens: int) -> None:
        """Take how many tokens it has at least."""
        super().__init__(least_tokens)
        self.least_tokens = least_tokens


class Renderer:
    """Writer of conversations, by the chat template of a tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_arguments: TemplateArguments | None = None,
        *,
        special_tokens: SpecialTokens = "escape",
    ) -> None:
        """Take the tokenizer, and what its template gets with every conversation.

        Args:
            special_tokens: What happens if a text spells a special token, see
                `data.special_tokens`. Nothing is refused here, since texts come from
                tools and from the policy itself: what it refuses is escaped.

        Raises:
            DataError: The tokenizer has no chat template.
        """
        require_chat_template(tokenizer)
        self.end_tokens = frozenset(end_tokens(tokenizer))
        self.tokenizer = tokenizer
        setting: SpecialTokens = "allow" if special_tokens == "allow" else "escape"
        self._spelled = SpelledTokens(tokenizer, setting)
        self._arguments = self._guarded(template_arguments or {})

        names = end_names(tokenizer)
        self._end = re.compile("|".join(map(re.escape, names)))
        self._closing = re.compile(rf"(?:\s|{self._end.pattern})*\Z")

    @property
    def writes_tools(self) -> bool:
        """Whether the template shows tools to the policy."""
        return "tools" in applied_template(self.tokenizer)

    def of_record(self, template_arguments: TemplateArguments) -> Renderer:
        """Return the same renderer with what a record gives to the template as well.

        It goes before what the run gives.
        """
        if not template_arguments:
            return self
        renderer = copy.copy(self)
        own = self._guarded(template_arguments)
        renderer._arguments = {**self._arguments, **own}
        return renderer

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, up to the beginning of the next turn.

        Args:
            most_tokens: Tokens that have a place; None is no limit.

        Raises:
            TextTooLong: The text has more tokens, whatever they are.
            DataError: The template refuses the messages, or does not write tools.
        """
        text = self.text(messages, tools, add_generation_prompt=True)
        return self._encode(text, most_tokens)

    def shortened(self, message: Message, most_tokens: int) -> Message:
        """Return a message whose content ends behind its first tokens, and says so.

        Args:
            most_tokens: Tokens of the content that stay.
        """
        content = message.get("content")
        if not isinstance(content, str):
            return message
        content = _plain(content)
        end = self._spelled.end_of_tokens(content, most_tokens)
        omitted = len(content) - end
        if not omitted:
            return message
        note = f"\n({omitted} characters left out)"
        return {**message, "content": content[:end] + note}

    def continuation(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        sampled_tokens: Sequence[int],
        *,
        finish: str = "stop",
        outline: Outline | None = None,
        most_tokens: int | None = None,
    ) -> list[int] | None:
        """Return the ids between a sampled turn and the next one.

        They are the end of the turn if it was not sampled, what the template writes
        behind it, the new messages, and the beginning of the next turn.

        Args:
            history: The conversation up to the sampled turn, itself included.
            new_messages: What came after it.
            sampled_tokens: The ids of the turn, as they were sampled.
            finish: How it ended, "stop" or "length".
            outline: Kinds of the messages before the turn, by which a long conversation
                costs no more than a short one; None writes it as a whole.
            most_tokens: Tokens that have a place; None is no limit.

        Returns:
            The ids; None if the conversation cannot be continued. That is so if the
            turn was cut by length, if it ended by another token than the template's, or
            if the template writes the history otherwise now or refuses it.

        Raises:
            TextTooLong: What follows has more tokens, whatever they are.
        """
        if finish == "length":
            return None

        def write(history: Sequence[Message]) -> str | None:
            return self._rest(history, new_messages, tools)

        if outline is None:
            rest = write(history)
        else:
            rest = outline.rest(history, new_messages, write)
        if rest is None:
            return None

        following = self._encode(rest, most_tokens)
        last = sampled_tokens[-1] if len(sampled_tokens) else None
        if last not in self.end_tokens:
            return following
        return following[1:] if following[:1] == [last] else None

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return a conversation as the template writes it.

        Special tokens that a message spells are stand-ins.

        Raises:
            DataError: The template refuses the messages, or does not write tools.
        """
        arguments = dict(self._arguments)
        if tools:
            if not self.writes_tools:
                raise DataError(
                    "there are tools, which the chat template of the model does not"
                    " show to the policy",
                    fix="take a model whose template does, or give it one with"
                    " data.chat_template",
                    place="a conversation",
                )
            arguments["tools"] = self._spelled.guard(_plain(tools), "tools")

        _require_messages(messages)
        conversation = self._spelled.guard(_plain(messages), "a conversation")
        (text,) = render(
            self.tokenizer,
            [conversation],
            add_generation_prompt=add_generation_prompt,
            where=lambda _: "a conversation",
            arguments=[arguments],
        )
        return text

    def written_turn(self, calls: int) -> str | None:
        """Return an answer, or a turn with calls of a tool `add`, as the template does.

        Args:
            calls: Number of the calls, at most 2; 0 is an answer.

        Returns:
            The text between the opening and the end of the turn; None if the template
            refuses such a turn, or does not write all of it.
        """
        arguments = ("11", "22")[:calls]
        turn = _calls(*arguments) if calls else _ANSWER
        tools = [_ADD] if calls else []
        try:
            before = self.text([_USER], tools, add_generation_prompt=False)
            opening = self.text([_USER], tools, add_generation_prompt=True)
            whole = self.text([_USER, turn], tools, add_generation_prompt=False)
        except DataError:
            return None
        # The opening may have a thought in it, which the turn is written without.
        text = whole.removeprefix(opening if whole.startswith(opening) else before)
        closing = self._closing.search(text)
        text = text[: closing.start()] if closing else text
        return text if all(of in text for of in arguments) else None

    def _rest(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> str | None:
        """Return what the template writes from the end of the history's last turn on.

        It begins with the token that ends the turn, if the template writes one there.
        None if the template changes what it has written before.
        """
        messages = [*history, *new_messages]
        try:
            before = self.text(history[:-1], tools, add_generation_prompt=False)
            past = self.text(history, tools, add_generation_prompt=False)
            whole = self.text(messages, tools, add_generation_prompt=True)
        # Some templates refuse the beginning of a conversation that they take.
        except DataError:
            return None
        if not past.startswith(before):
            return None
        if not whole.startswith(past):
            past = EMPTY_THOUGHT.sub("", past[len(before) :], count=1)
            past = before + past
            if not whole.startswith(past):
                return None

        # Nothing but ends of turns and white space stands behind the words of a turn.
        closing = self._closing.search(past, len(before))
        end = closing and self._end.search(past, closing.start())
        return whole[end.start() if end else len(past) :]

    def _guarded(self, arguments: TemplateArguments) -> dict[str, object]:
        """Return arguments of the template, whose texts are no special tokens."""
        where = "arguments of the chat template"
        return guarded_arguments(_plain(arguments), where, self._spelled)

    def _encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        if most_tokens is not None:
            least = self._spelled.least_tokens(text)
            if least > most_tokens:
                raise TextTooLong(least)
        encoded = self._spelled.encode(
            [text], special=False, where=lambda _: "a conversation"
        )
        tokens: list[int] = encoded.values.tolist()
        return tokens


def _require_messages(messages: Sequence[Message]) -> None:
    """Raise DataError if something is no message; a template would write nothing."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not _has_texts(message):
            raise DataError(
                f"message {number} is {excerpt(message)}",
                expected="a dict with the texts role and content",
                place="a conversation",
            )


def _has_texts(message: Message) -> bool:
    """Return whether a message has a role and a content."""
    if not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    # A turn may call tools without a word.
    return isinstance(content, str) or (content is None and "tool_calls" in message)


def _plain(value: Any) -> Any:
    """Return a value of mappings and sequences as dicts and lists, with texts that have
    an encoding.
    """
    if isinstance(value, str):
        return value if value.isascii() else _NO_CHARACTERS.sub(_REPLACEMENT, value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(part) for part in value]
    return value


# ---------------------------------------------------------------------------- preflight

_USER: Message = {"role": "user", "content": "1 + 1 = ?"}
_MORE: Message = {"role": "user", "content": "And 2 + 2?"}
_ANSWER: Message = {"role": "assistant", "content": "two"}
_THOUGHT = "<think>\nIt is easy.\n</think>\n\ntwo"
_CUT = "<think>\nIt is ea"
_NON_ASCII = "zwölf 漢字 🙂"
_ADD: ToolSchema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "string", "description": "The numbers."}},
            "required": ["of"],
        },
    },
}


def _calls(*arguments: str, content: str = "") -> Message:
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": {"of": of}}}
        for of in arguments
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(content: str) -> Message:
    return {"role": "tool", "name": "add", "content": content}


_TURNS: Mapping[str, tuple[Message, list[Message]]] = {
    "a plain answer": (_ANSWER, [_MORE]),
    "an answer with thinking, and then the user": (
        {"role": "assistant", "content": _THOUGHT},
        [_MORE],
    ),
    "an answer without thinking, and then a tool's result": (
        _calls("1, 1", content="I add."),
        [_result("2")],
    ),
    "a tool call with thinking, and then its result": (
        _calls("1, 1", content="<think>\nI add.\n</think>\n\n"),
        [_result("2")],
    ),
    "a tool call without words": (_calls("1, 1"), [_result("2")]),
    "two tool calls and their results": (
        _calls("1, 1", "2, 2"),
        [_result("2"), _result("4")],
    ),
    "an answer that is not ASCII": (
        {"role": "assistant", "content": _NON_ASCII},
        [{"role": "user", "content": _NON_ASCII}],
    ),
    "a tool call that is not ASCII": (_calls(_NON_ASCII), [_result(_NON_ASCII)]),
    "an empty answer": ({"role": "assistant", "content": ""}, [_MORE]),
    "an answer with white space around it": (
        {"role": "assistant", "content": " two \n"},
        [_MORE],
    ),
}
"""The turn of the policy in words -> the turn, and what comes after it."""


def prefix_problems(
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: TemplateArguments | None = None,
) -> list[str]:
    """Return in plain words where a chat template would break a row of several turns.

    Each case is a conversation of two turns. In a case without a problem the ids that
    a row gathers turn by turn are those of the whole conversation.

    Raises:
        DataError: The tokenizer has no chat template.
    """
    renderer = Renderer(tokenizer, template_arguments)
    problems = []
    has_tools = renderer.writes_tools and "tool_calls" in applied_template(tokenizer)
    if not has_tools:
        problems.append("tools: the chat template does not write them and their calls")

    for name, (turn, new_messages) in _TURNS.items():
        if "tool" in name and not has_tools:
            continue
        problem = _turn_problem(renderer, turn, new_messages)
        if problem is not None:
            problems.append(f"{name}: {problem}")

    cut: Message = {"role": "assistant", "content": _CUT}
    try:
        text = renderer.text([_USER, cut, _MORE], add_generation_prompt=True)
    except DataError as error:
        problems.append(f"an answer that was cut by length: {_reason(error)}")
    else:
        if _CUT.partition("\n")[2] not in text:
            rule = "the template leaves out what there is of it"
            problems.append(f"an answer that was cut by length: {rule}")
    return problems


def _turn_problem(
    renderer: Renderer, turn: Message, new_messages: list[Message]
) -> str | None:
    """Return why a row cannot hold a turn and the next one; None if it can."""
    tools = [_ADD] if turn.get("tool_calls") else []
    history = [_USER, turn]
    try:
        opening = renderer.text([_USER], tools, add_generation_prompt=True)
        past = renderer.text(history, tools, add_generation_prompt=False)
        whole = renderer.text(
            [*history, *new_messages], tools, add_generation_prompt=True
        )
    except DataError as error:
        return _reason(error)

    begins_row = "each such turn begins a new row"
    rest = renderer._rest(history, new_messages, tools)
    if rest is not None and not whole.startswith(past):
        return (
            "the template writes an empty thought into the last turn alone; the row"
            " goes on with what was sampled"
        )
    if rest is None:
        parted = f"{_parted(past, whole)!r} becomes {_parted(whole, past)!r}"
        return f"the template writes it otherwise afterwards ({parted}); {begins_row}"
    if not any(renderer._encode(rest)[:1] == [end] for end in renderer.end_tokens):
        return f"the template ends it by no token at which turns end; {begins_row}"

    # The policy writes calls as the template does, as far as anybody knows.
    words = str(turn["content"])
    sampled = whole[len(opening) : len(whole) - len(rest)]
    if not whole.startswith(opening) or (not tools and sampled != words):
        written = sampled if whole.startswith(opening) else _parted(whole, opening)
        return (
            f"the policy writes {words!r} behind {opening[-20:]!r}, and the template"
            f" {written!r}; rows hold what the policy wrote"
        )
    if tools and _NON_ASCII in str(turn) and _NON_ASCII not in sampled:
        return "the template escapes its characters; rows hold what the policy wrote"
    return None


def _reason(error: DataError) -> str:
    """Return in one line what a template has against messages."""
    return f"the template refuses it: {error.__cause__ or error.rule}"


def _parted(text: str, other: str) -> str:
    """Return a piece of a text from where it parts from another one."""
    pairs = enumerate(zip(text, other, strict=False))
    shared = next((at for at, (own, others) in pairs if own != others), 0)
    return text[shared : shared + 30]
