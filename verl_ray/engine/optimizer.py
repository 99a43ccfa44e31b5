"""The optimizers, their learning rate, and numbers that are not finite.

Invariant: the learning rate is a pure function of settings and of the number of
optimizer steps taken, so a checkpoint stores a number and no scheduler object. An
optimizer has its complete state from the beginning, so a checkpoint of an optimizer
that has not stepped yet has the same entries as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.config.optimizers import (
    AdafactorConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)
from verl_ray.engine.muon import MOMENTUM, Muon, is_stack_of_matrices
from verl_ray.models.role_model import RoleModel
from verl_ray.profiling.progress import touch


def build_optimizer(model: RoleModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a model's parameters that require gradients."""
    learning = [p for p in model.parameters() if p.requires_grad]
    if isinstance(config, AdamWConfig):
        return build_adamw(learning, config)
    if isinstance(config, MuonConfig):
        return _build_muon(model, config)
    if isinstance(config, SgdConfig):
        return _build_sgd(learning, config)
    assert isinstance(config, AdafactorConfig)
    return _build_adafactor(learning, config)


def build_adamw(
    parameters: Iterable[Tensor], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Build AdamW for the parameters that require gradients."""
    assert isinstance(config, AdamWConfig)
    groups = _groups([p for p in parameters if p.requires_grad], config.weight_decay)
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    _begin_moments(optimizer, groups)
    return optimizer


def _build_muon(model: RoleModel, config: MuonConfig) -> Muon:
    matrices = [
        p
        for p in model.layers.parameters()
        if p.requires_grad and is_stack_of_matrices(p)
    ]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    groups = _groups(others, config.weight_decay)
    optimizer = Muon(
        matrices,
        groups,
        momentum=config.momentum,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    _begin_moments(optimizer, groups)
    for parameter in matrices:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            MOMENTUM: torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def _build_sgd(learning: Sequence[Tensor], config: SgdConfig) -> torch.optim.SGD:
    groups = _groups(learning, config.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    for parameter in learning:
        state = optimizer.state[parameter]
        if config.momentum:
            state[MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
    return optimizer


def _build_adafactor(
    learning: Sequence[Tensor], config: AdafactorConfig
) -> torch.optim.Adafactor:
    groups = _groups(learning, config.weight_decay)
    optimizer = torch.optim.Adafactor(groups, lr=config.lr)
    for parameter in learning:
        # torch reads the counter of steps on the host.
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        if parameter.dim() < 2:
            state["variance"] = torch.zeros_like(parameter, requires_grad=False)
            continue
        *stack, rows, columns = parameter.shape
        state["row_var"] = parameter.detach().new_zeros((*stack, rows, 1))
        state["col_var"] = parameter.detach().new_zeros((*stack, 1, columns))
    return optimizer


def _groups(learning: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameters in groups: those of one dimension get no weight decay.

    These are norms and biases.
    """
    decayed = [p for p in learning if p.dim() >= 2]
    not_decayed = [p for p in learning if p.dim() < 2]
    groups: list[dict[str, Any]] = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": weight_decay})
    if not_decayed:
        groups.append({"params": not_decayed, "weight_decay": 0.0})
    return groups


def _begin_moments(
    optimizer: torch.optim.AdamW, groups: Iterable[Mapping[str, Any]]
) -> None:
    """Make the moments of these groups, as AdamW does at its first step.

    If a checkpoint lacks them, torch makes them by taking a step while the checkpoint
    is read, and every later bias correction is one step ahead.
    """
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def learning_rate(config: OptimizerConfig, step: float, total_steps: int) -> float:
    """Return the learning rate of the optimizer step after `step` finished ones.

    The rate rises linearly over `warmup_steps`; the first step already has a rate above
    0. From then on it stays constant, or falls with the root of the step, or follows a
    cosine or a line to `min_lr_fraction * lr` at `total_steps`. With wsd the line
    begins `decay_fraction * total_steps` before. A `Pace` leads to fractions of steps.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "inverse_sqrt":
        return config.lr * math.sqrt(warmup / step)

    begin: float = warmup
    if config.schedule == "wsd":
        begin = max(warmup, total_steps * (1 - config.decay_fraction))
    span = max(total_steps - begin, 1)
    progress = min(max(step - begin, 0) / span, 1.0)
    remaining = 1 - progress
    if config.schedule == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    floor = config.min_lr_fraction
    return config.lr * (floor + (1 - floor) * remaining)


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
