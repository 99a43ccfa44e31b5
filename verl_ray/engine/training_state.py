"""The sharded state of a module and its optimizer, as torch's checkpoint has it.

Invariant: the state has only parameters that learn. Frozen ones, such as the base of an
adapter, are in the model's directory.

Deliberately not here: files (`verl_ray/checkpoint`), the schedule and random streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from verl_ray.models.role_model import RoleModel

CONFIGURED_SETTINGS = ("betas", "eps", "weight_decay")
"""Settings of AdamW that a resumed run takes from its configuration."""


def training_state(
    model: RoleModel, optimizer: torch.optim.Optimizer, *, has_adapter: bool
) -> dict[str, Any]:
    """Return the entries `model` and `optimizer` of an engine's state."""
    model_state, optimizer_state = get_state_dict(
        model, optimizer, options=_options(has_adapter)
    )
    if has_adapter:
        # torch keeps frozen parameters that are tied, in spite of the options.
        learning = {
            f"hf.{name}"
            for name, value in model.hf.named_parameters()
            if value.requires_grad
        }
        model_state = {
            name: value for name, value in model_state.items() if name in learning
        }
    return {"model": model_state, "optimizer": optimizer_state}


def load_training_state(
    model: RoleModel,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    has_adapter: bool,
) -> None:
    """Load the entries `model` and `optimizer` of an engine's state."""
    configured_settings = [
        {name: group[name] for name in CONFIGURED_SETTINGS}
        for group in optimizer.param_groups
    ]

    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_options(has_adapter),
    )

    # torch has restored the checkpoint's settings, but a resumed run obeys its own
    # configuration.
    for group, settings in zip(
        optimizer.param_groups, configured_settings, strict=True
    ):
        group.update(settings)


def _options(has_adapter: bool) -> StateDictOptions:
    # With an adapter the state lacks the base model, which strict loading refuses.
    return StateDictOptions(ignore_frozen_params=True, strict=not has_adapter)
