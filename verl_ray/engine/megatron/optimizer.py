"""megatron-core's distributed optimizer: the part of it that this rank holds.

Invariant: AdamW as in every engine. Weight decay spares norms and biases, each shard
counts its own steps, and main weights and moments are float32, distributed over the
ranks that hold copies of the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from verl_ray.config.optimizers import AdamWConfig, OptimizerConfig
from verl_ray.engine.megatron.weight_map import (
    MappedParameter,
)
from verl_ray.errors import EngineError
from verl_ray.models.names import Box

MOMENTS = ("exp_avg", "exp_avg_sq")

# megatron-core prefers TransformerEngine's or Apex's Adam if they are installed. Those
# count the steps of a group, not of a shard, and could not load what is saved here.
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True


@dataclass(frozen=True)
class OptimizerShard:
    """The part of one parameter that one rank's optimizer steps.

    Attributes:
        mapped: The meaning of the parameter.
        main: The main weights of the part, float32, flat.
        state: AdamW's step counter and moments of the part, by name.
        start: First element of the part in the flattened parameter.
        stop: End of the part in the flattened parameter.
    """

    mapped: MappedParameter
    main: Tensor
    state: dict[str, Tensor]
    start: int
    stop: int

    def parts(self) -> Iterator[tuple[str, Box, slice]]:
        """Yield the boxes of the model's parameters that this shard consists of.

        There are none if all of its elements belong to words that pad the vocabulary.

        Yields:
            The name of a parameter of the model, a box of it, and the position of the
            box's elements in this shard.
        """
        for region in self.mapped.regions:
            for box, elements in region.parts_of_run(self.start, self.stop):
                yield region.name, box, elements


def make_optimizer(
    config: OptimizerConfig, modules: Sequence[Any], dtype: torch.dtype
) -> Any:
    """Return the optimizer of these modules' parameters. Collective.

    Args:
        config: The settings of AdamW.
        modules: The chunks of the model in megatron-core's DistributedDataParallel.
        dtype: Type of the weights that compute.

    Raises:
        EngineError: megatron-core chose another optimizer than torch's AdamW.
    """
    assert isinstance(config, AdamWConfig)
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        ),
        list(modules),
        use_gloo_process_groups=False,
    )

    for group in optimizer.param_groups:
        # megatron-core only notes which parameters decay; a scheduler of its own would
        # multiply the rate with the note.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        group["fused"] = True

    for part in optimizer.chained_optimizers:
        _require_adamw(part)
        _initialize_state(part)

    return optimizer


def _require_adamw(part: Any) -> None:
    """Refuse an optimizer whose state differs from that of torch's AdamW.

    A stub, on a rank that steps nothing, has no optimizer.
    """
    if part.is_stub_optimizer or isinstance(part.optimizer, torch.optim.AdamW):
        return

    kind = type(part.optimizer)
    raise EngineError(
        f"megatron-core steps with {kind.__module__}.{kind.__name__}, and the state"
        " that this backend saves is torch.optim.AdamW's: take megatron-core 0.16.1, or"
        " fsdp or engine as backend"
    )


def _initialize_state(part: Any) -> None:
    """Give every shard the state of no step, so that a checkpoint can be loaded."""
    for shard in part.get_parameters():
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.device),
        }
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(shard, requires_grad=False)
        part.optimizer.state[shard] = state


def clip_and_step(
    optimizer: Any, norm: float, limit: float | None, rate: float
) -> None:
    """Clip the gradients and step the optimizer.

    Args:
        optimizer: The optimizer, whose gradients are reduced and prepared.
        norm: Norm of all gradients.
        limit: The norm to clip to; None to clip nothing.
        rate: The learning rate.
    """
    for part in optimizer.chained_optimizers:
        if limit is not None and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), limit, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step_with_ready_grads()


def reload_optimizer(optimizer: Any) -> None:
    """Move the optimizer's state back from the host to the device.

    In float32 the weights that compute are also the main weights. megatron-core has
    made copies of them by then, so they are made views of the parameters again.
    """
    optimizer.restore_from_cpu()

    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        groups = zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
        for parameters, shards in groups:
            for parameter, shard in zip(parameters, shards, strict=True):
                elements = part._get_model_param_range_map(parameter)["param"]
                flat = parameter.detach().view(-1)
                shard.data = flat[elements.start : elements.end]


def shards_of(
    optimizer: Any, parameters: Mapping[Tensor, MappedParameter]
) -> Iterator[OptimizerShard]:
    """Yield the parts of flattened parameters that this rank's optimizer steps."""
    for parameter, mapped in parameters.items():
        for part in optimizer.chained_optimizers:
            if part.is_stub_optimizer or parameter not in part.model_param_gbuf_map:
                continue

            # The range is of this rank's shard within the flattened parameter.
            group, index = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][index]
            elements = part._get_model_param_range_map(parameter)["param"]
            yield OptimizerShard(
                mapped=mapped,
                main=main.detach(),
                state=part.optimizer.state[main],
                start=elements.start,
                stop=elements.end,
            )
