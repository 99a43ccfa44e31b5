"""The AdamW optimizer of torch, as the engines use it.

Invariant: the optimizer has its complete state from the beginning, so a checkpoint of
an optimizer that has not stepped yet has the same entries as any other.

Deliberately not here: the learning rate (`packed_engine.py`), and clipping.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from verl_ray.config.roles import OptimizerConfig


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
