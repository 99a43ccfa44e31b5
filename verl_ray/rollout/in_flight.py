"""Requests that a rollout engine has accepted and not finished.

Invariant: every token of a request is delivered once, in order, with its log-prob and
the policy version it was sampled from; a request that has ended is no longer in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.columns.stages import Finish, Int16
from verl_ray.errors import RolloutError
from verl_ray.profiling.progress import advance
from verl_ray.rollout.requests import (
    Chunk,
    GenerationProgress,
    GenerationRequest,
    PromptLogProbs,
)
from verl_ray.rollout.texts import GrowingText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class _PartialResponse:
    """Everything sampled so far for a request in flight.

    Attributes:
        stream: Whether tokens are delivered as they are sampled.
        preemptible: Whether sleep and weight updates may abort the request.
        tokens: The token ids sampled so far.
        log_probs: The log-prob of each token.
        spans: Pairs of the index at which a version span begins, and its version.
        delivered: Number of tokens that were delivered.
        text: Its text, where a stop string may end it.
        prompt: Log-probs of the parts of its prompt that were not delivered.
        routed_experts: Experts of the positions that were not delivered, in parts.
    """

    stream: bool
    preemptible: bool
    text: GrowingText | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    delivered: int = 0
    prompt: list[PromptLogProbs] = field(default_factory=list)
    routed_experts: list[Int16] = field(default_factory=list)


class InFlight:
    """Requests that an engine has accepted and not finished, and chunks to deliver."""

    def __init__(self) -> None:
        self._responses: dict[int, _PartialResponse] = {}
        self._to_abort: set[int] = set()
        self._chunks: list[Chunk] = []

    def __len__(self) -> int:
        """Number of requests in flight.

        Requests that have ended do not count, though their last chunk may not be
        delivered yet.
        """
        return len(self._responses)

    def require_new(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise `RolloutError` for requests that cannot be added.

        The id of a request must not be in flight already, and its tokens must be a
        vector of ids.
        """
        ids = [request.request_id for request in requests]
        duplicates = self._responses.keys() & ids
        if duplicates or len(set(ids)) != len(ids):
            raise RolloutError(
                "request ids must be unique among those in flight, found again:"
                f" {sorted(duplicates) or ids}"
            )

        for request in requests:
            tokens = request.tokens
            is_vector = tokens.dtype == np.int32 and tokens.ndim == 1
            if not is_vector or not len(tokens):
                raise RolloutError(
                    f"request {request.request_id}: expected a non-empty int32 vector"
                    f" of token ids, found {tokens.dtype} of shape {tokens.shape}"
                )

    def add(
        self,
        requests: Sequence[GenerationRequest],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Add requests that have no tokens yet.

        Args:
            tokenizer: Reads the texts of requests that stop strings may end.
        """
        for request in requests:
            text = None
            if request.sampling.stop:
                assert tokenizer is not None, "the engine has refused stop strings"
                stop = request.sampling.stop
                text = GrowingText(tokenizer, stop, spells_special_tokens=True)
            response = _PartialResponse(request.stream, request.preemptible, text)
            self._responses[request.request_id] = response

    def record(
        self, progress: Iterable[GenerationProgress], version: int | None
    ) -> list[int]:
        """Add what was sampled, and prepare the chunks to deliver.

        Args:
            progress: New tokens of requests in flight, of one step or of several.
            version: The policy version they were sampled from; None = no tokens were
                sampled.

        Returns:
            The requests that a stop string has ended, which the engine goes on with.
        """
        sampled = 0
        stopped: set[int] = set()
        for step_of_request in progress:
            if step_of_request.request_id in stopped:
                # A step behind the stop string, with which the engine itself may have
                # ended the request.
                if step_of_request.finish is not None:
                    stopped.remove(step_of_request.request_id)
                continue

            cut = self._until_stop(step_of_request)
            sampled += len(cut.tokens)
            if cut.finish is not None and step_of_request.finish is None:
                stopped.add(cut.request_id)
            self._record(cut, version)

        # A step that samples nothing is no progress: a broken engine could go on with
        # such steps for ever, and would never count as stalled.
        if sampled:
            advance(sampled, "tokens")
        return sorted(stopped)

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks to deliver, which then count as delivered."""
        chunks = self._chunks
        self._chunks = []
        return chunks

    def clear(self) -> None:
        """Drop all requests and all chunks."""
        self._responses.clear()
        self._to_abort.clear()
        self._chunks.clear()

    # --------------------------------------------------------------------------- aborts

    def mark_aborted(self, request_ids: Iterable[int] | None) -> None:
        """Mark requests to be aborted with the next step.

        Args:
            request_ids: The requests, or None for all in flight. Ids that are not in
                flight are ignored.
        """
        if request_ids is None:
            self._to_abort.update(self._responses)
        else:
            self._to_abort.update(self._responses.keys() & set(request_ids))

    def take_aborted(self) -> list[int]:
        """Return the marked ids in the order of their requests, and unmark them."""
        # A marked request may have ended since, so the ids in flight are what counts.
        ids = [
            request_id for request_id in self._responses if request_id in self._to_abort
        ]
        self._to_abort.clear()
        return ids

    def finish_aborted(self, request_ids: Sequence[int]) -> None:
        """End requests with the tokens they have, as `Finish.ABORTED`."""
        endings = [
            GenerationProgress(request_id, (), (), Finish.ABORTED)
            for request_id in request_ids
        ]
        self.record(endings, None)

    @property
    def preemptible_ids(self) -> list[int]:
        """Ids of the preemptible requests in flight."""
        return [
            request_id
            for request_id, response in self._responses.items()
            if response.preemptible
        ]

    # --------------------------------------------------------------------------- counts

    @property
    def unfinished(self) -> int:
        """Number of requests in flight, or ended with their last chunk undelivered."""
        ended = sum(chunk.finish is not None for chunk in self._chunks)
        return len(self._responses) + ended

    @property
    def has_chunks(self) -> bool:
        """Whether a step can deliver something without sampling."""
        return bool(self._chunks or self._to_abort)

    def _until_stop(self, progress: GenerationProgress) -> GenerationProgress:
        """Return progress up to the token that completes a stop string, if one does."""
        text = self._responses[progress.request_id].text
        if text is None:
            return progress
        count, _ = text.add(progress.tokens, last=False)
        if not text.stopped:
            return progress
        experts = progress.routed_experts
        if experts is not None:
            experts = experts[: len(experts) - len(progress.tokens) + count]
        return progress._replace(
            tokens=progress.tokens[:count],
            log_probs=progress.log_probs[:count],
            finish=Finish.STOP,
            routed_experts=experts,
        )

    def _record(self, progress: GenerationProgress, version: int | None) -> None:
        response = self._responses[progress.request_id]

        # A span begins with the first token, and wherever the version changes.
        last_version = response.spans[-1][1] if response.spans else None
        if progress.tokens and version is not None and version != last_version:
            response.spans.append((len(response.tokens), version))
        response.tokens += progress.tokens
        response.log_probs += progress.log_probs
        if progress.prompt is not None:
            response.prompt.append(progress.prompt)
        if progress.routed_experts is not None:
            response.routed_experts.append(progress.routed_experts)

        if progress.finish is None and not response.stream:
            return

        first = response.delivered
        response.delivered = len(response.tokens)
        if progress.finish is not None:
            del self._responses[progress.request_id]

        chunk = Chunk(
            request_id=progress.request_id,
            tokens=np.array(response.tokens[first:], np.int32),
            log_probs=np.array(response.log_probs[first:], np.float32),
            finish=progress.finish,
            first_token=first,
            version_spans=_spans_from(response.spans, first),
            prompt=PromptLogProbs.joined(response.prompt),
            routed_experts=np.concatenate(response.routed_experts)
            if response.routed_experts
            else None,
        )
        response.prompt.clear()
        response.routed_experts.clear()
        self._chunks.append(chunk)


def _spans_from(
    spans: Sequence[tuple[int, int]], first: int
) -> tuple[tuple[int, int], ...]:
    """Return the part of version spans that begins at token `first`."""
    if not spans:
        return ()

    # The span that covers `first` is the last that does not begin after it.
    covering = max(index for index, (start, _) in enumerate(spans) if start <= first)
    return tuple((max(start, first), version) for start, version in spans[covering:])
