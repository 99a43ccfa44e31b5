"""Sampled tokens as actions: their thoughts, their text, and the tool calls in it.

Invariant: the parsers are vLLM's. What one cannot read is a parse error that names the
parser, and never a call. Thoughts are taken out first: a call in them is a thought.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_ray.agents.contract import Action, Constraint, ToolSchema
from verl_ray.agents.template import Renderer
from verl_ray.agents.thoughts import USUAL_PARSER, reasoning_parser_of
from verl_ray.columns.stages import Finish
from verl_ray.data.tokenizers import (
    TemplateArguments,
    applied_template,
    end_tokens,
    special_names,
    strip_special_tokens,
)
from verl_ray.errors import ConfigError, Problem, RolloutError
from verl_ray.rollout.call_parser import CallParser, with_lasting_vocabulary
from verl_ray.rollout.grammars import Format, grammar_of
from verl_ray.rollout.growing import GrowingTurn, Marks, SpecialNames
from verl_ray.rollout.texts import GrowingText
from verl_ray.rollout.turns import ReadAction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_OF_A_MARK = 64
"""Tokens that the beginning of a thought has at most, with white space behind it."""


class ActionReader:
    """Reads actions; see `ReadAction`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_parser: str | None,
        reasoning_parser: str | None = "auto",
        template_arguments: TemplateArguments | None = None,
    ) -> None:
        """Take the tokenizer, and the names of vLLM's parsers.

        Args:
            tool_parser: The parser of tool calls; None if nothing offers tools.
            reasoning_parser: The parser of thoughts; None if thoughts are text. "auto"
                is that of the chat template.
            template_arguments: What the chat template gets with every conversation.

        Raises:
            RolloutError: vLLM has no such parser, or it needs tokens that the model
                does not have.
        """
        self._ends = set(end_tokens(tokenizer))
        self._names = SpecialNames(special_names(tokenizer))
        self._tokenizer = tokenizer
        if tool_parser is not None:
            self._tokenizer = with_lasting_vocabulary(tokenizer)
        template = applied_template(tokenizer)
        renderer = Renderer(tokenizer, template_arguments) if template else None

        self._thoughts: _Thoughts | None = None
        # Whether a turn may begin with a thought, as far as is known.
        self._thinks = True
        if reasoning_parser == "auto":
            template_parser = reasoning_parser_of(template)
            self._thinks = template_parser is not None
            reasoning_parser = template_parser or USUAL_PARSER
        if reasoning_parser is not None:
            self._thoughts = _Thoughts(self._tokenizer, reasoning_parser)
        self._calls: CallParser | None = None
        if tool_parser is not None:
            turns: list[str | None] = [None] * 3
            if renderer is not None:
                turns = [renderer.written_turn(calls) for calls in range(3)]
            replies = [turn and self._parts(turn).reply for turn in turns]
            self._calls = CallParser(self._tokenizer, tool_parser, replies)

    def behind(self, prompt: Sequence[int]) -> ReadAction:
        """Return a reader of the tokens behind a prompt, which may begin a thought."""
        return partial(self.__call__, prompt=prompt)

    def __call__(
        self,
        tokens: Sequence[int],
        finish: Finish,
        tools: Sequence[Any],
        prompt: Sequence[int] = (),
    ) -> Action:
        """Return what the environment sees of the tokens of a turn.

        Args:
            tokens: The tokens of the turn.
            prompt: Those in front of it.

        Raises:
            ConfigError: There are tools, and no parser of their calls.
        """
        reason = finish.name.lower()
        written = list(tokens)
        if finish is Finish.STOP and written and written[-1] in self._ends:
            written.pop()
        # Some models mark their thoughts and calls by special tokens.
        whole = str(self._tokenizer.decode(written, skip_special_tokens=False))
        parts = self._parts(whole, self._end_of(prompt))

        # Names of special tokens that were sampled are no part of what was said.
        words, everything = self._words(parts.reply), self._written(parts.pieces)
        as_text = Action(
            tokens,
            words,
            finish=reason,
            reasoning=self._words(parts.reasoning).strip(),
            content=everything if everything != words else None,
        )
        if not tools:
            return as_text
        if self._calls is None:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            rule = f"the environment offers tools ({names}), and no call would be read"
            fix = "Name vLLM's parser of the model's format, such as hermes."
            raise ConfigError([Problem("agent.tool_parser", None, rule, fix)])

        try:
            calls, rest = self._calls.read(parts.reply, tools)
        except ValueError as error:
            return replace(as_text, parse_error=str(error))
        if not calls:
            return as_text
        content = None
        if parts.has_thoughts:
            content = self._written(parts.pieces_around(rest))
        text = self._words(rest)
        return replace(as_text, text=text, tool_calls=calls, content=content)

    def growing(
        self, prompt: Sequence[int], tools: Sequence[Any], stop: Sequence[str]
    ) -> GrowingTurn:
        """Return a turn that grows behind a prompt; see `ReadsGrowing`."""
        marks, is_open = None, False
        if self._thoughts is not None:
            marks = self._thoughts.marks
            is_open = self._thoughts.is_open_behind(self._end_of(prompt))
        return GrowingTurn(
            GrowingText(self._tokenizer, spells_special_tokens=True),
            marks,
            self._names,
            self._calls.growing(tools) if tools and self._calls else None,
            stop,
            is_open=is_open,
        )

    def grammar(
        self,
        constraint: Constraint,
        tools: Sequence[ToolSchema],
        prompt: Sequence[int],
    ) -> str:
        """Return the grammar of a constrained turn; see `grammar_of`.

        Args:
            prompt: The tokens in front of the turn.

        Raises:
            CallRefused: It cannot be held to.
        """
        thoughts: Format | None = None
        if self._thoughts is not None:
            before = self._end_of(prompt)
            thoughts = self._thoughts.format_behind(before, may_begin=self._thinks)
        format_of_calls = self._calls.format_of if self._calls else lambda _: None
        return grammar_of(constraint, tools, format_of_calls, thoughts)

    def _end_of(self, prompt: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(prompt[-_MOST_OF_A_MARK:])))

    def _parts(self, text: str, prompt: str = "") -> _Parts:
        if self._thoughts is None:
            return _Parts([text], "", text)
        return self._thoughts.divide(text, prompt)

    def _written(self, pieces: Sequence[str]) -> str:
        """Return pieces of a text without special tokens, but for marks of thoughts."""
        return "".join(
            piece if at % 2 else self._words(piece) for at, piece in enumerate(pieces)
        )

    def _words(self, text: str) -> str:
        return strip_special_tokens(text, self._tokenizer)


class _Parts(NamedTuple):
    """A sampled text in its parts.

    Attributes:
        pieces: Words, a mark, a thought, a mark, words and so on. A mark that the
            text lacks is empty.
        reasoning: The thoughts.
        reply: The rest.
    """

    pieces: Sequence[str]
    reasoning: str
    reply: str

    @property
    def has_thoughts(self) -> bool:
        return len(self.pieces) > 1

    def pieces_around(self, words: str) -> list[str]:
        """Return the pieces with no more of the reply than the words it begins with.

        Words that are not its beginning stand behind the thoughts.
        """
        reply = "".join(self.pieces[::4])
        margin = len(reply) - len(reply.lstrip())
        is_beginning = reply.startswith(words, margin)
        num_kept = margin + len(words) if is_beginning else 0

        pieces = list(self.pieces)
        for at in range(0, len(pieces), 4):
            pieces[at] = pieces[at][:num_kept]
            num_kept -= len(pieces[at])
        if not is_beginning:
            pieces[-1] = words
        return pieces


class _Thoughts:
    """Divides thoughts from what is said, by the marks that vLLM's parser has.

    Some of these parsers end a thought where a call begins in it, and would have the
    call executed. Here a thought ends by its mark alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Take the tokenizer, and the name of the parser.

        Raises:
            RolloutError: vLLM has no such parser, it does not work with the tokenizer,
                or it knows no marks.
        """
        from vllm.reasoning import ReasoningParserManager

        key = f"agent.reasoning_parser = {name}"
        try:
            parser: Any = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        except KeyError as error:
            raise RolloutError(f"{key}: vLLM has no such parser: {error}") from error
        # Parsers raise what they like about a tokenizer that is not their model's.
        except Exception as error:
            raise RolloutError(
                f"{key}: vLLM's parser does not work with the model's tokenizer:"
                f" {error}"
            ) from error
        start, end = parser.reasoning_start_str, parser.reasoning_end_str
        if not start or not end:
            raise RolloutError(
                f"{key}: this parser of vLLM has no marks around thoughts; name one"
                " that has, such as qwen3, or null"
            )

        self.marks = Marks(start, end)
        block = f"({re.escape(start)})(.*?)({re.escape(end)}|\\Z)"
        self._block = re.compile(block, re.DOTALL)

    def is_open_behind(self, prompt: str) -> bool:
        """Return whether a prompt has begun a thought; templates of some models do."""
        return prompt.rstrip().endswith(self.marks.start)

    def format_behind(self, prompt: str, *, may_begin: bool) -> Format | None:
        """Return the format of a thought behind a prompt; None for no thought.

        Args:
            prompt: The end of the prompt, which may begin the thought.
            may_begin: Whether a turn may begin one.
        """
        start, end = self.marks
        content = {"type": "any_text"}
        thought = {"type": "tag", "begin": "", "content": content, "end": end}
        if self.is_open_behind(prompt):
            return thought
        if not may_begin:
            return None
        return {"type": "optional", "content": {**thought, "begin": start}}

    def divide(self, text: str, prompt: str) -> _Parts:
        """Return the parts of a sampled text.

        A thought that is not closed is everything that follows its beginning.

        Args:
            prompt: The end of what is in front of it.
        """
        is_open = self.is_open_behind(prompt)
        end = text.find(self.marks.end)
        start = text.find(self.marks.start)
        is_closed = end >= 0 and (start < 0 or end < start)
        opened = ""
        # A model may write the mark again that its template has written.
        if is_closed or (is_open and not text.lstrip().startswith(self.marks.start)):
            opened = self.marks.start

        pieces = self._block.split(opened + text)
        if len(pieces) == 1:
            return _Parts(pieces, "", text)
        if opened:
            pieces[1] = ""
        reply = "".join(pieces[::4]).lstrip()
        return _Parts(pieces, "\n".join(pieces[2::4]), reply)
