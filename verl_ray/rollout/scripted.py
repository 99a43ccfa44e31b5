"""A rollout engine whose responses a function gives, for tests of what uses an engine.

Invariant: it follows the contract and the rules of `base.py`, and yields one token per
request and step. Nothing is sampled, and no configuration can choose it. Deliberately
not a replacement for vLLM where numbers matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from verl_ray.data.stages import Finish
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_state import EngineMemoryPart
from verl_ray.rollout.requests import (
    Float32,
    GenerationProgress,
    GenerationRequest,
    Tokens,
)
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprints
from verl_ray.weight_sync.inbox import Inbox
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, WireEndpoint, WireSpec

Script = Callable[[GenerationRequest], Sequence[tuple[int, float]]]
"""The whole response to a request, as pairs of a token and its log-prob.

A response that is longer than max_tokens is cut off there.
"""


def _minus_one_each(tokens: Tokens) -> list[float]:
    return [-1.0] * (len(tokens) - 1)


class ScriptedEngine(RolloutEngine):
    """A rollout engine without a model.

    Attributes:
        weights: The tensors of the last update, by parameter.
    """

    def __init__(
        self,
        script: Script,
        *,
        initial_version: int | None = None,
        probe_log_probs: Callable[[Tokens], Sequence[float]] = _minus_one_each,
    ) -> None:
        """Start an engine that follows `script`.

        Args:
            script: The response to each request.
            initial_version: The policy version at the start, if any.
            probe_log_probs: The log-probs of the tokens of a probe except the first.
        """
        super().__init__(initial_version)
        self.weights: dict[str, torch.Tensor] = {}
        self._probe_log_probs = probe_log_probs
        self._script = script
        self._inbox = Inbox()
        self._remaining: dict[int, list[tuple[int, float]]] = {}
        self._finish: dict[int, Finish] = {}

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    # ----------------------------------------------------------------------- generation

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            response = list(self._script(request))
            limit = request.sampling.max_tokens
            is_whole = len(response) <= limit

            self._remaining[request.request_id] = response[:limit]
            self._finish[request.request_id] = (
                Finish.STOP if is_whole else Finish.LENGTH
            )

    def _step(self) -> Iterator[GenerationProgress]:
        # A copy, because requests are removed as they end.
        for request_id, remaining in list(self._remaining.items()):
            token, log_prob = remaining.pop(0)
            finish = None
            if not remaining:
                finish = self._finish[request_id]
                self._abort([request_id])
            yield GenerationProgress(request_id, [token], [log_prob], finish)

    def _abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            del self._remaining[request_id]
            del self._finish[request_id]

    def _pause(self) -> list[GenerationProgress]:
        # Between two steps nothing is under way.
        return []

    def _resume(self) -> None:
        """Do nothing, since `_pause` did nothing."""

    # --------------------------------------------------------------------------- memory

    def _sleep(self, parts: frozenset[EngineMemoryPart]) -> None:
        if "weights" in parts:
            self.weights.clear()

    def _wake(self, part: EngineMemoryPart) -> None:
        """Do nothing, since received weights bring their own memory."""

    def _close(self, process_exits: bool) -> None:
        self._remaining.clear()
        self.weights.clear()
        self._inbox.close()

    # -------------------------------------------------------------------------- weights

    def _connect(
        self, address: Address, wire_spec: WireSpec, first_receiver: int
    ) -> None:
        endpoint = WireEndpoint(wire_spec, first_receiver, torch.device("cpu"))
        self._inbox.connect(address, endpoint)

    def _begin_update(self, manifest: Manifest) -> None:
        self._inbox.begin()
        self.weights.clear()

    def _receive(self, bucket: Bucket) -> None:
        received = self._inbox.receive(bucket)
        # The received tensors lie on the wire, and are valid only until `release`.
        self.weights.update({name: tensor.clone() for name, tensor in received.items()})
        self._inbox.release()

    def _received_fingerprints(self) -> list[Fingerprints]:
        return [self._inbox.fingerprints]

    def _commit(self, version: int) -> None:
        """Do nothing, since no weight is packed and no prefix is cached."""

    def _abort_update(self) -> None:
        self.weights.clear()

    def _probe(
        self, rows: Sequence[Tokens]
    ) -> tuple[list[Float32], list[GenerationProgress]]:
        log_probs = [
            np.array(self._probe_log_probs(tokens), np.float32) for tokens in rows
        ]
        return log_probs, []
