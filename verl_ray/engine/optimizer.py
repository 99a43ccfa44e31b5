"""The optimizer step: AdamW, its learning rate, and numbers that are not finite.

Invariant: the learning rate is a pure function of the number of optimizer steps taken,
so a checkpoint stores a number and no scheduler object. The optimizer has its complete
state from the beginning, so a checkpoint of an optimizer that has not stepped yet has
the same entries as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.config.roles import OptimizerConfig
from verl_ray.profiling.progress import touch


def build_adamw(
    parameters: Iterable[Tensor], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Build AdamW for the parameters that require gradients.

    Norms and biases (parameters of one dimension) get no weight decay.
    """
    learning = [p for p in parameters if p.requires_grad]
    decayed = [p for p in learning if p.dim() >= 2]
    not_decayed = [p for p in learning if p.dim() < 2]

    groups = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": config.weight_decay})
    if not_decayed:
        groups.append({"params": not_decayed, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )

    # AdamW itself would make this state at its first step. If a checkpoint lacks it,
    # torch makes it by taking a step while the checkpoint is read, and every later bias
    # correction is one step ahead.
    for parameter in learning:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the optimizer step after `step` finished ones.

    The rate rises linearly over `warmup_steps`; the first step already has a rate above
    0. It then stays constant, or follows a cosine to `min_lr_fraction * lr` at
    `total_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr

    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    floor = config.min_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def describe_bad_gradient(
    gradients: Iterable[tuple[str, Tensor | None]],
    names: Sequence[str],
    *,
    rank: int,
    world_size: int,
) -> str:
    """Describe the first parameter whose gradient is not finite on some rank.

    Collective. Every rank returns the same description, so all report the same skipped
    step.

    Args:
        gradients: This rank's part of each gradient with the name of its parameter.
        names: The names of all parameters of the model, in its order.
        rank: This rank.
        world_size: The number of ranks.
    """
    first = len(names)
    for name, gradient in gradients:
        touch()
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            first = min(first, names.index(name))

    # The minimum over (parameter, rank), encoded in one number. It is a host tensor, so
    # the gloo half of the process group carries it.
    encoded = torch.tensor(first * world_size + rank)
    if world_size > 1:
        dist.all_reduce(encoded, dist.ReduceOp.MIN)
    first, first_rank = divmod(int(encoded), world_size)

    if first == len(names):
        return "the gradient norm is not finite, though every gradient is"
    return f"the gradient of {names[first]} is not finite on rank {first_rank}"


def names_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Return the names of the tensors that hold NaN or an infinity.

    It costs as much as the norm of the tensors, which is waited for: if that is finite,
    so is all of them. Single tensors are looked at only where it is not.

    Args:
        tensors: Tensors of this rank, with names.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors if tensor.numel()]
    norm = torch.nn.utils.get_total_norm([tensor for _, tensor in named])
    if math.isfinite(norm):
        return ()
    return tuple(
        name for name, tensor in named if not bool(torch.isfinite(tensor).all())
    )
