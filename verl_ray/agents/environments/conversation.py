"""Messages that an environment adds to a conversation.

Invariant: the messages of a task are never changed; a conversation is a new list.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_ray.agents.contract import Action, End, Message


def opening(messages: Sequence[Message], text: str) -> list[Message]:
    """Return a task's messages with a text of the environment behind them.

    Some chat templates refuse two messages of the user in a row. So where the last
    message is the user's text, the environment's text follows in the same message.
    """
    conversation = [dict(message) for message in messages]
    last = conversation[-1] if conversation else {}

    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return [*conversation, user(text)]
    joined = f"{last['content'].rstrip()}\n\n{text}".lstrip()
    return [*conversation[:-1], {**last, "content": joined}]


def end_of(answer: Action) -> End:
    """Return how an episode ends whose last turn is its answer: it may be cut."""
    return End.MAX_TOKENS if answer.finish == "length" else End.COMPLETED


def user(text: str) -> Message:
    """Return a text as a message of the user, for whom the environment speaks."""
    return {"role": "user", "content": text}
