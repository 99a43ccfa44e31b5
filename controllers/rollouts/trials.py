"""Prompts that may have ended the replica that generated for them, and their trials.

Who had open rows on a replica as it was lost is suspect, and goes on as the others. Who
had them on a second one is tried, in a few parts, one part after another, on a replica
that has no other rows. A part with which another replica is lost is divided in turn.
Whoever finishes is innocent. So a lost node, which leaves many suspects, holds nobody
up.

Invariant: a prompt is guilty only if replicas were lost twice with its rows, the last
time with no others. Deliberately not here: who generates what (`generation.py`), and
what becomes of the guilty (`producer.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)
K = TypeVar("K", bound=Hashable)

_PARTS = 4
"""Parts that suspects are divided into. A loss often has other causes, so few parts
keep the innocent waiting for a short time; more would find a guilty one sooner."""


@dataclass(frozen=True)
class Verdict(Generic[K]):
    """The consequence of a loss for who had open rows; the others wait for trials."""

    guilty: K | None = None
    """Who has ended the replica, if that is known."""
    free: list[K] = field(default_factory=list)
    """Who may go on as before."""


class Trials(Generic[R, K]):
    """The trials of prompts (K) on replicas (R), one at a time."""

    def __init__(self) -> None:
        """Begin without suspects."""
        self._losses: Counter[K] = Counter()
        """How often replicas were lost with each suspect."""
        self._parts: deque[list[K]] = deque()
        """Suspects that wait for their trial."""
        self._tried: list[K] = []
        self.replica: R | None = None
        """The replica of the present trial; None between two trials."""

    @property
    def waiting(self) -> bool:
        """Whether suspects wait for a trial."""
        return bool(self._parts)

    def suspects(self, prompts: Iterable[K]) -> bool:
        """Return whether one of these prompts was open at a loss, and not since."""
        return bool(self._losses) and any(map(self._losses.__contains__, prompts))

    def forget(self, prompts: Iterable[K]) -> None:
        """Forget prompts that have finished: they are innocent."""
        if self._losses:
            for prompt in prompts:
                self._losses.pop(prompt, None)

    def begin(self, replica: R) -> list[K]:
        """Begin the next trial on a replica without work; return who is tried."""
        assert self.replica is None, "there is one trial at a time"
        self.replica = replica
        self._tried = self._parts.popleft()
        return list(self._tried)

    def acquit(self) -> None:
        """End the present trial: the replica has generated all responses."""
        self.forget(self._tried)
        self._end()

    def put_off(self, prompts: Sequence[K]) -> None:
        """Try some prompts of the present trial later; it goes on without them."""
        if prompts:
            self._parts.appendleft(list(prompts))
        self._tried = [prompt for prompt in self._tried if prompt not in prompts]
        if not self._tried:
            self._end()

    def note_loss(self, replica: R, suspects: Sequence[K]) -> Verdict[K]:
        """Note that a replica was lost.

        Args:
            replica: The replica, whose trial ends if it had one.
            suspects: Who had open rows on it, the oldest first.
        """
        if replica == self.replica:
            self.forget(set(self._tried).difference(suspects))
            self._end()

        self._losses.update(suspects)
        free = [prompt for prompt in suspects if self._losses[prompt] == 1]
        known = [prompt for prompt in suspects if self._losses[prompt] > 1]
        if known and len(suspects) == 1:
            self.forget(known)
            return Verdict(guilty=known[0])

        size = -(-len(known) // _PARTS)
        starts = range(0, len(known), max(size, 1))
        parts = [known[start : start + size] for start in starts]
        self._parts.extendleft(reversed(parts))
        return Verdict(free=free)

    def _end(self) -> None:
        self._tried = []
        self.replica = None
