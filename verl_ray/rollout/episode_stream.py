"""A call that runs episodes: what it asks for, and how they end.

Invariant: each episode and each single response of the call is taken once, or an error
is raised after which nothing follows.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from dataclasses import dataclass

from verl_ray.agents.contract import Episode, EpisodeTask
from verl_ray.rollout.requests import Chunk, Sampling

Ended = Episode | Chunk
"""An episode, or the whole response to a prompt that is about no environment."""


@dataclass(frozen=True, eq=False)
class EpisodeRequest:
    """An episode to run.

    Attributes:
        number: Number of the episode, unique in one call.
        task: What it is about.
        seed: Seed of its turns.
        environment_seed: Seed of its environment.
        sampling: How its turns are sampled, but for the number of their tokens.
        session: Episodes of a session share a prefix.
        trains: Whether the policy learns from its rows.
    """

    number: int
    task: EpisodeTask
    seed: int
    environment_seed: int
    sampling: Sampling
    session: str
    trains: bool = False


class EpisodeStream:
    """Episodes and single responses of a call, in the order in which they end.

    Another thread waits for them.
    """

    def __init__(self, numbers: set[int], close: Callable[[], None]) -> None:
        """Begin with all of them open.

        Args:
            close: Cancels the open episodes, from any thread, without waiting.
        """
        self.close = close
        self._open = numbers
        self._replies: queue.SimpleQueue[tuple[int, Ended] | Exception] = (
            queue.SimpleQueue()
        )

    @property
    def has_ended(self) -> bool:
        """Whether nothing is open."""
        return not self._open

    def put(self, reply: tuple[int, Ended] | Exception) -> None:
        """Deliver what has ended, or the error after which none follows."""
        self._replies.put(reply)

    def take(self, timeout_s: float | None = None) -> list[tuple[int, Ended]]:
        """Return what has ended; nothing if nothing has within `timeout_s`.

        Raises:
            EngineFailed: The engine failed.
        """
        taken: list[tuple[int, Ended]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                # Those that are there by then come along.
                reply = self._replies.get(not taken, timeout_s)
                if isinstance(reply, Exception):
                    self._open.clear()
                    raise reply
                self._open.discard(reply[0])
                taken.append(reply)
        return taken
