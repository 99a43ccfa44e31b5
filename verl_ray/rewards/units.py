"""Units of scoring: responses that a process scores in one go, and may cost together.

A function of one response scores responses one by one. Coroutines are awaited side by
side, so some responses travel together. A batched function scores all responses to a
prompt in one call: they are one unit, whatever else is scored at the time.

Invariant: the items of a unit have the same function and are consecutive requests of a
call; those of a batched function are all consecutive requests of one prompt.
Deliberately not here: processes and deadlines (`pool.py`), and whether groups arrive
whole (`controllers/rollouts/producer.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_ray.rewards.request import RequestRow, ScoreRequest
from verl_ray.rewards.wire import Needs

MOST_CONCURRENT = 64
"""Coroutines of one process that are awaited side by side."""

_GRACE_S = 1.0
"""Time that a process has to report coroutines which have missed their deadline."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Requests of a call that are scored in one go. Units are compared by identity."""

    items: tuple[int, ...]
    """Indices of the requests in the call."""
    needs: Needs

    @property
    def is_divisible(self) -> bool:
        """Whether its responses can also be scored one by one."""
        return self.needs.unit == "concurrent" and len(self.items) > 1

    def parts(self) -> list[Unit]:
        """Return a unit for each response."""
        return [Unit((item,), self.needs) for item in self.items]

    def limit_s(self, deadline_s: float) -> float:
        """Return how long the unit may take.

        Args:
            deadline_s: How long one response may take.
        """
        if self.needs.unit == "concurrent":
            return deadline_s + _GRACE_S
        return deadline_s * len(self.items)

    def rows(self, requests: Sequence[ScoreRequest]) -> list[RequestRow]:
        """Return the unit's requests as they are sent, without what nobody needs.

        Args:
            requests: The requests of the call.
        """
        tokens, conversation = self.needs.tokens, self.needs.conversation
        return [
            requests[item].row(tokens=tokens, conversation=conversation)
            for item in self.items
        ]


def units_of(
    requests: Sequence[ScoreRequest], needs: Mapping[str, Needs]
) -> list[Unit]:
    """Return the units of the requests of a call, in their order.

    Args:
        requests: The requests.
        needs: What each function needs, by data source; `default` for the others.
    """

    def function_of(item: int) -> str:
        source = requests[item].data_source
        return source if source in needs else "default"

    def group_of(item: int) -> int:
        return requests[item].group

    units: list[Unit] = []
    for source, run in itertools.groupby(range(len(requests)), function_of):
        of_function = needs[source]
        parts: list[tuple[int, ...]]
        if of_function.unit == "single":
            parts = [(item,) for item in run]
        elif of_function.unit == "concurrent":
            items = tuple(run)
            starts = range(0, len(items), MOST_CONCURRENT)
            parts = [items[start : start + MOST_CONCURRENT] for start in starts]
        else:
            parts = [tuple(group) for _, group in itertools.groupby(run, group_of)]
        units += [Unit(part, of_function) for part in parts]
    return units
