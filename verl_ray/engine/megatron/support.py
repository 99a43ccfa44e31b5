"""Checks that megatron-core, as it is driven here, has a place for a model.

Invariant: a model that passes is computed as transformers computes it, and none of
its parameters is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch.distributed as dist

from verl_ray.backends.megatron_families import unsupported_settings
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.megatron.weight_map import MappedParameter
from verl_ray.errors import EngineError, ModelError
from verl_ray.models.role_model import RoleModel

_SHOWN_NAMES = 5
"""The most parameters that an error names."""


def require_supported(spec: EngineSpec, model: RoleModel) -> None:
    """Refuse a model, or an adapter, that megatron-core cannot compute here.

    `verl-ray check` reports the same for models before anything starts.

    Raises:
        EngineError: The role has an adapter.
        ModelError: megatron-core has no place for the model, or would compute it
            differently.
    """
    if spec.lora is not None:
        raise EngineError(
            f"{spec.role}.lora.rank = {spec.lora.rank}: the megatron backend has no"
            f" adapters; set it to 0, or take fsdp or engine as {spec.role}.backend"
        )

    settings = model.hf.config.to_dict()
    for reason, _ in unsupported_settings(spec.model_path, settings):
        raise ModelError(
            f"model.path: {reason}; take fsdp or engine as {spec.role}.backend"
        )


def require_complete(
    spec: EngineSpec,
    names: Collection[str],
    mapped: Iterable[MappedParameter],
    world_size: int,
) -> None:
    """Refuse a model of which a parameter is on no rank. Collective.

    Without this check such a parameter would be lost silently.

    Args:
        spec: The engine's specification, for messages.
        names: All parameters of the model.
        mapped: The parameters that this rank holds.
        world_size: Number of ranks.

    Raises:
        ModelError: Some parameters are on no rank; the message names them.
    """
    own = {region.name for parameter in mapped for region in parameter.regions}
    per_rank: list[set[str]] = [own] * world_size
    if world_size > 1:
        dist.all_gather_object(per_rank, own)

    missing = sorted(set(names).difference(*per_rank))
    if missing:
        raise ModelError(
            f"model.path: {spec.model_path} has {missing[:_SHOWN_NAMES]}, which have no"
            f" place in megatron's model; take fsdp or engine as {spec.role}.backend"
        )
