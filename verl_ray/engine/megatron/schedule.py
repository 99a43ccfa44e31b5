"""The passage of micro-batches through the stages, in megatron-core's schedules.

A schedule is sequential, 1F1B, or interleaved, depending on the layout.

Invariant: heads and losses are computed on the last stage alone, from outputs that
all context-parallel ranks have gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from verl_ray.engine.megatron.expert_balance import ExpertBalance
from verl_ray.engine.megatron.model import Stage
from verl_ray.engine.micro_batches import Loss, MicroBatch, MicroBatches
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.parallel.sharding import ShardingManager


class Schedule:
    """The schedule of one engine.

    Args:
        stages: This rank's chunks of the model.
        modules: The same in megatron-core's DistributedDataParallel, if they learn.
        sharding: How the tokens of a micro-batch are distributed over ranks.
        token_multiple: The number of tokens of a micro-batch is a multiple of this.
        balance: The balance of the model's experts; None in a model without.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        modules: Sequence[Any],
        *,
        sharding: ShardingManager,
        token_multiple: int,
        balance: ExpertBalance | None,
    ) -> None:
        self._stages = stages
        self._modules = modules
        self._sharding = sharding
        self._token_multiple = token_multiple
        self._balance = balance

    def forward(
        self, batches: MicroBatches, outputs: RequestedOutputs
    ) -> list[TokenOutputs]:
        """Return the outputs of every micro-batch; none on other stages than the last.

        Args:
            batches: The micro-batches.
            outputs: Which outputs.
        """

        def forward_step(
            batches: Iterator[MicroBatch], stage: Stage
        ) -> tuple[Tensor, Callable[..., TokenOutputs]]:
            batch = next(batches)

            # megatron-core calls this on the last stage.
            def outputs_of(hidden: Tensor, non_loss_data: bool) -> TokenOutputs:
                own = stage.head(hidden, batch.packed, outputs)
                return self._sharding.postprocess(own)

            return stage(batch.packed), outputs_of

        results: list[TokenOutputs] = self._run(
            batches, forward_step, self._stages, forward_only=True
        )
        return results

    def forward_backward(
        self,
        batches: MicroBatches,
        outputs: RequestedOutputs,
        loss: Loss,
        device: torch.device,
    ) -> None:
        """Add the gradients of every micro-batch's loss.

        Args:
            batches: The micro-batches.
            outputs: The outputs that the loss needs.
            loss: Returns a micro-batch's share of the loss from its outputs.
            device: The device of the model.
        """
        if self._balance is not None:
            self._balance.begin()
        # megatron-core would divide the gradients by the sum of these counts.
        no_tokens = torch.zeros((), dtype=torch.int, device=device)

        def forward_step(
            batches: Iterator[MicroBatch], module: Any
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            stage: Stage = module.module
            routed = None
            if self._balance is not None:
                routed = self._balance.rows_of(batch)

            # megatron-core calls this on the last stage.
            def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
                own = stage.head(hidden, batch.packed, outputs)
                gathered = self._sharding.postprocess(own)
                return loss(batch, gathered), no_tokens, None

            return module(batch.packed, routed), loss_of

        self._run(batches, forward_step, self._modules, forward_only=False)

    def _run(
        self,
        batches: MicroBatches,
        forward_step: Callable[..., Any],
        modules: Sequence[Any],
        *,
        forward_only: bool,
    ) -> Any:
        """Pass the micro-batches through megatron-core's schedule.

        Args:
            batches: The micro-batches.
            forward_step: Passes the next micro-batch through a module. It returns the
                hidden states, and the function that is applied to the last ones.
            modules: This rank's chunks of the model.
            forward_only: True if there is no backward pass.
        """
        # Each chunk of an interleaved schedule consumes all micro-batches.
        iterators: Any = iter(batches)
        if len(modules) > 1:
            iterators = [iter(batches) for _ in modules]

        run = get_forward_backward_func()
        return run(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=list(modules),
            num_microbatches=len(batches),
            # The stages send each other the lengths, which vary.
            seq_length=self._token_multiple,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
