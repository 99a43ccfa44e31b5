"""One response to score, as every kind of scorer receives it.

Invariant: a request holds plain values alone, so that it can be pickled and sent as
JSON.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Conversation = str | list[dict[str, object]]
"""A prompt as the data set has it: a text or messages."""

RequestRow = tuple[Any, ...]
"""The fields of a request in their order; a tuple is pickled several times faster."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score, and what is known about it."""

    response: str
    """The decoded response, without special tokens."""
    answer: str | None
    """The record's answer; None where it has none."""
    prompt: str
    """The record's prompt; for messages their contents, with empty lines between."""
    data_source: str
    extra: dict[str, object]
    """The record's other columns, as plain values.

    They are pickled: the class of any other value would have to be importable in the
    scoring process.
    """
    num_tokens: int = 0
    """Tokens of the response, the end token included."""
    finish_reason: str = "stop"
    """Why the response ended: stop, length or aborted."""
    step: int = 0
    """The training step that is made; in an evaluation the last step of the policy."""
    group: int = 0
    """The responses to one prompt have the same number."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Token ids of the response; empty where no function needs them."""
    conversation: Conversation = ""
    """The prompt as the data set has it; empty where no function needs it."""
    is_held_out: bool = False
    """Whether the response is of an evaluation, whose scores also hold the answer that
    a built-in function reads (`built_in.py`)."""

    def row(self, *, tokens: bool, conversation: bool) -> RequestRow:
        """Return what `ScoreRequest(*row)` is made of again.

        Args:
            tokens: Whether `tokens` are part of it, and not left empty.
            conversation: Whether `conversation` is part of it, and not left empty.
        """
        return (
            self.response,
            self.answer,
            self.prompt,
            self.data_source,
            self.extra,
            self.num_tokens,
            self.finish_reason,
            self.step,
            self.group,
            self.tokens if tokens else [],
            self.conversation if conversation else "",
            self.is_held_out,
        )
