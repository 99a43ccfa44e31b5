"""What is asked of a model over packed rows, and what it answers, token by token or row by row.

Invariant: nothing here knows a model: losses, and what spreads tokens over ranks, read these and no more. Deliberately
not here: which head can answer what (`models/role_model.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verl_ray.ops.installed_torch import with_tensors_found


@dataclass(frozen=True)
class Outputs:
    """What a caller wants of a model."""

    log_probs: bool = False
    entropy: bool = False
    greedy: bool = False
    values: bool = False
    scores: bool = False
    temperature: float = 1.0
    base: bool = False  # without the adapter, if there is one: what the model was before it learned
    routing: bool = False  # of a model with experts


@with_tensors_found
@dataclass(frozen=True)
class Routing:
    """What the routers of one forward pass did."""

    balance: Tensor  # float32 [rows], differentiable: the mean over layers of each row's balance loss
    load: Tensor  # float32 [layers, experts]: tokens that each expert was given


@with_tensors_found
@dataclass(frozen=True)
class TokenOutputs:
    """Per token that is read, float32 [read], or per row; what was not asked for is absent."""

    log_probs: Tensor | None = None  # of the target, given all before it, at the asked temperature
    entropy: Tensor | None = None  # of the distribution the target was drawn from
    greedy: Tensor | None = None  # bool: the target is the most probable token
    values: Tensor | None = None  # the head's number before the target
    scores: Tensor | None = None  # float32 [rows]: the head's number after each row's last token
    routing: Routing | None = None
