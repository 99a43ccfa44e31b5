"""Log-probs and entropy by definition, and a watch over what an implementation does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy in float64, all at once."""
    log_p = naive_log_p(hidden, weight, bias, temperature)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def naive_log_p(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
) -> Tensor:
    """Log-probs of the whole vocabulary in float64."""
    logits = hidden.double() @ weight.double().T + (
        0 if bias is None else bias.double()
    )
    return torch.log_softmax(logits / temperature, -1)


class Watch(TorchDispatchMode):
    """A record of the largest tensors that operations made, and of the collectives.

    The largest tensor of any type and the largest float32 one are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.numel_float32 = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives.append(str(func))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
                if leaf.dtype == torch.float32:
                    self.numel_float32 = max(self.numel_float32, leaf.numel())
        return out
