"""The experts of an episode's turns, as the experts of its rows.

The processes of episodes know tokens alone, so what an engine has recorded of a turn
waits here for the row that begins with the turn's tokens.

Invariant: a position has the experts with which the first turn behind it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_ray.agents.contract import EpisodeRow
from verl_ray.columns.stages import Int16
from verl_ray.errors import EngineFailed
from verl_ray.rollout.requests import Tokens


@dataclass(frozen=True, eq=False)
class _Turn:
    """A turn: the tokens of its path, and the experts from position `start` on."""

    path: Tokens
    start: int
    experts: Int16


@dataclass
class TurnRouting:
    """The experts of all turns of an episode, each position once."""

    _turns: list[_Turn] = field(default_factory=list)

    def add(self, prompt: Tokens, sampled: Tokens, experts: Int16) -> None:
        """Add a turn.

        Args:
            prompt: Token ids that it was sampled behind.
            sampled: Its token ids.
            experts: [positions, layers, k], of all tokens but the last.

        Raises:
            EngineFailed: These are the experts of another number of positions.
        """
        path = np.concatenate([prompt, sampled])
        if len(experts) != len(path) - 1:
            raise EngineFailed(
                f"the engine has recorded the experts of {len(experts)} positions of a"
                f" turn, expected {len(path) - 1}"
            )
        # What the turns before it have is not stored again.
        start = max((len(each.path) - 1 for each in self._before(prompt)), default=0)
        self._turns.append(_Turn(path, start, experts[start:].copy()))

    def add_to(self, rows: Sequence[EpisodeRow]) -> None:
        """Give the rows of the episode their experts.

        Raises:
            EngineFailed: A turn of a row was not added.
        """
        for row in rows:
            num_routed = int(np.flatnonzero(row.mask)[-1])
            row.routed_experts = self._of_row(
                np.array(row.tokens, np.int32), num_routed
            )

    def _of_row(self, tokens: Tokens, num_routed: int) -> Int16:
        """Return the experts of a row, [tokens, layers, k].

        Args:
            tokens: Its token ids.
            num_routed: Tokens before its last sampled one.
        """
        turns = sorted(self._before(tokens), key=lambda each: len(each.path))
        if not turns or len(turns[-1].path) - 1 != num_routed:
            raise EngineFailed(
                f"a row has {num_routed} tokens before the last one that was sampled,"
                " and no turn of its episode ends there"
            )
        experts = np.zeros((len(tokens), *turns[0].experts.shape[1:]), np.int16)
        # Of two turns with one path the last one counts, as in a transcript.
        for turn in turns:
            experts[turn.start : len(turn.path) - 1] = turn.experts
        return experts

    def _before(self, tokens: Tokens) -> list[_Turn]:
        """Return the turns whose path these tokens begin with."""
        return [
            turn
            for turn in self._turns
            if len(turn.path) <= len(tokens)
            and np.array_equal(tokens[: len(turn.path)], turn.path)
        ]
