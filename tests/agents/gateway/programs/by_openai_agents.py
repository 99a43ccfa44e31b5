"""An agent of the package openai-agents, a command as its user would write it."""

from __future__ import annotations

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    """Let the agent answer, and say what that is worth."""
    set_tracing_disabled(True)
    with open(os.environ["VERL_RAY_TASK"]) as file:  # noqa: PTH123
        task = json.load(file)
    agent = Agent(name="adder", instructions="Add with the tool.", tools=[add])
    result = Runner.run_sync(agent, task["messages"][-1]["content"], max_turns=3)
    print(min(1.0, len(str(result.final_output)) / 40))


if __name__ == "__main__":
    main()
