"""Experts that were chosen before, in the place of a router's own choice (R3).

R3 (arXiv:2510.11370): a sampler and a trainer differ by rounding, and where two experts
are about equally good, that changes the choice, and the log-probs by much. So the
trainer computes with the experts that the sampler chose. Their weights follow from the
trainer's own scores, with gradients.

Invariant: a router's computation is that of its family. What is replaced is the result
of its one `topk` over all experts, so no name of a family stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_ray.errors import EngineError


@dataclass(frozen=True)
class RecordedRouting:
    """The experts that a sampler chose for the tokens of a micro-batch."""

    experts: Tensor
    """int16 [tokens, layers, k]."""

    is_recorded: Tensor
    """bool [tokens, 1]: whether a token's experts are; others are chosen anew."""

    def choice(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts of each token in a layer, like `own`: [tokens, k].

        Args:
            layer: The layer, from 0.
            own: The experts that the router chooses itself.
        """
        recorded = self.experts[:, layer].to(own.dtype)
        return torch.where(self.is_recorded, recorded, own)

    def part(self, tokens: slice) -> RecordedRouting:
        """Return the routing of some of the tokens."""
        return RecordedRouting(self.experts[tokens], self.is_recorded[tokens])


class RoutingReplay:
    """The routers of a model, and what they are to choose.

    Attributes:
        recorded: What the routers choose from now on, also where a layer is computed
            again for the backward pass; None = what they choose themselves.
    """

    def __init__(self, routers: Mapping[int, nn.Module], num_experts: int) -> None:
        """Let routers choose what is recorded, where anything is.

        Args:
            routers: The router of each layer, by the number of the layer, from 0.
            num_experts: The number of experts of a layer.
        """
        self.recorded: RecordedRouting | None = None
        self._num_experts = num_experts
        self._routers = routers
        for layer, router in routers.items():
            router.forward = self._replaying(layer, router.forward)

    def _replaying(self, layer: int, route: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*inputs: Any, **options: Any) -> Any:
            if self.recorded is None:
                return route(*inputs, **options)
            with _Choice(self.recorded, layer, self._num_experts) as choice:
                outputs = route(*inputs, **options)
            choice.require_one()
            return outputs

        return replayed


class _Choice(TorchFunctionMode):
    """A block in which the experts that a router chooses are those recorded."""

    def __init__(self, recorded: RecordedRouting, layer: int, num_experts: int) -> None:
        super().__init__()
        self._recorded = recorded
        self._layer = layer
        num_tokens, _, top_k = recorded.experts.shape
        # Scores of groups of experts are chosen from, too, in other shapes.
        self._shapes = (num_tokens, num_experts), (num_tokens, top_k)
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if (tuple(scores.shape), tuple(result.indices.shape)) != self._shapes:
            return result
        self._count += 1
        chosen = self._recorded.choice(self._layer, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def require_one(self) -> None:
        """Raise `EngineError` unless the router has chosen among all experts once."""
        if self._count != 1:
            scores, chosen = self._shapes
            raise EngineError(
                f"rollout.routing_replay: the router of layer {self._layer} chose"
                f" {self._count} times {chosen[1]} of {scores[1]} experts by topk,"
                " expected once; set it to false"
            )
