"""A rollout engine whose responses a function gives, for tests and benchmarks.

Invariant: it follows the contract and the rules of `verl_ray/rollout/base.py`, and
yields one token per step and request for which its KV cache has space. Nothing is
sampled, and no configuration can choose it. Deliberately not a replacement for vLLM
where numbers matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_ray.columns.stages import Finish
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_state import EngineMemoryPart
from verl_ray.rollout.requests import (
    EngineLoad,
    Float32,
    GenerationProgress,
    GenerationRequest,
    PromptLogProbs,
    Tokens,
)
from verl_ray.weight_sync.fingerprint import Fingerprints
from verl_ray.weight_sync.manifest import Bucket, Manifest
from verl_ray.weight_sync.transport import Address, Inbox, WireEndpoint, WireSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Script = Callable[[GenerationRequest], Sequence[tuple[int, float]]]
"""The whole response to a request, as pairs of a token and its log-prob.

A response that is longer than max_tokens is cut off there.
"""


def _minus_one_each(tokens: Tokens) -> list[float]:
    return [-1.0] * (len(tokens) - 1)


@dataclass(slots=True)
class _Row:
    """A request in flight.

    Attributes:
        remaining: The pairs of token and log-prob that it has not yielded yet.
        finish: How its response ends.
        length: Number of tokens of its prompt and of what it yielded.
        prompt: Log-probs of its prompt, which come with the first token; None for none.
        is_running: Whether its tokens are in the KV cache.
    """

    remaining: list[tuple[int, float]]
    finish: Finish
    length: int
    prompt: PromptLogProbs | None
    is_running: bool = False


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
        kv_cache_tokens: int = 1 << 20,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Start an engine that follows `script`.

        Args:
            script: The response to each request.
            initial_version: The policy version at the start, if any.
            probe_log_probs: The log-probs of the tokens of a probe, or of a prompt that
                is scored, except the first. Each token counts as the likeliest.
            kv_cache_tokens: Tokens for which the KV cache has space.
            tokenizer: Reads stop strings; None refuses them.
        """
        super().__init__(initial_version)
        self.weights: dict[str, torch.Tensor] = {}
        self._probe_log_probs = probe_log_probs
        self._script = script
        self._inbox = Inbox()
        self._rows: dict[int, _Row] = {}
        self._kv_cache_tokens = kv_cache_tokens
        self._tokenizer = tokenizer
        self._preemptions = 0

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    @property
    def load(self) -> EngineLoad:
        running = [row.length for row in self._rows.values() if row.is_running]
        use = min(1.0, sum(running) / self._kv_cache_tokens)
        waiting = len(self._rows) - len(running)
        return EngineLoad(use, len(running), waiting, self._preemptions)

    # ----------------------------------------------------------------------- generation

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            response = list(self._script(request))
            limit = request.sampling.max_tokens
            is_whole = len(response) <= limit

            finish = Finish.STOP if is_whole else Finish.LENGTH
            prompt = None
            if request.scores_prompt:
                log_probs = np.array(self._probe_log_probs(request.tokens), np.float32)
                prompt = PromptLogProbs(log_probs, request.tokens[1:], log_probs)
            row = _Row(response[:limit], finish, len(request.tokens), prompt)
            self._rows[request.request_id] = row

    def _step(self) -> Iterator[GenerationProgress]:
        for request_id, row in self._fitting_rows():
            token, log_prob = row.remaining.pop(0)
            row.length += 1
            finish = None
            if not row.remaining:
                finish = row.finish
                self._abort([request_id])
            prompt, row.prompt = row.prompt, None
            yield GenerationProgress(request_id, [token], [log_prob], finish, prompt)

    def _fitting_rows(self) -> list[tuple[int, _Row]]:
        """Return the oldest requests that have space for a token each, at least one.

        The others wait, and those of them that were running are preempted.
        """
        fitting: list[tuple[int, _Row]] = []
        needed = 0
        for request_id, row in self._rows.items():
            needed += row.length + 1
            fits = needed <= self._kv_cache_tokens or not fitting
            if fits:
                fitting.append((request_id, row))
            elif row.is_running:
                self._preemptions += 1
            row.is_running = fits
        return fitting

    def _abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            del self._rows[request_id]

    def _pause(self) -> list[GenerationProgress]:
        # Between two steps nothing is under way.
        return []

    def _give_up_kv_cache(self) -> None:
        for row in self._rows.values():
            row.is_running = False

    def _resume(self) -> None:
        """Do nothing, since `_pause` did nothing."""

    # --------------------------------------------------------------------------- memory

    def _sleep(self, parts: frozenset[EngineMemoryPart]) -> None:
        if "weights" in parts:
            self.weights.clear()

    def _wake(self, part: EngineMemoryPart) -> None:
        """Do nothing, since received weights have their own memory."""

    def _close(self, process_exits: bool) -> None:
        self._rows.clear()
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
