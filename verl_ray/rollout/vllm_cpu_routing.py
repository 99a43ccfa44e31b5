"""The experts that routers choose in vLLM's CPU worker, recorded for their replay.

vLLM returns them itself where its V2 model runner runs (`enable_return_routed_experts`,
`distributed/aux_output_connector`), which needs Triton. Here they are recorded by the
hooks that vLLM's own recorder is called by, and come in the same parts: with each
sampled token the positions of its request that were not returned before.

Invariant: a position counts as it was computed first. What is computed again, after a
preemption or with new weights, is what later tokens attend to, and no token was sampled
from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    bind_routed_experts_capturer,
)

from verl_ray.columns.stages import Int16
from verl_ray.errors import RolloutError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class _Positions:
    """Positions of a request that were not taken yet: from `start` on, in parts."""

    start: int = 0
    parts: list[Int16] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.parts))


class RoutingRecorder:
    """The choices of the routers of a worker's model, by request.

    The worker caches no prefixes, so every request computes all of its positions.
    """

    def __init__(self, runner: Any) -> None:
        """Record what the model of a runner chooses from now on."""
        self._num_layers = runner.model_config.get_total_num_hidden_layers()
        self._runner = runner
        self._chosen: dict[int, torch.Tensor] = {}
        self._recorded: dict[str, _Positions] = {}
        # Each router calls `capture` with what it chooses.
        bind_routed_experts_capturer(runner.model, self)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Note the experts of the tokens of this step in a layer, [tokens, k]."""
        self._chosen[layer_id] = topk_ids

    def record(self, scheduler_output: SchedulerOutput) -> None:
        """Record the choices of a step that was computed."""
        for name in scheduler_output.finished_req_ids:
            self._recorded.pop(name, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return

        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens

        experts = self._experts(scheduler_output.total_num_scheduled_tokens)
        first = 0
        for name in self._runner.input_batch.req_ids:
            count = counts[name]
            positions = self._recorded.setdefault(name, _Positions())
            known = positions.end - starts[name]
            if known < 0:
                raise RolloutError(
                    f"vLLM computes a request from position {starts[name]} on, and"
                    f" computed {positions.end}: its prefix is cached"
                )
            if known < count:
                positions.parts.append(experts[first + known : first + count])
            first += count

    def _experts(self, num_tokens: int) -> Int16:
        """Return what was chosen in this step, [tokens, layers, k]."""
        if not self._chosen:
            raise RolloutError("vLLM computed tokens, and called no router")
        top_k = next(iter(self._chosen.values())).shape[1]
        experts = np.zeros((num_tokens, self._num_layers, top_k), np.int16)
        for layer, chosen in self._chosen.items():
            experts[:, layer] = chosen[:num_tokens].numpy()
        self._chosen.clear()
        return experts

    def take(self, ends: Mapping[str, int]) -> dict[str, Int16]:
        """Return the positions of requests that were not returned before.

        Args:
            ends: Requests, each with the position behind the last one to return.

        Returns:
            int16 [positions, layers, k] per request.
        """
        return {name: self._take(name, end) for name, end in ends.items()}

    def _take(self, name: str, end: int) -> Int16:
        positions = self._recorded[name]
        experts = np.concatenate(positions.parts)
        count = end - positions.start
        if not 0 < count <= len(experts):
            raise RolloutError(
                f"vLLM computed the positions {positions.start} to {positions.end} of a"
                f" request, and sampled behind position {end}"
            )
        positions.parts = [experts[count:]]
        positions.start = end
        return experts[:count]
