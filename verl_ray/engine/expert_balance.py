"""The balance of the experts of a row, as part of its loss.

Invariant: the balance of a row is weighted as the losses of the row are, so it
depends neither on the micro-batch size nor on the number of ranks.
"""

from __future__ import annotations

from torch import Tensor

from verl_ray.engine.base import (
    EngineSpec,
)
from verl_ray.errors import EngineError
from verl_ray.models.role_model import RoleModel
from verl_ray.ops.outputs import Routing


def balance_coefficient(spec: EngineSpec, model: RoleModel) -> float:
    """Return the weight of the balance loss, 0 for a model without experts.

    Raises:
        EngineError: A setting does not fit a model with, or without, experts.
    """
    configured = spec.expert_balance

    if model.router_watch is None:
        if configured is not None:
            raise EngineError(
                f"{spec.role}.expert_balance = {configured}: {spec.model_path} has no"
                " experts; set it to null"
            )
        return 0.0

    # The balance of a row is computed from all tokens of the row.
    backend = spec.backend
    if backend.token_slices > 1:
        key = f"{spec.role}.backend.{backend.token_slices_key}"
        raise EngineError(
            f"{key} = {backend.token_slices}: {spec.model_path} has experts, whose rows"
            " are not cut; set it to 1"
        )

    if configured is None:
        if _is_balanced_by_biases(model):
            return 0.0
        # A family without the coefficient is balanced by other means, or not at all.
        return float(getattr(model.hf.config, "router_aux_loss_coef", None) or 0.0)
    return float(configured)


def _is_balanced_by_biases(model: RoleModel) -> bool:
    """Return whether a bias of each expert takes the place of a loss (DeepSeek-V3)."""
    return any(name.endswith("score_correction_bias") for name in model.hf.state_dict())


def balance_per_loss(routing: Routing, row: Tensor, row_weights: Tensor) -> Tensor:
    """Return the balance of each row at each of its losses.

    Added to all losses of a row and weighted like them, it adds up to the mean over
    rows. The balance of a row of weight 0 does not count, like everything else of that
    row (`without_uncounted`).

    Args:
        routing: The routing of the micro-batch's rows.
        row: int64 [losses], the row of each loss.
        row_weights: float32 [rows], the weight of each loss of a row.

    Returns:
        float32 [losses].
    """
    balance = routing.balance.masked_fill(row_weights == 0, 0)
    return balance.index_select(0, row)
