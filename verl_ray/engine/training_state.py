"""The sharded state of a module and its optimizer, as torch's checkpoint has it.

Invariant: the state has only parameters that learn, in this job or in the run that
wrote it. Frozen ones, such as the base of an adapter, are in the model's directory.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from verl_ray.models.role_model import RoleModel


def learning_names(model: RoleModel) -> frozenset[str]:
    """Return the names in a state of the parameters that learn."""
    return frozenset(
        f"hf.{name}"
        for name, value in model.hf.named_parameters()
        if value.requires_grad
    )


def training_state(
    model: RoleModel,
    optimizer: torch.optim.Optimizer | None,
    adapter: Collection[str] | None,
) -> dict[str, Any]:
    """Return the entries `model` and `optimizer` of an engine's state.

    Args:
        model: The model.
        optimizer: Its optimizer; None for a model that does not learn, whose state has
            no such entry.
        adapter: Names of the parameters that learn beside a frozen base, also where
            they do not learn in this job; None if there is no adapter.
    """
    options = _options(optimizer, adapter)
    if optimizer is None:
        model_state = get_model_state_dict(model, options=options)
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)

    if adapter is not None:
        # torch keeps frozen parameters that are tied, in spite of the options.
        model_state = {
            name: model_state[name] for name in model_state if name in adapter
        }
    if optimizer is None:
        return {"model": model_state}
    return {"model": model_state, "optimizer": optimizer_state}


def load_training_state(
    model: RoleModel,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    adapter: Collection[str] | None,
) -> None:
    """Load the entries of `training_state`, whose other arguments are the same."""
    options = _options(optimizer, adapter)
    if optimizer is None:
        set_model_state_dict(model, state["model"], options=options)
        return

    configured_settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]

    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )

    # torch has restored the checkpoint's settings, but a resumed run obeys its own
    # configuration.
    for group, settings in zip(
        optimizer.param_groups, configured_settings, strict=True
    ):
        group.update(settings)


def _options(
    optimizer: torch.optim.Optimizer | None, adapter: Collection[str] | None
) -> StateDictOptions:
    # With an adapter the state lacks the base model, which strict loading refuses.
    return StateDictOptions(
        ignore_frozen_params=optimizer is not None, strict=adapter is None
    )
