"""Isolation of the item that ends the processes that are lost with it.

A lost process leaves items open, and any of them may have ended it, or none. They go on
apart from all others, in a few parts, one after another in a process that has no other
items. If such a process is lost as well, its part is divided in turn. Where processes
are lost for other reasons more often, as replicas are with their node, the first loss
has no such consequence.

Invariant: an item is named only if processes were lost with it twice, the last time
with no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Loss(Generic[K]):
    """The consequence of a loss for the open items; the others wait in parts."""

    culprit: K | None = None
    """Which one has ended the process, if that is known."""
    free: list[K] = field(default_factory=list)
    """Which ones go on as before."""


class Isolation(Generic[P, K]):
    """Items (K) that were lost with processes (P), until one of them is named."""

    def __init__(self, most_parts: int, *, free_losses: int) -> None:
        """Begin without losses.

        Args:
            most_parts: Parts that the items of a lost process are divided into. Few
                keep those that have ended none waiting for a short time; many name the
                one that has after few losses.
            free_losses: After so many losses an item goes on as before.
        """
        self._most_parts = most_parts
        self._free_losses = free_losses
        self._causes: dict[K, list[str]] = {}
        self._parts: deque[list[K]] = deque()
        self._apart: dict[P, list[K]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a part waits for a process."""
        return bool(self._parts)

    @property
    def processes(self) -> list[P]:
        """The processes that have a part, and should have no other items."""
        return list(self._apart)

    @property
    def items(self) -> list[K]:
        """The items that were lost and have not finished since."""
        return list(self._causes)

    def causes(self, item: K) -> Sequence[str]:
        """Return how each process ended that was lost with an item."""
        return self._causes.get(item, ())

    def begin(self, process: P) -> list[K]:
        """Give the next part to a process without items; return the part."""
        part = self._parts.popleft()
        self._apart[process] = part
        return list(part)

    def finish(self, process: P) -> None:
        """Note that a process has finished its part: no item of it ends a process."""
        self.forget(self._apart.pop(process, ()))

    def put_back(self, process: P, items: Sequence[K]) -> None:
        """Let items of the part of a process wait again; it goes on without them."""
        if items:
            self._parts.appendleft(list(items))
        rest = [item for item in self._apart.pop(process) if item not in items]
        if rest:
            self._apart[process] = rest

    def forget(self, items: Iterable[K]) -> None:
        """Forget the losses of items that have finished."""
        if self._causes:
            for item in items:
                self._causes.pop(item, None)

    def withdraw(self, is_withdrawn: Callable[[K], bool]) -> None:
        """Forget all items of which this is true, also those that wait."""
        self.forget(list(filter(is_withdrawn, self._causes)))
        parts = ([k for k in part if not is_withdrawn(k)] for part in self._parts)
        self._parts = deque(filter(None, parts))

    def note_loss(
        self, process: P, items: Sequence[K], cause: str = "was lost"
    ) -> Loss[K]:
        """Note that a process was lost.

        Args:
            process: The process.
            items: Its open items, the oldest first.
            cause: How it was lost, as the end of a sentence.
        """
        part = self._apart.pop(process, ())
        self.forget(set(part).difference(items))
        for item in items:
            self._causes.setdefault(item, []).append(cause)

        free = [k for k in items if len(self._causes[k]) <= self._free_losses]
        again = [k for k in items if len(self._causes[k]) > self._free_losses]
        if len(items) == 1 and len(self._causes[items[0]]) > 1:
            return Loss(culprit=items[0])

        size = -(-len(again) // self._most_parts)
        starts = range(0, len(again), max(size, 1))
        parts = [again[start : start + size] for start in starts]
        self._parts.extendleft(reversed(parts))
        return Loss(free=free)
