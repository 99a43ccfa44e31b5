"""A calculator as a tool, for arithmetic problems of a data set.

Invariant: an expression is bounded before it is parsed, and is never run as Python. So
time and memory of a call are bounded whatever the policy writes.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from verl_ray.agents.contract import (
    Action,
    EpisodeTask,
    Message,
    Observation,
    Step,
    ToolCall,
    ToolSchema,
)
from verl_ray.agents.environments.conversation import end_of, user
from verl_ray.errors import DataError
from verl_ray.rewards.functions import final_number, gsm8k

MOST_CHARACTERS = 200
"""Longest expression. Without powers no result has more digits than its expression."""

_SIGNIFICANT_DIGITS = 12

_ALLOWED = re.compile(r"[0-9+\-*/%() \t]*")

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}

CALCULATE: ToolSchema = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Integers, + - * / // % and parentheses, such as"
                    " 12 * (3 + 4).",
                }
            },
            "required": ["expression"],
        },
    },
}


class NotComputable(ValueError):
    """An expression has no value here; the message tells the policy why."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression.

    Raises:
        NotComputable: It is too long, has other things than integers, + - * / // % and
            parentheses, cannot be parsed, or divides by zero.
    """
    if len(expression) > MOST_CHARACTERS:
        raise NotComputable(f"an expression has at most {MOST_CHARACTERS} characters")
    rule = "an expression has only integers, + - * / // % and parentheses"
    if not _ALLOWED.fullmatch(expression):
        raise NotComputable(rule)

    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise NotComputable("the expression cannot be parsed") from None

    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise NotComputable("division by zero") from None
    except KeyError:
        raise NotComputable(rule) from None


def _value(node: ast.expr) -> Fraction:
    """Return the value of a node.

    Raises:
        KeyError: It is none of the operations.
    """
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=before, op=op, right=after):
            operation = _OPERATIONS[type(op)]
            return operation(_value(before), _value(after))
        case _:
            raise KeyError(type(node))


def calculate(expression: str) -> str:
    """Return the value of an expression as text, or `error: ` and the reason.

    A value that is no integer is rounded to 12 significant digits.
    """
    try:
        value = evaluate(expression)
    except NotComputable as error:
        return f"error: {error}"

    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = _SIGNIFICANT_DIGITS
        return str(Decimal(value.numerator) / Decimal(value.denominator))


class Calculator:
    """An arithmetic problem with a calculator.

    The record's messages are the problem, and its answer the right number. A turn with
    tool calls gets a message for each of them; a wrong call is answered by what is
    wrong with it. The first turn without one is the answer: its last number is worth 1
    where it is right, else 0. The number of turns and calls is the runner's to limit.
    """

    def __init__(self) -> None:
        """Have no problem yet."""
        self._answer = ""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Take the problem of a record; the seed has no effect.

        Raises:
            DataError: The record has no number as its answer.
        """
        if task.answer is None or final_number(task.answer) is None:
            shown = "none" if task.answer is None else repr(task.answer[-80:])
            raise DataError(f"the answer is {shown}", "a number", place="Calculator")

        self._answer = task.answer
        return Observation([dict(message) for message in task.messages], [CALCULATE])

    async def step(self, action: Action) -> Step:
        """Compute what the policy wants computed, or score its answer."""
        if action.parse_error is not None:
            text = f"The tool call could not be parsed: {action.parse_error}"
            return Step([user(text)])
        if action.tool_calls:
            return Step([_reply(call) for call in action.tool_calls])
        reward = gsm8k(action.text, self._answer)
        return Step(reward=reward, done=True, end=end_of(action))

    async def close(self) -> None:
        """Do nothing: the environment holds nothing."""


def _reply(call: ToolCall) -> Message:
    expression = call.arguments.get("expression")
    if call.name != "calculate":
        content = f"error: there is no tool {call.name[:80]}, only calculate"
    elif len(call.arguments) != 1 or not isinstance(expression, str):
        content = "error: calculate takes one argument, expression, which is a text"
    else:
        content = calculate(expression)
    return {"role": "tool", "name": call.name, "content": content}
