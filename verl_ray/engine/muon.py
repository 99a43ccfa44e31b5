"""Muon: momentum that is made orthogonal, of matrices; AdamW for other parameters.

It is that of arXiv:2502.16982 (equations 1 to 4), with the coefficients, precision and
Nesterov momentum of torch.optim.Muon, which takes neither sharded nor stacked matrices.

Invariant: a sharded matrix is made orthogonal as a whole. Its ranks gather it, each
computes the same, and each keeps its part. So a step does not depend on the sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from verl_ray.profiling.progress import touch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7

MOMENTUM = "momentum_buffer"
"""The key of the mean gradient in the state of a matrix."""


def is_stack_of_matrices(value: Tensor) -> bool:
    """Return whether a parameter is a matrix, or a stack with a matrix per expert.

    The kernels of depthwise convolutions have a single row each, and are none.
    """
    return value.dim() in (2, 3) and min(value.shape[-2:]) > 1


class Muon(torch.optim.AdamW):
    """AdamW, but for the first group of parameters."""

    def __init__(
        self, matrices: Sequence[Tensor], groups: Any, *, momentum: float, **rest: Any
    ) -> None:
        """Make the optimizer.

        Args:
            matrices: Parameters that are stacks of matrices.
            groups: Groups of the others, as AdamW takes them.
            momentum: Decay rate of the mean gradient.
            rest: The arguments of AdamW.
        """
        muon = {"params": list(matrices), "momentum": momentum}
        super().__init__([muon, *groups], **rest)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step; there is no closure."""
        muon, *others = groups = self.param_groups
        for parameter in muon["params"]:
            if parameter.grad is not None:
                self._step_matrices(parameter, muon)
                touch()
        try:
            self.param_groups = others
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        state["step"] += 1
        mean = state[MOMENTUM].lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(gradient.lerp(mean, group["momentum"]))

        # The root mean square of an update becomes 0.2, as that of AdamW's is.
        size = 0.2 * max(parameter.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * size)


def orthogonal(stack: Tensor) -> Tensor:
    """Return the nearest matrices whose singular values are all about 1.

    Collective for a sharded matrix. FSDP2 cuts a stack between its matrices, so each
    rank computes its own.

    Args:
        stack: A matrix, or a stack of them.

    Returns:
        A stack of the same shape, type, sharding and device.
    """
    if not isinstance(stack, DTensor):
        return _newton_schulz(stack.bfloat16()).to(stack.dtype)

    mesh, placements = stack.device_mesh, stack.placements
    # Parameters that live on the host are computed on the device.
    own = stack.to_local()
    part = own.bfloat16().to(mesh.device_type)
    if stack.dim() == 3:
        part = _newton_schulz(part)
    else:
        narrow = DTensor.from_local(
            part,
            mesh,
            placements,
            run_check=False,
            shape=stack.shape,
            stride=stack.stride(),
        )
        whole = _newton_schulz(narrow.full_tensor())
        # Every rank has it, so nothing is sent.
        cut = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        part = cut.to_local()
    # `DTensor.from_local` would move it to the device of the mesh.
    return DTensor(part.to(own), stack._spec, requires_grad=False)


def _newton_schulz(stack: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices of a whole stack, bfloat16."""
    is_tall = stack.size(-2) > stack.size(-1)
    x = stack.mT if is_tall else stack
    x = x if x.dim() == 3 else x.unsqueeze(0)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)

    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)

    x = x.view(stack.mT.shape if is_tall else stack.shape)
    return x.mT if is_tall else x
