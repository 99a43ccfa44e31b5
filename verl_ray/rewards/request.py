"""Responses to score, and the messages between the pool and a scoring process.

To the process: `start` with its functions, then `units`, whose bytes are the pickle of
a list of units, each a list of rows of requests. From the process: `ready` with what
the functions need, or `broken`; `started` once the first unit of a message is in hand;
and `scored` with the scores of a unit. Each but `broken` has a time in seconds on the
monotonic clock that all processes of a machine share. The pool unpickles no data from
the process, which runs user code.

Invariant: a request, which every kind of scorer receives, holds plain values alone, so
that it can be pickled and sent as JSON. The scores of a unit come together, and units
come in their order, so the unit in hand is always the first one without scores, and its
clock started at the time of the last frame.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from verl_ray.rewards.health import Score, ScoreHealth

Conversation = str | list[dict[str, object]]
"""A prompt as the data set has it: a text or messages."""

RequestRow = tuple[Any, ...]
"""The fields of a request in their order; a tuple is pickled several times faster."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score, and what is known about it."""

    response: str
    """The decoded response, without special tokens; of an episode the last turn."""
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
    """Tokens of the response, the end token included; of an episode those of all of its
    turns."""
    finish_reason: str = "stop"
    """Why the response ended: stop, length or aborted; for an episode length says that
    a limit has ended it."""
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
    episode_score: float | None = None
    """What the environment paid; None where the response is no episode."""
    episode_end: str = ""
    """Why the episode ended; empty where the response is none."""
    episode_conversations: list[list[dict[str, Any]]] = dataclasses.field(
        default_factory=list
    )
    """The conversations of the episode, with what the environment answered, in the
    order of their last turns; empty where no function needs them."""
    episode_output: str = ""
    """What the command of the episode has printed, or the end of that; empty where no
    function needs it."""

    @property
    def episode_messages(self) -> list[dict[str, Any]]:
        """The conversation of the episode's last turn; empty where there is none."""
        return self.episode_conversations[-1] if self.episode_conversations else []

    def row(self, needs: Needs) -> RequestRow:
        """Return what `ScoreRequest(*row)` is made of again.

        Args:
            needs: Which of the costly values are part of it, and not left empty.
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
            self.tokens if needs.tokens else [],
            self.conversation if needs.conversation else "",
            self.is_held_out,
            self.episode_score,
            self.episode_end,
            self.episode_conversations if needs.episode_conversations else [],
            self.episode_output if needs.episode_output else "",
        )


# ----------------------------------------------------------------------------- messages

UnitKind = Literal["single", "concurrent", "group"]
"""What a function scores at a time: one response; several, awaited side by side; or all
responses to a prompt in one call."""


class Needs(NamedTuple):
    """Units in which a function scores, and the costly values that it names."""

    unit: UnitKind
    tokens: bool
    """Whether it needs the token ids of responses."""
    conversation: bool
    """Whether it needs the prompt as the data set has it."""
    episode_conversations: bool
    """Whether it needs the conversations of an episode, or the last of them."""
    episode_output: bool
    """Whether it needs what the command of an episode has printed."""


def scores_fields(scores: Sequence[Score]) -> list[object]:
    """Return the scores of a unit as values of JSON.

    A score is a list of its fields; one that is nothing but a number is that number.
    """
    rows: list[object] = []
    for score in scores:
        if score.health is ScoreHealth.OK and not score.entries:
            rows.append(score.value)
            continue
        value = score.value if score.health is ScoreHealth.OK else None
        # A text without surrogates, which no column could hold.
        detail = score.detail.encode("utf-8", "backslashreplace").decode()
        rows.append((value, score.health, detail, score.entries))
    return rows


def scores_from(rows: Sequence[Any]) -> list[Score]:
    """Return the scores that `scores_fields` has written."""
    scores = []
    for row in rows:
        if isinstance(row, float):
            scores.append(Score(row, ScoreHealth.OK))
            continue
        value, health, detail, entries = row
        value = math.nan if value is None else value
        scores.append(Score(value, ScoreHealth(health), detail, entries=entries))
    return scores
