"""Experts that were chosen before, in the place of a router's own choice (R3).

R3 (arXiv:2510.11370): a sampler and a trainer differ by rounding, and where two experts
are about equally good, that changes the choice, and the log-probs by much. So the
trainer computes with the experts that the sampler chose. Their weights follow from the
trainer's own scores, with gradients.

Invariant: a router's computation is that of its family. What is replaced is the result
of its one `topk` over all experts, so no name of a family stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_ray.columns.stages import Int16
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

        Raises:
            EngineError: Their number is another one.
        """
        recorded = self.experts[:, layer].to(own.dtype)
        if recorded.shape != own.shape:
            raise EngineError(
                f"routed_experts has {recorded.shape[1]} experts of {len(recorded)}"
                f" tokens, expected {own.shape[1]} of {len(own)}, as the router of"
                f" layer {layer} chooses"
            )
        return torch.where(self.is_recorded, recorded, own)

    def part(self, tokens: slice) -> RecordedRouting:
        """Return the routing of some of the tokens."""
        return RecordedRouting(self.experts[tokens], self.is_recorded[tokens])


def require_choices(
    experts: Int16, layers: Sequence[int], num_layers: int, num_experts: int
) -> None:
    """Raise `EngineError` unless these are choices of a model's routers.

    Args:
        experts: int16 [tokens, layers, k], of tokens whose experts are recorded.
        layers: The numbers of the layers with experts.
        num_layers: The number of all layers.
        num_experts: The number of experts of a layer.
    """
    if experts.shape[1] != num_layers:
        raise EngineError(
            f"routed_experts has {experts.shape[1]} layers, and the model {num_layers}"
        )
    chosen = experts[:, list(layers)]
    if not chosen.size:
        return
    if chosen.min() < 0 or chosen.max() >= num_experts:
        raise EngineError(
            f"routed_experts has the experts {chosen.min()} to {chosen.max()}, and a"
            f" layer of the model 0 to {num_experts - 1}"
        )
    # Zeros stand where nothing was recorded.
    if chosen.shape[-1] > 1 and bool((chosen[..., 0] == chosen[..., 1]).any()):
        raise EngineError(
            "routed_experts has an expert twice for a token, or nothing was recorded"
            " of it"
        )


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
        # Scores of groups of experts are chosen from, too, in other shapes.
        self._shape = len(recorded.experts), num_experts
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.masked_fill, Tensor.masked_fill):
            return self._unmasked(args[0], result)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if tuple(scores.shape) != self._shape:
            return result
        self._count += 1
        chosen = self._recorded.choice(self._layer, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def _unmasked(self, scores: Tensor, masked: Tensor) -> Tensor:
        """Return masked scores, with those of replayed tokens as they were.

        A router hides the groups of experts that it does not choose, and may weigh by
        what it hid (DeepSeek-V2). The sampler may have chosen another group.
        """
        if tuple(masked.shape) != self._shape:
            return masked
        return torch.where(self._recorded.is_recorded, scores, masked)

    def require_one(self) -> None:
        """Raise `EngineError` unless the router has chosen among all experts once."""
        if self._count != 1:
            raise EngineError(
                f"rollout.routing_replay: the router of layer {self._layer} chose"
                f" {self._count} times of {self._shape[1]} experts by topk, expected"
                " once; set it to false"
            )
