"""Requests in flight: what each has drawn so far, under which policy versions, and how much of that was delivered.

Invariant: every token of a request is delivered once, in order, with its log-prob and the version it was drawn from; a
request that has ended is no longer in flight. Deliberately not here: drawing, and whether an engine may (`base.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_ray.data.stages import Finish
from verl_ray.errors import RolloutError
from verl_ray.profiling.progress import advance
from verl_ray.rollout.requests import Chunk, Progress, Request


@dataclass(slots=True)
class _Drawn:
    """What one request has so far, under which versions, and how much of that was delivered."""

    stream: bool
    gives_way: bool
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    delivered: int = 0


class InFlight:
    """The requests that an engine has taken and not yet answered completely, and the chunks that are due."""

    def __init__(self) -> None:
        self._drawn: dict[int, _Drawn] = {}
        self._aborted: set[int] = set()
        self._due: list[Chunk] = []

    def __len__(self) -> int:
        """Requests in flight; those that have ended do not count, though their last chunk may be due."""
        return len(self._drawn)

    def require_new(self, requests: Sequence[Request]) -> None:
        """Raise RolloutError for a request whose id is in flight already, or whose tokens are no vector of ids."""
        ids = [request.request_id for request in requests]
        twice = self._drawn.keys() & ids
        if twice or len(set(ids)) != len(ids):
            raise RolloutError(f"request ids must be unique among those in flight, found again: {sorted(twice) or ids}")
        for request in requests:
            if request.tokens.dtype != np.int32 or request.tokens.ndim != 1 or not len(request.tokens):
                raise RolloutError(
                    f"request {request.request_id}: expected a non-empty int32 vector of token ids, found "
                    f"{request.tokens.dtype} of shape {request.tokens.shape}"
                )

    def add(self, requests: Sequence[Request]) -> None:
        self._drawn.update((request.request_id, _Drawn(request.stream, request.gives_way)) for request in requests)

    def note(self, progress: Iterable[Progress], version: int | None) -> None:
        """What requests have drawn under `version` (None: nothing); what is due of it can be taken then."""
        drawn = 0
        for one in progress:
            drawn += len(one.tokens)
            self._note(one, version)
        if drawn:
            advance(drawn, "tokens")  # steps that draw nothing are none: an engine may make them for ever

    def take(self) -> list[Chunk]:
        """The chunks that are due, which are delivered with that."""
        due, self._due = self._due, []
        return due

    def clear(self) -> None:
        """Nothing is in flight, and nothing is due."""
        self._drawn.clear()
        self._aborted.clear()
        self._due.clear()

    # ---------------------------------------------------------------------------------------------------- endings

    def abort(self, request_ids: Iterable[int] | None) -> None:
        """These are to end early (None: all); ids that are not in flight are ignored."""
        self._aborted.update(list(self._drawn) if request_ids is None else self._drawn.keys() & set(request_ids))

    def take_aborted(self) -> list[int]:
        """The ids in flight that are to end early, in the order in which they came."""
        ids = [request_id for request_id in self._drawn if request_id in self._aborted]
        self._aborted.clear()
        return ids

    def end(self, request_ids: Sequence[int]) -> None:
        """These end as far as they got, as `Finish.ABORTED`."""
        self.note((Progress(request_id, (), (), Finish.ABORTED) for request_id in request_ids), None)

    # --------------------------------------------------------------------------------------------------- questions

    @property
    def unfinished(self) -> int:
        """Requests in flight, or ended with their last chunk due."""
        return len(self._drawn) + sum(chunk.finish is not None for chunk in self._due)

    @property
    def is_due(self) -> bool:
        """Whether something can be delivered without drawing."""
        return bool(self._due or self._aborted)

    @property
    def giving_way(self) -> list[int]:
        return [request_id for request_id, drawn in self._drawn.items() if drawn.gives_way]

    def _note(self, progress: Progress, version: int | None) -> None:
        drawn = self._drawn[progress.request_id]
        if progress.tokens and version is not None and (not drawn.spans or drawn.spans[-1][1] != version):
            drawn.spans.append((len(drawn.tokens), version))
        drawn.tokens += progress.tokens
        drawn.log_probs += progress.log_probs
        if progress.finish is None and not drawn.stream:
            return
        first, drawn.delivered = drawn.delivered, len(drawn.tokens)
        if progress.finish is not None:
            del self._drawn[progress.request_id]
        self._due.append(
            Chunk(
                request_id=progress.request_id,
                tokens=np.array(drawn.tokens[first:], np.int32),
                log_probs=np.array(drawn.log_probs[first:], np.float32),
                finish=progress.finish,
                first_token=first,
                version_spans=_spans_from(drawn.spans, first),
            )
        )


def _spans_from(spans: Sequence[tuple[int, int]], first: int) -> tuple[tuple[int, int], ...]:
    """The part of version spans that begins at token `first`."""
    kept = [max(i for i, (start, _) in enumerate(spans) if start <= first)] if spans else []
    later = spans[kept[0] + 1 :] if kept else []
    return tuple((max(start, first), version) for start, version in [*(spans[i] for i in kept), *later])
