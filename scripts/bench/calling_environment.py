"""An environment for measuring: every turn of any policy calls a tool.

Invariant: a call costs what one costs that a policy writes: its turn is searched for
calls, the arguments are checked and converted, and the result is a message.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from verl_ray.agents.contract import (
    Action,
    EpisodeTask,
    Observation,
    Step,
    ToolCall,
)
from verl_ray.agents.tools import ToolEnvironment


def share(amount: int, parts: int, rounded: bool = True) -> str:
    """Divide an amount into equal parts.

    Args:
        amount: What is divided.
        parts: Into how many.
        rounded: Whether the result is a whole number.
    """
    result = Fraction(amount, parts)
    return str(round(result) if rounded else result)


_CALL = ToolCall("share", {"amount": 1000, "parts": 7})


class CallingEnvironment(ToolEnvironment):
    """A conversation that ends by a limit, with one call in each turn."""

    def __init__(self) -> None:
        """Take the tool."""
        super().__init__([share])

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Ask for something."""
        begin = await super().reset(task, seed)
        question = {"role": "user", "content": "Divide 1000 by 7."}
        return Observation([question], begin.tools)

    async def step(self, action: Action) -> Step:
        """Execute the call, whatever the policy has written."""
        return await super().step(replace(action, tool_calls=(_CALL,), finish="stop"))
