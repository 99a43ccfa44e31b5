"""A person who takes the turns of the policy, for the command `play`.

Invariant: what is typed has tokens, or is typed again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.agents.contract import (
    Action,
    Constraint,
    End,
    EpisodeEnded,
    Listener,
    Sampled,
    ToolCall,
    ToolSchema,
)
from verl_ray.agents.tools import call_text
from verl_ray.data.encoding import encode
from verl_ray.errors import DataError
from verl_ray.rollout.texts import GrowingText
from verl_ray.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN_CALL = re.compile(r"([A-Za-z_]\w*)\(.*\)")
"""A line that looks like a call of a tool."""


@dataclass
class Person:
    """A sampler whose turns are typed, a line each."""

    tokenizer: PreTrainedTokenizerBase
    end: int
    """The token at which a turn ends."""
    read_line: Callable[[], str]
    """Returns a line with its end; an empty text where there are no more."""

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        """Return the next line as a turn.

        Raises:
            EpisodeEnded: There are no more lines.
        """
        action, encoded = self._typed([_name(tool) for tool in tools])
        text = GrowingText(self.tokenizer, stop, spells_special_tokens=True)
        count, _ = text.add(encoded, last=True)
        if count < len(encoded):
            # What stands behind a text that ends the turn was never written.
            action = Action((), str(self.tokenizer.decode(encoded[:count])))
        sampled = encoded[:count] if text.stopped else [*encoded, self.end]
        finish = "stop" if len(sampled) <= max_tokens else "length"
        if finish == "length":
            sampled = sampled[:max_tokens]
            action = Action((), str(self.tokenizer.decode(sampled)))
        typed = Action(
            sampled, action.text, action.tool_calls, finish, action.parse_error
        )
        return Sampled(sampled, [0.0] * len(sampled), [(0, 0)], typed)

    def _typed(self, tools: Sequence[str]) -> tuple[Action, list[int]]:
        """Return the next line that the model could write, and its tokens."""
        # Each round takes a line; ends at one with tokens, or with the last line.
        while line := self.read_line():
            action = typed_action(line.rstrip("\r\n"), tools)
            unknown = _UNKNOWN_CALL.fullmatch(action.text.strip())
            if tools and unknown is not None and action.parse_error is None:
                fix = did_you_mean(unknown[1], tools, "tool")
                print(f"--- a text, since no tool is {unknown[1]}. {fix}", flush=True)
            text = "".join((action.text, *map(call_text, action.tool_calls)))
            try:
                columns = encode(
                    self.tokenizer, [text], special=False, where=lambda _: "a turn"
                )
            except DataError as error:
                print(f"--- type it again: {error}", flush=True)
                continue
            return action, columns[0].tolist()
        raise EpisodeEnded(End.ABORTED)


def _name(tool: ToolSchema) -> str:
    return str(tool["function"]["name"])


def typed_action(line: str, tools: Sequence[str]) -> Action:
    """Return what a line says: calls of tools as in Python, or words.

    A line is a call where it begins with the name of a tool and a bracket.
    """
    if not any(line.lstrip().startswith(f"{name}(") for name in tools):
        return Action([], line)
    try:
        body = ast.parse(line.strip(), mode="eval").body
        nodes = body.elts if isinstance(body, ast.Tuple) else [body]
        return Action([], "", [_typed_call(node) for node in nodes])
    except SyntaxError as error:
        reason = f"{error.msg}; write NAME(argument='a text')"
    except (ValueError, MemoryError, RecursionError) as error:
        reason = str(error)
    return Action([], line, parse_error=reason)


def _typed_call(node: ast.expr) -> ToolCall:
    """Return a call of a tool.

    Raises:
        ValueError: It is none, or an argument has no name or no plain value.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("write NAME(argument=value)")
    if node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("each argument needs its name: NAME(argument=value)")
    arguments = {str(each.arg): _typed_value(each) for each in node.keywords}
    return ToolCall(node.func.id, arguments)


def _typed_value(argument: ast.keyword) -> object:
    """Return the value of an argument.

    Raises:
        ValueError: It is no plain value.
    """
    try:
        return ast.literal_eval(argument.value)
    except (ValueError, TypeError):
        text = ast.unparse(argument.value)
        raise ValueError(
            f"{argument.arg}={text} is no plain value; a text has quotes:"
            f" {argument.arg}={text!r}"
        ) from None
