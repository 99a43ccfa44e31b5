"""megatron-core's distributed optimizer: how it is made and stepped, and what of it this rank holds.

Invariant: AdamW as every engine has it: weight decay spares norms and biases, each shard counts its own steps, main
weights and moments are float32, shared out over the ranks that hold copies of the same parameters.
Deliberately not here: gradients, which are reduced before, and names of parameters.
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
from torch import Tensor, nn

from verl_ray.config.roles import OptimizerConfig
from verl_ray.engine.megatron.weight_map import Mapped
from verl_ray.errors import EngineError
from verl_ray.models.names import Box

MOMENTS = ("exp_avg", "exp_avg_sq")

# TransformerEngine's and Apex's, which megatron-core prefers where they are installed, count the steps of a group, not
# of a shard: what is saved and loaded here would be none of theirs.
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True


@dataclass(frozen=True)
class Shard:
    """What one rank's optimizer holds of one parameter: elements `start` to `stop` of it, flattened."""

    mapped: Mapped
    main: Tensor
    held: dict[str, Tensor]
    start: int
    stop: int

    def parts(self) -> Iterator[tuple[str, Box, slice]]:
        """Boxes of the model's parameters, by name, and where each stands among these elements. None where all of them
        are of words that only fill up."""
        for region in self.mapped.regions:
            for box, run in region.run(self.start, self.stop):
                yield region.name, box, run


def make_optimizer(config: OptimizerConfig, modules: Sequence[Any], dtype: torch.dtype) -> Any:
    """Over the parameters of these modules, wrapped by megatron-core's DistributedDataParallel. Collective."""
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
        # megatron-core only notes which parameters decay, and leaves the product to a scheduler of its own
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        group["fused"] = True
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and not isinstance(part.optimizer, torch.optim.AdamW):
            made = f"{type(part.optimizer).__module__}.{type(part.optimizer).__name__}"
            raise EngineError(
                f"megatron-core steps with {made}, and the state that this backend saves is torch.optim.AdamW's: take "
                f"megatron-core 0.16.1, or fsdp or engine as backend"
            )
        for shard in part.get_parameters():
            part.optimizer.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                **{name: torch.zeros_like(shard, requires_grad=False) for name in MOMENTS},
            }
    return optimizer


def clip_and_step(optimizer: Any, norm: float, limit: float | None, rate: float) -> None:
    """Clip the gradients, of this norm, to the limit, and step at this learning rate."""
    for part in optimizer.chained_optimizers:
        if limit is not None and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), limit, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step_with_ready_grads()


def restore(optimizer: Any) -> None:
    """Back to the device from the host. Weights that learn in the type that computes are those that compute, of which
    megatron-core has made copies by then."""
    optimizer.restore_from_cpu()
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for models, shards in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
            for model, shard in zip(models, shards, strict=True):
                run = part._get_model_param_range_map(model)["param"]
                shard.data = model.detach().view(-1)[run.start : run.end]


def shards_of(optimizer: Any, parameters: Mapping[nn.Parameter, Mapped]) -> Iterator[Shard]:
    """What this rank's optimizer steps: runs of flattened parameters, in float32."""
    for parameter, mapped in parameters.items():
        for part in optimizer.chained_optimizers:
            if part.is_stub_optimizer or parameter not in part.model_param_gbuf_map:
                continue
            group, at = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][at]
            run = part._get_model_param_range_map(parameter)["param"]
            yield Shard(mapped, main.detach(), part.optimizer.state[main], run.start, run.end)
