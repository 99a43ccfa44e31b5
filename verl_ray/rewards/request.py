"""Responses to score, and the messages between the pool and a scoring process.

Messages travel over one stream socket. To the process: a length and a pickle; first a
`Start`, then lists of units, each a list of rows of requests. From the process: frames,
each a kind, a time on the monotonic clock that all processes of a machine share, and a
text. The pool unpickles no data from the process, which runs user code.

Invariant: a request, which every kind of scorer receives, holds plain values alone, so
that it can be pickled and sent as JSON. The scores of a unit come together, and units
come in their order, so the unit in hand is always the first one without scores, and its
clock started at the time of the last frame.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

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
        )


# ----------------------------------------------------------------------------- messages

LENGTH = struct.Struct("<Q")
# Kind, time in seconds, bytes of UTF-8 that follow.
FRAME = struct.Struct("<BdI")

# Kinds of frames.
READY = 255
"""The functions are imported; the text is what they need."""
BROKEN = 254
"""A function cannot be imported; the text is a Problem in JSON."""
STARTED = 253
"""The first unit of a message is now in hand."""
SCORED = 252
"""A unit is scored; the text is its scores."""

UnitKind = Literal["single", "concurrent", "group"]
"""What a function scores at a time: one response; several, awaited side by side; or all
responses to a prompt in one call."""


class Start(NamedTuple):
    """First message to a process: the functions to import, and their import path."""

    sys_path: list[str]
    functions: dict[str, str]
    """Data source -> spec, as in the configuration."""
    key: str
    """The configuration's section that they are from, for errors to name."""
    deadline_s: float
    """How long a response may take; a coroutine is cancelled then."""


class Needs(NamedTuple):
    """Units in which a function scores, and the costly values that it names."""

    unit: UnitKind
    tokens: bool
    """Whether it needs the token ids of responses."""
    conversation: bool
    """Whether it needs the prompt as the data set has it."""
    episode_conversations: bool
    """Whether it needs the conversations of an episode, or the last of them."""


def frame(kind: int, time_s: float, text: str) -> bytes:
    """Encode a frame."""
    body = text.encode("utf-8", "backslashreplace")
    return FRAME.pack(kind, time_s, len(body)) + body


def message(content: Start | Sequence[Sequence[RequestRow]]) -> bytes:
    """Encode a message to a process."""
    body = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the pickle of the next message; None when the pool has hung up."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = stream.read(length)
    # A message that breaks off is as good as none.
    return body if len(body) == length else None


# ------------------------------------------------------------------ texts of the frames


def scores_text(scores: Sequence[Score]) -> str:
    """Return the scores of a unit as a text.

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
    return json.dumps(rows)


def scores_from(text: str) -> list[Score]:
    """Return the scores that `scores_text` has written."""
    scores = []
    for row in json.loads(text):
        if isinstance(row, float):
            scores.append(Score(row, ScoreHealth.OK))
            continue
        value, health, detail, entries = row
        value = math.nan if value is None else value
        scores.append(Score(value, ScoreHealth(health), detail, entries=entries))
    return scores


def needs_text(needs: Mapping[str, Needs]) -> str:
    """Return the needs of all functions, by data source, as a text."""
    return json.dumps(needs)


def needs_from(text: str) -> dict[str, Needs]:
    """Return the needs that `needs_text` has written."""
    return {source: Needs(*fields) for source, fields in json.loads(text).items()}
