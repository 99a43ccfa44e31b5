"""The state of megatron-core's optimizer in a checkpoint.

Invariant: the state does not depend on the layout. Weights and moments have the names
of the model as transformers has it. Each is a set of boxes of a whole parameter, in
float32, the type in which it learns. So any layout and any other backend can read the
state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_ray.checkpoint.sharded import Slices
from verl_ray.config.optimizers import OptimizerConfig
from verl_ray.engine.megatron.optimizer import OptimizerShard
from verl_ray.engine.megatron.weight_map import (
    ParameterMap,
    shape_of_box,
)
from verl_ray.engine.optimizer import build_adamw
from verl_ray.models.names import Box
from verl_ray.models.role_model import RoleModel
from verl_ray.weight_sync.manifest import Manifest

BoxValues = list[tuple[Box, Tensor]]
"""Boxes of a parameter, each with the values that this rank holds there."""


def model_state(
    mapped: ParameterMap, shapes: Mapping[str, tuple[int, ...]], manifest: Manifest
) -> dict[str, Slices]:
    """Return the entry `model` of an engine that does not learn.

    The tensors are the weights that compute, so loading into them restores them, in
    their own type.

    Args:
        mapped: The parameters of this rank.
        shapes: The shapes of all parameters of the model, by name.
        manifest: The tensors of the model, for the names of tied parameters.
    """
    weights: dict[str, BoxValues] = defaultdict(list)
    for parameter, meaning in mapped.items():
        for region in meaning.regions:
            values = parameter.detach()[region.rows].view(shape_of_box(region.box))
            weights[region.name].append((region.box, values))

    slices = {
        name: Slices(shapes[name], boxes[0][1].dtype, boxes)
        for name, boxes in weights.items()
    }
    return _with_tied(slices, manifest)


def _with_tied(slices: Mapping[str, Slices], manifest: Manifest) -> dict[str, Slices]:
    """Return parameters by their names in a state; a tied one has several."""
    model = {f"hf.{name}": values for name, values in slices.items()}
    for parameter in manifest.parameters:
        source = parameter.tied_to
        if source is not None and source in slices:
            model[f"hf.{parameter.name}"] = slices[source]
    return model


def optimizer_state(
    shards: Iterable[OptimizerShard],
    shapes: Mapping[str, tuple[int, ...]],
    manifest: Manifest,
) -> dict[str, Any]:
    """Return `model` and `optimizer.state`, as far as this rank holds them.

    The tensors are the optimizer's own, so loading into them restores it.

    Args:
        shards: What this rank's optimizer steps.
        shapes: The shapes of all parameters of the model, by name.
        manifest: The tensors of the model, for the names of tied parameters.
    """
    weights: dict[str, BoxValues] = defaultdict(list)
    moments: dict[str, dict[str, BoxValues]] = defaultdict(lambda: defaultdict(list))
    steps: dict[str, Tensor] = {}
    saved: dict[str, bool] = {}

    for shard in shards:
        for name, box, elements in shard.parts():
            shape = shape_of_box(box)
            weights[name].append((box, shard.main[elements].view(shape)))
            for kind, values in shard.state.items():
                if kind != "step":
                    moments[kind][name].append((box, values[elements].view(shape)))
            steps[name] = shard.state["step"]
            saved[name] = shard.mapped.owned

    def slices_of(name: str, values: BoxValues) -> Slices:
        return Slices(shapes[name], torch.float32, values, saved=saved[name])

    own = {name: slices_of(name, values) for name, values in weights.items()}
    optimizer: dict[str, dict[str, Any]] = {}
    for name in weights:
        parameter_state: dict[str, Any] = {"step": steps[name].clone()}
        for kind, values_by_name in moments.items():
            parameter_state[kind] = slices_of(name, values_by_name[name])
        optimizer[f"hf.{name}"] = parameter_state

    return {"model": _with_tied(own, manifest), "optimizer": {"state": optimizer}}


def load_step_counters(
    shards: Iterable[OptimizerShard], state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Copy the step counters of a loaded state into those of the shards.

    Each shard counts for itself: the step would raise a shared counter once per shard.

    Args:
        shards: What this rank's optimizer steps.
        state: The loaded `optimizer.state`.
    """
    for shard in shards:
        for name, _, _ in shard.parts():
            shard.state["step"].copy_(state[f"hf.{name}"]["step"])


def torch_param_groups(
    model: RoleModel, config: OptimizerConfig, rate: float
) -> list[dict[str, Any]]:
    """Return the optimizer's settings as torch keeps them.

    Backends that use torch's AdamW find them in the state.

    Args:
        model: The model as transformers has it, without values.
        config: The settings of AdamW.
        rate: The present learning rate.
    """
    names = {id(value): f"hf.{name}" for name, value in model.hf.named_parameters()}
    groups = []
    for group in build_adamw(model.parameters(), config).param_groups:
        parameters = [names[id(value)] for value in group["params"]]
        groups.append(group | {"lr": rate, "params": parameters})
    return groups
