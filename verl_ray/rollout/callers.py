"""Calls for generation, between the threads that make them and the engine's thread.

Invariant: a caller gets replies to its own requests only, under its own request ids.
The engine knows a request by a number that is unique in the server. Deliberately not
here: the engine's thread (`engine_thread.py`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from verl_ray.rollout.requests import Chunk, GenerationRequest

Reply = list[Chunk] | Exception
"""Chunks of a caller's requests, or the error after which no more chunks follow."""


@dataclass(eq=False)
class Caller:
    """A call with requests in flight.

    Attributes:
        requests: The call's requests by their numbers in the server.
        deliver: Hands a reply to the thread that waits for it. It is called on the
            engine's thread and must not wait.
        abortable_by_id: Whether others may abort the requests by their ids.
        pending: Numbers of the requests whose last chunk was not taken yet.
    """

    requests: dict[int, GenerationRequest]
    deliver: Callable[[Reply], None]
    abortable_by_id: bool
    pending: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pending = set(self.requests)

    def take(self, reply: Reply) -> list[Chunk]:
        """Return the chunks of a reply under the caller's ids, or raise its error."""
        if isinstance(reply, Exception):
            self.pending.clear()
            raise reply

        self.pending.difference_update(
            chunk.request_id for chunk in reply if chunk.finish is not None
        )
        return [
            replace(chunk, request_id=self.requests[chunk.request_id].request_id)
            for chunk in reply
        ]


class ChunkStream(Iterator[list[Chunk]]):
    """Chunks of a caller's requests, in the order in which they were sampled.

    The iterator consumes replies of the engine's thread and waits for the next of them.
    It ends when no request is pending, or with the error of a failed engine. A stream
    that is deleted early aborts its requests.

    Attributes:
        close: Aborts the pending requests from any thread, without waiting. A thread
            that iterates over the stream still gets the tokens that they have.
    """

    def __init__(
        self,
        caller: Caller,
        replies: queue.SimpleQueue[Reply],
        close: Callable[[], None],
    ) -> None:
        self._caller = caller
        self._replies = replies
        # This is an attribute and no method: whoever keeps it, to close the stream
        # later, does not keep the stream itself alive.
        self.close = close

    @property
    def has_ended(self) -> bool:
        """Whether no request is pending."""
        return not self._caller.pending

    def take(self, timeout_s: float | None = None) -> list[Chunk]:
        """Return the next chunks; none if there are none within `timeout_s` seconds."""
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return self._caller.take(reply)

    def __next__(self) -> list[Chunk]:
        if self.has_ended:
            raise StopIteration
        return self.take()

    def __del__(self) -> None:
        self.close()
