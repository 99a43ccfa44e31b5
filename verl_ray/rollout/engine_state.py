"""State of a rollout engine: calls, requests in flight, and an open weight update.

Invariant: a call that the state does not allow raises an error that names the call to
make first. A version is accepted only if every parameter of its manifest was received
once, every fingerprint is the sender's, and, where a verification was announced, the
engine computes with the weights what the sender computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from verl_ray.columns.stages import Finish
from verl_ray.errors import (
    CannotGenerate,
    NonFiniteError,
    RolloutError,
    VerlRayError,
    WeightSyncError,
)
from verl_ray.profiling.progress import advance
from verl_ray.rollout.requests import (
    Chunk,
    Float32,
    GenerationProgress,
    GenerationRequest,
    PromptLogProbs,
    Tokens,
)
from verl_ray.rollout.texts import GrowingText
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints
from verl_ray.weight_sync.manifest import Bucket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EngineMemoryPart = Literal["weights", "kv_cache"]

EnginePause = Literal["keep", "recompute"]
"""What becomes of the KV cache of requests in flight while an engine is paused.

keep: it stays, also over an update. recompute: it is freed, and computed again from the
tokens of each request as soon as the engine resumes.
"""


@dataclass
class EngineState:
    """Present state of an engine.

    Attributes:
        version: The policy version that tokens are sampled from; None while no version
            is accepted.
        has_model: Whether a whole model was loaded. An adapter can only be sent to an
            engine that has the model it belongs to.
        update: The weight update that is open, if any.
        asleep: The parts of the memory that were freed.
        failure: Why the engine can no longer be used; None = it can.
        closed: Whether `close` was called.
        paused: How requests in flight are held without being continued; None = they
            are not.
    """

    version: int | None
    has_model: bool
    update: WeightUpdate | None = None
    asleep: frozenset[EngineMemoryPart] = frozenset()
    failure: str | None = None
    closed: bool = False
    paused: EnginePause | None = None

    def require_generating(self) -> None:
        """Raise `CannotGenerate` unless tokens can be sampled now."""
        if self.update is not None:
            next_call = "verify it" if self.update.committed else "commit it"
            raise CannotGenerate(
                f"cannot generate: the update to version {self.update.version} is"
                f" open; {next_call}"
            )

        # After the weights slept there is no version either; waking comes first.
        if self.asleep:
            raise CannotGenerate(
                f"cannot generate: asleep; call {self.wake_calls} first"
            )

        if self.version is None:
            raise CannotGenerate(
                "cannot generate: no policy version is committed; send the weights and"
                " commit them"
            )

    def require_no_requests(
        self, verb: str, count: int, pauses: Iterable[EnginePause]
    ) -> None:
        """Raise `RolloutError` for requests in flight that no pause holds.

        Args:
            verb: The call that is refused, for the message.
            count: Number of the requests.
            pauses: The modes of a pause under which they could stay.
        """
        if count:
            modes = " or ".join(f'"{mode}"' for mode in pauses)
            raise RolloutError(
                f"{verb}: {count} requests are in flight; let them end, abort them, or"
                f" pause with {modes} first"
            )

    def require_no_update(self, verb: str) -> None:
        """Raise `RolloutError` while a weight update is open.

        Args:
            verb: The call that is refused, for the message.
        """
        if self.update is not None:
            raise RolloutError(
                f"{verb}: the update to version {self.update.version} is open; commit"
                " or abort it"
            )

    def require_update(self, verb: str) -> WeightUpdate:
        """Return the open weight update, or raise `WeightSyncError` without one."""
        if self.update is None:
            raise WeightSyncError(
                f"{verb}: no weight update is open; call begin_update first"
            )
        return self.update

    def require_committed_update(self) -> WeightUpdate:
        """Return the update that waits for its verification, or raise an error.

        Raises:
            WeightSyncError: No update is open, or it was not committed yet.
            RolloutError: A part of the memory is asleep.
        """
        update = self.require_update("verify")

        if not update.committed:
            raise WeightSyncError(
                f"verify: version {update.version} is not committed yet"
            )
        if self.asleep:
            raise RolloutError(f"verify: asleep; call {self.wake_calls} first")

        return update

    @property
    def wake_calls(self) -> str:
        """The calls that wake everything that is asleep, the weights first."""
        parts = sorted(self.asleep, reverse=True)
        return " and ".join(f'wake("{part}")' for part in parts)


# ------------------------------------------------------------------- requests in flight


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
    """

    stream: bool
    preemptible: bool
    text: GrowingText | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    delivered: int = 0
    prompt: list[PromptLogProbs] = field(default_factory=list)


class InFlight:
    """Requests that an engine has accepted and not finished, and chunks to deliver.

    Every token of a request is delivered once, in order, with its log-prob and the
    policy version it was sampled from; a request that has ended is no longer in flight.
    """

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
        return progress._replace(
            tokens=progress.tokens[:count],
            log_probs=progress.log_probs[:count],
            finish=Finish.STOP,
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
        )
        response.prompt.clear()
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


# ---------------------------------------------------------------- an open weight update

HIDDEN_MOVEMENT = 0.01
"""Largest movement of the trainer's log-probs that an engine may hide by rounding.

If they move further, an engine that has the trainer's weights cannot have the same
log-probs as before, to the bit.
"""


@dataclass
class WeightUpdate:
    """The engine's part of a weight sync, from `begin_update` until it is accepted.

    Attributes:
        version: The policy version that the weights belong to.
        missing: Names of the parameters that were not received yet.
        committed: Whether everything was received and loaded, and only the verification
            is missing.
    """

    version: int
    missing: set[str]
    committed: bool = False

    def require_expected(self, bucket: Bucket) -> None:
        """Raise `WeightSyncError` unless all parameters of the bucket are missing."""
        unexpected = sorted(name for name in bucket.names if name not in self.missing)
        if unexpected:
            raise WeightSyncError(
                f"bucket {bucket.index} holds what is not expected, or came before:"
                f" {unexpected}"
            )

    def require_complete(self) -> None:
        """Raise `WeightSyncError` that names the parameters that are missing."""
        if self.missing:
            raise WeightSyncError(
                f"version {self.version}: not received: {sorted(self.missing)}"
            )

    def require_equal(
        self, sent: Mapping[str, Fingerprint], received: Sequence[Fingerprints]
    ) -> None:
        """Compare what was sent with what every rank of the engine received.

        Args:
            sent: The sender's fingerprint of each parameter.
            received: The fingerprints of what the loader got, by rank of the engine.

        Raises:
            WeightSyncError: Fingerprints differ; their parameters are named.
        """
        for rank, fingerprints in enumerate(received):
            names = sorted(sent.keys() | fingerprints.by_name.keys())
            different = [
                name
                for name in names
                if sent.get(name) != fingerprints.by_name.get(name)
            ]
            if not different:
                continue

            if len(received) > 1:
                where = f" on rank {rank} of the {len(received)} of the engine"
            else:
                where = ""
            raise WeightSyncError(
                f"version {self.version}: sent and received differ in"
                f" {different}{where}"
            )


@contextlib.contextmanager
def aborting_on_error(abort_update: Callable[[], None]) -> Iterator[None]:
    """Abort the open update when the block fails.

    An exception that is not one of this project becomes a `WeightSyncError`.
    """
    try:
        yield
    except BaseException as error:
        abort_update()
        if isinstance(error, Exception) and not isinstance(error, VerlRayError):
            raise WeightSyncError(
                f"the weight update failed and was aborted: {error!r}"
            ) from error
        raise


@dataclass(frozen=True, eq=False)
class Probe:
    """Fixed tokens with the log-probs that the sender's model gives them.

    An engine that holds the sender's weights computes the same log-probs.

    Attributes:
        rows: Token ids of each row.
        log_probs: The log-probs at temperature 1 of each row's tokens except the first.
        tolerance: The largest difference that two implementations of the same model may
            have.
    """

    rows: tuple[Tokens, ...]
    log_probs: tuple[Float32, ...]
    tolerance: float

    def require_finite(self, version: int) -> None:
        """Check the sender's log-probs, with which no others could agree.

        Raises:
            NonFiniteError: Some are NaN or infinite.
        """
        if all(np.isfinite(values).all() for values in self.log_probs):
            return
        raise NonFiniteError(
            f"actor: with the weights of version {version} the log-probs of fixed"
            " tokens are not finite, although every weight is: the step before made"
            " them too large to compute with. Resume from an earlier checkpoint with"
            " a lower actor.optimizer.lr"
        )


@dataclass(frozen=True, eq=False)
class _Movement:
    """The first probe for which the engine gave these log-probs."""

    version: int
    probe: Probe
    log_probs: list[Float32]


class ProbeHistory:
    """Comparison of an engine's log-probs with probes, each with those before it.

    A probe fails when the engine's log-probs differ from the sender's, and also when
    they stand still while the sender's move.
    """

    def __init__(self) -> None:
        self._last_movement: _Movement | None = None

    def verify(self, version: int, probe: Probe, log_probs: list[Float32]) -> float:
        """Return the largest difference of a log-prob.

        Args:
            version: The policy version whose weights the engine received.
            probe: The tokens, and what the sender's model gives them.
            log_probs: The log-probs that the engine gives the same tokens.

        Raises:
            WeightSyncError: The difference is above the tolerance, or the engine's
                log-probs stand still while the sender's move.
        """
        differences = [
            _largest_difference(ours, theirs)
            for ours, theirs in zip(log_probs, probe.log_probs, strict=True)
        ]
        worst = int(np.argmax(differences))

        # A comparison with a NaN is false, so the test must be for what is accepted.
        if not differences[worst] <= probe.tolerance:
            raise WeightSyncError(
                f"version {version}: every weight arrived as it was sent, but the"
                " engine computes with others: of fixed tokens"
                f" {probe.rows[worst].tolist()} its log-probs differ from the trainer's"
                f" by {differences[worst]:.3g}, more than {probe.tolerance:.3g}"
            )

        self._require_movement(version, probe, log_probs)
        return float(differences[worst])

    def _require_movement(
        self, version: int, probe: Probe, log_probs: list[Float32]
    ) -> None:
        """Raise `WeightSyncError` if only the trainer's log-probs have moved.

        Where rounding is larger than a training step, old weights are within the
        tolerance of new ones. Log-probs that stay the same to the bit give them away.
        """
        last = self._last_movement
        if last is None or not _repeats(last, probe, log_probs):
            self._last_movement = _Movement(version, probe, log_probs)
            return

        pairs = zip(probe.log_probs, last.probe.log_probs, strict=True)
        movement = max(_largest_difference(now, earlier) for now, earlier in pairs)
        if movement > HIDDEN_MOVEMENT:
            raise WeightSyncError(
                f"version {version}: every weight arrived as it was sent, but"
                " the engine computes with older ones: its log-probs of fixed"
                f" tokens are to the bit those of version {last.version}, since when"
                f" the trainer's have moved by {movement:.3g}"
            )


def _largest_difference(ours: Float32, theirs: Float32) -> np.float32:
    difference: np.float32 = np.abs(ours - theirs).max(initial=0.0)
    return difference


def _repeats(last: _Movement, probe: Probe, log_probs: list[Float32]) -> bool:
    """Whether the engine gives the same tokens the same log-probs, to the bit."""
    if len(log_probs) != len(last.log_probs):
        return False
    if not all(map(np.array_equal, log_probs, last.log_probs)):
        return False
    return all(map(np.array_equal, probe.rows, last.probe.rows))
