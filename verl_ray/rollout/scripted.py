"""An engine whose responses are given by a function: for unit tests of what stands around an engine.

Invariant: the contract and the rules of `base`, one token per request and step; nothing is sampled. No configuration
can choose it. Deliberately not a stand-in for vLLM where numbers matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from verl_ray.data.stages import Finish
from verl_ray.rollout.base import Part, RolloutEngine
from verl_ray.rollout.requests import Float32, Progress, Request, Tokens
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Prints
from verl_ray.weight_sync.inbox import Inbox
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route, Seat

Script = Callable[[Request], Sequence[tuple[int, float]]]
"""The whole response to a request as (token, log-prob); what lies past max_tokens is cut off."""


class ScriptedEngine(RolloutEngine):
    def __init__(
        self,
        script: Script,
        *,
        initial_version: int | None = None,
        log_probs_of: Callable[[Tokens], Sequence[float]] = lambda tokens: [-1.0] * (len(tokens) - 1),
    ) -> None:
        """`log_probs_of`: what it says of the tokens of a probe but the first."""
        super().__init__(initial_version)
        self.weights: dict[str, torch.Tensor] = {}  # as last received
        self._log_probs_of = log_probs_of
        self._script = script
        self._inbox = Inbox()
        self._left: dict[int, list[tuple[int, float]]] = {}
        self._ends: dict[int, Finish] = {}

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def _release(self, process_ends: bool) -> None:
        self._left.clear()
        self.weights.clear()
        self._inbox.close()

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            response, limit = list(self._script(request)), request.sampling.max_tokens
            self._left[request.request_id] = response[:limit]
            self._ends[request.request_id] = Finish.STOP if len(response) <= limit else Finish.LENGTH

    def _advance(self) -> Iterator[Progress]:
        for request_id, left in list(self._left.items()):
            token, log_prob = left.pop(0)
            finish = None if left else self._ends[request_id]
            if finish is not None:
                self._drop([request_id])
            yield Progress(request_id, [token], [log_prob], finish)

    def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            del self._left[request_id], self._ends[request_id]

    def _hold(self) -> list[Progress]:
        return []  # nothing is in the making between two steps

    def _let_go(self) -> None:
        """Nothing to do."""

    def _probe(self, rows: Sequence[Tokens]) -> tuple[list[Float32], list[Progress]]:
        return [np.array(self._log_probs_of(tokens), np.float32) for tokens in rows], []

    def _free(self, parts: frozenset[Part]) -> None:
        if "weights" in parts:
            self.weights.clear()

    def _restore(self, part: Part) -> None:
        """Nothing to do: received weights bring their own memory."""

    def _connect(self, address: Address, route: Route, first_receiver: int) -> None:
        self._inbox.connect(address, Seat(route, first_receiver, torch.device("cpu")))

    def _begin_update(self, manifest: Manifest) -> None:
        self._inbox.begin()
        self.weights.clear()

    def _receive(self, bucket: Bucket) -> None:
        received = self._inbox.receive(bucket)
        self.weights.update({name: tensor.clone() for name, tensor in received.items()})
        self._inbox.release()

    def _arrived(self) -> list[Prints]:
        return [self._inbox.prints]

    def _commit(self, version: int) -> None:
        """Nothing to do: nothing is packed or cached."""

    def _abort_update(self) -> None:
        self.weights.clear()
