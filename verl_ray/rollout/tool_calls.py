"""Sampled tokens as actions: their text, and the tool calls that vLLM reads in it.

Invariant: the parsers are vLLM's. What one cannot read is a parse error that names the
parser, and never a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_ray.agents.contract import Action, ToolCall
from verl_ray.data.stages import Finish
from verl_ray.data.tokenizers import end_tokens, strip_special_tokens
from verl_ray.errors import ConfigError, Problem, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ActionReader:
    """Reads actions; see `ReadAction` of `episodes.py`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_parser: str | None
    ) -> None:
        """Take the tokenizer, and the name of the parser of tool calls.

        Raises:
            RolloutError: vLLM has no such parser, or it needs tokens that the model
                does not have.
        """
        self._tokenizer = tokenizer
        self._ends = set(end_tokens(tokenizer))
        self._name = tool_parser
        self._parser: Any = None
        if tool_parser is not None:
            self._parser = _parser_class(tool_parser)
            self._tokenizer = _with_lasting_vocabulary(tokenizer)
            try:
                self._parser(self._tokenizer)
            # Parsers raise what they like about a tokenizer that is not their model's.
            except Exception as error:
                raise RolloutError(
                    f"agent.tool_parser = {tool_parser}: vLLM's parser does not work"
                    f" with the model's tokenizer: {error}"
                ) from error

    def __call__(
        self, tokens: Sequence[int], finish: Finish, tools: Sequence[Any]
    ) -> Action:
        """Return what the environment sees of these tokens.

        Raises:
            ConfigError: There are tools, and no parser of their calls.
        """
        reason = finish.name.lower()
        written = list(tokens)
        if finish is Finish.STOP and written and written[-1] in self._ends:
            written.pop()
        # Names of special tokens that were sampled are no part of what was said.
        words = str(self._tokenizer.decode(written, skip_special_tokens=True))
        if not tools:
            return Action(tokens, words, finish=reason)
        if self._parser is None:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            rule = f"the environment offers tools ({names}), and no call would be read"
            fix = "Name vLLM's parser of the model's format, such as hermes."
            raise ConfigError([Problem("agent.tool_parser", None, rule, fix)])

        # Some models mark their calls by special tokens.
        text = str(self._tokenizer.decode(written, skip_special_tokens=False))

        parser = self._parser(self._tokenizer)
        try:
            read = parser.extract_tool_calls(text, _request(tools))
        # Parsers raise what they like about a text that they cannot read.
        except Exception as problem:
            why = f"{self._name} cannot read it: {problem}"
            return Action(tokens, words, finish=reason, parse_error=why)
        if not read.tools_called:
            error = self._unread(parser, text)
            return Action(tokens, words, finish=reason, parse_error=error)
        try:
            calls = [
                ToolCall(call.function.name, _arguments(call.function.arguments))
                for call in read.tool_calls
            ]
        except ValueError as problem:
            error = f"the arguments of a call are no JSON object: {problem}"
            return Action(tokens, words, finish=reason, parse_error=error)
        content = strip_special_tokens(read.content or "", self._tokenizer)
        return Action(tokens, content, calls, reason)

    def _unread(self, parser: Any, text: str) -> str | None:
        """Return why a text that begins a call has none; None if it begins none."""
        opening = getattr(parser, "tool_call_start_token", None)
        if isinstance(opening, str) and opening and opening in text:
            return f"{opening} does not begin a call that {self._name} can read"
        return None


def _arguments(text: str) -> dict[str, Any]:
    arguments = json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError(f"{type(arguments).__name__}")
    return arguments


def _request(tools: Sequence[Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[], tools=list(tools), model="")


def _with_lasting_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that builds its vocabulary once, and not for each parser.

    A parser may keep state, so there is a new one for each turn, which looks up its
    tokens. With 150,000 of them the vocabulary takes a tenth of a second to build.
    """
    from vllm.tokenizers.hf import get_cached_tokenizer

    lasting: PreTrainedTokenizerBase = get_cached_tokenizer(tokenizer)
    return lasting


def _parser_class(name: str) -> Any:
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise RolloutError(
            f"agent.tool_parser = {name}: vLLM has no such parser: {error}"
        ) from error
