"""Tool calls in a text, by one of vLLM's parsers.

vLLM's parsers give a text back as words where they cannot read the call in it, and some
complete a call that was cut. Whether a text holds such a call is asked of each parser
by what it does:

- Its streaming interface withholds what may become a call. A text of which it does not
  show everything, though more words have followed, begins a call.
- A parser that needs the end of a call reads fewer calls without the last character.
  One that completes calls shows what follows them, or reads them twice where they stand
  twice. A text in which neither is so ends within a call.
- The chat template writes calls as the model does. A text with more beginnings of calls
  than calls has one that is not read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ray.agents.contract import (
    MOST_NESTED,
    ToolCall,
    ToolSchema,
    nests_too_deep,
)
from verl_ray.data.tokenizers import strip_special_tokens
from verl_ray.errors import RolloutError
from verl_ray.rollout.texts import Beginnings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MORE = "\n\nSo be it."
"""Words that begin no call in any format."""

_BEGINNINGS = frozenset("<[{")
"""Characters of which every call has one."""

_TAGS: Mapping[str, str] = {"olmo3": "<function_calls>"}
"""Parser that withholds every text with a tag in front -> the tag of its own calls."""

_FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)

Read = list[tuple[str, str]]
"""Names of tools, and arguments in JSON."""


class CallParser:
    """Reads the tool calls of texts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        turns: Sequence[str | None],
    ) -> None:
        """Take the tokenizer, the name of vLLM's parser, and turns of the template.

        Args:
            turns: An answer, a turn with one call, and a turn with two, as
                `Renderer.written_turn` returns them, without thoughts.

        Raises:
            RolloutError: vLLM has no such parser, or it needs tokens that the model
                does not have.
        """
        self._name = name
        self._tokenizer = tokenizer
        self._class = _parser_class(name)
        try:
            parser = self._class(tokenizer)
        # Parsers raise what they like about a tokenizer that is not their model's.
        except Exception as error:
            raise RolloutError(
                f"agent.tool_parser = {name}: vLLM's parser does not work"
                f" with the model's tokenizer: {error}"
            ) from error
        # What a parser cannot read is told by the error of the action.
        for package in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(package).setLevel(logging.CRITICAL)
        self._bot_token = str(getattr(parser, "bot_token", ""))
        self._more = self._encoded(_MORE)

        answer, single, pair = turns
        self._takes_several = single is None or pair is not None
        # A parser that withholds words too, or that does not know the end of a call of
        # the template's, cannot be asked.
        request = _request([{"type": "function", "function": {"name": "add"}}])
        words = ["Yes.", *([] if answer is None else [answer])]
        self._shows_words = all(self._shows(text, request) for text in words)
        read = [] if single is None else self._extracted(single, request)
        self._opening = _opening(pair) if pair is not None and read else ""
        self._knows_ends = not read or self._is_whole(str(single), read, request)

    def read(self, text: str, tools: Sequence[Any]) -> tuple[list[ToolCall], str]:
        """Return the calls in a text, and the words in front of them.

        Raises:
            ValueError: It has a call that cannot be read; the message says why.
        """
        request = _request(tools)
        try:
            parsed = self._class(self._tokenizer).extract_tool_calls(text, request)
        # Parsers raise what they like about a text that they cannot read.
        except Exception as error:
            raise ValueError(f"{self._name} cannot read it: {error}") from error
        read, words = _read(parsed), str(parsed.content or "")
        if not read:
            names = [str(tool["function"]["name"]) for tool in tools]
            if parsed.tools_called or self._begins_call(text, words, names, request):
                raise ValueError(f"it begins a call that {self._name} cannot read")
            return [], text

        is_more = bool(self._opening) and text.count(self._opening) > len(read)
        if is_more or (self._knows_ends and not self._is_whole(text, read, request)):
            raise ValueError(
                f"it has a call that {self._name} cannot read, its last one or one more"
            )
        if len(read) > 1 and not self._takes_several:
            raise ValueError(
                f"it has {len(read)} calls, and the model's chat template takes one"
            )
        if not all(name for name, _ in read):
            raise ValueError("it has a call without the name of a tool")
        return [
            ToolCall(name, _arguments(json_text)) for name, json_text in read
        ], words

    def growing(self, tools: Sequence[Any]) -> GrowingReply:
        """Return what shows the words of a text while it grows."""
        parser = self._class(self._tokenizer)
        return GrowingReply(parser, _request(tools), self._encoded, self._opening)

    def format_of(self, tools: Sequence[ToolSchema]) -> dict[str, Any] | None:
        """Return one or several calls of tools as a format of xgrammar.

        Returns:
            None where vLLM has no grammar of what this parser reads.
        """
        parser = self._class(self._tokenizer)
        # Earlier versions know none.
        if getattr(parser, "structural_tag_model", None) is None:
            return None
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

        # Arguments are those of the schema, or any object.
        whole = [
            {**tool, "function": {"parameters": {"type": "object"}, **tool["function"]}}
            for tool in tools
        ]
        request = _request(whole)
        request.tool_choice = "required"
        tag = parser.get_structural_tag(request, strict_level=ToolStrictLevel.PARAMETER)
        content: dict[str, Any] = tag.model_dump()["format"]
        return content

    def _begins_call(
        self, text: str, words: str, names: Sequence[str], request: Any
    ) -> bool:
        """Return whether a text in which no call was read begins one.

        Args:
            words: What the parser gave back of it.
            names: The names of the tools.
        """
        start = text.lstrip()
        if self._bot_token and start.startswith(self._bot_token):
            return True
        if not _BEGINNINGS.intersection(text):
            return False
        if self._opening and self._opening in text:
            return True
        if self._name in _TAGS:
            tag = _TAGS[self._name]
            return tag in text or tag.startswith(start)
        text, words = _without_data(text, names), _without_data(words, names)
        start = text.lstrip()
        # A list or an object that is not JSON may be an answer, too.
        is_data = start.startswith(("[", "{"))
        if is_data and not any(name in text for name in (*names, '"name"')):
            return False
        if not self._shows_words:
            return bool(start) and not words.strip()
        is_kept = self._plain(words) == self._plain(text)
        return not is_kept or not self._shows(text, request)

    def _is_whole(self, text: str, read: Read, request: Any) -> bool:
        """Return whether a text ends behind the calls that were read in it."""
        if len(self._extracted(text.rstrip()[:-1], request)) < len(read):
            return True
        if self._extracted(text + text, request) == read + read:
            return True
        return self._streamed(text, request).endswith(_MORE.strip())

    def _shows(self, text: str, request: Any) -> bool:
        """Return whether all of a text is streamed as words."""
        return self._plain(self._streamed(text, request)) == self._plain(text + _MORE)

    def _encoded(self, text: str) -> list[int]:
        """Return the tokens of a text; none where the vocabulary lacks its characters.

        Parsers look for special tokens among them.
        """
        try:
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            # `tokenizers` has no type of its own for a character without a token.
            if type(error) is not Exception:
                raise
            return []
        return list(tokens)

    def _plain(self, text: str) -> str:
        return "".join(strip_special_tokens(text, self._tokenizer).split())

    def _extracted(self, text: str, request: Any) -> Read:
        """Return the calls that are read in a text; none where the parser raises."""
        try:
            parsed = self._class(self._tokenizer).extract_tool_calls(text, request)
        except Exception:
            return []
        return _read(parsed)

    def _streamed(self, text: str, request: Any) -> str:
        """Return the words that are streamed of a text and of more words behind it."""
        parser = self._class(self._tokenizer)
        tokens = self._encoded(text)
        both, whole = [*tokens, *self._more], text + _MORE
        stream = parser.extract_tool_calls_streaming
        try:
            deltas = [
                stream("", text, text, [], tokens, tokens, request),
                stream(text, whole, _MORE, tokens, both, self._more, request),
            ]
            if hasattr(parser, "finish_streaming"):
                deltas.append(parser.finish_streaming())
        except Exception:
            return ""
        return "".join(delta.content or "" for delta in deltas if delta is not None)


class GrowingReply:
    """The words of a growing text in which tools may be called.

    They are those that the parser streams, as long as they are the beginning of the
    text. Behind the first call nothing is shown.
    """

    def __init__(
        self,
        parser: Any,
        request: Any,
        encoded: Callable[[str], list[int]],
        opening: str,
    ) -> None:
        """Take a parser of its own, which keeps state, and what encodes a text.

        Args:
            opening: What calls begin with, and words do not; empty if unknown. Some
                parsers stream it as words.
        """
        self._parser = parser
        self._request = request
        self._encoded = encoded
        self._opening = opening
        self._beginnings = Beginnings([opening])
        self._text = ""
        self._tokens: list[int] = []
        self._num_streamed = self._num_shown = 0
        self._is_over = False

    @property
    def num_held(self) -> int:
        """Characters that are not shown."""
        return len(self._text) - self._num_shown

    def add(self, piece: str) -> str:
        """Add a piece of the text; return further words."""
        if self._is_over:
            return ""
        before, tokens, new = self._text, self._tokens, self._encoded(piece)
        self._text, self._tokens = before + piece, [*tokens, *new]
        try:
            delta = self._parser.extract_tool_calls_streaming(
                before, self._text, piece, tokens, self._tokens, new, self._request
            )
        # Parsers raise what they like about a text that they cannot read.
        except Exception:
            self._is_over = True
            return ""
        words = str(delta.content or "") if delta is not None else ""
        if not self._text.startswith(words, self._num_streamed):
            self._is_over = True
            return ""
        self._num_streamed += len(words)
        self._is_over = delta is not None and bool(delta.tool_calls)
        return self._shown_to(min(self._num_streamed, self._last_place()))

    def _last_place(self) -> int:
        """Return how many characters cannot be part of the opening of a call."""
        place = self._text.find(self._opening, self._num_shown) if self._opening else -1
        if place >= 0:
            self._is_over = True
            return place
        return len(self._text) - self._beginnings.length_in(self._text)

    def _shown_to(self, end: int) -> str:
        words = self._text[self._num_shown : end]
        self._num_shown += len(words)
        return words


def with_lasting_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that builds its vocabulary once, and not for each parser.

    A parser may keep state, so there is a new one for each text, which looks up its
    tokens. With 150,000 of them the vocabulary takes a tenth of a second to build.
    """
    from vllm.tokenizers.hf import get_cached_tokenizer

    lasting: PreTrainedTokenizerBase = get_cached_tokenizer(tokenizer)
    return lasting


def _opening(turn: str) -> str:
    """Return what stands in front of each name in a turn with two calls of `add`.

    It is empty if that is no tag: arguments may have the same in JSON.
    """
    first, _, rest = turn.partition("add")
    second, _, _ = rest.partition("add")
    most = min(len(first), len(second))
    length = next((n for n in range(most) if first[-n - 1] != second[-n - 1]), most)
    shared = first[len(first) - length :].lstrip()
    return shared if "<" in shared else ""


def _without_data(text: str, names: Sequence[str]) -> str:
    """Return a text without the JSON in it that is an answer, whole or in a fence.

    Args:
        names: The names of the tools.
    """
    if _is_data(text, names):
        return ""
    return _FENCED.sub(lambda at: "" if _is_data(at[1], names) else at[0], text)


def _is_data(text: str, names: Sequence[str]) -> bool:
    """Return whether a text is JSON in which no object calls a tool."""
    objects: list[dict[str, Any]] = []

    def keep(value: dict[str, Any]) -> dict[str, Any]:
        objects.append(value)
        return value

    try:
        value = json.loads(text, object_hook=keep)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list | dict) and not any(
        "name" in value
        and (value["name"] in names or "arguments" in value or "parameters" in value)
        for value in objects
    )


def _read(parsed: Any) -> Read:
    calls = (call.function for call in parsed.tool_calls)
    return [(str(call.name), str(call.arguments)) for call in calls]


def _arguments(text: str) -> dict[str, Any]:
    problem = "the arguments of a call are no JSON object"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{problem}: {type(arguments).__name__}")
    if nests_too_deep(arguments):
        raise ValueError(
            f"the arguments of a call have more than {MOST_NESTED} levels of lists and"
            " objects"
        )
    return arguments


def _request(tools: Sequence[Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[], tools=list(tools), model="")


def _parser_class(name: str) -> Any:
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise RolloutError(
            f"agent.tool_parser = {name}: vLLM has no such parser: {error}"
        ) from error
