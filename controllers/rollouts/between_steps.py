"""Rollouts that go on between the steps of a run, while it is evaluated and saved.

Invariant: their failure breaks off no checkpoint; the next step raises it.
Deliberately not here: which prompts are drawn (`supply.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from controllers.rollouts.supply import Supply
from verl_ray.errors import Interrupted


class RolloutsBetweenSteps:
    """Background work (`Background`) after a step has been committed."""

    def __init__(self, supply: Supply) -> None:
        """Take the supply of groups to learn from."""
        self._supply = supply
        self._failure: Exception | None = None

    def references(self) -> Sequence[Any]:
        """Return the references of pending pieces; none after a failure."""
        if self._failure is not None:
            return ()
        return self._supply.producer.references()

    def draw(self) -> None:
        """Draw the prompts of later steps that may be drawn."""
        self._attempt(self._supply.draw_ahead)

    def advance(self) -> None:
        """Pass on what is finished, and begin what comes next."""
        self._attempt(self._supply.producer.advance)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do some work, unless some has failed; remember its failure."""
        if self._failure is not None:
            return
        try:
            work()
        except Interrupted:
            raise
        except Exception as failure:
            self._failure = failure

    def raise_failure(self) -> None:
        """Raise the failure since the last call, if there is one."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure
