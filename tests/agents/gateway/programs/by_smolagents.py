"""An agent of the package smolagents, a command as its user would write it."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

from smolagents import CodeAgent, OpenAIModel


def main() -> None:
    """Let the agent answer, and post what that is worth."""
    task = json.load(sys.stdin)
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = OpenAIModel("policy", api_base=url, api_key=key)
    agent = CodeAgent(tools=[], model=model, max_steps=2)
    answer = str(agent.run(task["messages"][-1]["content"]))
    request = urllib.request.Request(
        f"{url}/reward",
        json.dumps({"reward": min(1.0, len(answer) / 40)}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()


if __name__ == "__main__":
    main()
