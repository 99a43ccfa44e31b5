"""Ways in which an episode ends, and what becomes of it then.

Invariant: plain values, without a framework. Environments take them from
`verl_ray.agents.contract`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class End(enum.StrEnum):
    """Why an episode ended."""

    # The environment is done, or the policy answered without calling a tool.
    COMPLETED = "completed"
    # A tool ended it.
    TOOL_STOPPED = "tool_stopped"
    MAX_TURNS = "max_turns"
    # agent.max_tokens: the sampled tokens of the whole episode. Or tools do without a
    # turn that was cut.
    MAX_TOKENS = "max_tokens"
    # A turn has more tool calls than remain; none of them is executed.
    MAX_TOOL_CALLS = "max_tool_calls"
    # The next turn has no place in its row, or in the model's context.
    CONTEXT_OVERFLOW = "context_overflow"
    # A tool call that could not be parsed.
    PARSE_ERROR = "parse_error"
    MODEL_TIMEOUT = "model_timeout"
    TOOL_TIMEOUT = "tool_timeout"
    TURN_TIMEOUT = "turn_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    # The environment or a tool raised an exception, or its process died.
    ENVIRONMENT_FAILED = "environment_failed"
    # The run stopped generating.
    ABORTED = "aborted"


LIMITS = frozenset(
    {
        End.MAX_TURNS, End.MAX_TOKENS, End.MAX_TOOL_CALLS, End.CONTEXT_OVERFLOW,
        End.MODEL_TIMEOUT, End.TOOL_TIMEOUT, End.TURN_TIMEOUT, End.EPISODE_TIMEOUT,
    }
)  # fmt: skip
"""The ends by which a limit cuts an episode that would have gone on."""


class Treatment(enum.StrEnum):
    """The fate of an episode that ended in some way."""

    # Its reward counts in its group, and its tokens are learned from.
    TRAIN = "train"
    # Its reward counts in its group, but its tokens are not learned from.
    MASK = "mask"
    # It is no member of its group: it says nothing of the policy.
    DROP = "drop"


TREATMENTS: Mapping[End, Treatment] = {
    End.COMPLETED: Treatment.TRAIN,
    End.TOOL_STOPPED: Treatment.TRAIN,
    End.MAX_TURNS: Treatment.TRAIN,
    End.MAX_TOKENS: Treatment.TRAIN,
    End.MAX_TOOL_CALLS: Treatment.TRAIN,
    End.CONTEXT_OVERFLOW: Treatment.TRAIN,
    End.PARSE_ERROR: Treatment.TRAIN,
    End.MODEL_TIMEOUT: Treatment.DROP,
    End.TOOL_TIMEOUT: Treatment.DROP,
    End.TURN_TIMEOUT: Treatment.DROP,
    End.EPISODE_TIMEOUT: Treatment.DROP,
    End.ENVIRONMENT_FAILED: Treatment.DROP,
    End.ABORTED: Treatment.DROP,
}
"""The usual treatment of each end; `agent.ends` changes it."""

MOST_TURNS = 4096
"""Turns that an episode may have at most, whatever its limits."""

FAULTS = frozenset(
    {
        End.MODEL_TIMEOUT,
        End.TOOL_TIMEOUT,
        End.TURN_TIMEOUT,
        End.EPISODE_TIMEOUT,
        End.ENVIRONMENT_FAILED,
    }
)
"""The ends that are no doing of the policy, and may not come about a second time."""
